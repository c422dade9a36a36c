"""What an engine's cache holds, by tenant, as vLLM's KV events add up.

Three things of vLLM's are put right here. It may hold a block of one hash several times, and says
stored and removed of each copy: here a block comes with the first and goes with the last. An
offloading tier may not say which block comes before one: here that is known from the first tier.
And it does not know tenants: a block is of the tenant whose salt its prompt begins with.

Events are read where they come from: in the engine (``own_events``) or off its publisher
(``kv_events``). Whether any are missing is not known here.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from hear.blocks import pack
from hear.engines.kv.chains import chains_of
from hear.engines.vllm.identity import Tenants
from hear.messages import DEFAULT_TENANT, BlockChange, BlocksCleared, BlocksRemoved, BlocksStored

GPU: Final = "gpu"
CPU: Final = "cpu"

REMEMBER: Final = 65_536
"""Blocks that no tier holds whose origin is remembered: a copy of one may be under way."""


class Stored(NamedTuple):
    """Blocks that follow each other. ``salts`` are of the first, ``parent`` comes before it."""

    tier: str
    hashes: Sequence[int]
    parent: int | None = None
    salts: Sequence[str] = ()


class Removed(NamedTuple):
    """One copy of each of these blocks has gone."""

    tier: str
    hashes: Sequence[int]


class Cleared(NamedTuple):
    """A tier has given up all blocks."""

    tier: str


Event = Stored | Removed | Cleared


def salts_among(extra_keys: Sequence[object], adapter: str | None = None) -> list[str]:
    """What may be a salt among the extra keys of a first block; ``adapter`` is its LoRA's name."""
    first = extra_keys[0] if extra_keys else None
    keys = first if isinstance(first, list | tuple) else ()
    return [key for key in keys if isinstance(key, str) and key != adapter]


class _Origin(NamedTuple):
    """Where a block stands: after which other, and whose it is."""

    parent: int | None
    tenant: str


_Changes = dict[str, list[BlockChange]]


class Holdings:
    """The blocks of one engine. ``tenants`` may come to know more of them as time goes on."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._copies: dict[str, dict[str, dict[int, int]]] = {}  # by tenant, tier and block
        self._origins: dict[int, _Origin] = {}
        self._former: OrderedDict[int, _Origin] = OrderedDict()

    def take(self, events: Iterable[Event]) -> _Changes:
        """Take over events, in their order; returns what has changed, by tenant."""
        made: _Changes = {}
        for event in events:
            if isinstance(event, Stored):
                self._stored(made, event)
            elif isinstance(event, Removed):
                self._removed(made, event)
            else:
                self._cleared(made, event.tier)
        return made

    def chains(self, tenant: str = DEFAULT_TENANT) -> Iterator[BlocksStored]:
        """All that is held of a tenant."""
        for tier, copies in self._copies.get(tenant, {}).items():
            yield from chains_of(tier, ((b, self._origins[b].parent) for b in copies))

    def count(self, tier: str) -> int:
        """How many different blocks a tier holds, of all tenants."""
        return sum(len(tiers.get(tier, ())) for tiers in self._copies.values())

    def _stored(self, made: _Changes, event: Stored) -> None:
        parent = event.parent
        tenant = self._tenant_of(event)
        new: dict[str, list[tuple[int, int | None]]] = {}
        for block in event.hashes:
            origin = self._origins.get(block)
            if origin is None:
                former = self._former.pop(block, None)
                if former is not None and event.tier != GPU and parent is None:
                    origin = former
                elif tenant is not None:
                    origin = _Origin(parent, tenant)
                else:
                    break
                self._origins[block] = origin
            tenant = origin.tenant
            copies = self._copies.setdefault(origin.tenant, {}).setdefault(event.tier, {})
            if block not in copies:
                copies[block] = 1
                new.setdefault(origin.tenant, []).append((block, origin.parent))
            elif event.parent is not None:
                copies[block] += 1
            # Else it is taken for what is said of reused blocks on demand (kv_cache_report_mode),
            # which looks the same. A second copy of a prompt's first block is made very seldom.
            parent = block
        for owner, blocks in new.items():
            made.setdefault(owner, []).extend(chains_of(event.tier, blocks))

    def _tenant_of(self, event: Stored) -> str | None:
        """Whose blocks are; None if it cannot be told, and then they are told to nobody."""
        if event.parent is not None:
            before = self._origins.get(event.parent) or self._former.get(event.parent)
            if before is not None:
                return before.tenant
        elif event.salts or event.tier == GPU:  # of other tiers, it may be told of no block
            return self._tenants.of_salts(event.salts)
        return None if self._tenants.several else DEFAULT_TENANT

    def _removed(self, made: _Changes, event: Removed) -> None:
        gone: dict[str, list[int]] = {}
        for block in event.hashes:
            origin = self._origins.get(block)
            copies = {} if origin is None else self._copies[origin.tenant].get(event.tier, {})
            if block not in copies:
                continue  # it was stored before anybody looked
            copies[block] -= 1
            if not copies[block]:
                del copies[block]
                assert origin is not None
                gone.setdefault(origin.tenant, []).append(block)
        for tenant, blocks in gone.items():
            removed = BlocksRemoved(tier=event.tier, prefix_hashes=pack(blocks))
            made.setdefault(tenant, []).append(removed)
            self._forget(tenant, blocks)

    def _cleared(self, made: _Changes, tier: str) -> None:
        for tenant, tiers in self._copies.items():
            if blocks := tiers.pop(tier, None):
                made.setdefault(tenant, []).append(BlocksCleared(tier=tier))
                self._forget(tenant, blocks)

    def _forget(self, tenant: str, blocks: Iterable[int]) -> None:
        """A tier has given up blocks; where no other has them, they are former ones."""
        tiers = self._copies[tenant].values()
        for block in blocks:
            if not any(block in copies for copies in tiers):
                self._former[block] = self._origins.pop(block)
        while len(self._former) > REMEMBER:
            self._former.popitem(last=False)
