"""The one loop that serves every engine: controls in, state and outcomes out.

The worker owns the bus side of an engine: its source name, epoch and sequence numbers. What a
control means is decided by ``hear.intake``; what it does, by the backend. If the bus is lost, the
worker goes on without it: the engine serves, in its own order, and nobody is told.
"""

from math import inf

import structlog
import trio
from msgspec.structs import replace

from hear.blocks import HASH_BYTES
from hear.control_reader import ControlReader
from hear.delivery import Sequencer
from hear.engines.ledger import Ledger
from hear.errors import BusError, EngineError
from hear.intake import Intake, Step
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    CapabilitiesReported,
    Envelope,
    Key,
    Message,
    RequestOutcome,
    ResidencyChanged,
    ResidencyPartial,
    ResidencySnapshot,
)
from hear.operation import Operation
from hear.seams import Bus, EngineBackend, Report, Verdict
from hear.subjects import stem

_log = structlog.get_logger("hear.worker")

SNAPSHOT_BLOCKS = 65_536
"""Most blocks in one part of a residency snapshot, so that no message grows without bound."""

RETOLD = 1_024
"""Latest ends that a worker with a ledger tells of as it begins, known or not."""


class EngineWorker:
    """Joins one backend to a bus."""

    def __init__(
        self,
        bus: Bus,
        backend: EngineBackend,
        *,
        name: str,
        ranks: dict[str, int] | None = None,
        tenant: str = DEFAULT_TENANT,
        epoch: int = 1,
        ledger: Ledger | None = None,
        endpoint: str = "",
        pressure_interval_s: float = 0.5,
        restart_delay_s: float = 1.0,
        max_restarts: int = 8,
    ) -> None:
        """Join them.

        Args:
            ranks: the rank of policies (by source) in arbitration; higher prevails.
            epoch: the incarnation to begin with. Whoever starts a worker for an engine of this
                name again has to give a higher one than the last.
            ledger: what became of operations under earlier workers of this engine; the worker
                notes there what becomes of its own.
            endpoint: the address of the engine's data path, to be told with its capabilities.
        """
        self.name = name
        self._bus = bus
        self._backend = backend
        self._key = Key(engine=name)
        self._sequencer = Sequencer(name, epoch, tenant)
        self._tenant = tenant
        self._endpoint = endpoint
        self._ledger = ledger
        if ledger is not None:
            ledger.fail_interrupted()
        self._intake = Intake(
            engine=name,
            controls=backend.capabilities().controls,
            at_submission=backend.capabilities().at_submission,
            ranks=ranks,
            epoch=epoch,
            ended=ledger.ended if ledger is not None else (),
        )
        self._pressure_interval_s = pressure_interval_s
        self._pressure_due_s = -inf
        self._restart_delay_s = restart_delay_s
        self._max_restarts = max_restarts
        self._serving: dict[str, Key] = {}
        self._bus_lost = False
        self._failure: EngineError | None = None

    @property
    def epoch(self) -> int:
        """The current incarnation of the engine."""
        return self._sequencer.epoch

    @property
    def num_open(self) -> int:
        """Operations without a terminal outcome."""
        return len(self._intake.open_operations)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then whatever is open ends ``failed: engine_stopped``.

        Raises:
            EngineError: the backend failed more than ``max_restarts`` times.
            BusError: the bus cannot be joined.
        """
        for kind, provider in (
            ("residency_snapshot", self._residency_snapshot),
            ("queue_snapshot", self._queue_snapshot),
            ("pressure_reported", self._pressure),
            ("capabilities_reported", self._capabilities),
            ("costs_reported", self._costs),
        ):
            subject = stem("state", self._tenant, self._key, kind)
            self._bus.provide_snapshots(subject, provider)
        async with ControlReader(
            self._bus, self._intake, self._carry_out, tenant=self._tenant
        ) as controls:
            self._introduce()
            if self._ledger is not None:
                # The last worker may have been killed between noting an end and telling of it.
                for answer in self._ledger.ended[-RETOLD:]:
                    self._publish(answer.outcome, self._at_home(answer.key))
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._serve, nursery.cancel_scope)
                    task_status.started()
                    await self._listen(controls)
            finally:
                self._carry_out(self._intake.shut("engine_stopped"))
        if self._failure is not None:
            raise self._failure

    async def _listen(self, controls: ControlReader) -> None:
        try:
            await controls.run()
        except BusError as error:
            self._lose_bus(error)
            await trio.sleep_forever()

    async def _serve(self, scope: trio.CancelScope) -> None:
        restarts = 0
        while True:
            try:
                await self._backend.run(self._on_report)
            except EngineError as error:
                restarts += 1
                _log.error("engine.failed", engine=self.name, epoch=self.epoch, error=str(error))
                self._restart()
                if restarts > self._max_restarts:
                    self._failure = error
                    scope.cancel()
                await trio.sleep(self._restart_delay_s)

    def _restart(self) -> None:
        """The engine begins a new epoch; what was open under the old one fails."""
        self._carry_out(self._intake.shut("engine_restarted"))
        for key in self._serving.values():
            self._publish(RequestOutcome(status="failed", reason="engine_restarted"), key)
        self._serving.clear()
        self._sequencer.restart()
        self._intake.epoch = self.epoch
        self._introduce()

    def _introduce(self) -> None:
        for provider in (
            self._capabilities,
            self._costs,
            self._residency_news,
            self._queue_snapshot,
        ):
            for envelope in provider():
                self._send(envelope)

    # -- what the backend reports -------------------------------------------------------------

    def _on_report(self, report: Report) -> None:
        for key in report.arrived:
            assert key.request is not None
            key = self._serving[key.request] = self._at_home(key)
            self._carry_out(self._intake.request_arrived(key, trio.current_time()))
        if report.capabilities is not None:
            self._send(self._snapshot(self._with_endpoint(report.capabilities)))
        if report.residency_anew:
            for envelope in self._residency_news():
                self._send(envelope)
        elif report.blocks:
            self._publish(ResidencyChanged(changes=tuple(report.blocks)), self._key)
        if report.queue is not None:
            self._publish(report.queue, self._key)
        for operation, verdict in report.verdicts:
            self._carry_out(self._intake.verdict(operation, verdict))
        for event in report.operations:
            self._carry_out(self._intake.ended(event))
        for key, outcome in report.requests:
            assert key.request is not None
            self._publish(outcome, self._at_home(key))
            if outcome.status != "accepted":
                self._serving.pop(key.request, None)
                self._carry_out(self._intake.request_ended(key.request))
        now = trio.current_time()
        if now >= self._pressure_due_s:
            self._pressure_due_s = now + self._pressure_interval_s
            self._publish(self._backend.pressure(), self._key)

    def _carry_out(self, step: Step) -> None:
        for operation in step.expect:
            self._backend.expect(operation)
        for operation in step.revert:
            self._backend.revert(operation)
        if self._ledger is not None:
            self._keep(self._ledger, step)
        for answer in step.answers:
            self._publish(answer.outcome, self._at_home(answer.key))
        for operation in step.apply:
            verdict = self._apply(operation)
            if verdict is None:
                self._intake.handed_over(operation)
            else:
                self._carry_out(self._intake.applied(operation, verdict))

    def _keep(self, ledger: Ledger, step: Step) -> None:
        """Write down what is about to be told and done."""
        try:
            for answer in step.answers:
                ledger.note(answer)
            for operation in step.apply:
                ledger.begin(operation.key, str(operation.control.__struct_config__.tag))
        except OSError as error:
            # The engine serves on; what is lost is the memory of a worker that comes after.
            self._ledger = None
            _log.error("ledger.lost", engine=self.name, path=str(ledger.path), error=str(error))

    def _apply(self, operation: Operation) -> Verdict | None:
        try:
            return self._backend.apply(operation)
        except EngineError as error:
            return Verdict("failed", "engine_error", str(error))

    def _at_home(self, key: Key) -> Key:
        return key if key.engine is not None else replace(key, engine=self.name)

    # -- what is published --------------------------------------------------------------------

    def _publish(self, message: Message, key: Key) -> None:
        self._send(self._sequencer.wrap(message, key, trio.current_time()))

    def _send(self, envelope: Envelope) -> None:
        try:
            self._bus.publish(envelope)
        except BusError as error:
            self._lose_bus(error)

    def _lose_bus(self, error: BusError) -> None:
        if not self._bus_lost:
            self._bus_lost = True
            _log.error("bus.lost", engine=self.name, error=str(error))

    def _snapshot(self, message: Message) -> Envelope:
        return self._sequencer.wrap_snapshot(message, self._key, trio.current_time())

    def _residency_parts(self) -> list[ResidencySnapshot | ResidencyPartial]:
        parts: list[list[BlocksStored]] = [[]]
        room = SNAPSHOT_BLOCKS
        for chain in self._backend.residency():
            size = len(chain.prefix_hashes) // HASH_BYTES
            if size > room and parts[-1]:
                parts.append([])
                room = SNAPSHOT_BLOCKS
            parts[-1].append(chain)
            room -= size
        kind = ResidencySnapshot if self._backend.residency_known() else ResidencyPartial
        return [
            kind(chains=tuple(chains), part=part, parts=len(parts))
            for part, chains in enumerate(parts)
        ]

    def _residency_snapshot(self) -> list[Envelope]:
        return [self._snapshot(part) for part in self._residency_parts()]

    def _residency_news(self) -> list[Envelope]:
        first, *others = self._residency_parts()
        if isinstance(first, ResidencySnapshot):
            told = self._snapshot(first)
        else:
            # It takes a number, so that a reader that does not know the kind misses it, and does
            # not go on believing what it held.
            told = self._sequencer.wrap(first, self._key, trio.current_time())
        return [told, *(self._snapshot(part) for part in others)]

    def _queue_snapshot(self) -> list[Envelope]:
        return [self._snapshot(self._backend.queue())]

    def _pressure(self) -> list[Envelope]:
        return [self._snapshot(self._backend.pressure())]

    def _capabilities(self) -> list[Envelope]:
        return [self._snapshot(self._with_endpoint(self._backend.capabilities()))]

    def _with_endpoint(self, capabilities: CapabilitiesReported) -> CapabilitiesReported:
        return replace(capabilities, endpoint=self._endpoint or capabilities.endpoint)

    def _costs(self) -> list[Envelope]:
        return [self._snapshot(self._backend.costs())]
