"""Session-Aware: contexts that are likely to come back are kept longer (paper, section 4.2).

How likely a session continues is learned from the turns that have completed so far, by the depth
of the session and the pauses between its turns; nothing of the future is used. The estimate is
published as a prediction, which asks nobody to act, and as a Retain preference, which does.

The paper publishes neither the estimator nor its constants. Here it is a table of how often a
turn at this depth, after a pause of this length, was followed by another, each cell drawn towards
the row of its depth and that towards the whole by ``prior_weight`` pseudo-observations.
"""

from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from hear.engine_view import EngineViews
from hear.errors import ConfigError
from hear.harness_view import ContextView, HarnessView
from hear.interfaces import Ask
from hear.messages import (
    ContextClosed,
    Key,
    Release,
    RequestDescribed,
    RequestOutcome,
    Retain,
    ReuseExpected,
)

_GAP_BOUNDS_S = (15.0, 60.0, 180.0)
_MAX_DEPTH = 5
_FLOOR = 0.01
_MAX_CONTEXTS = 100_000

Cell = tuple[int, int]


@dataclass(slots=True)
class _Tally:
    completed: float = 0.0
    returned: float = 0.0

    def share(self, prior: float, weight: float) -> float:
        return (self.returned + weight * prior) / (self.completed + weight)


class ContinuationEstimator:
    """The share of completed turns that were followed by another, by depth and pause."""

    def __init__(self, prior: float = 0.3, weight: float = 4.0) -> None:
        self._prior = prior
        self._weight = weight
        self._all = _Tally()
        self._depths: dict[int, _Tally] = {}
        self._cells: dict[Cell, _Tally] = {}

    @staticmethod
    def cell(depth: int, gaps_s: list[float]) -> Cell:
        """The cell of a session that has completed ``depth`` turns with these pauses."""
        if not gaps_s:
            return min(depth, _MAX_DEPTH), 0
        return min(depth, _MAX_DEPTH), 1 + bisect(_GAP_BOUNDS_S, sum(gaps_s) / len(gaps_s))

    def completed(self, cell: Cell) -> None:
        """A turn has completed in this cell."""
        for tally in self._tallies(cell):
            tally.completed += 1

    def returned(self, cell: Cell) -> None:
        """A turn that completed in this cell was followed by another."""
        for tally in self._tallies(cell):
            tally.returned += 1

    def probability(self, cell: Cell) -> float:
        """Estimate that a session in this cell continues."""
        whole, row, single = self._tallies(cell)
        prior = whole.share(self._prior, self._weight)
        return single.share(row.share(prior, self._weight), self._weight)

    def _tallies(self, cell: Cell) -> tuple[_Tally, _Tally, _Tally]:
        return (
            self._all,
            self._depths.setdefault(cell[0], _Tally()),
            self._cells.setdefault(cell, _Tally()),
        )


@dataclass(slots=True)
class _Known:
    """A context that was served of late.

    ``requests`` holds the cell that each request falls in when it completes; it is fixed when the
    request is described, so that it tells nothing of what came after. ``idle`` is the cell in
    which the last one completed. One that was closed is known until its requests have ended, since
    their outcomes may be on the way.
    """

    touched_s: float
    requests: dict[str, Cell] = field(default_factory=dict)
    idle: Cell | None = None
    engines: dict[str, None] = field(default_factory=dict)  # those that were asked for a lease
    closed: bool = False


