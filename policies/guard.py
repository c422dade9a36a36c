"""Guard-W: no request waits longer than W seconds while later ones pass it (paper, section 4.2).

A requirement, sent as soon as the request is described and ready; the engine then moves the
request to a protected class once it has waited W seconds. It can be updated: the latest bound
counts.
"""

from collections.abc import Iterable

from hear.engine_view import EngineViews
from hear.errors import ConfigError
from hear.harness_view import HarnessView
from hear.interfaces import Ask
from hear.messages import BoundWait, Key, RequestDescribed, RequestOutcome, RequestReadinessChanged


class Guard:
    """Bounds the wait of every request that names its engine, once."""

    observes = (
        "intent.*.*.request_described.>",
        "intent.*.*.request_readiness_changed.>",
        "outcome.*.*.request_outcome.>",
    )

    def __init__(self, max_wait_s: float = 40.0) -> None:
        """``max_wait_s`` is W; the paper uses 40 and 60 s.

        Raises:
            ConfigError: W is not a positive number.
        """
        if not 0 < max_wait_s < 1e9:
            raise ConfigError(f"guard: W is {max_wait_s} s, expected a positive number below 1e9")
        self.name = f"guard:{max_wait_s:g}"
        self._control = BoundWait(
            max_wait_s=max_wait_s, force="requirement", reason=f"wait at most {max_wait_s:g} s"
        )
        # Requests of the harness's view that have not ended, each with its engine and its life.
        self._guarded: dict[str, tuple[str, int]] = {}

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        """Guard each request that was described, or became ready, since the last decision."""
        for key in h.forgotten:
            self._guarded.pop(key.request or "", None)
        for key, message in h.changes:
            if key.request is None:
                continue
            if isinstance(message, RequestOutcome):
                if message.status != "accepted":
                    self._guarded.pop(key.request, None)
            elif isinstance(message, RequestDescribed | RequestReadinessChanged):
                # A bound for a request that comes much later would not be kept for it.
                known = h.requests.get(key.request)
                if message.ready and known is not None and known.key.engine is not None:
                    engine = s.get(known.key.engine)
                    if engine is None or not engine.targets:  # a pool has no queue of its own
                        yield from self._guard(key.request, known.key.engine, known.life)

    def _guard(self, request: str, engine: str, life: int) -> Iterable[Ask]:
        if self._guarded.get(request) == (engine, life):
            return
        self._guarded[request] = engine, life
        yield Ask(self._control, Key(request=request, engine=engine))
