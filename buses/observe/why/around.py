"""What goes on around a request: its engine's queue and cache, and controls on its context.

Opens only bodies that can matter, and holds nothing that grows with what is heard but what is
needed of requests that have not ended.
"""

from contextlib import suppress
from typing import Final

from hear.blocks import unpack
from hear.buses.observe.why.facts import Blocks
from hear.buses.observe.why.line import ORDERING, Line, opened_body
from hear.buses.observe.why.residence import Residence
from hear.delivery import Arrival, GapDetector
from hear.errors import RemoteProtocolError
from hear.kept import Kept
from hear.messages import (
    CapabilitiesReported,
    Envelope,
    Key,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    ResidencyChanged,
    ResidencyPartial,
    ResidencySnapshot,
)
from hear.recording import Noted, Record

_MAX_PROMPTS: Final = 100_000
_MAX_PROMPT_BYTES: Final = 1 << 28
"""Most that is kept of the prompts of others: an attached engine tells no end of most of them."""


class Around:
    """What went on around it: its engine's queue and cache, and controls on its context."""

    def __init__(
        self,
        key: Key,
        description: RequestDescribed | None,
        end_id: str | None = None,
        *,
        tenant: str,
    ) -> None:
        """Begin; ``key`` names request, context and engine, ``end_id`` the message of its end.

        All names are those of ``tenant``: what others say of the same engine is not about them.
        """
        self._tenant = tenant
        self._key = key
        self._request = key.request or ""
        self._engine = key.engine
        self._end_id = end_id
        self.line = Line(self._request)
        hashes = unpack(_whole(description.prefix_hashes)) if description is not None else ()
        self._prompts: Kept[Envelope] = Kept(max_entries=_MAX_PROMPTS, max_bytes=_MAX_PROMPT_BYTES)
        self.residence = Residence(hashes, self._owners)
        self.depends_on: dict[str, float | None] = {}
        if description is not None:
            self.depends_on = dict.fromkeys(description.depends_on)
        self._block_size = description.block_size if description is not None else 0
        self.capabilities: CapabilitiesReported | None = None
        self._found: Blocks | None = None
        self.at_arrival: int | None = None
        self.at_start: int | None = None
        self.gpu_used: float | None = None
        self.of_context: list[Envelope] = []
        self.gaps: list[tuple[float, str]] = []
        self.last_s = 0.0
        self._pressure: float | None = None
        self._epoch = 0
        self._detector = GapDetector()

    @property
    def names(self) -> list[str]:
        """Texts of which at least one occurs in each message that can matter."""
        engine = [self._engine] if self._engine is not None else []
        context = [self._key.context] if self._key.context is not None else []
        return [*engine, "request_described", self._request, *context, *self.depends_on]

    def hear(self, record: Record) -> bool:
        """Take one record into account; returns whether the request has ended with it."""
        if isinstance(record, Noted):
            return False
        envelope = record.envelope
        if envelope.tenant != self._tenant:
            return False
        category, key = envelope.category, envelope.key
        if envelope.time_s > self.last_s:
            self.last_s = envelope.time_s
        if category == "state":
            if key.engine == self._engine:
                self._hear_state(envelope)
        elif envelope.kind == "request_outcome":
            return self._hear_outcome(envelope)
        elif key.request is not None and key.request != self._request:
            if envelope.kind == "request_described":
                if self.at_start is None:
                    size = len(envelope.body)
                    self._prompts.keep(key.request, envelope, envelope.time_s, size_bytes=size)
            elif key.engine == self._engine:
                self._hear_of_order(envelope)
        elif category in ("control", "outcome"):
            self._hear_of_order(envelope)
            if key.request is None and key.context is not None and key.context == self._key.context:
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
            message = opened_body(envelope)
            if not isinstance(message, RequestOutcome):
                return False
            if message.status == "accepted":
                self.line.arrived(key.request, envelope.time_s)
                if key.request == self._request:
                    self.at_start = self._found = None
                    self.at_arrival = self._prefix()
                    self.gpu_used = self._pressure
            else:
                if key.request in self.depends_on and message.status == "completed":
                    self.depends_on[key.request] = envelope.time_s
                self._prompts.drop(key.request)
                self.line.ended(key.request)
        return self._end_id is not None and envelope.id == self._end_id

    def _hear_state(self, envelope: Envelope) -> None:
        time_s = envelope.time_s
        arrival = self._detector.observe(envelope)
        if arrival is Arrival.STALE or envelope.epoch < self._epoch:
            return
        if envelope.epoch > self._epoch:
            if self._epoch:
                self._lose_cache(time_s, f"{self._engine} restarted, and forgot all it held")
                self.line.restart()
            self._epoch = envelope.epoch
        served = self.line.started_s is not None
        message = opened_body(envelope)
        match message:
            case CapabilitiesReported():
                self.capabilities = message
            case QueueChanged():
                if arrival is Arrival.GAP and self._waits:
                    self.gaps.append((time_s, "some changes of the queue were not heard"))
                self.line.change(message, time_s)
                others = [r for r in message.started if r != self._request]
                self.residence.explain(time_s, others)
            case QueueSnapshot():
                self.line.replace(message, time_s)
            case ResidencyChanged():
                self._change_residence(message, arrival, envelope)
            case ResidencySnapshot():
                with suppress(RemoteProtocolError):
                    self.residence.replace(message.chains, message.part, message.parts, time_s)
            case ResidencyPartial():
                self._lose_cache(time_s, f"{self._engine} lost sight of a part of its cache")
            case PressureReported():
                for tier in message.tiers:
                    if tier.tier == "gpu" and tier.num_blocks:
                        self._pressure = tier.used / tier.num_blocks
        if not served and self.line.started_s is not None:
            self.at_start = self.residence.served(time_s) if self.residence.known else None
            self._found = self.blocks()

    def _change_residence(
        self, message: ResidencyChanged, arrival: Arrival, envelope: Envelope
    ) -> None:
        if arrival is Arrival.GAP:
            self._lose_cache(envelope.time_s, "some changes of the cache were not heard")
            return
        if envelope.seq == 1:
            self.residence.known = True  # before its first change a stream is empty
        try:
            self.residence.change(message.changes, envelope.time_s)
        except RemoteProtocolError:
            self._lose_cache(envelope.time_s, "a change of the cache could not be read")

    def blocks(self) -> Blocks:
        """Its blocks, up to when it started."""
        if self._found is not None:
            return self._found
        return self.residence.facts(self._block_size, self.at_arrival, self.at_start)

    @property
    def _waits(self) -> bool:
        return self.line.crowd is not None and self.line.started_s is None

    def _lose_cache(self, time_s: float, why: str) -> None:
        if self.residence.prefix > 0 or self._waits:  # else it has lost nothing by it
            self.gaps.append((time_s, why))
        self.residence.forget()

    def _prefix(self) -> int | None:
        return self.residence.prefix if self.residence.known else None

    def _owners(self, stored: set[int]) -> list[str]:
        names = []
        for request in self.line.running:
            described = self._prompts.get(request)
            message = opened_body(described) if described is not None else None
            if isinstance(message, RequestDescribed) and not stored.isdisjoint(
                unpack(_whole(message.prefix_hashes))
            ):
                names.append(request)
        return names


def _whole(packed: bytes) -> bytes:
    return packed[: len(packed) // 8 * 8]
