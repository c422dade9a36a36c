"""What a reader knows of the workflows: h in d = pi(h, s) (paper, equation 1).

Requests, the contexts that they run on, what depends on what, and what was said of the future; all
of one tenant, since names mean something within it alone.
Nothing here tells an engine to act.

Nobody tells the end of everything: an engine that HEAR is attached to from outside tells no
outcomes of requests that others send there, and a harness that dies closes no context. So all that
is kept is bounded in number, in bytes and by silence (``hear.kept``), and what had to go is listed.
"""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct, field

from hear.codec import encode_body
from hear.kept import Kept
from hear.messages import (
    ContextClosed,
    ContextForked,
    ContextOpened,
    ContextPaused,
    ContextResumed,
    ContextVersioned,
    Envelope,
    Key,
    Message,
    RequestDescribed,
    RequestOutcome,
    RequestReadinessChanged,
    ReuseExpected,
    WorkflowDescribed,
)

MAX_GAPS = 1_000
MAX_SPEAKERS = 8
"""Sources that are remembered of a request or a context: its harness, and the pools on its way."""

UNTAKEN_S: Final = 3_600.0
"""How long a request that is ready and that no engine has accepted is kept: as long as an engine
keeps a control for it (``hear.engine_operations.MAX_DEADLINE_S``)."""

CLOSED_S: Final = 60.0
"""The same of a request whose context was closed."""

SILENT_S: Final = 21_600.0
"""How long all else is kept of which nothing is heard."""

MAX_BYTES: Final = 1 << 28
"""Most that is kept of requests; each other table of a view has a quarter of it."""

_REMEMBER_IDS = 65_536
_SWEEP_S: Final = 60.0
_ENTRY_BYTES: Final = 1_500  # objects around what a message says, about
_FLOAT_BYTES: Final = 32

_OfContext = (
    ContextOpened
    | ContextVersioned
    | ContextForked
    | ContextPaused
    | ContextResumed
    | ContextClosed
    | ReuseExpected
)


Speakers = tuple[tuple[str, int], ...]
"""The sources that have spoken of a thing, each with its epoch; the latest stand last.

A harness that starts again begins a new epoch, and may use its names again for other things.
"""


def _with(speakers: Speakers, envelope: Envelope) -> tuple[Speakers, bool]:
    """The speakers with who speaks now, and whether that one has started again since."""
    source, epoch = envelope.source, envelope.epoch
    before = epoch
    for name, known in speakers:
        if name == source:
            before = known
    others = tuple(pair for pair in speakers if pair[0] != source)
    return (*others, (source, max(before, epoch)))[-MAX_SPEAKERS:], epoch > before


class RequestView(Struct):
    """A request that has not ended. ``life`` tells it from others that had its name before."""

    id: str
    key: Key
    description: RequestDescribed
    described_s: float
    ready: bool
    speakers: Speakers
    life: int
    accepted: bool = False

    @property
    def source(self) -> str:
        """Who described it last."""
        return self.speakers[-1][0]


class ContextView(Struct):
    """A context. ``turns`` counts its completed requests; ``gaps_s`` are the pauses before them.

    Of the pauses the last ``MAX_GAPS`` are kept. All of it is forgotten when the harness that
    speaks of it has started again.
    """

    id: str
    version: int = 0
    parent: str | None = None
    role: str | None = None
    turns: int = 0
    gaps_s: list[float] = field(default_factory=list)
    last_completed_s: float | None = None
    pause: ContextPaused | None = None
    paused_s: float | None = None
    reuse: ReuseExpected | None = None
    speakers: Speakers = ()


class _Completed(Struct):
    """A request that has completed, when, and who had described it."""

    time_s: float
    speakers: Speakers


