"""Replays of tiny workloads: when turns are sent, what is counted, and that all is repeatable."""

from collections.abc import Iterable
from typing import ClassVar

import msgspec
import pytest

from hear.blocks import chain_all
from hear.engine_view import EngineViews
from hear.errors import ConfigError
from hear.harness_view import HarnessView
from hear.harnesses.eval.replay.runner import Loop, Replay, replay
from hear.harnesses.eval.report.comparison import notes_of
from hear.harnesses.eval.report.results import RunResult, Sample, TurnRecord
from hear.harnesses.eval.workloads.workload import Session, Turn, Workload
from hear.harnesses.pool.dispatcher import ROUTE_WAIT_S
from hear.interfaces import Ask
from hear.messages import ContextClosed, ContextOpened, ContextPaused, Message, RequestDescribed

ENGINE = "h100-qwen3-8b"
BLOCK_SIZE = 512


class Listener:
    """Asks for nothing, and keeps what it hears and when."""

    name = "listener"
    observes: tuple[str, ...] = ("intent.>",)
    heard: ClassVar[list[tuple[float, str | None, Message]]] = []

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        self.heard.extend((h.now, key.context, message) for key, message in h.changes)
        return ()


LISTENER = f"{__name__}:Listener"


def turn(
    tokens: int = 1024,
    *,
    of: str = "all",
    at_s: float | None = None,
    think_s: float = 0.0,
    waits_for: tuple[str, ...] = (),
    output_tokens: int = 10,
) -> Turn:
    """A turn whose prompt begins like every other one ``of`` the same text."""
    return Turn(
        prompt_tokens=tokens,
        output_tokens=output_tokens,
        prompt_hashes=chain_all(f"{of} {n}".encode() for n in range(tokens // BLOCK_SIZE)),
        at_s=at_s,
        think_s=think_s,
        waits_for=waits_for,
    )


def session(id: str, *turns: Turn, start_s: float = 0.0) -> Session:
    return Session(id=id, turns=turns, start_s=start_s)


def sub_agent(id: str, *turns: Turn, after: int, start_s: float = 0.0) -> Session:
    return Session(
        id=id, turns=turns, start_s=start_s, parent=id.partition("/")[0], after_turns=after
    )


def run(
    *sessions: Session, policy: str = "fcfs", loop: Loop = "closed", engines: int = 1
) -> RunResult:
    workload = Workload(name="tiny", block_size=BLOCK_SIZE, sessions=sessions)
    return replay(workload, engine=ENGINE, policy=policy, loop=loop, engines=engines)


def records(result: RunResult) -> dict[str, TurnRecord]:
    assert result.problems == ()
    return {record.request: record for record in result.turns}


# -- when turns are sent ----------------------------------------------------------------------


def test_a_session_begins_at_its_start_or_at_its_first_recorded_time() -> None:
    got = records(run(session("a", turn(), start_s=3), session("b", turn(at_s=5), start_s=5)))
    assert got["a/1"].sent_s == 3
    assert got["b/1"].sent_s == 5


def test_in_a_closed_loop_a_turn_waits_for_the_one_before_it() -> None:
    got = records(run(session("a", turn(20_000, at_s=1), turn(at_s=1.1), turn(at_s=60))))
    assert got["a/1"].finished_s > 1.1
    assert got["a/2"].sent_s == got["a/1"].finished_s
    assert got["a/3"].sent_s == 60


def test_in_an_open_loop_a_turn_is_sent_at_its_time_in_any_case() -> None:
    got = records(run(session("a", turn(20_000, at_s=1), turn(at_s=1.1)), loop="open"))
    assert got["a/2"].sent_s == pytest.approx(1.1)
    assert got["a/1"].finished_s > 1.1


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_think_time_runs_from_the_end_of_the_turn_before(loop: Loop) -> None:
    got = records(run(session("a", turn(20_000), turn(think_s=5), turn(think_s=0)), loop=loop))
    assert got["a/2"].sent_s == pytest.approx(got["a/1"].finished_s + 5)
    assert got["a/3"].sent_s == got["a/2"].finished_s


def test_in_an_open_loop_a_turn_without_a_time_follows_the_one_before_it() -> None:
    got = records(run(session("a", turn(20_000, at_s=1), turn(think_s=5)), loop="open"))
    assert got["a/2"].sent_s == pytest.approx(got["a/1"].finished_s + 5)


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_a_sub_agent_starts_when_its_parent_has_completed_so_many_turns(loop: Loop) -> None:
    result = run(
        session("a", turn(20_000, at_s=2), turn(think_s=1), turn(think_s=30)),
        sub_agent("a/at once", turn(), after=0, start_s=0.5),
        sub_agent("a/one", turn(), after=1),
        sub_agent("a/two", turn(think_s=1), after=2, start_s=3),
        sub_agent("a/last", turn(), after=3),
        loop=loop,
    )
    got = records(result)
    assert len(got) == 7
    assert got["a/at once/1"].sent_s == pytest.approx(2.5)
    assert got["a/one/1"].sent_s == got["a/1"].finished_s
    assert got["a/two/1"].sent_s == pytest.approx(got["a/2"].finished_s + 3 + 1)
    assert got["a/last/1"].sent_s == got["a/3"].finished_s


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_a_turn_waits_for_its_sub_agents_and_thinks_after_that(loop: Loop) -> None:
    result = run(
        session("a", turn(), turn(think_s=2, waits_for=("a/slow", "a/quick"))),
        sub_agent("a/slow", turn(), turn(think_s=20), after=1),
        sub_agent("a/quick", turn(), after=0),
        loop=loop,
    )
    got = records(result)
    assert got["a/2"].sent_s == pytest.approx(got["a/slow/2"].finished_s + 2)


def test_a_sub_agent_may_outlive_its_parent_and_have_its_own() -> None:
    result = run(
        session("a", turn()),
        sub_agent("a/b", turn(), turn(think_s=100), after=1),
        Session(id="c", turns=(turn(),), parent="a/b", after_turns=2),
    )
    got = records(result)
    assert got["c/1"].sent_s == got["a/b/2"].finished_s > 100


# -- what is said -----------------------------------------------------------------------------


def test_the_harness_says_nothing_before_it_happens() -> None:
    Listener.heard.clear()
    result = run(
        session("a", turn(20_000), turn(think_s=5)),
        sub_agent("a/sub", turn(), after=1),
        policy=LISTENER,
    )
    got = records(result)
    expected = [
        (0, "a", ContextOpened),
        (0, "a", RequestDescribed),
        (got["a/1"].finished_s, "a", ContextPaused),
        (got["a/1"].finished_s, "a/sub", ContextOpened),
        (got["a/1"].finished_s, "a/sub", RequestDescribed),
        (got["a/sub/1"].finished_s, "a/sub", ContextPaused),
        # Only of a sub-agent is it known that it comes to an end.
        (got["a/sub/1"].finished_s, "a/sub", ContextClosed),
        (got["a/2"].sent_s, "a", RequestDescribed),
        (got["a/2"].finished_s, "a", ContextPaused),
    ]
    heard = [(when, context, type(m)) for when, context, m in Listener.heard]
    said = [entry for entry in heard if entry[2] in {kind for *_, kind in expected}]
    assert [entry[1:] for entry in said] == [entry[1:] for entry in expected]
    assert [entry[0] for entry in said] == pytest.approx([entry[0] for entry in expected])


# -- what is counted --------------------------------------------------------------------------


def test_a_request_that_is_too_long_is_counted_as_rejected_and_the_run_goes_on() -> None:
    result = run(
        session("a", turn(), turn(200_000, think_s=1), turn(think_s=1)), session("b", turn())
    )
    got = records(result)
    assert got["a/2"].status == "rejected"
    assert got["a/2"].reason.startswith("too_long")
    assert got["a/3"].sent_s == pytest.approx(got["a/2"].sent_s + 1)
    assert (result.row.turns, result.row.rejected) == (3, 1)
    assert result.row.ttft_max_s < 10


def test_what_is_reused_is_told_by_tier() -> None:
    result = run(session("a", turn(2048), turn(2048 + 512, think_s=1)))
    assert records(result)["a/2"].reused_tokens == {"gpu": 2048}
    assert result.row.reuse_pct == pytest.approx(100 * 2048 / 2560)
    assert result.row.reuse_all_pct == pytest.approx(100 * 2048 / (2048 + 2560))


def test_progress_counts_the_turns_that_have_ended() -> None:
    told: list[int] = []
    workload = Workload(
        name="tiny", block_size=BLOCK_SIZE, sessions=(session("a", turn(), turn()),)
    )
    replay(workload, engine=ENGINE, policy="fcfs", progress=told.append)
    assert told == [1, 2]


def test_load_seed_and_names_are_recorded() -> None:
    workload = Workload(name="tiny", block_size=BLOCK_SIZE, sessions=(session("a", turn()),))
    row = replay(workload, engine=ENGINE, policy="guard:9", load=50, seed=3).row
    assert (row.workload, row.engine, row.load, row.policy, row.seed) == (
        "tiny",
        ENGINE,
        50,
        "guard:9",
        3,
    )


def test_pressure_is_sampled_and_the_cost_of_the_protocol_is_kept() -> None:
    result = run(*crowd(), policy="cache-aware+guard:40")
    assert [s.time_s for s in result.samples] == sorted(s.time_s for s in result.samples)
    assert any(s.gpu_used > 0 for s in result.samples)
    cost = result.cost
    assert set(cost.decisions) == set(cost.controls) == {"cache-aware", "guard:40"}
    assert cost.messages["control"] == sum(cost.controls.values())
    assert cost.run_s > 0


# -- policies ---------------------------------------------------------------------------------


def crowd() -> list[Session]:
    """More at once than the engine can take in, half of them with a prefix in common."""
    return [
        session(
            f"s{n}",
            turn(20_000, of="all" if n % 2 else f"s{n}"),
            turn(20_512, of="all" if n % 2 else f"s{n}", think_s=1),
            start_s=n / 10,
        )
        for n in range(12)
    ]


def test_several_policies_act_in_one_replay() -> None:
    plain = run(*crowd())
    both = run(*crowd(), policy="cache-aware+guard:2+session-aware")
    assert all(both.cost.controls.values())
    assert both.row.operations["completed"] > 24
    assert both.row.operations_open == both.row.guard_violations == 0
    assert both.problems == both.row.policy_failures == ()
    assert sum(both.row.operations.values()) == sum(both.cost.controls.values())
    order = [record.request for record in both.turns]
    assert sorted(order) == sorted(record.request for record in plain.turns)
    assert order != [record.request for record in plain.turns]


def test_a_policy_that_raises_in_mid_run_is_told_of_and_the_rest_goes_on() -> None:
    result = run(*crowd(), policy="tests.harnesses.gone_wrong:Guards+session-aware")
    assert result.row.policy_failures == ("goes-wrong raised ValueError: on purpose",)
    assert result.row.turns == 24
    assert result.row.operations_open == 0
    assert result.problems == ()
    assert result.cost.controls["goes-wrong"] == 4  # three bounds, and the withdrawal
    assert result.cost.controls["session-aware"] > 24


def test_a_policy_that_answers_itself_without_end_is_left_out() -> None:
    result = run(*crowd(), policy="tests.harnesses.gone_wrong:Restless")
    [failure] = result.row.policy_failures
    assert failure.startswith("restless decided 1000 times at one instant")
    assert result.row.turns == 24
    assert result.row.operations_open == 0


def test_a_policy_or_an_engine_that_is_none_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no engine named"):
        replay(
            Workload(name="tiny", block_size=512, sessions=(session("a", turn()),)),
            engine="h100",
            policy="fcfs",
        )
    with pytest.raises(ConfigError, match="W is -1"):
        run(session("a", turn()), policy="guard:-1")


# -- several engines --------------------------------------------------------------------------


def engines_of(result: RunResult) -> dict[str, str]:
    return {request: record.engine for request, record in records(result).items()}


def test_without_a_routing_policy_the_engines_take_turns() -> None:
    result = run(*(session(f"s{n}", turn(), start_s=n) for n in range(5)), engines=2)
    assert list(engines_of(result).values()) == [f"engine{n % 2}" for n in range(5)]
    assert result.row.engines == 2
    alone = run(session("a", turn()))
    assert (alone.row.engines, alone.turns[0].engine) == (1, "engine0")


def test_the_time_in_the_pool_counts_as_waiting() -> None:
    alone, pooled = run(session("a", turn())), run(session("a", turn()), engines=2)
    assert pooled.turns[0].sent_s == alone.turns[0].sent_s == 0
    late = pooled.turns[0].first_token_s - alone.turns[0].first_token_s
    assert late == pytest.approx(ROUTE_WAIT_S)


def test_a_session_stays_where_its_context_is_under_cache_aware_routing() -> None:
    sessions = [
        session(
            f"s{n}", *(turn(4096 + 512 * k, of=f"s{n}", think_s=5) for k in range(4)), start_s=n
        )
        for n in range(4)
    ]
    routed = run(*sessions, policy="cache-aware-routing", engines=3)
    where = engines_of(routed)
    for n in range(4):
        assert len({where[f"s{n}/{k}"] for k in range(1, 5)}) == 1
    assert len(set(where.values())) == 3
    in_turn = run(*sessions, policy="round-robin", engines=3)
    assert routed.row.reuse_pct > 2 * in_turn.row.reuse_pct
    assert routed.row.operations == {"completed": 16 + 4}  # routes and withdrawals


def test_policies_of_each_engine_work_behind_a_pool_and_every_operation_ends_once() -> None:
    """Ordering, guard and retention go by the description that names the engine."""
    result = run(
        *crowd(), policy="cache-aware-routing+cache-aware+guard:2+session-aware", engines=2
    )
    assert all(result.cost.controls.values())
    assert result.cost.controls["cache-aware-routing"] == 24 + 3
    assert result.cost.controls["guard:2"] == 24 + 3
    assert result.row.operations_open == result.row.guard_violations == 0
    assert result.problems == result.row.policy_failures == ()
    assert sum(result.row.operations.values()) == sum(result.cost.controls.values())
    assert "unsupported" not in result.row.operations
    assert result.row.turns == 24


def test_two_routing_policies_that_disagree_are_arbitrated() -> None:
    result = run(*crowd(), policy="least-loaded+round-robin", engines=3)
    alone = run(*crowd(), policy="least-loaded", engines=3)
    assert engines_of(result) == engines_of(alone)
    assert result.row.operations["completed"] == 24 + 2 * 4
    assert result.row.operations["rejected"] + result.row.operations.get("failed", 0) == 24


def test_a_routing_policy_that_fails_leaves_the_engines_to_take_turns() -> None:
    result = run(*crowd(), policy="tests.harnesses.gone_wrong:Restless", engines=2)
    assert result.row.turns == 24
    assert result.row.operations_open == 0
    assert {record.engine for record in result.turns} == {"engine0", "engine1"}


# -- repeatable -------------------------------------------------------------------------------


def as_bytes(result: RunResult) -> bytes:
    """All but what the protocol cost, which is wall time."""
    return msgspec.json.encode((result.row, result.turns, result.samples, result.problems))


@pytest.mark.parametrize(
    ("policy", "engines"),
    [
        ("fcfs", 1),
        ("cache-aware+guard:2+session-aware", 1),
        ("fcfs", 2),
        ("cache-aware-routing+cache-aware+guard:2", 3),
    ],
)
def test_equal_arguments_give_equal_bytes(policy: str, engines: int) -> None:
    first, again = (run(*crowd(), policy=policy, engines=engines) for _ in range(2))
    assert as_bytes(first) == as_bytes(again)


def test_the_order_of_what_happens_at_once_is_fixed() -> None:
    sessions = [session(f"s{n}", turn(2000, of=f"s{n}")) for n in range(50)]
    first, again = run(*sessions, policy="guard:1"), run(*sessions, policy="guard:1")
    assert as_bytes(first) == as_bytes(again)


def test_a_listener_changes_nothing() -> None:
    plain, heard = run(*crowd()), run(*crowd(), policy=LISTENER)
    assert records(plain) == records(heard)


class Misspelt(Listener):
    """Observes what nobody publishes."""

    name = "misspelt"
    observes = ("state.*.*.residancy.>",)


def test_who_took_part_in_name_only_is_noted() -> None:
    sessions = [session(f"s{number}", turn(), turn(think_s=1.0)) for number in range(4)]
    row = run(*sessions, policy=f"{__name__}:Misspelt", engines=2).row
    assert sum(row.turns_by_engine.values()) == row.turns == 8
    assert list(row.turns_by_engine) == ["engine0", "engine1"]
    [note] = row.notes
    assert note.startswith("misspelt observes what no message matches: state.*.*.residancy.>: ")
    assert any("turns by engine: engine0" in line for line in notes_of([row]))
    [idle] = run(sessions[0], policy=LISTENER).row.notes
    assert idle.startswith("listener asked for nothing, in ")


def test_samples_are_told_from_the_start_of_the_run_on_whatever_clock() -> None:
    tiny = Workload(name="tiny", block_size=BLOCK_SIZE, sessions=(session("s", turn()),))
    made = Replay(tiny, "closed", lambda done: None, lambda *_: None)
    made._start_s = 1_796_112_611.0
    for time_s in (-3.0, 2.0, 9.5):
        sample = Sample(
            time_s=made._start_s + time_s,
            waiting=0,
            running=0,
            gpu_used=0.0,
            gpu_cached=0.0,
            restored_tokens=0,
        )
        made.audit.samples.append(sample)
    result = made.result(engine="e", engines=1, load=100, policy="p", seed=1, run_s=1.0)
    assert [sample.time_s for sample in result.samples] == [2.0, 9.5]
