"""From what was heard to the story of one request: a pure function over records, in two passes.

The first pass finds the request by the keys of the envelopes; the second follows its engine, and
opens only bodies that can matter, up to its end. What is heard may come from a recording or from
the memory of a bus.
"""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Final

import msgspec

from hear.blocks import unpack
from hear.buses.why.facts import Answer, Asked, Bound, Crowd, Story
from hear.buses.why.line import ORDERING, Line
from hear.buses.why.residence import Residence
from hear.codec import open_body
from hear.delivery import Arrival, GapDetector
from hear.errors import ConfigError, RemoteProtocolError
from hear.messages import (
    BoundWait,
    CapabilitiesReported,
    Control,
    Envelope,
    Key,
    Message,
    OperationOutcome,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    RequestReadinessChanged,
    ResidencyChanged,
    ResidencySnapshot,
)
from hear.recording import Heard, Noted, Record

Records = Callable[[], Iterable[Record]]
"""Gives all that was heard, from its beginning, each time that it is called."""

_REMEMBERED: Final = 50_000  # ids, to name the nearest ones to one that is not known
_NEAREST: Final = 3
_OF_ALL_CONTROLS: Final = frozenset(Control.__struct_fields__)


def find_story(records: Records, request: str, *, clock: str = "unix") -> Story:
    """Tell what happened to a request.

    Raises:
        ConfigError: no message names it; the error names the known ids that are nearest.
    """
    about = _About(request)
    for record in records():
        about.hear(record)
    if not about.mine:
        raise ConfigError(_not_found(request, list(about.others), about.num_others))
    about.understand()
    around = _Around(about)
    for record in records():
        if around.hear(record):
            break
    return _told(about, around, clock)


def _not_found(request: str, known: Sequence[str], count: int) -> str:
    if not known:
        return f"request {request!r}: nothing was heard of any request"
    like = [name for name in reversed(known) if request in name][:_NEAREST]
    like = like or get_close_matches(request, known, n=_NEAREST, cutoff=0.5)
    nearest = "the nearest are" if like else "the last ones were"
    names = ", ".join(like or list(reversed(known))[:_NEAREST])
    return f"request {request!r}: nothing was heard of it; of {count:,} requests {nearest} {names}"


def _open(envelope: Envelope) -> Message | None:
    try:
        return open_body(envelope)
    except RemoteProtocolError:
        return None


