"""Prepare and Place: bringing the blocks of a context to a tier, and telling when they are there.

To the GPU they go as a request of the engine's own, behind all that anybody waits for; to the CPU
over the link. Whatever was begun is looked at again at its end, since blocks may have been evicted
in the meantime: completed is said only of what is there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hear.engines.simulated.kv_cache import CPU, GPU, KvCache
from hear.engines.simulated.request import BACKGROUND_PRIORITY, SimRequest
from hear.engines.simulated.scheduler import Scheduler
from hear.interfaces import ApplyResult, InferenceRequest
from hear.messages import Place, Prepare
from hear.operation import Operation, Ref

End = Callable[[Ref, str, str, str], None]
"""Tells of an operation's end: which one, completed or failed, a reason code and a detail."""


@dataclass(slots=True)
class _Job:
    """What one operation is about. ``missing`` are the blocks whose copies it waits for."""

    operation: Ref
    tier: str
    blocks: Sequence[int]
    demote: bool
    prefill: SimRequest | None = None
    missing: set[int] = field(default_factory=set)


class Placement:
    """The moves that are under way in one engine."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: KvCache,
        requests: dict[Ref, SimRequest],
        submit: Callable[[InferenceRequest], SimRequest],
        block_size: int,
        end: End,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._requests = requests
        self._submit = submit
        self._block_size = block_size
        self._end = end
        self._jobs: dict[Ref, _Job] = {}

    def begin(self, operation: Operation, blocks: Sequence[int], now: float) -> ApplyResult:
        """Begin to bring blocks to where a control wants them."""
        control, cache = operation.control, self._cache
        assert isinstance(control, Prepare | Place)
        tiers = (GPU, CPU) if cache.num_cpu_blocks else (GPU,)
        tier = next((t for t in (control.tier, *control.fallback) if t in tiers), None)
        if tier is None:
            return ApplyResult("rejected", "unknown_tier", control.tier)
        fallback = None if tier == control.tier else tier
        lost = sum(1 for b in blocks if not (cache.on_gpu(b) or cache.on_cpu(b)))
        compute = isinstance(control, Prepare) and control.compute
        if lost and not compute:
            return ApplyResult("rejected", "not_resident", f"{lost} of {len(blocks)} blocks")
        room = {GPU: cache.num_gpu_blocks, CPU: cache.num_cpu_blocks}
        if len(blocks) > min(room[t] for t in ((tier, GPU) if lost else (tier,))):
            return ApplyResult("rejected", "no_room", f"{len(blocks)} blocks")
        ref = operation.ref
        job = _Job(ref, tier, blocks, demote=isinstance(control, Place))
        if tier == GPU or lost:
            if refusal := self._refusal(job):
                return refusal
            if not all(cache.on_gpu(b) for b in blocks):
                self._prefill(job, compute)
                return ApplyResult("accepted", fallback=fallback)
            if not self._is_computing(job):
                return ApplyResult("completed", fallback=fallback)
            self._jobs[ref] = job
            return ApplyResult("accepted", fallback=fallback)
        return self._copy(job, now)._replace(fallback=fallback)

    def cancel(self, operation: Ref, now: float) -> None:
        """Stop what an operation has begun, without saying so."""
        job = self._jobs.pop(operation, None)
        if job is not None and job.prefill is not None:
            self._scheduler.leave(job.prefill, now)
            self._requests.pop(job.prefill.ref, None)

    def prefilled(self, request: SimRequest, now: float) -> None:
        """A prefill has ended: the blocks are on the GPU, unless they could not be brought."""
        job = self._jobs.get(request.prepare) if request.prepare is not None else None
        if job is None:
            return
        job.prefill = None
        if job.tier == CPU and all(self._cache.on_gpu(b) for b in job.blocks):
            result = self._copy(job, now)
            if result.status != "accepted":
                self._conclude(job, result)
        else:
            self.look(now)

    def arrived_on_cpu(self, blocks: Sequence[int], now: float) -> None:
        """Copies to the CPU have arrived."""
        for job in self._jobs.values():
            job.missing.difference_update(blocks)
        self.look(now)

    def look(self, now: float) -> None:
        """See what has come to its end; to be called when a step has ended, too."""
        for job in list(self._jobs.values()):
            if job.prefill is not None or job.missing or self._is_computing(job):
                continue
            if job.tier == CPU:
                self._conclude(job, self._copied(job, now))
            elif all(self._cache.on_gpu(b) for b in job.blocks):
                self._conclude(job, ApplyResult("completed"))
            else:
                detail = "evicted before it was there"
                self._conclude(job, ApplyResult("failed", "not_resident", detail))

    def _conclude(self, job: _Job, result: ApplyResult) -> None:
        del self._jobs[job.operation]
        status = "completed" if result.status == "completed" else "failed"
        self._end(job.operation, status, result.reason, result.detail)

    def _is_computing(self, job: _Job) -> bool:
        """Whether the step that computes some of the blocks has yet to end."""
        return not self._scheduler.computing.isdisjoint(job.blocks)

    def _refusal(self, job: _Job) -> ApplyResult | None:
        if job.tier == CPU and not (job.demote or self._cache.inclusive):
            return ApplyResult(
                "rejected", "exclusive_tier", "it holds no copies of what the GPU holds"
            )
        return None

    def _prefill(self, job: _Job, compute: bool) -> None:
        tenant, operation = job.operation
        request = self._submit(
            InferenceRequest(
                id=f"prepare:{operation}",
                prompt_tokens=len(job.blocks) * self._block_size,
                output_tokens=0,
                prompt_hashes=job.blocks,
                tenant=tenant,
            )
        )
        request.prepare = job.operation
        request.only_load = not compute
        request.priority = BACKGROUND_PRIORITY
        self._scheduler.waiting.add(request)
        job.prefill = request
        self._jobs[job.operation] = job

    def _copy(self, job: _Job, now: float) -> ApplyResult:
        """Copy to the CPU what is not there; a Place also takes it from the GPU."""
        cache = self._cache
        job.missing = {b for b in job.blocks if not cache.on_cpu(b)}
        if job.missing and (refusal := self._refusal(job)):
            return refusal
        if job.demote and any(cache.in_use(b) for b in job.blocks):
            return ApplyResult("rejected", "in_use", "a request runs on these blocks")
        for block in reversed(job.blocks):
            if job.demote and not cache.inclusive and cache.on_gpu(block):
                cache.demote(block, now)
            elif block in job.missing:
                cache.store(block, now)
        if job.missing or self._is_computing(job):
            self._jobs[job.operation] = job
            return ApplyResult("accepted")
        return self._copied(job, now)

    def _copied(self, job: _Job, now: float) -> ApplyResult:
        """The copies are there; say whether all is now as it was asked for."""
        cache = self._cache
        if not all(cache.on_cpu(b) for b in job.blocks):
            return ApplyResult("failed", "not_resident", "evicted before all was there")
        if job.demote:
            if any(cache.in_use(b) for b in job.blocks):
                return ApplyResult("failed", "in_use", "a request has begun to use these blocks")
            for block in reversed(job.blocks):
                if cache.on_gpu(block):
                    cache.drop_gpu(block, now)
        return ApplyResult("completed")
