"""Routing: which engine of a pool a request goes to. Three policies, from blind to informed.

A pool says of itself which engines it sends requests to (``CapabilitiesReported.targets``). Each
policy here answers a request that is described for a pool with one ``Route``, a preference that
names all of these engines, best first, so that the next is taken if the best has gone; without
those that tell another model than the request is for, if there is one left. What the pool then did
shows in the request's description, which names its engine when it is said again.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hear.blocks import unpack
from hear.compatibility import serves
from hear.engine_view import EngineView, EngineViews
from hear.errors import ConfigError
from hear.harness_view import HarnessView, RequestView
from hear.interfaces import Ask
from hear.messages import Key, RequestDescribed, RequestOutcome, RequestReadinessChanged, Route
from hear.policies.backlog import Backlogs

_MAX_SHOWN = 80
_MAX_PICKED = 4_096
_MAX_COMING = 1 << 20
"""Most blocks that are counted as on their way to engines, at some 100 bytes each."""

_INTENT = ("intent.*.*.request_described.>", "intent.*.*.request_readiness_changed.>")


class _Choice(NamedTuple):
    """Engines, best first; what of the prompt the best has to compute, in tokens; and why it."""

    targets: tuple[str, ...]
    to_compute: int
    reason: str


class _Routing:
    """What the policies have in common: when they speak, and what they take note of."""

    def __init__(self) -> None:
        self._backlogs = Backlogs()
        self._noted: dict[str, str] = {}  # requests by the engine that they were or will be sent to
        # When each engine was last chosen, as a count; the one chosen longest ago stands first.
        self._picked: OrderedDict[str, int] = OrderedDict()
        self._picks = 0

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        """Route what was described for a pool, or became ready, since the last decision."""
        for request in self._backlogs.observe(s, h.now):
            self._forget(request)
        for key in h.forgotten:
            self._backlogs.end(key.request or "")
            self._forget(key.request or "")
        for key, message in h.changes:
            if key.request is None:
                continue
            if isinstance(message, RequestOutcome):
                if message.status != "accepted":
                    self._backlogs.end(key.request)
                    self._forget(key.request)
            elif isinstance(message, RequestDescribed | RequestReadinessChanged):
                known = h.requests.get(key.request)
                if known is not None and known.key.engine is not None and message.ready:
                    yield from self._ready(known, known.key.engine, s, h.now)

    def _ready(
        self, request: RequestView, engine: str, s: EngineViews, now: float
    ) -> Iterable[Ask]:
        view = s.get(engine)
        if view is None or not view.targets:  # this is where it goes, whoever chose
            if self._noted.get(request.id) != engine:
                self._expect(request, engine, self._to_compute(request, view), now)
        elif request.id not in self._noted:
            fitting, remark = _of_its_model(request.description.model, view.targets, s)
            choice = self._choose(request, fitting, s, now)
            best = choice.targets[0]
            self._picks += 1
            self._picked[best] = self._picks
            self._picked.move_to_end(best)
            if len(self._picked) > _MAX_PICKED:
                self._picked.popitem(last=False)
            self._expect(request, best, choice.to_compute, now)
            about = Key(
                request=request.id,
                context=request.key.context,
                context_version=request.key.context_version,
                engine=engine,
            )
            yield Ask(Route(targets=choice.targets, reason=choice.reason + remark), about)

    def _expect(self, request: RequestView, engine: str, to_compute: int, now: float) -> None:
        self._forget(request.id)
        self._noted[request.id] = engine
        tokens = request.description.prompt_tokens
        self._backlogs.expect(request.id, engine, tokens, to_compute, now)

    def _least_recent(self, engine: str) -> int:
        """Breaks ties: the engine that was chosen least recently goes first."""
        return self._picked.get(engine, 0)

    def _choose(
        self, request: RequestView, engines: Sequence[str], s: EngineViews, now: float
    ) -> _Choice:
        raise NotImplementedError

    def _to_compute(self, request: RequestView, view: EngineView | None) -> int:
        """Tokens of the prompt that an engine has to compute."""
        return request.description.prompt_tokens

    def _forget(self, request: str) -> None:
        """A request has ended or moved."""
        self._noted.pop(request, None)


def _of_its_model(model: str, engines: Sequence[str], s: EngineViews) -> tuple[Sequence[str], str]:
    """The engines that may be sent a request for a model, and a word on the others, if any.

    All of them if none serves it: the engine that it comes to then says so to its client.
    """
    fitting = [e for e in engines if serves(model, s[e].capabilities if e in s else None)]
    left_out = len(engines) - len(fitting)
    if not left_out:
        return engines, ""
    if not fitting:
        return engines, f"; no engine of the pool serves {model:.{_MAX_SHOWN}}"
    return fitting, f"; {left_out} of {len(engines)} engines serve no {model:.{_MAX_SHOWN}}"


class RoundRobin(_Routing):
    """Each engine in turn."""

    name = "round-robin"
    observes = _INTENT

    def _choose(
        self, request: RequestView, engines: Sequence[str], s: EngineViews, now: float
    ) -> _Choice:
        targets = tuple(sorted(engines, key=self._least_recent))
        return _Choice(targets, request.description.prompt_tokens, f"the turn of {targets[0]}")


class LeastLoaded(_Routing):
    """The engine with the fewest prompt tokens outstanding, waiting or running."""

    name = "least-loaded"
    observes = (*_INTENT, "state.*.*.queue.>")

    def _choose(
        self, request: RequestView, engines: Sequence[str], s: EngineViews, now: float
    ) -> _Choice:
        tokens = {engine: self._backlogs.outstanding(engine) for engine in engines}

        def rank(engine: str) -> tuple[bool, int, int]:
            return engine not in s, tokens[engine], self._least_recent(engine)

        targets = tuple(sorted(engines, key=rank))
        reason = f"{tokens[targets[0]]} prompt tokens outstanding on {targets[0]}"
        return _Choice(targets, request.description.prompt_tokens, reason)


class _Estimate(NamedTuple):
    """How a request would fare on an engine.

    ``first_token`` is until its first token, ``cost`` also what others would wait for it; in
    seconds, or in tokens if no engine has a rate.
    """

    first_token: float
    cost: float
    to_compute: int
    reused_blocks: int
    known: bool


class CacheAwareRouting(_Routing):
    """The engine where the request adds least to what all are expected to wait.

    Its own first token takes as long as the engine's backlog and the part of the prompt that it
    does not hold take to compute, at the rate that it reports, and the part that only a slower tier
    holds to load. What it computes, those behind it wait for as well; they will be about as many as
    wait there now (Little's law). So a session stays with the engine that has its context until
    that costs more than computing it anew elsewhere, and a long prompt goes where it is in the way
    of few. Nothing is weighed but seconds.

    What was sent to an engine and is not reported yet counts as if it were there, since it will be
    computed before the request that follows. Where reuse is unknown, none is assumed: of an engine
    that has lost sight of its cache, or for hashes that are not made as an engine's are.
    """

    observes = (
        *_INTENT,
        "state.*.*.queue.>",
        "state.*.*.residency.>",
        "state.*.*.pressure.>",
        "state.*.*.costs.>",
    )

    def __init__(self, others: float = 1.0) -> None:
        """``others`` is how much a second of the others' waiting counts against one of its own.

        With 0 each request looks for its own first token alone: then sessions wait longer on
        average, and the longest prompts less.

        Raises:
            ConfigError: it is not in [0, 1].
        """
        super().__init__()
        if not 0 <= others <= 1:
            raise ConfigError(f"cache-aware-routing: others {others}, expected a number in [0, 1]")
        self.name = "cache-aware-routing" if others == 1 else f"cache-aware-routing:{others:g}"
        self._others = others
        self._coming: dict[str, Counter[int]] = {}  # by engine, blocks and how many bring them
        # By request, the one that was noted first first.
        self._brings: OrderedDict[str, tuple[str, Sequence[int]]] = OrderedDict()
        self._num_coming = 0

    def _choose(
        self, request: RequestView, engines: Sequence[str], s: EngineViews, now: float
    ) -> _Choice:
        views = {engine: s.get(engine) for engine in engines}
        slowest = min(filter(None, map(_rate, views.values())), default=0.0)
        hashes = unpack(request.description.prefix_hashes)
        estimates = {
            engine: self._estimate(request, hashes, engine, view, slowest, now)
            for engine, view in views.items()
        }

        def rank(engine: str) -> tuple[bool, float, int, int]:
            view = views[engine]
            held = 0 if view is None else view.residency.num_blocks()
            # Of idle engines that hold nothing of it, the one that has most room for it.
            cost = round(estimates[engine].cost, 3)
            return view is None, cost, held, self._least_recent(engine)

        targets = tuple(sorted(engines, key=rank))
        best = estimates[targets[0]]
        reused = best.reused_blocks if best.known else "unknown number"
        first = best.first_token
        expected = f"{first:.1f} s expected" if slowest else f"{first:.0f} tokens ahead"
        reason = f"{reused} of {len(hashes)} blocks on {targets[0]}, {expected}"
        return _Choice(targets, best.to_compute, reason)

    def _estimate(
        self,
        request: RequestView,
        hashes: Sequence[int],
        engine: str,
        view: EngineView | None,
        slowest: float,
        now: float,
    ) -> _Estimate:
        """Estimate for an engine; one without a rate of its own is as fast as the ``slowest``."""
        description = request.description
        known = view is not None and view.reuse_known(description)
        if view is None or not known:
            reused = fast = 0
        else:
            coming = self._coming.get(engine, _NOTHING)
            on_the_way = _count_first(hashes, lambda block: block in coming)
            reused = max(view.residency.match(hashes), on_the_way)
            fast = max(_in_fastest_tier(view, hashes[:reused]), on_the_way)
        size = description.block_size
        to_compute = max(
            description.prompt_tokens - reused * size, min(1, description.prompt_tokens)
        )
        if not slowest:
            rate, ahead = 1.0, float(self._backlogs.outstanding(engine))
        else:
            rate = _rate(view) or slowest
            ahead = self._backlogs.ahead(engine, now, rate)
        first_token = (ahead + to_compute) / rate
        if slowest and view is not None and reused > fast:
            first_token += _load_s(view, (reused - fast) * size, rate)
        behind = self._backlogs.num_waiting(engine)
        cost = first_token + self._others * behind * to_compute / rate
        return _Estimate(first_token, cost, to_compute, reused, known)

    def _to_compute(self, request: RequestView, view: EngineView | None) -> int:
        hashes = unpack(request.description.prefix_hashes)
        engine = view.name if view is not None else ""
        return self._estimate(request, hashes, engine, view, 0.0, 0.0).to_compute

    def _expect(self, request: RequestView, engine: str, to_compute: int, now: float) -> None:
        super()._expect(request, engine, to_compute, now)
        hashes = unpack(request.description.prefix_hashes)
        self._brings[request.id] = engine, hashes
        self._coming.setdefault(engine, Counter()).update(hashes)
        self._num_coming += len(hashes)
        while self._num_coming > _MAX_COMING:
            self._count_out(next(iter(self._brings)))

    def _forget(self, request: str) -> None:
        super()._forget(request)
        self._count_out(request)

    def _count_out(self, request: str) -> None:
        """What a request brings does not count as on its way any longer."""
        engine, hashes = self._brings.pop(request, ("", ()))
        coming = self._coming.get(engine)
        if coming is None:
            return
        self._num_coming -= len(hashes)
        for block in hashes:
            coming[block] -= 1
            if not coming[block]:
                del coming[block]
        if not coming:
            del self._coming[engine]


_NOTHING: Counter[int] = Counter()


def _rate(view: EngineView | None) -> float:
    """Prompt tokens that an engine computes in a second; 0 if it has not said so."""
    costs = view.costs if view is not None else None
    return max(costs.prefill_tokens_per_s, 0.0) if costs is not None else 0.0


def _count_first(hashes: Sequence[int], is_there: Callable[[int], bool]) -> int:
    """How many hashes from the start are there, by bisection: what is there comes first."""
    return bisect_left(hashes, True, key=lambda block: not is_there(block))


def _in_fastest_tier(view: EngineView, hashes: Sequence[int]) -> int:
    """How many blocks need not be loaded. Evicted from its middle, a prompt counts as less."""
    tiers = view.capabilities.tiers if view.capabilities is not None else ()
    fastest = tiers[0].name if tiers else "gpu"
    return _count_first(hashes, lambda block: view.residency.holds(fastest, block))


def _load_s(view: EngineView, tokens: int, rate: float) -> float:
    """Seconds until tokens of a slower tier are loaded; as long as computing them, if unknown."""
    costs, pressure = view.costs, view.pressure
    if costs is None or costs.load_bytes_per_s <= 0:
        return tokens / rate
    backlog_s = pressure.load_backlog_s if pressure is not None else 0.0
    return backlog_s + tokens * costs.kv_bytes_per_token / costs.load_bytes_per_s
