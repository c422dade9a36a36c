"""Checks that any implementation of ``hear.interfaces.Bus`` can be put through.

``check_bus`` runs them all; ``CHECKS`` lists them, so that a test suite can name each. A check
takes a factory and makes its own buses with it, raises ``AssertionError`` that says which promise
was broken, and waits on nothing but messages: it does the same in virtual and in real time.

It must not know which bus it checks, nor any test framework.
"""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial

import trio
import trio.testing

from hear.codec import open_body
from hear.delivery import SNAPSHOT_KINDS, Arrival, GapDetector, Sequencer
from hear.engine_view import EngineViews
from hear.errors import BusError, LaggedError
from hear.interfaces import Bus, Subscription, SubscriptionStatistics
from hear.messages import (
    DEFAULT_TENANT,
    Envelope,
    Key,
    Message,
    OperationOutcome,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    WaitingRequest,
)
from hear.subjects import channel, stem

BusFactory = Callable[[], AbstractAsyncContextManager[Bus]]
"""Makes a new bus that is closed when its context is left."""

Check = Callable[[BusFactory, int], Awaitable[None]]

TIMEOUT_S = 10.0
_STEP = 50


async def check_bus(factory: BusFactory, *, flood: int = 200) -> None:
    """Check that a bus keeps what ``hear.interfaces.Bus`` promises.

    ``flood`` is a number of messages that no buffer between a publisher and a reader who holds
    four holds in all: make it larger for a bus that has more of them on the way.

    Raises:
        AssertionError: a promise was broken; the message says which.
    """
    for check in CHECKS:
        await check(factory, flood)


class _Engine:
    """Publishes the queue of an engine, and what else is needed, under one source."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.name = name
        self.waiting: list[str] = []
        self._bus = bus
        self._sequencer = Sequencer(name)
        self._key = Key(engine=name)
        self._scope = stem("state", DEFAULT_TENANT, self._key, "queue_snapshot")

    def provide(self) -> None:
        self._bus.provide_snapshots(self._scope, self._snapshot)

    def withdraw(self) -> None:
        self._bus.withdraw_snapshots(self._scope, self._snapshot)

    def _snapshot(self) -> Iterable[Envelope]:
        message = QueueSnapshot(waiting=tuple(_waiting(r) for r in self.waiting))
        yield self._sequencer.wrap_snapshot(message, self._key, trio.current_time())

    def enqueue(self) -> None:
        request = f"{self.name}-r{len(self.waiting)}"
        self.waiting.append(request)
        self.say(QueueChanged(waiting=(_waiting(request),)))

    def outcome(self, operation: str) -> None:
        self.say(OperationOutcome(status="completed"), operation=operation)

    def say(self, message: Message, *, operation: str | None = None) -> None:
        key = Key(engine=self.name, operation=operation)
        self._bus.publish(self._sequencer.wrap(message, key, trio.current_time()))


def _waiting(request: str) -> WaitingRequest:
    return WaitingRequest(request=request, since_s=0.0)


class _Reader:
    """Reads a subscription as a policy would: gaps are noticed, snapshots asked for."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.views = EngineViews()
        self.heard: list[Envelope] = []

    async def read(self) -> None:
        for envelope in await _receive(self.subscription):
            self.heard.append(envelope)
            message = open_body(envelope)
            if envelope.category != "state" or message is None:
                continue
            if self.views.apply(envelope, message):
                self.subscription.request_snapshot(envelope)

    async def read_more(self, count: int, what: str) -> None:
        expected = len(self.heard) + count
        await self.read_until(what, lambda: len(self.heard) >= expected)

    async def read_until(self, what: str, done: Callable[[], bool]) -> None:
        with trio.move_on_after(TIMEOUT_S):
            while not done():
                await self.read()
        _require(done(), what)

    def agrees(self, engine: _Engine) -> bool:
        view = self.views.get(engine.name)
        return view is not None and view.queue_known and list(view.waiting) == engine.waiting


def _require(condition: bool, promise: str) -> None:
    if not condition:
        raise AssertionError(f"broken promise of the bus: {promise}")


async def _receive(subscription: Subscription) -> list[Envelope]:
    batch = list(await subscription.receive())
    _require(bool(batch), "receive returns at least one message")
    return batch


async def _collect(subscription: Subscription, count: int, what: str) -> list[Envelope]:
    heard: list[Envelope] = []
    with trio.move_on_after(TIMEOUT_S):
        while len(heard) < count:
            heard += await _receive(subscription)
    _require(len(heard) == count, f"{what}: {len(heard)} messages came, expected {count}")
    return heard


