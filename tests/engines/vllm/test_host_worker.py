"""How blocks are copied between the tiers on vLLM's CPU platform, without an engine."""

from collections.abc import Sequence
from typing import Any

import pytest

from hear.errors import EngineError
from tests.engines.vllm.real import NEEDS_VLLM

pytestmark = NEEDS_VLLM

NUM_BLOCKS, NUM_CHUNKS = 10, 6


def make_caches(*groups: Sequence[int]) -> Any:
    """Caches whose block ``b`` of tensor ``t`` is full of ``10 * t + b``; groups name tensors."""
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )

    pages = [16, 32, 16]
    return CanonicalKVCaches(
        tensors=[
            CanonicalKVCacheTensor(
                tensor=(10 * t + torch.arange(NUM_BLOCKS)[:, None]).repeat(1, page).to(torch.int8),
                page_size_bytes=page,
            )
            for t, page in enumerate(pages[: 1 + max(max(group) for group in groups)])
        ],
        group_data_refs=[[CanonicalKVCacheRef(t, pages[t]) for t in group] for group in groups],
    )


def make_worker(caches: Any, blocks_per_chunk: int = 1) -> Any:
    from hear.engines.vllm.plugin.tier import HostWorker

    return HostWorker(caches, num_chunks=NUM_CHUNKS, blocks_per_chunk=blocks_per_chunk)


def first(blocks: list[int], sizes: list[int], starts: list[int]) -> Any:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    return GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=starts)


def second(*chunks: int) -> Any:
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    return CPULoadStoreSpec(list(chunks))


def rows(caches: Any, tensor: int, *blocks: int) -> list[int]:
    return [int(caches.tensors[tensor].tensor[block][0]) for block in blocks]


def test_blocks_come_back_to_where_they_are_asked_for() -> None:
    caches = make_caches([0, 1])
    worker = make_worker(caches)
    assert worker.submit_store(1, first([3, 4], [2], [0]), second(5, 0))
    assert worker.submit_load(2, second(0, 5), first([7, 8], [2], [0]))
    assert rows(caches, 0, 7, 8) == [4, 3]
    assert rows(caches, 1, 7, 8) == [14, 13]
    assert rows(caches, 0, 6, 9) == [6, 9]


def test_what_was_copied_is_told_once_with_bytes_and_seconds() -> None:
    worker = make_worker(make_caches([0, 1]))
    worker.submit_store(7, first([3, 4], [2], [0]), second(5, 0))
    [result] = worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (7, True, 2 * (16 + 32))
    assert result.transfer_time >= 0
    assert worker.get_finished() == []


def test_a_prefix_may_begin_and_end_in_the_middle_of_a_chunk() -> None:
    caches = make_caches([0])
    worker = make_worker(caches, blocks_per_chunk=3)
    # Blocks 0 to 5 of a prompt fill chunks 4 and 2; blocks 2 to 4 of it are wanted back.
    worker.submit_store(1, first([0, 1, 2, 3, 4, 5], [6], [0]), second(4, 2))
    worker.submit_load(2, second(4, 2), first([7, 8, 9], [3], [2]))
    assert rows(caches, 0, 7, 8, 9) == [2, 3, 4]


def test_each_group_of_layers_copies_its_own_tensors() -> None:
    caches = make_caches([0], [1, 2])
    worker = make_worker(caches)
    worker.submit_store(1, first([1, 2, 3], [1, 2], [0, 0]), second(0, 1, 2))
    worker.submit_load(2, second(0, 1, 2), first([7, 8, 9], [1, 2], [0, 0]))
    assert rows(caches, 0, 7, 8, 9) == [1, 8, 9]
    assert rows(caches, 1, 7, 8, 9) == [17, 12, 13]
    assert rows(caches, 2, 7, 8, 9) == [27, 22, 23]


def test_an_empty_group_is_no_trouble() -> None:
    caches = make_caches([0], [1])
    worker = make_worker(caches)
    worker.submit_store(1, first([1], [0, 1], [0, 0]), second(3))
    worker.submit_load(2, second(3), first([9], [0, 1], [0, 0]))
    assert rows(caches, 1, 9) == [11]


def test_a_transfer_that_does_not_add_up_is_refused_before_anything_is_copied() -> None:
    caches = make_caches([0])
    worker = make_worker(caches)
    with pytest.raises(EngineError, match="2 blocks and 1 chunks of 1 does not match"):
        worker.submit_load(1, second(0), first([7, 8], [2], [0]))
    assert rows(caches, 0, 7, 8) == [7, 8]
    assert worker.get_finished() == []


def test_more_memory_than_there_is_is_one_error() -> None:
    from hear.engines.vllm.plugin.tier import HostWorker

    with pytest.raises(EngineError, match=r"CPU tier: \d+ bytes cannot be reserved"):
        HostWorker(make_caches([0]), num_chunks=1 << 58, blocks_per_chunk=1)
