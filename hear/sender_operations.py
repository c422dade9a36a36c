"""The sender's side of the protocol, without I/O: operations that it is owed an answer for.

What is not answered is sent again, after pauses that grow, until it is given up.
"""

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from hear.errors import LocalProtocolError
from hear.messages import Control, Envelope, Key, OperationOutcome
from hear.operation import Operation

MAX_ENGINES = 4_096
"""Engines of which a ``SenderOperations`` knows the epoch: the ones that were heard last."""

SPARE_TIMERS = 1024
"""Outdated timers that a ``SenderOperations`` keeps beside as many as it has operations open."""


@dataclass(slots=True)
class _Pending:
    operation: Operation
    envelope: Envelope
    give_up_s: float
    answer_by_s: float
    pause_s: float
    due_s: float = 0.0

    @property
    def ends_s(self) -> float:
        """When it is given up, as things stand."""
        return self.answer_by_s if self.operation.phase == "submitted" else self.give_up_s


class SenderOperations:
    """The sender's side of its operations: what is open, what to send again, what has ended.

    A control is sent again, with growing pauses, until any outcome is heard, and whenever there is
    a sign that an outcome was lost: the engine has restarted, or something it said is missing. The
    engine alone says how an operation ended; only one without a terminal outcome at its give-up
    time fails here as ``no_answer``.
    """

    def __init__(self, *, first_retry_s: float = 1.0, max_retry_s: float = 16.0) -> None:
        self._first_retry_s = first_retry_s
        self._max_retry_s = max_retry_s
        self._open: dict[str, _Pending] = {}
        self._timers: list[tuple[float, str]] = []
        self._epochs: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open_operations(self) -> list[Operation]:
        """The operations without a terminal outcome, oldest first."""
        return [pending.operation for pending in self._open.values()]

    def submit(
        self,
        envelope: Envelope,
        control: Control,
        now: float,
        give_up_s: float,
        *,
        answer_by_s: float = inf,
    ) -> Operation:
        """Take note of a control that is being sent; its key names the operation.

        It is given up at ``give_up_s`` if it has not ended, and at ``answer_by_s`` if nothing at
        all was heard of it: an engine that is gone will not accept what would last for a day.
        """
        operation_id = envelope.key.operation
        if operation_id is None or operation_id in self._open:
            raise LocalProtocolError(
                f"control {envelope.kind}: operation {operation_id!r}, expected a new id in the key"
            )
        operation = Operation(
            id=operation_id,
            control=control,
            key=envelope.key,
            source=envelope.source,
            submitted_s=now,
            deadline_s=give_up_s,
            tenant=envelope.tenant,
        )
        answer_by_s = min(answer_by_s, give_up_s)
        pending = _Pending(operation, envelope, give_up_s, answer_by_s, self._first_retry_s)
        self._open[operation_id] = pending
        self._arm(pending, now + pending.pause_s)
        return operation

    def hear(self, key: Key, outcome: OperationOutcome) -> Operation | None:
        """Apply an outcome; returns the operation if this outcome moved it, else None.

        A terminal outcome implies acceptance, so it does not matter if ``accepted`` was lost. What
        was accepted once can be refused only by an engine that has forgotten it, and has failed.
        """
        pending = self._open.get(key.operation or "")
        if pending is None:
            return None
        operation = pending.operation
        status = outcome.status
        if operation.phase == "accepted":
            if status == "accepted":
                self._arm(pending, pending.give_up_s)
                return None
            if status in ("rejected", "unsupported"):
                status = "failed"
        elif status in ("completed", "failed"):
            operation.advance("accepted")
        operation.advance(status)
        if operation.terminal:
            del self._open[operation.id]
        else:
            self._arm(pending, pending.give_up_s)
        return operation

    def hear_epoch(self, engine: str, epoch: int, now: float) -> list[Envelope]:
        """Note the epoch of an engine; returns what to send again, since it may have restarted."""
        known = self._epochs.get(engine)
        self._epochs[engine] = epoch if known is None else max(known, epoch)
        self._epochs.move_to_end(engine)
        if known is not None and epoch <= known:
            return []
        if len(self._epochs) > MAX_ENGINES:
            self._epochs.popitem(last=False)
        return [] if known is None else self.ask_again(now, engine)

    def epoch_of(self, engine: str | None) -> int | None:
        """The newest epoch that was heard of an engine."""
        return None if engine is None else self._epochs.get(engine)

    def ask_again(self, now: float, engine: str | None = None) -> list[Envelope]:
        """What is open on an engine, or on all, to be sent again since an outcome may be lost."""
        asked = [
            pending
            for pending in self._open.values()
            if engine is None or pending.operation.key.engine == engine
        ]
        for pending in asked:
            pending.pause_s = self._first_retry_s
            self._arm(pending, now + pending.pause_s)
        return [pending.envelope for pending in asked]

    def due(self, now: float) -> tuple[list[Envelope], list[Operation]]:
        """What to send again at ``now``, and the operations given up as unanswered."""
        again: list[Envelope] = []
        lost: list[Operation] = []
        while (when := self.next_due()) is not None and when <= now:
            pending = self._open[heappop(self._timers)[1]]
            if now >= pending.ends_s:
                lost.append(self._fail(pending))
            else:
                again.append(pending.envelope)
                # The pause is doubled, and not computed from a count of attempts: a power of two
                # of such a count is no float after some hours.
                pending.pause_s = min(2 * pending.pause_s, self._max_retry_s)
                self._arm(pending, now + pending.pause_s)
        return again, lost

    def next_due(self) -> float | None:
        """When ``due`` has to be asked next."""
        while self._timers:
            when, operation_id = self._timers[0]
            pending = self._open.get(operation_id)
            if pending is not None and pending.due_s == when:
                return when
            heappop(self._timers)
        return None

    def _arm(self, pending: _Pending, when: float) -> None:
        pending.due_s = min(when, pending.ends_s)
        heappush(self._timers, (pending.due_s, pending.operation.id))
        if len(self._timers) > 2 * len(self._open) + SPARE_TIMERS:
            # Timers that were set anew stay in the heap until their time, which may be hours away.
            self._timers = [(open_.due_s, id) for id, open_ in self._open.items()]
            heapify(self._timers)

    def _fail(self, pending: _Pending) -> Operation:
        operation = pending.operation
        if operation.phase == "submitted":
            operation.advance("accepted")
        operation.advance("failed")
        del self._open[operation.id]
        return operation
