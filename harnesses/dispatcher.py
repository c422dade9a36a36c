"""A pool: one name in front of several engines, which finds each request the engine to go to.

On the data path it is an ``InferenceClient`` like the engines behind it. On the bus it is a serving
instance of its own that takes one kind of control, ``Route``: ``hear.intake`` keeps, arbitrates and
answers them as it does for an engine. A request is held for a few milliseconds, in which policies
may say where it should go; if none does, or there is no bus, it goes where it would have gone
without them: to the engines in turn. It must not know what makes an engine a good choice.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace as replaced

import structlog
import trio
from msgspec.structs import replace

from hear.control_reader import ControlReader
from hear.delivery import Sequencer
from hear.errors import BusError, ConfigError, EngineError
from hear.intake import Intake, Step
from hear.messages import (
    DEFAULT_TENANT,
    Cancel,
    CapabilitiesReported,
    Envelope,
    Key,
    Message,
    OperationOutcome,
    Route,
    Withdraw,
)
from hear.operation import Operation
from hear.seams import (
    Bus,
    InferenceClient,
    InferenceRequest,
    InferenceResult,
    OperationEnded,
    Verdict,
)
from hear.subjects import stem

_log = structlog.get_logger("hear.dispatcher")

ROUTE_WAIT_S = 0.005
"""How long a request waits for a first route."""

SETTLE_S = 0.001
"""How long after the first route others may still prevail over it."""


class _Held:
    """A request from its arrival to its end. ``route`` is what has prevailed so far."""

    __slots__ = ("engine", "route", "routed")

    def __init__(self) -> None:
        self.routed = trio.Event()
        self.route: Operation | None = None
        self.engine: str | None = None


class Dispatcher:
    """Sends requests on to one of several engines. ``run`` joins the bus; without it none is heard.

    An engine that refuses or fails a request ends it: the dispatcher sends no request twice.
    """

    def __init__(
        self,
        bus: Bus | None,
        engines: Mapping[str, InferenceClient],
        *,
        name: str = "pool",
        ranks: dict[str, int] | None = None,
        tenant: str = DEFAULT_TENANT,
        epoch: int = 1,
        route_wait_s: float = ROUTE_WAIT_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        """Stand in front of ``engines``, by the names that they have on the bus.

        Args:
            bus: where routes come from; None if there is none.
            engines: at least one. What is added or taken away later counts from then on.
            name: the ``engine`` by which a harness describes a request that has yet to be routed.
            ranks: the rank of policies (by source) in arbitration; higher prevails.
            tenant: whose requests it sends on, and whose routes it hears.
            epoch: the incarnation of ``name``, as for a worker.
            route_wait_s: how long at most a request waits for routes.
            settle_s: how long, within that, it waits after the first.

        Raises:
            ConfigError: there is no engine, or one has the name of the pool.
        """
        if not engines or name in engines:
            raise ConfigError(
                f"pool {name!r} of {', '.join(engines) or 'no engine'}: expected one engine or "
                "more, of other names"
            )
        self.name = name
        self._bus = bus
        self._engines = engines
        self._key = Key(engine=name)
        self._tenant = tenant
        self._sequencer = Sequencer(name, epoch, tenant)
        self._intake = Intake(engine=name, controls=("route",), ranks=ranks, epoch=epoch)
        self._route_wait_s = route_wait_s
        self._settle_s = settle_s
        self._held: dict[str, _Held] = {}
        self._turn = 0
        self._listening = False

    @property
    def num_open(self) -> int:
        """Operations without a terminal outcome."""
        return len(self._intake.open_operations)

    # -- the data path ------------------------------------------------------------------------

    async def generate(
        self, request: InferenceRequest, *, on_routed: Callable[[str], None] = lambda engine: None
    ) -> InferenceResult:
        """Serve one request on one of the engines; ``on_routed`` is told which before it is sent.

        Raises:
            EngineError: a request of that id is being served, it is of another tenant than the
                pool, there is no engine left, or the engine raises it.
        """
        sent_s = trio.current_time()
        if request.tenant != self._tenant:
            raise EngineError(
                f"request {request.id!r} is of tenant {request.tenant!r:.80}, and this pool of "
                f"{self._tenant!r}"
            )
        if request.id in self._held:
            raise EngineError(f"request {request.id!r} is being served already")
        held = self._held[request.id] = _Held()
        key = Key(
            request=request.id, context=request.context, context_version=request.context_version
        )
        try:
            self._carry_out(self._intake.request_arrived(key, sent_s))
            await self._wait_for_routes(held)
            held.engine = self._send_off(held)
            on_routed(held.engine)
            result = await self._engines[held.engine].generate(request)
        finally:
            del self._held[request.id]
            self._carry_out(self._intake.request_ended(request.id, trio.current_time()))
        return replaced(result, sent_s=sent_s)

    async def _wait_for_routes(self, held: _Held) -> None:
        if not self._listening:
            await trio.lowlevel.checkpoint()
            return
        with trio.move_on_after(self._route_wait_s):
            await held.routed.wait()
            await trio.sleep(self._settle_s)

    def _send_off(self, held: _Held) -> str:
        """Choose the engine, and tell who asked for it."""
        route, held.route = held.route, None
        found = self._find(route) if route is not None else None
        if route is not None:
            if found is None:  # it has gone since
                outcome = OperationOutcome(
                    status="failed", control="route", reason="unknown_engine"
                )
            else:
                engine, is_fallback = found
                outcome = OperationOutcome(
                    status="completed",
                    control="route",
                    detail=engine,
                    fallback=engine if is_fallback else None,
                )
            self._carry_out(self._intake.ended(OperationEnded(route.id, outcome)))
        return found[0] if found is not None else self._next_in_turn()

    def _next_in_turn(self) -> str:
        names = list(self._engines)
        if not names:
            raise EngineError(f"{self.name} has no engine left")
        self._turn += 1
        return names[(self._turn - 1) % len(names)]

    # -- routes -------------------------------------------------------------------------------

    def _find(self, route: Operation) -> tuple[str, bool] | None:
        """The first engine that is there, and whether it is one of ``fallback``."""
        control = route.control
        assert isinstance(control, Route)
        for engine in control.targets:
            if engine in self._engines:
                return engine, False
        for engine in control.fallback:
            if engine in self._engines:
                return engine, True
        return None

    def _apply(self, operation: Operation) -> Verdict:
        if isinstance(operation.control, Cancel | Withdraw):
            return Verdict("completed")  # what it ends was reverted before
        held = self._held[operation.key.request or ""]
        if held.engine is not None:
            return Verdict("rejected", "already_routed", held.engine)
        if self._find(operation) is None:
            return Verdict("rejected", "unknown_engine", f"expected {', '.join(self._engines)}")
        held.route = operation
        held.routed.set()
        return Verdict("accepted")

    def _revert(self, operation: Operation) -> None:
        held = self._held.get(operation.key.request or "")
        if held is not None and held.route is operation:
            held.route = None

    def _carry_out(self, step: Step) -> None:
        for operation in step.revert:
            self._revert(operation)
        for answer in step.answers:
            key = answer.key
            self._publish(answer.outcome, key if key.engine else replace(key, engine=self.name))
        for operation in step.apply:
            self._carry_out(self._intake.applied(operation, self._apply(operation)))

    def take_in(self, envelope: Envelope, now: float) -> None:
        """Take in one control."""
        self._carry_out(self._intake.receive(envelope, now))

    def expire(self, now: float) -> None:
        """End what has passed its deadline."""
        self._carry_out(self._intake.expire(now))

    def next_expiry(self) -> float | None:
        """When ``expire`` has to be called next."""
        return self._intake.next_expiry()

    # -- the bus ------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take routes in until cancelled; then whatever is open ends ``failed: engine_stopped``.

        If the bus is lost, requests go to the engines in turn, and nobody is told.

        Raises:
            BusError: the bus cannot be joined.
        """
        if self._bus is None:
            raise BusError(f"{self.name}: there is no bus to join")
        subject = stem("state", self._tenant, self._key, "capabilities_reported")
        self._bus.provide_snapshots(subject, self._capabilities)
        async with ControlReader(self._bus, self, tenant=self._tenant) as controls:
            self._listening = True
            self.announce()
            try:
                task_status.started()
                await controls.run()
            except BusError as error:
                self._lose_bus(error)
                await trio.sleep_forever()
            finally:
                self._carry_out(self._intake.shut("engine_stopped"))
                self._listening = False
                for held in self._held.values():
                    held.route = None

    def _capabilities(self) -> list[Envelope]:
        offered = CapabilitiesReported(controls=("route",), targets=tuple(self._engines))
        return [self._sequencer.wrap_snapshot(offered, self._key, trio.current_time())]

    def announce(self) -> None:
        """Tell which engines there are now. To be called after they have changed."""
        for envelope in self._capabilities():
            self._send(envelope)

    def _publish(self, message: Message, key: Key) -> None:
        self._send(self._sequencer.wrap(message, key, trio.current_time()))

    def _send(self, envelope: Envelope) -> None:
        if self._bus is None:
            return
        try:
            self._bus.publish(envelope)
        except BusError as error:
            self._lose_bus(error)

    def _lose_bus(self, error: BusError) -> None:
        if self._listening:
            self._listening = False
            _log.error("bus.lost", engine=self.name, error=str(error))
