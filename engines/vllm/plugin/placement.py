"""Prepare and Place in vLLM: blocks of a context to a tier, told when they are there.

To the first tier they go by a request of the engine's own, behind all that anybody waits for, which
loads what the CPU tier holds and computes the rest; nobody is answered. vLLM's offloading connector
copies what a request has used to the CPU tier, so the same request brings blocks there. Whatever
was begun is looked at again at its end: completed is said only of what is there. The scheduler
lock guards all of it (``bridge``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from hear.blocks import unpack_prompt
from hear.engines.vllm.holdings import CPU, GPU
from hear.engines.vllm.plugin.block_index import BlockIndex
from hear.engines.vllm.plugin.contexts import Contexts, Served
from hear.engines.vllm.plugin.standing import BACKGROUND, Standing
from hear.interfaces import ApplyResult
from hear.messages import Place, Prepare
from hear.operation import Operation, Ref

_FILLER: Final = 0
"""A token that follows the blocks of a prefill: vLLM computes the last token of each prompt."""


@dataclass(slots=True)
class _Job:
    """What one operation is about; ``request`` is vLLM's id of the prefill that serves it."""

    operation: Ref
    tier: str
    served: Served
    demote: bool
    request: str | None


class Placement:
    """The moves that are under way in one engine."""

    def __init__(
        self,
        scheduler: Any,
        *,
        contexts: Contexts,
        holds: Callable[[str, int], bool],
        is_computing: Callable[[int], bool],
        num_blocks: dict[str, int],
        end: Callable[[Ref, str, str, str], None],
        submit: Callable[[Request, Ref], None],
        sync: Callable[[], None],
    ) -> None:
        """Make it.

        Args:
            holds: whether a tier holds a block, at this moment.
            is_computing: whether a step that computes a block is under way.
            num_blocks: the sizes of the tiers that there are.
            submit: hands a request of the engine's own to vLLM.
            sync: tells of changes of residency, which must be heard before what brought them about.
        """
        self._scheduler = scheduler
        self._contexts = contexts
        self._holds = holds
        self._is_computing = is_computing
        self._num_blocks = num_blocks
        self._end = end
        self._submit = submit
        self._sync = sync
        self._jobs: dict[Ref, _Job] = {}
        self.hasher: Any = None

    def begin(self, operation: Operation, now: float) -> ApplyResult:
        """Begin to bring blocks to where a control wants them."""
        control, name = operation.control, operation.context_ref
        assert isinstance(control, Prepare | Place)
        tiers = (control.tier, *control.fallback)
        tier = next((t for t in tiers if t in self._num_blocks), None)
        if tier is None:
            return ApplyResult("rejected", "unknown_tier", control.tier)
        fallback = None if tier == control.tier else tier
        if control.prefix_hashes:
            served = self._contexts.with_blocks(name, unpack_prompt(control.prefix_hashes))
            unknown = "not_resident", "no request has shown what is in these blocks"
        else:
            served = self._contexts.get(name)
            unknown = "unknown_context", name[1]
        if served is None:
            return ApplyResult("rejected", *unknown)
        lost = [b for b in served.blocks if not any(self._holds(t, b) for t in self._num_blocks)]
        if lost and not (isinstance(control, Prepare) and control.compute):
            detail = f"{len(lost)} of {len(served.blocks)} blocks"
            return ApplyResult("rejected", "not_resident", detail)
        # A prefill needs a block more, for the token after those that are asked for.
        if len(served.blocks) >= min(self._num_blocks[t] for t in (tier, GPU)):
            return ApplyResult("rejected", "no_room", f"{len(served.blocks)} blocks")
        job = _Job(operation.ref, tier, served, isinstance(control, Place) and tier != GPU, None)
        if self._missing(job) and (refusal := self._prefill(job)) is not None:
            return refusal
        if job.request is not None or self._unfinished(job):
            self._jobs[operation.ref] = job
            return ApplyResult("accepted", fallback=fallback)
        return self._finish(job)._replace(fallback=fallback)

    def cancel(self, operation: Ref) -> None:
        """Stop what an operation has begun, without saying so."""
        job = self._jobs.pop(operation, None)
        if job is not None and job.request is not None:
            self._scheduler.finish_requests(job.request, RequestStatus.FINISHED_ABORTED)

    def prefilled(self, standing: Standing) -> None:
        """A prefill has ended."""
        job = self._jobs.get(standing.prepare or ("", ""))
        if job is not None:
            job.request = None

    def look(self) -> None:
        """See what has come to its end. The copies of a prefill may take a while after it."""
        if not self._jobs:
            return
        done = [job for job in self._jobs.values() if job.request is None]
        if done:
            self._sync()
        for job in done:
            if self._unfinished(job):
                continue
            missing = self._missing(job)
            if missing and job.tier == CPU and all(self._holds(GPU, b) for b in job.served.blocks):
                continue  # its copies are on their way; the deadline bounds it
            del self._jobs[job.operation]
            if missing:
                self._end(job.operation, "failed", "not_resident", "evicted before it was there")
                continue
            result = self._finish(job)
            status = "completed" if result.status == "completed" else "failed"
            self._end(job.operation, status, result.reason, result.detail)

    # -- pieces -------------------------------------------------------------------------------

    def _missing(self, job: _Job) -> bool:
        return any(not self._holds(job.tier, block) for block in job.served.blocks)

    def _unfinished(self, job: _Job) -> bool:
        """Whether a step that computes some of the blocks has yet to end."""
        return any(map(self._is_computing, job.served.blocks))

    def _prefill(self, job: _Job) -> ApplyResult | None:
        served, size = job.served, self._scheduler.hash_block_size
        tokens = served.tokens[: len(served.blocks) * size].tolist()
        if len(tokens) >= self._scheduler.max_model_len - 1:
            return ApplyResult("rejected", "no_room", "there is no room for the token after them")
        request = Request(
            request_id=f"hear-prepare-{job.operation[0]}-{job.operation[1]}",
            prompt_token_ids=[*tokens, _FILLER],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            pooling_params=None,
            cache_salt=served.cache_salt,
            lora_request=served.lora,
            priority=BACKGROUND,
            block_hasher=self.hasher,
        )
        job.request = request.request_id
        self._submit(request, job.operation)
        return None

    def _finish(self, job: _Job) -> ApplyResult:
        """The blocks are where they were wanted; a Place also takes them from the first tier."""
        if not job.demote:
            return ApplyResult("completed")
        pool = self._scheduler.kv_cache_manager.block_pool
        index = BlockIndex.of(pool)
        # There may be several copies of one block.
        held = [block for hash in job.served.blocks for block in index.named(hash).values()]
        if any(block.ref_cnt for block in held):
            return ApplyResult("rejected", "in_use", "a request runs on these blocks")
        pool.evict_blocks({block.block_id for block in held})
        self._sync()
        return ApplyResult("completed")