async def _until(condition: Callable[[], bool], promise: str) -> None:
    with trio.move_on_after(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - a bus has statistics, and no event for them
            await trio.sleep(0.001)
    _require(condition(), promise)


async def _refuses(subscription: Subscription, error: type[BusError], promise: str) -> None:
    """Check that receiving ends with an error, at once or after what was still unread."""
    with trio.move_on_after(TIMEOUT_S):
        try:
            while True:
                await subscription.receive()
        except error:
            return
    _require(False, promise)


def _row(bus: Bus, name: str) -> SubscriptionStatistics:
    rows = [row for row in bus.statistics().subscriptions if row.name == name]
    _require(len(rows) == 1, f"statistics have one row for subscription {name!r}")
    return rows[0]


async def _flood(publish: Callable[[], None], other: _Reader, count: int) -> None:
    """Publish more than a reader can hold who does not read, while another keeps up."""
    for number in range(1, count + 1):
        publish()
        if number % _STEP == 0 or number == count:
            await other.read_more(number % _STEP or _STEP, "a slow reader slows no other")


async def check_patterns(factory: BusFactory, flood: int) -> None:
    """A subscription gets what its patterns match, once, and nothing else."""
    cases: dict[str, tuple[list[str], set[str]]] = {
        "all": ([">"], {"a queue -", "b queue -", "a op 1", "b op 1", "b op 2"}),
        "category": (["state.>"], {"a queue -", "b queue -"}),
        "engine": (["*.*.a.>"], {"a queue -", "a op 1"}),
        "last token": (["outcome.default.*.operation_outcome.*"], {"a op 1", "b op 1", "b op 2"}),
        "key": (["outcome.*.*.*.1"], {"a op 1", "b op 1"}),
        "two, overlapping": (["*.*.a.>", "outcome.*.*.*.1"], {"a queue -", "a op 1", "b op 1"}),
        "too short": (["outcome.*.a", "outcome.*.a.*"], set()),
        "none": (["control.>"], set()),
    }
    for case, (patterns, expected) in cases.items():
        async with (
            factory() as bus,
            bus.subscribe([*patterns, "intent.*.end.>"], name=case) as subscription,
        ):
            # The last thing said shows that all before it has come.
            a, b = _Engine(bus, "a"), _Engine(bus, "b")
            a.enqueue()
            b.enqueue()
            a.outcome("1")
            b.outcome("1")
            b.outcome("2")
            end = Sequencer("harness").wrap(RequestDescribed(), Key(workflow="end"), 0.0)
            bus.publish(end)
            heard = await _collect(subscription, len(expected) + 1, f"patterns, {case}")
            got = [
                f"{e.source} {'queue' if e.category == 'state' else 'op'} {e.key.operation or '-'}"
                for e in heard
                if e.category != "intent"
            ]
            _require(
                sorted(got) == sorted(expected),
                f"patterns {patterns} ({case}): got {sorted(got)}, expected {sorted(expected)}",
            )


async def check_order(factory: BusFactory, flood: int) -> None:
    """Every reader gets all of each source and channel, in order, without holes."""
    async with factory() as bus, trio.open_nursery() as nursery:
        engines = [_Engine(bus, "a"), _Engine(bus, "b")]
        total = 8 * _STEP

        async def read(
            name: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
        ) -> None:
            detector = GapDetector()
            async with bus.subscribe([">"], name=name) as subscription:
                task_status.started()
                for envelope in await _collect(subscription, total, "order"):
                    arrival = detector.observe(envelope)
                    _require(
                        arrival is Arrival.NEXT,
                        f"order: {channel(envelope)} seq {envelope.seq} is {arrival.value} "
                        f"to reader {name!r}",
                    )

        for name in ("one", "two", "three"):
            await nursery.start(read, name)
        for number in range(total // 4):
            for engine in engines:
                engine.enqueue()
                engine.outcome(str(number))
            if number % 7 == 0:
                await trio.lowlevel.checkpoint()


async def check_not_before_entered(factory: BusFactory, flood: int) -> None:
    """A subscription is live from being entered to being left."""
    async with factory() as bus:
        engine = _Engine(bus, "a")
        subscription = bus.subscribe(["outcome.>"], name="reader")
        engine.outcome("before")
        async with subscription:
            engine.outcome("within")
            heard = await _collect(subscription, 1, "from being entered on")
            _require(heard[0].key.operation == "within", "nothing comes from before being entered")
        engine.outcome("after")
        await _refuses(subscription, BusError, "receive raises BusError after being left")


async def check_late_reader(factory: BusFactory, flood: int) -> None:
    """A late reader is first given a snapshot of every matching stream, and misses nothing."""
    async with factory() as bus:
        engine, silent = _Engine(bus, "a"), _Engine(bus, "b")
        engine.provide()
        silent.provide()
        for _ in range(5):
            engine.enqueue()
        async with (
            bus.subscribe(["state.>"], name="late") as late,
            bus.subscribe(["*.*.a.operation_outcome.>"], name="other") as other,
        ):
            reader = _Reader(late)
            await reader.read_until("late reader: gets a snapshot", lambda: reader.agrees(engine))
            await reader.read_until(
                "late reader: gets a snapshot of every stream", lambda: reader.agrees(silent)
            )
            kinds = {e.kind for e in reader.heard}
            _require(kinds <= SNAPSHOT_KINDS, f"late reader: snapshots come first, got {kinds}")
            for _ in range(5):
                engine.enqueue()
            await reader.read_until(
                "late reader: goes on from the snapshot", lambda: reader.agrees(engine)
            )
            _require(reader.views.gaps == 0, "late reader: no gap after the snapshot")
            engine.outcome("1")
            heard = await _collect(other, 1, "late reader")
            _require(
                heard[0].category == "outcome", "late reader: no snapshot of what it does not hear"
            )


async def check_withdrawn_provider(factory: BusFactory, flood: int) -> None:
    """Who withdraws is asked for no more snapshots; if another has taken its place, that one is."""
    async with factory() as bus:
        former, present, gone = _Engine(bus, "a"), _Engine(bus, "a"), _Engine(bus, "b")
        former.provide()
        gone.provide()
        present.provide()
        present.waiting.append("present")
        former.withdraw()
        gone.withdraw()
        gone.withdraw()
        async with bus.subscribe(["state.>"], name="late") as late:
            reader = _Reader(late)
            await reader.read_until(
                "withdrawn provider: another that took its place answers",
                lambda: reader.agrees(present),
            )
            gone.say(PressureReported())
            await reader.read_until(
                "withdrawn provider: its stream goes on", lambda: reader.heard[-1].source == "b"
            )
            reader.subscription.request_snapshot(
                Sequencer("b").wrap_snapshot(QueueSnapshot(), Key(engine="b"), 0.0)
            )
            gone.say(PressureReported())
            await reader.read_more(1, "withdrawn provider: its stream goes on")
            told = {e.kind for e in reader.heard if e.source == "b"}
            _require(
                told == {"pressure_reported"},
                f"withdrawn provider: makes no snapshot, got {told}",
            )


async def check_slow_state_reader(factory: BusFactory, flood: int) -> None:
    """A slow reader of state loses the oldest, sees the gap, and a snapshot makes it right."""
    async with factory() as bus:
        engine = _Engine(bus, "a")
        engine.provide()
        async with (
            bus.subscribe(["state.>"], name="slow", capacity=4) as slow,
            bus.subscribe(["state.>"], name="fast") as fast,
        ):
            reader, other = _Reader(slow), _Reader(fast)
            for one in (reader, other):
                await one.read_until("slow reader: first snapshot", partial(one.agrees, engine))
            await _flood(engine.enqueue, other, flood)
            await _until(
                lambda: _row(bus, "slow").dropped > 0, "slow reader: what was dropped is counted"
            )
            engine.enqueue()
            await reader.read_until(
                "slow reader: is right again after a snapshot", lambda: reader.agrees(engine)
            )
            _require(reader.views.gaps > 0, "slow reader: sees a gap")
            for _ in range(3):
                engine.enqueue()
                await reader.read_until(
                    "slow reader: goes on from the snapshot", lambda: reader.agrees(engine)
                )
            await other.read_until("slow reader: slows no other", lambda: other.agrees(engine))
            _require(other.views.gaps == 0, "slow reader: makes no other one lose anything")
            _require(_row(bus, "fast").dropped == 0, "slow reader: counts its own losses only")


async def check_lost_end(factory: BusFactory, flood: int) -> None:
    """A slow reader also gets right again if what it lost was the last word of a stream."""
    async with factory() as bus:
        engine = _Engine(bus, "a")
        engine.provide()
        async with (
            bus.subscribe(["state.>"], name="slow", capacity=4) as slow,
            bus.subscribe(["state.>"], name="fast") as fast,
        ):
            reader, other = _Reader(slow), _Reader(fast)
            for one in (reader, other):
                await one.read_until("lost end: first snapshot", partial(one.agrees, engine))
            engine.enqueue()
            await _flood(lambda: engine.say(PressureReported()), other, flood)
            await _until(lambda: _row(bus, "slow").dropped > 0, "lost end: drops are counted")
            await reader.read_until(
                "lost end: a reader that lost the end of a stream learns of it",
                lambda: reader.agrees(engine),
            )


async def check_reliable_among_state(factory: BusFactory, flood: int) -> None:
    """A reader that is too slow for state loses no reliable message by that."""
    async with factory() as bus:
        engine = _Engine(bus, "a")
        async with (
            bus.subscribe([">"], name="slow", capacity=4) as slow,
            bus.subscribe([">"], name="fast") as fast,
        ):
            other = _Reader(fast)
            for number in range(4):
                engine.outcome(str(number))
                await _flood(engine.enqueue, other, max(flood // 4, 1))
            await _until(lambda: _row(bus, "slow").dropped > 0, "slow reader: drops are counted")
            reader = _Reader(slow)

            def operations() -> list[str | None]:
                return [e.key.operation for e in reader.heard if e.category == "outcome"]

            await reader.read_until(
                "reliable messages come while state is dropped", lambda: len(operations()) >= 4
            )
            _require(operations() == ["0", "1", "2", "3"], "reliable messages come once, in order")


async def check_lagging_reader(factory: BusFactory, flood: int) -> None:
    """A reader that leaves too many reliable messages is closed, and nobody else notices."""
    async with factory() as bus:
        engine = _Engine(bus, "a")
        async with (
            bus.subscribe(["outcome.>"], name="stuck", capacity=4) as stuck,
            bus.subscribe(["outcome.>"], name="fast") as fast,
        ):
            other = _Reader(fast)
            numbers = iter(range(flood))
            await _flood(lambda: engine.outcome(str(next(numbers))), other, flood)
            await _refuses(stuck, LaggedError, "a reader that lags is closed with LaggedError")
            await _refuses(stuck, LaggedError, "a reader that was closed stays closed")
            engine.outcome("last")
            await other.read_until(
                "the others go on when one is closed", lambda: len(other.heard) > flood
            )
            heard = [e.key.operation for e in other.heard]
            _require(
                heard == [*map(str, range(flood)), "last"], "the others lose nothing, in order"
            )


async def check_statistics(factory: BusFactory, flood: int) -> None:
    """What was published and how each subscription fares can be asked at any time."""
    async with factory() as bus:
        engine = _Engine(bus, "a")
        async with bus.subscribe([">"], name="reader") as subscription:
            for number in range(3):
                engine.enqueue()
                engine.outcome(str(number))
            engine.enqueue()
            await _until(lambda: _row(bus, "reader").queued == 7, "unread messages are counted")
            _require(
                subscription.statistics() == _row(bus, "reader"), "a subscription's row is its own"
            )
            await _collect(subscription, 7, "statistics")
            row = _row(bus, "reader")
            _require((row.queued, row.received, row.dropped) == (0, 7, 0), f"read ones too: {row}")
            published = bus.statistics().published
            counts = {category: n for category, n in published.items() if n}
            _require(counts == {"state": 4, "outcome": 3}, f"by category: {counts}")
        _require(not bus.statistics().subscriptions, "who has left has no row")


async def check_receive(factory: BusFactory, flood: int) -> None:
    """Receiving is a checkpoint, can be cancelled without loss, and is for one task at a time."""
    async with factory() as bus:
        engine = _Engine(bus, "a")
        async with bus.subscribe([">"], name="reader") as subscription:
            with trio.move_on_after(0.01) as scope:
                await subscription.receive()
            _require(scope.cancelled_caught, "receive waits, and can be cancelled")
            engine.outcome("1")
            await _until(lambda: _row(bus, "reader").queued == 1, "unread messages are counted")
            with trio.CancelScope() as scope:
                scope.cancel()
                await subscription.receive()
            _require(scope.cancelled_caught, "receive is a checkpoint when messages are there")
            await _collect(subscription, 1, "receive: what a cancelled one would have got")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(_collect, subscription, 1, "receive: the first of two")
                await trio.testing.wait_all_tasks_blocked()
                await _refuses(subscription, BusError, "two tasks may not receive at once")
                engine.outcome("2")


async def check_closing(factory: BusFactory, flood: int) -> None:
    """Closing the bus ends all who receive and refuses all who publish."""
    async with trio.open_nursery() as nursery:
        async with factory() as bus:
            engine = _Engine(bus, "a")

            async def wait(
                patterns: list[str], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
            ) -> None:
                async with bus.subscribe(patterns, name="reader") as subscription:
                    task_status.started()
                    await _refuses(subscription, BusError, "closing the bus ends who receives")
                    await _refuses(subscription, BusError, "a bus that was closed stays closed")

            await nursery.start(wait, ["state.>"])
            await nursery.start(wait, ["outcome.>"])
            await trio.testing.wait_all_tasks_blocked()
        try:
            engine.outcome("1")
        except BusError:
            return
        _require(False, "publish raises BusError when the bus is closed")


CHECKS: tuple[Check, ...] = (
    check_patterns,
    check_order,
    check_not_before_entered,
    check_late_reader,
    check_withdrawn_provider,
    check_slow_state_reader,
    check_lost_end,
    check_reliable_among_state,
    check_lagging_reader,
    check_statistics,
    check_receive,
    check_closing,
)
