"""The CPU tier of a vLLM engine, through vLLM's offloading connector and its extension points.

On a GPU all is vLLM's but the order of eviction (``hear.engines.vllm.plugin.tier_order``). Stock
vLLM has no copying worker for its CPU platform; there, one that copies within host memory takes its
place.
"""

from time import perf_counter
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from hear.engines.vllm.plugin.tier_order import LeasedFirst
from hear.errors import EngineError


class TierSpec(CPUOffloadingSpec):
    """What vLLM's offloading connector is told to use (``launch.tier_config``)."""

    _worker: OffloadingWorker | None

    def __init__(self, config: OffloadingConfig) -> None:
        """Make the tier's order ours, unless the user has named another.

        Raises:
            EngineError: not one chunk fits into the bytes that were asked for.
        """
        super().__init__(config)
        if self.kv_bytes_per_chunk and not self.num_chunks:
            raise EngineError(
                f"CPU tier: got {self.extra_config['cpu_bytes_to_use']} bytes, expected at least "
                f"{self.kv_bytes_per_chunk}, the size of one chunk of this model's KV cache"
            )
        if "eviction_policy" not in self.extra_config:
            self.eviction_policy = LeasedFirst.__name__
            self.cache_policy_module_path = LeasedFirst.__module__

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker that copies, made once."""
        if not current_platform.is_cpu():
            worker: OffloadingWorker = super().get_worker(kv_caches)
            return worker
        if self._worker is None:
            self._worker = HostWorker(
                kv_caches, num_chunks=self.num_chunks, blocks_per_chunk=self.blocks_per_chunk
            )
        return self._worker


class HostWorker(OffloadingWorker):
    """Copies blocks within host memory, at once, on the thread that asks for it.

    For each tensor of the first tier, int8 of shape (blocks, bytes), the second tier has one of
    shape (chunks * blocks_per_chunk, bytes).
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, *, num_chunks: int, blocks_per_chunk: int
    ) -> None:
        """Reserve the second tier's memory; it is not touched before it is used.

        Raises:
            EngineError: the memory cannot be reserved.
        """
        self._blocks_per_chunk = blocks_per_chunk
        self._first = [cache.tensor for cache in kv_caches.tensors]
        rows = num_chunks * blocks_per_chunk
        try:
            self._second = [
                torch.empty((rows, cache.page_size_bytes), dtype=torch.int8)
                for cache in kv_caches.tensors
            ]
        except RuntimeError as error:
            size = rows * sum(cache.page_size_bytes for cache in kv_caches.tensors)
            raise EngineError(f"CPU tier: {size} bytes cannot be reserved: {error}") from error
        self._tensors_of_group = [
            sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs
        ]
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec
    ) -> bool:
        """Copy from the first tier to the second."""
        begun = perf_counter()
        num_bytes = 0
        for tensors, first, second in self._rows(src_spec, dst_spec):
            for index in tensors:
                self._second[index][second] = self._first[index][first]
                num_bytes += len(first) * self._second[index].shape[1]
        return self._finish(job_id, num_bytes, begun)

    def submit_load(
        self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        """Copy from the second tier to the first."""
        begun = perf_counter()
        num_bytes = 0
        for tensors, first, second in self._rows(dst_spec, src_spec):
            for index in tensors:
                self._first[index][first] = self._second[index][second]
                num_bytes += len(first) * self._second[index].shape[1]
        return self._finish(job_id, num_bytes, begun)

    def get_finished(self) -> list[TransferResult]:
        """What was copied since the last call, with bytes and seconds."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way when this is called."""

    def _rows(
        self, first: GPULoadStoreSpec, second: CPULoadStoreSpec
    ) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """For each group of layers: its tensors, its rows in the first tier and in the second."""
        blocks = torch.from_numpy(first.block_ids).long()
        chunks = torch.from_numpy(second.block_ids).long()
        found = []
        for tensors, size, index in zip(
            self._tensors_of_group, first.group_sizes, first.block_indices, strict=True
        ):
            # A prefix may begin in the middle of a chunk.
            skip = index % self._blocks_per_chunk
            taken = -(-(skip + size) // self._blocks_per_chunk) if size else 0
            rows = chunks[:taken, None] * self._blocks_per_chunk
            rows = (rows + torch.arange(self._blocks_per_chunk)).flatten()[skip : skip + size]
            found.append((tensors, blocks[:size], rows))
            blocks, chunks = blocks[size:], chunks[taken:]
        if len(blocks) or len(chunks) or any(len(a) != len(b) for _, a, b in found):
            raise EngineError(
                f"CPU tier: a transfer of {len(first.block_ids)} blocks and "
                f"{len(second.block_ids)} chunks of {self._blocks_per_chunk} does not match its "
                f"groups of {list(first.group_sizes)} blocks"
            )
        return found

    def _finish(self, job_id: int, num_bytes: int, begun: float) -> bool:
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=num_bytes,
                transfer_time=perf_counter() - begun,
            )
        )
        return True


def order_of(scheduler: Any) -> LeasedFirst | None:
    """The order of eviction of the CPU tier of a vLLM scheduler; None if it has no tier of ours."""
    connector = getattr(scheduler.connector, "connector_scheduler", None)
    policy = getattr(getattr(connector, "manager", None), "_policy", None)
    return policy if isinstance(policy, LeasedFirst) else None
