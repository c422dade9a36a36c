"""The audit, fed by hand: what keeps the promises passes, and what breaks one is told."""

import pytest
import trio
import trio.testing

from hear.buses.memory import MemoryBus
from hear.delivery import Sequencer
from hear.harnesses.eval.replay.audit import Audit
from hear.messages import (
    BoundWait,
    Key,
    Message,
    OperationOutcome,
    OperationStatus,
    PressureReported,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    TierPressure,
    WaitingRequest,
    Withdraw,
)


class Run:
    """A run told by hand, message by message."""

    def __init__(self) -> None:
        self.audit = Audit()
        self.now = 0.0
        self._sources = {name: Sequencer(name) for name in ("engine", "policy", "other")}

    def say(self, message: Message, key: Key, *, source: str = "engine") -> None:
        self.audit.hear(self._sources[source].wrap(message, key, self.now))

    def control(
        self, operation: str, message: Message | None = None, *, source: str = "policy"
    ) -> None:
        key = Key(operation=operation, request="r", engine="engine")
        self.say(message or Prioritise(priority=-1), key, source=source)

    def outcome(self, operation: str, *statuses: OperationStatus, reason: str = "") -> None:
        for status in statuses:
            outcome = OperationOutcome(status=status, reason=reason)
            self.say(outcome, Key(operation=operation, engine="engine"))

    def guard(self, request: str, max_wait_s: float = 40, *, source: str = "policy") -> str:
        """Bound a request's wait, and let the engine accept it; returns the operation."""
        operation = f"guard-{request}-{max_wait_s:g}"
        key = Key(operation=operation, request=request, engine="engine")
        self.say(BoundWait(max_wait_s=max_wait_s, force="requirement"), key, source=source)
        self.outcome(operation, "accepted")
        return operation

    def restart(self) -> None:
        self._sources["engine"].restart()

    def wait(self, *requests: str, since_s: float | None = None) -> None:
        since = self.now if since_s is None else since_s
        waiting = tuple(WaitingRequest(request=r, since_s=since) for r in requests)
        self.say(QueueChanged(waiting=waiting), Key(engine="engine"))

    def start(self, *requests: str) -> None:
        self.say(QueueChanged(started=requests), Key(engine="engine"))

    def end(self, *requests: str) -> None:
        self.say(QueueChanged(ended=requests), Key(engine="engine"))

    @property
    def problems(self) -> list[str]:
        return self.audit.problems()


@pytest.fixture
def run() -> Run:
    return Run()


NO_END = ["1 operations have no terminal outcome"]
TWO_ENDS = ["1 operations have more than one terminal outcome"]
PASSED = ["1 requests passed one that had waited too long"]


# -- operations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statuses",
    [("accepted", "completed"), ("accepted", "failed"), ("rejected",), ("unsupported",)],
)
def test_an_operation_that_ends_once_is_fine(run: Run, statuses: tuple[OperationStatus]) -> None:
    run.control("op")
    run.outcome("op", *statuses)
    assert run.problems == []
    assert run.audit.outcomes == {statuses[-1]: 1}
    assert run.audit.num_open == 0


@pytest.mark.parametrize("statuses", [(), ("accepted",)])
def test_an_operation_without_an_end_is_caught(run: Run, statuses: tuple[OperationStatus]) -> None:
    run.control("op")
    run.outcome("op", *statuses)
    assert run.problems == NO_END
    assert run.audit.num_open == 1


@pytest.mark.parametrize("second", ["completed", "failed"])
def test_an_operation_with_two_ends_is_caught(run: Run, second: OperationStatus) -> None:
    run.control("op")
    run.outcome("op", "accepted", "completed", second)
    assert run.problems == TWO_ENDS
    assert run.audit.outcomes == {"completed": 1}


def test_who_asks_again_may_be_answered_again_with_the_same(run: Run) -> None:
    run.control("op")
    run.control("op")
    run.outcome("op", "accepted", "completed", "completed")
    assert run.problems == []
    run.outcome("op", "completed")
    assert run.problems == TWO_ENDS


