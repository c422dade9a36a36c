"""Cache-Aware: requests whose prefix is resident go first (paper, section 4.2 and appendix A.2).

For each waiting request the reusable blocks are counted from the start of the prompt, up to the
first that is missing. If they cover at least half of the prompt the request is *hot* and gets
``priority = -N_reuse``; else it is cold and keeps the default, 0. The count is kept current by
the residency events that concern it (``ResidencyDirectory.watch``), never by looking again at all.
A request whose hashes are not made as the engine's are keeps its place: its reuse is unknown.
An engine that takes priorities only with the request is asked as the request is described, once.
"""

from collections.abc import Iterable

from hear.blocks import unpack
from hear.engine_view import EngineView, EngineViews
from hear.errors import ConfigError
from hear.harness_view import HarnessView
from hear.interfaces import Ask
from hear.messages import Key, Prioritise, QueueChanged, QueueSnapshot, RequestDescribed

DEFAULT_PRIORITY = 0


class _Followed:
    """The requests of one engine that are watched, and the priority that each has by now."""

    __slots__ = ("epoch", "priorities")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.priorities: dict[str, int] = {}


class CacheAware:
    """Orders the waiting requests of each engine by what of their prompt it holds."""

    name = "cache-aware"
    observes = (
        "intent.*.*.request_described.>",
        "state.*.*.residency.>",
        "state.*.*.queue.>",
    )

    def __init__(self, hot_share: float = 0.5) -> None:
        """``hot_share`` is the share of the prompt that makes a request hot; the paper's is 0.5.

        Raises:
            ConfigError: it is not in (0, 1].
        """
        if not 0 < hot_share <= 1:
            raise ConfigError(f"cache-aware: hot share {hot_share}, expected a number in (0, 1]")
        self._hot_share = hot_share
        self._followed: dict[str, _Followed] = {}

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        """Ask for the priorities that have changed since the last decision."""
        self._forget_with(h, s)
        fresh: dict[tuple[str, str], bool] = {}  # whether it was described anew
        for key, message in h.changes:
            if not (isinstance(message, RequestDescribed) and key.request and key.engine):
                continue
            view = s.get(key.engine)
            if view is not None and _takes_with_requests(view):
                yield from self._ask_ahead(view, key.request, message)
            elif view is not None:
                # It may stand in the queue already: intent and state travel apart.
                fresh[key.engine, key.request] = True
        for view, state in s.changes:
            if s.get(view.name) is not view:
                continue  # it was given up since
            if isinstance(state, QueueChanged):
                for waiting in state.waiting:
                    fresh.setdefault((view.name, waiting.request), False)
                for request in (*state.started, *state.ended):
                    self._forget(view, request)
            elif isinstance(state, QueueSnapshot):
                for request in list(self._of(view).priorities):
                    if request not in view.waiting:
                        self._forget(view, request)
                for request in view.waiting:
                    fresh.setdefault((view.name, request), False)
        for (name, request), anew in fresh.items():
            yield from self._follow(h, s[name], request, anew)
        for view in s.values():
            if not view.residency_listed:
                continue  # what is believed of it may be wrong; the last order stands
            for request in view.residency.take_changed():
                yield from self._prioritise(h, view, request)

    def _of(self, view: EngineView) -> _Followed:
        followed = self._followed.get(view.name)
        if followed is None or followed.epoch != view.epoch:
            if followed is not None:  # the engine restarted, and knows none of them
                for request in followed.priorities:
                    view.residency.unwatch(request)
            followed = self._followed[view.name] = _Followed(view.epoch)
        return followed

    def _ask_ahead(
        self, view: EngineView, request: str, description: RequestDescribed
    ) -> Iterable[Ask]:
        """Ask for a priority before the request is sent, by what the engine holds now."""
        if not view.reuse_known(description):
            return
        reusable = view.residency.match(unpack(description.prefix_hashes))
        if self._is_hot(reusable, description):
            yield Ask(
                Prioritise(priority=-reusable, reason=f"{reusable} blocks to reuse"),
                Key(request=request, engine=view.name),
            )

    def _is_hot(self, reusable: int, description: RequestDescribed) -> bool:
        tokens = reusable * description.block_size
        return reusable > 0 and tokens >= self._hot_share * description.prompt_tokens

    def _follow(self, h: HarnessView, view: EngineView, request: str, anew: bool) -> Iterable[Ask]:
        waiting, described = view.waiting.get(request), h.requests.get(request)
        if waiting is None or described is None or _takes_with_requests(view):
            return
        priorities = self._of(view).priorities
        if anew or request not in priorities:
            if view.differences(described.description):
                self._forget(view, request)
                return
            hashes = unpack(described.description.prefix_hashes)
            if not hashes:
                return
            # One that was preempted comes back with the priority that it had.
            priorities.setdefault(request, waiting.priority)
            view.residency.watch(request, hashes)
        if view.residency_listed:
            yield from self._prioritise(h, view, request)

    def _forget_with(self, h: HarnessView, s: EngineViews) -> None:
        """Give up the engines and the requests that the views have given up."""
        for name in s.forgotten:
            followed, view = self._followed.pop(name, None), s.get(name)
            if followed is not None and view is not None:
                for request in followed.priorities:
                    view.residency.unwatch(request)
        for key in h.forgotten:
            for name, followed in self._followed.items():
                if key.request in followed.priorities:
                    self._forget(s[name], key.request)

    def _forget(self, view: EngineView, request: str) -> None:
        if self._of(view).priorities.pop(request, None) is not None:
            view.residency.unwatch(request)

    def _prioritise(self, h: HarnessView, view: EngineView, request: str) -> Iterable[Ask]:
        described = h.requests.get(request)
        priorities = self._of(view).priorities
        if described is None or request not in priorities:
            return
        description = described.description
        if view.differences(description):
            return  # the engine told of itself after the request had come
        reusable = view.residency.count(request)
        hot = self._is_hot(reusable, description)
        priority = -reusable if hot else DEFAULT_PRIORITY
        if priority != priorities[request]:
            priorities[request] = priority
            reason = f"{reusable} blocks to reuse" if hot else "no longer hot"
            yield Ask(
                Prioritise(priority=priority, reason=reason), Key(request=request, engine=view.name)
            )


def _takes_with_requests(view: EngineView) -> bool:
    """Whether an engine takes priorities only before the request, as one that HEAR attaches to."""
    return view.capabilities is not None and "prioritise" in view.capabilities.at_submission
