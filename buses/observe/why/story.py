"""From what was heard to the story of one request: a pure function over records, in two passes.

The first pass finds the request by the keys of the envelopes; the second follows its engine, and
opens only bodies that can matter, up to its end. What is heard may come from a recording or from
the memory of a bus.
"""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Final

import msgspec

from hear.buses.observe.why.around import Around
from hear.buses.observe.why.facts import Answer, Asked, Bound, Crowd, Story
from hear.buses.observe.why.line import Line, opened_body
from hear.compatibility import differences, in_words
from hear.errors import ConfigError
from hear.messages import (
    BoundWait,
    Control,
    Envelope,
    Key,
    OperationOutcome,
    RequestDescribed,
    RequestOutcome,
    RequestReadinessChanged,
)
from hear.recording import Heard, Noted, Record

Records = Callable[[Sequence[str]], Iterable[Record]]
"""Gives all that was heard, from its beginning, each time that it is called.

Messages in which none of the given texts occurs may be left out, if it gives any.
"""

_COMPARED: Final = 20_000  # ids, to name the nearest ones to one that is not known
_NEAREST: Final = 3
_SHOWN: Final = 8  # tenants that an error lists
_OF_ALL_CONTROLS: Final = frozenset(Control.__struct_fields__)


def find_story(
    records: Records, request: str, *, clock: str = "unix", tenant: str | None = None
) -> Story:
    """Tell what happened to a request, of a tenant if several have one of that id.

    Raises:
        ConfigError: no message names it, and the error names the known ids that are nearest; or
            several tenants have one.
    """
    about = _About(request, tenant)
    for record in records([request]):
        about.hear(record)
    if not about.mine:
        raise ConfigError(_not_found(request, tenant, records))
    about.understand()
    end_id = about.end[0].id if about.end is not None else None
    around = Around(about.key, about.description, end_id, tenant=about.tenant)
    for record in records(around.names):
        if around.hear(record):
            break
    return _told(about, around, clock)


def _not_found(request: str, tenant: str | None, records: Records) -> str:
    known: dict[str, None] = {}
    for record in records([]):
        if not isinstance(record, Heard) or record.envelope.key.request is None:
            continue
        if tenant in (None, record.envelope.tenant):
            known[record.envelope.key.request] = None
    if not known:
        of = "" if tenant is None else f" of tenant {tenant!r}"
        return f"request {request!r}: nothing was heard of any request{of}"
    latest = list(reversed(known))
    like = [name for name in latest if request in name][:_NEAREST]
    like = like or get_close_matches(request, latest[:_COMPARED], n=_NEAREST, cutoff=0.5)
    nearest = "the nearest are" if like else "the last ones are"
    names = ", ".join(like or latest[:_NEAREST])
    return f"request {request!r}: nothing was heard of it; of {len(known):,} {nearest} {names}"


class _About:
    """What is said of the request itself."""

    def __init__(self, request: str, tenant: str | None) -> None:
        self.request = request
        self._wanted = tenant
        self.mine: list[Envelope] = []
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
        if envelope.key.request == self.request and self._wanted in (None, envelope.tenant):
            self.mine.append(envelope)

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.mine[0].tenant

    def understand(self) -> None:
        """Open what was found.

        Raises:
            ConfigError: it is of more than one request.
        """
        tenants = sorted({envelope.tenant for envelope in self.mine})
        if len(tenants) > 1:
            told = ", ".join(f"{tenant!r:.80}" for tenant in tenants[:_SHOWN])
            raise ConfigError(
                f"request {self.request!r}: {len(tenants)} tenants have one of that id: "
                f"{told}; choose with --tenant"
            )
        names = dict.fromkeys(Key.__struct_fields__, None) | {"request": self.request}
        self.mine = list({(e.source, e.id): e for e in self.mine}.values())  # once each
        for envelope in self.mine:
            for name in ("context", "context_version", "workflow", "engine"):
                names[name] = getattr(envelope.key, name) or names[name]
            message = opened_body(envelope)
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
        self.key = Key(**names | {"engine": engine, "operation": None})


# -- putting it together -------------------------------------------------------------------------


def _told(about: _About, around: Around, clock: str) -> Story:
    line, description = around.line, about.description
    end = about.end[1] if about.end else None
    ended_s = about.end[0].time_s if about.end else None
    arrived_s = about.arrivals[-1][0] if about.arrivals else None
    started_s = line.started_s
    if started_s is None and end is not None and arrived_s is not None and end.mode:
        started_s = arrived_s + end.queue_s  # an engine that does not report its queue
    crowd = line.crowd
    if crowd is not None:
        crowd = Crowd(running=crowd.running, waiting=crowd.waiting, gpu_used=around.gpu_used)
    origin_s = min(
        [*about.described_s, *(t for t, _ in about.arrivals)], default=about.mine[0].time_s
    )
    return Story(
        request=about.request,
        tenant=about.tenant,
        context=about.key.context,
        context_version=about.key.context_version,
        workflow=about.key.workflow,
        turn=description.turn if description else 0,
        role=description.role if description else None,
        engine=about.key.engine,
        clock=clock,
        origin_s=origin_s,
        last_heard_s=around.last_s,
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
        blocks=(
            around.blocks()
            if description and description.prefix_hashes and not _mismatch(about, around)
            else None
        ),
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


def _asked(about: _About, around: Around) -> tuple[Asked, ...]:
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
        message, operation = opened_body(envelope), envelope.key.operation
        if isinstance(message, Control):
            if operation not in answers:  # sent again, it is the same operation
                controls.append((envelope, message))
                answers[operation or ""] = []
        elif isinstance(message, OperationOutcome) and operation in answers:
            answer = Answer(
                time_s=envelope.time_s,
                by=envelope.key.engine or envelope.source,
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


def _mismatch(about: _About, around: Around) -> str:
    """What its harness and its engine use differently, so that its hashes say nothing there."""
    if about.description is None:
        return ""
    differing = differences(about.description, around.capabilities)
    return in_words(differing, "its harness", about.key.engine or "its engine")


def _unknown(about: _About, around: Around, origin_s: float) -> Iterable[str]:
    def at(time_s: float) -> str:
        return f"{time_s - origin_s:+.3f} s"

    described = about.description
    if described is None:
        yield "what it was to be: it was not described, or before the first message that was heard"
    elif not described.prefix_hashes and described.prompt_tokens >= (described.block_size or 1):
        yield "what of it could be reused: its blocks were not named"
    elif mismatch := _mismatch(about, around):
        yield f"what of it could be reused: its hashes name no blocks of its engine: {mismatch}"
    elif about.arrivals and around.at_arrival is None:
        yield "what of it its engine held when it came"
    if about.end is None:
        yield f"how it ends: the last message was heard at {at(around.last_s)}"
    elif not about.arrivals and about.end[1].status != "rejected":
        yield "when it came to its engine, and so what went before it"
    elif about.arrivals and about.end[1].mode and around.line.started_s is None:
        if around.line.places:
            yield "when it left the queue"
        else:
            yield "what went before it: its engine did not report its queue"
    for time_s, what in around.gaps:
        yield f"{what}, at {at(time_s)}"
    last_s = about.end[0].time_s if about.end else around.last_s
    for time_s, why in about.cut_off:
        if time_s <= last_s + 1.0:
            yield f"what passed before {at(time_s)}, when the recorder was cut off: {why}"
