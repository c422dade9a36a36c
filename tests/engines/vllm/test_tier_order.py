"""What the CPU tier gives up next, without an engine."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.vllm.real import NEEDS_VLLM

pytestmark = NEEDS_VLLM

CAPACITY = 8


def key(block: int) -> Any:
    """The key of a block in vLLM: a hash of 32 bytes, of which HEAR reads the last 8, and more."""
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(b"x" * 24 + block.to_bytes(8, "big"), 0)


def make_order(*blocks: int) -> Any:
    """An order that holds blocks that can be evicted, the first of them the least recently used."""
    from hear.engines.vllm.plugin.tier_order import LeasedFirst

    order = LeasedFirst(CAPACITY)
    for block in blocks:
        insert(order, block)
    return order


def insert(order: Any, block: int) -> None:
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

    chunk = ChunkStatus(block)
    order.insert(key(block), chunk)
    chunk.ref_cnt = 0
    order.mark_evictable(key(block))


def evicted(order: Any, n: int, protected: Iterable[int] = ()) -> list[int] | None:
    found = order.evict(n, {key(block) for block in protected})
    return None if found is None else [chunk.chunk_id for _, chunk in found]


def lease(order: Any, ranks: dict[int, tuple[float, int]]) -> None:
    order.rank_of = ranks.get
    order.rerank(ranks)


def test_without_leases_the_least_recently_used_goes_first() -> None:
    order = make_order(1, 2, 3, 4)
    order.touch([key(1)], None)
    assert evicted(order, 3) == [2, 3, 4]
    assert evicted(order, 1) == [1]


def test_of_one_prefix_the_end_goes_before_the_start() -> None:
    order = make_order(1, 2, 3)
    order.touch([key(1), key(2), key(3)], None)
    assert evicted(order, 3) == [3, 2, 1]


def test_leased_blocks_go_last_the_lowest_rank_first() -> None:
    order = make_order(1, 2, 3, 4)
    lease(order, {1: (5.0, 0), 2: (5.0, -1), 3: (1.0, 0)})
    assert evicted(order, 4) == [4, 3, 2, 1]


def test_a_lease_that_came_before_its_block_holds() -> None:
    order = make_order()
    lease(order, {1: (1.0, 0)})
    insert(order, 1)
    insert(order, 2)
    assert evicted(order, 1) == [2]


def test_a_block_whose_lease_has_ended_goes_before_all_others() -> None:
    order = make_order(1, 2, 3)
    lease(order, {3: (1.0, 0)})
    order.rank_of = lambda block: None
    order.rerank([3])
    assert evicted(order, 2) == [3, 1]


def test_a_block_that_is_being_copied_is_passed_over_until_it_is_done() -> None:
    order = make_order(1, 2)
    order.mark_non_evictable(key(1))
    assert evicted(order, 1) == [2]
    order.mark_evictable(key(1))
    assert evicted(order, 1) == [1]


def test_too_few_blocks_change_nothing() -> None:
    order = make_order(1, 2, 3)
    assert evicted(order, 3, protected={2}) is None
    assert [order.holds(block) for block in (1, 2, 3)] == [True, True, True]
    assert evicted(order, 2, protected={2}) == [1, 3]
    assert order.get(key(1)) is None


def test_what_loses_its_lease_and_is_needed_by_others_was_used_just_now() -> None:
    order = make_order(1, 2, 3)
    lease(order, {1: (5.0, 0)})
    order.rank_of = lambda block: None
    order.unrank([1, 2])  # 2 had none, and stays where it is
    assert evicted(order, 3) == [2, 3, 1]


def test_what_is_not_here_is_not_held_and_can_be_reranked() -> None:
    order = make_order(1)
    order.rerank([7])
    order.touch([key(7)], None)
    assert not order.holds(7)
    assert evicted(order, 1) == [1]


def test_clear_forgets_all() -> None:
    order = make_order(1, 2)
    order.clear()
    assert not order.holds(1)
    assert evicted(order, 1) is None


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "touch", "pin", "lease", "end", "evict"]),
        st.integers(0, 9),
        st.integers(-3, 3),
    ),
    max_size=60,
)


@given(steps=_STEPS)
def test_it_agrees_with_sorting(steps: list[tuple[str, int, int]]) -> None:
    """Against the plainest model: all blocks in a list, sorted when one is to go."""
    order = make_order()
    ranks: dict[int, tuple[float, int]] = {}
    order.rank_of = ranks.get
    used: dict[int, int] = {}
    pinned: set[int] = set()
    for now, (what, block, number) in enumerate(steps, 1):
        if what == "insert" and block not in used:
            insert(order, block)
            used[block] = now
        elif what == "touch" and block in used:
            order.touch([key(block)], None)
            used[block] = now
        elif what == "pin" and block in used:
            if block in pinned:
                order.mark_evictable(key(block))
            else:
                order.mark_non_evictable(key(block))
            pinned ^= {block}
        elif what == "lease":
            ranks[block] = (float(number), -block)
            order.rerank([block])
        elif what == "end" and block in ranks:
            del ranks[block]
            order.rerank([block])
            if block in used:
                used[block] = -now
        elif what == "evict":
            free = [b for b in used if b not in pinned and b != block]
            free.sort(key=lambda b: (b in ranks, ranks.get(b, (0.0, 0)), used[b]))
            n = abs(number)
            expected = free[:n] if len(free) >= n else None
            assert evicted(order, n, protected={block}) == expected
            for gone in expected or ():
                del used[gone]


@pytest.mark.parametrize("times", [5_000])
def test_old_entries_do_not_pile_up(times: int) -> None:
    order = make_order(1, 2)
    for _ in range(times):
        order.touch([key(1), key(2)], None)
    assert len(order._heap) < times
    assert evicted(order, 2) == [2, 1]
