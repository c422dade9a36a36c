"""What each engine has yet to do: what counts, what no longer does, and that the sums are right."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engine_view import EngineViews
from hear.messages import (
    CostsReported,
    Key,
    Message,
    QueueChanged,
    QueueSnapshot,
    RunningRequest,
    WaitingRequest,
)
from hear.policies.backlog import LOST_S, Backlogs

RATE = 100.0
KEY = Key(engine="e")


class Engine:
    """An engine that says what it does, and the backlog that is made of it."""

    def __init__(self, *, costs: bool = True) -> None:
        self.backlogs = Backlogs()
        self.now = 0.0
        self._s = EngineViews()
        self._sequencer = Sequencer("e")
        if costs:
            self.snapshot(
                CostsReported(
                    basis="estimated",
                    prefill_tokens_per_s=RATE,
                    decode_step_s=0.01,
                    kv_bytes_per_token=1.0,
                )
            )

    def change(
        self,
        waiting: dict[str, int] | None = None,
        started: Iterable[str] = (),
        ended: Iterable[str] = (),
    ) -> list[str]:
        listed = tuple(waits(request, tokens) for request, tokens in (waiting or {}).items())
        changed = QueueChanged(waiting=listed, started=tuple(started), ended=tuple(ended))
        return self._hear(changed, snapshot=False)

    def snapshot(self, message: Message) -> list[str]:
        return self._hear(message, snapshot=True)

    def restart(self) -> None:
        self._sequencer.restart()

    def look(self) -> list[str]:
        """Let time pass without a message."""
        return self.backlogs.observe(EngineViews(), self.now)

    def _hear(self, message: Message, *, snapshot: bool) -> list[str]:
        wrap = self._sequencer.wrap_snapshot if snapshot else self._sequencer.wrap
        envelope = wrap(message, KEY, self.now)
        body = open_body(envelope)
        assert body is not None
        self._s.apply(envelope, body)
        gone = self.backlogs.observe(self._s, self.now)
        self._s.clear_changes()
        return gone

    @property
    def sums(self) -> tuple[int, int, float]:
        """Prompt tokens outstanding, requests that wait, and tokens ahead."""
        of = self.backlogs
        return of.outstanding("e"), of.num_waiting("e"), of.ahead("e", self.now, RATE)


def waits(request: str, tokens: int) -> WaitingRequest:
    return WaitingRequest(request=request, since_s=0.0, prompt_tokens=tokens)


def test_an_engine_that_nobody_has_heard_of_has_nothing_to_do() -> None:
    assert Engine().sums == (0, 0, 0.0)


def test_what_is_expected_counts_with_what_of_it_is_to_be_computed() -> None:
    e = Engine()
    e.backlogs.expect("r", "e", 100, 30, now=0.0)
    assert e.sums == (100, 1, 30.0)
    e.change(waiting={"r": 100})  # the engine has it, and it counts once
    assert e.sums == (100, 1, 30.0)


def test_what_nobody_has_told_of_is_computed_whole() -> None:
    e = Engine()
    e.change(waiting={"r": 100})
    assert e.sums == (100, 1, 100.0)


def test_what_has_started_is_computed_as_time_passes_and_stays_outstanding() -> None:
    e = Engine()
    e.change(waiting={"r": 100, "s": 50})
    e.change(started=["r"])
    assert e.sums == (150, 1, 150.0)
    e.now = 0.4
    assert e.sums == (150, 1, 110.0)
    e.now = 9.0
    assert e.sums == (150, 1, 50.0)
    assert e.change(ended=["r"]) == ["r"]
    assert e.sums == (50, 1, 50.0)


def test_what_was_preempted_waits_and_is_computed_anew() -> None:
    e = Engine()
    e.change(waiting={"r": 100})
    e.change(started=["r"])
    e.now = 2.0
    e.change(waiting={"r": 100})
    assert e.sums == (100, 1, 100.0)


def test_a_request_that_goes_elsewhere_is_no_longer_here() -> None:
    e = Engine()
    e.backlogs.expect("r", "e", 100, 100, now=0.0)
    e.backlogs.expect("r", "other", 100, 60, now=0.0)
    assert e.sums == (0, 0, 0.0)
    assert e.backlogs.outstanding("other") == 100


def test_a_request_that_has_ended_or_never_comes_is_forgotten() -> None:
    e = Engine()
    e.backlogs.expect("r", "e", 100, 100, now=0.0)
    e.backlogs.expect("s", "e", 100, 100, now=1.0)
    e.backlogs.end("r")
    assert e.sums == (100, 1, 100.0)
    e.now = LOST_S
    assert e.look() == []
    e.now = 1 + LOST_S
    assert e.look() == ["s"]
    assert e.sums == (0, 0, 0.0)


def test_one_that_the_engine_has_may_wait_for_ever() -> None:
    e = Engine()
    e.backlogs.expect("r", "e", 100, 100, now=0.0)
    e.change(waiting={"r": 100})
    e.now = 100 * LOST_S
    assert e.look() == []
    assert e.sums == (100, 1, 100.0)


def test_a_snapshot_replaces_what_was_reported_and_not_what_is_on_its_way() -> None:
    e = Engine()
    e.change(waiting={"old": 10, "kept": 20})
    e.backlogs.expect("coming", "e", 100, 40, now=0.0)
    snapshot = QueueSnapshot(waiting=(waits("new", 7),), running=(RunningRequest(request="kept"),))
    assert e.snapshot(snapshot) == ["old"]
    assert e.sums == (127, 2, 67.0)


def test_an_engine_that_restarts_has_lost_what_it_had_and_not_what_is_on_its_way() -> None:
    e = Engine()
    e.change(waiting={"r": 100, "s": 50})
    e.change(started=["r"])
    e.backlogs.expect("coming", "e", 30, 30, now=0.0)
    e.restart()
    assert e.snapshot(QueueSnapshot()) == ["r", "s"]
    assert e.sums == (30, 1, 30.0)


def test_where_the_rate_is_not_known_what_has_started_is_not_in_the_way() -> None:
    e = Engine(costs=False)
    e.change(waiting={"r": 100})
    e.change(started=["r"])
    e.change(waiting={"s": 10})
    assert e.sums[2] == pytest.approx(10.0)


NAMES = st.sampled_from("abcd")
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("expect"), NAMES, st.integers(0, 100)),
        st.tuples(st.just("wait"), NAMES, st.integers(0, 100)),
        st.tuples(st.just("start"), NAMES),
        st.tuples(st.just("end"), NAMES),
        st.tuples(st.just("forget"), NAMES),
        st.tuples(st.just("snapshot"), st.sets(NAMES), st.sets(NAMES)),
        st.tuples(st.just("restart")),
        st.tuples(st.just("pass"), st.sampled_from([0.1, 1.0, LOST_S])),
    ),
    max_size=30,
)


@given(acts=ACTS)
def test_whatever_happens_nothing_is_negative_and_nothing_is_left_when_all_have_ended(
    acts: list[tuple[object, ...]],
) -> None:
    e = Engine()
    for act in acts:
        match act:
            case ("expect", str(request), int(tokens)):
                e.backlogs.expect(request, "e", tokens, tokens // 2, now=e.now)
            case ("wait", str(request), int(tokens)):
                e.change(waiting={request: tokens})
            case ("start", str(request)):
                e.change(started=[request])
            case ("end", str(request)):
                e.change(ended=[request])
            case ("forget", str(request)):
                e.backlogs.end(request)
            case ("snapshot", set(waiting), set(running)):
                listed = tuple(waits(r, 5) for r in sorted(waiting - running))
                batch = tuple(RunningRequest(request=r) for r in sorted(running))
                e.snapshot(QueueSnapshot(waiting=listed, running=batch))
            case ("restart",):
                e.restart()
                e.snapshot(QueueSnapshot())
            case ("pass", float(seconds)):
                e.now += seconds
                e.look()
        assert all(value >= 0 for value in e.sums)
        assert e.sums[1] <= 4
    for request in "abcd":
        e.backlogs.end(request)
    e.now += 1e6
    assert e.sums == (0, 0, 0.0)
