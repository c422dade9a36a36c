"""Cache-Aware: requests whose prefix is resident go first (paper, section 4.2 and appendix A.2).

For each waiting request the reusable blocks are counted from the start of the prompt, up to the
first that is missing. If they cover at least half of the prompt the request is *hot* and gets
``priority = -N_reuse``; else it is cold and keeps the default, 0. The count is kept current by
the residency events that concern it (``ResidencyDirectory.watch``), never by looking again at all.
"""

from collections.abc import Iterable

from hear.blocks import unpack
from hear.engine_view import EngineView, EngineViews
from hear.errors import ConfigError
from hear.harness_view import HarnessView
from hear.messages import Key, Prioritise, QueueChanged, QueueSnapshot, RequestDescribed
from hear.seams import Ask

DEFAULT_PRIORITY = 0


class CacheAware:
    """Orders the waiting requests of each engine by what of their prompt it holds."""

    name = "cache-aware"
    observes = (
        "intent.default.*.request_described.>",
        "state.default.*.residency.>",
        "state.default.*.queue.>",
    )

    def __init__(self, hot_share: float = 0.5) -> None:
        """``hot_share`` is the share of the prompt that makes a request hot; the paper's is 0.5.

        Raises:
            ConfigError: it is not in (0, 1].
        """
        if not 0 < hot_share <= 1:
            raise ConfigError(f"cache-aware: hot share {hot_share}, expected a number in (0, 1]")
        self._hot_share = hot_share
        self._asked: dict[tuple[str, str], int] = {}

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        """Ask for the priorities that have changed since the last decision."""
        fresh: dict[tuple[str, str], None] = {}
        for key, message in h.changes:
            engine, request = key.engine, key.request
            if isinstance(message, RequestDescribed) and request and engine in s and engine:
                # It may stand in the queue already: intent and state travel apart.
                fresh[engine, request] = None
        for view, state in s.changes:
            if isinstance(state, QueueChanged):
                for waiting in state.waiting:
                    fresh[view.name, waiting.request] = None
                for request in (*state.started, *state.ended):
                    self._forget(view, request)
            elif isinstance(state, QueueSnapshot):
                for request in [r for name, r in self._asked if name == view.name]:
                    if request not in view.waiting:
                        self._forget(view, request)
                for request in view.waiting:
                    fresh[view.name, request] = None
        for name, request in fresh:
            yield from self._watch(h, s[name], request)
        for view in s.values():
            if not view.residency_known:
                continue  # what is believed of it may be wrong; the last order stands
            for request in view.residency.take_changed():
                yield from self._prioritise(h, view, request)

    def _watch(self, h: HarnessView, view: EngineView, request: str) -> Iterable[Ask]:
        described = h.requests.get(request)
        if request in view.waiting and described and described.description.prefix_hashes:
            if (view.name, request) not in self._asked:
                self._asked[view.name, request] = DEFAULT_PRIORITY
                view.residency.watch(request, unpack(described.description.prefix_hashes))
            if view.residency_known:
                yield from self._prioritise(h, view, request)

    def _forget(self, view: EngineView, request: str) -> None:
        if self._asked.pop((view.name, request), None) is not None:
            view.residency.unwatch(request)

    def _prioritise(self, h: HarnessView, view: EngineView, request: str) -> Iterable[Ask]:
        described = h.requests.get(request)
        if described is None:
            return
        description = described.description
        reusable = view.residency.count(request)
        hot = reusable * description.block_size >= self._hot_share * description.prompt_tokens
        priority = -reusable if hot and reusable else DEFAULT_PRIORITY
        if priority != self._asked[view.name, request]:
            self._asked[view.name, request] = priority
            reason = f"{reusable} blocks to reuse" if hot else "no longer hot"
            yield Ask(
                Prioritise(priority=priority, reason=reason), Key(request=request, engine=view.name)
            )
