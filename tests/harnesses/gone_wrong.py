"""Policies that go wrong in mid-run, named as ``tests.harnesses.gone_wrong:Class``."""

import os
from collections.abc import Iterable

from hear.engine_view import EngineViews
from hear.harness_view import HarnessView
from hear.interfaces import Ask
from hear.messages import BoundWait, Hold, Key, RequestDescribed


class Guards:
    """Guards every request, until it goes wrong at the fourth."""

    name = "goes-wrong"
    observes: tuple[str, ...] = ("intent.default.*.request_described.>",)

    def __init__(self) -> None:
        self.num_described = 0

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        for key, message in h.changes:
            if isinstance(message, RequestDescribed):
                self.num_described += 1
                if self.num_described == 4:
                    self.go_wrong()
                yield Ask(
                    BoundWait(max_wait_s=1, force="requirement"),
                    Key(request=key.request, engine=key.engine),
                )

    def go_wrong(self) -> None:
        raise ValueError("on purpose")


class Dies(Guards):
    """Takes its whole process along."""

    def go_wrong(self) -> None:
        os._exit(7)


class Unmakeable(Guards):
    """Can be made only once, which is when it is named."""

    num_made = 0

    def __init__(self) -> None:
        super().__init__()
        Unmakeable.num_made += 1
        if Unmakeable.num_made > 1:
            raise RuntimeError("only one of me")


class Restless:
    """Asks again whenever what it asked for has had an effect."""

    name = "restless"
    observes = ("intent.>", "state.*.*.queue.>")

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        for view in s.values():
            for request in view.waiting:
                yield Ask(Hold(hold_s=30), Key(request=request, engine=view.name))
