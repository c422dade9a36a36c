"""What must be true of a simulated engine at any moment, looked at from outside its own books."""

from collections import Counter

from hear.engines.simulated.backend import SimulatedEngine
from hear.engines.simulated.kv_cache import KvCache
from hear.engines.simulated.scheduler import Scheduler


def check_cache(cache: KvCache, scheduler: Scheduler) -> None:
    """No block is lost or held twice, and the books agree with what the requests hold."""
    holders = [*scheduler.running, *scheduler.ready, *(r for _, r in scheduler.loading)]
    held = Counter(b for request in holders for b in request.blocks if b is not None)
    unnamed = sum(b is None for request in holders for b in request.blocks)
    assert dict(held) == cache._refs, "references are not what the requests hold"
    total = cache._num_plain_free + len(cache._free) + len(cache._refs) + unnamed
    assert total == cache.num_gpu_blocks, f"{total} blocks of {cache.num_gpu_blocks}"
    assert cache._num_plain_free >= 0
    assert len(cache._cpu) <= cache.num_cpu_blocks, "the CPU tier holds more than it can"
    gpu = {b for b in cache._parents if cache.on_gpu(b)}
    assert len(gpu) == len(cache._free) + len(cache._refs), "a block without a parent on record"
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
    assert scheduler.waiting.num_tokens == sum(r.prompt_tokens for r in scheduler.waiting)


def check_engine(engine: SimulatedEngine) -> None:
    """All of it."""
    check_scheduler(engine.scheduler)
    check_cache(engine.cache, engine.scheduler)
