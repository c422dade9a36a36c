"""The retention queue beside vLLM's own, and against a model that sorts anew each time."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vllm is not installed")

with warnings.catch_warnings():  # those of vLLM, torch and what they use are not ours
    warnings.simplefilter("ignore")
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from hear.engines.kv.leases import Lease, LeaseBook
from hear.engines.vllm.plugin.block_index import BlockIndex, hear_hash
from hear.engines.vllm.plugin.retention_queue import RetentionQueue

NUM_BLOCKS = 9
DECAY_S = 100.0


def key_of(block_hash: int, group: int = 0) -> bytes:
    """vLLM's hash of the block that HEAR names so."""
    whole = bytes(24) + block_hash.to_bytes(8, "big")
    return bytes(make_block_hash_with_group_id(whole, group))


def pool_of(num_blocks: int = NUM_BLOCKS) -> Any:
    return BlockPool(num_blocks, True, 16)


def pool_with_queue(
    leases: LeaseBook[str], on_evicted: Callable[[int], None] = lambda block_hash: None
) -> tuple[Any, RetentionQueue[str]]:
    pool = pool_of()
    return pool, RetentionQueue.install(pool, leases, on_evicted)


def name(pool: Any, block: Any, block_hash: int) -> None:
    pool._insert_block_hash(key_of(block_hash), block, num_tokens=None)


def cached(pool: Any, *block_hashes: int) -> list[Any]:
    """Blocks that are full of this and in use."""
    blocks = pool.get_new_blocks(len(block_hashes))
    for block, block_hash in zip(blocks, block_hashes, strict=True):
        name(pool, block, block_hash)
    return list(blocks)


def ids(blocks: list[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def lease(
    context: str,
    *blocks: int,
    score: float = 1.0,
    idle_since: float = 0.0,
) -> Lease[str]:
    return Lease(f"op-{context}", context, score, 1000.0, blocks, idle_since)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pop"), st.just(1)),
        st.tuples(st.sampled_from(["pop_n", "append_n", "prepend_n"]), st.integers(0, NUM_BLOCKS)),
        st.tuples(st.sampled_from(["append", "remove", "after"]), st.integers(0, NUM_BLOCKS)),
    ),
    max_size=40,
)


@given(STEPS, st.booleans())
def test_without_leases_blocks_come_in_the_order_of_vllms_own_queue(
    steps: list[tuple[str, int]], leased_elsewhere: bool
) -> None:
    leases: LeaseBook[str] = LeaseBook(DECAY_S)
    if leased_elsewhere:
        leases.put(lease("other", 77))
    theirs, (ours, queue) = pool_of(), pool_with_queue(leases)
    own = theirs.free_block_queue
    used: list[int] = []
    for what, number in steps:
        free = ids(own.get_all_free_blocks())
        assert ids(queue.get_all_free_blocks()) == free
        assert queue.num_free_blocks == own.num_free_blocks == len(free)
        if what == "pop":
            if not free:
                for either in (own, queue):
                    with pytest.raises(ValueError, match="No free blocks"):
                        either.popleft()
                continue
            block_id = own.popleft().block_id
            assert queue.popleft().block_id == block_id
            used.append(block_id)
        elif what == "pop_n":
            count = min(number, len(free))
            taken = ids(own.popleft_n(count))
            assert ids(queue.popleft_n(count)) == taken
            used.extend(taken)
        elif what == "remove" and free:
            block_id = free[number % len(free)]
            own.remove(theirs.blocks[block_id])
            queue.remove(ours.blocks[block_id])
            used.append(block_id)
        elif what == "remove":
            for queue_of_two, pool in ((own, theirs), (queue, ours)):
                with pytest.raises(RuntimeError, match=r"remove\(\)"):
                    queue_of_two.remove(pool.blocks[used[0]])
        elif what == "after":
            cursor = free[number] if number < len(free) else None
            for pool, either in ((theirs, own), (ours, queue)):
                block = None if cursor is None else pool.blocks[cursor]
                rest = free if cursor is None else free[number + 1 :]
                assert ids(list(either.iter_blocks_after(block))) == rest
        elif what == "append" and used:
            block_id = used.pop(number % len(used))
            own.append(theirs.blocks[block_id])
            queue.append(ours.blocks[block_id])
        elif what in ("append_n", "prepend_n"):
            back, used = used[:number], used[number:]
            getattr(own, what)([theirs.blocks[block_id] for block_id in back])
            getattr(queue, what)([ours.blocks[block_id] for block_id in back])
    assert ids(queue.get_all_free_blocks()) == ids(own.get_all_free_blocks())


