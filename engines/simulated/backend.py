"""The simulated engine: an ``EngineBackend`` and an ``InferenceClient`` in one process.

It serves in the time that trio's clock tells, real or virtual: each step sleeps as long as the
roofline says that the step takes. Controls act between steps, as in a real engine.
"""

from collections.abc import Callable, Iterable
from math import inf

import trio

from hear.blocks import pack
from hear.engines.kv.leases import LeaseBook
from hear.engines.simulated.contexts import Contexts
from hear.engines.simulated.controls import Controls
from hear.engines.simulated.kv_cache import CPU, GPU, KvCache
from hear.engines.simulated.profile import EngineProfile, load_profile
from hear.engines.simulated.reporting import (
    MODES,
    capabilities_of,
    costs_of,
    key_of,
    outcome_of,
    pressure_of,
    queue_change,
    queue_of,
)
from hear.engines.simulated.request import SimRequest
from hear.engines.simulated.roofline import Roofline
from hear.engines.simulated.scheduler import Scheduler
from hear.engines.simulated.tenants import MAX_TENANTS, Tenants
from hear.errors import EngineError
from hear.interfaces import ApplyResult, InferenceRequest, InferenceResult, OperationEnded, Report
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    CapabilitiesReported,
    CostsReported,
    Key,
    PressureReported,
    QueueSnapshot,
    RequestOutcome,
)
from hear.operation import Operation, Ref


