"""Operations are followed from control to end, within bounds."""

from hear.buses.observe.metrics.operations import Operations
from hear.delivery import Sequencer
from hear.messages import Key, OperationOutcome, Prioritise
from hear.messages.outcome import OperationStatus
from tests.hear.builders import envelope


class Log:
    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.policy = Sequencer("p")

    def ask(self, id: str, now: float = 0.0, engine: str = "e0") -> bool:
        control = Prioritise(priority=1, force="requirement", reason="because")
        sent = self.policy.wrap(control, Key(engine=engine, operation=id), 1e9)
        return self.operations.hear_control(sent, control, now) is not None

    def answer(self, id: str, status: OperationStatus) -> tuple[bool, bool, bool] | None:
        outcome = OperationOutcome(status=status)
        move = self.operations.hear_outcome(envelope(outcome, Key(operation=id)), outcome)
        return move and (move.operation is not None, move.accepted, move.ended)


def test_acceptance_is_told_once_and_an_end_implies_it() -> None:
    log = Log(Operations())
    assert log.ask("a")
    assert not log.ask("a")
    assert log.answer("a", "accepted") == (True, True, False)
    assert log.answer("a", "accepted") is None
    assert log.answer("a", "completed") == (True, False, True)
    assert log.answer("a", "completed") is None
    assert not log.ask("a")  # sent again after its end
    assert log.ask("b")
    assert log.answer("b", "failed") == (True, True, True)
    assert log.ask("c")
    assert log.answer("c", "unsupported") == (True, False, True)
    assert log.answer("never heard of", "accepted") is None
    assert log.answer("never heard of", "completed") == (False, False, True)
    assert len(log.operations) == 0


def test_of_too_many_open_operations_the_oldest_is_forgotten() -> None:
    log = Log(Operations(max_open=3))
    for id in "abcde":
        log.ask(id)
    assert [operation.id for operation in log.operations] == ["c", "d", "e"]
    assert log.operations.forgotten == 2
    assert log.answer("a", "completed") == (False, False, True)


def test_what_never_ends_is_forgotten_by_this_readers_own_clock() -> None:
    log = Log(Operations(forget_after_s=100))
    log.ask("a", now=0)  # its envelope says a time far ahead
    log.ask("b", now=60)
    log.operations.forget_old(100)
    assert len(log.operations) == 2
    log.operations.forget_old(101)
    assert [operation.id for operation in log.operations] == ["b"]
    assert log.operations.forgotten == 1


def test_ends_are_remembered_within_the_same_bound() -> None:
    log = Log(Operations(max_open=2))
    for id in "abc":
        log.ask(id)
        log.answer(id, "completed")
    assert log.answer("c", "completed") is None
    assert log.ask("a")  # its end is forgotten


def test_a_restart_ends_only_what_is_open_on_that_engine() -> None:
    log = Log(Operations())
    log.ask("a", engine="e0")
    log.ask("b", engine="e1")
    [move] = log.operations.restart("e0", 7.0)
    assert move.operation is not None
    assert (move.operation.id, move.outcome.reason, move.ended) == ("a", "engine_restarted", True)
    assert log.answer("a", "failed") is None
    assert len(log.operations) == 1


def test_what_a_control_says_of_itself_is_kept() -> None:
    log = Log(Operations())
    log.ask("a")
    [operation] = log.operations
    assert (operation.policy, operation.control) == ("p", "prioritise")
    assert (operation.force, operation.why) == ("requirement", "because")
