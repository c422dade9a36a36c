"""A storm for an engine: senders at odds, a link that loses, doubles and delays, and crashes.

``weather`` lets a ``Storm`` pass over an engine and checks what has to hold through all of it: each
operation ends once at its sender, none acts twice, each request ends, and the engine is in order.
It draws nothing by chance: what happens, and what becomes of each message, stands in the storm.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from math import inf

import msgspec
import trio

from hear.codec import KINDS, open_body
from hear.delivery import Sequencer
from hear.engines.testing.audit import check_applied, check_operation
from hear.engines.testing.bench import Bench, Call, bench, memory_bus
from hear.engines.testing.setup import EngineFactory, require
from hear.interfaces import Bus, BusStatistics, SnapshotProvider, Subscription
from hear.messages import DEFAULT_TENANT, Cancel, Control, Envelope, Key, OperationOutcome, Withdraw
from hear.operation import Operation
from hear.sender_operations import SenderOperations

GIVE_UP_S = 30.0
"""How long a sender waits for the end of an operation."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A sender sends a control, whose deadline counts from here. A Cancel aims at ``target``.

    What it is about is of the sender's tenant.
    """

    at_s: float
    sender: int
    control: Control
    request: int | None = None
    context: int | None = None
    version: int | None = None
    target: int = 0


@dataclass(frozen=True, slots=True)
class Requested:
    """A client sends a request, and goes away after ``leaves_s``, if it has not ended by then.

    It is of one of the tenants of the storm, and has the next number among its requests.
    """

    at_s: float
    context: int
    num_blocks: int
    output_tokens: int
    version: int | None = None
    leaves_s: float = inf
    tenant: int = 0


@dataclass(frozen=True, slots=True)
class Crashed:
    """The engine crashes."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Storm:
    """What happens, and what becomes of the messages on the link.

    ``fates`` are used up in turn, one for each control and outcome: the delays of its copies, none
    if it is lost. After the last of them the link is calm. Senders are of the tenants in turn; they
    and requests and contexts have the same names with each.
    """

    events: tuple[Sent | Requested | Crashed, ...]
    fates: tuple[tuple[float, ...], ...] = ()
    num_senders: int = 3
    tenants: tuple[str, ...] = (DEFAULT_TENANT,)


@dataclass(frozen=True, slots=True)
class Aftermath:
    """How operations and requests ended, counted as ``status: reason``."""

    operations: Counter[str]
    requests: Counter[str]


class _Link:
    """A bus that treats controls and outcomes as their fates have it."""

    def __init__(self, bus: Bus, nursery: trio.Nursery, storm: Storm) -> None:
        self._bus = bus
        self._nursery = nursery
        self._fates = chain(storm.fates, repeat((0.0,)))

    def publish(self, envelope: Envelope) -> None:
        if envelope.category not in ("control", "outcome"):
            self._bus.publish(envelope)
            return
        for delay_s in next(self._fates):
            self._nursery.start_soon(self._later, delay_s, envelope)

    async def _later(self, delay_s: float, envelope: Envelope) -> None:
        await trio.sleep(delay_s)
        self._bus.publish(envelope)

    def subscribe(
        self, patterns: Iterable[str], *, name: str, capacity: int = 4096
    ) -> Subscription:
        return self._bus.subscribe(patterns, name=name, capacity=capacity)

    def provide_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        self._bus.provide_snapshots(subject, provider)

    def withdraw_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        self._bus.withdraw_snapshots(subject, provider)

    def set_will(self, source: str, envelopes: Iterable[Envelope]) -> None:
        self._bus.set_will(source, envelopes)

    def statistics(self) -> BusStatistics:
        return self._bus.statistics()


class _Sender:
    """A policy's side: it sends again until it is answered, and notes how its operations end."""

    def __init__(self, b: Bench, name: str, tenant: str) -> None:
        self._b = b
        self.name = name
        self.tenant = tenant
        self.sender_operations = SenderOperations(first_retry_s=0.5)
        self.sequencer = Sequencer(name, tenant=tenant)
        self.operations: list[Operation] = []
        self.ends: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._news = trio.Event()

    def send(self, control: Control, **key: str | int | None) -> None:
        now = trio.current_time()
        full = Key(engine=self._b.name, operation=self.sequencer.next_id(), **key)  # type: ignore[arg-type]
        envelope = self.sequencer.wrap(control, full, now)
        self.operations.append(
            self.sender_operations.submit(envelope, control, now, now + GIVE_UP_S)
        )
        self._b.bus.publish(envelope)
        self._news.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        patterns = [f"outcome.{self.tenant}.>", f"state.{self.tenant}.*.capabilities.>"]
        async with (
            self._b.bus.subscribe(patterns, name=self.name) as messages,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._send_again)
            task_status.started()
            while True:
                for envelope in await messages.receive():
                    self._hear(envelope)

    async def _send_again(self) -> None:
        while True:
            again, lost = self.sender_operations.due(trio.current_time())
            self._end(lost, "failed: no_answer")
            for envelope in again:
                self._b.bus.publish(envelope)
            self._news = trio.Event()
            with trio.move_on_at(self.sender_operations.next_due() or inf):
                await self._news.wait()

    def _hear(self, envelope: Envelope) -> None:
        if envelope.category == "state":
            now = trio.current_time()
            for again in self.sender_operations.hear_epoch(self._b.name, envelope.epoch, now):
                self._b.bus.publish(again)
            return
        message = open_body(envelope)
        if isinstance(message, OperationOutcome):
            moved = self.sender_operations.hear(envelope.key, message)
            if moved is not None and moved.terminal:
                self._end([moved], f"{moved.phase}: {message.reason}".removesuffix(": "))

    def _end(self, operations: Iterable[Operation], why: str) -> None:
        for operation in operations:
            self.ends[operation.id] += 1
            self.reasons[why] += 1