def test_an_engine_that_has_started_again_may_tell_an_end_again(run: Run) -> None:
    run.control("op")
    run.outcome("op", "completed")
    for _ in range(3):
        run.restart()
        run.outcome("op", "completed")
    assert run.problems == []
    run.outcome("op", "completed")
    assert run.problems == TWO_ENDS


def test_an_engine_that_has_started_again_may_not_tell_another_end(run: Run) -> None:
    run.control("op")
    run.outcome("op", "completed")
    run.restart()
    run.outcome("op", "failed")
    assert run.problems == TWO_ENDS


def test_who_asks_again_may_not_be_answered_otherwise(run: Run) -> None:
    run.control("op")
    run.control("op")
    run.outcome("op", "completed", "failed")
    assert run.problems == TWO_ENDS


def test_a_bound_that_was_completed_since_its_request_ran_holds_when_that_is_preempted(
    run: Run,
) -> None:
    run.wait("r")
    run.start("r")
    run.control("guard", BoundWait(max_wait_s=40.0, force="requirement"))
    run.outcome("guard", "completed")
    run.now = 50.0
    run.wait("r", since_s=0.0)  # it was preempted
    run.wait("later")
    run.start("later")
    assert run.problems == PASSED


def test_a_bound_that_was_replaced_does_not_come_back_with_its_end(run: Run) -> None:
    run.wait("r")
    run.control("old", BoundWait(max_wait_s=1.0))
    run.outcome("old", "accepted")
    run.control("new", BoundWait(max_wait_s=100.0))
    run.outcome("new", "accepted")
    run.outcome("old", "completed", reason="renewed")
    run.now = 50.0
    run.wait("later")
    run.start("later")
    assert run.audit.guard_violations == 0


def test_a_control_that_cannot_be_read_is_an_operation_too(run: Run) -> None:
    run.control("op", Prioritise(priority="first"))  # type: ignore[arg-type]
    assert run.problems == NO_END
    run.outcome("op", "rejected", reason="malformed")
    assert run.problems == []


def test_a_control_without_an_operation_is_owed_nothing(run: Run) -> None:
    run.say(Prioritise(priority=1), Key(request="r", engine="engine"), source="policy")
    assert run.problems == []


# -- waiting ----------------------------------------------------------------------------------


def test_a_later_request_that_passes_one_which_has_waited_too_long_is_caught(run: Run) -> None:
    run.guard("early")
    run.wait("early")
    run.now = 10
    run.wait("late")
    run.now = 41
    run.start("late")
    assert run.audit.guard_violations == 1
    assert run.problems == [*NO_END, *PASSED]


def test_one_that_has_not_waited_at_all_may_not_pass_either(run: Run) -> None:
    run.guard("early")
    run.wait("early")
    run.now = 41
    run.start("just arrived")
    assert run.audit.guard_violations == 1


@pytest.mark.parametrize(("after_s", "violations"), [(40.05, 0), (40.2, 1)])
def test_who_becomes_overdue_while_an_engine_has_yet_to_tell_whom_it_chose_was_not_passed(
    run: Run, after_s: float, violations: int
) -> None:
    run.audit = Audit(slack_s=0.1)
    run.guard("early")
    run.wait("early")
    run.now = 10
    run.wait("late")
    run.now = after_s
    run.start("late")
    assert run.audit.guard_violations == violations


def test_each_that_passes_is_counted(run: Run) -> None:
    run.guard("early")
    run.wait("early")
    run.now = 10
    run.wait("a", "b")
    run.now = 41
    run.start("a", "b")
    assert run.audit.guard_violations == 2


def test_within_the_bound_anyone_may_pass(run: Run) -> None:
    run.guard("early")
    run.wait("early")
    run.now = 39
    run.wait("late")
    run.now = 40
    run.start("late")
    assert run.audit.guard_violations == 0


