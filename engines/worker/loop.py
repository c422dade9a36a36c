"""The one loop that serves every engine: controls in, state and outcomes out.

The worker owns the bus side of an engine: it drives the backend, reads the controls of all tenants
and gives each what is its own to a ``Desk``. What a control means is decided by ``hear.intake``;
what it does, by the backend. If the bus is lost, the worker goes on without it: the engine serves,
in its own order, and nobody is told.
"""

from collections import deque
from math import inf

import structlog
import trio

from hear.app.control_reader import ControlReader
from hear.engines.worker.desk import Desk
from hear.engines.worker.ledger import Ledger
from hear.errors import BusError, ConfigError, EngineError, LocalProtocolError
from hear.intake import Step
from hear.interfaces import Bus, EngineBackend, Report
from hear.messages import DEFAULT_TENANT, Envelope
from hear.subjects import token

_log = structlog.get_logger("hear.worker")

RETOLD = 1_024
"""Latest ends of each tenant that a worker with a ledger tells of as it begins, known or not."""

MAX_TENANTS = 256
"""Most tenants of one engine at once. A further one is served, and is told and heard nothing of."""

IDLE_S = 600.0
"""How long a tenant has had nothing going on until it gives way, where another finds no room."""

RESTARTS_WITHIN_S = 3_600.0
"""The time in which a backend may fail so often and no more."""

NUMBERS_A_SECOND = 1_000_000  # more than a worker sends messages

MAX_NAME = 256  # characters of a tenant's name in a subject


