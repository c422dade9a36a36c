"""Cache-Aware: the count of reusable blocks, who is hot, and when it speaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.blocks import pack
from hear.errors import ConfigError
from hear.interfaces import Ask
from hear.messages import (
    BlocksCleared,
    CapabilitiesReported,
    Key,
    Prioritise,
    QueueSnapshot,
    RequestDescribed,
    ResidencySnapshot,
)
from hear.policies.cache_aware import CacheAware
from tests.policies.stage import BLOCK_SIZE, ENGINE, Stage, removed, stored, waiting

PROMPT = [1, 2, 3, 4]


@pytest.fixture
def stage() -> Stage:
    return Stage(CacheAware())


def priorities(asks: list[Ask]) -> dict[str, int]:
    """What was asked for, each about one request of the engine and a preference."""
    found = {}
    for message, key in asks:
        assert isinstance(message, Prioritise)
        assert message.force == "preference"
        assert key == Key(request=key.request, engine=ENGINE)
        assert key.request is not None
        assert key.request not in found
        found[key.request] = message.priority
    return found


def test_a_hot_request_gets_minus_its_reusable_blocks(stage: Stage) -> None:
    stage.blocks(stored(PROMPT[:3]))
    stage.describe("r", PROMPT)
    stage.wait("r")
    assert priorities(stage.decide()) == {"r": -3}


def test_blocks_of_any_tier_count_up_to_the_first_that_is_missing(stage: Stage) -> None:
    stage.blocks(stored([1, 2]), stored([3], parent=2, tier="cpu"), stored([5], parent=4))
    stage.describe("r", [1, 2, 3, 4, 5])
    stage.wait("r")
    assert priorities(stage.decide()) == {"r": -3}


@pytest.mark.parametrize(("tokens", "hot"), [(40, True), (41, False), (39, True)])
def test_half_of_the_prompt_makes_a_request_hot_and_less_does_not(
    stage: Stage, tokens: int, hot: bool
) -> None:
    assert 2 * BLOCK_SIZE == 20
    stage.blocks(stored(PROMPT[:2]))
    stage.describe("r", PROMPT[: tokens // BLOCK_SIZE], tokens=tokens)
    stage.wait("r")
    assert priorities(stage.decide()) == ({"r": -2} if hot else {})


@pytest.mark.parametrize(("share", "priority"), [(0.75, {"r": -3}), (0.76, {})])
def test_the_share_can_be_chosen(share: float, priority: dict[str, int]) -> None:
    stage = Stage(CacheAware(share))
    stage.blocks(stored(PROMPT[:3]))
    stage.describe("r", PROMPT)
    stage.wait("r")
    assert priorities(stage.decide()) == priority


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan"), float("inf")])
def test_a_share_that_makes_no_sense_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="hot share"):
        CacheAware(share)


def test_a_cold_request_keeps_its_place_without_a_word(stage: Stage) -> None:
    stage.blocks(stored(PROMPT[:1]))
    stage.describe("r", PROMPT)
    stage.wait("r")
    assert stage.decide() == []


def test_a_request_is_ordered_anew_as_its_blocks_come_and_go(stage: Stage) -> None:
    stage.describe("r", PROMPT)
    stage.wait("r")
    assert stage.decide() == []
    stage.blocks(stored(PROMPT[:3]))
    assert priorities(stage.decide()) == {"r": -3}
    stage.blocks(stored(PROMPT[3:], parent=3))
    assert priorities(stage.decide()) == {"r": -4}
    stage.blocks(removed([4, 3]))
    assert priorities(stage.decide()) == {"r": -2}


def test_a_request_that_turns_cold_goes_back_to_the_default(stage: Stage) -> None:
    stage.blocks(stored(PROMPT))
    stage.describe("r", PROMPT)
    stage.wait("r")
    stage.decide()
    stage.blocks(removed([4, 3, 2]))
    assert priorities(stage.decide()) == {"r": 0}
    stage.blocks(removed([1]))
    assert stage.decide() == []


def test_nothing_is_asked_when_nothing_that_matters_has_changed(stage: Stage) -> None:
    stage.blocks(stored(PROMPT[:2]))
    stage.describe("r", PROMPT)
    stage.wait("r")
    stage.decide()
    stage.blocks(stored([90, 91]))
    stage.wait("r", priority=-2)
    assert stage.decide() == []
    stage.blocks(removed([2]), stored([2], parent=1))  # and back again within a burst
    assert stage.decide() == []
    stage.blocks(stored(PROMPT[:2], tier="cpu"))
    assert stage.decide() == []


def test_intent_and_queue_may_come_in_any_order(stage: Stage) -> None:
    stage.blocks(stored(PROMPT))
    stage.wait("r")
    assert stage.decide() == []
    stage.describe("r", PROMPT)
    assert priorities(stage.decide()) == {"r": -4}


def test_a_request_that_names_no_engine_is_ordered_where_it_waits(stage: Stage) -> None:
    stage.blocks(stored(PROMPT))
    stage.describe("r", PROMPT, engine=None)
    stage.wait("r")
    assert priorities(stage.decide()) == {"r": -4}


def test_nothing_is_asked_while_residency_is_unknown_and_a_snapshot_puts_it_right(
    stage: Stage,
) -> None:
    stage.describe("a", PROMPT)
    stage.describe("b", [11, 12])
    stage.wait("a", "b")
    stage.blocks(stored(PROMPT))
    assert priorities(stage.decide()) == {"a": -4}
    stage.blocks(stored([21]))
    stage.lose()
    stage.blocks(removed([4, 3, 2, 1]))
    assert stage.decide() == []
    assert not stage.view.residency_known
    stage.describe("c", [11, 12])
    stage.wait("c")
    stage.blocks(stored([11, 12]))
    assert stage.decide() == []
    stage.snapshot(ResidencySnapshot(chains=(stored([1, 2, 3]), stored([11, 12]))))
    assert priorities(stage.decide()) == {"a": -3, "b": -2, "c": -2}
    stage.blocks(removed([12]))
    assert priorities(stage.decide()) == {"b": -1, "c": -1}


def test_a_snapshot_that_tells_nothing_new_changes_nothing(stage: Stage) -> None:
    stage.describe("a", PROMPT)
    stage.wait("a")
    stage.blocks(stored(PROMPT))
    stage.decide()
    stage.blocks(stored([21]))
    stage.lose()
    stage.blocks(stored([22]))
    stage.decide()
    stage.snapshot(ResidencySnapshot(chains=(stored(PROMPT),)))
    assert stage.decide() == []


def watched(stage: Stage, request: str) -> bool:
    try:
        stage.view.residency.count(request)
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("how", ["start", "leave"])
def test_a_request_is_watched_only_as_long_as_it_waits(stage: Stage, how: str) -> None:
    stage.describe("r", PROMPT)
    stage.wait("r")
    stage.decide()
    assert watched(stage, "r")
    getattr(stage, how)("r")
    stage.blocks(stored(PROMPT))
    assert stage.decide() == []
    assert not watched(stage, "r")


def test_one_that_starts_in_the_burst_it_came_with_is_left_alone(stage: Stage) -> None:
    stage.blocks(stored(PROMPT))
    stage.describe("r", PROMPT)
    stage.wait("r")
    stage.start("r")
    assert stage.decide() == []
    assert not watched(stage, "r")


def test_a_snapshot_of_the_queue_ends_the_watch_of_those_who_are_gone(stage: Stage) -> None:
    stage.describe("gone", PROMPT)
    stage.describe("stays", PROMPT)
    stage.describe("new", PROMPT)
    stage.wait("gone", "stays")
    stage.decide()
    stage.start("gone")
    stage.wait("new")
    stage.lose()
    stage.queue("stays", "new")
    stage.blocks(stored(PROMPT))
    assert priorities(stage.decide()) == {"stays": -4, "new": -4}
    assert not watched(stage, "gone")


def test_a_preempted_request_is_known_to_have_kept_its_priority(stage: Stage) -> None:
    stage.blocks(stored(PROMPT))
    stage.describe("r", PROMPT)
    stage.wait("r")
    stage.decide()
    stage.start("r")
    stage.decide()
    stage.blocks(BlocksCleared())
    stage.wait("r", priority=-4)
    assert priorities(stage.decide()) == {"r": 0}


def test_after_a_restart_a_request_of_the_same_name_is_new(stage: Stage) -> None:
    stage.blocks(stored(PROMPT))
    stage.describe("r", PROMPT)
    stage.wait("r")
    assert priorities(stage.decide()) == {"r": -4}
    stage.restart()
    stage.blocks(stored(PROMPT))
    stage.wait("r")
    assert priorities(stage.decide()) == {"r": -4}


def test_after_a_restart_nothing_of_before_is_watched(stage: Stage) -> None:
    stage.describe("r", PROMPT)
    stage.wait("r")
    stage.decide()
    stage.restart()
    stage.blocks(stored(PROMPT))
    assert stage.decide() == []
    assert not watched(stage, "r")


def test_a_request_described_again_is_counted_by_its_new_prompt(stage: Stage) -> None:
    stage.blocks(stored(PROMPT))
    stage.describe("r", PROMPT)
    stage.wait("r")
    stage.decide()
    stage.describe("r", [1, 2, 33])
    assert priorities(stage.decide()) == {"r": -2}
    stage.blocks(removed([2]))
    assert priorities(stage.decide()) == {"r": 0}


# -- against a rescan -------------------------------------------------------------------------

# Prompts over a small forest of blocks, named so that 112 follows 11 follows 1.
_PROMPTS = [[1, 11, 111, 1111], [1, 11, 112], [1, 12, 121, 1211, 12111], [2, 21], [3]]
_CHAINS = [prompt[:n] for prompt in _PROMPTS for n in range(1, len(prompt) + 1)]
_BLOCKS = sorted({block for prompt in _PROMPTS for block in prompt})
_REQUESTS = [f"r{number}" for number in range(4)]

_EVENTS = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(_CHAINS), st.sampled_from(["gpu", "cpu"])),
    st.tuples(
        st.just("remove"),
        st.lists(st.sampled_from(_BLOCKS), min_size=1, max_size=3),
        st.sampled_from(["gpu", "cpu"]),
    ),
    st.tuples(st.just("clear"), st.sampled_from(["gpu", "cpu", None])),
    st.tuples(st.just("wait"), st.sampled_from(_REQUESTS), st.sampled_from(_PROMPTS)),
    st.tuples(st.just("start"), st.sampled_from(_REQUESTS)),
    st.tuples(st.just("lose")),
    st.tuples(st.just("snapshot")),
    st.tuples(st.just("decide")),
)


class Rescan:
    """An engine with its cache, and what each waiting request's priority should be."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[int]] = {"gpu": set(), "cpu": set()}
        self.waiting: dict[str, list[int]] = {}
        self.priorities: dict[str, int] = {}

    def count(self, request: str) -> int:
        count = 0
        for block in self.waiting[request]:
            if not any(block in held for held in self.tiers.values()):
                break
            count += 1
        return count

    def wanted(self, request: str) -> int:
        count = self.count(request)
        return -count if 2 * count >= len(self.waiting[request]) else 0


