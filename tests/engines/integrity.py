"""What must be true of a simulated engine at any moment, looked at from outside its own books."""

from collections import Counter
from collections.abc import Iterable, Sequence

from hear.engines.simulated.backend import SimulatedEngine
from hear.engines.simulated.kv_cache import CPU, GPU, KvCache
from hear.engines.simulated.scheduler import Scheduler
from hear.residency import ResidencyDirectory


def check_cache(cache: KvCache, holders: Iterable[Sequence[int | None]]) -> None:
    """No block is lost or held twice, and the books agree with what the holders have."""
    blocks = [block for holder in holders for block in holder]
    held = Counter(block for block in blocks if block is not None)
    unnamed = len(blocks) - held.total()
    assert dict(held) == cache._refs, "references are not what is held"
    total = cache._num_plain_free + len(cache._free) + len(cache._refs) + unnamed
    assert total == cache.num_gpu_blocks, f"{total} blocks of {cache.num_gpu_blocks}"
    assert cache._num_plain_free >= 0
    assert len(cache._cpu) <= cache.num_cpu_blocks, "the CPU tier holds more than it can"
    gpu = {b for b in cache._parents if cache.on_gpu(b)}
    names = {*cache._refs, *cache._free}
    assert {cache._copied.get(name, name) for name in names} == gpu, "a block that nobody holds"
    assert {name for name in names if name < 0} == set(cache._copied), "a copy that nobody holds"
    assert all(names >= set(copies) != {block} for block, copies in cache._copies.items())
    assert not any(b in cache._free for b in cache._refs), "free and in use"
    cpu = {b for b in cache._parents if cache.on_cpu(b)}
    assert len(cpu) == len(cache._cpu), "a block without a parent on record"
    assert set(cache._parents) == gpu | cpu | cache._storing_blocks, "a parent of no block"
    assert {b for _, b, _ in cache._storing} == cache._storing_blocks
    if not cache.inclusive:
        assert not gpu & cpu, "an exclusive tier holds what the GPU holds"


def check_scheduler(scheduler: Scheduler) -> None:
    """Each request stands in one place, and the limits are kept."""
    places = [
        *scheduler.waiting,
        *scheduler.running,
        *scheduler.ready,
        *(r for _, r in scheduler.loading),
    ]
    assert len({id(r) for r in places}) == len(places), "a request stands in two places"
    assert len(scheduler.running) <= scheduler._limits.max_num_seqs
    for request in scheduler.waiting:
        assert request.state == "waiting"
        assert not request.blocks, "a waiting request holds blocks"
    for request in scheduler.running:
        assert request.state == "running"
        assert request.computed <= request.num_tokens
        assert len(request.blocks) >= scheduler.num_blocks(request.computed)
    of_tenants: dict[str, list[int]] = {}
    for request in scheduler.waiting:
        of_tenants.setdefault(request.tenant, []).append(request.prompt_tokens)
    totals = {tenant: (len(tokens), sum(tokens)) for tenant, tokens in of_tenants.items()}
    assert scheduler.waiting._totals == totals


def check_engine(engine: SimulatedEngine) -> None:
    """All of it."""
    check_scheduler(engine.scheduler)
    scheduler = engine.scheduler
    holders = [*scheduler.running, *scheduler.ready, *(r for _, r in scheduler.loading)]
    check_cache(engine.cache, [request.blocks for request in holders])


def check_directory(directory: ResidencyDirectory, cache: KvCache) -> None:
    """What a reader made of all reports is what the cache holds."""
    for tier, holds in ((GPU, cache.on_gpu), (CPU, cache.on_cpu)):
        there = {block for block in cache._parents if holds(block)}
        assert directory.num_blocks(tier) == len(there), f"{tier}: the number of blocks"
        assert all(directory.holds(tier, block) for block in there), f"{tier}: the blocks"
