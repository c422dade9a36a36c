"""The eviction order against a model that sorts anew each time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.engines.kv.eviction import EvictionOrder, Rank


class Model:
    """The least recently used first, then the ranked ones by rank."""

    def __init__(self) -> None:
        self.plain: list[int] = []
        self.ranked: dict[int, Rank] = {}

    def discard(self, block: int) -> None:
        self.ranked.pop(block, None)
        if block in self.plain:
            self.plain.remove(block)

    def add(self, block: int, rank: Rank | None) -> None:
        self.discard(block)
        if rank is None:
            self.plain.append(block)
        else:
            self.ranked[block] = rank

    def add_first(self, block: int) -> None:
        self.discard(block)
        self.plain.insert(0, block)

    def pop(self) -> int:
        if self.plain:
            return self.plain.pop(0)
        block = min(self.ranked, key=lambda b: (self.ranked[b], b))
        del self.ranked[block]
        return block


BLOCKS = st.integers(0, 8)
RANKS = st.none() | st.tuples(st.sampled_from([0.0, 1.0, 2.5]), st.integers(-3, 0))
STEPS = st.one_of(
    st.tuples(st.just("add"), BLOCKS, RANKS),
    st.tuples(st.just("add_first"), BLOCKS, st.none()),
    st.tuples(st.just("discard"), BLOCKS, st.none()),
    st.tuples(st.just("pop"), BLOCKS, st.none()),
)


@given(st.lists(STEPS, max_size=60))
def test_what_is_given_up_is_what_a_sorted_list_would_give_up(
    steps: list[tuple[str, int, Rank | None]],
) -> None:
    order, model = EvictionOrder(), Model()
    for what, block, rank in steps:
        if what == "add":
            order.add(block, rank)
            model.add(block, rank)
        elif what == "add_first":
            order.add_first(block)
            model.add_first(block)
        elif what == "discard":
            order.discard(block)
            model.discard(block)
        elif len(order):
            assert order.pop() == model.pop()
        assert len(order) == len(model.plain) + len(model.ranked)
        assert all((b in order) == (b in model.plain or b in model.ranked) for b in range(9))
        assert order.num_unranked == len(model.plain)
    in_order = list(order)
    assert len(in_order) == len(order)
    for block in in_order:
        assert order.pop() == block == model.pop()


def test_blocks_without_a_rank_go_before_all_ranked_ones() -> None:
    order = EvictionOrder()
    order.add(1, (-100.0, 0))
    order.add(2)
    order.add(3)
    assert [order.pop() for _ in range(3)] == [2, 3, 1]


def test_of_one_context_the_end_goes_before_the_start() -> None:
    order = EvictionOrder()
    for position in range(4):
        order.add(position, (5.0, -position))
    assert [order.pop() for _ in range(4)] == [3, 2, 1, 0]


def test_giving_up_a_block_when_there_is_none_is_an_error() -> None:
    order = EvictionOrder()
    order.add(1, (0.0, 0))
    order.discard(1)
    with pytest.raises(KeyError):
        order.pop()


def test_ranking_again_and_again_does_not_grow_the_memory() -> None:
    order = EvictionOrder()
    for turn in range(100_000):
        order.add(turn % 3, (float(turn), 0))
    assert len(order._heap) <= 2 * 3 + 1024
    assert [order.pop() for _ in range(3)] == [1, 2, 0]