class Model:
    """Free blocks by what they hold, sorted anew for each that is given up."""

    def __init__(self, free: list[int], leases: LeaseBook[str]) -> None:
        self.leases = leases
        self.plain = list(free)  # least recently used first, those without a hash before them
        self.released: list[int] = []  # the last one first
        self.leased: set[int] = set()
        self.hashes: dict[int, int] = {}

    def order(self) -> list[int]:
        blank = 0
        while blank < len(self.plain) and self.plain[blank] not in self.hashes:
            blank += 1
        by_rank = sorted(self.leased, key=lambda block: (self.rank(block), block))
        return [*self.plain[:blank], *self.released, *self.plain[blank:], *by_rank]

    def rank(self, block: int) -> tuple[float, int]:
        rank = self.leases.rank(self.hashes[block])
        assert rank is not None
        return rank

    def take(self, block: int) -> None:
        for place in (self.plain, self.released):
            if block in place:
                place.remove(block)
        self.leased.discard(block)

    def pop(self) -> int:
        block = self.order()[0]
        self.take(block)
        return block

    def give_back(self, block: int) -> None:
        if self.leases.rank(self.hashes[block]) is None:
            self.plain.append(block)
        else:
            self.leased.add(block)

    def rerank(self, block_hashes: list[int]) -> None:
        free = {*self.plain, *self.released, *self.leased}
        for block_hash in block_hashes:
            # Copies of one block go in the order in which they got their hash, as dicts keep it.
            for block in [b for b, h in self.hashes.items() if h == block_hash and b in free]:
                self.take(block)
                if self.leases.rank(block_hash) is None:
                    self.released.insert(0, block)
                else:
                    self.leased.add(block)


def put(book: LeaseBook[str], context: str, blocks: list[int], now: float) -> list[int]:
    touched = drop(book, context, blocks, now)
    book.put(lease(context, *blocks, score=0.5, idle_since=now))
    return [*touched, *blocks]


def move(book: LeaseBook[str], context: str, blocks: list[int], now: float) -> list[int]:
    held = book.get(context)
    return [] if held is None else list(book.move(held, blocks, now))


def drop(book: LeaseBook[str], context: str, blocks: list[int], now: float) -> list[int]:
    held = book.get(context)
    return [] if held is None else list(book.drop(held))


CHANGES = {"lease": put, "move": move, "drop": drop}
HASHES = st.integers(1, 6)
LEASED_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 4), st.lists(HASHES, max_size=4)),
        st.tuples(st.just("free"), st.integers(0, 5), st.just([])),
        st.tuples(st.just("touch"), HASHES, st.just([])),
        st.tuples(st.just("lease"), st.integers(0, 2), st.lists(HASHES, unique=True, max_size=5)),
        st.tuples(st.just("move"), st.integers(0, 2), st.lists(HASHES, unique=True, max_size=5)),
        st.tuples(st.just("drop"), st.integers(0, 2), st.just([])),
        st.tuples(st.just("release"), st.just(0), st.lists(HASHES, unique=True, max_size=5)),
        st.tuples(st.just("after"), st.integers(0, NUM_BLOCKS), st.just([])),
        st.tuples(st.just("reset"), st.just(0), st.just([])),
    ),
    max_size=60,
)


