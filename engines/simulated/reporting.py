"""What the simulated engine says of itself: requests, queue and pressure as messages.

Reads the scheduler and the cache and changes nothing. The engine's own prefills (Prepare) are
nobody's requests: they count in the totals and are not listed.
"""

from collections.abc import Iterable

from hear.engines.simulated.kv_cache import KvCache
from hear.engines.simulated.request import SimRequest
from hear.engines.simulated.scheduler import Scheduler
from hear.messages import Key, PressureReported, QueueChanged, QueueSnapshot, RequestOutcome
from hear.seams import InferenceRequest


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


def queue_of(scheduler: Scheduler) -> QueueSnapshot:
    """Who waits and who runs now."""
    batch = [*scheduler.running, *scheduler.ready, *(r for _, r in scheduler.loading)]
    return QueueSnapshot(
        waiting=tuple(r.as_waiting() for r in scheduler.waiting.in_order() if not r.prepare),
        running=tuple(r.as_running() for r in batch if not r.prepare),
    )


def queue_change(moved: Iterable[SimRequest], scheduler: Scheduler) -> QueueChanged | None:
    """How the queue has changed with these requests; None if with none of them."""
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
    return QueueChanged(
        waiting=tuple(waiting),
        started=tuple(started),
        ended=tuple(ended),
        num_waiting=len(scheduler.waiting),
        num_running=scheduler.num_running,
        waiting_tokens=scheduler.waiting.num_tokens,
        running_tokens=sum(r.num_tokens for r in scheduler.running),
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
