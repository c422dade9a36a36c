"""What the screen shows, as data: fed with envelopes, asked for immutable pictures.

It knows no terminal, no bus and no clock: the time is an argument. All that it keeps is bounded.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from hear.buses.observe.tap.decisions import Decisions, PolicyPicture
from hear.buses.observe.tap.follow import Numbers
from hear.buses.observe.tap.lines import of_tenant
from hear.buses.observe.tap.reading import read
from hear.buses.observe.tap.timelines import RequestPicture, Timelines
from hear.delivery import Arrival
from hear.engine_view import EngineView, EngineViews, StateRefusedError
from hear.escaping import printable
from hear.harness_view import HarnessView
from hear.messages import ContextVersioned, Envelope, Message, RequestDescribed
from hear.subjects import stem_of

MAX_ENGINES: Final = 64
RATE_S: Final = 10
"""Seconds over which rates are taken."""
_MAX_OF_HARNESS = 4096
_MAX_BYTES = 1 << 24
_MAX_LOSSES = 8
_STREAMS = ("residency", "queue", "pressure", "capabilities", "costs")


@dataclass(frozen=True, slots=True)
class TierPicture:
    """One tier in blocks; ``held`` is what the residency directory counts, None if not known."""

    tier: str
    num_blocks: int
    used: int
    cached: int
    held: int | None


@dataclass(frozen=True, slots=True)
class EnginePicture:
    """One engine as one tenant is told of it, whom ``name`` tells too.

    ``age_s`` is the age of its last word; counts are None while not known.
    """

    name: str
    epoch: int
    model: str
    num_waiting: int | None
    num_running: int | None
    tiers: tuple[TierPicture, ...]
    residency_known: bool
    residency_partial: bool
    num_blocks: int
    preemptions: int
    backlog_s: float
    age_s: float | None
    gaps: int


@dataclass(frozen=True, slots=True)
class Loss:
    """Messages that did not come."""

    time_s: float
    source: str
    stem: str
    missed: int


@dataclass(frozen=True, slots=True)
class Picture:
    """All that there is to see at ``now``. ``rates`` are messages a second by category."""

    now: float
    engines: tuple[EnginePicture, ...] = ()
    requests: tuple[RequestPicture, ...] = ()
    policies: tuple[PolicyPicture, ...] = ()
    rates: tuple[tuple[str, float], ...] = ()
    num_messages: int = 0
    losses: tuple[Loss, ...] = ()
    gaps: int = 0
    missed: int = 0
    dropped: int = 0
    times_cut_off: int = 0
    unreadable: int = 0
    unknown: int = 0
    num_contexts: int = 0
    num_paused: int = 0


class Board:
    """Keeps what the screen shows."""

    def __init__(self) -> None:
        self._numbers = Numbers()
        # By tenant; who was heard of longest ago stands first.
        self._engines: OrderedDict[str, EngineViews] = OrderedDict()
        self._harness: OrderedDict[str, HarnessView] = OrderedDict()
        self._timelines = Timelines()
        self._decisions = Decisions()
        self._rates = _Rates()
        # By tenant and source; the one that missed something first stands first.
        self._gaps: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._losses: deque[Loss] = deque(maxlen=_MAX_LOSSES)
        self._num_messages = 0
        self._unreadable = 0
        self._unknown = 0

    def apply(self, envelope: Envelope, now: float) -> bool:
        """Take over a message; returns whether a snapshot of its stream is needed."""
        self._num_messages += 1
        self._rates.note(envelope.category, now)
        arrival, missed = self._numbers.observe(envelope)
        if missed:
            self._note_loss(envelope, missed)
        reading = read(envelope, arrival)
        message = reading.message
        if message is None:
            if reading.problem:
                self._unreadable += 1
            else:
                self._unknown += 1
            return False
        needs_snapshot = False
        if envelope.category == "state":
            needs_snapshot = self._apply_state(envelope, message, now)
            if arrival is Arrival.STALE:
                return needs_snapshot
        else:
            self._apply_to_harness(envelope, _without_hashes(message), now)
        self._timelines.apply(reading)
        self._decisions.apply(reading)
        return needs_snapshot

    def picture(self, now: float, *, dropped: int = 0, times_cut_off: int = 0) -> Picture:
        """What there is to see at ``now``."""
        for views in self._engines.values():
            views.advance(now)
            views.clear_changes()
        for harness in self._harness.values():
            harness.advance(now)
            harness.clear_changes()
        contexts = [c for harness in self._harness.values() for c in harness.contexts.values()]
        return Picture(
            now=now,
            engines=tuple(
                self._engine(tenant, view, now)
                for tenant, views in sorted(self._engines.items())
                for _, view in sorted(views.items())
            ),
            requests=self._timelines.pictures(),
            policies=self._decisions.pictures(),
            rates=tuple(self._rates.per_second(now)),
            num_messages=self._num_messages,
            losses=tuple(self._losses),
            gaps=self._numbers.gaps,
            missed=self._numbers.missed,
            dropped=dropped,
            times_cut_off=times_cut_off,
            unreadable=self._unreadable,
            unknown=self._unknown,
            num_contexts=len(contexts),
            num_paused=sum(context.pause is not None for context in contexts),
        )

    def _apply_state(self, envelope: Envelope, message: Message, now: float) -> bool:
        engine = envelope.key.engine or envelope.source
        views = self._engines.get(envelope.tenant)
        if views is None or engine not in views:
            if sum(map(len, self._engines.values())) >= MAX_ENGINES:
                self._forget_engine()
            views = self._engines.setdefault(envelope.tenant, EngineViews())
        self._engines.move_to_end(envelope.tenant)
        views.advance(now)
        try:
            return views.apply(envelope, message)
        except StateRefusedError as error:
            self._unreadable += 1
            return error.ask
        finally:
            views.clear_changes()

    def _forget_engine(self) -> None:
        """Give up the engine that was heard of longest ago, whoever's it is."""
        oldest = {
            tenant: min(views.values(), key=lambda view: view.heard)
            for tenant, views in self._engines.items()
        }
        tenant = min(oldest, key=lambda tenant: oldest[tenant].heard_s)
        self._gaps.pop((tenant, oldest[tenant].name), None)
        self._engines[tenant].forget(oldest[tenant].name)
        if not self._engines[tenant]:
            del self._engines[tenant]

    def _apply_to_harness(self, envelope: Envelope, message: Message, now: float) -> None:
        harness = self._harness.get(envelope.tenant)
        if harness is None:
            if len(self._harness) >= MAX_ENGINES:
                self._harness.popitem(last=False)
            most = _MAX_OF_HARNESS
            harness = HarnessView(max_requests=most, max_contexts=most, max_bytes=_MAX_BYTES)
            self._harness[envelope.tenant] = harness
        self._harness.move_to_end(envelope.tenant)
        harness.advance(now)
        harness.apply(envelope, message)
        harness.clear_changes()

    def _note_loss(self, envelope: Envelope, missed: int) -> None:
        source = envelope.tenant, envelope.source
        self._gaps[source] = self._gaps.get(source, 0) + 1
        if len(self._gaps) > _MAX_OF_HARNESS:
            self._gaps.popitem(last=False)
        stem = printable(stem_of(envelope))
        self._losses.append(Loss(envelope.time_s, printable(envelope.source), stem, missed))

    def _engine(self, tenant: str, view: EngineView, now: float) -> EnginePicture:
        pressure, capabilities = view.pressure, view.capabilities
        ages = [age for stream in _STREAMS if (age := view.age_s(stream, now)) is not None]
        return EnginePicture(
            name=printable(of_tenant(view.name, tenant)),
            epoch=view.epoch,
            model=printable(capabilities.model) if capabilities else "",
            num_waiting=len(view.waiting) if view.queue_known else None,
            num_running=len(view.running) if view.queue_known else None,
            tiers=tuple(_tiers(view)),
            residency_known=view.residency_known,
            residency_partial=view.residency_partial,
            num_blocks=view.residency.num_blocks(),
            preemptions=pressure.preemptions if pressure else 0,
            backlog_s=pressure.load_backlog_s if pressure else 0.0,
            age_s=max(min(ages), 0.0) if ages else None,
            gaps=self._gaps.get((tenant, view.name), 0),
        )


