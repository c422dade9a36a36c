"""KV events as they come inside vLLM's engine: their forms, and what is of no use."""

from dataclasses import dataclass, field
from typing import Any

from hear.engines.vllm.holdings import Cleared, Removed, Stored
from hear.engines.vllm.plugin.own_events import read


@dataclass
class BlockStored:
    """Looks like vLLM's event of this name."""

    block_hashes: list[Any]
    parent_block_hash: Any = None
    medium: str | None = "GPU"
    group_idx: int | None = 0
    extra_keys: list[Any] | None = None
    lora_name: str | None = None


@dataclass
class BlockRemoved:
    """Looks like vLLM's event of this name."""

    block_hashes: list[Any]
    medium: str | None = "GPU"
    group_idx: int | None = 0


@dataclass
class AllBlocksCleared:
    """Looks like vLLM's event of this name."""

    nothing: list[int] = field(default_factory=list)


def test_events_are_read_in_their_order() -> None:
    told = [
        BlockStored([1, 2]),
        BlockStored([3], 2, medium=None),
        BlockRemoved([3, 2], medium="CPU"),
        AllBlocksCleared(),
    ]
    assert list(read(told)) == [
        Stored("gpu", [1, 2], None, []),
        Stored("gpu", [3], 2, []),
        Removed("cpu", [3, 2]),
        Cleared("gpu"),
    ]


def test_hashes_are_the_low_64_bits_whether_bytes_or_numbers() -> None:
    digest = bytes(range(32))
    low = int.from_bytes(digest[-8:], "big")
    for form in (digest, int.from_bytes(digest, "big"), low):
        assert list(read([BlockStored([form], form)])) == [Stored("gpu", [low], low, [])]


def test_what_may_be_a_salt_is_read_off_the_first_block() -> None:
    salted = BlockStored([1, 2], extra_keys=[("adapter", "acme"), None], lora_name="adapter")
    assert list(read([salted])) == [Stored("gpu", [1, 2], None, ["acme"])]


def test_other_groups_and_media_are_left_out() -> None:
    assert not list(read([BlockStored([1], group_idx=1), BlockRemoved([1], medium="STORAGE")]))
