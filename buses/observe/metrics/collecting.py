"""Envelopes to metrics: what each message counts as.

Reads no clock and does no I/O: times are those of the envelopes. What is not known is absent: a
series begins when something is first heard, and what an engine said of its queue and its cache goes
when it restarts.
"""

from collections import OrderedDict
from collections.abc import Callable
from math import isfinite
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Histogram

from hear.buses.observe.metrics.families import Families
from hear.buses.observe.metrics.operations import Move, Operations
from hear.buses.observe.metrics.spans import SpanData, operation_span, request_spans
from hear.codec import KINDS, open_body
from hear.delivery import Arrival, GapDetector
from hear.errors import RemoteProtocolError
from hear.kept import Kept
from hear.messages import (
    Control,
    Envelope,
    Message,
    OperationOutcome,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestOutcome,
    ReuseExpected,
)

_REMEMBER_IDS: Final = 65_536
_MAX_ENGINES: Final = 1_000
ENGINE_GONE_S: Final = 86_400.0
"""How long an engine may be silent until its series go."""

_MAX_TENANTS: Final = 1_000
_OPENED: Final = frozenset(
    {
        "request_outcome",
        "operation_outcome",
        "queue_changed",
        "queue_snapshot",
        "pressure_reported",
        "reuse_expected",
        *(name for name, kind in KINDS.items() if kind.category == "control"),
    }
)
"""Kinds whose bodies are read; of all others the envelope is enough."""


class _Queue(NamedTuple):
    """What one tenant has in the queue of an engine."""

    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    running_tokens: int = 0


class _Engine(NamedTuple):
    name: str
    epoch: int


