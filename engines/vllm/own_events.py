"""vLLM's KV events, as they come inside its engine, to HEAR's changes of residency by tenant.

Four things of vLLM's are put right here. It may hold a block of one hash several times, and says
stored and removed of each copy: here a block comes with the first and goes with the last. Its
offloading tier does not say which block comes before one: here that is known from the first tier.
It does not know tenants: a block is of the tenant whose salt its prompt begins with. And its events
may be of caches that hold no prefix of whole blocks (other groups, other media): these are left
out. What comes over its publisher is read in ``kv_events``.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from hear.blocks import pack
from hear.engines.residents import chains_of
from hear.engines.vllm.hashing import low64
from hear.messages import DEFAULT_TENANT, BlockChange, BlocksCleared, BlocksRemoved

GPU: Final = "gpu"
CPU: Final = "cpu"
TIERS: Final = {"GPU": GPU, "CPU": CPU}
"""HEAR's tiers by vLLM's media. The first tier is GPU on every platform."""

_REMEMBER: Final = 65_536
"""Blocks that no tier holds whose origin is remembered: a copy of one may be under way."""

MAX_TENANTS: Final = 4_096
"""Salts that are told apart; a block with another one is the default tenant's."""


class _Origin(NamedTuple):
    """Where a block stands: after which other, and whose it is."""

    parent: int | None
    tenant: str


class OwnEvents:
    """Follows the events of one engine, from its start. ``left_out`` counts those of no use."""

    def __init__(self) -> None:
        self.left_out = 0
        self._copies: dict[str, dict[int, int]] = {tier: {} for tier in TIERS.values()}
        self._origins: dict[int, _Origin] = {}
        self._former: OrderedDict[int, _Origin] = OrderedDict()
        self._tenants: dict[str, str] = {}

    def knows(self, salt: str, tenant: str) -> None:
        """A request of a tenant has come with this salt."""
        if len(self._tenants) < MAX_TENANTS:
            self._tenants[salt] = tenant

    def changes(self, events: Iterable[Any]) -> dict[str, list[BlockChange]]:
        """The changes that events tell of, in their order, by tenant."""
        made: dict[str, list[BlockChange]] = {}
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                # It is the first tier's alone: an offloading tier tells of each block.
                for tenant in self._forget(GPU, list(self._copies[GPU])):
                    made.setdefault(tenant, []).append(BlocksCleared(tier=GPU))
                continue
            tier = TIERS.get(event.medium or "GPU")
            if tier is None or event.group_idx not in (None, 0):
                self.left_out += 1
            elif kind == "BlockStored":
                self._stored(made, tier, event)
            else:
                self._removed(made, tier, [low64(hash) for hash in event.block_hashes])
        return made

    def _stored(self, made: dict[str, list[BlockChange]], tier: str, event: Any) -> None:
        hashes = [low64(hash) for hash in event.block_hashes]
        parent = None if event.parent_block_hash is None else low64(event.parent_block_hash)
        tenant = self._tenant_of(event, parent)
        copies = self._copies[tier]
        new: dict[str, list[tuple[int, int | None]]] = {}
        for block in hashes:
            origin = self._origins.get(block)
            if origin is None:
                origin = self._former.pop(block, None)
                if origin is None or tier == GPU or parent is not None:
                    origin = _Origin(parent, tenant)
                self._origins[block] = origin
            before = copies.get(block, 0)
            copies[block] = before + 1
            if not before:
                new.setdefault(origin.tenant, []).append((block, origin.parent))
            parent = block
        for owner, blocks in new.items():
            made.setdefault(owner, []).extend(chains_of(tier, blocks))

    def _tenant_of(self, event: Any, parent: int | None) -> str:
        if parent is not None and (origin := self._origins.get(parent)) is not None:
            return origin.tenant
        keys = event.extra_keys[0] if event.extra_keys else None
        for key in keys or ():
            if isinstance(key, str) and key in self._tenants:
                return self._tenants[key]
        return DEFAULT_TENANT

    def _removed(
        self, made: dict[str, list[BlockChange]], tier: str, hashes: Sequence[int]
    ) -> None:
        copies = self._copies[tier]
        gone = []
        for block in hashes:
            left = copies.get(block, 0) - 1
            if left > 0:
                copies[block] = left
            elif left == 0:
                gone.append(block)
        for tenant, blocks in self._forget(tier, gone).items():
            removed = BlocksRemoved(tier=tier, prefix_hashes=pack(blocks))
            made.setdefault(tenant, []).append(removed)

    def _forget(self, tier: str, blocks: Iterable[int]) -> dict[str, list[int]]:
        """A tier has given up blocks; returns whose they were."""
        owners: dict[str, list[int]] = {}
        for block in blocks:
            del self._copies[tier][block]
            origin = self._origins[block]
            owners.setdefault(origin.tenant, []).append(block)
            if not any(block in copies for copies in self._copies.values()):
                self._former[block] = self._origins.pop(block)
        while len(self._former) > _REMEMBER:
            self._former.popitem(last=False)
        return owners
