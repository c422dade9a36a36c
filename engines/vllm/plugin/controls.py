"""What each control does to vLLM: one line a kind, the work elsewhere.

The scheduler lock guards it (``bridge``).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.request import Request

from hear.engines.kv.leases import LeaseBook
from hear.engines.kv.retention import Retention
from hear.engines.vllm.hashing import low64
from hear.engines.vllm.holdings import CPU, GPU
from hear.engines.vllm.plugin.block_index import BlockIndex
from hear.engines.vllm.plugin.contexts import Contexts
from hear.engines.vllm.plugin.placement import Placement
from hear.engines.vllm.plugin.queue_controls import Find, QueueControls
from hear.engines.vllm.plugin.retention_queue import RetentionQueue
from hear.engines.vllm.plugin.standing import Standing
from hear.engines.vllm.plugin.tier import order_of
from hear.engines.worker.control_table import ControlTable
from hear.messages import Admit, BoundWait, Hold, Place, Prepare, Prioritise, Release, Retain, Route
from hear.operation import Operation, Ref


class Controls(ControlTable):
    """All that controls can do in one engine."""

    def __init__(
        self,
        scheduler: Any,
        *,
        name: str,
        max_lease_s: float,
        retention_decay_s: float,
        find: Find,
        moved: Callable[[Standing], None],
        submit: Callable[[Request, Ref], None],
        sync: Callable[[], None],
    ) -> None:
        super().__init__(name)
        pool = scheduler.kv_cache_manager.block_pool
        self.num_blocks = {GPU: pool.num_gpu_blocks - 1}
        self._tier = order_of(scheduler)
        if self._tier is not None:
            self.num_blocks[CPU] = self._tier.capacity
        leases: LeaseBook[Ref] = LeaseBook(retention_decay_s)
        self._leases = leases
        self._pool = pool
        self._free = RetentionQueue.install(pool, leases, self._evicted)
        if self._tier is not None:
            self._tier.rank_of = leases.rank
        self._contexts = Contexts()
        # Of each step that is under way, the blocks that become full in it. vLLM finds them under
        # their hashes from when it schedules the step.
        self._computing: deque[set[int]] = deque()
        self.queue = QueueControls(
            (scheduler.waiting, scheduler.kv_holding_waiting), find, moved, self._end
        )
        self.retention = Retention(
            leases=leases,
            contexts=self._contexts,
            named=lambda tenant, hashes: hashes,  # a tenant's salt is in them
            rerank=self._rerank,
            unrank=self._unrank,
            in_use=self._in_use,
            max_lease_s=max_lease_s,
            end=self._end,
        )
        self.placement = Placement(
            scheduler,
            contexts=self._contexts,
            holds=self._holds,
            is_computing=self._is_computing,
            num_blocks=self.num_blocks,
            end=self._end,
            submit=submit,
            sync=sync,
        )
        self._handlers = {
            Prioritise: self.queue.prioritise,
            BoundWait: self.queue.bound_wait,
            Hold: self.queue.hold,
            Admit: self.queue.admit,
            Retain: self.retention.retain,
            Release: self.retention.release,
            Prepare: self.placement.begin,
            Place: self.placement.begin,
            Route: self._route,
        }

    def revert(self, operation: Operation) -> None:
        """End what an operation still effects, without saying so."""
        self._fallbacks.pop(operation.ref, None)
        if isinstance(operation.control, Retain | Release):
            self.retention.revert(operation)
        elif isinstance(operation.control, Prepare | Place):
            self.placement.cancel(operation.ref)
        else:
            self.queue.revert(operation)

    def next_timer(self) -> float | None:
        """When ``tick`` has to be called next."""
        timers = (self.queue.next_timer(), self.retention.next_timer())
        return min((t for t in timers if t is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        self.queue.tick(now)
        self.retention.tick(now)

    def look(self) -> None:
        """See what has come to its end."""
        self.placement.look()
        self.retention.look()

    # -- steps --------------------------------------------------------------------------------

    def before_step(self) -> None:
        """vLLM is about to schedule a step."""
        BlockIndex.of(self._pool).filled = set()

    def scheduled(self) -> None:
        """It has, and the step is going to be computed."""
        index = BlockIndex.of(self._pool)
        self._computing.append(index.filled)
        index.filled = set()

    def stepped(self) -> None:
        """The first step that was under way has been computed."""
        if self._computing:
            self._computing.popleft()

    # -- what follows -------------------------------------------------------------------------

    def arrived(self, standing: Standing, now: float) -> None:
        """A request has come: controls may speak of its context from now on."""
        name = standing.context_ref
        if name is None:
            return
        self.retention.arrived(name)
        if self._contexts.get(name) is None:
            self._contexts.note(name, standing.request, now)

    def left(self, standing: Standing, now: float, *, completed: bool) -> None:
        """A request has ended: if it has completed, a lease on its context follows it."""
        name = standing.context_ref
        if name is None:
            return
        if completed and (served := self._contexts.note(name, standing.request, now)):
            self.retention.served(name, served.blocks, now)
        self.retention.left(name)

    def kv_events(self, events: Sequence[Any]) -> None:
        """See which leases lose a block from the CPU tier, where the first has it no more."""
        if not len(self._leases) or self._tier is None:
            return
        for event in events:
            if type(event).__name__ == "BlockRemoved" and event.medium == "CPU":
                for block in map(low64, event.block_hashes):
                    if not self._holds(GPU, block):
                        self.retention.lost(block)

    def _evicted(self, block: int) -> None:
        """The first tier has given up a leased block."""
        if not self._holds(CPU, block):
            self.retention.lost(block)

    def _holds(self, tier: str, block: int) -> bool:
        if tier == GPU:
            return bool(BlockIndex.of(self._pool).named(block))
        return self._tier is not None and self._tier.holds(block)

    def _in_use(self, block: int) -> bool:
        named = BlockIndex.of(self._pool).named(block)
        return any(held.ref_cnt for held in named.values())

    def _is_computing(self, block: int) -> bool:
        return any(block in step for step in self._computing)

    def _unrank(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self._free.unrank(blocks)
        if self._tier is not None:
            self._tier.unrank(blocks)

    def _rerank(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self._free.rerank(blocks)
        if self._tier is not None:
            self._tier.rerank(blocks)
