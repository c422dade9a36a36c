"""Descriptions whose block hashes or model are not those of the engine: told once, naming both.

It says what differs and knows neither policies nor where it is told.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from hear.compatibility import Difference
from hear.engine_view import EngineView, EngineViews
from hear.harness_view import HarnessView, RequestView
from hear.messages import CapabilitiesReported, RequestDescribed

MAX_TOLD: Final = 256
"""Most pairs of an engine and differences that are told: anyone who describes can make names."""


class Mismatch(NamedTuple):
    """Who described a request for an engine, and what the two use differently."""

    described_by: str
    engine: str
    differing: tuple[Difference, ...]


class Mismatches:
    """Compares what is described with the engines that it is described for, or their pool's."""

    def __init__(self) -> None:
        self._told: set[tuple[str, tuple[Difference, ...]]] = set()

    def found(self, h: HarnessView, s: EngineViews) -> Iterator[Mismatch]:
        """What has come up with the changes since the last decision, and was not told before."""
        described: dict[str, None] = {}
        for key, message in h.changes:
            if isinstance(message, RequestDescribed) and key.request is not None:
                described[key.request] = None
        if any(isinstance(message, CapabilitiesReported) for _, message in s.changes):
            described.update(dict.fromkeys(h.requests))  # the engine told of itself after them
        for name in described:
            request = h.requests.get(name)
            engine = s.get(request.key.engine or "") if request is not None else None
            if request is not None and engine is not None:
                for each in (engine, *(s[t] for t in engine.targets if t in s)):
                    yield from self._compare(request, each)

    def _compare(self, request: RequestView, engine: EngineView) -> Iterator[Mismatch]:
        differing = engine.differences(request.description)
        what = engine.name, differing
        if differing and what not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(what)
            yield Mismatch(request.source, engine.name, differing)
