"""How much of a context's blocks other contexts begin with, too.

Blocks are chained hashes, so two contexts that have a block in common have all blocks before it in
common: what they share is a prefix, and its length is found by bisection. An engine asks this
before it gives up the blocks of one context, since the others still need what they share.
"""

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class SharedPrefixes(Generic[C]):
    """Contexts by the block that they begin with."""

    def __init__(self) -> None:
        self._blocks: dict[C, Sequence[int]] = {}
        self._beginning: dict[int, dict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, context: C, blocks: Sequence[int]) -> None:
        """Note what a context consists of now."""
        former = self._blocks.get(context)
        if former and (not blocks or former[0] != blocks[0]):
            self.drop(context)
        if blocks:
            self._blocks[context] = blocks
            self._beginning.setdefault(blocks[0], {})[context] = None

    def drop(self, context: C) -> None:
        """Forget a context, if it is known."""
        blocks = self._blocks.pop(context, None)
        if blocks:
            alike = self._beginning[blocks[0]]
            del alike[context]
            if not alike:
                del self._beginning[blocks[0]]

    def shared(self, context: C, blocks: Sequence[int]) -> int:
        """How many of ``blocks``, from the first on, some other context has, too.

        It takes one comparison for each context that begins alike and shares no more than another
        that was looked at before, and a bisection for the others.
        """
        if not blocks:
            return 0
        most, total = 0, len(blocks)
        for other in self._beginning.get(blocks[0], ()):
            if other == context:
                continue
            theirs = self._blocks[other]
            end = min(total, len(theirs))
            if most >= end or theirs[most] != blocks[most]:
                continue
            low = most + 1
            while low < end:
                middle = (low + end) // 2
                if theirs[middle] == blocks[middle]:
                    low = middle + 1
                else:
                    end = middle
            most = low
            if most == total:
                break
        return most
