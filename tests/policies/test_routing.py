"""Routing: what each policy goes by, what it takes note of, and what it does not assume."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.errors import ConfigError
from hear.interfaces import Ask, Policy
from hear.messages import (
    BlocksCleared,
    CapabilitiesReported,
    CostsReported,
    Key,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestOutcome,
    RequestReadinessChanged,
    ResidencyChanged,
    ResidencySnapshot,
    Route,
    Tier,
    WaitingRequest,
)
from hear.policies.backlog import LOST_S
from hear.policies.routing import CacheAwareRouting, LeastLoaded, RoundRobin
from tests.policies.stage import BLOCK_SIZE, Stage, removed, stored

ENGINES = ("a", "b", "c")
RATE = 100.0
"""Tokens a second that each engine computes; it loads twice as many."""


class Cluster(Stage):
    """A pool of three engines that have introduced themselves."""

    def __init__(self, policy: Policy, *, costs: bool = True) -> None:
        super().__init__(policy)
        for engine in ENGINES:
            self.introduce(engine, costs=costs)
        self.pool(*ENGINES)
        assert self.decide() == []

    def introduce(self, engine: str, *, costs: bool = True, rate: float = RATE) -> None:
        tiers = (Tier(name="gpu", num_blocks=100), Tier(name="cpu", num_blocks=100))
        self.snapshot(CapabilitiesReported(tiers=tiers, block_size=BLOCK_SIZE), engine)
        if costs:
            self.snapshot(
                CostsReported(
                    basis="estimated",
                    prefill_tokens_per_s=rate,
                    decode_step_s=0.01,
                    kv_bytes_per_token=1.0,
                    load_bytes_per_s=2 * RATE,
                ),
                engine,
            )
        self.snapshot(ResidencySnapshot(), engine)
        self.snapshot(QueueSnapshot(), engine)

    def ask(self, request: str, hashes: Sequence[int] = (), *, tokens: int | None = None) -> str:
        """Describe a request for the pool; returns the engine that it is routed to."""
        self.describe(request, hashes, tokens=tokens, engine="pool")
        return self.best(self.decide())[request]

    def best(self, asks: Iterable[Ask]) -> dict[str, str]:
        """The first target of each route, all of which are preferences of all engines."""
        found = {}
        for message, key in asks:
            assert isinstance(message, Route)
            assert message.force == "preference"
            assert set(message.targets) == set(ENGINES)
            assert message.reason
            assert key.engine == "pool"
            assert key.request is not None
            found[key.request] = message.targets[0]
        return found

    def holds(self, engine: str, hashes: Sequence[int], tier: str = "gpu") -> None:
        changes = ResidencyChanged(changes=(stored(hashes, tier=tier),))
        self.engine(changes, Key(engine=engine))

    def queues(self, engine: str, request: str, tokens: int = 0) -> None:
        waiting = WaitingRequest(request=request, since_s=self.now, prompt_tokens=tokens)
        self.engine(QueueChanged(waiting=(waiting,)), Key(engine=engine))

    def starts(self, engine: str, request: str) -> None:
        self.engine(QueueChanged(started=(request,)), Key(engine=engine))

    def ends(self, engine: str, request: str) -> None:
        self.engine(QueueChanged(ended=(request,)), Key(engine=engine))
        self.engine(RequestOutcome(status="completed"), Key(request=request, engine=engine))

    def serve(self, engine: str, request: str) -> None:
        """All that is said of a request that goes to an engine and is done there."""
        self.describe(request, engine=engine)
        self.queues(engine, request)
        self.starts(engine, request)
        self.ends(engine, request)
        assert self.decide() == []


EVERY = [RoundRobin, LeastLoaded, CacheAwareRouting]


@pytest.fixture(params=EVERY, ids=lambda policy: policy.__name__)
def any_cluster(request: pytest.FixtureRequest) -> Cluster:
    return Cluster(request.param())


# -- all of them --------------------------------------------------------------------------------


def test_each_request_of_a_pool_is_routed_once(any_cluster: Cluster) -> None:
    any_cluster.ask("r", tokens=100)
    any_cluster.describe("r", tokens=100, engine="pool")
    assert any_cluster.decide() == []


def test_a_request_that_is_described_for_an_engine_is_not_routed(any_cluster: Cluster) -> None:
    any_cluster.describe("r", tokens=100, engine="a")
    any_cluster.describe("s", tokens=100, engine=None)
    any_cluster.describe("t", tokens=100, engine="unheard of")
    assert any_cluster.decide() == []


def test_a_request_is_routed_when_it_is_ready(any_cluster: Cluster) -> None:
    any_cluster.describe("r", engine="pool", ready=False)
    assert any_cluster.decide() == []
    any_cluster.intent(RequestReadinessChanged(ready=True), Key(request="r"))
    assert set(any_cluster.best(any_cluster.decide())) == {"r"}


def test_a_route_names_the_version_of_the_context(any_cluster: Cluster) -> None:
    any_cluster.describe("r", engine="pool", context="c", turn=3)
    [(_, key)] = any_cluster.decide()
    assert key == Key(request="r", context="c", context_version=3, engine="pool")


def test_equal_requests_on_idle_engines_go_to_each_in_turn(any_cluster: Cluster) -> None:
    served = []
    for number in range(6):
        served.append(any_cluster.ask(f"r{number}", tokens=10))
        any_cluster.serve(served[-1], f"r{number}")
    assert served[:3] == served[3:] == list(ENGINES)


def test_a_burst_is_spread_before_any_engine_has_reported(any_cluster: Cluster) -> None:
    for number in range(6):
        any_cluster.describe(f"r{number}", tokens=100, engine="pool")
    best = any_cluster.best(any_cluster.decide())
    assert sorted(best.values()) == ["a", "a", "b", "b", "c", "c"]


def test_an_engine_that_has_left_the_pool_gets_no_more(any_cluster: Cluster) -> None:
    any_cluster.pool("a", "b")
    any_cluster.decide()
    for number in range(4):
        any_cluster.describe(f"r{number}", tokens=100, engine="pool")
    targets = [message.targets for message, _ in any_cluster.decide()]  # type: ignore[union-attr]
    assert all(set(each) == {"a", "b"} for each in targets)


def test_without_a_pool_nothing_is_asked() -> None:
    for policy in (RoundRobin(), LeastLoaded(), CacheAwareRouting()):
        stage = Stage(policy)
        stage.describe("r", engine="pool")
        assert stage.decide() == []


# -- least loaded -------------------------------------------------------------------------------


@pytest.fixture
def least() -> Cluster:
    return Cluster(LeastLoaded())


def test_the_fewest_prompt_tokens_outstanding_win_whether_they_wait_or_run(least: Cluster) -> None:
    least.queues("a", "x", 300)
    least.queues("b", "y", 200)
    least.queues("c", "z", 250)
    least.starts("b", "y")
    assert least.ask("r", tokens=60) == "b"
    assert least.ask("s", tokens=10) == "c"  # now that b is at 260
    least.ends("a", "x")
    assert least.ask("t", tokens=10) == "a"


def test_what_was_just_routed_counts_and_counts_once(least: Cluster) -> None:
    assert least.ask("r", tokens=100) == "a"
    least.describe("r", tokens=100, engine="a")
    least.queues("a", "r", 100)
    least.queues("b", "x", 90)
    least.queues("c", "y", 95)
    assert least.ask("s", tokens=4) == "b"
    assert least.ask("t", tokens=30) == "b"
    assert least.ask("u", tokens=30) == "c"
    least.ends("a", "r")
    assert least.ask("v", tokens=30) == "a"


def test_where_the_pool_sent_a_request_is_what_counts(least: Cluster) -> None:
    assert least.ask("r", tokens=100) == "a"
    least.describe("r", tokens=100, engine="b")  # another policy prevailed
    least.decide()
    least.queues("c", "x", 50)
    assert least.ask("s", tokens=60) == "a"
    assert least.ask("t", tokens=60) == "c"


def test_a_request_that_ends_without_having_been_seen_is_forgotten(least: Cluster) -> None:
    assert least.ask("r", tokens=100) == "a"
    least.engine(RequestOutcome(status="rejected"), Key(request="r", engine="a"))
    assert least.ask("s", tokens=1) == "b"
    assert least.ask("t", tokens=1) == "c"
    assert least.ask("u", tokens=1) == "a"


def test_a_request_that_never_comes_is_forgotten_after_a_while(least: Cluster) -> None:
    least.ask("r", tokens=100)
    least.queues("b", "x", 50)
    least.queues("c", "y", 50)
    least.now = LOST_S - 1
    assert least.ask("s", tokens=1) == "b"
    least.now = LOST_S + 1
    assert least.ask("t", tokens=1) == "a"


def test_an_engine_that_restarts_has_nothing_of_before(least: Cluster) -> None:
    least.queues("a", "x", 10)
    least.queues("b", "y", 20)
    least.queues("c", "z", 30)
    assert least.ask("r", tokens=1) == "a"
    least.restart("c")
    assert least.ask("s", tokens=1) == "c"


def test_after_a_gap_the_snapshot_of_the_queue_counts(least: Cluster) -> None:
    least.queues("a", "x", 10)
    least.queues("b", "y", 20)
    least.queues("c", "z", 30)
    least.decide()
    least.ends("c", "z")
    least.lose()
    waiting = WaitingRequest(request="new", since_s=0.0, prompt_tokens=5)
    least.snapshot(QueueSnapshot(waiting=(waiting,)), "c")
    assert least.ask("r", tokens=6) == "c"
    assert least.ask("s", tokens=6) == "a"


def test_an_engine_that_was_never_heard_of_comes_last() -> None:
    least = Cluster(LeastLoaded())
    for engine in ENGINES:
        least.queues(engine, f"at {engine}", 1000)
    least.pool("silent", *ENGINES)
    least.describe("r", tokens=1, engine="pool")
    [(message, _)] = least.decide()
    assert isinstance(message, Route)
    assert message.targets[-1] == "silent"


# -- cache-aware --------------------------------------------------------------------------------

PROMPT = list(range(1, 11))  # 100 tokens, a second to compute


@pytest.fixture
def aware() -> Cluster:
    return Cluster(CacheAwareRouting())


def reason(cluster: Cluster, request: str, hashes: Sequence[int] = PROMPT) -> str:
    cluster.describe(request, hashes, engine="pool")
    [(message, _)] = cluster.decide()
    assert isinstance(message, Route)
    return message.reason


def test_a_request_goes_where_its_prefix_is(aware: Cluster) -> None:
    aware.holds("b", PROMPT[:5])
    aware.holds("c", PROMPT[:8])
    assert reason(aware, "r") == "8 of 10 blocks on c, 0.2 s expected"


def test_a_prefix_with_a_hole_ends_at_the_hole(aware: Cluster) -> None:
    aware.holds("b", PROMPT[:3])
    aware.holds("c", PROMPT[:8])
    aware.engine(ResidencyChanged(changes=(removed(PROMPT[1:2]),)), Key(engine="c"))
    assert aware.ask("r", PROMPT) == "b"


@pytest.mark.parametrize(("running", "engine"), [(49, "b"), (51, "a")])
def test_it_waits_for_its_prefix_as_long_as_computing_it_anew_would_take(
    aware: Cluster, running: int, engine: str
) -> None:
    aware.holds("b", PROMPT[:5])
    aware.queues("b", "x", running)
    aware.starts("b", "x")
    assert aware.ask("r", PROMPT) == engine


@pytest.mark.parametrize(("waiting", "engine"), [(1, "a"), (2, "c")])
def test_what_it_computes_those_behind_it_wait_for(
    aware: Cluster, waiting: int, engine: str
) -> None:
    """Its own first token would come soonest on a, in 1.5 s, where others wait as well."""
    for number in range(waiting):
        aware.queues("a", f"at a {number}", 50 // waiting)
    for other in ("b", "c"):
        aware.queues(other, f"at {other}", 200 if other == "c" else 900)
        aware.starts(other, f"at {other}")
    assert aware.ask("r", PROMPT) == engine


def test_without_regard_for_others_the_first_token_of_its_own_counts_alone() -> None:
    greedy = Cluster(CacheAwareRouting(others=0))
    greedy.queues("a", "x", 25)
    greedy.queues("a", "y", 25)
    for other in ("b", "c"):
        greedy.queues(other, f"at {other}", 200)
        greedy.starts(other, f"at {other}")
    assert greedy.ask("r", PROMPT) == "a"
    assert greedy.policy.name == "cache-aware-routing:0"


@pytest.mark.parametrize("others", [-0.1, 1.1, float("nan")])
def test_a_regard_for_others_that_makes_no_sense_is_refused(others: float) -> None:
    with pytest.raises(ConfigError, match=r"others .*, expected a number in \[0, 1\]"):
        CacheAwareRouting(others)


def test_a_request_that_runs_is_computed_as_time_passes(aware: Cluster) -> None:
    aware.holds("b", PROMPT[:5])
    aware.queues("b", "x", 100)
    aware.starts("b", "x")
    assert aware.ask("r", PROMPT) == "a"
    aware.engine(RequestOutcome(status="rejected"), Key(request="r", engine="a"))
    aware.now = 0.6  # 40 of the 100 tokens are left
    assert aware.ask("s", PROMPT) == "b"


def test_what_a_slower_tier_holds_costs_the_time_to_load_it(aware: Cluster) -> None:
    aware.holds("b", PROMPT[:8], tier="cpu")
    assert reason(aware, "r") == "8 of 10 blocks on b, 0.6 s expected"  # 20 at 100, 80 at 200
    aware.engine(RequestOutcome(status="rejected"), Key(request="r", engine="b"))
    aware.holds("c", PROMPT[:5])
    assert aware.ask("s", PROMPT) == "c"


def test_transfers_that_are_ahead_delay_a_load_and_nothing_else(aware: Cluster) -> None:
    aware.holds("b", PROMPT[:8], tier="cpu")
    aware.snapshot(PressureReported(load_backlog_s=0.5), "b")
    aware.snapshot(PressureReported(load_backlog_s=9.0), "a")
    assert aware.ask("r", PROMPT) == "a"


def test_unknown_residency_is_no_reuse_and_not_an_empty_cache(aware: Cluster) -> None:
    aware.holds("a", PROMPT[:8])
    aware.holds("b", PROMPT[:2])
    aware.decide()
    aware.holds("a", [77])
    aware.lose()
    aware.holds("a", [78])  # a gap: what a holds is unknown now
    assert reason(aware, "r") == "2 of 10 blocks on b, 0.8 s expected"
    for engine, tokens in (("b", 200), ("c", 200)):
        aware.queues(engine, f"at {engine}", tokens)
    assert reason(aware, "s") == "unknown number of 10 blocks on a, 1.0 s expected"


def test_a_cache_that_was_cleared_is_empty(aware: Cluster) -> None:
    aware.holds("c", PROMPT)
    aware.holds("b", PROMPT[:2])
    aware.engine(ResidencyChanged(changes=(BlocksCleared(),)), Key(engine="c"))
    assert aware.ask("r", PROMPT) == "b"


def test_an_engine_that_restarts_has_nothing_to_reuse(aware: Cluster) -> None:
    aware.holds("c", PROMPT)
    aware.holds("b", PROMPT[:2])
    aware.decide()
    aware.restart("c")
    assert aware.ask("r", PROMPT) == "b"


def test_a_request_follows_another_with_its_prefix_before_that_is_reported(aware: Cluster) -> None:
    assert aware.ask("x", [50], tokens=10) == "a"
    assert aware.ask("r", PROMPT[:8]) == "b"
    assert aware.ask("s", PROMPT) == "c"  # 80 tokens would be ahead of it, and it of another
    assert aware.ask("t", [*PROMPT, 11]) == "c"


def test_what_was_to_come_is_not_expected_when_its_request_has_ended(aware: Cluster) -> None:
    first = aware.ask("r", PROMPT)
    aware.engine(RequestOutcome(status="failed"), Key(request="r", engine=first))
    aware.decide()
    assert aware.ask("s", PROMPT) != first


def test_the_pool_s_own_choice_is_where_the_prefix_will_be(aware: Cluster) -> None:
    assert aware.ask("r", PROMPT) == "a"
    aware.describe("r", PROMPT, engine="c")  # another policy prevailed
    aware.queues("c", "r", 100)
    aware.starts("c", "r")
    aware.decide()
    aware.now = 1.0
    assert aware.ask("s", PROMPT) == "c"


def test_a_faster_engine_is_taken_for_what_it_is(aware: Cluster) -> None:
    aware.introduce("c", rate=4 * RATE)
    aware.holds("b", PROMPT[:7])
    assert aware.ask("r", PROMPT) == "c"


def test_an_engine_without_costs_is_as_fast_as_the_slowest(aware: Cluster) -> None:
    aware.introduce("a", rate=RATE / 2)
    other = Cluster(CacheAwareRouting(), costs=False)
    other.introduce("a", rate=RATE / 2)
    other.holds("b", PROMPT[:5])
    assert reason(other, "r") == "5 of 10 blocks on b, 1.0 s expected"


@pytest.mark.parametrize("rate", [0.0, -5.0])
def test_a_rate_that_is_none_counts_as_not_known(aware: Cluster, rate: float) -> None:
    aware.introduce("b", rate=rate)
    aware.holds("b", PROMPT[:5])
    assert reason(aware, "r") == "5 of 10 blocks on b, 0.5 s expected"


def test_where_no_cost_is_known_tokens_are_compared() -> None:
    cluster = Cluster(CacheAwareRouting(), costs=False)
    cluster.holds("b", PROMPT[:5])
    assert reason(cluster, "r") == "5 of 10 blocks on b, 50 tokens ahead"
    cluster.queues("b", "x", 60)
    assert cluster.ask("s", PROMPT) == "a"


def test_of_idle_engines_the_one_that_holds_least_takes_what_is_new(aware: Cluster) -> None:
    aware.holds("a", [91, 92])
    aware.holds("b", [93])
    assert aware.ask("r", PROMPT) == "c"
    aware.serve("c", "r")
    aware.holds("c", [94, 95, 96])
    assert aware.ask("s", [200]) == "b"


# A block names the whole prompt up to it, as a hash does.
PROMPTS = st.lists(st.integers(1, 3), max_size=5).map(
    lambda steps: [int("".join(map(str, steps[: n + 1]))) for n in range(len(steps))]
)


@given(
    held=st.dictionaries(st.sampled_from(ENGINES), PROMPTS),
    prompts=st.lists(PROMPTS, min_size=1, max_size=8),
    queued=st.dictionaries(st.sampled_from(ENGINES), st.integers(0, 300)),
)
def test_on_no_engine_would_all_wait_less_than_on_the_one_that_is_chosen(
    held: dict[str, list[int]], prompts: list[list[int]], queued: dict[str, int]
) -> None:
    """Against a plain reading of the rule: all that is ahead, and all that is not there yet."""
    cluster = Cluster(CacheAwareRouting())
    ahead = dict.fromkeys(ENGINES, 0)
    waiting = dict.fromkeys(ENGINES, 0)
    there: dict[str, set[int]] = {engine: set() for engine in ENGINES}
    for engine, hashes in held.items():
        if hashes:
            cluster.holds(engine, hashes)
            there[engine] |= set(hashes)
    for engine, tokens in queued.items():
        cluster.queues(engine, f"at {engine}", tokens)
        ahead[engine] += tokens
        waiting[engine] += 1
    for number, prompt in enumerate(prompts):

        def missing(engine: str, prompt: list[int] = prompt) -> int:
            reused = 0
            for block in prompt:
                if block not in there[engine]:
                    break
                reused += 1
            tokens = len(prompt) * BLOCK_SIZE
            return max(tokens - reused * BLOCK_SIZE, min(1, tokens))

        cost = {
            engine: ahead[engine] + (1 + waiting[engine]) * missing(engine) for engine in ENGINES
        }
        chosen = cluster.ask(f"r{number}", prompt)
        assert cost[chosen] == min(cost.values())
        ahead[chosen] += missing(chosen)
        waiting[chosen] += 1
        there[chosen] |= set(prompt)