class _About:
    """What is said of the request itself."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.mine: list[Envelope] = []
        self.others: dict[str, None] = {}
        self.num_others = 0
        self.first_s: float | None = None
        self.last_s = 0.0
        self.cut_off: list[tuple[float, str]] = []
        self.description: RequestDescribed | None = None
        self.described_s: list[float] = []
        self.ready: list[tuple[float, bool]] = []
        self.arrivals: list[tuple[float, str]] = []
        self.end: tuple[Envelope, RequestOutcome] | None = None
        self.key = Key(request=request)

    def hear(self, record: Record) -> None:
        """Take one record into account."""
        if isinstance(record, Noted):
            if record.note.what == "cut_off":
                self.cut_off.append((record.time_s, record.note.text))
            return
        envelope = record.envelope
        if self.first_s is None:
            self.first_s = envelope.time_s
        if envelope.time_s > self.last_s:
            self.last_s = envelope.time_s
        request = envelope.key.request
        if request is None:
            return
        if request == self.request:
            self.mine.append(envelope)
        elif request not in self.others:
            self.num_others += 1
            self.others[request] = None
            if len(self.others) > _REMEMBERED:
                del self.others[next(iter(self.others))]

    def understand(self) -> None:
        """Open what was found."""
        names = dict.fromkeys(Key.__struct_fields__, None) | {"request": self.request}
        for envelope in self.mine:
            for name in ("context", "context_version", "workflow", "engine"):
                names[name] = getattr(envelope.key, name) or names[name]
            message = _open(envelope)
            match message:
                case RequestDescribed():
                    self.description = message
                    self.described_s.append(envelope.time_s)
                    self.ready.append((envelope.time_s, message.ready))
                case RequestReadinessChanged():
                    self.ready.append((envelope.time_s, message.ready))
                case RequestOutcome(status="accepted"):
                    self.arrivals.append((envelope.time_s, envelope.key.engine or envelope.source))
                case RequestOutcome():
                    self.end = envelope, message
        engine = self.arrivals[-1][1] if self.arrivals else names["engine"]
        self.key = Key(**names | {"engine": engine, "operation": None})  # type: ignore[arg-type]


class _Around:
    """What went on around it: its engine's queue and cache, and controls on its context."""

    def __init__(self, about: _About) -> None:
        self._about = about
        self._engine = about.key.engine
        self.line = Line(about.request)
        description = about.description
        hashes = unpack(_whole(description.prefix_hashes)) if description is not None else ()
        self._prompts: dict[str, Envelope] = {}
        self.residence = Residence(hashes, self._owners)
        self.depends_on: dict[str, float | None] = {}
        if description is not None:
            self.depends_on = dict.fromkeys(description.depends_on)
        self.at_arrival: int | None = None
        self.at_start: int | None = None
        self.gpu_used: float | None = None
        self.max_running = 0
        self.of_context: list[Envelope] = []
        self.gaps: list[tuple[float, str]] = []
        self._pressure: float | None = None
        self._epoch = 0
        self._detector = GapDetector()

    def hear(self, record: Record) -> bool:
        """Take one record into account; returns whether the request has ended with it."""
        if isinstance(record, Noted):
            return False
        envelope = record.envelope
        category, key = envelope.category, envelope.key
        if category == "state":
            if key.engine == self._engine:
                self._hear_state(envelope)
        elif envelope.kind == "request_outcome":
            return self._hear_outcome(envelope)
        elif key.request is not None and key.request != self._about.request:
            if envelope.kind == "request_described":
                if self.at_start is None:
                    self._prompts[key.request] = envelope
            elif key.engine == self._engine:
                self._hear_of_order(envelope)
        elif category in ("control", "outcome"):
            self._hear_of_order(envelope)
            if (
                key.request is None
                and key.context is not None
                and key.context == self._about.key.context
            ):
                self.of_context.append(envelope)
        return False

    def _hear_of_order(self, envelope: Envelope) -> None:
        if envelope.category == "control":
            if envelope.kind in ORDERING:
                self.line.asked(envelope)
        elif envelope.kind == "operation_outcome":
            self.line.answered(envelope)

    def _hear_outcome(self, envelope: Envelope) -> bool:
        key = envelope.key
        if key.request is None:
            return False
        if key.request in self.depends_on or (key.engine or envelope.source) == self._engine:
            message = _open(envelope)
            if not isinstance(message, RequestOutcome):
                return False
            if message.status == "accepted":
                self.line.arrived(key.request, envelope.time_s)
                if key.request == self._about.request:
                    self.at_arrival = self._prefix()
                    self.gpu_used = self._pressure
            else:
                if key.request in self.depends_on and message.status == "completed":
                    self.depends_on[key.request] = envelope.time_s
                self._prompts.pop(key.request, None)
                self.line.ended(key.request)
        end = self._about.end
        return end is not None and envelope.id == end[0].id

    def _hear_state(self, envelope: Envelope) -> None:
        time_s = envelope.time_s
        arrival = self._detector.observe(envelope)
        if arrival is Arrival.STALE or envelope.epoch < self._epoch:
            return
        if envelope.epoch > self._epoch:
            if self._epoch:
                self.line.restart()
                self.residence.forget()
                self.gaps.append((time_s, f"{self._engine} restarted, and forgot all it held"))
            self._epoch = envelope.epoch
        served = self.line.started_s is not None
        if served and envelope.kind.startswith("residency"):
            return  # what it was served with is settled
        message = _open(envelope)
        match message:
            case QueueChanged():
                if arrival is Arrival.GAP and not served:
                    self.gaps.append((time_s, "some changes of the queue were not heard"))
                self.line.change(message, time_s)
                self.residence.explain(time_s, message.started)
            case QueueSnapshot():
                self.line.replace(message, time_s)
            case ResidencyChanged():
                self._change_residence(message, arrival, envelope)
            case ResidencySnapshot():
                self.residence.replace(message.chains, message.part, message.parts, time_s)
            case PressureReported():
                for tier in message.tiers:
                    if tier.tier == "gpu" and tier.num_blocks:
                        self._pressure = tier.used / tier.num_blocks
            case CapabilitiesReported():
                self.max_running = message.max_num_seqs
        if not served and self.line.started_s is not None:
            self.at_start = self._prefix()

    def _change_residence(
        self, message: ResidencyChanged, arrival: Arrival, envelope: Envelope
    ) -> None:
        if arrival is Arrival.GAP:
            self.residence.forget()
            self.gaps.append((envelope.time_s, "some changes of the cache were not heard"))
            return
        if envelope.seq == 1:
            self.residence.known = True  # before its first change a stream is empty
        try:
            self.residence.change(message.changes, envelope.time_s)
        except RemoteProtocolError:
            self.residence.forget()
            self.gaps.append((envelope.time_s, "a change of the cache could not be read"))

    def _prefix(self) -> int | None:
        return self.residence.prefix if self.residence.known else None

    def _owners(self, stored: set[int]) -> list[str]:
        names = []
        for request in self.line.running:
            described = self._prompts.get(request)
            message = _open(described) if described is not None else None
            if isinstance(message, RequestDescribed) and not stored.isdisjoint(
                unpack(_whole(message.prefix_hashes))
            ):
                names.append(request)
        return names