@settings(max_examples=400)
@given(LEASED_STEPS)
def test_with_leases_blocks_come_in_the_order_of_a_sorted_list(
    steps: list[tuple[str, int, list[int]]],
) -> None:
    leases: LeaseBook[str] = LeaseBook(DECAY_S)
    # The model has leases of its own, since it hears of a loss later.
    of_model: LeaseBook[str] = LeaseBook(DECAY_S)
    told: list[int] = []

    def yielded(block_hash: int) -> None:
        told.append(block_hash)
        for lost in leases.of_block(block_hash):
            queue.rerank(leases.drop(lost))

    pool, queue = pool_with_queue(leases, yielded)
    model = Model(ids(queue.get_all_free_blocks()), of_model)
    expected: list[int] = []
    in_use: list[int] = []

    for time, (what, number, block_hashes) in enumerate(steps):
        context = f"c{number}"
        now = float(time)
        if what == "allocate":
            count = min(number, len(model.order()))
            blocks = pool.get_new_blocks(count)
            for block in blocks:
                gone = model.pop()
                assert block.block_id == gone
                lost = model.hashes.pop(gone, None)
                if lost is None or lost in model.hashes.values():
                    continue
                leased = model.leases.of_block(lost)
                if leased:
                    expected.append(lost)
                for held in leased:
                    model.rerank(list(model.leases.drop(held)))
            assert told == expected
            for block, block_hash in zip(blocks, block_hashes, strict=False):
                name(pool, block, block_hash)
                model.hashes[block.block_id] = block_hash
            in_use.extend(ids(blocks))
        elif what == "free" and in_use:
            back, in_use = in_use[:number], in_use[number:]
            pool.free_blocks([pool.blocks[block_id] for block_id in back])
            model.plain[:0] = [block_id for block_id in back if block_id not in model.hashes]
            for block_id in back:
                if block_id in model.hashes:
                    model.give_back(block_id)
        elif what == "touch":
            block = pool.get_cached_block(key_of(number)[:-4], [0])
            if block is not None and block[0].block_id not in in_use:
                pool.touch(block)
                model.take(block[0].block_id)
                in_use.append(block[0].block_id)
        elif what in CHANGES:
            touched = CHANGES[what](leases, context, block_hashes, now)
            assert CHANGES[what](model.leases, context, block_hashes, now) == touched
            queue.rerank(touched)
            model.rerank(touched)
        elif what == "release":
            queue.rerank(block_hashes)
            model.rerank(block_hashes)
        elif what == "after":
            order = model.order()
            cursor = pool.blocks[order[number]] if number < len(order) else None
            rest = order if cursor is None else order[number + 1 :]
            assert ids(list(queue.iter_blocks_after(cursor))) == rest
        elif what == "reset" and not in_use:
            order = model.order()
            assert pool.reset_prefix_cache()
            model.hashes.clear()
            # What has no hash any more stays in its place until it is taken.
            taken = ids(pool.get_new_blocks(len(order)))
            assert sorted(taken) == sorted(order)
            pool.free_blocks([pool.blocks[block_id] for block_id in order])
            model.plain, model.released, model.leased = order, [], set()
        assert ids(queue.get_all_free_blocks()) == model.order()
        assert queue.num_free_blocks == len(model.order())
        assert queue.num_free_blocks + len(in_use) == NUM_BLOCKS - 1
    assert told == expected


def test_of_one_context_the_end_goes_before_the_start_and_after_all_without_a_lease() -> None:
    leases: LeaseBook[str] = LeaseBook(DECAY_S)
    pool, queue = pool_with_queue(leases)
    kept, other = cached(pool, 1, 2, 3), cached(pool, 4, 5)
    leases.put(lease("a", 1, 2, 3))
    pool.free_blocks(reversed(kept))
    pool.free_blocks(reversed(other))
    blank = NUM_BLOCKS - 1 - 5
    order = [block.block_hash for block in queue.get_all_free_blocks()]
    assert order[:blank] == [None] * blank
    assert [hear_hash(key) for key in order[blank:]] == [5, 4, 3, 2, 1]


def test_a_released_context_goes_right_after_the_blocks_without_a_hash() -> None:
    leases: LeaseBook[str] = LeaseBook(DECAY_S)
    pool, queue = pool_with_queue(leases)
    old, released, blank = cached(pool, 1, 2), cached(pool, 3, 4), pool.get_new_blocks(4)
    pool.free_blocks(reversed(old))
    pool.free_blocks(reversed(released))
    queue.rerank([3, 4])
    pool.free_blocks(blank)
    order = [block.block_hash for block in queue.get_all_free_blocks()]
    assert [key and hear_hash(key) for key in order] == [None] * 4 + [4, 3, 2, 1]
    assert ids(queue.popleft_n(6)) == ids([*blank, released[1], released[0]])


def test_what_loses_its_lease_and_is_needed_by_others_was_used_just_now() -> None:
    leases: LeaseBook[str] = LeaseBook(DECAY_S)
    pool, queue = pool_with_queue(leases)
    held = lease("a", 1, 2, 3)
    leases.put(held)
    kept, other = cached(pool, 1, 2, 3), cached(pool, 4, 5)
    pool.free_blocks(reversed(kept))
    pool.free_blocks(reversed(other))
    free = queue.num_free_blocks
    blocks = leases.drop(held)
    queue.unrank(blocks[:2][::-1])
    queue.rerank(blocks[2:])
    queue.unrank([4, 5])  # they had no lease, and stay where they are
    order = [block.block_hash for block in queue.get_all_free_blocks()]
    assert [key and hear_hash(key) for key in order] == [None] * 3 + [3, 5, 4, 2, 1]
    assert queue.num_free_blocks == free == len(order)
    assert len(queue.popleft_n(free)) == free


