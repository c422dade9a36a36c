"""The requests of one tenant in a recording: what each was, when it came, and how it ended.

Knows which messages tell of it, and nothing of what is made of it.
"""

from typing import Final

from hear.codec import open_body
from hear.errors import RemoteProtocolError
from hear.messages import (
    CapabilitiesReported,
    ContextPaused,
    CostsReported,
    Envelope,
    RequestDescribed,
    RequestOutcome,
)
from hear.messages.intent import PauseCause

_KINDS: Final = frozenset(
    {
        "request_described",
        "request_outcome",
        "context_paused",
        "capabilities_reported",
        "costs_reported",
    }
)


class HeardRequest:
    """One request. Times are in seconds on the recording's clock.

    ``pause`` is what its context waited for after it, and ``sent_s`` is for who makes use of it.
    """

    __slots__ = (
        "arrived_s",
        "context",
        "described",
        "described_s",
        "ended_s",
        "id",
        "outcome",
        "pause",
        "sent_s",
    )

    def __init__(self, id: str) -> None:
        self.id = id
        self.context: str | None = None
        self.described: RequestDescribed | None = None
        self.described_s = 0.0
        self.arrived_s: float | None = None
        self.ended_s = 0.0
        self.outcome: RequestOutcome | None = None
        self.pause: PauseCause = "person"
        self.sent_s = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Length of its prompt; 0 if nobody told."""
        told = self.described.prompt_tokens if self.described is not None else 0
        return told or (self.outcome.prompt_tokens if self.outcome is not None else 0)


class RequestsHeard:
    """Collects them, and what engines say of themselves."""

    def __init__(self) -> None:
        self.requests: dict[str, HeardRequest] = {}
        self.engines: dict[str, CapabilitiesReported] = {}
        self.costs: dict[str, CostsReported] = {}
        self._last: dict[str, HeardRequest] = {}  # of each context, the one that ended last

    def hear(self, envelope: Envelope) -> None:
        """Take one message into account."""
        if envelope.kind not in _KINDS:
            return
        try:
            message = open_body(envelope)
        except RemoteProtocolError:
            return
        key = envelope.key
        engine = key.engine or envelope.source
        if isinstance(message, CapabilitiesReported):
            if message.tiers:  # else it holds no blocks itself, as a pool of engines
                self.engines[engine] = message
        elif isinstance(message, CostsReported):
            self.costs[engine] = message
        elif isinstance(message, ContextPaused):
            if key.context in self._last:
                self._last[key.context].pause = message.cause
        elif key.request is not None:
            request = self.requests.get(key.request)
            if request is None:
                request = self.requests[key.request] = HeardRequest(key.request)
            request.context = key.context or request.context
            if isinstance(message, RequestDescribed):
                if request.outcome is None:
                    request.described, request.described_s = message, envelope.time_s
            elif isinstance(message, RequestOutcome):
                self._take(request, message, envelope.time_s)

    def _take(self, request: HeardRequest, outcome: RequestOutcome, time_s: float) -> None:
        if outcome.status == "accepted":
            request.arrived_s = time_s
        else:
            request.outcome, request.ended_s = outcome, time_s
            if request.context is not None:
                self._last[request.context] = request