class HarnessView:
    """Everything that harnesses have said and that still matters.

    ``changes`` lists what came since the last decision, as pairs of key and message, and
    ``forgotten`` the keys of the requests that were given up since then, unended as far as is
    known. ``now`` is the time at which the view was last brought up to date, by its reader's clock.
    """

    def __init__(
        self,
        *,
        max_requests: int = 100_000,
        max_contexts: int = 100_000,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        share = max_bytes // 4
        self.requests: Kept[RequestView] = Kept(max_entries=max_requests, max_bytes=max_bytes)
        self.contexts: Kept[ContextView] = Kept(max_entries=max_contexts, max_bytes=share)
        self.workflows: Kept[WorkflowDescribed] = Kept(max_entries=max_contexts, max_bytes=share)
        self.changes: list[tuple[Key, Message]] = []
        self.forgotten: list[Key] = []
        self.num_forgotten = 0
        """How many requests were given up since the view was made."""
        self.now = 0.0
        self._swept_s = 0.0
        self._completed: Kept[_Completed] = Kept(max_entries=max_requests, max_bytes=share)
        self._closed: Kept[None] = Kept(max_entries=max_contexts, max_bytes=share)
        self._num_lives = 0
        self._seen: Kept[None] = Kept(max_entries=_REMEMBER_IDS, max_bytes=share)

    def ready_requests(self) -> Iterator[RequestView]:
        """The requests that may run: said to be ready, and all that they depend on completed."""
        for request in self.requests.values():
            if request.ready and all(d in self._completed for d in request.description.depends_on):
                yield request

    def is_closed(self, context: str) -> bool:
        """Whether a context was closed, and its harness has not spoken of it again."""
        return context in self._closed

    def advance(self, now: float) -> None:
        """Bring the view to ``now``, by its reader's clock: what was silent for long goes."""
        self.now = now
        if now - self._swept_s < _SWEEP_S:
            return
        self._swept_s = now
        self._forget(self.requests.forget_silent(now, self._patience_s))
        for table in (self.contexts, self.workflows, self._completed, self._closed, self._seen):
            table.forget_silent(now, lambda _: SILENT_S)

    def clear_changes(self) -> None:
        """A decision was made on all that has changed."""
        self.changes.clear()
        self.forgotten.clear()

    def apply(self, envelope: Envelope, message: Message) -> None:
        """Take over an intent message or a request's outcome; one delivered twice counts once."""
        key = envelope.key
        if envelope.id in self._seen:
            return
        self._seen.keep(envelope.id, None, self.now)
        if key.workflow is not None:
            self.workflows.hear_of(key.workflow, self.now)
        if isinstance(message, WorkflowDescribed):
            if key.workflow is not None:
                size = _ENTRY_BYTES + len(encode_body(message))
                self.workflows.keep(key.workflow, message, self.now, size_bytes=size)
        elif isinstance(message, RequestDescribed | RequestReadinessChanged | RequestOutcome):
            self._apply_request(envelope, message)
        elif not isinstance(message, _OfContext):
            return
        elif key.context is not None:
            self._apply_context(envelope, message)
        self.changes.append((key, message))

    def _apply_request(
        self,
        envelope: Envelope,
        message: RequestDescribed | RequestReadinessChanged | RequestOutcome,
    ) -> None:
        key, time_s = envelope.key, envelope.time_s
        if key.request is None:
            return
        known = self.requests.get(key.request)
        if isinstance(message, RequestDescribed):
            if not self._begins_anew(envelope, key.request):
                return  # its outcome took the shorter way
            if known is not None:
                known.speakers, has_restarted = _with(known.speakers, envelope)
                if has_restarted:
                    known = None
            view = self._described(envelope, key.request, message, known)
            self._forget(self.requests.keep(key.request, view, self.now, size_bytes=_size_of(view)))
            if key.context is not None:
                context = self._context(key, envelope)
                if known is None and context.last_completed_s is not None:
                    context.gaps_s.append(max(time_s - context.last_completed_s, 0.0))
                    del context.gaps_s[:-MAX_GAPS]
                context.pause = context.paused_s = None
        elif isinstance(message, RequestReadinessChanged):
            if known is not None:
                known.ready = message.ready
                self.requests.hear_of(key.request, self.now)
        elif message.status == "accepted":
            if known is not None:
                known.accepted = True
                self.requests.hear_of(key.request, self.now)
        else:
            self.requests.drop(key.request)
            if message.status == "completed":
                completed = _Completed(time_s, () if known is None else known.speakers)
                self._completed.keep(key.request, completed, self.now, size_bytes=_ENTRY_BYTES)
                if key.context is not None and key.context not in self._closed:
                    context = self._context(key)
                    context.turns += 1
                    context.last_completed_s = time_s

    def _begins_anew(self, envelope: Envelope, request: str) -> bool:
        """Whether a description is of a request that has not completed yet."""
        completed = self._completed.get(request)
        if completed is None:
            return True
        if any(source == envelope.source for source, _ in completed.speakers):
            _, anew = _with(completed.speakers, envelope)
        else:
            anew = envelope.time_s > completed.time_s
        if anew:
            self._completed.drop(request)
        return anew

    def _described(
        self, envelope: Envelope, request: str, message: RequestDescribed, known: RequestView | None
    ) -> RequestView:
        view = RequestView(
            id=request,
            key=envelope.key,
            description=message,
            described_s=envelope.time_s,
            ready=message.ready,
            speakers=_with((), envelope)[0],
            life=self._num_lives,
        )
        if known is None:
            self._num_lives += 1
        else:  # said again, as when a pool has found an engine for it
            view.described_s, view.accepted = known.described_s, known.accepted
            view.speakers, view.life = known.speakers, known.life
        return view

    def _apply_context(self, envelope: Envelope, message: _OfContext) -> None:
        key, time_s = envelope.key, envelope.time_s
        assert key.context is not None
        if isinstance(message, ContextClosed):
            self.contexts.drop(key.context)
            # The outcome of its last request may be on the way, and must not open it again.
            self._closed.keep(key.context, None, self.now)
            return
        if isinstance(message, ReuseExpected) and key.context in self._closed:
            return  # a policy's prediction, which does not open it either
        context = self._context(key, envelope)
        match message:
            case ContextOpened():
                context.role = message.role
            case ContextForked():
                context.parent = message.parent
            case ContextPaused():
                context.pause, context.paused_s = message, time_s
            case ContextResumed() | ContextVersioned():
                context.pause = context.paused_s = None
            case ReuseExpected():
                context.reuse = message

    def _context(self, key: Key, intent: Envelope | None = None) -> ContextView:
        """The context of a key; ``intent`` is what a harness has said of it just now."""
        assert key.context is not None
        context = self.contexts.get(key.context)
        if context is not None and intent is not None:
            context.speakers, has_restarted = _with(context.speakers, intent)
            if has_restarted:
                context = None
        if context is None:
            context = ContextView(key.context)
            if intent is not None:
                context.speakers, _ = _with((), intent)
        if key.context_version is not None:
            context.version = max(context.version, key.context_version)
        names = len(context.parent or "") + len(context.role or "")
        size = _ENTRY_BYTES + _FLOAT_BYTES * len(context.gaps_s) + names
        self.contexts.keep(key.context, context, self.now, size_bytes=size)
        self._closed.drop(key.context)
        return context

    def _patience_s(self, request: RequestView) -> float:
        """How long nothing may be heard of a request until it is taken for one that has ended."""
        if request.accepted:
            return SILENT_S
        if request.key.context is not None and request.key.context in self._closed:
            return CLOSED_S
        return UNTAKEN_S if request.ready else SILENT_S

    def _forget(self, requests: list[RequestView]) -> None:
        self.forgotten.extend(request.key for request in requests)
        self.num_forgotten += len(requests)


def _size_of(request: RequestView) -> int:
    description, key = request.description, request.key
    names = (description.role, description.stage, key.context, key.engine, key.workflow)
    num_letters = sum(len(name or "") for name in (*names, *description.depends_on))
    return _ENTRY_BYTES + len(description.prefix_hashes) + num_letters
