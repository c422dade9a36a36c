"""``dynamo.llm.RadixTree``, the index that the residency directory is measured against.

It runs in a thread of its own, to which each call is passed, and it is optional.
"""

import importlib
from typing import Any, Protocol

import msgspec

from hear.blocks import unpack


class RadixTree(Protocol):
    """What is used of ``dynamo.llm.RadixTree``."""

    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None: ...

    def find_matches(self, sequence: list[int], early_exit: bool = False) -> Any: ...


def make_radix_tree() -> RadixTree | None:
    """An empty RadixTree, None where the package is not installed."""
    try:
        made: RadixTree = importlib.import_module("dynamo.llm").RadixTree()
    except ImportError:
        return None
    return made


def radix_stored(event_id: int, parent: int | None, packed: bytes) -> bytes:
    """A stored event as RadixTree reads it: JSON, and both hashes of each block are HEAR's one."""
    blocks = [{"block_hash": block, "tokens_hash": block} for block in unpack(packed)]
    data = {"stored": {"parent_hash": parent, "blocks": blocks}}
    return msgspec.json.encode({"event_id": event_id, "data": data})


def radix_removed(event_id: int, packed: bytes) -> bytes:
    """A removed event as RadixTree reads it."""
    data = {"removed": {"block_hashes": list(unpack(packed))}}
    return msgspec.json.encode({"event_id": event_id, "data": data})


def radix_match(tree: RadixTree, prompt: list[int]) -> int:
    """How many blocks of a prompt the one worker of these events holds."""
    # With early_exit it may stop before the last block; that is not the question here.
    return max(tree.find_matches(prompt).scores.values(), default=0)