async def weather(factory: EngineFactory, storm: Storm) -> Aftermath:
    """Let a storm pass over an engine.

    Raises:
        AssertionError: something did not hold; perhaps inside a group of exceptions.
    """

    @asynccontextmanager
    async def stormy_bus() -> AsyncIterator[Bus]:
        async with memory_bus() as bus, trio.open_nursery() as nursery:
            yield _Link(bus, nursery, storm)
            nursery.cancel_scope.cancel()

    ranks = {f"sender{n}": n % 2 for n in range(storm.num_senders)}
    async with bench(factory, ranks=ranks, make_bus=stormy_bus) as b:
        async with trio.open_nursery() as nursery:
            senders = [
                _Sender(b, f"sender{n}", storm.tenants[n % len(storm.tenants)])
                for n in range(storm.num_senders)
            ]
            for sender in senders:
                await nursery.start(sender.run)
            calls = await _play(b, storm, senders, nursery)
            await _calm_down(b, senders, calls)
            nursery.cancel_scope.cancel()
        return _take_stock(b, senders, calls)


async def _play(
    b: Bench, storm: Storm, senders: list[_Sender], nursery: trio.Nursery
) -> list[Call]:
    start_s = trio.current_time()
    calls: list[Call] = []
    numbers = Counter[str]()
    for event in sorted(storm.events, key=lambda event: event.at_s):
        await trio.sleep_until(start_s + event.at_s)
        if isinstance(event, Crashed):
            assert b.engine.crash is not None
            b.engine.crash()
        elif isinstance(event, Requested):
            tenant = storm.tenants[event.tenant % len(storm.tenants)]
            request = b.request(
                f"r{numbers[tenant]}",
                context=f"c{event.context}",
                num_blocks=event.num_blocks,
                output_tokens=event.output_tokens,
                version=event.version,
                tenant=tenant,
            )
            numbers[tenant] += 1
            call = Call(request)
            call.scope.deadline = trio.current_time() + event.leaves_s
            calls.append(call)
            nursery.start_soon(b.make_call, call)
        else:
            _send(senders[event.sender % len(senders)], event)
    return calls


def _send(sender: _Sender, event: Sent) -> None:
    control = event.control
    if isinstance(control, Cancel):
        known = sender.operations
        target = known[event.target % len(known)].id if known else "none"
        control = msgspec.structs.replace(control, target=target)
    if control.deadline_s is not None:
        control = msgspec.structs.replace(
            control, deadline_s=trio.current_time() + control.deadline_s
        )
    sender.send(
        control,
        request=None if event.request is None else f"r{event.request}",
        context=None if event.context is None else f"c{event.context}",
        context_version=event.version,
    )


async def _calm_down(b: Bench, senders: list[_Sender], calls: list[Call]) -> None:
    """Wait for all that is open to end, and let everybody leave in good order."""
    await b.quiet(3)  # the last crash has to be over
    await b.until(
        lambda: all(call.result is not None or call.scope.cancelled_caught for call in calls),
        "each request ends",
        patience_s=10 * GIVE_UP_S,
    )
    for _ in range(2):  # what was under way is sent, and then everybody withdraws on a calm link
        await b.until(
            lambda: not any(len(sender.sender_operations) for sender in senders),
            "each operation ends at its sender",
            patience_s=4 * GIVE_UP_S,
        )
        for sender in senders:
            sender.send(Withdraw())
    await b.until(
        lambda: not any(len(sender.sender_operations) for sender in senders),
        "each Withdraw ends",
        patience_s=4 * GIVE_UP_S,
    )
    await b.until(
        lambda: b.worker.num_open == 0,
        "nothing stays open at the engine when all have withdrawn",
        patience_s=4 * GIVE_UP_S,
    )
    b.engine.check()
    await b.serve("after", context="after")


def _take_stock(b: Bench, senders: list[_Sender], calls: list[Call]) -> Aftermath:
    operations: Counter[str] = Counter()
    for sender in senders:
        for operation in sender.operations:
            times = sender.ends[operation.id]
            require(times == 1, f"{operation!r} ends once at its sender, not {times} times")
        operations += sender.reasons
    for operation_id, heard in b.heard.items():
        kind = heard[0].control
        known = kind in KINDS or kind == ""
        require(known, f"the outcome of {operation_id} names its control, not {kind!r}")
        check_operation(f"{kind} {operation_id}", heard)
    check_applied(b.backend.applied)
    requests: Counter[str] = Counter()
    for call in calls:
        id = call.name
        told = b.requests.get(id, ())
        if not told and call.result is None:
            continue  # it came to an engine that was down, and left before that was back
        ends = [outcome for outcome in told if outcome.status != "accepted"]
        require(len(ends) == 1, f"request {id} has one end on the bus, not {ends}")
        if call.result is not None:
            seen, said = call.result.outcome.status, ends[0].status
            require(seen == said, f"request {id}: its client saw {seen}, and it is said {said}")
        requests[f"{ends[0].status}: {ends[0].reason}".removesuffix(": ")] += 1
    return Aftermath(operations, requests)