class EngineWorker:
    """Joins one backend to a bus."""

    def __init__(
        self,
        bus: Bus,
        backend: EngineBackend,
        *,
        name: str,
        ranks: dict[str, int] | None = None,
        tenants: tuple[str, ...] = (DEFAULT_TENANT,),
        max_tenants: int = MAX_TENANTS,
        epoch: int = 1,
        ledger: Ledger | None = None,
        endpoint: str = "",
        share: float = 1.0,
        pressure_interval_s: float = 0.5,
        restart_delay_s: float = 1.0,
        max_restarts: int = 8,
    ) -> None:
        """Join them.

        Args:
            ranks: the rank of policies (by source) in arbitration; higher prevails.
            tenants: who is told of the engine from the beginning, and always. Any other is with
                its first request or control, up to ``max_tenants`` in all; where there are so many,
                the one that has been idle longest, for ``IDLE_S`` at least, gives way.
            epoch: the incarnation to begin with. Whoever starts a worker for an engine of this
                name again has to give a higher one than the last.
            ledger: what became of operations under earlier workers of this engine; the worker
                notes there what becomes of its own.
            endpoint: the address of the engine's data path, to be told with its capabilities.
            share: how much of a processor may go into controls (``hear.app.control_reader``).
            max_restarts: how often the backend may fail within ``RESTARTS_WITHIN_S``.

        Raises:
            ConfigError: there are too many tenants, or one cannot be named in a subject.
        """
        self.name = name
        self.epoch = epoch
        """The current incarnation of the engine."""
        self._bus = bus
        self._backend = backend
        self._ranks = ranks
        self._endpoint = endpoint
        self._ledger = ledger
        if ledger is not None:
            ledger.fail_interrupted()
        self._max_tenants = max_tenants
        self._share = share
        self._desks: dict[str, Desk] = {}
        self._staying = frozenset(tenants)
        self._begun_s = 0.0
        self._gave_way = False
        for tenant in dict.fromkeys(tenants):
            if self._make_desk(tenant) is None:
                raise ConfigError(
                    f"engine {name!r}: tenant {tenant!r:.80}: expected a name of 1 to {MAX_NAME} "
                    f"characters, and {max_tenants} tenants at most"
                )
        for tenant in () if ledger is None else ledger.tenants:
            if tenant not in self._desks and len(self._desks) < max_tenants:
                self._make_desk(tenant)
        self._pressure_interval_s = pressure_interval_s
        self._pressure_due_s = -inf
        self._restart_delay_s = restart_delay_s
        self._max_restarts = max_restarts
        self._turned_away = False
        self._bus_lost = False
        self._failure: EngineError | None = None

    @property
    def num_open(self) -> int:
        """Operations without a terminal outcome."""
        return sum(desk.num_open for desk in self._desks.values())

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then whatever is open ends ``failed: engine_stopped``.

        Raises:
            EngineError: the backend failed more than ``max_restarts`` times within an hour.
            BusError: the bus cannot be joined.
        """
        self._begun_s = trio.current_time()
        try:
            for desk in self._desks.values():
                self._provide(desk)
            await self._serve_on_bus(task_status)
        finally:
            for desk in self._desks.values():
                self._withdraw(desk)
        if self._failure is not None:
            raise self._failure

    async def _serve_on_bus(self, task_status: trio.TaskStatus[None]) -> None:
        async with ControlReader(self._bus, self, share=self._share) as controls:
            for desk in self._desks.values():
                desk.introduce()
                if self._ledger is not None:
                    # The last worker may have been killed between noting an end and telling of it.
                    for answer in self._ledger.ended(desk.tenant)[-RETOLD:]:
                        desk.answer(answer)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._serve, nursery.cancel_scope)
                    task_status.started()
                    await self._listen(controls)
            finally:
                for desk in self._desks.values():
                    desk.shut("engine_stopped")

    async def _listen(self, controls: ControlReader) -> None:
        try:
            await controls.run()
        except BusError as error:
            self._lose_bus(error)
            await trio.sleep_forever()

    async def _serve(self, scope: trio.CancelScope) -> None:
        failures: deque[float] = deque()
        while True:
            try:
                await self._backend.run(self._on_report)
            except EngineError as error:
                now = trio.current_time()
                failures.append(now)
                while failures[0] < now - RESTARTS_WITHIN_S:
                    failures.popleft()
                _log.error("engine.failed", engine=self.name, epoch=self.epoch, error=str(error))
                self.epoch += 1
                for desk in self._desks.values():
                    desk.restart()
                if len(failures) > self._max_restarts:
                    self._failure = error
                    scope.cancel()
                await trio.sleep(self._restart_delay_s)

    def _on_report(self, report: Report) -> None:
        desk = self._desk(report.tenant)
        if report.capabilities is not None or report.residency_anew:
            for each in self._desks.values():
                each.tell_anew(report)
        if desk is not None:
            desk.report(report)
        now = trio.current_time()
        if now >= self._pressure_due_s:
            self._pressure_due_s = now + self._pressure_interval_s
            for desk in self._desks.values():
                desk.tell_pressure()

    # -- controls, as they come off the bus ---------------------------------------------------

    def take_in(self, envelope: Envelope, now: float) -> None:
        """Hand a control to its tenant's desk."""
        desk = self._desk(envelope.tenant)
        if desk is not None:
            desk.take_in(envelope, now)

    def expire(self, now: float) -> None:
        """End what has passed its deadline."""
        for desk in self._desks.values():
            desk.expire(now)

    def next_expiry(self) -> float | None:
        """When ``expire`` has to be called next."""
        return min(filter(None, (d.next_expiry() for d in self._desks.values())), default=None)

    # -- desks --------------------------------------------------------------------------------

    def _desk(self, tenant: str) -> Desk | None:
        """The desk of a tenant, with its first request or control; None if there is no room."""
        desk = self._desks.get(tenant)
        if desk is not None:
            return desk
        desk = self._make_desk(tenant)
        if desk is None:
            if not self._turned_away:
                self._turned_away = True
                _log.error(
                    "tenants.too_many",
                    engine=self.name,
                    tenant=tenant[:MAX_NAME],
                    most=self._max_tenants,
                    effect="served, but neither told nor heard; said once",
                )
            return None
        try:
            self._provide(desk)
        except BusError as error:
            self._lose_bus(error)
        desk.introduce()
        desk.tell_pressure()  # the next report may be long in coming
        return desk

    def _provide(self, desk: Desk) -> None:
        for subject, provider in desk.providers().items():
            self._bus.provide_snapshots(subject, provider)

    def _withdraw(self, desk: Desk) -> None:
        for subject, provider in desk.providers().items():
            self._bus.withdraw_snapshots(subject, provider)

    def _make_desk(self, tenant: str) -> Desk | None:
        if not can_be_named(tenant):
            return None
        if len(self._desks) >= self._max_tenants and not self._make_room():
            return None
        desk = self._desks[tenant] = Desk(
            tenant,
            engine=self.name,
            backend=self._backend,
            epoch=self.epoch,
            ranks=self._ranks,
            ended=() if self._ledger is None else self._ledger.ended(tenant),
            endpoint=self._endpoint,
            send=self._send,
            keep=self._keep,
            above=self._above(),
        )
        return desk

    def _make_room(self) -> bool:
        """Close the desk of the tenant that has been idle longest; False if none has for long."""
        others = (desk for tenant, desk in self._desks.items() if tenant not in self._staying)
        idle = min(others, key=lambda desk: desk.idle_since, default=None)
        if idle is None or idle.idle_since > trio.current_time() - IDLE_S:
            return False
        self._gave_way = True
        del self._desks[idle.tenant]
        self._withdraw(idle)
        _log.info("tenant.gave_way", engine=self.name, tenant=idle.tenant)
        return True

    def _above(self) -> int:
        """What the messages of a new desk are numbered from.

        Its tenant may have had one before, whose numbers must not come again. The time gives higher
        ones, and tells a tenant nothing of what others were told.
        """
        if not self._gave_way:
            return 0
        return int((trio.current_time() - self._begun_s) * NUMBERS_A_SECOND)

    def _keep(self, tenant: str, step: Step) -> None:
        """Write down what is about to be told and done."""
        if self._ledger is None:
            return
        try:
            for answer in step.answers:
                self._ledger.note(answer, tenant)
            for operation in step.apply:
                kind = str(operation.control.__struct_config__.tag)
                self._ledger.begin(operation.key, kind, tenant)
        except OSError as error:
            # The engine serves on; what is lost is the memory of a worker that comes after.
            path, self._ledger = self._ledger.path, None
            _log.error("ledger.lost", engine=self.name, path=str(path), error=str(error))

    def _send(self, envelope: Envelope) -> None:
        try:
            self._bus.publish(envelope)
        except BusError as error:
            self._lose_bus(error)

    def _lose_bus(self, error: BusError) -> None:
        if not self._bus_lost:
            self._bus_lost = True
            _log.error("bus.lost", engine=self.name, error=str(error))


def can_be_named(tenant: str) -> bool:
    """Whether subjects of a tenant have a form, of a length that every bus takes."""
    try:
        return 0 < len(tenant) <= MAX_NAME and len(token(tenant)) <= MAX_NAME
    except LocalProtocolError:
        return False
