"""Guard-W: no request waits longer than W seconds while later ones pass it (paper, section 4.2).

A requirement, sent as soon as the request is described; the engine then moves the request to a
protected class once it has waited W seconds. It can be updated: the latest bound counts.
"""

from collections.abc import Iterable

from hear.engine_view import EngineViews
from hear.errors import ConfigError
from hear.harness_view import HarnessView
from hear.messages import BoundWait, Key, RequestDescribed
from hear.seams import Ask


class Guard:
    """Bounds the wait of every request that names its engine."""

    observes = ("intent.default.*.request_described.>",)

    def __init__(self, max_wait_s: float = 40.0) -> None:
        """``max_wait_s`` is W; the paper uses 40 and 60 s.

        Raises:
            ConfigError: W is not a positive number.
        """
        if not 0 < max_wait_s < 1e9:
            raise ConfigError(f"guard: W is {max_wait_s} s, expected a positive number of seconds")
        self.name = f"guard:{max_wait_s:g}"
        self._control = BoundWait(
            max_wait_s=max_wait_s, force="requirement", reason=f"wait at most {max_wait_s:g} s"
        )

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        """Guard each request that was described since the last decision."""
        for key, message in h.changes:
            if isinstance(message, RequestDescribed) and key.engine is not None:
                yield Ask(self._control, Key(request=key.request, engine=key.engine))
