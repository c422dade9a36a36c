"""The paged KV cache: reuse, eviction, the second tier, and that no block is ever lost."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hear.blocks import pack, unpack
from hear.engines.kv.leases import Lease, LeaseBook
from hear.engines.simulated.kv_cache import CPU, GPU, KvCache
from hear.engines.simulated.tenants import blocks_of
from hear.messages import BlocksRemoved, BlocksStored
from hear.operation import Ref
from hear.residency import ResidencyDirectory
from tests.engines.builders import hashes_of, own
from tests.engines.integrity import check_cache, check_directory

COPY_S = 1.0


class Cache(KvCache):
    """A cache that notes which blocks were lost, with leases of its own."""

    def __init__(self, gpu: int, cpu: int = 0, *, inclusive: bool = True) -> None:
        self.lost: list[int] = []
        self.leases: LeaseBook[Ref] = LeaseBook(400.0)
        super().__init__(
            num_gpu_blocks=gpu,
            num_cpu_blocks=cpu,
            inclusive=inclusive,
            block_transfer_s=COPY_S,
            leases=self.leases,
            on_lost=self.lost.append,
        )

    def compute(self, hashes: Sequence[int], now: float = 0.0) -> list[int | None]:
        """Hold a prompt as a request does that computes all of it."""
        self.allocate(len(hashes), now)
        parents = [None, *hashes[:-1]]
        return [
            self.name_block(block, parent, now)
            for block, parent in zip(hashes, parents, strict=True)
        ]

    def serve(self, context: str, num_blocks: int, now: float = 0.0) -> list[int]:
        """Compute a prompt and let it go again; returns its blocks."""
        hashes = hashes_of(context, num_blocks)
        self.release(self.compute(hashes, now), now)
        return hashes


# -- the GPU tier ---------------------------------------------------------------------------------


def test_blocks_that_were_let_go_are_found_again_from_the_start_of_a_prompt() -> None:
    cache = Cache(8)
    hashes = cache.serve("a", 4)
    assert cache.match(hashes, 4) == (4, 0)
    assert cache.match(hashes, 3) == (3, 0)
    assert cache.match(hashes_of("b", 4), 4) == (0, 0)
    cache.drop_gpu(hashes[1], 0.0)
    assert cache.match(hashes, 4) == (1, 0)


def test_the_end_of_a_prompt_is_given_up_before_its_start() -> None:
    cache = Cache(4)
    hashes = cache.serve("a", 4)
    cache.allocate(1, 0.0)
    assert cache.match(hashes, 4) == (3, 0)
    cache.allocate(2, 0.0)
    assert cache.match(hashes, 4) == (1, 0)


def test_the_prompt_that_was_used_longest_ago_goes_first() -> None:
    cache = Cache(4)
    older, newer = cache.serve("older", 2), cache.serve("newer", 2)
    cache.acquire(older)
    cache.release(older, 0.0)
    cache.allocate(2, 0.0)
    assert cache.match(older, 2) == (2, 0)
    assert cache.match(newer, 2) == (0, 0)


def test_a_block_in_use_is_not_given_up_and_counts_each_user() -> None:
    cache = Cache(3)
    held = cache.compute(hashes_of("a", 2))
    cache.acquire(hashes_of("a", 2))
    cache.release(held, 0.0)
    assert cache.in_use(hashes_of("a", 2)[0])
    assert cache.num_allocatable == 1
    cache.release(hashes_of("a", 2), 0.0)
    assert cache.num_allocatable == 3


def test_what_fits_takes_account_of_the_hits_that_have_to_stay() -> None:
    cache = Cache(6)
    hits = cache.serve("a", 4)
    assert cache.fits([], 6)
    assert cache.fits(hits, 2)
    assert not cache.fits(hits, 3)
    cache.acquire(hits[:2])  # in use by another, so they are not among the allocatable
    assert cache.fits(hits, 2)
    assert not cache.fits([], 5)


def test_a_second_block_of_the_same_hash_is_a_copy_that_can_be_reused_in_its_place() -> None:
    cache, hashes = Cache(4), hashes_of("a", 2)
    first = cache.compute(hashes)
    second = cache.compute(hashes)
    assert first == hashes
    assert not set(second) & set(first)
    check_cache(cache, [first, second])
    cache.release(first, 0.0)
    cache.release(second, 0.0)
    check_cache(cache, [])
    assert cache.pressure()[0].cached == 4
    cache.drain_changes()
    cache.allocate(2, 0.0)  # takes the first ones, used longest ago
    assert cache.match(hashes, 2) == (2, 0)
    assert cache.drain_changes() == {}  # since nothing that is gone was not there twice
    assert cache.acquire(hashes) == second
    assert all(cache.in_use(block) for block in hashes)
    cache.release(second, 0.0)
    cache.allocate(2, 0.0)
    assert cache.match(hashes, 2) == (0, 0)
    assert cache.lost == hashes[::-1]


def test_all_copies_of_a_block_follow_its_leases_and_leave_the_gpu_together() -> None:
    cache, hashes = Cache(5), hashes_of("a", 1)
    held = [cache.compute(hashes) for _ in range(3)]
    for names in held:
        cache.release(names, 0.0)
    cache.serve("b", 2)
    cache.leases.put(Lease(own("op"), own("a"), 1.0, 1e9, hashes, 0.0))
    cache.rerank(hashes)
    cache.allocate(2, 0.0)  # goes to those without a lease
    assert cache.match(hashes, 1) == (1, 0)
    assert cache.lost == hashes_of("b", 2)[::-1]
    cache.drop_gpu(hashes[0], 0.0)
    assert cache.num_allocatable == 3
    assert cache.lost[-1:] == hashes
    check_cache(cache, [[None, None]])


def test_a_block_that_does_not_become_full_is_found_by_nobody() -> None:
    cache = Cache(4, 4)
    held = cache.compute(hashes_of("a", 2))
    cache.unname_block(hashes_of("a", 2)[1])
    held[1] = None
    check_cache(cache, [held])
    assert cache.match(hashes_of("a", 2), 2) == (1, 0)
    assert cache.settle(10 * COPY_S) == hashes_of("a", 1)  # nor does its copy arrive
    assert cache.lost == [hashes_of("a", 2)[1]]


def test_pressure_tells_used_cached_and_allocatable_blocks() -> None:
    cache = Cache(8, 3)
    cache.serve("a", 2)
    cache.compute(hashes_of("b", 3))
    cache.settle(10.0)
    gpu, cpu = cache.pressure()
    assert (gpu.num_blocks, gpu.used, gpu.cached, gpu.allocatable) == (8, 3, 2, 5)
    assert (cpu.num_blocks, cpu.cached, cpu.allocatable) == (3, 3, 3)


# -- the CPU tier ---------------------------------------------------------------------------------


def test_an_inclusive_tier_gets_a_copy_of_each_block_one_after_the_other() -> None:
    cache = Cache(8, 8)
    hashes = cache.serve("a", 3)
    assert cache.settle(0.5 * COPY_S) == []
    assert cache.settle(1.0 * COPY_S) == hashes[:1]
    assert cache.next_settle() == 2.0 * COPY_S
    assert cache.settle(5.0 * COPY_S) == hashes[1:]
    assert all(cache.on_gpu(b) and cache.on_cpu(b) for b in hashes)


def test_an_exclusive_tier_gets_what_the_gpu_evicts_and_nothing_else() -> None:
    cache = Cache(4, 8, inclusive=False)
    hashes = cache.serve("a", 4)
    assert cache.settle(100.0) == []
    cache.allocate(2, 100.0)
    assert cache.settle(200.0) == [hashes[3], hashes[2]]
    assert cache.match(hashes, 4) == (2, 2)


@pytest.mark.parametrize("inclusive", [True, False])
def test_what_comes_back_from_an_exclusive_tier_leaves_it(inclusive: bool) -> None:
    cache = Cache(4, 8, inclusive=inclusive)
    hashes = cache.serve("a", 1)
    cache.settle(10.0)
    cache.allocate(4, 10.0)
    cache.settle(20.0)
    assert not cache.on_gpu(hashes[0])
    assert cache.on_cpu(hashes[0])
    cache.release([None], 20.0)
    cache.allocate(1, 20.0)
    assert cache.load_time(1, 20.0) == 20.0 + COPY_S
    assert cache.loaded(hashes[0], None, 21.0) == hashes[0]
    assert cache.on_gpu(hashes[0])
    assert cache.on_cpu(hashes[0]) is inclusive


def test_what_is_computed_anew_leaves_an_exclusive_tier_too() -> None:
    cache = Cache(1, 8, inclusive=False)
    hashes = cache.serve("a", 1)
    cache.allocate(1, 0.0)
    cache.settle(10.0)
    cache.release([None], 10.0)
    cache.compute(hashes, 10.0)
    assert cache.on_gpu(hashes[0])
    assert not cache.on_cpu(hashes[0])


def test_a_copy_on_its_way_is_dropped_if_the_block_was_computed_again() -> None:
    cache = Cache(1, 8, inclusive=False)
    hashes = cache.serve("a", 1)
    cache.allocate(1, 0.0)
    cache.release([None], 0.0)
    held = cache.compute(hashes, 0.0)
    assert cache.settle(10.0) == hashes
    assert not cache.on_cpu(hashes[0])
    check_cache(cache, [held])


def test_the_cpu_tier_gives_up_what_was_used_longest_ago() -> None:
    cache = Cache(8, 3)
    one = cache.serve("one", 2)
    cache.settle(10.0)
    cache.acquire(one)
    cache.release(one, 10.0)
    two = cache.serve("two", 2, 10.0)
    cache.settle(20.0)
    assert [cache.on_cpu(b) for b in (*one, *two)] == [True, False, True, True]
    assert cache.lost == []  # the GPU still has it


def test_a_block_is_lost_when_it_leaves_its_last_tier() -> None:
    cache = Cache(1, 1)
    [first] = cache.serve("a", 1)
    cache.settle(10.0)
    cache.serve("b", 1, 10.0)
    assert cache.lost == []
    cache.settle(20.0)
    assert cache.lost == [first]


def test_loads_share_one_link() -> None:
    cache = Cache(8, 8)
    assert cache.load_time(3, 5.0) == 8.0
    assert cache.load_time(2, 6.0) == 10.0
    assert cache.load_backlog_s(7.0) == 3.0
    assert cache.load_backlog_s(11.0) == 0.0


# -- leases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [GPU, CPU])
def test_leased_blocks_go_last_and_in_the_order_of_their_scores(tier: str) -> None:
    cache = Cache(6, 6) if tier == GPU else Cache(18, 6)
    contexts = {name: hashes_of(name, 2) for name in ("high", "low", "none")}
    for name, score in (("high", 0.9), ("low", 0.1)):
        cache.leases.put(Lease(own(name), own(name), score, 1e9, contexts[name], 0.0))
    for name in contexts:
        cache.serve(name, 2)
    cache.settle(100.0)
    held = cache.on_gpu if tier == GPU else cache.on_cpu
    gone = []
    for number in range(3):
        if tier == GPU:
            cache.allocate(2, 100.0)
        else:
            cache.serve(f"pressure{number}", 2, 100.0)
            ref = own(str(number))
            cache.leases.put(Lease(ref, ref, 1.0, 1e9, hashes_of(f"pressure{number}", 2), 1e3))
            cache.settle(1000.0)
        gone += [n for n in contexts if n not in gone and not any(map(held, contexts[n]))]
    assert gone == ["none", "low", "high"]


def test_blocks_that_lose_their_lease_go_first_and_the_end_before_the_start() -> None:
    cache = Cache(5)
    lease = Lease(own("op"), own("a"), 1.0, 1e9, hashes_of("a", 3), 0.0)
    cache.leases.put(lease)
    hashes = cache.serve("a", 3)
    other = cache.serve("b", 2)
    cache.rerank(cache.leases.drop(lease))
    cache.allocate(2, 0.0)
    assert cache.match(hashes, 3) == (1, 0)
    assert cache.match(other, 2) == (2, 0)


# -- what is reported -----------------------------------------------------------------------------


def test_a_prompt_is_reported_as_one_chain_and_evictions_together() -> None:
    cache = Cache(4)
    hashes = cache.serve("a", 3)
    [[stored]] = cache.drain_changes().values()
    assert isinstance(stored, BlocksStored)
    assert (stored.parent, list(unpack(stored.prefix_hashes))) == (None, hashes)
    cache.allocate(3, 0.0)
    [[removed]] = cache.drain_changes().values()
    assert isinstance(removed, BlocksRemoved)
    assert list(unpack(removed.prefix_hashes)) == [hashes[2], hashes[1]]
    assert cache.drain_changes() == {}


def test_a_prompt_that_goes_on_is_reported_with_its_parent() -> None:
    cache = Cache(8)
    cache.serve("a", 2)
    cache.drain_changes()
    hashes = hashes_of("a", 4)
    cache.acquire(hashes[:2])
    cache.allocate(2, 0.0)
    for index in (2, 3):
        cache.name_block(hashes[index], hashes[index - 1], 0.0)
    [[stored]] = cache.drain_changes().values()
    assert isinstance(stored, BlocksStored)
    assert (stored.parent, list(unpack(stored.prefix_hashes))) == (hashes[1], hashes[2:])


def test_each_tenant_is_told_of_its_own_blocks_by_its_own_hashes() -> None:
    cache = Cache(8)
    hashes = hashes_of("a", 2)
    mine, theirs = blocks_of(0, hashes), blocks_of(1, hashes)
    cache.compute(mine)
    cache.compute(theirs)
    told = cache.drain_changes()
    assert told[0] == told[1] == [BlocksStored(tier=GPU, prefix_hashes=pack(hashes))]
    assert list(cache.chains(0)) == list(cache.chains(1)) == told[0]
    assert list(cache.chains(2)) == []
    cache.release(theirs, 0.0)
    cache.allocate(5, 0.0)
    assert cache.drain_changes() == {1: [BlocksRemoved(tier=GPU, prefix_hashes=pack([hashes[1]]))]}
    assert cache.match(mine, 2) == (2, 0)


# -- anything at all ------------------------------------------------------------------------------


class AnyUse(RuleBasedStateMachine):
    """Requests come and go, copies arrive, leases begin and end, and blocks are moved."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.holders: list[tuple[list[int], list[int | None]]] = []
        self.directory = ResidencyDirectory()

    @initialize(gpu=st.integers(2, 9), cpu=st.integers(0, 7), inclusive=st.booleans())
    def begin(self, gpu: int, cpu: int, inclusive: bool) -> None:
        self.cache = Cache(gpu, cpu, inclusive=inclusive)

    @rule(context=st.sampled_from("abc"), num_blocks=st.integers(1, 5), load=st.booleans())
    def start(self, context: str, num_blocks: int, load: bool) -> None:
        cache, hashes = self.cache, hashes_of(context, num_blocks)
        on_gpu, on_cpu = cache.match(hashes, num_blocks)
        hits = hashes[:on_gpu]
        if not cache.fits(hits, num_blocks - on_gpu):
            return
        blocks: list[int | None] = [*cache.acquire(hits)]
        cache.allocate(num_blocks - on_gpu, self.now)
        for index in range(on_gpu, num_blocks):
            parent = hashes[index - 1] if index else None
            name = cache.loaded if load and index < on_gpu + on_cpu else cache.name_block
            blocks.append(name(hashes[index], parent, self.now))
        self.holders.append((hashes, blocks))

    @rule(number=st.integers(0, 9))
    def finish(self, number: int) -> None:
        if self.holders:
            _, blocks = self.holders.pop(number % len(self.holders))
            self.cache.release(blocks, self.now)

    @rule(number=st.integers(0, 9))
    def take_back(self, number: int) -> None:
        if self.holders:
            _, blocks = self.holders[number % len(self.holders)]
            last = blocks[-1]
            if last is not None and self.cache._refs[last] == 1:
                self.cache.unname_block(last)
                blocks[-1] = None

    @rule(passed_s=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, passed_s: float) -> None:
        self.now += passed_s * COPY_S
        self.cache.settle(self.now)

    @rule(context=st.sampled_from("abc"), score=st.sampled_from([0.1, 0.5, 1.0]))
    def lease(self, context: str, score: float) -> None:
        blocks = hashes_of(context, 4)
        if self.cache.leases.get(own(context)) is None:
            self.cache.leases.put(Lease(own("op"), own(context), score, 1e9, blocks, self.now))
            self.cache.rerank(blocks)

    @rule(context=st.sampled_from("abc"))
    def end_lease(self, context: str) -> None:
        lease = self.cache.leases.get(own(context))
        if lease is not None:
            self.cache.rerank(self.cache.leases.drop(lease))

    @rule(context=st.sampled_from("abc"), number=st.integers(0, 4))
    def demote(self, context: str, number: int) -> None:
        block = hashes_of(context, 5)[number]
        if self.cache.on_gpu(block) and not self.cache.in_use(block):
            self.cache.demote(block, self.now)

    @rule(context=st.sampled_from("abc"))
    def store(self, context: str) -> None:
        for block in hashes_of(context, 5):
            if self.cache.inclusive and self.cache.on_gpu(block):
                self.cache.store(block, self.now)

    @invariant()
    def no_block_is_lost(self) -> None:
        if hasattr(self, "cache"):
            check_cache(self.cache, [blocks for _, blocks in self.holders])

    @invariant()
    def what_is_reported_is_what_is_there(self) -> None:
        if not hasattr(self, "cache"):
            return
        for change in self.cache.drain_changes().get(0, ()):
            self.directory.apply(change)
        check_directory(self.directory, self.cache)
        whole = ResidencyDirectory()
        for chain in self.cache.chains():
            whole.apply(chain)
        check_directory(whole, self.cache)

    @invariant()
    def what_was_lost_is_nowhere(self) -> None:
        if hasattr(self, "cache"):
            lost = self.cache.lost[-1:]
            self.cache.lost.clear()
            assert not any(self.cache.on_gpu(b) or self.cache.on_cpu(b) for b in lost)


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(stateful_step_count=40)
