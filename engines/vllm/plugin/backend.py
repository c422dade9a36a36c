"""``EngineBackend`` over the plug-in, on HEAR's thread.

It keeps a copy of the queue and of what is resident from the engine's events, so that it can say
the whole of both at any time without touching vLLM. The copy is as of the last engine events, and
what it says has happened is in it before it is said.
"""

import os
import time
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, Final

import structlog
import trio

from hear.engines.vllm.hashing import scheme_of
from hear.engines.vllm.hints import from_envelope
from hear.engines.vllm.holdings import CPU, GPU, Holdings
from hear.engines.vllm.identity import Tenants
from hear.engines.vllm.plugin.bridge import (
    Command,
    EngineEvents,
    Gauges,
    RequestUpdate,
    StepTimings,
)
from hear.engines.vllm.plugin.engine_side import MODE, Plugin
from hear.engines.vllm.plugin.own_events import read
from hear.engines.vllm.plugin.queue_copy import QueueCopy
from hear.engines.vllm.plugin.settings import Settings
from hear.engines.vllm.upstream_hints import Ride
from hear.errors import RemoteProtocolError
from hear.interfaces import ApplyResult, OperationEnded, Report
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    CapabilitiesReported,
    Control,
    CostsReported,
    Key,
    PressureReported,
    QueueSnapshot,
    Tier,
    TierPressure,
)
from hear.operation import Operation

_log = structlog.get_logger("hear.vllm")

MOVE: Final = 0.1
"""By what share a measured cost has to change before it is told anew."""


class VllmBackend:
    """The engine as HEAR's thread sees it."""

    def __init__(self, plugin: Plugin, scheduler: Any, settings: Settings) -> None:
        """Called on the engine's thread, while it is being made."""
        self._bridge = plugin.bridge
        self._facts = _Facts(scheduler, settings, plugin)
        self._tenants = Tenants()
        self._holdings = Holdings(self._tenants)
        self._queue = QueueCopy()
        self._gauges = Gauges(self._facts.num_gpu_blocks, 0, 0, 0)
        self._costs = self._facts.first_costs
        self._step_timings = StepTimings()
        self._report: Callable[[Report], None] | None = None
        self._timer_s = inf
        self._timer_moved = trio.Event()

    def listen(self) -> None:
        """Take engine events in from now on, on the trio loop that this is called in."""
        self._queue.offset_s = trio.current_time() - time.monotonic()
        self._bridge.listen(self._take_in)

    # -- the interface ----------------------------------------------------------------------------

    def capabilities(self) -> CapabilitiesReported:
        """What this engine can do."""
        return self._facts.capabilities

    def costs(self) -> CostsReported:
        """What work costs on it, as its own steps have shown."""
        return self._costs

    def pressure(self) -> PressureReported:
        """How full it was as last told."""
        total, gauges = self._facts.num_gpu_blocks, self._gauges
        tiers = [
            TierPressure(
                tier=GPU,
                num_blocks=total,
                used=max(total - gauges.free, 0),
                cached=gauges.cached,
                allocatable=gauges.free,
            )
        ]
        if self._facts.num_cpu_blocks:
            held, size = self._holdings.count(CPU), self._facts.num_cpu_blocks
            tiers.append(TierPressure(tier=CPU, num_blocks=size, cached=held, allocatable=size))
        return PressureReported(
            tiers=tuple(tiers),
            num_waiting=self._queue.num_waiting,
            num_running=self._queue.num_running,
            restored_tokens=gauges.restored_tokens,
            preemptions=gauges.preemptions,
        )

    def queue(self, tenant: str = DEFAULT_TENANT) -> QueueSnapshot:
        """Which requests of a tenant wait and which run."""
        return self._queue.snapshot(tenant)

    def residency(self, tenant: str = DEFAULT_TENANT) -> Iterable[BlocksStored]:
        """All resident blocks of a tenant, as chains."""
        return self._holdings.chains(tenant)

    def residency_known(self) -> bool:
        """Always: the engine's own thread tells of each change."""
        return True

    def apply(self, operation: Operation) -> ApplyResult | None:
        """Have a control carried out on the engine's thread."""
        self._bridge.command(Command("apply", operation))
        return None

    def expect(self, operation: Operation) -> None:
        """Have a request held, when it comes, until its arrival has been answered."""
        self._bridge.command(Command("expect", None, operation.request_ref))

    def revert(self, operation: Operation) -> None:
        """Have an operation's effect ended on the engine's thread."""
        self._bridge.command(Command("revert", operation))

    async def run(self, report: Callable[[Report], None]) -> None:
        """Report until cancelled, to each tenant its own."""
        for tenant, update in self._queue.rows():  # they came while nobody listened
            report(Report(tenant=tenant, arrived=[update.key]))
        self._report = report
        try:
            while True:
                self._timer_moved = trio.Event()
                with trio.move_on_at(self._timer_s):
                    await self._timer_moved.wait()
                    continue
                # An idle engine would sleep through the end of a hold or of a lease.
                self._timer_s = inf
                self._bridge.wake_engine()
        finally:
            self._report = None

    # -- engine events ---------------------------------------------------------------------------

    def _take_in(self, engine_events: EngineEvents) -> None:
        if engine_events.gauges is not None:
            self._gauges = engine_events.gauges
        if engine_events.step_timings is not None:
            self._measure(engine_events.step_timings)
        if engine_events.timer_s is not None:
            timer_s = engine_events.timer_s + self._queue.offset_s
            if timer_s != self._timer_s:
                self._timer_s = timer_s
                self._timer_moved.set()
        reports = self._reports(engine_events)
        if self._report is not None:
            for report in reports.values():
                self._report(report)
        for name in engine_events.awaiting:
            self._bridge.command(Command("answered", None, name))

    def _reports(self, engine_events: EngineEvents) -> dict[str, Report]:
        """What there is to say to each tenant, once it stands in the copy as well."""
        reports: dict[str, Report] = {}

        def of(tenant: str) -> Report:
            return reports.setdefault(tenant, Report(tenant=tenant))

        for key, tenant in engine_events.arrived:
            self._tenants.add(tenant)
            of(tenant).arrived.append(key)
        for tenant, ride, hints in engine_events.hints:
            of(tenant).asked += _controls(hints, ride)
        for tenant, blocks in self._holdings.take(read(engine_events.kv_events)).items():
            of(tenant).blocks = blocks
        updates: dict[str, list[RequestUpdate]] = {}
        for row in engine_events.updates:
            updates.setdefault(row.tenant, []).append(row)
        for tenant, rows in updates.items():
            of(tenant).queue = self._queue.move(tenant, rows)
        for (tenant, operation), result in engine_events.results:
            of(tenant).results.append((operation, result))
        for (tenant, operation), outcome in engine_events.operations:
            of(tenant).operations.append(OperationEnded(operation, outcome))
        for key, tenant, ended in engine_events.outcomes:
            of(tenant).requests.append((key, ended))
        return reports

    def _measure(self, timings: StepTimings) -> None:
        """Let the costs follow what the engine's steps took, where that has changed."""
        steps = timings.decode_steps - self._step_timings.decode_steps
        tokens = timings.prefill_tokens - self._step_timings.prefill_tokens
        if steps < 64 and tokens < 8_192:
            return
        costs = self._costs
        decode, prefill = costs.decode_step_s, costs.prefill_tokens_per_s
        if steps:
            decode = (timings.decode_s - self._step_timings.decode_s) / steps
        seconds = timings.prefill_s - self._step_timings.prefill_s
        if tokens and seconds > 0:
            prefill = tokens / seconds
        self._step_timings = timings
        if _moved(decode, costs.decode_step_s) or _moved(prefill, costs.prefill_tokens_per_s):
            self._costs = CostsReported(
                basis="calibrated",
                prefill_tokens_per_s=prefill,
                decode_step_s=decode,
                kv_bytes_per_token=costs.kv_bytes_per_token,
                load_bytes_per_s=costs.load_bytes_per_s,
            )


