"""One look at a running cluster: who serves, who decides, who listens.

Engines are known by the snapshots that a new subscriber is given, policies by the controls that the
bus remembers, subscribers by its statistics. What does not answer within the look is named too.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

import trio
from msgspec import Struct, field

from hear import escaping
from hear.buses.observe.tap.follow import as_remembering
from hear.codec import open_body
from hear.errors import RemoteProtocolError
from hear.interfaces import Bus, BusStatistics, CentralBus, SubscriptionStatistics
from hear.messages import (
    DEFAULT_TENANT,
    CapabilitiesReported,
    Envelope,
    Message,
    OperationOutcome,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    TierPressure,
)

LOOK_S = 2.0
"""Longest time for which snapshots are awaited."""
QUIET_S = 0.3
"""When all that were heard have told all, how long to wait for others."""
STREAMS = ("capabilities", "queue", "pressure")
_UNIX_MS = 10**12  # an epoch above it is the time of a start (docs/protocol.md, The envelope)


class TierUse(Struct, frozen=True, kw_only=True):
    """How full one tier is, in blocks."""

    tier: str
    num_blocks: int
    used: int
    cached: int


class EngineStatus(Struct, kw_only=True):
    """One engine, as one tenant is told of it.

    ``missing`` names the streams that it did not answer for; ages are seconds. ``targets`` are the
    engines that a pool sends requests to now.
    """

    name: str
    tenant: str = DEFAULT_TENANT
    epoch: int = 0
    model: str = ""
    num_waiting: int | None = None
    num_running: int | None = None
    tiers: list[TierUse] = field(default_factory=list)
    controls: list[str] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    block_size: int = 0
    endpoint: str = ""
    heard_s_ago: float | None = None
    missing: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)


class PolicyStatus(Struct, kw_only=True):
    """One policy, as far as the bus remembers; ``since_s`` is a time, if it is known."""

    name: str
    tenant: str = DEFAULT_TENANT
    since_s: float | None = None
    subscribed: bool | None = None
    asked: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    num_open: int = 0


class SubscriberStatus(Struct, frozen=True, kw_only=True):
    """One subscription: messages that wait for it, that it has received, that it lost."""

    name: str
    queued: int
    received: int
    dropped: int


class Status(Struct, kw_only=True):
    """All of it. ``remembers`` tells whether the bus keeps a history at all."""

    time_s: float
    engines: list[EngineStatus]
    policies: list[PolicyStatus]
    subscribers: list[SubscriberStatus]
    published: dict[str, int]
    lagged: int
    remembers: bool
    central: bool
    own_key_only: bool = False
    """Whether ``subscribers``, ``published`` and ``lagged`` are of those with this key alone."""

    @property
    def nobody(self) -> bool:
        """Whether nobody was found."""
        return not (self.engines or self.policies)


async def look(bus: Bus, *, name: str, policies: Iterable[str] = ()) -> Status:
    """Look at a bus for ``LOOK_S`` seconds at most.

    Args:
        name: the name under which this look subscribes; it is not shown.
        policies: names of policies that may be there without having asked for anything yet.

    Raises:
        BusError: the bus is lost or did not answer.
    """
    remembering = as_remembering(bus)
    past: Sequence[Envelope] = ()
    if remembering is not None:
        past = await remembering.history(
            ["control.>", "outcome.*.*.operation_outcome.>", "state.*.*.queue.>"]
        )
    engines = _Engines()
    for envelope in past:
        if envelope.category == "state":
            engines.expect(envelope)
    await _listen(bus, name, engines)
    central = hasattr(bus, "central_statistics")
    statistics: BusStatistics = (
        await cast(CentralBus, bus).central_statistics() if central else bus.statistics()
    )
    rows = [s for s in statistics.subscriptions if s.name != name]
    now = trio.current_time()
    return Status(
        time_s=now,
        engines=engines.tell(now),
        policies=_policies(
            past, _subscribed(rows), policies, central and not statistics.own_key_only
        ),
        subscribers=[
            SubscriberStatus(name=r.name, queued=r.queued, received=r.received, dropped=r.dropped)
            for r in rows
        ],
        published=dict(statistics.published),
        lagged=statistics.lagged,
        remembers=remembering is not None,
        central=central,
        own_key_only=statistics.own_key_only,
    )


async def _listen(bus: Bus, name: str, engines: "_Engines") -> None:
    patterns = [f"state.*.*.{stream}.>" for stream in STREAMS]
    with trio.move_on_after(LOOK_S):
        async with bus.subscribe(patterns, name=name) as messages:
            while True:
                batch: Sequence[Envelope] = ()
                with trio.move_on_after(QUIET_S if engines.complete else LOOK_S) as quiet:
                    batch = await messages.receive()
                if quiet.cancelled_caught:
                    return
                for envelope in batch:
                    engines.hear(envelope)


class _Engines:
    """What engines have told each tenant so far, the newest epoch of each."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], EngineStatus] = {}  # by tenant and name
        self._heard_s: dict[tuple[str, str], float] = {}

    @property
    def complete(self) -> bool:
        """Whether there are engines, and each has told everything."""
        return bool(self._known) and not any(e.missing for e in self._known.values())

    def expect(self, envelope: Envelope) -> EngineStatus | None:
        """Know of an engine; None if the message is of an epoch that has ended."""
        name = envelope.key.engine or envelope.source
        tenant = envelope.tenant
        known = self._known.get((tenant, name))
        if known is None or envelope.epoch > known.epoch:
            known = EngineStatus(
                name=name, tenant=tenant, epoch=envelope.epoch, missing=list(STREAMS)
            )
            self._known[tenant, name] = known
        return known if envelope.epoch == known.epoch else None

    def hear(self, envelope: Envelope) -> None:
        """Take over a message of one of the streams."""
        try:
            message = open_body(envelope)
        except RemoteProtocolError:
            return
        known = self.expect(envelope)
        if known is None:
            return
        self._heard_s[known.tenant, known.name] = envelope.time_s
        match message:
            case CapabilitiesReported():
                known.model = message.model
                known.controls = list(message.controls)
                known.modes = list(message.modes)
                known.block_size = message.block_size
                known.endpoint = message.endpoint
                known.targets = list(message.targets)
                self._told(known, "capabilities")
                if known.targets:  # a pool has neither a queue nor blocks to tell of
                    known.missing.clear()
            case QueueChanged():
                known.num_waiting, known.num_running = message.num_waiting, message.num_running
                self._told(known, "queue")
            case QueueSnapshot():
                known.num_waiting, known.num_running = len(message.waiting), len(message.running)
                self._told(known, "queue")
            case PressureReported():
                known.tiers = [_tier_use(tier) for tier in message.tiers]
                self._told(known, "pressure")

    def tell(self, now: float) -> list[EngineStatus]:
        """All engines by tenant and name."""
        for name, heard in self._heard_s.items():
            self._known[name].heard_s_ago = max(now - heard, 0.0)
        return [self._known[name] for name in sorted(self._known)]

    @staticmethod
    def _told(known: EngineStatus, stream: str) -> None:
        if stream in known.missing:
            known.missing.remove(stream)


