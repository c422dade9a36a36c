"""What a reader knows of the workflows: h in d = pi(h, s) (paper, equation 1).

Requests, the contexts that they run on, what depends on what, and what was said of the future; all
of one tenant, since names mean something within it alone.
Nothing here tells an engine to act.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeVar

from msgspec import Struct, field

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

_V = TypeVar("_V")
MAX_GAPS = 1_000
_REMEMBER_IDS = 65_536

_OfContext = (
    ContextOpened
    | ContextVersioned
    | ContextForked
    | ContextPaused
    | ContextResumed
    | ContextClosed
    | ReuseExpected
)


class RequestView(Struct):
    """A request that has not ended; ``source`` is who described it."""

    id: str
    key: Key
    description: RequestDescribed
    described_s: float
    ready: bool
    accepted: bool = False
    source: str = ""


class ContextView(Struct):
    """A context. ``turns`` counts its completed requests; ``gaps_s`` are the pauses before them.

    Of the pauses the last ``MAX_GAPS`` are kept.
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


class HarnessView:
    """Everything that harnesses have said and that still matters.

    ``changes`` lists what came since the last decision, as pairs of key and message, and ``now``
    is the time at which the view was last brought up to date.
    """

    def __init__(self, *, max_requests: int = 100_000, max_contexts: int = 100_000) -> None:
        self.requests: OrderedDict[str, RequestView] = OrderedDict()
        self.contexts: OrderedDict[str, ContextView] = OrderedDict()
        self.workflows: OrderedDict[str, WorkflowDescribed] = OrderedDict()
        self.changes: list[tuple[Key, Message]] = []
        self.now = 0.0
        self._max_requests = max_requests
        self._max_contexts = max_contexts
        self._completed: OrderedDict[str, None] = OrderedDict()
        self._seen: OrderedDict[str, None] = OrderedDict()

    def ready_requests(self) -> Iterator[RequestView]:
        """The requests that may run: said to be ready, and all that they depend on completed."""
        for request in self.requests.values():
            if request.ready and all(d in self._completed for d in request.description.depends_on):
                yield request

    def apply(self, envelope: Envelope, message: Message) -> None:
        """Take over an intent message or a request's outcome; one delivered twice counts once."""
        key, time_s = envelope.key, envelope.time_s
        if envelope.id in self._seen:
            return
        self._keep(self._seen, envelope.id, None, _REMEMBER_IDS)
        if isinstance(message, WorkflowDescribed):
            if key.workflow is not None:
                self._keep(self.workflows, key.workflow, message, self._max_contexts)
        elif isinstance(message, RequestDescribed | RequestReadinessChanged | RequestOutcome):
            self._apply_request(key, message, time_s, envelope.source)
        elif not isinstance(message, _OfContext):
            return
        elif key.context is not None:
            self._apply_context(key, message, time_s)
        self.changes.append((key, message))

    def _apply_request(
        self,
        key: Key,
        message: RequestDescribed | RequestReadinessChanged | RequestOutcome,
        time_s: float,
        source: str,
    ) -> None:
        if key.request is None:
            return
        known = self.requests.get(key.request)
        if isinstance(message, RequestDescribed):
            if key.request in self._completed:
                return  # its outcome took the shorter way
            view = RequestView(key.request, key, message, time_s, message.ready, source=source)
            if known is not None:  # said again, as when a pool has found an engine for it
                view.described_s, view.accepted = known.described_s, known.accepted
            self._keep(self.requests, key.request, view, self._max_requests)
            if key.context is not None:
                context = self._context(key)
                if known is None and context.last_completed_s is not None:
                    context.gaps_s.append(max(time_s - context.last_completed_s, 0.0))
                    del context.gaps_s[:-MAX_GAPS]
                context.pause = context.paused_s = None
        elif isinstance(message, RequestReadinessChanged):
            if known is not None:
                known.ready = message.ready
        elif message.status == "accepted":
            if known is not None:
                known.accepted = True
        else:
            self.requests.pop(key.request, None)
            if message.status == "completed":
                self._keep(self._completed, key.request, None, self._max_requests)
                if key.context is not None:
                    context = self._context(key)
                    context.turns += 1
                    context.last_completed_s = time_s

    def _apply_context(self, key: Key, message: _OfContext, time_s: float) -> None:
        assert key.context is not None
        if isinstance(message, ContextClosed):
            self.contexts.pop(key.context, None)
            return
        context = self._context(key)
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

    def _context(self, key: Key) -> ContextView:
        assert key.context is not None
        context = self.contexts.get(key.context)
        if context is None:
            context = ContextView(key.context)
            self._keep(self.contexts, key.context, context, self._max_contexts)
        if key.context_version is not None:
            context.version = max(context.version, key.context_version)
        return context

    @staticmethod
    def _keep(kept: OrderedDict[str, _V], name: str, value: _V, most: int) -> None:
        kept[name] = value
        if len(kept) > most:
            kept.popitem(last=False)
