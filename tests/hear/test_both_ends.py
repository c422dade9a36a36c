"""Both ends of an operation, joined by a link that loses, duplicates and reorders.

Two senders with their operations, one engine with its own, and an engine that restarts: its
backend alone (the worker fails what was open) or all of it (nobody says anything any more).
"""

from random import Random

from hypothesis import given, note, settings
from hypothesis import strategies as st

from hear.delivery import Sequencer
from hear.engine_operations import Actions, EngineOperations, KeyedOutcome
from hear.interfaces import ApplyResult, OperationEnded
from hear.messages import (
    BoundWait,
    Cancel,
    Control,
    Envelope,
    Force,
    Key,
    OperationOutcome,
    Prepare,
    Prioritise,
    Release,
    Retain,
    Withdraw,
)
from hear.operation import TERMINAL, Operation
from hear.sender_operations import SenderOperations

REQUESTS = ("r0", "r1", "r2")
CONTEXTS = ("c0", "c1")
KINDS = ("prioritise", "bound_wait", "retain", "release", "prepare")


class Backend:
    """Says anything that a backend may say, and minds what it is handed."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.handed: set[str] = set()
        self.under_way: dict[str, Operation] = {}

    def apply(self, operation: Operation) -> ApplyResult:
        assert operation.id not in self.handed, "handed out twice within one epoch"
        assert not operation.terminal, "handed out after its end"
        self.handed.add(operation.id)
        status = self.chance.choice(["completed", "accepted", "accepted", "rejected", "failed"])
        if status == "accepted":
            self.under_way[operation.id] = operation
            return ApplyResult("accepted", standing=self.chance.random() < 0.5)
        assert status in ("completed", "rejected", "failed")
        return ApplyResult(status, "said_so")  # type: ignore[arg-type]

    def revert(self, operation: Operation) -> None:
        assert operation.id in self.handed, "undone without having been handed out"
        self.under_way.pop(operation.id, None)


class Engine:
    """A worker without a bus."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.epoch = 1
        self.answers: list[tuple[int, KeyedOutcome]] = []
        self._fresh()

    def _fresh(self) -> None:
        self.operations = EngineOperations(engine="e0", controls=KINDS, ranks={"q": 1})
        self.backend = Backend(self.chance)
        self.ends: dict[str, OperationOutcome] = {}
        self.waiting: list[str] = []

    def carry_out(self, actions: Actions) -> None:
        for operation in actions.revert:
            self.backend.revert(operation)
        for answer in actions.outcomes:
            self._answer(answer)
        for operation in actions.apply:
            self.carry_out(self.operations.applied(operation, self.backend.apply(operation)))
        assert set(self.backend.under_way) <= {op.id for op in self.operations.open_operations}

    def _answer(self, answer: KeyedOutcome) -> None:
        operation = answer.key.operation
        assert operation is not None
        if answer.outcome.status in TERMINAL:
            first = self.ends.setdefault(operation, answer.outcome)
            assert answer.outcome == first, "a second, different end"
        else:
            assert operation not in self.ends, "accepted after its end"
        self.answers.append((self.epoch, answer))

    def does_something(self, now: float) -> None:
        """A request arrives or ends, an operation ends, or time has passed."""
        self.carry_out(self.operations.expire(now))
        what = self.chance.choice(["arrive", "end", "finish", "finish"])
        if what == "arrive":
            request = self.chance.choice(REQUESTS)
            if request not in self.waiting:
                self.waiting.append(request)
                key = Key(request=request, context=self.chance.choice(CONTEXTS))
                self.carry_out(self.operations.request_arrived(key, now))
        elif what == "end" and self.waiting:
            self.carry_out(self.operations.request_ended(self.waiting.pop(0), now))
        elif what == "finish" and self.backend.under_way:
            id, _ = self.backend.under_way.popitem()
            status = self.chance.choice(["completed", "failed"])
            assert status in ("completed", "failed")
            outcome = OperationOutcome(status=status, reason="yielded")  # type: ignore[arg-type]
            self.carry_out(self.operations.ended(OperationEnded(id, outcome)))

    def restart(self, *, whole: bool) -> None:
        if whole:
            self._fresh()
        else:
            self.backend = Backend(self.chance)
            self.carry_out(self.operations.shut("engine_restarted"))
            self.waiting.clear()
        self.epoch += 1


