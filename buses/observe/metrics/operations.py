"""The operations that pass by, followed from their controls to their ends.

Knows neither Prometheus nor OpenTelemetry: it says what moved, and others count it. Memory is
bounded: operations that never end are forgotten, by number and by age.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec import Struct

from hear.messages import Control, Envelope, Key, OperationOutcome
from hear.operation import TERMINAL

FORGET_AFTER_S: Final = 90_000.0
"""Longer than any operation lives: a guard may wait for a day."""


_MAX_WHY: Final = 1_000


class Followed(Struct):
    """An operation that has not ended. Times are those of the envelopes, in seconds.

    Only ``heard_s`` is this reader's own, since others may say any time.
    """

    id: str
    policy: str
    control: str
    force: str
    why: str
    tenant: str
    key: Key
    asked_s: float
    heard_s: float
    accepted_s: float | None = None


class Move(NamedTuple):
    """What an outcome did to an operation.

    ``accepted`` tells that this is the first word of its acceptance, which a completion or a
    failure implies; ``ended``, that it is over. ``operation`` is None where its control was not
    heard.
    """

    operation: Followed | None
    outcome: OperationOutcome
    time_s: float
    accepted: bool
    ended: bool


class Operations:
    """Follows up to ``max_open`` operations, and remembers as many ends."""

    def __init__(self, *, max_open: int = 65_536, forget_after_s: float = FORGET_AFTER_S) -> None:
        self._open: OrderedDict[tuple[str, str], Followed] = OrderedDict()  # by tenant and id
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._max_open = max_open
        self._forget_after_s = forget_after_s
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Followed]:
        return iter(self._open.values())

    def hear_control(
        self, envelope: Envelope, control: Control | None, now: float
    ) -> Followed | None:
        """Note a control; None if it names no operation or was heard before."""
        id = envelope.key.operation
        place = envelope.tenant, id or ""
        if id is None or place in self._open or place in self._ended:
            return None
        operation = self._open[place] = Followed(
            id=id,
            policy=envelope.source,
            control=envelope.kind,
            force=control.force if control is not None else "",
            why=control.reason[:_MAX_WHY] if control is not None else "",
            tenant=envelope.tenant,
            key=envelope.key,
            asked_s=envelope.time_s,
            heard_s=now,
        )
        if len(self._open) > self._max_open:
            self._open.popitem(last=False)
            self.forgotten += 1
        return operation

    def hear_outcome(self, envelope: Envelope, outcome: OperationOutcome) -> Move | None:
        """Note an outcome; None if it says nothing new."""
        id = envelope.key.operation
        if id is None or (envelope.tenant, id) in self._ended:
            return None
        return self._move((envelope.tenant, id), outcome, envelope.time_s)

    def _move(
        self, place: tuple[str, str], outcome: OperationOutcome, time_s: float
    ) -> Move | None:
        operation = self._open.get(place)
        ended = outcome.status in TERMINAL
        accepted = False
        if operation is not None and outcome.status in ("accepted", "completed", "failed"):
            accepted = operation.accepted_s is None
            if accepted:
                operation.accepted_s = time_s
        if ended:
            self._open.pop(place, None)
            self._ended[place] = None
            if len(self._ended) > self._max_open:
                self._ended.popitem(last=False)
        elif not accepted:
            return None
        return Move(operation, outcome, time_s, accepted, ended)

    def restart(self, engine: str, time_s: float) -> list[Move]:
        """End what is open on an engine that has begun a new epoch."""
        moves = []
        for operation in [op for op in self._open.values() if op.key.engine == engine]:
            failed = OperationOutcome(
                status="failed", control=operation.control, reason="engine_restarted"
            )
            move = self._move((operation.tenant, operation.id), failed, time_s)
            if move is not None:
                moves.append(move)
        return moves

    def forget_old(self, now: float) -> None:
        """Forget operations whose control was heard too long ago."""
        while self._open:
            oldest = next(iter(self._open.values()))
            if now - oldest.heard_s <= self._forget_after_s:
                return
            self._open.popitem(last=False)
            self.forgotten += 1

    def lose(self) -> None:
        """Forget all that is open: outcomes may have been missed."""
        self.forgotten += len(self._open)
        self._open.clear()
