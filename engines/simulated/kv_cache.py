"""Paged KV in two tiers: who holds which block, what is reused, what is evicted.

The GPU tier follows vLLM V1's block pool: full blocks are found by their chained hash, blocks in
use have a reference count, free ones stay reusable until their room is needed, and the end of a
prompt is given up before its start. The CPU tier is inclusive (it gets a copy of each block as it
is computed, as an offloading connector does) or exclusive (it gets what the GPU evicts). Copies
travel over one link each way, first come first served.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from hear.blocks import pack
from hear.engines.simulated.eviction import EvictionOrder
from hear.engines.simulated.leases import LeaseBook
from hear.engines.simulated.tenants import hash_of, owner_of
from hear.messages import BlockChange, BlocksRemoved, BlocksStored, TierPressure

GPU: Final = "gpu"
CPU: Final = "cpu"


_Change = tuple[bool, str, int, int | None]
"""Whether a tier has stored or removed a block, the tier, the block, and its parent."""


class KvCache:
    """The blocks of one engine. ``None`` stands for a GPU block without a hash.

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
        leases: LeaseBook,
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
        return block in self._refs or block in self._free

    def on_cpu(self, block: int) -> bool:
        """Whether the CPU holds a block."""
        return block in self._cpu

    def in_use(self, block: int) -> bool:
        """Whether a request holds a block on the GPU."""
        return block in self._refs

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
        kept = sum(1 for block in hits if block in self._free)
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
            yield from _chains(tier, _by_hash(owner, present))

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

    def acquire(self, hits: Sequence[int]) -> None:
        """Take a reference to blocks that the GPU holds."""
        for block in hits:
            refs = self._refs.get(block, 0)
            if refs == 0:
                self._free.discard(block)
            self._refs[block] = refs + 1

    def allocate(self, count: int, now: float) -> None:
        """Take ``count`` blocks without a hash, evicting as needed; they must fit."""
        plain = min(count, self._num_plain_free)
        self._num_plain_free -= plain
        for _ in range(count - plain):
            self._evicted(self._free.pop(), now)

    def name_block(self, block: int, parent: int | None, now: float) -> bool:
        """Give a block that was allocated its hash, as it becomes full.

        Returns False if the GPU has another block of that hash; then it stays without.
        """
        if not self.loaded(block, parent, now):
            return False
        if self.inclusive:
            self.store(block, now)
        return True

    def unname_block(self, block: int) -> None:
        """Take its hash from a block that will not become full after all; it stays allocated."""
        del self._refs[block]
        if block in self._storing_blocks:
            self._storing_blocks.discard(block)
            self._storing = deque(copy for copy in self._storing if copy[1] != block)
        self._left(GPU, block)

    def release(self, blocks: Sequence[int | None], now: float) -> None:
        """Give back the blocks of a request, in prompt order."""
        for block in reversed(blocks):
            if block is None:
                self._num_plain_free += 1
                continue
            refs = self._refs[block] - 1
            if refs:
                self._refs[block] = refs
                continue
            del self._refs[block]
            rank = self._leases.rank(block)
            self._free.add(block, rank)
            if block in self._cpu:
                self._cpu.add(block, rank)

    def drop_gpu(self, block: int, now: float) -> None:
        """Remove a block that nobody uses from the GPU, now."""
        self._free.discard(block)
        self._num_plain_free += 1
        self._left(GPU, block)

    def demote(self, block: int, now: float) -> None:
        """Move a block that nobody uses from the GPU to the CPU."""
        self.store(block, now)
        self.drop_gpu(block, now)

    def rerank(self, blocks: Iterable[int]) -> None:
        """Put blocks where their leases now say; those that lost their last lease go first."""
        for block in blocks:
            rank = self._leases.rank(block)
            for order in (self._free, self._cpu):
                if block in order:
                    if rank is None:
                        order.add_first(block)
                    else:
                        order.add(block, rank)

    def _evicted(self, block: int, now: float) -> None:
        if not self.inclusive and self.num_cpu_blocks:
            self.store(block, now)
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

    def loaded(self, block: int, parent: int | None, now: float) -> bool:
        """A block has come from the CPU into one that was allocated; as ``name_block``."""
        if self.on_gpu(block):
            return False
        self._refs[block] = 1
        self._changes.append((True, GPU, block, parent))
        self._parents[block] = parent
        if not self.inclusive and block in self._cpu:
            self.drop_cpu(block)
        return True

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
            changes.extend(_chains(tier, run))
        else:
            removed = pack(block for _, _, block, _ in run)
            changes.append(BlocksRemoved(tier=tier, prefix_hashes=removed))
        start = end
    return changes


def _chains(tier: str, rows: Iterable[_Change]) -> Iterable[BlocksStored]:
    """Join neighbours that follow each other into chains."""
    run: list[int] = []
    first_parent: int | None = None
    for _, _, block, parent in rows:
        if run and parent != run[-1]:
            yield BlocksStored(tier=tier, parent=first_parent, prefix_hashes=pack(run))
            run = []
        if not run:
            first_parent = parent
        run.append(block)
    if run:
        yield BlocksStored(tier=tier, parent=first_parent, prefix_hashes=pack(run))