def test_one_that_started_with_it_has_not_passed_it(run: Run) -> None:
    run.guard("early")
    run.wait("early")
    run.now = 10
    run.wait("late")
    run.now = 41
    run.start("late", "early")
    assert run.audit.guard_violations == 0


def test_an_earlier_one_may_go_first_and_so_may_one_that_has_waited_too_long_itself(
    run: Run,
) -> None:
    run.wait("earliest")
    run.now = 1
    run.guard("early")
    run.wait("early")
    run.guard("also guarded", 5)
    run.now = 20
    run.wait("also guarded")
    run.now = 45
    run.start("earliest")
    run.start("also guarded")
    assert run.audit.guard_violations == 0


def test_a_later_bound_counts(run: Run) -> None:
    first = run.guard("early", 10)
    run.wait("early")
    run.guard("early", 100)
    run.outcome(first, "completed", reason="renewed")
    run.now = 5
    run.wait("late")
    run.now = 50
    run.start("late")
    assert run.audit.guard_violations == 0
    run.now = 101
    run.start("another")
    assert run.audit.guard_violations == 1


def test_a_bound_that_the_engine_turned_down_binds_nobody(run: Run) -> None:
    run.say(BoundWait(max_wait_s=40), Key(operation="op", request="early"), source="policy")
    run.outcome("op", "unsupported")
    run.wait("early")
    run.now = 50
    run.start("late")
    assert run.problems == []


def test_a_bound_that_failed_binds_nobody(run: Run) -> None:
    operation = run.guard("early")
    run.outcome(operation, "failed", reason="outranked")
    run.wait("early")
    run.now = 50
    run.start("late")
    assert run.problems == []


def test_when_a_policy_has_withdrawn_its_bounds_are_over_and_no_others(run: Run) -> None:
    run.guard("mine")
    run.guard("theirs", source="other")
    run.wait("mine")
    run.now = 10
    run.wait("theirs")
    run.control("leave", Withdraw())
    run.now = 45
    run.outcome("leave", "completed")
    run.start("late")
    assert run.audit.guard_violations == 0
    run.now = 51
    run.start("later")
    assert run.audit.guard_violations == 1


def test_one_that_comes_back_to_the_queue_is_still_guarded(run: Run) -> None:
    operation = run.guard("early")
    run.wait("early")
    run.start("early")
    run.outcome(operation, "completed")
    run.wait("early", since_s=0)
    run.now = 41
    run.start("late")
    assert run.audit.guard_violations == 1


def test_one_that_has_ended_is_not_passed(run: Run) -> None:
    run.guard("early")
    run.wait("early")
    run.end("early")
    run.now = 41
    run.start("late")
    assert run.audit.guard_violations == 0


def test_a_snapshot_tells_who_waits(run: Run) -> None:
    run.guard("early")
    waiting = (WaitingRequest(request="early", since_s=0),)
    run.say(QueueSnapshot(waiting=waiting), Key(engine="engine"))
    run.now = 41
    run.start("late")
    assert run.audit.guard_violations == 1


def test_each_engine_has_a_queue_of_its_own(run: Run) -> None:
    """One that waits too long on an engine is not passed by what starts on another."""
    run.guard("early")
    run.wait("early")
    run.now = 41
    run.say(QueueChanged(started=("late",)), Key(engine="other"), source="other")
    assert run.audit.guard_violations == 0
    run.start("later")
    assert run.audit.guard_violations == 1


def test_a_bound_holds_on_the_engine_that_took_it_on(run: Run) -> None:
    run.guard("early")
    waiting = (WaitingRequest(request="early", since_s=0),)
    run.say(QueueChanged(waiting=waiting), Key(engine="other"), source="other")
    run.now = 41
    run.say(QueueChanged(started=("late",)), Key(engine="other"), source="other")
    assert run.audit.guard_violations == 0