class Collecting:
    """Counts what it is given. ``on_span`` is told each span as its request or operation ends."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        on_span: Callable[[SpanData], None] | None = None,
        max_series: int = 2_000,
        max_open: int = 65_536,
    ) -> None:
        self.families = Families(registry, max_series=max_series)
        self.operations = Operations(max_open=max_open)
        self._on_span = on_span
        self._detector = GapDetector()
        self._engines: Kept[_Engine] = Kept(max_entries=_MAX_ENGINES)
        self._queues: dict[str, dict[str, _Queue]] = {}  # by engine and tenant
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._forgotten = 0
        self._open_shown: set[str] = set()

    def hear(self, envelope: Envelope, now: float) -> None:
        """Take one message into account, which came at ``now``."""
        families = self.families
        known = KINDS.get(envelope.kind)
        families.messages(envelope.category, envelope.kind).inc()
        arrival = self._number(envelope)
        if known is None or known.category != envelope.category or envelope.kind not in _OPENED:
            if envelope.category == "state":
                self._hear_epoch(envelope, now)
            return
        message: Message | None = None
        try:
            message = open_body(envelope)
        except RemoteProtocolError:
            families.unreadable(envelope.kind).inc()
        if envelope.category == "control":
            self._hear_control(envelope, message, now)
        elif message is None:
            return
        elif envelope.category == "state":
            if arrival is not Arrival.STALE and self._hear_epoch(envelope, now):
                self._hear_state(envelope, message)
        elif isinstance(message, OperationOutcome):
            self._move(self.operations.hear_outcome(envelope, message))
        elif self._is_new(envelope.id):
            if isinstance(message, RequestOutcome):
                self._hear_request(envelope, message)
            elif isinstance(message, ReuseExpected):
                families.predictions(envelope.source, message.basis).inc()

    def settle(self, now: float) -> None:
        """Forget what is too old and bring the numbers of open operations up to date."""
        self.operations.forget_old(now)
        for gone in self._engines.forget_silent(now, lambda _: ENGINE_GONE_S):
            self._forget_engine(gone.name)
        self.families.forgotten().inc(self.operations.forgotten - self._forgotten)
        self._forgotten = self.operations.forgotten
        counts: dict[str, int] = dict.fromkeys(self._open_shown, 0)
        for operation in self.operations:
            counts[operation.control] = counts.get(operation.control, 0) + 1
        for control, count in counts.items():
            self.families.open(control).set(count)
        self._open_shown = set(counts)

    def lose(self) -> None:
        """Some messages were missed for sure: this reader was cut off, and begins anew."""
        self.families.lagged().inc()
        self.operations.lose()

    # -- pieces -------------------------------------------------------------------------------

    def _number(self, envelope: Envelope) -> Arrival:
        known, missed = self._detector.knows(envelope), self._detector.missed
        arrival = self._detector.observe(envelope)
        # The first message of a channel tells nothing: this reader may have come late.
        if arrival is Arrival.GAP and known:
            self.families.gaps(envelope.category, envelope.source).inc()
            lost = self._detector.missed - missed
            self.families.missed(envelope.category, envelope.source).inc(lost)
        return arrival

    def _is_new(self, id: str) -> bool:
        """Whether a reliable message comes for the first time."""
        if id in self._seen:
            return False
        self._seen[id] = None
        if len(self._seen) > _REMEMBER_IDS:
            self._seen.popitem(last=False)
        return True

    def _hear_control(self, envelope: Envelope, message: Message | None, now: float) -> None:
        if envelope.key.operation is None:
            return  # no engine acts on it
        control = message if isinstance(message, Control) else None
        if self.operations.hear_control(envelope, control, now) is not None:
            self.families.controls(envelope.source, envelope.kind).inc()
        else:
            self.families.repeated(envelope.source).inc()

    def _move(self, move: Move | None) -> None:
        if move is None:
            return
        families, operation, outcome = self.families, move.operation, move.outcome
        control = outcome.control if operation is None else operation.control
        if move.ended:
            families.ended(control, outcome.status, families.reason(outcome.reason)).inc()
        if operation is None:
            return
        life_s = move.time_s - operation.asked_s
        if move.accepted:
            _observe(families.accept_s(control), life_s)
        if move.ended:
            families.policy_ended(operation.policy, outcome.status).inc()
            _observe(families.end_s(control, outcome.status), life_s)
            self._tell(operation_span(move))

    def _hear_request(self, envelope: Envelope, outcome: RequestOutcome) -> None:
        if outcome.status == "accepted":
            return
        families, engine = self.families, envelope.key.engine or envelope.source
        families.requests(engine, outcome.status, families.reason(outcome.reason)).inc()
        families.preemptions(engine).inc(outcome.preemptions)
        if outcome.status == "completed":
            ttft_s = outcome.queue_s + outcome.prefill_s
            for family, seconds in (
                (families.queue_s, outcome.queue_s),
                (families.prefill_s, outcome.prefill_s),
                (families.decode_s, outcome.decode_s),
                (families.ttft_s, ttft_s),
                (families.request_s, ttft_s + outcome.decode_s),
            ):
                _observe(family(engine), seconds)
            families.prompt_tokens(engine).inc(outcome.prompt_tokens)
            families.output_tokens(engine).inc(outcome.output_tokens)
            for tier, tokens in outcome.reused_tokens.items():
                families.reused_tokens(engine, tier).inc(max(tokens, 0))
        for span in request_spans(envelope, outcome):
            self._tell(span)

    def _hear_epoch(self, envelope: Envelope, now: float) -> bool:
        """Note the epoch of an engine; False if the message is of one that has ended."""
        engine, epoch = envelope.key.engine or envelope.source, envelope.epoch
        before = self._engines.get(engine)
        if before is not None and epoch < before.epoch:
            return False
        for gone in self._engines.keep(engine, _Engine(engine, epoch), now):
            self._forget_engine(gone.name)
        if before is None or epoch > before.epoch:
            self.families.epoch(engine).set(epoch)
            if before is not None:
                self.families.restarts(engine).inc()
                self._forget_state(engine)
                for move in self.operations.restart(engine, envelope.time_s):
                    self._move(move)
        if isfinite(envelope.time_s):
            self.families.heard_s(engine).set(envelope.time_s)
        return True

    def _hear_state(self, envelope: Envelope, message: Message) -> None:
        families, engine = self.families, envelope.key.engine or envelope.source
        match message:
            case QueueChanged():
                self._set_queue(
                    envelope,
                    _Queue(
                        message.num_waiting,
                        message.num_running,
                        message.waiting_tokens,
                        message.running_tokens,
                    ),
                )
            case QueueSnapshot():
                waiting, running = message.waiting, message.running
                self._set_queue(
                    envelope,
                    _Queue(
                        len(waiting),
                        len(running),
                        sum(w.prompt_tokens for w in waiting),
                        sum(r.prompt_tokens + r.output_tokens for r in running),
                    ),
                )
            case PressureReported():
                for tier in message.tiers:
                    families.capacity(engine, tier.tier).set(tier.num_blocks)
                    families.blocks(engine, tier.tier, "used").set(tier.used)
                    families.blocks(engine, tier.tier, "cached").set(tier.cached)
                    families.blocks(engine, tier.tier, "allocatable").set(tier.allocatable)
                families.backlog_s(engine).set(message.load_backlog_s)

    def _set_queue(self, envelope: Envelope, queue: "_Queue") -> None:
        """Show the queue of an engine: those that its tenants hear of, together."""
        engine = envelope.key.engine or envelope.source
        of_tenants = self._queues.setdefault(engine, {})
        of_tenants.pop(envelope.tenant, None)
        if any(queue) and len(of_tenants) < _MAX_TENANTS:
            of_tenants[envelope.tenant] = queue
        waiting, running, waiting_tokens, running_tokens = (
            sum(column) for column in zip(_Queue(), *of_tenants.values(), strict=True)
        )
        self.families.queue(engine, "waiting").set(waiting)
        self.families.queue(engine, "running").set(running)
        self.families.queue_tokens(engine, "waiting").set(waiting_tokens)
        self.families.queue_tokens(engine, "running").set(running_tokens)

    def _forget_engine(self, engine: str) -> None:
        self._queues.pop(engine, None)
        self.families.forget_engine(engine)

    def _forget_state(self, engine: str) -> None:
        self._queues.pop(engine, None)
        self.families.forget_state(engine)

    def _tell(self, span: SpanData | None) -> None:
        if span is not None and self._on_span is not None:
            self._on_span(span)


def _observe(histogram: Histogram, seconds: float) -> None:
    # One infinite time would spoil the sum for ever; clocks of two machines differ a little.
    if isfinite(seconds):
        histogram.observe(max(seconds, 0.0))
