"""What a reader believes of the engines: s in d = pi(h, s) (paper, equation 1).

Each tenant is told its own, so views are of one: who hears several keeps views for each.

All of it was observed and may be out of date: each part tells when it was last heard, and after a
gap the residency of an engine is *unknown*, not empty and not as before, until a snapshot comes.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import inf

from hear.compatibility import Difference, differences
from hear.delivery import Arrival, GapDetector
from hear.errors import RemoteProtocolError
from hear.messages import (
    BlockChange,
    CapabilitiesReported,
    CostsReported,
    Envelope,
    Message,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    ResidencyChanged,
    ResidencyPartial,
    ResidencySnapshot,
    WaitingRequest,
)
from hear.residency import ResidencyDirectory

MAX_REQUESTS = 100_000
"""Most requests of one engine that are kept; a queue that seems longer is not known."""

SILENT_S = 21_600.0
"""How long an engine may tell nothing of its state until its queue and blocks are not believed."""

MAX_BLOCKS = 1 << 24
"""Most blocks of all engines together that are kept, at some 150 bytes each."""

_SWEEP_S = 60.0

ASK_AGAIN_S = 1.0
"""How long to wait for a snapshot before asking for it again: it may have been lost as well."""


class StateRefusedError(RemoteProtocolError):
    """A state message that cannot be taken over. ``ask`` says whether to ask for a snapshot now."""

    def __init__(self, message: str, *, ask: bool) -> None:
        super().__init__(message)
        self.ask = ask


class EngineView:
    """One engine, as far as it is known.

    ``waiting`` maps the ids of waiting requests to how they stand; ``running`` holds the ids of
    those in the batch, in the order in which they started. Both are unreliable while
    ``queue_known`` is False, and ``residency`` is while ``residency_known`` is; except that while
    ``residency_partial`` is True, the blocks in it are held, and it is not known which others are.
    ``heard`` is the place of its last message among those of all engines, and ``heard_s`` when it
    came, by the reader's clock.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0
        self.heard = 0
        self.heard_s = 0.0
        self.capabilities: CapabilitiesReported | None = None
        self.costs: CostsReported | None = None
        self.pressure: PressureReported | None = None
        self.waiting: dict[str, WaitingRequest] = {}
        self.running: dict[str, None] = {}
        self.queue_known = False
        self.residency = ResidencyDirectory()
        self.residency_known = False
        self.residency_partial = False
        self._snapshot_of = 0, True
        self._next_part = 0
        self._heard_s: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}

    @property
    def targets(self) -> tuple[str, ...]:
        """The engines that a pool sends requests to; none of an engine that serves by itself."""
        return self.capabilities.targets if self.capabilities is not None else ()

    @property
    def residency_listed(self) -> bool:
        """Whether ``residency`` lists blocks that are held, be they all of them or not."""
        return self.residency_known or self.residency_partial

    def differences(self, description: RequestDescribed) -> tuple[Difference, ...]:
        """What keeps the hashes of a description from naming blocks of this engine."""
        return differences(description, self.capabilities)

    def reuse_known(self, description: RequestDescribed) -> bool:
        """Whether matching a description's hashes tells what can be reused here.

        It does not while no residency is listed, nor for hashes that are not the engine's.
        """
        return self.residency_listed and not self.differences(description)

    def age_s(self, stream: str, now: float) -> float | None:
        """Seconds since ``stream`` (residency, queue, pressure, ...) was heard; None if never."""
        heard = self._heard_s.get(stream)
        return None if heard is None else now - heard

    def restart(self, epoch: int) -> None:
        """The engine has begun a new epoch: nothing of the old one holds."""
        self.epoch = epoch
        self.waiting.clear()
        self.running.clear()
        self.residency.clear()
        self.residency_known = self.residency_partial = self.queue_known = False
        self._next_part = 0
        self._asked_s.clear()

    def fade(self) -> None:
        """Nothing is believed of its queue and blocks any more; its next word on them asks anew."""
        self.waiting.clear()
        self.running.clear()
        self.queue_known = False
        self._lose_residency()
        self._asked_s.update(queue=-inf, residency=-inf)

    def apply(self, message: Message, arrival: Arrival, time_s: float, seq: int = 0) -> bool:
        """Take over a message; returns whether a snapshot of its stream is needed.

        ``seq`` is the number in its envelope.

        Raises:
            StateRefusedError: block hashes cannot be read, or change as no engine's do; residency
                is unknown from here on.
        """
        match message:
            case ResidencyChanged():
                self._heard_s["residency"] = time_s
                return self._change_residency(message, arrival, time_s, seq)
            case ResidencySnapshot() | ResidencyPartial():
                self._heard_s["residency"] = time_s
                return self._replace_residency(message, time_s, seq)
            case QueueChanged():
                self._heard_s["queue"] = time_s
                return self._change_queue(message, arrival, time_s, seq)
            case QueueSnapshot():
                self._heard_s["queue"] = time_s
                self.waiting = {w.request: w for w in message.waiting}
                self.running = {r.request: None for r in message.running}
                self.queue_known = True
            case PressureReported():
                self._heard_s["pressure"] = time_s
                self.pressure = message
            case CapabilitiesReported():
                self._heard_s["capabilities"] = time_s
                self.capabilities = message
            case CostsReported():
                self._heard_s["costs"] = time_s
                self.costs = message
        return False

    def _change_residency(
        self, message: ResidencyChanged, arrival: Arrival, time_s: float, seq: int
    ) -> bool:
        if arrival is Arrival.GAP:
            self._lose_residency()
            self._asked_s["residency"] = time_s
            return True
        if arrival is Arrival.NEXT and seq == 1 and not self.residency_listed:
            self.residency.clear()  # of what a snapshot that did not come whole may have left
            self.residency_known = True  # before its first change a stream is empty
        if not self.residency_listed:
            return self._asks("residency", time_s)
        self._apply_blocks(message.changes, time_s)
        return False

    def _replace_residency(
        self, message: ResidencySnapshot | ResidencyPartial, time_s: float, seq: int
    ) -> bool:
        whole = isinstance(message, ResidencySnapshot)
        said = self.residency_known if whole else self.residency_partial
        if message.parts > 1 and said and (seq, whole) == self._snapshot_of:
            return False  # delivered twice, and nothing has changed since
        if message.part == 0:
            self.residency.clear()
            self._snapshot_of = seq, whole
            self._next_part = 0
        if message.part != self._next_part or (seq, whole) != self._snapshot_of:
            self._lose_residency()  # some part of it was lost
            return self._asks("residency", time_s, first=True)
        self._apply_blocks(message.chains, time_s)
        self._next_part += 1
        complete = self._next_part >= message.parts
        self.residency_known = complete and whole
        self.residency_partial = complete and not whole
        return False

    def _apply_blocks(self, changes: Iterable[BlockChange], time_s: float) -> None:
        try:
            self.residency.apply_all(changes)
        except RemoteProtocolError as error:
            self._lose_residency()
            # What was refused may be refused again, also if it was the snapshot asked for.
            raise StateRefusedError(
                str(error), ask=self._asks("residency", time_s, first=True)
            ) from error

    def _lose_residency(self) -> None:
        self.residency.clear()
        self.residency_known = self.residency_partial = False
        self._next_part = 0

    def _asks(self, stream: str, time_s: float, *, first: bool = False) -> bool:
        """Whether to ask again for the snapshot of a stream that is not known.

        ``first`` says whether to ask if that was never done: whoever subscribes is given one.
        """
        asked_s = self._asked_s.setdefault(stream, -inf if first else time_s)
        if time_s - asked_s < ASK_AGAIN_S:
            return False
        self._asked_s[stream] = time_s
        return True

    def _change_queue(
        self, message: QueueChanged, arrival: Arrival, time_s: float, seq: int
    ) -> bool:
        if arrival is Arrival.GAP:
            self.queue_known = False
            self._asked_s["queue"] = time_s
            return True
        if arrival is Arrival.NEXT and seq == 1:
            self.queue_known = True
        for waiting in message.waiting:
            self.running.pop(waiting.request, None)  # it was preempted
            self.waiting[waiting.request] = waiting
        for request in message.started:
            self.waiting.pop(request, None)
            self.running[request] = None
        for request in message.ended:
            self.waiting.pop(request, None)
            self.running.pop(request, None)
        if len(self.waiting) + len(self.running) > MAX_REQUESTS:
            self.waiting.clear()
            self.running.clear()
            self.queue_known = False
        return not self.queue_known and self._asks("queue", time_s)