def test_a_withdrawal_from_one_engine_leaves_the_bounds_on_another(run: Run) -> None:
    run.guard("early")
    run.wait("early")
    run.say(Withdraw(), Key(operation="leave", engine="other"), source="policy")
    completed = OperationOutcome(status="completed")
    run.say(completed, Key(operation="leave", engine="other"), source="other")
    run.now = 41
    run.start("late")
    assert run.audit.guard_violations == 1


# -- what it keeps besides ----------------------------------------------------------------------


def test_messages_are_counted_by_category(run: Run) -> None:
    run.say(RequestDescribed(), Key(request="r"))
    run.say(RequestOutcome(status="accepted"), Key(request="r"))
    run.control("op")
    run.outcome("op", "rejected")
    run.wait("r")
    assert run.audit.messages == {"intent": 1, "outcome": 2, "control": 1, "state": 1}


def test_pressure_becomes_a_sample(run: Run) -> None:
    tiers = (
        TierPressure(tier="cpu", num_blocks=10),
        TierPressure(tier="gpu", num_blocks=10, used=5, cached=2),
    )
    run.now = 7
    run.say(PressureReported(tiers=tiers, num_waiting=3, num_running=4), Key(engine="engine"))
    [sample] = run.audit.samples
    assert (sample.time_s, sample.waiting, sample.running) == (7, 3, 4)
    assert (sample.gpu_used, sample.gpu_cached) == (0.5, 0.2)


def test_a_sample_is_of_all_engines_together(run: Run) -> None:
    def say(engine: str, used: int, waiting: int) -> None:
        tiers = (TierPressure(tier="gpu", num_blocks=10, used=used, cached=1),)
        pressure = PressureReported(tiers=tiers, num_waiting=waiting, restored_tokens=100)
        run.say(pressure, Key(engine=engine), source=engine)

    say("engine", 4, 3)
    run.now = 1
    say("other", 8, 5)
    run.now = 2
    say("engine", 2, 1)
    assert [sample.waiting for sample in run.audit.samples] == [3, 8, 6]
    assert [sample.gpu_used for sample in run.audit.samples] == pytest.approx([0.4, 0.6, 0.5])
    assert [sample.restored_tokens for sample in run.audit.samples] == [100, 200, 200]


async def test_it_follows_a_bus_until_the_bus_closes() -> None:
    audit = Audit()
    async with MemoryBus() as bus, trio.open_nursery() as nursery:
        await nursery.start(audit.run, bus)
        key = Key(operation="op", request="r", engine="e")
        bus.publish(Sequencer("policy").wrap(Prioritise(priority=1), key, 0.0))
        await trio.testing.wait_all_tasks_blocked()
        bus.close()
    assert audit.num_open == 1


def test_it_follows_one_tenant_and_no_other(run: Run) -> None:
    key = Key(operation="op", request="r", engine="engine")
    run.audit.hear(Sequencer("policy", tenant="acme").wrap(Prioritise(priority=1), key, 0.0))
    assert run.audit.num_open == 0
    run.control("op")
    end = OperationOutcome(status="completed")
    run.audit.hear(Sequencer("engine", tenant="acme").wrap(end, key, 0.0))
    assert run.audit.num_open == 1
    assert run.audit.messages == {"control": 1}


def test_controls_that_were_mostly_turned_down_are_noted_and_few_are_not(run: Run) -> None:
    for number in range(20):
        run.control(f"a{number}")
        run.outcome(f"a{number}", "unsupported" if number < 12 else "completed", reason="no")
    run.control("w", Withdraw(), source="other")
    run.outcome("w", "completed")
    assert run.audit.notes() == [
        "policy: 12 of 20 prioritise were turned down, most unsupported: no"
    ]
    assert run.audit.sources == {"policy"}
    for number in range(200):
        run.control(f"b{number}")
        run.outcome(f"b{number}", "completed")
    assert run.audit.notes() == []
