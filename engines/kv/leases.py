"""Leases on the blocks of contexts: what Retain puts in place, and how it ranks blocks.

A lease's rank at time t is ``score * exp(-(t - idle_since) / decay)`` (paper, appendix A.2). All
fade alike, so their order is that of ``idle_since + decay * ln(score)`` and never has to be
computed again as time passes.
"""

from collections.abc import Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import log
from typing import Generic, TypeVar

from hear.engines.kv.eviction import Rank

C = TypeVar("C", bound=Hashable)
"""How an engine names contexts and operations: as they are, or with the tenant before that."""


CROWD = 8
"""From how many leases on one block on their order is kept, rather than found each time."""


class Lease(Generic[C]):
    """What one Retain operation holds. ``idle_since`` is when its context was last served."""

    __slots__ = ("blocks", "context", "expires_s", "idle_since", "key", "operation", "score")

    def __init__(
        self,
        operation: C,
        context: C,
        score: float,
        expires_s: float,
        blocks: Sequence[int],
        idle_since: float,
    ) -> None:
        self.operation = operation
        self.context = context
        self.score = score
        self.expires_s = expires_s
        self.blocks = blocks
        self.idle_since = idle_since
        self.key = 0.0  # its place among the leases; LeaseBook keeps it


class LeaseBook(Generic[C]):
    """All leases of one engine, by context, and which blocks they cover."""

    def __init__(self, decay_s: float) -> None:
        self._decay_s = decay_s
        self._leases: dict[C, Lease[C]] = {}
        self._covers: dict[int, dict[C, int]] = {}
        # Of blocks that many leases cover, those leases by rank, the highest first. An entry counts
        # only while the lease covers the block with that key.
        self._ranking: dict[int, list[tuple[float, int, int, C]]] = {}
        self._num_entries = 0
        self._expiries: list[tuple[float, C, C]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, context: C | None) -> Lease[C] | None:
        """The lease on a context."""
        return self._leases.get(context) if context is not None else None

    def put(self, lease: Lease[C]) -> None:
        """Add a lease; its context must have none."""
        self._leases[lease.context] = lease
        self._cover(lease)
        heappush(self._expiries, (lease.expires_s, lease.context, lease.operation))

    def drop(self, lease: Lease[C]) -> Sequence[int]:
        """End a lease; returns the blocks that it covered, whose rank may have changed."""
        del self._leases[lease.context]
        self._uncover(lease)
        return lease.blocks

    def move(self, lease: Lease[C], blocks: Sequence[int], idle_since: float) -> Iterable[int]:
        """Let a lease follow its context; returns the blocks whose rank may have changed."""
        touched = dict.fromkeys(lease.blocks)
        self._uncover(lease)
        lease.blocks, lease.idle_since = blocks, idle_since
        self._cover(lease)
        touched.update(dict.fromkeys(blocks))
        return touched

    def rank(self, block: int) -> Rank | None:
        """The highest rank that a lease gives a block; None without a lease."""
        covers = self._covers.get(block)
        if covers is None:
            return None
        if len(covers) == 1:  # nearly always, and this is asked for each block that comes free
            [(context, position)] = covers.items()
            return self._leases[context].key, -position
        if len(covers) < CROWD:
            return max((self._leases[c].key, -position) for c, position in covers.items())
        ranking = self._ranking[block]
        while True:
            key, position, _, context = ranking[0]
            if covers.get(context) == position and self._leases[context].key == -key:
                return -key, -position
            heappop(ranking)

    def of_block(self, block: int) -> list[Lease[C]]:
        """The leases that cover a block."""
        return [self._leases[context] for context in self._covers.get(block, ())]

    def expired(self, now: float) -> Iterable[Lease[C]]:
        """The leases whose time is over; each has to be dropped by the caller."""
        while self._expiries and self._expiries[0][0] <= now:
            _, context, operation = heappop(self._expiries)
            lease = self._leases.get(context)
            if lease is not None and lease.operation == operation:
                yield lease

    def next_expiry(self) -> float | None:
        """When the next lease ends."""
        while self._expiries:
            when, context, operation = self._expiries[0]
            lease = self._leases.get(context)
            if lease is not None and lease.operation == operation:
                return when
            heappop(self._expiries)
        return None

    def _cover(self, lease: Lease[C]) -> None:
        lease.key = lease.idle_since + self._decay_s * log(lease.score)
        for position, block in enumerate(lease.blocks):
            covers = self._covers.setdefault(block, {})
            covers[lease.context] = position
            if len(covers) >= CROWD:
                self._rank_in_crowd(block, covers, lease, position)

    def _rank_in_crowd(
        self, block: int, covers: dict[C, int], lease: Lease[C], position: int
    ) -> None:
        """Let the highest of many ranks be found without a look at each."""
        ranking = self._ranking.get(block)
        if ranking is None or len(ranking) > 2 * len(covers) + CROWD:
            self._ranking[block] = [
                (-self._leases[context].key, at, self._entry(), context)
                for context, at in covers.items()
            ]
            heapify(self._ranking[block])
        else:
            heappush(ranking, (-lease.key, position, self._entry(), lease.context))

    def _entry(self) -> int:
        self._num_entries += 1  # so that contexts, which have no order, are never compared
        return self._num_entries

    def _uncover(self, lease: Lease[C]) -> None:
        for block in lease.blocks:
            covers = self._covers[block]
            del covers[lease.context]
            if len(covers) < CROWD:
                self._ranking.pop(block, None)
                if not covers:
                    del self._covers[block]