def _whole(packed: bytes) -> bytes:
    return packed[: len(packed) // 8 * 8]


# -- putting it together -------------------------------------------------------------------------


def _told(about: _About, around: _Around, clock: str) -> Story:
    line, description = around.line, about.description
    end = about.end[1] if about.end else None
    ended_s = about.end[0].time_s if about.end else None
    arrived_s = about.arrivals[-1][0] if about.arrivals else None
    started_s = line.started_s
    if started_s is None and end is not None and arrived_s is not None and end.mode:
        started_s = arrived_s + end.queue_s  # an engine that does not report its queue
    crowd = line.crowd
    if crowd is not None:
        crowd = Crowd(
            running=crowd.running, waiting=crowd.waiting, gpu_used=around.gpu_used
        )
    origin_s = min([*about.described_s, *(t for t, _ in about.arrivals)], default=about.mine[0].time_s)
    return Story(
        request=about.request,
        context=about.key.context,
        context_version=about.key.context_version,
        workflow=about.key.workflow,
        turn=description.turn if description else 0,
        role=description.role if description else None,
        engine=about.key.engine,
        clock=clock,
        origin_s=origin_s,
        last_heard_s=about.last_s,
        described_s=tuple(about.described_s),
        ready=tuple(about.ready),
        depends_on=around.depends_on,
        arrivals=tuple(about.arrivals),
        started_s=started_s,
        ended_s=ended_s,
        status=end.status if end else "",
        reason=end.reason if end else "",
        mode=end.mode if end else "",
        prompt_tokens=(end.prompt_tokens if end else 0)
        or (description.prompt_tokens if description else 0),
        output_tokens=end.output_tokens if end else 0,
        reused_tokens=dict(end.reused_tokens) if end else {},
        queue_s=end.queue_s if end else None,
        prefill_s=end.prefill_s if end else None,
        decode_s=end.decode_s if end else None,
        preemptions=end.preemptions if end else 0,
        crowd=crowd,
        places=tuple(line.places),
        passed=tuple(line.passed),
        bound=_bound(about, line, arrived_s),
        asked=_asked(about, around),
        blocks=around.residence.facts(
            description.block_size, around.at_arrival, around.at_start
        )
        if description is not None and description.prefix_hashes
        else None,
        unknown=tuple(_unknown(about, around, origin_s)),
    )


def _bound(about: _About, line: Line, arrived_s: float | None) -> Bound | None:
    asked = line.control_of("bound_wait")
    if asked is None or not isinstance(asked[1], BoundWait):
        return None
    protected = [place.time_s for place in line.places if place.protected]
    since_s = arrived_s
    return Bound(
        source=asked[0],
        max_wait_s=asked[1].max_wait_s,
        due_s=None if since_s is None else since_s + asked[1].max_wait_s,
        protected_s=protected[0] if protected else None,
    )


def _asked(about: _About, around: _Around) -> tuple[Asked, ...]:
    # What policies asked of its context counts from when it was last served before this request.
    controls: list[tuple[Envelope, Control]] = []
    answers: dict[str, list[Answer]] = {}
    seen: set[str] = set()
    said = [*about.mine, *around.of_context]
    said.sort(key=lambda envelope: envelope.time_s)
    for envelope in said:
        if envelope.category not in ("control", "outcome") or envelope.id in seen:
            continue
        seen.add(envelope.id)
        message, operation = _open(envelope), envelope.key.operation
        if isinstance(message, Control):
            if operation not in answers:  # sent again, it is the same operation
                controls.append((envelope, message))
                answers[operation or ""] = []
        elif isinstance(message, OperationOutcome) and operation in answers:
            answer = Answer(
                time_s=envelope.time_s,
                status=message.status,
                reason=message.reason,
                detail=message.detail,
                fallback=message.fallback,
            )
            if not any(a.status == answer.status for a in answers[operation]):
                answers[operation].append(answer)
    return tuple(
        Asked(
            time_s=envelope.time_s,
            source=envelope.source,
            control=envelope.kind,
            operation=envelope.key.operation,
            about="request" if envelope.key.request == about.request else "context",
            force=message.force,
            reason=message.reason,
            fields=_fields(message),
            answers=tuple(answers[envelope.key.operation or ""]),
        )
        for envelope, message in controls
    )


def _fields(control: Control) -> dict[str, Any]:
    values = msgspec.structs.asdict(control)
    return {
        name: value
        for name, value in values.items()
        if name not in _OF_ALL_CONTROLS and not isinstance(value, bytes) and value is not None
    }


def _unknown(about: _About, around: _Around, origin_s: float) -> Iterable[str]:
    def at(time_s: float) -> str:
        return f"{time_s - origin_s:+.3f} s"

    described = about.description
    if described is None:
        yield "what it was to be: it was not described, or before the first message that was heard"
    elif not described.prefix_hashes and described.prompt_tokens >= (described.block_size or 1):
        yield "what of it could be reused: its blocks were not named"
    elif about.arrivals and around.at_arrival is None:
        yield "what of it its engine held when it came"
    if about.end is None:
        yield f"how it ends: the last message was heard at {at(about.last_s)}"
    elif not about.arrivals and about.end[1].status != "rejected":
        yield "when it came to its engine, and so what went before it"
    elif around.line.started_s is None and around.line.places:
        yield "when it left the queue"
    elif around.line.crowd is not None and not around.line.places and about.end[1].queue_s > 0:
        yield "what went before it: its place in the queue was not reported"
    for time_s, what in around.gaps:
        yield f"{what}, at {at(time_s)}"
    last_s = about.end[0].time_s if about.end else about.last_s
    for time_s, why in about.cut_off:
        if time_s <= last_s + 1.0:
            yield f"what passed before {at(time_s)}, when the recorder was cut off: {why}"
