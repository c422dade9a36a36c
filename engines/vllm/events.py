"""vLLM's KV events to HEAR's changes of residency.

Three things of vLLM's are put right here. It may hold a block of one hash several times, and says
stored and removed of each copy: here a block comes with the first and goes with the last. Its
offloading tier does not say which block comes before one: here that is known from the first tier.
And its events may be of caches that hold no prefix of whole blocks (other groups, other media):
these are left out.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from hear.blocks import pack
from hear.engines.residents import chains_of
from hear.engines.vllm.hashing import low64
from hear.messages import BlockChange, BlocksCleared, BlocksRemoved

TIERS: Final = {"GPU": "gpu", "CPU": "cpu"}
"""HEAR's tiers by vLLM's media. The first tier is GPU on every platform."""

_REMEMBER: Final = 65_536
"""Parents that are remembered of blocks that no tier holds: a copy of one may be under way."""


class EventReader:
    """Follows the events of one engine, from its start. ``left_out`` counts those of no use."""

    def __init__(self) -> None:
        self.left_out = 0
        self._copies: dict[str, dict[int, int]] = {tier: {} for tier in TIERS.values()}
        self._parents: dict[int, int | None] = {}
        self._former: OrderedDict[int, int | None] = OrderedDict()

    def changes(self, events: Iterable[Any]) -> list[BlockChange]:
        """The changes that events tell of, in their order. Events are vLLM's, or look like them."""
        made: list[BlockChange] = []
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                # It is the first tier's alone: an offloading tier tells of each block.
                self._forget(TIERS["GPU"], list(self._copies[TIERS["GPU"]]))
                made.append(BlocksCleared(tier=TIERS["GPU"]))
                continue
            tier = TIERS.get(event.medium or "GPU")
            if tier is None or event.group_idx not in (None, 0):
                self.left_out += 1
            elif kind == "BlockStored":
                made += self._stored(tier, event)
            else:
                made += self._removed(tier, [low64(hash) for hash in event.block_hashes])
        return made

    def _stored(self, tier: str, event: Any) -> Iterable[BlockChange]:
        hashes = [low64(hash) for hash in event.block_hashes]
        parent = None if event.parent_block_hash is None else low64(event.parent_block_hash)
        knows_parent = tier == TIERS["GPU"] or parent is not None
        copies = self._copies[tier]
        new: list[tuple[int, int | None]] = []
        for block in hashes:
            if block not in self._parents:
                former = self._former.pop(block, None)
                self._parents[block] = parent if knows_parent else former
            before = copies.get(block, 0)
            copies[block] = before + 1
            if not before:
                new.append((block, self._parents[block]))
            parent = block
        return chains_of(tier, new)

    def _removed(self, tier: str, hashes: Sequence[int]) -> list[BlockChange]:
        copies = self._copies[tier]
        gone = []
        for block in hashes:
            left = copies.get(block, 0) - 1
            if left > 0:
                copies[block] = left
            elif left == 0:
                gone.append(block)
        self._forget(tier, gone)
        return [BlocksRemoved(tier=tier, prefix_hashes=pack(gone))] if gone else []

    def _forget(self, tier: str, blocks: Iterable[int]) -> None:
        for block in blocks:
            del self._copies[tier][block]
            if not any(block in copies for copies in self._copies.values()):
                self._former[block] = self._parents.pop(block)
        while len(self._former) > _REMEMBER:
            self._former.popitem(last=False)
