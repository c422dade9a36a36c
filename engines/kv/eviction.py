"""The order in which blocks that nobody uses are given up. It knows blocks by number alone.

First those without a rank, least recently used first, as in vLLM; then the ranked (leased) ones,
lowest rank first. A rank is ``(key, -position)``, so of one context the end goes before the start.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

Rank = tuple[float, int]


class EvictionOrder:
    """A set of blocks that can give up its least worthy member. All operations are O(log n)."""

    def __init__(self) -> None:
        self._plain: OrderedDict[int, None] = OrderedDict()
        self._ranked: dict[int, Rank] = {}
        # Flat, since a tuple in a tuple is compared at twice the cost.
        self._heap: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._plain) + len(self._ranked)

    def __contains__(self, block: int) -> bool:
        return block in self._plain or block in self._ranked

    def __iter__(self) -> Iterator[int]:
        """All blocks in the order in which they would be given up."""
        yield from self._plain
        yield from sorted(self._ranked, key=lambda block: (self._ranked[block], block))

    @property
    def num_unranked(self) -> int:
        """How many blocks have no rank."""
        return len(self._plain)

    def add(self, block: int, rank: Rank | None = None) -> None:
        """Add a block, or move it: without a rank to the most recently used end."""
        if rank is None:
            self._ranked.pop(block, None)
            self._plain[block] = None
            self._plain.move_to_end(block)
        elif self._ranked.get(block) != rank:
            self._plain.pop(block, None)
            self._ranked[block] = rank
            heappush(self._heap, (*rank, block))
            if len(self._heap) > 2 * len(self._ranked) + 1024:
                self._heap = [(*rank, block) for block, rank in self._ranked.items()]
                heapify(self._heap)

    def is_ranked(self, block: int) -> bool:
        """Whether a block is here and has a rank."""
        return block in self._ranked

    def add_first(self, block: int) -> None:
        """Add a block, or move it, to where it is given up next."""
        self.add(block)
        self._plain.move_to_end(block, last=False)

    def discard(self, block: int) -> None:
        """Take a block out, if it is there."""
        if self._plain.pop(block, 0) == 0:
            self._ranked.pop(block, None)

    def pop(self) -> int:
        """Give up a block.

        Raises:
            KeyError: there is none.
        """
        if self._plain:
            return self._plain.popitem(last=False)[0]
        while self._heap:
            key, position, block = heappop(self._heap)
            if self._ranked.get(block) == (key, position):
                del self._ranked[block]
                return block
        raise KeyError("no block to give up")