class EngineViews(Mapping[str, EngineView]):
    """All engines that were heard of by one tenant, by name.

    ``changes`` lists what came since the last decision, as pairs of engine and message, and
    ``forgotten`` the names of the engines whose queue and blocks were given up since then. Of more
    than ``max_engines`` the one that has been silent longest goes altogether. One that is merely
    silent keeps its name and capabilities: a pool may say nothing for days, and serve.
    """

    def __init__(self, *, max_engines: int = 4_096, max_blocks: int = MAX_BLOCKS) -> None:
        self._views: dict[str, EngineView] = {}
        self._max_engines = max_engines
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._num_heard = 0
        self._now = 0.0
        self._swept_s = 0.0
        self._detector = GapDetector()
        self.changes: list[tuple[EngineView, Message]] = []
        self.forgotten: list[str] = []
        self.num_forgotten = 0
        """How often the queue and blocks of an engine were given up since the views were made."""

    @property
    def gaps(self) -> int:
        """How often something was missed."""
        return self._detector.gaps

    def __getitem__(self, engine: str) -> EngineView:
        return self._views[engine]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def advance(self, now: float) -> None:
        """Bring the views to ``now``, by their reader's clock: what was silent for long fades."""
        self._now = now
        if now - self._swept_s < _SWEEP_S:
            return
        self._swept_s = now
        for view in self._views.values():
            believed = view.queue_known or view.residency_listed
            if believed and now - view.heard_s > SILENT_S:
                self._fade(view)

    def clear_changes(self) -> None:
        """A decision was made on all that has changed."""
        self.changes.clear()
        self.forgotten.clear()

    def forget(self, engine: str) -> None:
        """Give up all that is known of an engine.

        Raises:
            KeyError: nothing was heard of it.
        """
        self._fade(self._views[engine])
        del self._views[engine]

    def apply(self, envelope: Envelope, message: Message) -> bool:
        """Take over a state message; returns whether a snapshot of its stream is needed.

        Raises:
            StateRefusedError: as ``EngineView.apply``.
        """
        engine = envelope.key.engine or envelope.source
        view = self._views.get(engine)
        if view is None:
            if len(self._views) >= self._max_engines:
                self.forget(min(self._views.values(), key=_heard).name)
            view = self._views[engine] = EngineView(engine)
        self._num_heard += 1
        view.heard = self._num_heard
        view.heard_s = self._now
        arrival = self._detector.observe(envelope)
        if arrival is Arrival.STALE or envelope.epoch < view.epoch:
            return False
        num_blocks = view.residency.num_blocks()
        try:
            if envelope.epoch > view.epoch:
                view.restart(envelope.epoch)
            needs_snapshot = view.apply(message, arrival, envelope.time_s, envelope.seq)
        finally:
            self._num_blocks += view.residency.num_blocks() - num_blocks
        self.changes.append((view, message))
        while self._num_blocks > self._max_blocks:
            holders = [v for v in self._views.values() if v.residency.num_blocks()]
            self._fade(min(holders, key=_heard))
        return needs_snapshot

    def _fade(self, view: EngineView) -> None:
        self._num_blocks -= view.residency.num_blocks()
        view.fade()
        self.forgotten.append(view.name)
        self.num_forgotten += 1


def _heard(view: EngineView) -> int:
    return view.heard
