"""The one loop that serves every engine: controls in, state and outcomes out.

Theory of operation. A worker joins one backend to one bus. Two tasks run in it, on one trio loop:

- *controls*: a ``ControlReader`` takes the controls of all tenants off the bus and hands each to
  the ``TenantSession`` of its tenant, which lets ``hear.engine_operations`` decide, and has the
  backend do what is to be done.
- *serving*: the backend runs, and reports what happened. A report goes to the session of its
  tenant; what is told of the engine as a whole goes to all sessions.

A session is opened with the first request or control of its tenant. A backend that fails is run
again in a new epoch, in which every session begins anew; one that fails too often ends the worker.

Invariants:

1. All that a worker knows of a tenant is in its session, so nothing of one tenant meets another.
2. An end is noted in the operation log before it is told, and an operation before it is applied: a
   worker that is killed in between tells of it, or fails it, in its next life.
3. The epoch grows with each start of the backend, and the numbers of messages begin anew with it;
   within an epoch no session uses a number twice, also if its tenant went and came again.
4. If the bus is lost, the engine serves on, in its own order, and nobody is told.
5. However a worker ends, what is open ends ``engine_stopped``, and its snapshots are withdrawn.
"""

from collections import deque
from math import inf

import structlog
import trio

from hear.app.control_reader import ControlReader
from hear.engine_operations import Actions
from hear.engines.worker.operation_log import OperationLog
from hear.engines.worker.tenant_session import TenantSession
from hear.errors import BusError, ConfigError, EngineError, LocalProtocolError
from hear.interfaces import Bus, EngineBackend, Report
from hear.messages import DEFAULT_TENANT, Envelope
from hear.subjects import token

_log = structlog.get_logger("hear.worker")