class Sender:
    """A policy's side."""

    def __init__(self, source: str, chance: Random) -> None:
        self.chance = chance
        self.sequencer = Sequencer(source)
        self.sender_operations = SenderOperations()
        self.ids: list[str] = []
        self.ends: list[str] = []
        self.again: list[Envelope] = []

    def submit(self, now: float) -> Envelope:
        id = self.sequencer.next_id()
        force: Force = "requirement" if self.chance.random() < 0.3 else "preference"
        request, context = self.chance.choice(REQUESTS), self.chance.choice(CONTEXTS)
        deadline_s = self.chance.choice([None, now + 5.0, now + 20.0])
        about_request: list[Control] = [
            Prioritise(priority=1, force=force, deadline_s=deadline_s),
            BoundWait(max_wait_s=9.0, force=force, deadline_s=deadline_s),
        ]
        about_context: list[Control] = [
            Retain(lease_s=9.0, force=force, deadline_s=deadline_s),
            Release(force=force),
            Prepare(force=force, deadline_s=deadline_s),
        ]
        rare: list[Control] = [Cancel(target=self.chance.choice(self.ids or ["x"])), Withdraw()]
        control = self.chance.choice((about_request + about_context) * 2 + rare)
        key = Key(engine="e0", request=request, operation=id)
        if control in about_context:
            key = Key(engine="e0", context=context, context_version=None, operation=id)
        sent = self.sequencer.wrap(control, key, now)
        self.sender_operations.submit(sent, control, now, now + 30.0)
        self.ids.append(id)
        return sent

    def hear(self, epoch: int, answer: KeyedOutcome, now: float) -> None:
        self.again += self.sender_operations.hear_epoch("e0", epoch, now)
        moved = self.sender_operations.hear(answer.key, answer.outcome)
        if moved is not None and moved.terminal:
            self._ended([moved])

    def tick(self, now: float) -> list[Envelope]:
        again, lost = self.sender_operations.due(now)
        self._ended(lost)
        asked, self.again = self.again, []
        return again + asked

    def _ended(self, operations: list[Operation]) -> None:
        for operation in operations:
            assert operation.terminal
            self.ends.append(operation.id)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.2, 0.6]),
    duplication=st.sampled_from([0.0, 0.3]),
    restarts=st.sampled_from([0.0, 0.02, 0.1]),
)
def test_every_operation_ends_once_and_is_handed_out_once_an_epoch(
    seed: int, loss: float, duplication: float, restarts: float
) -> None:
    chance = Random(seed)
    engine = Engine(chance)
    senders = [Sender("p", chance), Sender("q", chance)]
    up: list[Envelope] = []
    down: list[tuple[int, KeyedOutcome]] = []
    now = 0.0

    def deliver_one(link: list[Envelope] | list[tuple[int, KeyedOutcome]]) -> None:
        place = chance.randrange(len(link))
        item = link[place] if chance.random() < duplication else link.pop(place)
        if chance.random() < loss:
            return
        if isinstance(item, Envelope):
            engine.carry_out(engine.operations.receive(item, now))
        else:
            for sender in senders:
                sender.hear(*item, now)

    for _ in range(120):
        now += chance.random()
        action = chance.random()
        if action < 0.2:
            up.append(chance.choice(senders).submit(now))
        elif action < 0.5 and up:
            deliver_one(up)
        elif action < 0.7 and down:
            deliver_one(down)
        elif action < 0.9:
            engine.does_something(now)
        elif chance.random() < restarts * 10:
            engine.restart(whole=chance.random() < 0.5)
        for sender in senders:
            up += sender.tick(now)
        down += engine.answers
        engine.answers.clear()

    for sender in senders:  # the engine falls silent
        while (due := sender.sender_operations.next_due()) is not None:
            sender.tick(due)
        note(f"{sender.ids} ended in the order {sender.ends}")
        assert sorted(sender.ends) == sorted(sender.ids)
        assert not sender.sender_operations.open_operations


@given(seed=st.integers(0, 2**32))
def test_over_a_good_link_both_ends_agree_on_how_each_operation_ended(seed: int) -> None:
    chance = Random(seed)
    engine, sender, now = Engine(chance), Sender("p", chance), 0.0
    operations: dict[str, Operation] = {}
    for _ in range(60):
        now += chance.random() / 10
        if chance.random() < 0.5:
            engine.carry_out(engine.operations.receive(sender.submit(now), now))
            operations |= {op.id: op for op in sender.sender_operations.open_operations}
        else:
            engine.does_something(now)
        for epoch, answer in engine.answers:
            sender.hear(epoch, answer, now)
        engine.answers.clear()
    engine.restart(whole=False)
    for epoch, answer in engine.answers:
        sender.hear(epoch, answer, now)
    assert sorted(sender.ends) == sorted(sender.ids)
    assert {id: op.phase for id, op in operations.items()} == {
        id: outcome.status for id, outcome in engine.ends.items()
    }
