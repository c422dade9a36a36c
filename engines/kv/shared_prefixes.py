"""How much of a context's blocks other contexts begin with, too.

Blocks are chained hashes, so two contexts that have a block in common have all blocks before it in
common. Contexts that begin alike are kept in the order of their blocks, in which the ones that have
most in common with a context stand next to it: two comparisons tell, however many there are. An
engine asks this before it gives up the blocks of one context, since the others still need what they
share.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

_Row = tuple[list[int], int, C]
"""A context's blocks, a number that no other has, and the context."""


class SharedPrefixes(Generic[C]):
    """Contexts by the block that they begin with, in order of the others."""

    def __init__(self) -> None:
        self._rows: dict[C, _Row[C]] = {}
        self._beginning: dict[int, list[_Row[C]]] = {}
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, context: C, blocks: list[int]) -> None:
        """Note what a context consists of now. ``blocks`` is kept, and must not be changed."""
        self.drop(context)
        if blocks:
            self._num_put += 1
            row = self._rows[context] = blocks, self._num_put, context
            insort(self._beginning.setdefault(blocks[0], []), row)

    def drop(self, context: C) -> None:
        """Forget a context, if it is known."""
        row = self._rows.pop(context, None)
        if row is not None:
            first = row[0][0]
            alike = self._beginning[first]
            del alike[bisect_left(alike, row)]
            if not alike:
                del self._beginning[first]

    def shared(self, context: C, blocks: list[int]) -> int:
        """How many of ``blocks``, from the first on, some other context has, too."""
        alike = self._beginning.get(blocks[0]) if blocks else None
        if not alike:
            return 0
        at = bisect_left(alike, blocks, key=lambda row: row[0])
        # The context itself may stand on either side, and only there.
        around = alike[max(at - 2, 0) : at + 2]
        return max((_common(blocks, row[0]) for row in around if row[2] != context), default=0)


def _common(blocks: list[int], others: list[int]) -> int:
    low, high = 0, min(len(blocks), len(others))
    while low < high:
        middle = (low + high) // 2
        if blocks[middle] == others[middle]:
            low = middle + 1
        else:
            high = middle
    return low