class _Rates:
    """Messages a second by category, over the last ``RATE_S`` seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Counter[str]]] = deque()

    def note(self, category: str, now: float) -> None:
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Counter()))
            self._forget(now)
        counts = self._seconds[-1][1]
        counts[category if category in counts or len(counts) < 8 else "other"] += 1

    def per_second(self, now: float) -> Iterator[tuple[str, float]]:
        self._forget(now)
        total: Counter[str] = Counter()
        for _, counts in self._seconds:
            total.update(counts)
        for category in ("intent", "control", "state", "outcome"):
            yield category, total.pop(category, 0) / RATE_S
        for category, number in total.items():
            yield printable(category), number / RATE_S

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= now - RATE_S:
            self._seconds.popleft()


def _tiers(view: EngineView) -> Iterator[TierPicture]:
    tiers = view.pressure.tiers if view.pressure else ()
    for tier in tiers:
        held = view.residency.num_blocks(tier.tier) if view.residency_known else None
        yield TierPicture(printable(tier.tier), tier.num_blocks, tier.used, tier.cached, held)


def _without_hashes(message: Message) -> Message:
    """The message without what is most of it and nothing here needs."""
    if isinstance(message, RequestDescribed | ContextVersioned) and message.prefix_hashes:
        return replace(message, prefix_hashes=b"")
    return message
