"""Continuous batching by vLLM V1's rules: who gets how many tokens in the next step.

First the running requests, decode and chunked prefill alike, under one token budget; when blocks
run out, the last in order is preempted and later computed again. Then, unless someone was
preempted, waiting requests in queue order, after a fresh look at what of their prompt is resident;
the first that does not fit ends the round, so nobody passes it. A prefix that the CPU tier holds
is loaded first, while others go ahead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hear.engines.simulated.kv_cache import CPU, GPU, KvCache
from hear.engines.simulated.profile import Scheduler as Limits
from hear.engines.simulated.request import SimRequest
from hear.engines.simulated.waiting import WaitingQueue
from hear.operation import Ref


@dataclass(slots=True)
class StepPlan:
    """One step: the share of each request, and what the roofline needs to know."""

    shares: list[tuple[SimRequest, int]] = field(default_factory=list)
    new_tokens: int = 0
    pairs: int = 0
    kv_tokens: int = 0


class Scheduler:
    """Decides each step. ``moved`` collects the requests whose place has changed."""

    def __init__(self, limits: Limits, cache: KvCache, block_size: int) -> None:
        self._limits = limits
        self._cache = cache
        self._block_size = block_size
        self.waiting = WaitingQueue()
        self.running: list[SimRequest] = []
        self.loading: list[tuple[float, SimRequest]] = []
        self.ready: list[SimRequest] = []  # loaded, and first in line for the batch
        self.moved: dict[Ref, SimRequest] = {}
        self.done: list[SimRequest] = []  # prefills of Prepare that ended without a step
        # Blocks that become full in the step that is being computed. They can be given to others
        # that are scheduled with it or after it, and are not there before it has ended.
        self.computing: set[int] = set()
        self.preemptions = 0
        self.restored_tokens = 0

    def num_blocks(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens take."""
        return -(-tokens // self._block_size)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks: those in the batch, and those that are loaded for it."""
        return len(self.running) + len(self.ready) + len(self.loading)

    def batch(self) -> list[SimRequest]:
        """Those requests."""
        return [*self.running, *self.ready, *(request for _, request in self.loading)]

    def add(self, request: SimRequest) -> None:
        """A new request."""
        self.waiting.add(request)
        self.moved[request.ref] = request

    def settle(self, now: float) -> None:
        """Take note of loads that have arrived."""
        arrived = [entry for entry in self.loading if entry[0] <= now]
        if not arrived:
            return
        self.loading = [entry for entry in self.loading if entry[0] > now]
        for _, request in arrived:
            self._name_until(request, len(request.blocks), self._cache.loaded, now)
            request.computed = len(request.blocks) * self._block_size
            if request.prepare is not None and request.computed >= request.num_tokens:
                self.leave(request, now)
                self.done.append(request)
            else:
                self.ready.append(request)

    def next_load(self) -> float | None:
        """When the next load arrives."""
        return min((when for when, _ in self.loading), default=None)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute now."""
        while True:
            self._promote(now)
            plan = StepPlan()
            budget = self._limits.max_num_batched_tokens
            budget, preempted = self._schedule_running(plan, budget, now)
            if not preempted:
                self._schedule_waiting(plan, budget, now)
            if plan.shares:
                return plan
            if not preempted:
                return None
            # An empty step, which takes no time: the next one has the room that came free.

    def _promote(self, now: float) -> None:
        for request in self.waiting.promote(now):
            self.moved[request.ref] = request

    def _schedule_running(self, plan: StepPlan, budget: int, now: float) -> tuple[int, bool]:
        preempted = False
        index = 0
        size = self._block_size
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            before = request.computed
            share = request.prompt_tokens + request.produced - before
            if share == 1 and before < request.room and before + 1 < request.next_full:
                # Nearly every decode step of a request: no new block, none becomes full.
                plan.shares.append((request, 1))
                plan.new_tokens += 1
                plan.pairs += before + 1
                plan.kv_tokens += before + 1
                budget -= 1
                index += 1
                continue
            share = min(share, budget)
            short = -(-(before + share) // size) - len(request.blocks)
            while short > 0 and short > self._cache.num_allocatable:
                victim = self._victim()
                at = self.running.index(victim)
                self.running.pop(at)
                if at < index:
                    budget += self._take_back(plan, victim)
                    index -= 1
                self._preempt(victim, now)
                preempted = True
                if victim is request:
                    return budget, True
            self._give(plan, request, share, now)
            budget -= share
            index += 1
        return budget, preempted

    def _victim(self) -> SimRequest:
        if self._limits.order == "fcfs":
            unprotected = [r for r in self.running if not r.protected]
            return unprotected[-1] if unprotected else self.running[-1]
        return max(self.running, key=lambda request: request.order)

    def _schedule_waiting(self, plan: StepPlan, budget: int, now: float) -> None:
        while budget > 0 and len(self.running) < self._limits.max_num_seqs:
            from_ready = bool(self.ready)
            request = self.ready[0] if from_ready else self.waiting.peek()
            if request is None:
                return
            on_gpu = on_cpu = 0
            hits: Sequence[int] = ()
            if not from_ready:
                limit = request.num_tokens - (request.prepare is None)
                hashes = request.full_blocks(limit // self._block_size)
                on_gpu, on_cpu = self._cache.match(hashes, len(hashes))
                if request.only_load and on_gpu + on_cpu < len(hashes):
                    self.leave(request, now)  # what it was to bring is gone
                    self.done.append(request)
                    continue
                hits = hashes[:on_gpu]
            known = request.computed + (on_gpu + on_cpu) * self._block_size
            share = 0 if on_cpu else min(request.num_tokens - known, budget)
            held = len(request.blocks) + on_gpu
            ask = self.num_blocks(known + share) - held
            whole = self.num_blocks(request.num_tokens) - held
            reserve = whole if self._limits.reserve_full_prompt else ask
            if not self._cache.fits(hits, max(ask, reserve)):
                if from_ready and not (self.running or self.loading):
                    self._break_deadlock(now)
                    continue
                return
            if from_ready:
                self.ready.pop(0)
            else:
                self.waiting.remove(request)
                request.blocks = [*self._cache.acquire(hits)]
                request.num_named = on_gpu
                request.computed = on_gpu * self._block_size
                self.moved[request.ref] = request
                if request.started_s is None:
                    request.started_s = now
                    # Only now: what a preempted request finds again it has computed itself.
                    request.reused = {
                        GPU: on_gpu * self._block_size,
                        CPU: on_cpu * self._block_size,
                    }
            if on_cpu:
                request.state = "loading"
                self._cache.allocate(on_cpu, now)
                request.blocks.extend([None] * on_cpu)
                self.restored_tokens += on_cpu * self._block_size
                self.loading.append((self._cache.load_time(on_cpu, now), request))
                continue
            request.state = "running"
            if share == 0:  # a Prepare whose blocks are all on the GPU
                self.leave(request, now)
                self.done.append(request)
                continue
            self.running.append(request)
            self._give(plan, request, share, now)
            budget -= share

    def _break_deadlock(self, now: float) -> None:
        # Loaded requests hold all there is and none can go on: the last in order gives way. One
        # alone always fits, since what never could was rejected on arrival.
        victim = max(self.ready, key=lambda request: request.order)
        self.ready.remove(victim)
        self._preempt(victim, now)
        self._promote(now)

    def _give(self, plan: StepPlan, request: SimRequest, share: int, now: float) -> None:
        """Hand a request its share: blocks for it, and the names of those that become full."""
        before = request.computed
        after = before + share
        size = self._block_size
        short = -(-after // size) - len(request.blocks)
        if short > 0:
            self._cache.allocate(short, now)
            request.blocks.extend([None] * short)
        named = request.num_named
        self._name_until(request, after // size, self._cache.name_block, now)
        self.computing.update(map(request.hash_at, range(named, request.num_named)))
        request.room = len(request.blocks) * size
        request.next_full = (request.num_named + 1) * size
        plan.shares.append((request, share))
        plan.new_tokens += share
        plan.pairs += share * before + share * (share + 1) // 2
        plan.kv_tokens += after

    @staticmethod
    def _name_until(
        request: SimRequest, end: int, name: Callable[[int, int | None, float], int], now: float
    ) -> None:
        """Give the blocks of a request up to ``end`` their hashes."""
        for index in range(request.num_named, end):
            block = request.hash_at(index)
            parent = request.hash_at(index - 1) if index else None
            request.blocks[index] = name(block, parent, now)
        request.num_named = max(request.num_named, end)

    def _take_back(self, plan: StepPlan, request: SimRequest) -> int:
        """Take the share of this step from a request again; returns how many tokens it was."""
        given = next(i for i, share in enumerate(plan.shares) if share[0] is request)
        share = plan.shares.pop(given)[1]
        before = request.computed
        plan.new_tokens -= share
        plan.pairs -= share * before + share * (share + 1) // 2
        plan.kv_tokens -= before + share
        for index in range(before // self._block_size, len(request.blocks)):
            # It was named for being filled in this step; as it is, nobody may find it.
            block = request.blocks[index]
            if block is not None:
                self._cache.unname_block(block)
                request.blocks[index] = None
        return share

    def finish_step(self, plan: StepPlan, now: float) -> list[SimRequest]:
        """The step is over: count its tokens; returns the requests that have ended with it."""
        ended = []
        self.computing.clear()
        for request, share in plan.shares:
            if request.state != "running":
                continue  # it was dropped while the step ran
            request.computed += share
            if request.computed < request.prompt_tokens + request.produced:
                continue
            if request.output_tokens:
                if not request.produced:
                    request.first_token_s = now
                request.produced += 1
            if request.produced >= request.output_tokens:
                ended.append(request)
        for request in ended:
            self.leave(request, now)
        return ended

    def leave(self, request: SimRequest, now: float) -> None:
        """Take a request out, wherever it is, and free its blocks."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request.state == "running" and request in self.running:
            self.running.remove(request)
        elif request in self.ready:
            self.ready.remove(request)
        else:
            self.loading = [entry for entry in self.loading if entry[1] is not request]
        self._cache.release(request.blocks, now)
        request.state = "ended"
        self.moved[request.ref] = request

    def _preempt(self, request: SimRequest, now: float) -> None:
        """Recompute preemption: all blocks go back, and the request to the queue."""
        self._cache.release(request.blocks, now)
        request.blocks = []
        request.num_named = request.computed = 0
        request.state = "waiting"
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.add(request)
        if not request.protected:
            # Its bound goes on counting from its arrival.
            self.waiting.bound(request, request.max_wait_s, required=request.bound_required)
        self.moved[request.ref] = request