def test_a_lease_put_before_its_blocks_are_there_holds_once_they_are() -> None:
    leases: LeaseBook[str] = LeaseBook(DECAY_S)
    pool, queue = pool_with_queue(leases)
    held = lease("a", 1, 2)
    leases.put(held)
    queue.rerank(held.blocks)
    kept = cached(pool, 1, 2)
    pool.free_blocks(reversed(kept))
    others = cached(pool, 11, 12, 13, 14, 15, 16)
    pool.free_blocks(reversed(others))
    assert ids(queue.popleft_n(6)) == ids(others[::-1])


def test_of_two_copies_of_a_leased_block_the_first_to_go_costs_nothing() -> None:
    leases: LeaseBook[str] = LeaseBook(DECAY_S)
    told: list[int] = []
    pool, _ = pool_with_queue(leases, told.append)
    leases.put(lease("a", 1))
    pool.free_blocks(cached(pool, 1, 1))
    pool.get_new_blocks(NUM_BLOCKS - 2)
    assert told == []
    [last] = pool.get_new_blocks(1)
    assert told == [1]
    name(pool, last, 1)
    second = pool.blocks[1 if last.block_id != 1 else 2]
    name(pool, second, 1)
    pool.free_blocks([last, second])
    pool.get_new_blocks(2)
    assert told == [1, 1]


def test_a_lease_that_is_dropped_as_it_yields_lets_its_other_blocks_go_next() -> None:
    leases: LeaseBook[str] = LeaseBook(DECAY_S)
    lost = []

    def yielded(block_hash: int) -> None:
        for held in leases.of_block(block_hash):
            lost.append((held.context, block_hash))
            queue.rerank(leases.drop(held))

    pool, queue = pool_with_queue(leases, yielded)
    low, high = lease("low", 1, 2, score=0.1), lease("high", 3, 4)
    leases.put(low)
    leases.put(high)
    blocks = cached(pool, 1, 2, 3, 4)
    pool.free_blocks(reversed(blocks))
    taken = pool.get_new_blocks(NUM_BLOCKS - 3)
    assert ids(taken[-2:]) == [blocks[1].block_id, blocks[0].block_id]
    assert lost == [("low", 2)]
    assert leases.get("high") is high


def test_blocks_are_found_by_hears_hash_after_the_prefix_cache_was_reset() -> None:
    leases: LeaseBook[str] = LeaseBook(DECAY_S)
    pool, queue = pool_with_queue(leases)
    pool.free_blocks(cached(pool, 1, 2))
    assert pool.reset_prefix_cache()
    [block] = cached(pool, 1)
    assert list(BlockIndex.of(pool).named(1)) == [block.block_id]
    assert not BlockIndex.of(pool).named(2)
    pool.free_blocks([block])
    leases.put(lease("a", 1))
    queue.rerank([1])
    assert queue.get_all_free_blocks()[-1] is block


def test_a_hash_in_two_groups_names_a_block_in_each() -> None:
    leases: LeaseBook[str] = LeaseBook(DECAY_S)
    told: list[int] = []
    pool, queue = pool_with_queue(leases, told.append)
    blocks = pool.get_new_blocks(2)
    for group, block in enumerate(blocks):
        pool._insert_block_hash(key_of(1, group), block, num_tokens=None)
    pool.free_blocks(blocks)
    leases.put(lease("a", 1))
    queue.rerank([1])
    assert ids(queue.get_all_free_blocks()[-2:]) == ids(blocks)
    pool.get_new_blocks(NUM_BLOCKS - 2)
    assert told == [1]
    pool.get_new_blocks(1)
    assert not BlockIndex.of(pool).named(1)


def test_ranking_again_and_again_does_not_grow_the_memory() -> None:
    leases: LeaseBook[str] = LeaseBook(DECAY_S)
    pool, queue = pool_with_queue(leases)
    held = lease("a", 1, 2)
    leases.put(held)
    pool.free_blocks(cached(pool, 1, 2))
    for turn in range(5000):
        queue.rerank(leases.move(held, [1, 2], float(turn)))
    assert len(queue._apart._heap) <= 2 * 2 + 1024