class SimulatedEngine:
    """One engine. ``generate`` is its data path, the rest is for the worker."""

    def __init__(self, profile: EngineProfile, *, block_size: int, name: str = "engine0") -> None:
        self.name = name
        self.profile = profile
        self.block_size = block_size
        self.roofline = Roofline(profile, block_size)
        self._arrivals = 0
        self._report: Callable[[Report], None] | None = None
        self._wake = trio.Event()
        self._crashed: str | None = None
        self._waiters: dict[Ref, trio.Event] = {}
        self._ended: dict[Ref, tuple[SimRequest, RequestOutcome]] = {}
        self._start_empty()

    def _start_empty(self) -> None:
        limits = self.profile.scheduler
        self._tenants = Tenants()
        leases: LeaseBook[Ref] = LeaseBook(limits.retention_decay_s)
        self.cache = KvCache(
            num_gpu_blocks=self.profile.num_blocks(GPU, self.block_size),
            num_cpu_blocks=self.profile.num_blocks(CPU, self.block_size),
            inclusive=self.profile.tiers.cpu == "inclusive",
            block_transfer_s=self.roofline.block_transfer_s,
            leases=leases,
            on_lost=lambda block: self._controls.retention.lost(block),
        )
        self.scheduler = Scheduler(limits, self.cache, self.block_size)
        self._requests: dict[Ref, SimRequest] = {}
        self._contexts = Contexts()
        self._controls = Controls(
            name=self.name,
            limits=limits,
            scheduler=self.scheduler,
            cache=self.cache,
            leases=leases,
            requests=self._requests,
            contexts=self._contexts,
            tenants=self._tenants,
            submit=self._enqueue,
            block_size=self.block_size,
        )
        self._outcomes: list[tuple[str, Key, RequestOutcome]] = []  # with their tenants

    # -- the data path ------------------------------------------------------------------------

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        """Serve one request. One that can never fit is rejected at once.

        Raises:
            EngineError: a request of that id is being served, or its id cannot be told to others.
        """
        sent_s = trio.current_time()
        ref = request.tenant, request.id
        if ref in self._waiters:
            raise EngineError(f"request {request.id!r} is being served already")
        try:
            f"{request.tenant}{request.id}{request.context}".encode()
        except UnicodeEncodeError as error:
            raise EngineError(f"request {request.id!r}: {error}") from None
        event = self._waiters[ref] = trio.Event()
        try:
            reason = self._refusal(request)
            if reason:
                outcome = RequestOutcome(
                    status="rejected", reason=reason, prompt_tokens=request.prompt_tokens
                )
                self._outcomes.append((request.tenant, key_of(request), outcome))
                self._wake.set()
                await trio.lowlevel.checkpoint()
                return InferenceResult(outcome, sent_s, sent_s, sent_s, sent_s)
            sim = self._enqueue(request)
            if request.context is not None:
                self._serving(sim)
            if self._report is not None:
                self._announce(sim, self._report)
            await event.wait()
            sim, outcome = self._ended.pop(ref)
        except trio.Cancelled:
            self._drop(ref)
            raise
        finally:
            del self._waiters[ref]
        now = trio.current_time()
        started_s = now if sim.started_s is None else sim.started_s
        first_s = now if sim.first_token_s is None else sim.first_token_s
        return InferenceResult(outcome, sent_s, started_s, first_s, now)

    @staticmethod
    def _announce(sim: SimRequest, report: Callable[[Report], None]) -> None:
        key = key_of(sim)
        accepted = RequestOutcome(status="accepted", prompt_tokens=sim.prompt_tokens)
        report(Report(arrived=[key], requests=[(key, accepted)], tenant=sim.tenant))

    def _refusal(self, request: InferenceRequest) -> str:
        tokens = request.prompt_tokens + request.output_tokens
        most = min(
            self.profile.scheduler.max_model_len, self.cache.num_gpu_blocks * self.block_size
        )
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            return "malformed: a request needs a prompt and an output of at least one token"
        if tokens > most:
            return f"too_long: {tokens} tokens, this engine holds {most}"
        if len(request.prompt_hashes) > request.prompt_tokens // self.block_size:
            return "malformed: more block hashes than full blocks in the prompt"
        try:  # what cannot be told on the bus must not come in
            pack(request.prompt_hashes)
            pack(request.output_hashes)
        except (OverflowError, TypeError) as error:
            return f"malformed: block hashes: {error}"
        if self._tenants.number(request.tenant) is None:
            return f"too_many_tenants: this engine tells {MAX_TENANTS} apart"
        return ""

    def _enqueue(self, request: InferenceRequest) -> SimRequest:
        self._arrivals += 1
        owner = self._tenants.number(request.tenant)
        assert owner is not None, "a request that cannot be told apart was not refused"
        sim = SimRequest(request, trio.current_time(), self._arrivals, MODES[0], owner)
        self._requests[sim.ref] = sim
        self.scheduler.add(sim)
        self._wake.set()
        return sim

    def _serving(self, sim: SimRequest) -> None:
        """Controls may speak of its context from now on."""
        assert sim.of_context is not None
        self._controls.retention.arrived(sim.of_context)
        self._contexts.arrived(sim.of_context, sim.hashes, sim.arrival_s)

    def _drop(self, ref: Ref) -> None:
        """The client has gone; so does its request."""
        self._ended.pop(ref, None)
        sim = self._requests.get(ref)
        if sim is not None:
            self._end_request(sim, "failed", "client_gone", trio.current_time())
            self._ended.pop(ref, None)
            self._wake.set()

    # -- the backend --------------------------------------------------------------------------

    def capabilities(self) -> CapabilitiesReported:
        """What this engine can do."""
        return capabilities_of(
            self.profile, self.cache, self.block_size, self._controls.supported()
        )

    def costs(self) -> CostsReported:
        """What work costs on it, by the roofline."""
        return costs_of(self.profile, self.roofline)

    def pressure(self) -> PressureReported:
        """How full it is now."""
        return pressure_of(self.scheduler, self.cache, trio.current_time())

    def queue(self, tenant: str = DEFAULT_TENANT) -> QueueSnapshot:
        """Which requests of a tenant wait and which run now."""
        return queue_of(tenant, self.scheduler)

    def residency(self, tenant: str = DEFAULT_TENANT) -> Iterable[BlocksStored]:
        """All resident blocks of a tenant, as chains."""
        owner = self._tenants.known(tenant)
        return () if owner is None else self.cache.chains(owner)

    def residency_known(self) -> bool:
        """Always: it looks at the cache itself."""
        return True

    def apply(self, operation: Operation) -> ApplyResult:
        """Carry out a control, or begin to."""
        result = self._controls.apply(operation, trio.current_time())
        self._wake.set()
        return result

    def expect(self, operation: Operation) -> None:
        """Nothing to do: a request is announced in the moment in which it comes."""

    def revert(self, operation: Operation) -> None:
        """End what an operation still effects."""
        self._controls.revert(operation, trio.current_time())
        self._wake.set()

    def crash(self, why: str = "crashed") -> None:
        """Lose everything, as a process that is killed; ``run`` raises, and may be called again."""
        self._crashed = why
        self._wake.set()

    async def run(self, report: Callable[[Report], None]) -> None:
        """Serve until cancelled.

        Raises:
            EngineError: the engine crashed. It is empty now; running it again restarts it.
        """
        self._report = report
        for sim in list(self._requests.values()):
            if sim.prepare is None:  # it came while nobody listened
                self._announce(sim, report)
        try:
            while self._crashed is None:
                await self._step(report)
            raise EngineError(f"{self.name}: {self._crashed}")
        finally:
            self._report = None
            if self._crashed is not None:
                self._fail_all("engine_restarted")
                self._crashed = None
                self._start_empty()

    async def _step(self, report: Callable[[Report], None]) -> None:
        now = trio.current_time()
        self._wake = trio.Event()
        self._settle(now)
        plan = self.scheduler.schedule(now)
        for request in self.scheduler.done:
            self._finish(request, now)
        self.scheduler.done.clear()
        self._flush(report)
        if plan is None:
            with trio.move_on_at(self._next_timer()):
                await self._wake.wait()
            return
        await trio.sleep_until(
            now + self.roofline.step_s(plan.new_tokens, plan.pairs, plan.kv_tokens)
        )
        if self._crashed is None:
            now = trio.current_time()
            for request in self.scheduler.finish_step(plan, now):
                self._finish(request, now)
            self._controls.placement.look(now)

    def _settle(self, now: float) -> None:
        arrived = self.cache.settle(now)
        if arrived:
            self._controls.placement.arrived_on_cpu(arrived, now)
        self.scheduler.settle(now)
        self._controls.retention.look()
        self._controls.retention.tick(now)

    def _next_timer(self) -> float:
        timers = (
            self.cache.next_settle(),
            self.scheduler.next_load(),
            self._controls.retention.next_timer(),
            self.scheduler.waiting.next_release(),
        )
        return min((t for t in timers if t is not None), default=inf)

    def _finish(self, sim: SimRequest, now: float) -> None:
        if sim.prepare is not None:
            self._requests.pop(sim.ref, None)
            self._controls.placement.prefilled(sim, now)
            return
        self._end_request(sim, "completed", "", now)

    def _end_request(self, sim: SimRequest, status: str, reason: str, now: float) -> None:
        if sim.state != "ended":
            self.scheduler.leave(sim, now)
        self._requests.pop(sim.ref, None)
        if sim.started_s is not None:
            self._controls.started(sim)
        if sim.of_context is not None:
            if status == "completed":
                self._now_idle(sim, now)
            self._controls.retention.left(sim.of_context)
        outcome = outcome_of(sim, status, reason, now)
        self._outcomes.append((sim.tenant, key_of(sim), outcome))
        self._tell(sim, outcome)

    def _tell(self, sim: SimRequest, outcome: RequestOutcome) -> None:
        """Let its client go on."""
        self._ended[sim.ref] = sim, outcome
        if (event := self._waiters.get(sim.ref)) is not None:
            event.set()

    def _now_idle(self, sim: SimRequest, now: float) -> None:
        assert sim.of_context is not None
        blocks = [sim.hash_at(index) for index in range(sim.num_named)]
        self._contexts.served(sim.of_context, blocks, now)
        self._controls.retention.served(sim.of_context, blocks, now)

    def _fail_all(self, reason: str) -> None:
        now = trio.current_time()
        for sim in list(self._requests.values()):
            if sim.prepare is None:
                self._tell(sim, outcome_of(sim, "failed", reason, now))

    def _flush(self, report: Callable[[Report], None]) -> None:
        scheduler = self.scheduler
        moved: dict[str, list[SimRequest]] = {}
        for sim in scheduler.moved.values():
            moved.setdefault(sim.tenant, []).append(sim)
            if sim.state not in ("waiting", "ended") and sim.prepare is None:
                self._controls.started(sim)
        scheduler.moved = {}
        reports = _Reports()
        for tenant, requests in moved.items():
            queue = queue_change(tenant, requests, scheduler)
            if queue is not None:
                reports[tenant].queue = queue
        for owner, blocks in self.cache.drain_changes().items():
            reports[self._tenants.name(owner)].blocks = blocks
        for (tenant, id), outcome in self._controls.ended:
            reports[tenant].operations.append(OperationEnded(id, outcome))
        self._controls.ended.clear()
        for tenant, key, ended in self._outcomes:
            reports[tenant].requests.append((key, ended))
        self._outcomes.clear()
        for made in reports.values():
            report(made)


class _Reports(dict[str, Report]):
    """What is to be reported to each tenant that there is anything for."""

    def __missing__(self, tenant: str) -> Report:
        made = self[tenant] = Report(tenant=tenant)
        return made


def create(profile: str, *, block_size: int, name: str) -> SimulatedEngine:
    """A simulated engine by the name of its profile or the path of its TOML file.

    Raises:
        ConfigError: there is no such profile, or it cannot be used.
    """
    return SimulatedEngine(load_profile(profile, block_size), block_size=block_size, name=name)