class SessionAware:
    """Leases each context by the estimate that its session continues."""

    name = "session-aware"
    observes = (
        "intent.*.*.request_described.>",
        "intent.*.*.context_closed.>",
        "outcome.*.*.request_outcome.>",
    )

    def __init__(self, lease_s: float = 3600.0) -> None:
        """``lease_s`` is how long a context is leased for after each turn.

        A context of which nothing is heard for as long is forgotten.

        Raises:
            ConfigError: it is not a positive number.
        """
        if not 0 < lease_s < 1e9:
            raise ConfigError(f"session-aware: lease {lease_s} s, expected a positive number")
        self._lease_s = lease_s
        self._estimator = ContinuationEstimator()
        # The one that was touched longest ago stands first.
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        """Learn from what has come, and lease the contexts that are served."""
        self._forget_with(h, s)
        for key, message in h.changes:
            if key.context is None:
                continue
            context = h.contexts.get(key.context)
            if isinstance(message, RequestDescribed):
                known = self._touch(key.context, h.now)
                known.closed = False
                if known.idle is not None:
                    self._estimator.returned(known.idle)
                    known.idle = None
                if key.request is not None:
                    known.requests[key.request] = self._cell(context, 1)
            elif isinstance(message, ContextClosed):
                closed = self._known.get(key.context)
                if closed is None:
                    continue
                closed.idle, closed.closed = None, True
                for engine in closed.engines:
                    yield Ask(
                        Release(reason="context closed"), Key(context=key.context, engine=engine)
                    )
                closed.engines.clear()
                self._leave(key.context)
            elif isinstance(message, RequestOutcome):
                if key.context in self._known or not h.is_closed(key.context):
                    yield from self._served(key, context, message, h.now)
                self._leave(key.context)
        self._forget(h.now)

    def _cell(self, context: ContextView | None, more: int) -> Cell:
        if context is None:
            return self._estimator.cell(1, [])
        return self._estimator.cell(max(context.turns + more, 1), context.gaps_s)

    def _touch(self, context: str, now: float) -> _Known:
        known = self._known.pop(context, None) or _Known(now)
        known.touched_s = now
        self._known[context] = known
        if len(self._known) > _MAX_CONTEXTS:
            self._known.popitem(last=False)
        return known

    def _leave(self, context: str) -> None:
        """A context that is closed and has no request left is not needed any more."""
        known = self._known.get(context)
        if known is not None and known.closed and not known.requests:
            del self._known[context]

    def _forget_with(self, h: HarnessView, s: EngineViews) -> None:
        """Give up the engines and the requests that the views have given up."""
        for key in h.forgotten:
            known = self._known.get(key.context or "")
            if known is not None:
                known.requests.pop(key.request or "", None)
                self._leave(key.context or "")
        if s.forgotten:
            for known in self._known.values():
                for engine in s.forgotten:
                    known.engines.pop(engine, None)

    def _forget(self, now: float) -> None:
        while self._known:
            oldest = next(iter(self._known))
            if now - self._known[oldest].touched_s < self._lease_s:
                return
            del self._known[oldest]

    def _served(
        self, key: Key, context: ContextView | None, outcome: RequestOutcome, now: float
    ) -> Iterable[Ask]:
        assert key.context is not None
        # The lease is asked for when the request is accepted, so that it holds at the moment when
        # its blocks come free, and again when it has completed: by then the first may have
        # yielded, and the estimate has learned.
        known = self._touch(key.context, now)
        accepted = outcome.status == "accepted"
        cell = known.requests.get(key.request or "")
        if cell is None:  # nobody described it, or not yet
            cell = self._cell(context, 1 if accepted else 0)
        if not accepted:
            known.requests.pop(key.request or "", None)
            if outcome.status != "completed":
                return
            self._estimator.completed(cell)
            if known.requests:  # the next one did not wait for it
                self._estimator.returned(cell)
            elif not known.closed:
                known.idle = cell
        if known.closed or key.engine is None:
            return
        estimate = max(self._estimator.probability(cell), _FLOOR)
        about = Key(context=key.context, context_version=key.context_version, engine=key.engine)
        if not accepted:
            prediction = ReuseExpected(basis="predicted", probability=estimate, predictor=self.name)
            yield Ask(prediction, about)
        known.engines[key.engine] = None
        retain = Retain(
            score=estimate,
            lease_s=self._lease_s,
            reason=f"continues with probability {estimate:.2f}",
        )
        yield Ask(retain, about)
