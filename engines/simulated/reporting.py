"""What the simulated engine says of itself: what it can do, requests, queue and pressure.

Reads the profile, the scheduler and the cache and changes nothing. The engine's own prefills
(Prepare) are nobody's requests: they count in the totals and are not listed.
"""

from collections.abc import Iterable

from hear.blocks import HASH_SCHEME
from hear.engines.simulated.kv_cache import CPU, GPU, KvCache
from hear.engines.simulated.profile import EngineProfile
from hear.engines.simulated.request import SimRequest
from hear.engines.simulated.roofline import Roofline
from hear.engines.simulated.scheduler import Scheduler
from hear.interfaces import InferenceRequest
from hear.messages import (
    CapabilitiesReported,
    CostsReported,
    Key,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestOutcome,
    Tier,
)

MODES = ("dense",)


def capabilities_of(
    profile: EngineProfile, cache: KvCache, block_size: int, controls: tuple[str, ...]
) -> CapabilitiesReported:
    """What an engine of a profile can do."""
    limits = profile.scheduler
    tiers = [Tier(name=GPU, num_blocks=cache.num_gpu_blocks)]
    if cache.num_cpu_blocks:
        tiers.append(Tier(name=CPU, num_blocks=cache.num_cpu_blocks))
    return CapabilitiesReported(
        controls=controls,
        modes=MODES,
        tiers=tuple(tiers),
        block_size=block_size,
        hash_scheme=HASH_SCHEME,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        max_lease_s=limits.max_lease_s,
        retention_decay_s=limits.retention_decay_s,
        model=profile.model.name,
    )


def costs_of(profile: EngineProfile, roofline: Roofline) -> CostsReported:
    """What work costs on it, by the roofline."""
    chunk = profile.scheduler.max_num_batched_tokens
    return CostsReported(
        basis="estimated",
        prefill_tokens_per_s=roofline.prefill_tokens_per_s(chunk),
        decode_step_s=roofline.decode_step_s(chunk),
        kv_bytes_per_token=profile.model.kv_bytes_per_token,
        load_bytes_per_s=profile.tiers.transfer_bytes_per_s,
    )


def key_of(request: InferenceRequest | SimRequest) -> Key:
    """The key of what is said of a request."""
    return Key(request=request.id, context=request.context, context_version=request.context_version)


def outcome_of(sim: SimRequest, status: str, reason: str, now: float) -> RequestOutcome:
    """How a request has ended."""
    started = now if sim.started_s is None else sim.started_s
    first = now if sim.first_token_s is None else sim.first_token_s
    return RequestOutcome(
        status="completed" if status == "completed" else "failed",
        reason=reason,
        mode=sim.mode,
        prompt_tokens=sim.prompt_tokens,
        output_tokens=sim.produced,
        reused_tokens={tier: n for tier, n in sim.reused.items() if n},
        queue_s=started - sim.arrival_s,
        prefill_s=max(first - started, 0.0),
        decode_s=now - first,
        preemptions=sim.preemptions,
    )


def queue_of(tenant: str, scheduler: Scheduler) -> QueueSnapshot:
    """Which requests of a tenant wait and which run now."""
    waiting, running = scheduler.waiting.in_order(), scheduler.batch()
    return QueueSnapshot(
        waiting=tuple(r.as_waiting() for r in waiting if r.tenant == tenant and not r.prepare),
        running=tuple(r.as_running() for r in running if r.tenant == tenant and not r.prepare),
    )


def queue_change(
    tenant: str, moved: Iterable[SimRequest], scheduler: Scheduler
) -> QueueChanged | None:
    """How a tenant's queue has changed with these requests of it; None if with none of them."""
    waiting, started, ended = [], [], []
    for sim in moved:
        if sim.prepare is not None:
            continue
        if sim.state == "waiting":
            waiting.append(sim.as_waiting())
        elif sim.state == "ended":
            ended.append(sim.id)
        else:
            started.append(sim.id)
    if not (waiting or started or ended):
        return None
    num_waiting, waiting_tokens = scheduler.waiting.totals(tenant)
    return QueueChanged(
        waiting=tuple(waiting),
        started=tuple(started),
        ended=tuple(ended),
        num_waiting=num_waiting,
        num_running=sum(1 for r in scheduler.batch() if r.tenant == tenant),
        waiting_tokens=waiting_tokens,
        running_tokens=sum(r.num_tokens for r in scheduler.running if r.tenant == tenant),
    )


def pressure_of(scheduler: Scheduler, cache: KvCache, now: float) -> PressureReported:
    """How full the engine is."""
    return PressureReported(
        tiers=cache.pressure(),
        num_waiting=len(scheduler.waiting),
        num_running=scheduler.num_running,
        restored_tokens=scheduler.restored_tokens,
        preemptions=scheduler.preemptions,
        load_backlog_s=cache.load_backlog_s(now),
    )