RETOLD = 1_024
"""Latest ends of each tenant that a worker with an operation log tells of as it begins."""

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
        operation_log: OperationLog | None = None,
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
            operation_log: what became of operations under earlier workers of this engine; the
                worker notes there what becomes of its own.
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
        self._operation_log = operation_log
        if operation_log is not None:
            operation_log.fail_interrupted()
        self._max_tenants = max_tenants
        self._share = share
        self._sessions: dict[str, TenantSession] = {}
        self._staying = frozenset(tenants)
        self._begun_s = 0.0
        self._gave_way = False
        for tenant in dict.fromkeys(tenants):
            if self._open_session(tenant) is None:
                raise ConfigError(
                    f"engine {name!r}: tenant {tenant!r:.80}: expected a name of 1 to {MAX_NAME} "
                    f"characters, and {max_tenants} tenants at most"
                )
        for tenant in () if operation_log is None else operation_log.tenants:
            if tenant not in self._sessions and len(self._sessions) < max_tenants:
                self._open_session(tenant)
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
        return sum(session.num_open for session in self._sessions.values())

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then whatever is open ends ``failed: engine_stopped``.

        Raises:
            EngineError: the backend failed more than ``max_restarts`` times within an hour.
            BusError: the bus cannot be joined.
        """
        self._begun_s = trio.current_time()
        try:
            for session in self._sessions.values():
                self._provide(session)
            await self._serve_on_bus(task_status)
        finally:
            for session in self._sessions.values():
                self._withdraw(session)
        if self._failure is not None:
            raise self._failure

    async def _serve_on_bus(self, task_status: trio.TaskStatus[None]) -> None:
        async with ControlReader(self._bus, self, share=self._share) as controls:
            for session in self._sessions.values():
                session.introduce()
                if self._operation_log is not None:
                    # The last worker may have been killed between noting an end and telling of it.
                    for answer in self._operation_log.ended(session.tenant)[-RETOLD:]:
                        session.answer(answer)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._serve, nursery.cancel_scope)
                    task_status.started()
                    await self._listen(controls)
            finally:
                for session in self._sessions.values():
                    session.shut("engine_stopped")

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
                for session in self._sessions.values():
                    session.restart()
                if len(failures) > self._max_restarts:
                    self._failure = error
                    scope.cancel()
                await trio.sleep(self._restart_delay_s)

    def _on_report(self, report: Report) -> None:
        session = self._session(report.tenant)
        if report.capabilities is not None or report.residency_anew:
            for each in self._sessions.values():
                each.tell_anew(report)
        if session is not None:
            session.report(report)
        now = trio.current_time()
        if now >= self._pressure_due_s:
            self._pressure_due_s = now + self._pressure_interval_s
            for session in self._sessions.values():
                session.tell_pressure()

    # -- controls, as they come off the bus ---------------------------------------------------

    def take_in(self, envelope: Envelope, now: float) -> None:
        """Hand a control to its tenant's session."""
        session = self._session(envelope.tenant)
        if session is not None:
            session.take_in(envelope, now)

    def expire(self, now: float) -> None:
        """End what has passed its deadline."""
        for session in self._sessions.values():
            session.expire(now)

    def next_expiry(self) -> float | None:
        """When ``expire`` has to be called next."""
        return min(filter(None, (s.next_expiry() for s in self._sessions.values())), default=None)

    # -- sessions --------------------------------------------------------------------------------

    def _session(self, tenant: str) -> TenantSession | None:
        """The session of a tenant, with its first request or control; None if there is no room."""
        session = self._sessions.get(tenant)
        if session is not None:
            return session
        session = self._open_session(tenant)
        if session is None:
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
            self._provide(session)
        except BusError as error:
            self._lose_bus(error)
        session.introduce()
        session.tell_pressure()  # the next report may be long in coming
        return session

    def _provide(self, session: TenantSession) -> None:
        for subject, provider in session.providers().items():
            self._bus.provide_snapshots(subject, provider)

    def _withdraw(self, session: TenantSession) -> None:
        for subject, provider in session.providers().items():
            self._bus.withdraw_snapshots(subject, provider)

    def _open_session(self, tenant: str) -> TenantSession | None:
        if not can_be_named(tenant):
            return None
        if len(self._sessions) >= self._max_tenants and not self._make_room():
            return None
        session = self._sessions[tenant] = TenantSession(
            tenant,
            engine=self.name,
            backend=self._backend,
            epoch=self.epoch,
            ranks=self._ranks,
            ended=() if self._operation_log is None else self._operation_log.ended(tenant),
            endpoint=self._endpoint,
            send=self._send,
            keep=self._keep,
            above=self._above(),
        )
        return session

    def _make_room(self) -> bool:
        """Close the session that has been idle longest; False if none has been for long."""
        others = (s for tenant, s in self._sessions.items() if tenant not in self._staying)
        idle = min(others, key=lambda session: session.idle_since, default=None)
        if idle is None or idle.idle_since > trio.current_time() - IDLE_S:
            return False
        self._gave_way = True
        del self._sessions[idle.tenant]
        self._withdraw(idle)
        _log.info("tenant.gave_way", engine=self.name, tenant=idle.tenant)
        return True

    def _above(self) -> int:
        """What the messages of a new session are numbered from.

        Its tenant may have had one before, whose numbers must not come again. The time gives higher
        ones, and tells a tenant nothing of what others were told.
        """
        if not self._gave_way:
            return 0
        return int((trio.current_time() - self._begun_s) * NUMBERS_A_SECOND)

    def _keep(self, tenant: str, actions: Actions) -> None:
        """Write down what is about to be told and done."""
        if self._operation_log is None:
            return
        try:
            for answer in actions.outcomes:
                self._operation_log.note(answer, tenant)
            for operation in actions.apply:
                kind = str(operation.control.__struct_config__.tag)
                self._operation_log.begin(operation.key, kind, tenant)
        except OSError as error:
            # The engine serves on; what is lost is the memory of a worker that comes after.
            path, self._operation_log = self._operation_log.path, None
            _log.error("operation_log.lost", engine=self.name, path=str(path), error=str(error))

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
