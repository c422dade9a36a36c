"""Leases: how they rank blocks, follow their contexts and end."""

from math import exp

from hypothesis import given
from hypothesis import strategies as st

from hear.engines.kv.leases import Lease, LeaseBook
from hear.operation import Ref
from tests.engines.builders import own

DECAY_S = 400.0


def lease(
    context: str,
    *blocks: int,
    score: float = 1.0,
    idle_since: float = 0.0,
    expires_s: float = 100.0,
    operation: str = "",
) -> Lease[Ref]:
    ref = own(operation or f"op-{context}")
    return Lease(ref, own(context), score, expires_s, blocks, idle_since)


def test_a_block_without_a_lease_has_no_rank() -> None:
    book: LeaseBook[Ref] = LeaseBook(DECAY_S)
    book.put(lease("a", 1, 2))
    assert book.rank(3) is None


def test_a_block_that_two_contexts_share_has_the_higher_of_their_ranks() -> None:
    book: LeaseBook[Ref] = LeaseBook(DECAY_S)
    book.put(lease("a", 1, 2, score=0.2))
    alone = book.rank(1)
    book.put(lease("b", 1, 3, score=0.9))
    shared, other = book.rank(1), book.rank(3)
    assert alone is not None
    assert shared is not None
    assert other is not None
    assert shared > alone
    assert shared[0] == other[0]
    assert {found.context for found in book.of_block(1)} == {own("a"), own("b")}
    held = book.get(own("b"))
    assert held is not None
    book.drop(held)
    assert book.rank(1) == alone
    assert book.rank(3) is None


@given(
    st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 1000.0)), min_size=2, max_size=6),
    st.floats(1000.0, 3000.0),
)
def test_ranks_keep_the_order_of_the_papers_formula_whatever_the_time(
    leases: list[tuple[float, float]], now: float
) -> None:
    book: LeaseBook[Ref] = LeaseBook(DECAY_S)
    for block, (score, idle_since) in enumerate(leases):
        book.put(lease(str(block), block, score=score, idle_since=idle_since))
    values = {
        block: score * exp(-(now - idle_since) / DECAY_S)
        for block, (score, idle_since) in enumerate(leases)
    }
    for one in values:
        for two in values:
            if values[one] < values[two] * (1 - 1e-9):
                low, high = book.rank(one), book.rank(two)
                assert low is not None
                assert high is not None
                assert low < high


def test_a_lease_follows_its_context_and_leaves_what_that_no_longer_has() -> None:
    book: LeaseBook[Ref] = LeaseBook(DECAY_S)
    held = lease("a", 1, 2, 3)
    book.put(held)
    before = book.rank(1)
    touched = list(book.move(held, [1, 2, 4], 50.0))
    assert touched == [1, 2, 3, 4]
    assert book.rank(3) is None
    moved = book.rank(4)
    assert moved is not None
    assert moved[1] == -2
    after = book.rank(1)
    assert before is not None
    assert after is not None
    assert after[0] == before[0] + 50.0


def test_leases_expire_in_the_order_of_their_times() -> None:
    book: LeaseBook[Ref] = LeaseBook(DECAY_S)
    for context, expires_s in (("a", 30.0), ("b", 10.0), ("c", 20.0)):
        book.put(lease(context, ord(context), expires_s=expires_s))
    assert book.next_expiry() == 10.0
    ended = []
    for now in (5.0, 20.0, 40.0):
        for held in list(book.expired(now)):
            book.drop(held)
            ended.append((now, held.context[1]))
    assert ended == [(20.0, "b"), (20.0, "c"), (40.0, "a")]
    assert book.next_expiry() is None
    assert len(book) == 0


def test_a_lease_that_was_replaced_does_not_expire_for_the_newer_one() -> None:
    book: LeaseBook[Ref] = LeaseBook(DECAY_S)
    old = lease("a", 1, expires_s=10.0, operation="old")
    book.put(old)
    book.drop(old)
    book.put(lease("a", 1, expires_s=50.0, operation="new"))
    assert list(book.expired(10.0)) == []
    assert book.next_expiry() == 50.0


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(["put", "move", "drop"]), st.floats(0, 900)),
        min_size=20,
        max_size=120,
    )
)
def test_a_block_that_many_lease_has_the_highest_of_their_ranks(
    steps: list[tuple[int, str, float]],
) -> None:
    book: LeaseBook[Ref] = LeaseBook(DECAY_S)
    for number, what, at in steps:
        held = book.get(own(f"c{number}"))
        if what == "drop" and held is not None:
            book.drop(held)
        elif what == "move" and held is not None:
            book.move(held, [1, 2, 100 + number], at)
        elif what == "put" and held is None:
            score = (number + 1) / 40
            book.put(lease(f"c{number}", 1, 2, 200 + number, score=score, idle_since=at))
        for block in (1, 2):
            ranks = [(found.key, -(block - 1)) for found in book.of_block(block)]
            assert book.rank(block) == max(ranks, default=None)
    for number in range(31):
        if (held := book.get(own(f"c{number}"))) is not None:
            book.drop(held)
    assert (book._covers, book._ranking) == ({}, {})
