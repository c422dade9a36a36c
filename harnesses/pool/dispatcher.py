"""A pool: one name in front of several engines, which finds each request the engine to go to.

On the data path it is an ``InferenceClient`` like the engines behind it. On the bus it is a serving
instance of its own that takes one kind of control, ``Route``: ``hear.engine_operations`` keeps,
arbitrates and answers them as it does for an engine. A request is held for a few milliseconds, in
which policies may say where it should go; if none does, or there is no bus, it goes where it would
have gone without them: to the engines in turn. It must not know what makes an engine a good choice.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as replaced
from math import inf

import structlog
import trio
from msgspec.structs import replace

from hear.app.control_reader import ControlReader
from hear.app.nursery import unwrapped
from hear.delivery import Sequencer
from hear.engine_operations import Actions, EngineOperations
from hear.errors import BusError, ConfigError, EngineError, UnservedError
from hear.interfaces import (
    ApplyResult,
    Bus,
    InferenceClient,
    InferenceRequest,
    InferenceResult,
    OperationEnded,
)
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
from hear.subjects import stem

_log = structlog.get_logger("hear.dispatcher")

ROUTE_WAIT_S = 0.005
"""How long a request waits for a first route where nobody routes."""

ROUTED_WAIT_S = 0.05
"""How long it waits while somebody does: a policy on a busy machine takes some milliseconds."""

ROUTED_S = 10.0
"""For how long after a route somebody is taken to route."""

SETTLE_S = 0.001
"""How long after the first route others may still prevail over it."""

OUT_S = 10.0
"""How long an engine that could not serve a request is not asked again."""


class _Held:
    """A request from its arrival to its end. ``route`` is what has prevailed so far."""

    __slots__ = ("engine", "route", "routed")

    def __init__(self) -> None:
        self.routed = trio.Event()
        self.route: Operation | None = None
        self.engine: str | None = None


class Dispatcher:
    """Sends requests on to one of several engines. ``run`` joins the bus; without it none is heard.

    A request that an engine refuses or fails has ended. One that an engine cannot have served,
    since it is not there or has gone before anything of an answer came, goes to the next target of
    its route, or to the engines in turn; to each once at most. The engine that failed it is *out*
    for ``out_s`` seconds: it is none of the targets that are announced, and is asked again then, or
    before if all are out.
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
        out_s: float = OUT_S,
    ) -> None:
        """Stand in front of ``engines``, by the names that they have on the bus.

        Args:
            bus: where routes come from; None if there is none.
            engines: at least one. What is added or taken away later counts from then on.
            name: the ``engine`` by which a harness describes a request that has yet to be routed.
            ranks: the rank of policies (by source) in arbitration; higher prevails.
            tenant: whose requests it sends on, and whose routes it hears.
            epoch: the incarnation of ``name``, as for a worker.
            route_wait_s: how long at most a request waits for routes; ``ROUTED_WAIT_S`` at
                least, if one came within the last ``ROUTED_S``.
            settle_s: how long, within that, it waits after the first.
            out_s: for how long an engine that could not serve a request is not asked again.

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
        self._operations = EngineOperations(
            engine=name, controls=("route",), ranks=ranks, epoch=epoch
        )
        self._route_wait_s = route_wait_s
        self._routed_s = -inf  # when the last route came
        self._settle_s = settle_s
        self._out_s = out_s
        self._out: dict[str, float] = {}  # engines that are out, until when
        self.unserved: Counter[str] = Counter()
        """Of each engine the requests that it could not serve, and others were asked to."""
        self._out_moved = trio.Event()
        self._held: dict[str, _Held] = {}
        self._turn = 0
        self._listening = False

    @property
    def num_open(self) -> int:
        """Operations without a terminal outcome."""
        return len(self._operations.open_operations)

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
            self._carry_out(self._operations.request_arrived(key, sent_s))
            await self._wait_for_routes(held)
            result = await self._serve(request, held, on_routed)
        finally:
            del self._held[request.id]
            self._carry_out(self._operations.request_ended(request.id, trio.current_time()))
        return replaced(result, sent_s=sent_s)

    async def _serve(
        self, request: InferenceRequest, held: _Held, on_routed: Callable[[str], None]
    ) -> InferenceResult:
        """Send a request to one engine after the other, until one has served it or refused to."""
        engine, targets = self._send_off(held)
        tried: set[str] = set()
        while True:
            held.engine = engine
            tried.add(engine)
            on_routed(engine)
            client = self._engines[engine]
            try:
                result = await client.generate(request)
            except UnservedError as error:
                self._put_out(engine, client, str(error))
                following = self._next_of(targets, tried)
                if following is None:
                    raise
            else:
                if not result.unserved:
                    self._come_back(engine)
                    return result
                self._put_out(engine, client, result.outcome.reason)
                following = self._next_of(targets, tried)
                if following is None:
                    return result
            engine = following

    # -- engines that are out -----------------------------------------------------------------

    def _put_out(self, engine: str, client: InferenceClient, why: str) -> None:
        self.unserved[engine] += 1
        if self._engines.get(engine) is not client:
            return  # it was taken away meanwhile, or another has its name
        was_out = engine in self._out
        self._out[engine] = trio.current_time() + self._out_s
        self._out_moved.set()
        if not was_out:
            _log.warning("engine.out", pool=self.name, engine=engine, why=why, out_s=self._out_s)
            self.announce()

    def _come_back(self, engine: str) -> None:
        if self._out.pop(engine, None) is not None:
            _log.info("engine.back", pool=self.name, engine=engine)
            self.announce()

    async def _let_back(self) -> None:
        """Announce engines as their time comes, also if no request does."""
        while True:
            self._out_moved = trio.Event()
            with trio.move_on_at(min(self._out.values(), default=inf)):
                await self._out_moved.wait()
            self._asked_again(trio.current_time())

    def _asked_again(self, now: float) -> None:
        """Let engines whose time is over be asked again."""
        over = [engine for engine, until in self._out.items() if until <= now]
        for engine in over:
            del self._out[engine]
        if over:
            self.announce()

    def _is_in(self, engine: str) -> bool:
        return engine in self._engines and engine not in self._out

    def _next_of(self, targets: Sequence[str], tried: set[str]) -> str | None:
        """Whom to ask next for a request: a target, else another; none of those that are out."""
        left = [engine for engine in targets if self._is_in(engine) and engine not in tried]
        if left:
            return left[0]
        others = [engine for engine in self._engines if self._is_in(engine) and engine not in tried]
        if not others:
            return None
        self._turn += 1
        return others[self._turn % len(others)]

    async def _wait_for_routes(self, held: _Held) -> None:
        if not self._listening:
            await trio.lowlevel.checkpoint()
            return
        wait_s = self._route_wait_s
        if trio.current_time() - self._routed_s < ROUTED_S:
            wait_s = max(wait_s, ROUTED_WAIT_S)
        with trio.move_on_after(wait_s):
            await held.routed.wait()
            await trio.sleep(self._settle_s)

    def _send_off(self, held: _Held) -> tuple[str, Sequence[str]]:
        """Choose the engine, and tell who asked for it; also all that its route names, in order."""
        route, held.route = held.route, None
        found = self._find(route) if route is not None else None
        targets: Sequence[str] = ()
        if route is not None:
            if found is None:  # it has gone since
                outcome = OperationOutcome(
                    status="failed", control="route", reason="unknown_engine"
                )
            else:
                engine, is_fallback = found
                assert isinstance(route.control, Route)
                targets = (*route.control.targets, *route.control.fallback)
                outcome = OperationOutcome(
                    status="completed",
                    control="route",
                    detail=engine,
                    fallback=engine if is_fallback else None,
                )
            self._carry_out(self._operations.ended(OperationEnded(route.id, outcome)))
        return (found[0] if found is not None else self._next_in_turn()), targets

    def _next_in_turn(self) -> str:
        self._asked_again(trio.current_time())
        names = [engine for engine in self._engines if self._is_in(engine)] or list(self._engines)
        if not names:
            raise EngineError(f"{self.name} has no engine left")
        self._turn += 1
        return names[(self._turn - 1) % len(names)]

    # -- routes -------------------------------------------------------------------------------

    def _find(self, route: Operation) -> tuple[str, bool] | None:
        """The first engine that is there, and whether it is one of ``fallback``."""
        control = route.control
        assert isinstance(control, Route)
        for there in (self._is_in, self._engines.__contains__):  # one that is out if need be
            for engine in control.targets:
                if there(engine):
                    return engine, False
            for engine in control.fallback:
                if there(engine):
                    return engine, True
        return None

    def _apply(self, operation: Operation) -> ApplyResult:
        if isinstance(operation.control, Cancel | Withdraw):
            return ApplyResult("completed")  # what it ends was reverted before
        self._routed_s = trio.current_time()
        held = self._held[operation.key.request or ""]
        if held.engine is not None:
            return ApplyResult("rejected", "already_routed", held.engine)
        if self._find(operation) is None:
            return ApplyResult("rejected", "unknown_engine", f"expected {', '.join(self._engines)}")
        held.route = operation
        held.routed.set()
        return ApplyResult("accepted")

    def _revert(self, operation: Operation) -> None:
        held = self._held.get(operation.key.request or "")
        if held is not None and held.route is operation:
            held.route = None

    def _carry_out(self, actions: Actions) -> None:
        for operation in actions.revert:
            self._revert(operation)
        for answer in actions.outcomes:
            key = answer.key
            self._publish(answer.outcome, key if key.engine else replace(key, engine=self.name))
        for operation in actions.apply:
            self._carry_out(self._operations.applied(operation, self._apply(operation)))

    def take_in(self, envelope: Envelope, now: float) -> None:
        """Take in one control."""
        self._carry_out(self._operations.receive(envelope, now))

    def expire(self, now: float) -> None:
        """End what has passed its deadline."""
        self._carry_out(self._operations.expire(now))

    def next_expiry(self) -> float | None:
        """When ``expire`` has to be called next."""
        return self._operations.next_expiry()

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
                with unwrapped():
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._let_back)
                        task_status.started()
                        await controls.run()
            except BusError as error:
                self._lose_bus(error)
                await trio.sleep_forever()
            finally:
                self._bus.withdraw_snapshots(subject, self._capabilities)
                self._carry_out(self._operations.shut("engine_stopped"))
                self._listening = False
                for held in self._held.values():
                    held.route = None

    def _capabilities(self) -> list[Envelope]:
        targets = tuple(filter(self._is_in, self._engines)) or tuple(self._engines)
        offered = CapabilitiesReported(controls=("route",), targets=targets)
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
