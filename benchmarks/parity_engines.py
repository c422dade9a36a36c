"""vLLM's own scheduler and the simulated one, each driven step by step, without model or clock.

Both are told of the same requests and say what they did in each step in the same words. vLLM's is
given the tokens that a model would have sampled; all else of it is its own, from the queue to the
block pool.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from benchmarks.parity_workload import Arrival, Workload
from hear.engines.kv.leases import LeaseBook
from hear.engines.simulated.kv_cache import KvCache
from hear.engines.simulated.profile import Scheduler as Limits
from hear.engines.simulated.request import SimRequest
from hear.engines.simulated.scheduler import Scheduler, StepPlan
from hear.interfaces import InferenceRequest
from hear.operation import Ref


@dataclass(slots=True)
class Actions:
    """What an engine did in one step, each in its order.

    ``shares`` are tokens by request, ``admitted`` those that came from the queue with the tokens
    that they found, ``evicted`` the hashes of blocks whose content was given up.
    """

    shares: list[tuple[str, int]] = field(default_factory=list)
    admitted: list[tuple[str, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


class Stepped(Protocol):
    """An engine that is asked for one step at a time."""

    def add(self, arrival: Arrival, hashes: Sequence[int]) -> None:
        """A request comes; ``hashes`` are those of its full blocks, output included."""
        ...

    def step(self) -> Actions | None:
        """Go one step; None if there was nothing to do."""
        ...


class Simulated:
    """The simulated engine's scheduler and cache.

    With ``keeps_names`` it does as vLLM with the blocks of a request that is preempted after it
    was given tokens in the same step: they keep the hashes of what will not be computed.
    """

    def __init__(self, workload: Workload, *, keeps_names: bool = False) -> None:
        self._block_size = workload.block_size
        self._cache = _ToldCache(workload.num_blocks)
        limits = Limits(
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.max_num_batched_tokens,
            order=workload.order,
            reserve_full_prompt=workload.reserve_full_prompt,
        )
        self._scheduler = _ToldScheduler(limits, self._cache, workload.block_size, keeps_names)
        self._came = 0
        self._now = 0.0

    def add(self, arrival: Arrival, hashes: Sequence[int]) -> None:
        """A request comes."""
        in_prompt = arrival.prompt_tokens // self._block_size
        inference = InferenceRequest(
            id=arrival.id,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            prompt_hashes=hashes[:in_prompt],
            output_hashes=hashes[in_prompt:],
        )
        request = SimRequest(inference, arrival.arrival_s, self._came, "dense")
        if self._scheduler.by_priority:
            request.priority = arrival.priority
        self._came += 1
        self._scheduler.add(request)

    def step(self) -> Actions | None:
        """Go one step."""
        self._now += 1.0
        self._scheduler.victims.clear()
        self._cache.evicted.clear()
        before = {request.id for request in self._scheduler.running}
        plan = self._scheduler.schedule(self._now)
        if plan is None:
            return None
        step = Actions(preempted=list(self._scheduler.victims))
        step.shares = [(request.id, share) for request, share in plan.shares]
        step.admitted = [
            (request.id, request.computed)
            for request, _ in plan.shares
            if request.id not in before or request.id in step.preempted
        ]
        step.evicted = list(self._cache.evicted)
        self._cache.drain_changes()
        step.ended = [request.id for request in self._scheduler.finish_step(plan, self._now)]
        return step


class _ToldCache(KvCache):
    """Tells of each block that it gives up, also where a copy stays, as vLLM's events do."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(
            num_gpu_blocks=num_blocks,
            num_cpu_blocks=0,
            inclusive=True,
            block_transfer_s=0.0,
            leases=LeaseBook[Ref](400.0),
            on_lost=lambda block: None,
        )
        self.evicted: list[int] = []
        self.keeps_names = False

    def unname_block(self, name: int) -> None:
        """Does nothing while names are kept."""
        if not self.keeps_names:
            super().unname_block(name)

    def _evicted(self, name: int, now: float) -> None:
        self.evicted.append(self._copied.get(name, name))
        super()._evicted(name, now)


class _ToldScheduler(Scheduler):
    """Tells whom it preempts."""

    def __init__(
        self, limits: Limits, cache: _ToldCache, block_size: int, keeps_names: bool
    ) -> None:
        super().__init__(limits, cache, block_size)
        self._told, self._keeps_names = cache, keeps_names
        self.by_priority = limits.order == "priority"
        self.victims: list[str] = []

    def _preempt(self, request: SimRequest, now: float) -> None:
        self.victims.append(request.id)
        super()._preempt(request, now)

    def _take_back(self, plan: StepPlan, request: SimRequest) -> int:
        if not self._keeps_names:
            return super()._take_back(plan, request)
        names = list(request.blocks)
        self._told.keeps_names = True
        share = super()._take_back(plan, request)
        self._told.keeps_names = False
        request.blocks = names
        return share