def _controls(hints: object, ride: Ride) -> list[tuple[Key, Control]]:
    """The controls that rode on a request; what makes no sense is left out, and logged."""
    try:
        read = from_envelope(hints, ride)
    except RemoteProtocolError as error:
        _log.warning("hints.malformed", error=str(error), effect="the request is served without")
        return []
    for refused in read.refused:
        _log.warning("hints.malformed", error=refused, effect="this action is left out")
    return [(hint.key, hint.control) for hint in read.hints]


def _moved(new: float, old: float) -> bool:
    return abs(new - old) > MOVE * max(abs(old), 1e-9)


class _Facts:
    """What does not change while an engine lives."""

    def __init__(self, scheduler: Any, settings: Settings, plugin: Plugin) -> None:
        config = scheduler.vllm_config
        cache = scheduler.kv_cache_config
        self.num_gpu_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        self.num_cpu_blocks = plugin.controls.num_blocks.get(CPU, 0)
        tiers = [Tier(name=GPU, num_blocks=self.num_gpu_blocks)]
        if self.num_cpu_blocks:
            tiers.append(Tier(name=CPU, num_blocks=self.num_cpu_blocks))
        algorithm = config.cache_config.prefix_caching_hash_algo
        self.capabilities = CapabilitiesReported(
            controls=plugin.controls.supported(),
            modes=(MODE,),
            tiers=tuple(tiers),
            block_size=scheduler.hash_block_size,
            hash_scheme=scheme_of(algorithm, os.environ.get("PYTHONHASHSEED"))
            or f"vllm-{algorithm}",
            max_num_seqs=scheduler.max_num_running_reqs,
            max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
            max_model_len=scheduler.max_model_len,
            max_lease_s=settings.max_lease_s,
            retention_decay_s=settings.retention_decay_s,
            model=config.model_config.served_model_name or config.model_config.model,
        )
        size = sum(tensor.size for tensor in cache.kv_cache_tensors)
        self.first_costs = CostsReported(
            basis="estimated",
            prefill_tokens_per_s=0.0,
            decode_step_s=0.0,
            kv_bytes_per_token=size / max(cache.num_blocks * scheduler.block_size, 1),
        )
