"""vLLM's KV events, as they come inside its engine, in the form that ``holdings`` takes.

Events may be of caches that hold no prefix of whole blocks (other groups, other media): these are
left out. What comes over vLLM's publisher is read in ``kv_events``.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from hear.engines.vllm.hashing import low64
from hear.engines.vllm.holdings import CPU, GPU, Cleared, Event, Removed, Stored, salts_among

TIERS: Final = {"GPU": GPU, "CPU": CPU}
"""HEAR's tiers by vLLM's media. The first tier is GPU on every platform."""


def read(events: Iterable[Any]) -> Iterator[Event]:
    """Read those that are of use."""
    for event in events:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            yield Cleared(GPU)  # an offloading tier tells of each block
            continue
        tier = TIERS.get(event.medium or "GPU")
        if tier is None or event.group_idx not in (None, 0):
            continue
        hashes = [low64(block) for block in event.block_hashes]
        if kind == "BlockStored":
            parent = event.parent_block_hash
            salts = salts_among(event.extra_keys or (), event.lora_name)
            yield Stored(tier, hashes, None if parent is None else low64(parent), salts)
        else:
            yield Removed(tier, hashes)
