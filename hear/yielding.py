"""Which open preference gives way where there is room for no more operations.

A requirement never gives way. Among preferences the order is: the rank that the operator gave the
sender; a lease before all else, since what is asked of a request ends with it and a lease may last
for an hour; of leases the one of lower score; then the older one. Who sends controls and who takes
them in go by the same order.
"""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from hear.messages import AXES, Control, Retain
from hear.operation import Operation

_SPARE = 1_024

_Worth = tuple[int, bool, float]


class Preferences:
    """The open preferences of one sender or one engine, the least worthy first."""

    def __init__(self, ranks: Mapping[str, int] | None = None) -> None:
        """``ranks`` are those of arbitration: by the source of controls, higher prevails."""
        self._ranks = ranks or {}
        self._heap: list[tuple[_Worth, int, Operation]] = []
        self._num_added = 0
        self._sweep_at = _SPARE

    def add(self, operation: Operation) -> None:
        """Take note of an operation that is open; nothing happens if it can never give way."""
        control = operation.control
        if control.force == "requirement" or AXES[type(control)] == "none":
            return
        self._num_added += 1
        worth = self._worth(control, operation.source)
        heappush(self._heap, (worth, self._num_added, operation))
        # Those that have ended stay until they come to the top, which may never be.
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].terminal]
            heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + _SPARE

    def least(self, control: Control, source: str) -> Operation | None:
        """Take out the open preference that gives way to a new control.

        None if the control is itself the preference that is worth least, or nothing can give way.
        """
        while self._heap and self._heap[0][2].terminal:
            heappop(self._heap)
        if not self._heap:
            return None
        if control.force == "preference" and self._worth(control, source) < self._heap[0][0]:
            return None
        return heappop(self._heap)[2]

    def _worth(self, control: Control, source: str) -> _Worth:
        rank = self._ranks.get(source, 0)
        if isinstance(control, Retain):
            return rank, False, control.score
        return rank, True, 0.0
