"""Requests as timelines: when each waited, was prefilled and decoded, as far as was heard.

Pure: fed with readings, asked for pictures. Where a request's first token lies is told by its
outcome alone, so until then its time in the batch is one stretch, ``running``. Both the number of
requests and of messages kept for each are bounded.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Literal

from hear.buses.observe.tap.lines import clock_time, of_tenant
from hear.buses.observe.tap.reading import Reading
from hear.buses.observe.tap.words import wait_words
from hear.escaping import one_line, printable
from hear.messages import (
    Envelope,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    WaitingRequest,
)

MAX_REQUESTS: Final = 512
MAX_MESSAGES: Final = 64
_LOOK_FOR_ENDED = 32

Phase = Literal["queue", "running", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in one phase; ``end_s`` is None while it lasts."""

    phase: Phase
    start_s: float
    end_s: float | None


@dataclass(frozen=True, slots=True)
class RequestPicture:
    """One request as it is shown; ``id`` tells its tenant too.

    ``messages`` are the last lines about it, oldest first.
    """

    id: str
    context: str
    engine: str
    role: str
    status: str
    priority: int
    prompt_tokens: int
    stretches: tuple[Stretch, ...]
    messages: tuple[str, ...]

    @property
    def active(self) -> bool:
        """Whether it is at an engine now."""
        return self.status in ("waiting", "running")


@dataclass(slots=True)
class _Request:
    id: str
    tenant: str
    context: str = ""
    engine: str = ""
    role: str = ""
    status: str = "described"
    priority: int = 0
    prompt_tokens: int = 0
    queued_s: float | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_MESSAGES))
    picture: RequestPicture | None = None

    @property
    def ended(self) -> bool:
        return self.ended_s is not None

    def stretches(self) -> Iterator[Stretch]:
        if self.queued_s is None:
            return
        first = self.ended_s if self.started_s is None else self.started_s
        yield Stretch("queue", self.queued_s, first)
        if self.started_s is None:
            return
        if self.first_token_s is None:
            yield Stretch("running", self.started_s, self.ended_s)
        else:
            yield Stretch("prefill", self.started_s, self.first_token_s)
            yield Stretch("decode", self.first_token_s, self.ended_s)


class Timelines:
    """The requests that were heard of last."""

    def __init__(self, *, max_requests: int = MAX_REQUESTS) -> None:
        self._requests: OrderedDict[tuple[str, str], _Request] = OrderedDict()
        self._max_requests = max_requests

    def apply(self, reading: Reading) -> None:
        """Take over a message, if it is about requests."""
        envelope, message = reading.envelope, reading.message
        if isinstance(message, QueueChanged | QueueSnapshot):
            changed = isinstance(message, QueueChanged)
            for request, words in self._apply_queue(envelope, message):
                request.picture = None
                if changed:  # a snapshot says again what was said
                    _note(request, envelope, words)
            return
        if envelope.key.request is None or envelope.category == "state":
            return
        request = self._get(envelope.tenant, envelope.key.request)
        key = envelope.key
        request.context = key.context or request.context
        request.engine = key.engine or request.engine
        if isinstance(message, RequestDescribed):
            request.role = message.role or request.role
            request.prompt_tokens = message.prompt_tokens or request.prompt_tokens
        elif isinstance(message, RequestOutcome):
            self._apply_outcome(request, message, envelope.time_s)
        remark = f" ({reading.remark})" if reading.remark else ""
        _note(request, envelope, f"{reading.words}{remark}")

    def pictures(self) -> tuple[RequestPicture, ...]:
        """All requests, the one that was heard of first last."""
        return tuple(_picture(request) for request in reversed(self._requests.values()))

    def _get(self, tenant: str, id: str) -> _Request:
        request = self._requests.get((tenant, id))
        if request is None:
            request = self._requests[tenant, id] = _Request(id, tenant)
            if len(self._requests) > self._max_requests:
                self._forget()
        return request

    def _forget(self) -> None:
        """Give up one request: the oldest that has ended, or else the oldest."""
        near = islice(self._requests.values(), _LOOK_FOR_ENDED)
        oldest = next(((r.tenant, r.id) for r in near if r.ended), None)
        if oldest is None:
            self._requests.popitem(last=False)
        else:
            del self._requests[oldest]

    # -- what happens to a request ------------------------------------------------------------

    @staticmethod
    def _apply_outcome(request: _Request, outcome: RequestOutcome, time_s: float) -> None:
        request.prompt_tokens = outcome.prompt_tokens or request.prompt_tokens
        if outcome.status == "accepted":
            if request.queued_s is None:
                request.queued_s = time_s
                request.status = "waiting"
            return
        request.status = outcome.status
        request.ended_s = time_s
        if outcome.status == "completed":
            request.first_token_s = time_s - outcome.decode_s
            request.started_s = request.first_token_s - outcome.prefill_s
            request.queued_s = request.started_s - outcome.queue_s

    def _apply_queue(
        self, envelope: Envelope, message: QueueChanged | QueueSnapshot
    ) -> Iterator[tuple[_Request, str]]:
        """What becomes of each request, and how to say it."""
        time_s, engine = envelope.time_s, envelope.key.engine or envelope.source
        tenant = envelope.tenant
        for waiting in message.waiting:
            yield self._wait(tenant, waiting, engine), f"queue: waits {wait_words(waiting)}"
        if isinstance(message, QueueChanged):
            started, ended = message.started, message.ended
        else:
            started, ended = tuple(r.request for r in message.running), ()
        for id in started:
            request = self._get(tenant, id)
            request.engine = engine
            if not request.ended and request.started_s is None:
                request.started_s = time_s
                request.queued_s = time_s if request.queued_s is None else request.queued_s
                request.status = "running"
            yield request, "queue: starts"
        for id in ended:
            request = self._get(tenant, id)
            if not request.ended:  # its outcome will tell more
                request.ended_s, request.status = time_s, "left"
            yield request, "queue: ends"

    def _wait(self, tenant: str, waiting: WaitingRequest, engine: str) -> _Request:
        request = self._get(tenant, waiting.request)
        request.engine = engine
        request.context = waiting.context or request.context
        request.priority = waiting.priority
        request.prompt_tokens = waiting.prompt_tokens or request.prompt_tokens
        if not request.ended:
            request.queued_s = waiting.since_s if request.queued_s is None else request.queued_s
            request.started_s = None  # it may have been preempted
            request.status = "waiting"
        return request


def _note(request: _Request, envelope: Envelope, words: str) -> None:
    head = f"{clock_time(envelope.time_s)} {envelope.category:8} {envelope.source}"
    request.messages.append(one_line(f"{head} {words}"))
    request.picture = None


def _picture(request: _Request) -> RequestPicture:
    if request.picture is None:
        request.picture = RequestPicture(
            id=printable(of_tenant(request.id, request.tenant)),
            context=printable(request.context),
            engine=printable(request.engine),
            role=printable(request.role),
            status=request.status,
            priority=request.priority,
            prompt_tokens=request.prompt_tokens,
            stretches=tuple(request.stretches()),
            messages=tuple(request.messages),
        )
    return request.picture
