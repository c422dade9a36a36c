"""Which of vLLM's blocks hold the content that a HEAR block hash names.

vLLM finds a block by the bytes of its hash and the group that it belongs to; HEAR's messages carry
the low 64 bits of that hash alone. The index stands in the place of a block pool's own map and is
kept as vLLM fills and empties that: once for each block that becomes full, and not when blocks are
taken and given back. A hash may name several blocks: one in each group, and copies that requests
computed side by side.

The scheduler lock guards it (``bridge``). It knows nothing of leases, requests or messages.
"""

from collections.abc import Mapping
from typing import Any, Final, Self

from vllm.v1.core.block_pool import BlockHashToBlockMap

_NONE: Final[Mapping[int, Any]] = {}


def hear_hash(key: bytes) -> int:
    """HEAR's hash of a block, from vLLM's hash of it with the group id (4 bytes) at the end."""
    return int.from_bytes(key[-12:-4], "big")


class BlockIndex(BlockHashToBlockMap):
    """vLLM's map from hashes to blocks, which can also be asked by HEAR's hashes."""

    def __init__(self) -> None:
        super().__init__()
        # A block itself where it is the only one, so that there is little to collect for the GC.
        self._blocks: dict[int, Any] = {}
        self.filled: set[int] = set()
        """HEAR's hashes of what was inserted; whoever looks at it empties it."""

    @classmethod
    def of(cls, pool: Any) -> Self:
        """The index of a ``BlockPool``, put in place if it is not there.

        vLLM makes a new map when the prefix cache is reset, so whoever keeps the index asks here.
        """
        index = pool.cached_block_hash_to_block
        if not isinstance(index, cls):
            index = cls()
            for block in pool.blocks:
                hashes = pool.cached_block_hashes_by_block.get(block.block_id, ())
                for key in dict.fromkeys((block.block_hash, *hashes)):
                    if key is not None and pool.cached_block_hash_to_block.contain(
                        key, block.block_id
                    ):
                        index.insert(key, block)
            pool.cached_block_hash_to_block = index
        return index

    def named(self, block_hash: int) -> Mapping[int, Any]:
        """The blocks that a HEAR hash names, by block id; not to be kept or changed."""
        named = self._blocks.get(block_hash)
        if type(named) is dict:
            return named
        return _NONE if named is None else {named.block_id: named}

    def insert(self, key: bytes, block: Any) -> None:
        """A block has become full."""
        super().insert(key, block)
        block_hash = int.from_bytes(key[-12:-4], "big")  # hear_hash, without the call
        self.filled.add(block_hash)
        named = self._blocks.setdefault(block_hash, block)
        if named is block:
            return
        if type(named) is not dict:
            named = self._blocks[block_hash] = {named.block_id: named}
        named[block.block_id] = block

    def pop(self, key: bytes, block_id: int) -> Any:
        """A block no longer holds this content."""
        block = super().pop(key, block_id)
        if block is not None:
            block_hash = int.from_bytes(key[-12:-4], "big")
            named = self._blocks.pop(block_hash, block)
            if named is not block:
                # Several, or (hashes of one block that are alike in their low bits) another one.
                if type(named) is dict:
                    named.pop(block_id, None)
                if named:
                    self._blocks[block_hash] = named
        return block
