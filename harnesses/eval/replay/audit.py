"""A tap that checks, from what passes on the bus alone, that a run kept the protocol's promises.

Each operation has exactly one terminal outcome; and no request that has waited longer than its
bound is passed by a later one that has not. It also keeps the samples that the figures show.

It follows one tenant: others of the same engines have operations and queues of their own.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from hear.codec import open_body
from hear.errors import BusError, RemoteProtocolError
from hear.harnesses.eval.report.results import Sample
from hear.interfaces import Bus
from hear.messages import (
    DEFAULT_TENANT,
    BoundWait,
    Envelope,
    OperationOutcome,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    WaitingRequest,
    Withdraw,
)
from hear.operation import TERMINAL
from hear.subjects import token

_CAPACITY = 1_000_000

Tap = Callable[[Sequence[Envelope], float], object]

_ROUNDING_S = 1e-6


class _Sent:
    """An operation: how often it was sent, and how it ended, if it has."""

    __slots__ = ("end", "end_epoch", "kind", "num_ends", "source", "times", "withdraws")

    def __init__(self) -> None:
        self.kind = self.source = ""  # of the control, if it was heard
        self.times = 0
        self.num_ends = 0
        self.end: OperationOutcome | None = None
        self.end_epoch = 0  # of the engine that told it
        self.withdraws: str | None = None  # the policy that leaves with it


class _Bound(NamedTuple):
    """A bound on waiting that an engine has taken on."""

    operation: str
    source: str
    max_wait_s: float


@dataclass(slots=True)
class _Engine:
    """One engine, as far as it was heard: who waits, and the bounds that hold, by request."""

    waiting: dict[str, WaitingRequest] = field(default_factory=dict)
    bounds: dict[str, _Bound] = field(default_factory=dict)
    sample: Sample | None = None

    def is_overdue(self, waiting: WaitingRequest, now: float, slack_s: float = 0.0) -> bool:
        bound = self.bounds.get(waiting.request)
        waited_s = now - waiting.since_s - slack_s
        return bound is not None and waited_s > bound.max_wait_s + _ROUNDING_S


class Audit:
    """Follows one run. ``hear`` takes one message, ``run`` takes them off a bus.

    ``tap`` is given all that is heard, in batches, and the time. It is here so that what is
    recorded and what is checked are the same, and so that a run goes alike with it and without.

    ``slack_s`` is how long after an engine has chosen whom to serve it may tell: who becomes
    overdue in between was not passed.
    """

    def __init__(
        self,
        tap: Tap = lambda envelopes, time_s: None,
        slack_s: float = 0.0,
        *,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        self._tap = tap
        self._slack_s = slack_s
        self._tenant = tenant
        self.messages: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self.guard_violations = 0
        self._sent: dict[str, _Sent] = {}
        self._asked: dict[str, tuple[str, _Bound]] = {}
        self._accepted: set[str] = set()  # of those asked for
        self._engines: dict[str, _Engine] = {}

    async def run(
        self, bus: Bus, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Follow a bus until cancelled or until it closes."""
        pattern = f"*.{token(self._tenant)}.>"
        async with bus.subscribe([pattern], name="audit", capacity=_CAPACITY) as messages:
            task_status.started()
            try:
                while True:
                    batch = await messages.receive()
                    self._tap(batch, trio.current_time())
                    for envelope in batch:
                        self.hear(envelope)
            except BusError:
                return

    def hear(self, envelope: Envelope) -> None:
        """Take one message into account, if it is of the tenant."""
        if envelope.tenant != self._tenant:
            return
        self.messages[envelope.category] += 1
        operation = envelope.key.operation
        if envelope.category == "control" and operation is not None:
            sent = self._sent.setdefault(operation, _Sent())
            sent.times += 1
            sent.kind, sent.source = envelope.kind, envelope.source
        elif envelope.category != "state" and envelope.kind != "operation_outcome":
            return
        try:
            message = open_body(envelope)
        except RemoteProtocolError:
            return  # a policy asked for what cannot be read; its engine has to say so
        engine = self._engines.setdefault(envelope.key.engine or envelope.source, _Engine())
        match message:
            case BoundWait() if operation is not None and envelope.key.request is not None:
                bound = _Bound(operation, envelope.source, message.max_wait_s)
                self._asked[operation] = envelope.key.request, bound
            case Withdraw() if operation is not None:
                self._sent[operation].withdraws = envelope.source
            case OperationOutcome() if operation is not None:
                self._hear_outcome(engine, operation, message, envelope.epoch)
            case QueueChanged():
                self._check_order(engine, message, envelope.time_s)
            case QueueSnapshot():
                engine.waiting = {w.request: w for w in message.waiting}
            case PressureReported():
                self._sample(engine, message, envelope.time_s)

    # -- operations ---------------------------------------------------------------------------

    def _hear_outcome(
        self, engine: _Engine, operation: str, outcome: OperationOutcome, epoch: int
    ) -> None:
        if outcome.status == "accepted":
            if operation in self._asked:
                request, bound = self._asked[operation]
                engine.bounds[request] = bound
                self._accepted.add(operation)
        elif outcome.status in TERMINAL:
            sent = self._sent.setdefault(operation, _Sent())
            if sent.end is None:
                sent.end, sent.end_epoch = outcome, epoch
                self.outcomes[outcome.status] += 1
                self._end_bounds(engine, operation, sent, outcome)
            elif sent.end != outcome:
                sent.num_ends = max(sent.num_ends, sent.times) + 1  # said once, but otherwise
            elif epoch > sent.end_epoch:
                # A worker that has started again publishes what it knows of earlier operations.
                sent.end_epoch = epoch
                return
            sent.num_ends += 1

    def _end_bounds(
        self, engine: _Engine, operation: str, sent: _Sent, outcome: OperationOutcome
    ) -> None:
        """Drop the bounds that hold no more; one that was kept to its end may be asked for again.

        A request that is preempted after it has started is still guarded, also by a bound that was
        completed at once since the request ran.
        """
        asked = self._asked.pop(operation, None)
        if asked is not None:
            request, bound = asked
            if outcome.status != "completed":
                if engine.bounds.get(request) == bound:
                    del engine.bounds[request]
            elif operation not in self._accepted:
                engine.bounds[request] = bound
            self._accepted.discard(operation)
        if sent.withdraws is not None and outcome.status == "completed":
            kept = engine.bounds.items()
            engine.bounds = {r: b for r, b in kept if b.source != sent.withdraws}

    @property
    def num_open(self) -> int:
        """Operations that have no terminal outcome so far."""
        return sum(1 for sent in self._sent.values() if sent.end is None)

    # -- waiting ------------------------------------------------------------------------------

    def _check_order(self, engine: _Engine, change: QueueChanged, now: float) -> None:
        # Who starts without having been seen to wait has come since the last report.
        started = [
            engine.waiting.pop(request, WaitingRequest(request=request, since_s=now))
            for request in change.started
        ]
        for request in change.ended:
            engine.waiting.pop(request, None)
            engine.bounds.pop(request, None)
        if started and engine.bounds:
            overdue = min(
                (
                    w.since_s
                    for w in engine.waiting.values()
                    if engine.is_overdue(w, now, self._slack_s)
                ),
                default=now,
            )
            for passing in started:
                if passing.since_s > overdue and not engine.is_overdue(passing, now):
                    self.guard_violations += 1
        for waiting in change.waiting:
            engine.waiting[waiting.request] = waiting

    def _sample(self, engine: _Engine, pressure: PressureReported, now: float) -> None:
        for tier in pressure.tiers:
            if tier.tier == "gpu":
                engine.sample = Sample(
                    time_s=now,
                    waiting=pressure.num_waiting,
                    running=pressure.num_running,
                    gpu_used=tier.used / tier.num_blocks,
                    gpu_cached=tier.cached / tier.num_blocks,
                    restored_tokens=pressure.restored_tokens,
                )
                self.samples.append(self._together(now))

    def _together(self, now: float) -> Sample:
        last = [engine.sample for engine in self._engines.values() if engine.sample is not None]
        return Sample(
            time_s=now,
            waiting=sum(sample.waiting for sample in last),
            running=sum(sample.running for sample in last),
            gpu_used=sum(sample.gpu_used for sample in last) / len(last),
            gpu_cached=sum(sample.gpu_cached for sample in last) / len(last),
            restored_tokens=sum(sample.restored_tokens for sample in last),
        )

    # -- what came of it ----------------------------------------------------------------------

    @property
    def sources(self) -> set[str]:
        """Who has asked for anything but to take back what was asked."""
        return {s.source for s in self._sent.values() if s.kind not in ("", "withdraw", "cancel")}

    def notes(self) -> list[str]:
        """Which controls were asked for in vain: more than a tenth of a kind were turned down."""
        asked: dict[tuple[str, str], Counter[str]] = {}
        for sent in self._sent.values():
            if sent.kind and sent.end is not None:
                refused = sent.end.status in ("rejected", "unsupported")
                why = f"{sent.end.status}: {sent.end.reason}" if refused else ""
                asked.setdefault((sent.source, sent.kind), Counter())[why] += 1
        found = []
        for (source, kind), ends in sorted(asked.items()):
            total, refused_of = ends.total(), ends.total() - ends.pop("", 0)
            if refused_of > total / 10:
                [(why, _)] = ends.most_common(1)
                found.append(
                    f"{source}: {refused_of:,} of {total:,} {kind} were turned down, most {why}"
                )
        return found

    def problems(self) -> list[str]:
        """What was broken, in words; nothing if all was kept."""
        found = []
        if self.num_open:
            found.append(f"{self.num_open} operations have no terminal outcome")
        # One that was sent again is answered again, with the same outcome.
        twice = sum(1 for sent in self._sent.values() if sent.num_ends > max(sent.times, 1))
        if twice:
            found.append(f"{twice} operations have more than one terminal outcome")
        if self.guard_violations:
            found.append(f"{self.guard_violations} requests passed one that had waited too long")
        return found
