"""Who prevails when several policies take hold of the same thing.

Theory of operation. A *claim key* is an axis (order, wait, retention, placement, admission, route,
mode) and the request or context that it concerns. On each key one operation holds the claim. A new
one takes it over, unless the holder is of another policy and weighs more: a requirement weighs more
than a preference, and then the rank that the operator gave the policy counts. At equal weight the
later one wins. Of one policy the later always wins, except that its preference does not take the
place of its own requirement.

Invariants: a claim is held by one operation at most, and is given up by ``drop`` alone. Nothing
here ends an operation, or knows a bus or an engine.
"""

from typing import NamedTuple

from hear.messages import Axis, Key
from hear.operation import Operation

ClaimKey = tuple[Axis, str]
"""What a claim is on: an axis, and the request, context or engine that it concerns."""


class ClaimResult(NamedTuple):
    """``displaced`` is the operation that has to give way, if any."""

    wins: bool
    displaced: Operation | None


def claim_key_of(axis: Axis, key: Key) -> ClaimKey | None:
    """The key that a control on ``axis`` claims; None where nothing can be in dispute."""
    subject = key.context if axis in ("retention", "placement") else key.request
    if axis == "none" or subject is None:
        return None
    return axis, subject


class Arbiter:
    """Holds the claim in effect on each key."""

    def __init__(self, ranks: dict[str, int] | None = None) -> None:
        """``ranks`` gives policies (by the source of their messages) a rank; higher prevails."""
        self.ranks = dict(ranks or {})
        self._claims: dict[ClaimKey, Operation] = {}

    def _weight(self, operation: Operation) -> tuple[bool, int]:
        return operation.control.force == "requirement", self.ranks.get(operation.source, 0)

    def claim(self, claim_key: ClaimKey, operation: Operation) -> ClaimResult:
        """Let an operation claim a key, against whoever holds it."""
        holder = self._claims.get(claim_key)
        if (
            holder is not None
            and holder.source != operation.source
            and self._weight(holder) > self._weight(operation)
        ):
            return ClaimResult(False, None)
        if (
            holder is not None
            and holder.source == operation.source
            and holder.control.force == "requirement"
            and operation.control.force == "preference"
        ):
            # One's own later wish does not undo one's own requirement either.
            return ClaimResult(False, None)
        self._claims[claim_key] = operation
        return ClaimResult(True, holder)

    def drop(self, claim_key: ClaimKey, operation: Operation | None = None) -> None:
        """End the claim on a key; with ``operation``, only if it is the holder."""
        if operation is None or self._claims.get(claim_key) is operation:
            self._claims.pop(claim_key, None)

    def holder(self, claim_key: ClaimKey) -> Operation | None:
        """The operation whose claim stands."""
        return self._claims.get(claim_key)

    def of_source(self, source: str) -> list[tuple[ClaimKey, Operation]]:
        """All claims in effect of one policy, oldest first."""
        return [(p, op) for p, op in self._claims.items() if op.source == source]

    def __len__(self) -> int:
        return len(self._claims)
