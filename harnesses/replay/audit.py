"""A tap that checks, from what passes on the bus alone, that a run kept the protocol's promises.

Each operation has exactly one terminal outcome; and no request that has waited longer than its
bound is passed by a later one that has not. It also keeps the samples that the figures show.
"""

from collections import Counter

import trio

from hear.codec import open_body
from hear.errors import BusError
from hear.harnesses.replay.results import Sample
from hear.messages import (
    BoundWait,
    Control,
    Envelope,
    OperationOutcome,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    WaitingRequest,
)
from hear.operation import TERMINAL
from hear.seams import Bus

_CAPACITY = 1_000_000


class Audit:
    """Follows one run. ``hear`` takes one message, ``run`` takes them off a bus."""

    def __init__(self) -> None:
        self.messages: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self.guard_violations = 0
        self._ends: dict[str, int] = {}
        self._bounds: dict[str, float] = {}
        self._waiting: dict[str, WaitingRequest] = {}

    async def run(
        self, bus: Bus, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Follow a bus until cancelled or until it closes."""
        patterns = ["intent.>", "control.>", "state.>", "outcome.>"]
        async with bus.subscribe(patterns, name="audit", capacity=_CAPACITY) as messages:
            task_status.started()
            try:
                while True:
                    for envelope in await messages.receive():
                        self.hear(envelope)
            except BusError:
                return

    def hear(self, envelope: Envelope) -> None:
        """Take one message into account."""
        self.messages[envelope.category] += 1
        if envelope.category not in ("intent", "outcome") or envelope.kind == "operation_outcome":
            self._hear(envelope)

    def _hear(self, envelope: Envelope) -> None:
        message, key = open_body(envelope), envelope.key
        match message:
            case Control():
                if key.operation is not None:
                    self._ends.setdefault(key.operation, 0)
                if isinstance(message, BoundWait) and key.request is not None:
                    self._bounds[key.request] = message.max_wait_s
            case OperationOutcome():
                if message.status in TERMINAL and key.operation is not None:
                    self._ends[key.operation] = self._ends.get(key.operation, 0) + 1
                    self.outcomes[message.status] += 1
            case QueueChanged():
                self._check_order(message, envelope.time_s)
            case QueueSnapshot():
                self._waiting = {w.request: w for w in message.waiting}
            case PressureReported():
                self._sample(message, envelope.time_s)

    def _check_order(self, change: QueueChanged, now: float) -> None:
        started = [self._waiting.pop(r) for r in change.started if r in self._waiting]
        for request in change.ended:
            self._waiting.pop(request, None)
            self._bounds.pop(request, None)
        if started and self._bounds:
            overdue = min(
                (w.since_s for w in self._waiting.values() if self._is_overdue(w, now)),
                default=now,
            )
            for passing in started:
                if passing.since_s > overdue and not self._is_overdue(passing, now):
                    self.guard_violations += 1
        for waiting in change.waiting:
            self._waiting[waiting.request] = waiting

    def _is_overdue(self, waiting: WaitingRequest, now: float) -> bool:
        bound = self._bounds.get(waiting.request)
        return bound is not None and now - waiting.since_s > bound

    def _sample(self, pressure: PressureReported, now: float) -> None:
        for tier in pressure.tiers:
            if tier.tier == "gpu":
                self.samples.append(
                    Sample(
                        time_s=now,
                        waiting=pressure.num_waiting,
                        running=pressure.num_running,
                        gpu_used=tier.used / tier.num_blocks,
                        gpu_cached=tier.cached / tier.num_blocks,
                        restored_tokens=pressure.restored_tokens,
                    )
                )

    @property
    def num_open(self) -> int:
        """Operations that have no terminal outcome so far."""
        return sum(1 for ends in self._ends.values() if ends == 0)

    def problems(self) -> list[str]:
        """What was broken, in words; nothing if all was kept."""
        found = []
        if self.num_open:
            found.append(f"{self.num_open} operations have no terminal outcome")
        twice = sum(1 for ends in self._ends.values() if ends > 1)
        if twice:
            found.append(f"{twice} operations have more than one terminal outcome")
        if self.guard_violations:
            found.append(f"{self.guard_violations} requests passed one that had waited too long")
        return found