class Real:
    """vLLM's own scheduler, or another ``kind`` of it."""

    def __init__(self, workload: Workload, kind: Any = None) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
        from vllm.v1.structured_output import StructuredOutputManager

        config = _config(workload)
        self.scheduler: Any = (kind or VllmScheduler)(
            vllm_config=config,
            kv_cache_config=_kv_cache_config(workload),
            structured_output_manager=StructuredOutputManager(config),
            block_size=workload.block_size,
            log_stats=False,
        )
        self.pool: Any = self.scheduler.kv_cache_manager.block_pool
        self.pool.enable_kv_cache_events = True
        self._hasher = _hasher(workload.block_size)
        self._by_priority = workload.order == "priority"
        self._arrivals: dict[str, Arrival] = {}
        self._victims: list[str] = []
        preempt = self.scheduler._preempt_request

        def told(request: Any, *args: Any, **kwargs: Any) -> None:
            self._victims.append(request.request_id)
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = told

    def add(self, arrival: Arrival, hashes: Sequence[int]) -> None:
        """A request comes; vLLM computes its hashes itself."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._arrivals[arrival.id] = arrival
        self.scheduler.add_request(
            Request(
                request_id=arrival.id,
                prompt_token_ids=list(arrival.tokens[: arrival.prompt_tokens]),
                sampling_params=SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True),
                pooling_params=None,
                arrival_time=arrival.arrival_s,
                priority=arrival.priority if self._by_priority else 0,
                block_hasher=self._hasher,
            )
        )

    def step(self) -> Actions | None:
        """Go one step. One without tokens, which only preempts, is taken together with the next."""
        scheduler = self.scheduler
        self._victims.clear()
        running = {request.request_id for request in scheduler.running}
        while True:
            came = len(self._victims)
            output = scheduler.schedule()
            if output.total_num_scheduled_tokens:
                break
            if len(self._victims) == came:
                return None
        shares = output.num_scheduled_tokens
        step = Actions(shares=list(shares.items()), preempted=list(self._victims))
        for name, share in shares.items():
            if name not in running or name in step.preempted:
                step.admitted.append((name, scheduler.requests[name].num_computed_tokens - share))
        step.evicted = [
            block_hash
            for event in self.pool.take_events()
            if type(event).__name__ == "BlockRemoved"
            for block_hash in map(_low64, event.block_hashes)
        ]
        before = set(scheduler.requests)
        scheduler.update_from_output(output, self.model_output(list(shares)))
        step.ended = sorted(before - set(scheduler.requests), key=list(shares).index)
        return step

    def model_output(self, names: list[str]) -> Any:
        """What a model would say of a step of these requests."""
        from vllm.v1.outputs import ModelRunnerOutput

        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([self._arrivals[name].tokens[request.num_tokens]] if done else [])
        at = {name: place for place, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=at, sampled_token_ids=sampled)


def block_hashes(arrival: Arrival, block_size: int) -> list[int]:
    """HEAR's hashes of all full blocks of a request, from vLLM's own of the same tokens."""
    request = SimpleNamespace(
        num_tokens=len(arrival.tokens),
        all_token_ids=list(arrival.tokens),
        block_hashes=[],
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
        prompt_is_token_ids=None,
        prompt_embeds_per_block_hashes=None,
        _prompt_embeds_per_block_hashes={},
    )
    return [_low64(key) for key in _hasher(block_size)(request)]


def _low64(block_hash: bytes | int) -> int:
    if isinstance(block_hash, bytes):
        block_hash = int.from_bytes(block_hash[-8:], "big")
    return block_hash & (1 << 64) - 1


def _hasher(block_size: int) -> Callable[[Any], list[bytes]]:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(block_size, sha256)  # type: ignore[no-any-return]


_base: list[Any] = []  # the configuration that workloads vary: to make it takes a while


def _config(workload: Workload) -> Any:
    if not _base:
        os.environ.update(
            HF_HUB_OFFLINE="1",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_LOGGING_LEVEL="ERROR",
            VLLM_NO_USAGE_STATS="1",
        )
        from vllm.engine.arg_utils import EngineArgs

        from hear.engines.vllm.launch.model import make_model

        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder) / "model")
            _base.append(
                EngineArgs(
                    model=str(Path(folder) / "model"),
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    enforce_eager=True,
                    max_model_len=2048,
                    async_scheduling=False,
                ).create_engine_config()
            )
    config = copy(_base[0].scheduler_config)
    config.max_num_seqs = workload.max_num_seqs
    config.max_num_batched_tokens = workload.max_num_batched_tokens
    config.max_num_scheduled_tokens = None
    config.policy = workload.order
    config.scheduler_reserve_full_isl = workload.reserve_full_prompt
    whole = _base[0]
    whole.scheduler_config = config
    whole.kv_events_config = None
    whole.additional_config = {"hear": {"bus": "memory"}}  # for whom HEAR is in
    whole.cache_config.block_size = workload.block_size
    whole.cache_config.num_gpu_blocks = workload.num_blocks + 1
    whole.cache_config.enable_prefix_caching = True
    return whole


def _kv_cache_config(workload: Workload) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=workload.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    # One block more, since vLLM keeps its first one as a placeholder.
    return KVCacheConfig(
        num_blocks=workload.num_blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
