"""Who prevails when several policies take hold of the same thing.

Claims are compared on one axis (order, wait, retention, placement, admission, route, mode) and one
key: a requirement before a preference, then the configured rank of the policy, then the later.
This module knows neither the bus nor an engine.
"""

from typing import NamedTuple

from hear.messages import Axis, Key
from hear.operation import Operation

Place = tuple[Axis, str]
"""What a claim is on: an axis, and the request, context or engine that it concerns."""


class Verdict(NamedTuple):
    """``displaced`` is the operation that has to give way, if any."""

    wins: bool
    displaced: Operation | None


def place_of(axis: Axis, key: Key) -> Place | None:
    """The place that a control on ``axis`` claims; None where nothing can be in dispute."""
    subject = key.context if axis in ("retention", "placement") else key.request
    if axis == "none" or subject is None:
        return None
    return axis, subject


class Arbiter:
    """Holds the standing claim of each place."""

    def __init__(self, ranks: dict[str, int] | None = None) -> None:
        """``ranks`` gives policies (by the source of their messages) a rank; higher prevails."""
        self.ranks = dict(ranks or {})
        self._claims: dict[Place, Operation] = {}

    def _weight(self, operation: Operation) -> tuple[bool, int]:
        return operation.control.force == "requirement", self.ranks.get(operation.source, 0)

    def claim(self, place: Place, operation: Operation) -> Verdict:
        """Let an operation claim a place, against whoever holds it."""
        holder = self._claims.get(place)
        if (
            holder is not None
            and holder.source != operation.source
            and self._weight(holder) > self._weight(operation)
        ):
            return Verdict(False, None)
        if (
            holder is not None
            and holder.source == operation.source
            and holder.control.force == "requirement"
            and operation.control.force == "preference"
        ):
            # One's own later wish does not undo one's own requirement either.
            return Verdict(False, None)
        self._claims[place] = operation
        return Verdict(True, holder)

    def drop(self, place: Place, operation: Operation | None = None) -> None:
        """End the claim on a place; with ``operation``, only if it is the holder."""
        if operation is None or self._claims.get(place) is operation:
            self._claims.pop(place, None)

    def holder(self, place: Place) -> Operation | None:
        """The operation whose claim stands."""
        return self._claims.get(place)

    def of_source(self, source: str) -> list[tuple[Place, Operation]]:
        """All standing claims of one policy, oldest first."""
        return [(p, op) for p, op in self._claims.items() if op.source == source]

    def __len__(self) -> int:
        return len(self._claims)