@given(st.lists(_EVENTS, max_size=60))
def test_the_order_equals_that_of_a_rescan_whatever_happens(
    events: list[tuple[object, ...]],
) -> None:
    stage, model = Stage(CacheAware()), Rescan()
    known = True
    for event in [*events, ("snapshot",), ("decide",)]:
        match event:
            case "store", list(chain), str(tier):
                model.tiers[tier].update(chain)
                stage.blocks(stored(chain, tier=tier))
            case "remove", list(blocks), str(tier):
                model.tiers[tier].difference_update(blocks)
                stage.blocks(removed(blocks, tier=tier))
            case "clear", None:
                for held in model.tiers.values():
                    held.clear()
                stage.blocks(BlocksCleared())
            case "clear", str(tier):
                model.tiers[tier].clear()
                stage.blocks(BlocksCleared(tier=tier))
            case "wait", str(request), list(prompt):
                if request not in model.waiting:
                    model.waiting[request] = prompt
                    model.priorities[request] = 0
                    stage.describe(request, prompt)
                    stage.wait(request)
            case "start", str(request):
                if model.waiting.pop(request, None) is not None:
                    stage.start(request)
            case ("lose",):
                settle(stage, model, known)
                stage.blocks(stored([99]))
                stage.lose()
                stage.blocks(removed([99]))
                known = False
            case ("snapshot",):
                chains = tuple(
                    stored([block], parent=block // 10 or None, tier=tier)
                    for tier, held in model.tiers.items()
                    for block in sorted(held)
                )
                stage.snapshot(ResidencySnapshot(chains=chains))
                known = True
            case ("decide",):
                settle(stage, model, known)


def settle(stage: Stage, model: Rescan, known: bool) -> None:
    for request, priority in priorities(stage.decide()).items():
        assert known
        assert model.priorities[request] != priority, "no control when nothing changed"
        model.priorities[request] = priority
    if known:
        for request in model.waiting:
            assert stage.view.residency.count(request) == model.count(request)
            assert model.priorities[request] == model.wanted(request)


def test_a_queue_snapshot_tells_of_requests_too(stage: Stage) -> None:
    stage.blocks(stored(PROMPT))
    stage.describe("r", PROMPT)
    stage.snapshot(QueueSnapshot(waiting=(waiting("r", priority=-4),)))
    assert stage.decide() == []
    stage.blocks(removed([4]))
    assert priorities(stage.decide()) == {"r": -3}


def test_hashes_that_are_not_made_as_the_engines_are_say_nothing_of_reuse(stage: Stage) -> None:
    stage.engine(CapabilitiesReported(block_size=BLOCK_SIZE, hash_scheme="vllm-sha256-64"))
    stage.blocks(stored(PROMPT))
    for request, scheme in (("other", "hear-blake2b-64"), ("same", "vllm-sha256-64")):
        described = RequestDescribed(
            prompt_tokens=len(PROMPT) * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            prefix_hashes=pack(PROMPT),
            hash_scheme=scheme,
        )
        stage.intent(described, Key(request=request, engine=ENGINE))
        stage.wait(request)
    assert [key.request for _, key in stage.decide()] == ["same"]


def test_an_engine_that_takes_priorities_with_requests_is_asked_before_they_come(
    stage: Stage,
) -> None:
    stage.engine(CapabilitiesReported(block_size=BLOCK_SIZE, at_submission=("prioritise",)))
    stage.blocks(stored(PROMPT))
    stage.decide()
    stage.describe("hot", PROMPT)
    stage.describe("cold", [7, 8, 9])
    assert priorities(stage.decide()) == {"hot": -4}
    stage.wait("hot", "cold")
    stage.blocks(removed(PROMPT))
    assert stage.decide() == []  # it would be turned down: already_submitted