def _tier_use(tier: TierPressure) -> TierUse:
    return TierUse(tier=tier.tier, num_blocks=tier.num_blocks, used=tier.used, cached=tier.cached)


def _subscribed(rows: Iterable[SubscriptionStatistics]) -> set[str]:
    """Names of subscriptions; a hub puts the name of the process before them."""
    return {name for row in rows for name in (row.name, row.name.rpartition("/")[2])}


def _policies(
    past: Sequence[Envelope], subscribed: set[str], installed: Iterable[str], central: bool
) -> list[PolicyStatus]:
    """Who has asked for something, and who is there that could."""
    # Policies and operations are of a tenant: two may use the same names.
    found: dict[tuple[str, str], PolicyStatus] = {}
    asked: dict[tuple[str, str], Counter[str]] = {}
    senders: dict[tuple[str, str], tuple[str, str]] = {}
    last: dict[tuple[str, str], str] = {}  # status of each operation
    for envelope in past:
        tenant, id = envelope.tenant, envelope.key.operation
        operation = None if id is None else (tenant, id)
        sender = tenant, envelope.source
        if envelope.category == "control":
            known = found.get(sender)
            if known is None:
                since = envelope.epoch / 1000 if envelope.epoch > _UNIX_MS else envelope.time_s
                known = PolicyStatus(name=envelope.source, tenant=tenant, since_s=since)
                found[sender] = known
            if operation is not None and operation not in senders:  # not one that is said again
                senders[operation] = sender
                asked.setdefault(sender, Counter())[envelope.kind] += 1
        elif operation is not None and last.get(operation, "accepted") == "accepted":
            said = _read(envelope)
            if isinstance(said, OperationOutcome):
                last[operation] = said.status
    with_names = {name for _, name in found}
    for name in subscribed - with_names:  # whose they are is not known
        if name.partition(":")[0] in installed:
            found[DEFAULT_TENANT, name] = PolicyStatus(name=name)
    for operation, sender in senders.items():
        status = last.get(operation)
        policy = found[sender]
        if status in (None, "accepted"):
            policy.num_open += 1
        else:
            policy.outcomes[str(status)] = policy.outcomes.get(str(status), 0) + 1
    for named, policy in found.items():
        policy.asked = dict(asked.get(named, {}))
        # Only a centre knows all subscriptions; a bus between processes else knows its own.
        policy.subscribed = policy.name in subscribed if central or subscribed else None
    return [found[name] for name in sorted(found)]


def _read(envelope: Envelope) -> Message | None:
    try:
        return open_body(envelope)
    except RemoteProtocolError:
        return None


def to_json(status: Status) -> str:
    """The whole status as one JSON object."""
    return escaping.to_json(status)
