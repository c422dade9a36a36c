"""What vLLM's CPU tier gives up next: least recently used first, and leased blocks last, by rank.

What a lease is, is not known here: whoever keeps them sets ``rank_of``, and calls ``rerank`` when
ranks have changed. All of it belongs to the engine's thread. The order is that of the simulated
engine (``hear.engines.simulated.eviction``); vLLM adds that a chunk is pinned while it is copied.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_block_hash
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

Rank = tuple[float, int]
"""Of a leased block, ``(key, -position)``: the higher is kept longer."""

_LOW_64_BITS = (1 << 64) - 1
_SPARE_ENTRIES = 1024


class _Place(NamedTuple):
    """Where a chunk stands. The lowest goes first."""

    leased: bool
    rank: Rank
    recency: int


_Entry = tuple[_Place, OffloadKey]


class LeasedFirst(CachePolicy):
    """A cache policy of vLLM's CPU tier that keeps leased blocks longest.

    Blocks without a lease go first, least recently used first, and of one prefix the end before the
    start; then leased ones, the lowest rank first. A block whose lease has ended goes before all.
    Each operation takes O(log n) for each block that it concerns.
    """

    def __init__(self, cache_capacity: int) -> None:
        """``cache_capacity`` is in chunks, as vLLM counts; a chunk is a block here."""
        super().__init__(cache_capacity)
        self.rank_of: Callable[[int], Rank | None] = lambda block: None
        """The rank of a block by HEAR's hash of it, the low 64 bits of vLLM's."""
        self.clear()

    @property
    def capacity(self) -> int:
        """How many blocks fit; with chunks of several blocks, how many chunks."""
        capacity: int = self.cache_capacity
        return capacity

    def rerank(self, blocks: Iterable[int]) -> None:
        """Put blocks, by HEAR's hashes, where their leases now say. Blocks not held are skipped."""
        for block in blocks:
            for key in self._keys.get(block, ()):
                if self.rank_of(block) is None:
                    self._oldest -= 1
                    self._put(key, self._oldest)
                else:
                    self._put(key, self._newest)

    def unrank(self, blocks: Iterable[int]) -> None:
        """Put blocks where their leases now say; those that lost one were used just now."""
        for block in blocks:
            for key in self._keys.get(block, ()):
                if self._places[key].leased or self.rank_of(block) is not None:
                    self._use(key)

    def holds(self, block: int) -> bool:
        """Whether a block, by HEAR's hash of it, is here and can be read."""
        return any(self._chunks[key].is_ready for key in self._keys.get(block, ()))

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """The chunk of a key."""
        return self._chunks.get(key)

    def insert(
        self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None
    ) -> None:
        """Add a chunk, as the most recently used; it may have yet to be copied.

        vLLM gives ``req_context`` from 0.33 on; its own policy puts a request's chunks in order
        by it, which is done here when the request has ended.
        """
        self._chunks[key] = chunk
        self._keys.setdefault(hear_hash(key), []).append(key)
        if chunk.ref_cnt == 0:
            self._evictable.add(key)
        self._use(key)

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk."""
        del self._chunks[key], self._places[key]
        self._evictable.discard(key)
        block = hear_hash(key)
        self._keys[block].remove(key)
        if not self._keys[block]:
            del self._keys[block]

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count chunks, given from the start of a prefix on, as used now."""
        for key in reversed(list(keys)):
            if key in self._chunks:
                self._use(key)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Count all that a request has stored or loaded as used now."""
        self.touch(order_request_keys(key_groups, req_context), req_context)

    def mark_evictable(self, key: OffloadKey) -> None:
        """A chunk is no longer being copied. That does not count as use."""
        self._evictable.add(key)
        self._push(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """A chunk is about to be copied."""
        self._evictable.discard(key)

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Give up ``n`` chunks, none ``protected``. None, and no change, if there are too few."""
        chosen: dict[OffloadKey, _Place] = {}
        passed: list[_Entry] = []
        while self._heap and len(chosen) < n:
            place, key = heappop(self._heap)
            if key not in self._evictable or self._places[key] != place or key in chosen:
                continue  # it was true once, or is said twice
            if key in protected:
                passed.append((place, key))
            else:
                chosen[key] = place
        enough = len(chosen) == n
        for entry in passed if enough else [*passed, *((p, key) for key, p in chosen.items())]:
            heappush(self._heap, entry)
        if not enough:
            return None
        evicted = [(key, self._chunks[key]) for key in chosen]
        for key in chosen:
            self.remove(key)
        return evicted

    def clear(self) -> None:
        """Forget all chunks, also those that are being copied."""
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._keys: dict[int, list[OffloadKey]] = {}
        self._places: dict[OffloadKey, _Place] = {}
        self._evictable: set[OffloadKey] = set()
        self._heap: list[_Entry] = []
        self._newest = self._oldest = 0

    def _use(self, key: OffloadKey) -> None:
        self._newest += 1
        self._put(key, self._newest)

    def _put(self, key: OffloadKey, recency: int) -> None:
        rank = self.rank_of(hear_hash(key))
        self._places[key] = _Place(rank is not None, rank or (0.0, 0), recency)
        if key in self._evictable:
            self._push(key)

    def _push(self, key: OffloadKey) -> None:
        heappush(self._heap, (self._places[key], key))
        if len(self._heap) > 2 * len(self._evictable) + _SPARE_ENTRIES:
            self._heap = [(self._places[key], key) for key in self._evictable]
            heapify(self._heap)


def hear_hash(key: OffloadKey) -> int:
    """HEAR's hash of the block that a key of vLLM's tier stands for."""
    return int.from_bytes(get_offload_block_hash(key), "big") & _LOW_64_BITS
