"""The order in which vLLM's block pool gives up blocks that no request uses.

First blocks without a hash, which nobody can reuse, and those of released contexts; then the least
recently used, exactly as vLLM would; then leased ones (``hear.engines.kv.leases``), lowest rank
first and of one context the end before the start. A lease does not make the pool smaller: every
free block can be had.

Blocks without a lease are in vLLM's own linked list, handled by vLLM's own code. Those that were
released or leased stand apart, in an ``EvictionOrder`` by block id: they have no links, and that is
how one sees where a block is. Who changes the lease book says so with ``rerank``.

The scheduler lock guards it (``bridge``). It knows nothing of messages, operations or time.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Generic, Self

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from hear.engines.kv.eviction import EvictionOrder, Rank
from hear.engines.kv.leases import C, LeaseBook
from hear.engines.vllm.plugin.block_index import BlockIndex, hear_hash

Plain = FreeKVCacheBlockQueue


class RetentionQueue(FreeKVCacheBlockQueue, Generic[C]):
    """Stands in for ``BlockPool.free_block_queue``: the same methods, attributes and errors.

    ``on_evicted`` is told the hash of a leased block when the last copy of it has just been given
    up, to have the leases on it (``LeaseBook.of_block``) yield; it may drop leases and rerank.
    """

    def __init__(self, pool: Any, leases: LeaseBook[C], on_evicted: Callable[[int], None]) -> None:
        """Take over the free blocks of a ``BlockPool``, in their order. ``install`` does the rest.

        ``leases`` is of HEAR's block hashes.
        """
        super().__init__(pool.free_block_queue.get_all_free_blocks())
        self._pool = pool
        self._blocks = pool.blocks
        self._leases = leases
        self._on_evicted = on_evicted
        self._apart = EvictionOrder()

    @classmethod
    def install(cls, pool: Any, leases: LeaseBook[C], on_evicted: Callable[[int], None]) -> Self:
        """Make a queue, and put it and the index that it needs in their places in the pool."""
        queue = cls(pool, leases, on_evicted)
        pool.free_block_queue = queue
        BlockIndex.of(pool)
        return queue

    def rerank(self, block_hashes: Iterable[int]) -> None:
        """Put free blocks where their leases now say; those without a lease are released.

        To be called with what ``LeaseBook.put``, ``move`` or ``drop`` was about, and with the
        blocks of a context that is released.
        """
        apart = self._apart
        for block_id, block, rank in self._free_blocks(block_hashes):
            if block.next_free_block is not None:
                self._unlink(block)
            if rank is None:
                apart.add_first(block_id)
            else:
                apart.add(block_id, rank)

    def unrank(self, block_hashes: Iterable[int]) -> None:
        """Put free blocks where their leases now say; those that lost one were used just now."""
        apart = self._apart
        for block_id, block, rank in self._free_blocks(block_hashes):
            if rank is not None:
                if block.next_free_block is not None:
                    self._unlink(block)
                apart.add(block_id, rank)
            elif apart.is_ranked(block_id):
                apart.discard(block_id)
                self.num_free_blocks -= 1  # which the list counts again
                Plain.append_n(self, [block])

    def _free_blocks(self, block_hashes: Iterable[int]) -> Iterator[tuple[int, Any, Rank | None]]:
        """The free blocks among those named, by id, with what their leases say."""
        index = BlockIndex.of(self._pool)
        for block_hash in block_hashes:
            named = index.named(block_hash)
            if not named:
                continue
            rank = self._leases.rank(block_hash)
            for block_id, block in list(named.items()):
                # One that a request uses is in neither place, and ``append_n`` will ask.
                if block.next_free_block is not None or block_id in self._apart:
                    yield block_id, block, rank

    # -- what the block pool calls ------------------------------------------------------------

    def popleft(self) -> Any:
        """Give up one block.

        Raises:
            ValueError: there is none.
        """
        apart = self._apart
        if not len(apart):
            return Plain.popleft(self)
        released = apart.num_unranked
        first = self.fake_free_list_head.next_free_block
        if first is not self.fake_free_list_tail and (not released or first.block_hash is None):
            return Plain.popleft(self)
        self.num_free_blocks -= 1
        block = self._blocks[apart.pop()]
        if not released:
            self._given_up(block)
        return block

    def popleft_n(self, n: int) -> list[Any]:
        """Give up ``n`` blocks, of which there must be as many."""
        apart = self._apart
        if not len(apart):
            return Plain.popleft_n(self, n)  # type: ignore[no-any-return]
        assert self.num_free_blocks >= n
        blocks: list[Any] = []
        if not apart.num_unranked:
            blocks = Plain.popleft_n(self, min(n, self.num_free_blocks - len(apart)))
        while len(blocks) < n:
            blocks.append(self.popleft())
        return blocks

    def remove(self, block: Any) -> None:
        """Take a block out, for a request that reuses it.

        Raises:
            RuntimeError: it is not here.
        """
        after = block.next_free_block
        if after is not None:  # as _unlink does, without the call: this is for each reused block
            before = block.prev_free_block
            before.next_free_block = after
            after.prev_free_block = before
            block.prev_free_block = block.next_free_block = None
        elif block.block_id in self._apart:
            self._apart.discard(block.block_id)
        else:
            raise RuntimeError(f"remove() called on a block that is not free: {block}")
        self.num_free_blocks -= 1

    def append(self, block: Any) -> None:
        """Take back a block that may be reused."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Take back blocks that may be reused, the end of a prompt before its start."""
        leases = self._leases
        if not len(leases):
            Plain.append_n(self, blocks)
            return
        plain = []
        apart = self._apart
        for block in blocks:
            key = block.block_hash
            rank = None if key is None else leases.rank(hear_hash(key))
            if rank is None:
                plain.append(block)
            else:
                apart.add(block.block_id, rank)
        self.num_free_blocks += len(blocks) - len(plain)
        Plain.append_n(self, plain)

    def get_all_free_blocks(self) -> list[Any]:
        """All blocks in the order in which they would be given up."""
        return list(self._in_order())

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """The blocks that would be given up after ``cursor``; all, if it is None.

        None are after one that is not here.
        """
        apart = self._apart
        if not len(apart):
            yield from Plain.iter_blocks_after(self, cursor)
        elif cursor is not None and cursor.next_free_block is not None and not apart.num_unranked:
            yield from Plain.iter_blocks_after(self, cursor)
            yield from (self._blocks[block_id] for block_id in apart)
        else:
            order = self._in_order()
            if cursor is not None:
                for block in order:
                    if block is cursor:
                        break
            yield from order

    # -----------------------------------------------------------------------------------------

    def _in_order(self) -> Iterator[Any]:
        apart = (self._blocks[block_id] for block_id in self._apart)
        released = islice(apart, self._apart.num_unranked)
        for block in Plain.iter_blocks_after(self, None):
            if block.block_hash is not None:
                yield from released
            yield block
        yield from apart

    def _unlink(self, block: Any) -> None:
        before, after = block.prev_free_block, block.next_free_block
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None

    def _is_free(self, block: Any) -> bool:
        return block.next_free_block is not None or block.block_id in self._apart

    def _given_up(self, block: Any) -> None:
        key = block.block_hash
        if key is None:
            return  # the prefix cache was reset
        block_hash = hear_hash(key)
        if self._leases.rank(block_hash) is None:
            return
        for other in BlockIndex.of(self._pool).named(block_hash).values():
            # One that was given up just before this one still has its hash.
            held = other.ref_cnt or self._is_free(other)
            if held and other is not block and other.block_hash == key:
                return
        self._on_evicted(block_hash)
