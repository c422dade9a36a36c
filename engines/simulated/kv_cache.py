"""Paged KV in two tiers: who holds which block, what is reused, what is evicted.

The GPU tier follows vLLM V1's block pool: full blocks are found by their chained hash, blocks in
use have a reference count, free ones stay reusable until their room is needed, and the end of a
prompt is given up before its start. As there, requests that compute the same block side by side
have a copy of it each, and all copies stay reusable. The CPU tier is inclusive (it gets a copy of
each block as it is computed, as an offloading connector does) or exclusive (it gets what the GPU
evicts). Copies travel over one link each way, first come first served.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from hear.blocks import pack
from hear.engines.kv.chains import chains_of
from hear.engines.kv.eviction import EvictionOrder, Rank
from hear.engines.kv.leases import LeaseBook
from hear.engines.simulated.tenants import hash_of, owner_of
from hear.messages import BlockChange, BlocksRemoved, BlocksStored, TierPressure
from hear.operation import Ref

GPU: Final = "gpu"
CPU: Final = "cpu"


_Change = tuple[bool, str, int, int | None]
"""Whether a tier has stored or removed a block, the tier, the block, and its parent."""


class KvCache:
    """The blocks of one engine.

    A GPU block is named by its hash, and each further copy by a negative number of its own; what a
    request holds are these names, and ``None`` for a block without a hash. All else is by hash.

    A block is of the tenant that its number names (``hear.engines.simulated.tenants``), which
    matters here only where it is told of: to each tenant its own, by its own hashes.
    """

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        inclusive: bool,
        block_transfer_s: float,
        leases: LeaseBook[Ref],
        on_lost: Callable[[int], None],
    ) -> None:
        """``on_lost`` is told of each block that has just left its last tier."""
        self.num_gpu_blocks = num_gpu_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.inclusive = inclusive
        self._block_transfer_s = block_transfer_s
        self._leases = leases
        self._on_lost = on_lost
        self._refs: dict[int, int] = {}
        self._free = EvictionOrder()
        self._num_plain_free = num_gpu_blocks
        # The names of a hash's blocks, oldest first, unless it is just the hash; and back.
        self._copies: dict[int, list[int]] = {}
        self._copied: dict[int, int] = {}
        self._num_copied = 0
        self._cpu = EvictionOrder()
        self._parents: dict[int, int | None] = {}
        self._storing: deque[tuple[float, int, int | None]] = deque()
        self._storing_blocks: set[int] = set()
        self._store_link_free_s = 0.0
        self._load_link_free_s = 0.0
        self._changes: list[_Change] = []

    # -- what is there ------------------------------------------------------------------------

    @property
    def num_allocatable(self) -> int:
        """GPU blocks that are free or hold what may be evicted."""
        return self._num_plain_free + len(self._free)

    def on_gpu(self, block: int) -> bool:
        """Whether the GPU holds a block."""
        return block in self._refs or block in self._free or block in self._copies

    def on_cpu(self, block: int) -> bool:
        """Whether the CPU holds a block."""
        return block in self._cpu

    def in_use(self, block: int) -> bool:
        """Whether a request holds a block on the GPU."""
        return any(name in self._refs for name in self._copies.get(block, (block,)))

    def match(self, hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """How many of the first ``limit`` blocks the GPU holds, and the CPU from there on."""
        on_gpu = 0
        while on_gpu < limit and self.on_gpu(hashes[on_gpu]):
            on_gpu += 1
        end = on_gpu
        while end < limit and hashes[end] in self._cpu:
            end += 1
        return on_gpu, end - on_gpu

    def fits(self, hits: Sequence[int], num_new: int) -> bool:
        """Whether ``num_new`` blocks can be had while ``hits`` are kept."""
        kept = sum(1 for name in self._names_of(hits) if name in self._free)
        return num_new + kept <= self.num_allocatable

    def pressure(self) -> tuple[TierPressure, TierPressure]:
        """How full the two tiers are."""
        return (
            TierPressure(
                tier=GPU,
                num_blocks=self.num_gpu_blocks,
                used=self.num_gpu_blocks - self.num_allocatable,
                cached=len(self._free),
                allocatable=self.num_allocatable,
            ),
            TierPressure(
                tier=CPU,
                num_blocks=self.num_cpu_blocks,
                cached=len(self._cpu),
                allocatable=self.num_cpu_blocks,
            ),
        )

    def chains(self, owner: int = 0) -> Iterable[BlocksStored]:
        """All resident blocks of the tenant with this number, as chains."""
        own = [(b, parent) for b, parent in self._parents.items() if owner_of(b) == owner]
        for tier, held in ((GPU, self.on_gpu), (CPU, self.on_cpu)):
            present = [(True, tier, block, parent) for block, parent in own if held(block)]
            rows = _by_hash(owner, present)
            yield from chains_of(tier, ((block, parent) for _, _, block, parent in rows))

    def drain_changes(self) -> dict[int, list[BlockChange]]:
        """The changes of residency since this was last asked, as few and as long as may be.

        They are by the number of the tenant that they concern.
        """
        rows, self._changes = self._changes, []
        if not rows:
            return {}
        owners = sorted({owner_of(block) for _, _, block, _ in rows})
        if len(owners) == 1:
            return {owners[0]: _changes(_by_hash(owners[0], rows))}
        return {
            owner: _changes(_by_hash(owner, [row for row in rows if owner_of(row[2]) == owner]))
            for owner in owners
        }

    # -- GPU blocks ---------------------------------------------------------------------------

    def acquire(self, hits: Sequence[int]) -> list[int]:
        """Take a reference to blocks that the GPU holds; returns their names."""
        names = self._names_of(hits)
        for name in names:
            refs = self._refs.get(name, 0)
            if refs == 0:
                self._free.discard(name)
            self._refs[name] = refs + 1
        return names

    def allocate(self, count: int, now: float) -> None:
        """Take ``count`` blocks without a hash, evicting as needed; they must fit."""
        plain = min(count, self._num_plain_free)
        self._num_plain_free -= plain
        for _ in range(count - plain):
            self._evicted(self._free.pop(), now)

    def name_block(self, block: int, parent: int | None, now: float) -> int:
        """Give a block that was allocated its hash, as it becomes full; returns its name."""
        name = self.loaded(block, parent, now)
        if self.inclusive and name == block:
            self.store(block, now)
        return name

    def unname_block(self, name: int) -> None:
        """Take its hash from a block that will not become full after all; it stays allocated."""
        del self._refs[name]
        if name in self._storing_blocks and name not in self._copies:
            self._storing_blocks.discard(name)
            self._storing = deque(copy for copy in self._storing if copy[1] != name)
        self._forget(name)

    def release(self, names: Sequence[int | None], now: float) -> None:
        """Give back the blocks of a request, in prompt order."""
        for name in reversed(names):
            if name is None:
                self._num_plain_free += 1
                continue
            refs = self._refs[name] - 1
            if refs:
                self._refs[name] = refs
                continue
            del self._refs[name]
            block = self._copied.get(name, name)
            rank = self._leases.rank(block)
            self._free.add(name, rank)
            if block in self._cpu:
                self._cpu.add(block, rank)

    def drop_gpu(self, block: int, now: float) -> None:
        """Remove a block that nobody uses from the GPU, now."""
        for name in list(self._copies.get(block, (block,))):
            self._free.discard(name)
            self._num_plain_free += 1
            self._forget(name)

    def demote(self, block: int, now: float) -> None:
        """Move a block that nobody uses from the GPU to the CPU."""
        self.store(block, now)
        self.drop_gpu(block, now)

    def rerank(self, blocks: Iterable[int]) -> None:
        """Put blocks where their leases now say; those that lost their last lease go first."""
        for order, name, rank in self._ranks(blocks):
            if rank is None:
                order.add_first(name)
            else:
                order.add(name, rank)

    def unrank(self, blocks: Iterable[int]) -> None:
        """Put blocks where their leases now say; those that lost their last were used just now."""
        for order, name, rank in self._ranks(blocks):
            if rank is not None or order.is_ranked(name):
                order.add(name, rank)

    def _ranks(self, blocks: Iterable[int]) -> Iterator[tuple[EvictionOrder, int, Rank | None]]:
        """Where blocks stand that nobody uses, and what their leases say of each."""
        for block in blocks:
            rank = self._leases.rank(block)
            on_gpu = [(self._free, name) for name in self._copies.get(block, (block,))]
            for order, name in (*on_gpu, (self._cpu, block)):
                if name in order:
                    yield order, name, rank

    def _names_of(self, hits: Sequence[int]) -> list[int]:
        if not self._copies:
            return list(hits)
        return [self._copies[block][0] if block in self._copies else block for block in hits]

    def _evicted(self, name: int, now: float) -> None:
        if not self.inclusive and self.num_cpu_blocks:
            block = self._copied.get(name, name)
            if self._copies.get(block, [name]) == [name]:
                self.store(block, now)
        self._forget(name)

    def _forget(self, name: int) -> None:
        """A block no longer holds what it held; its hash is gone with the last copy."""
        block = self._copied.pop(name, name)
        names = self._copies.get(block)
        if names is not None:
            names.remove(name)
            if not names or names == [block]:
                del self._copies[block]
            if names:
                return
        self._left(GPU, block)

    # -- the CPU tier and its link ------------------------------------------------------------

    def store(self, block: int, now: float) -> None:
        """Begin to copy a block to the CPU; if it is there, it counts as used."""
        if not self.num_cpu_blocks or block in self._storing_blocks:
            return
        if block in self._cpu:
            self._cpu.add(block, self._leases.rank(block))
            return
        start = max(now, self._store_link_free_s)
        self._store_link_free_s = start + self._block_transfer_s
        self._storing.append((self._store_link_free_s, block, self._parents[block]))
        self._storing_blocks.add(block)

    def settle(self, now: float) -> list[int]:
        """Let copies that have arrived be there; returns their blocks, also those not needed."""
        arrived = []
        while self._storing and self._storing[0][0] <= now:
            _, block, parent = self._storing.popleft()
            self._storing_blocks.discard(block)
            arrived.append(block)
            if not self.inclusive and self.on_gpu(block):
                continue  # it was computed again in the meantime
            if len(self._cpu) >= self.num_cpu_blocks:
                self._left(CPU, self._cpu.pop())
            self._cpu.add(block, self._leases.rank(block))
            self._parents[block] = parent
            self._changes.append((True, CPU, block, parent))
        return arrived

    def next_settle(self) -> float | None:
        """When the next copy arrives."""
        return self._storing[0][0] if self._storing else None

    def load_time(self, count: int, now: float) -> float:
        """Begin to copy ``count`` blocks to the GPU; returns when they are there."""
        start = max(now, self._load_link_free_s)
        self._load_link_free_s = start + count * self._block_transfer_s
        return self._load_link_free_s

    def load_backlog_s(self, now: float) -> float:
        """How long a load would have to wait for the link."""
        return max(self._load_link_free_s - now, 0.0)

    def loaded(self, block: int, parent: int | None, now: float) -> int:
        """A block has come from the CPU into one that was allocated; as ``name_block``."""
        if self.on_gpu(block):
            self._num_copied += 1
            name = -self._num_copied
            self._copied[name] = block
            self._copies.setdefault(block, [block]).append(name)
            self._refs[name] = 1
            return name
        self._refs[block] = 1
        self._changes.append((True, GPU, block, parent))
        self._parents[block] = parent
        if not self.inclusive and block in self._cpu:
            self.drop_cpu(block)
        return block

    def drop_cpu(self, block: int) -> None:
        """Remove a block from the CPU, now."""
        self._cpu.discard(block)
        self._left(CPU, block)

    def _left(self, tier: str, block: int) -> None:
        self._changes.append((False, tier, block, None))
        if not (self.on_gpu(block) or block in self._cpu or block in self._storing_blocks):
            del self._parents[block]
            self._on_lost(block)


def _by_hash(owner: int, rows: list[_Change]) -> list[_Change]:
    """Changes of the blocks of one tenant, in the hashes by which it knows them."""
    if not owner:
        return rows
    return [
        (stored, tier, hash_of(block), None if parent is None else hash_of(parent))
        for stored, tier, block, parent in rows
    ]


def _changes(rows: Sequence[_Change]) -> list[BlockChange]:
    """The changes of one tenant, as few and as long as may be."""
    changes: list[BlockChange] = []
    start = 0
    while start < len(rows):
        stored, tier = rows[start][:2]
        end = start
        while end < len(rows) and rows[end][:2] == (stored, tier):
            end += 1
        run = rows[start:end]
        if stored:
            changes.extend(chains_of(tier, ((block, parent) for _, _, block, parent in run)))
        else:
            removed = pack(block for _, _, block, _ in run)
            changes.append(BlocksRemoved(tier=tier, prefix_hashes=removed))
        start = end
    return changes
