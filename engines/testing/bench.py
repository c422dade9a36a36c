"""The bench on which the rules of ``hear.engines.testing`` put an engine.

It joins a backend to a bus of its own by the real worker, says what harnesses and policies say,
and notes everything that the worker publishes at the moment when it does.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import trio

from hear.app import plugins
from hear.blocks import unpack
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engine_view import EngineViews
from hear.engines.testing.audit import check_applied, check_operation
from hear.engines.testing.setup import (
    EngineFactory,
    EngineUnderTest,
    WatchedBackend,
    Wire,
    fail,
    require,
)
from hear.engines.worker.loop import EngineWorker
from hear.interfaces import Bus, InferenceRequest, InferenceResult
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    Control,
    Envelope,
    Key,
    Message,
    OperationOutcome,
    RequestOutcome,
    ResidencyChanged,
    WaitingRequest,
)
from hear.operation import TERMINAL

POLL_S = 0.05


def name_of(id: str, tenant: str) -> str:
    """What the bench calls a request or an operation: its id, and its tenant if it is another."""
    return id if tenant == DEFAULT_TENANT else f"{id} of {tenant}"


@dataclass(eq=False, slots=True)
class Call:
    """A request that a client has sent. ``leave`` lets the client go away."""

    request: InferenceRequest
    result: InferenceResult | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def name(self) -> str:
        """What the bench calls it."""
        return name_of(self.request.id, self.request.tenant)

    def leave(self) -> None:
        """The client goes away."""
        self.scope.cancel()

    @property
    def ended(self) -> InferenceResult:
        """The result of a call that has ended."""
        if self.result is None:
            fail(f"request {self.name} has not ended")
        return self.result


class Bench:
    """An engine on a bus, with everything that the rules want to do and to know.

    Where nothing else is said, requests, controls and what is told are of the default tenant. What
    was heard is kept by the names that ``name_of`` makes.
    """

    def __init__(
        self,
        engine: EngineUnderTest,
        bus: Bus,
        bus_stack: AsyncExitStack,
        nursery: trio.Nursery,
        ranks: dict[str, int],
    ) -> None:
        self.engine = engine
        self.name = engine.name
        self.backend = WatchedBackend(engine)
        self.bus = Wire(bus, self._seen)
        self.worker = EngineWorker(
            self.bus, self.backend, name=engine.name, ranks=ranks, restart_delay_s=engine.quiet_s
        )
        self.capabilities = engine.backend.capabilities()
        self.published: list[Envelope] = []
        self.heard: dict[str, list[OperationOutcome]] = {}
        self.requests: dict[str, list[RequestOutcome]] = {}
        self._num_calls: Counter[str] = Counter()  # by name, which a later one may have again
        self.sent: dict[str, Envelope] = {}
        self._bus_stack = bus_stack
        self._nursery = nursery
        self._sequencers: dict[tuple[str, str], Sequencer] = {}
        self._probes: dict[str, Callable[[], None]] = {}
        self._probe_failures: list[AssertionError] = []
        self._news = trio.Event()
        self._worker_scope = trio.CancelScope()
        self._worker_ended = trio.Event()

    # -- the engine and its worker ------------------------------------------------------------

    async def _work(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            with self._worker_scope:
                await self.worker.run(task_status)
        finally:
            self._worker_ended.set()

    async def stop_worker(self) -> None:
        """End the worker as its launcher would."""
        self._worker_scope.cancel()
        await self._worker_ended.wait()

    async def crash(self) -> None:
        """Kill the engine, and wait until it is back."""
        assert self.engine.crash is not None
        before = self.worker.epoch
        self.engine.crash()
        await self.until(lambda: self.worker.epoch > before, "a crash begins a new epoch")

    async def lose_bus(self) -> None:
        """Close the bus under everybody's feet."""
        await self._bus_stack.aclose()

    def claims(self, kind: str) -> bool:
        """Whether the engine says that it takes a control; two every worker does."""
        return self.has(kind) or kind in self.capabilities.at_submission

    def has(self, kind: str) -> bool:
        """Whether it carries a control out whenever it comes, and not only before its request."""
        return kind in (*self.capabilities.controls, "cancel", "withdraw")

    def tier_size(self, tier: str) -> int:
        """How many blocks a tier has room for; 0 if there is none of that name."""
        return next((t.num_blocks for t in self.capabilities.tiers if t.name == tier), 0)

    def resident(self, tier: str, tenant: str = DEFAULT_TENANT) -> set[int]:
        """The blocks of a tenant that a tier holds now."""
        return {
            block
            for chain in self.engine.backend.residency(tenant)
            if chain.tier == tier
            for block in unpack(chain.prefix_hashes)
        }

    def waiting(self, tenant: str = DEFAULT_TENANT) -> dict[str, WaitingRequest]:
        """The requests of a tenant that wait now, in the engine's order."""
        return {w.request: w for w in self.engine.backend.queue(tenant).waiting}

    # -- what is published --------------------------------------------------------------------

    def _seen(self, envelope: Envelope) -> None:
        self.published.append(envelope)
        message = open_body(envelope) if envelope.category == "outcome" else None
        if isinstance(message, OperationOutcome):
            operation = name_of(envelope.key.operation or "", envelope.tenant)
            first = not any(o.status in TERMINAL for o in self.heard.get(operation, ()))
            self.heard.setdefault(operation, []).append(message)
            probe = self._probes.get(operation)
            if probe is not None and first and message.status == "completed":
                try:
                    probe()
                except AssertionError as error:
                    self._probe_failures.append(error)
        elif isinstance(message, RequestOutcome):
            request = name_of(envelope.key.request or "", envelope.tenant)
            self.requests.setdefault(request, []).append(message)
        self._news.set()
        self._news = trio.Event()

    def states(self, tenant: str = DEFAULT_TENANT) -> list[Envelope]:
        """The state messages to a tenant so far."""
        return [e for e in self.published if e.category == "state" and e.tenant == tenant]

    def views(self) -> EngineViews:
        """What a reader believes who has heard all that was published to its tenant."""
        views = EngineViews()
        for envelope in self.states():
            message = open_body(envelope)
            assert message is not None
            views.apply(envelope, message)
        return views

    async def until(
        self, condition: Callable[[], bool], what: str, *, patience_s: float | None = None
    ) -> None:
        """Wait for something that should happen."""
        patience_s = self.engine.patience_s if patience_s is None else patience_s
        with trio.move_on_after(patience_s):
            while not condition():
                with trio.move_on_after(POLL_S):
                    await self._news.wait()
            return
        fail(f"{what}: not within {patience_s} s")

    async def quiet(self, times: float = 1.0) -> None:
        """Let some time pass."""
        await trio.sleep(times * self.engine.quiet_s)

    # -- controls -----------------------------------------------------------------------------

    def sequencer(self, source: str, tenant: str = DEFAULT_TENANT) -> Sequencer:
        """The numbers of one sender."""
        made = Sequencer(source, tenant=tenant)
        return self._sequencers.setdefault((source, tenant), made)

    def say(
        self, message: Message, *, key: Key, by: str = "harness", tenant: str = DEFAULT_TENANT
    ) -> Envelope:
        """Publish any message."""
        envelope = self.sequencer(by, tenant).wrap(message, key, trio.current_time())
        self.bus.publish(envelope)
        return envelope

    def send(
        self,
        control: Control,
        *,
        by: str = "policy",
        request: str | None = None,
        context: str | None = None,
        version: int | None = None,
        tenant: str = DEFAULT_TENANT,
        id: str | None = None,
        probe: Callable[[], None] | None = None,
    ) -> str:
        """Send a control; ``probe`` is asked in the moment in which it is said to be completed.

        Returns what the bench calls the operation, which has ``id`` or a new one.
        """
        operation = id or self.sequencer(by, tenant).next_id()
        name = name_of(operation, tenant)
        if probe is not None:
            self._probes[name] = probe
        key = Key(
            request=request,
            context=context,
            context_version=version,
            engine=self.name,
            operation=operation,
        )
        self.sent[name] = self.say(control, key=key, by=by, tenant=tenant)
        return name

    def send_again(self, operation: str) -> None:
        """Deliver a control once more."""
        self.bus.publish(self.sent[operation])

    def outcome(self, operation: str) -> OperationOutcome | None:
        """The terminal outcome of an operation, if it has one."""
        return next((o for o in self.heard.get(operation, ()) if o.status in TERMINAL), None)

    async def accepted(self, operation: str) -> None:
        """Wait until an operation is accepted."""
        await self.until(
            lambda: operation in self.heard,
            f"{self._name(operation)} is answered",
        )
        first = self.heard[operation][0]
        require(first.status == "accepted", f"{self._name(operation)}: accepted, not {first}")

    async def end_of(
        self, operation: str, status: str = "", reason: str | None = None
    ) -> OperationOutcome:
        """Wait for the terminal outcome of an operation, and check what it says."""
        name = self._name(operation)
        await self.until(lambda: self.outcome(operation) is not None, f"{name} ends")
        outcome = self.outcome(operation)
        assert outcome is not None
        if self._probe_failures:
            raise self._probe_failures[0]
        require(not status or outcome.status == status, f"{name}: {status}, not {outcome}")
        require(reason is None or outcome.reason == reason, f"{name}: {reason}, not {outcome}")
        return outcome

    def _name(self, operation: str) -> str:
        envelope = self.sent[operation]
        return f"{envelope.kind} {operation} of {envelope.source}"

    # -- requests -----------------------------------------------------------------------------

    def request(
        self,
        id: str,
        *,
        context: str,
        num_blocks: int = 1,
        output_tokens: int = 1,
        version: int | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> InferenceRequest:
        """Make a request."""
        made = self.engine.make_request(
            id, context=context, num_blocks=num_blocks, output_tokens=output_tokens
        )
        if version is not None:
            made = replace(made, context_version=version)
        return made if tenant == DEFAULT_TENANT else self.engine.of_tenant(made, tenant)

    async def order_of(self, calls: Sequence[Call]) -> list[str]:
        """The ids of requests of contexts that were new, in the order in which the engine computed
        their prompts.

        It is told by the blocks that the engine stored. A client's clock is taken only where an
        engine tells of none: to a client that was kept from running all answers come at once.
        """
        results = {call.request.id: await self.result(call) for call in calls}
        if "residency" in self.engine.shows:
            if len(self._stored_order(calls)) < len(calls):
                await self.quiet()  # the engine tells of blocks later than it answers
            order = self._stored_order(calls)
            if len(order) == len(calls):
                return order
        return sorted(results, key=lambda id: results[id].first_token_s)

    def _stored_order(self, calls: Sequence[Call]) -> list[str]:
        whose = {call.request.prompt_hashes[0]: call.request.id for call in calls}
        stored = (
            whose.get(block)
            for envelope in self.states()
            if isinstance(message := open_body(envelope), ResidencyChanged)
            for change in message.changes
            if isinstance(change, BlocksStored)
            for block in unpack(change.prefix_hashes)
        )
        return list(dict.fromkeys(filter(None, stored)))

    async def launch(self, request: InferenceRequest) -> Call:
        """Send a request, and wait until the engine has it."""
        call = Call(request)
        before = len(self.requests.get(call.name, ()))
        self.start(call)
        await self.until(
            lambda: len(self.requests.get(call.name, ())) > before or call.result is not None,
            f"request {call.name} is accepted",
        )
        return call

    def start(self, call: Call) -> None:
        """Send a request, and wait for nothing."""
        self._nursery.start_soon(self.make_call, call)

    async def make_call(self, call: Call) -> None:
        """Be the client of a request until it ends."""
        self._num_calls[call.name] += 1
        with call.scope:
            call.result = await self.engine.client.generate(call.request)
        self._news.set()
        self._news = trio.Event()

    async def result(self, call: Call) -> InferenceResult:
        """Wait for the end of a request."""
        await self.until(lambda: call.result is not None, f"request {call.name} ends")
        return call.ended

    async def serve(
        self,
        id: str,
        *,
        context: str,
        num_blocks: int = 1,
        output_tokens: int = 1,
        tenant: str = DEFAULT_TENANT,
    ) -> InferenceResult:
        """Send a request, and see it completed."""
        made = self.request(
            id, context=context, num_blocks=num_blocks, output_tokens=output_tokens, tenant=tenant
        )
        call = await self.launch(made)
        result = await self.result(call)
        name = call.name
        require(result.outcome.status == "completed", f"request {name} completes: {result.outcome}")
        await self.until(
            lambda: any(o.status == "completed" for o in self.requests.get(name, ())),
            f"the outcome of request {name} is published",
        )
        return result

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[Call]:
        """Keep the engine busy with one long request, so that all others wait."""
        id = f"busy-{len(self.requests)}"
        long = self.request(id, context=id, output_tokens=self.engine.long_output_tokens)
        call = await self.launch(long)
        if "queue" in self.engine.shows:
            await self.until(
                lambda: any(r.request == id for r in self.engine.backend.queue().running),
                "a request runs on an idle engine",
            )
        else:
            await self.quiet()
        yield call
        require(call.result is None, "the long request is long enough (long_output_tokens)")
        call.leave()

    async def press(self, done: Callable[[], bool], what: str, *, most: int = 64) -> None:
        """Serve one new context after the other, until something has been evicted."""
        num_blocks = self.quarter
        for number in range(most):
            if done():
                return
            id = f"pressure-{len(self.requests)}-{number}"
            await self.serve(id, context=id, num_blocks=num_blocks)
        require(done(), what)

    @property
    def quarter(self) -> int:
        """A quarter of the GPU's blocks, less room for what is not a whole block."""
        size = self.tier_size("gpu")
        if "residency" not in self.engine.shows:
            return 2
        require(size >= 12, f"the engine on the bench has 12 blocks or more, not {size}")
        return size // 4 - 1

    async def audit(self) -> None:
        """Stop, and check what holds whatever was done."""
        await self.stop_worker()
        if self._probe_failures:
            raise self._probe_failures[0]
        for operation, envelope in self.sent.items():
            check_operation(f"{envelope.kind} {operation}", self.heard.get(operation, ()))
        check_applied(self.backend.applied)
        for request, outcomes in self.requests.items():
            ends = [o for o in outcomes if o.status != "accepted"]
            most = max(1, self._num_calls[request])
            require(len(ends) <= most, f"request {request} ends once, not as {ends}")


BusFactory = Callable[[], AbstractAsyncContextManager[Bus]]


def memory_bus() -> AbstractAsyncContextManager[Bus]:
    """The bus in one process, found as a plug-in, since a wing imports no other."""
    made: AbstractAsyncContextManager[Bus] = plugins.load_installed("buses", "memory")()
    return made


@asynccontextmanager
async def bench(
    factory: EngineFactory,
    *,
    ranks: dict[str, int] | None = None,
    make_bus: BusFactory = memory_bus,
) -> AsyncIterator[Bench]:
    """Put an engine on the bench; at the end it is audited."""
    async with factory() as engine, AsyncExitStack() as stack:
        bus = await stack.enter_async_context(make_bus())
        async with trio.open_nursery() as nursery:
            made = Bench(engine, bus, stack, nursery, ranks or {})
            await nursery.start(made._work)
            yield made
            await made.audit()
            nursery.cancel_scope.cancel()
