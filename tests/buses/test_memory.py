"""The in-process bus: the shipped conformance checks, a model, and what is its own."""

from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from hear.buses.mailbox import Mailbox
from hear.buses.memory import MemoryBus
from hear.buses.testing import CHECKS, Check, check_bus
from hear.delivery import Sequencer
from hear.errors import BusError, LaggedError, LocalProtocolError
from hear.interfaces import Bus, SnapshotProvider
from hear.messages import (
    DEFAULT_TENANT,
    CapabilitiesReported,
    Envelope,
    Key,
    OperationOutcome,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
)
from hear.subjects import stem

QUEUE = "state.default.{}.queue"


@asynccontextmanager
async def memory_bus() -> AsyncIterator[Bus]:
    async with MemoryBus() as bus:
        yield bus


class Engine:
    """Says numbered things about itself, and can give a snapshot of its queue."""

    def __init__(self, bus: Bus, name: str = "e") -> None:
        self.name = name
        self.snapshots_made = 0
        self.log: list[Envelope] = []
        self._bus = bus
        self._sequencer = Sequencer(name)

    def snapshot(self) -> list[Envelope]:
        self.snapshots_made += 1
        return [self._sequencer.wrap_snapshot(QueueSnapshot(), Key(engine=self.name), 0.0)]

    def provide(self) -> None:
        self._bus.provide_snapshots(QUEUE.format(self.name), self.snapshot)

    def say(
        self, message: QueueChanged | PressureReported | OperationOutcome, operation: str = ""
    ) -> Envelope:
        key = Key(engine=self.name, operation=operation or None)
        envelope = self._sequencer.wrap(message, key, 0.0)
        self.log.append(envelope)
        self._bus.publish(envelope)
        return envelope

    def queue(self) -> Envelope:
        return self.say(QueueChanged())

    def pressure(self) -> Envelope:
        return self.say(PressureReported())

    def outcome(self, operation: str = "op") -> Envelope:
        return self.say(OperationOutcome(status="completed"), operation)


def kinds(batch: Iterable[Envelope]) -> list[tuple[str, int]]:
    return [(e.kind, e.seq) for e in batch]


# -- what every bus promises ------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_keeps_what_every_bus_promises(check: Check, autojump_clock: trio.abc.Clock) -> None:
    with trio.fail_after(60):
        await check(memory_bus, 200)


@pytest.mark.parametrize("flood", [60, 1000])
async def test_passes_all_checks_with_floods_of_any_size(
    flood: int, autojump_clock: trio.abc.Clock
) -> None:
    await check_bus(memory_bus, flood=flood)


class LosesReliable(MemoryBus):
    def publish(self, envelope: Envelope) -> None:
        if envelope.category != "outcome" or envelope.seq % 10:
            super().publish(envelope)


class GivesNoSnapshots(MemoryBus):
    def provide_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        pass


class HasNoBounds(MemoryBus):
    def subscribe(self, patterns: Iterable[str], *, name: str, capacity: int = 1) -> Mailbox:
        return super().subscribe(patterns, name=name, capacity=1_000_000)


class IgnoresPatterns(MemoryBus):
    def subscribe(self, patterns: Iterable[str], *, name: str, capacity: int = 4096) -> Mailbox:
        return super().subscribe([">"], name=name, capacity=capacity)


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (LosesReliable, "order"),
        (GivesNoSnapshots, "late reader: gets a snapshot"),
        (HasNoBounds, "slow reader: what was dropped is counted"),
        (IgnoresPatterns, "patterns"),
    ],
)
async def test_the_checks_find_a_bus_that_breaks_a_promise(
    broken: type[MemoryBus], promise: str, autojump_clock: trio.abc.Clock
) -> None:
    @asynccontextmanager
    async def broken_bus() -> AsyncIterator[Bus]:
        async with broken() as bus:
            yield bus

    with pytest.raises((AssertionError, BaseExceptionGroup)) as failure:
        await check_bus(broken_bus)
    errors: list[BaseException] = [failure.value]
    while isinstance(errors[0], BaseExceptionGroup):
        errors[:1] = errors[0].exceptions
    assert isinstance(errors[0], AssertionError)
    assert promise in str(errors[0])


# -- against a model --------------------------------------------------------------------------

Act = tuple[str, int]
_acts = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["queue", "pressure", "outcome", "receive", "ask"]), st.just(1)),
        st.tuples(st.sampled_from(["queue", "pressure", "outcome"]), st.integers(2, 9)),
    ),
    max_size=60,
)


@dataclass
class Model:
    """One subscription, as simply as it can be said: a list, scanned for everything."""

    capacity: int
    queued: list[Envelope] = field(default_factory=list)
    dropped: list[Envelope] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    wants: bool = True
    lagged: bool = False

    def put(self, envelope: Envelope) -> None:
        if self.lagged:
            return
        state = envelope.category == "state"
        same = [e for e in self.queued if (e.category == "state") == state]
        if len(same) >= self.capacity:
            if not state:
                self.lagged = True
                self.queued.clear()
                return
            self.queued.remove(same[0])
            self.dropped.append(same[0])
            self.lost.add(same[0].kind)
        self.queued.append(envelope)

    def take(self, last_seq: int) -> tuple[bool, list[Envelope]]:
        """Whether a snapshot of the queue comes first, and what follows."""
        present = {e.kind for e in self.queued}
        snapshot = self.wants or ("queue_changed" in self.lost and "queue_changed" not in present)
        rest = [
            e
            for e in self.queued
            if not (snapshot and e.kind == "queue_changed" and e.seq <= last_seq)
        ]
        self.wants = False
        self.lost.clear()
        self.queued.clear()
        return snapshot, rest


@settings(deadline=None)
@given(acts=_acts, capacities=st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_agrees_with_a_model_under_any_interleaving(
    acts: list[Act], capacities: tuple[int, int]
) -> None:
    async def main() -> None:
        async with MemoryBus() as bus:
            engine = Engine(bus)
            engine.provide()
            small, large = capacities
            async with (
                bus.subscribe([">"], name="reader", capacity=small) as reader,
                bus.subscribe([">"], name="never reads", capacity=large) as stuck,
            ):
                model, unread = Model(small), Model(large)
                last_queue_seq = 0
                for act, count in acts:
                    if act == "receive":
                        await receive(reader, model, last_queue_seq)
                    elif act == "ask":
                        reader.request_snapshot(engine.snapshot()[0])
                        model.wants = True
                    else:
                        for _ in range(count):
                            envelope = getattr(engine, act)()
                            model.put(envelope)
                            unread.put(envelope)
                            if act == "queue":
                                last_queue_seq = envelope.seq
                    for one, its in ((reader, model), (stuck, unread)):
                        row = one.statistics()
                        assert row.queued == len(its.queued)
                        assert row.dropped == len(its.dropped)
                    assert bus.statistics().lagged == model.lagged + unread.lagged
                await receive(reader, model, last_queue_seq)

    async def receive(reader: Mailbox, model: Model, last_seq: int) -> None:
        if model.lagged:
            with pytest.raises(LaggedError):
                await reader.receive()
            return
        snapshot, rest = model.take(last_seq)
        if not snapshot and not rest:
            with trio.move_on_after(0) as scope:
                await reader.receive()
            assert scope.cancelled_caught
            return
        batch = await reader.receive()
        if snapshot:
            assert kinds(batch[:1]) == [("queue_snapshot", last_seq)]
        assert batch[snapshot:] == rest

    trio.run(main)


@settings(deadline=None)
@given(pauses=st.lists(st.integers(0, 3), min_size=1, max_size=30), capacity=st.integers(1, 8))
def test_any_pace_of_a_reader_gives_each_reliable_message_once_or_closes_it(
    pauses: list[int], capacity: int
) -> None:
    heard: list[Envelope] = []
    closed: list[LaggedError] = []

    async def read(subscription: Mailbox, expected: int) -> None:
        try:
            while len(heard) < expected:
                heard.extend(await subscription.receive())
                for _ in range(3):
                    await trio.lowlevel.checkpoint()
        except LaggedError as error:
            closed.append(error)

    async def main() -> list[Envelope]:
        async with MemoryBus() as bus:
            engine = Engine(bus)
            async with (
                bus.subscribe(["outcome.>"], name="r", capacity=capacity) as subscription,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(read, subscription, len(pauses))
                for pause in pauses:
                    engine.outcome()
                    for _ in range(pause):
                        await trio.lowlevel.checkpoint()
            return engine.log

    log = trio.run(main)
    assert heard == log[: len(heard)]
    assert closed or heard == log


# -- order ------------------------------------------------------------------------------------


async def test_both_classes_come_in_the_order_of_publication() -> None:
    bus = MemoryBus()
    engine = Engine(bus)
    async with bus.subscribe([">"], name="reader") as subscription:
        for _ in range(5):
            engine.queue()
            engine.outcome()
            engine.pressure()
        assert await subscription.receive() == engine.log


def test_the_same_calls_give_each_reader_the_same_messages_in_the_same_order() -> None:
    async def main() -> list[list[list[str]]]:
        async with MemoryBus() as bus, trio.open_nursery() as nursery:
            engines = [Engine(bus, name) for name in "abc"]
            for engine in engines:
                engine.provide()
            heard: list[list[list[str]]] = [[] for _ in range(4)]

            async def read(
                number: int, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
            ) -> None:
                patterns = [">"] if number % 2 else ["state.>", "outcome.*.b.>"]
                async with bus.subscribe(patterns, name=str(number), capacity=7) as subscription:
                    task_status.started()
                    while True:
                        batch = await subscription.receive()
                        heard[number].append([f"{e.source} {e.kind} {e.seq}" for e in batch])
                        await trio.sleep(0.1013 * (number + 1))

            for number in range(4):
                await nursery.start(read, number)
            await trio.sleep(0.001)
            for turn in range(40):
                for engine in engines[: 1 + turn % 3]:
                    engine.queue()
                    engine.pressure()
                    if turn % 4 == 0:
                        engine.outcome()
                await trio.sleep(0.0707)  # never due together with a reader
            nursery.cancel_scope.cancel()
            return heard

    runs = [trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)) for _ in range(5)]
    assert all(run == runs[0] for run in runs)
    assert all(len(batches) > 3 for batches in runs[0])


# -- snapshots --------------------------------------------------------------------------------


async def test_a_snapshot_is_made_when_its_reader_comes_and_replaces_what_it_includes() -> None:
    bus = MemoryBus()
    engine = Engine(bus)
    engine.provide()
    async with bus.subscribe(["state.>"], name="reader") as subscription:
        engine.queue()
        engine.pressure()
        engine.queue()
        assert engine.snapshots_made == 0
        batch = await subscription.receive()
        assert kinds(batch) == [("queue_snapshot", 2), ("pressure_reported", 1)]
        last = engine.queue()
        subscription.request_snapshot(last)
        subscription.request_snapshot(last)
        assert engine.snapshots_made == 1
        assert kinds(await subscription.receive()) == [("queue_snapshot", 3)]
        assert engine.snapshots_made == 2


async def test_changes_later_than_the_snapshot_stay_and_come_after_it() -> None:
    bus = MemoryBus()
    engine = Engine(bus)
    old = engine.snapshot()  # a provider may be behind what it has published, over a network
    bus.provide_snapshots(QUEUE.format("e"), lambda: old)
    async with bus.subscribe(["state.>"], name="reader") as subscription:
        engine.queue()
        engine.queue()
        batch = await subscription.receive()
        assert kinds(batch) == [("queue_snapshot", 0), ("queue_changed", 1), ("queue_changed", 2)]


async def test_changes_of_an_ended_epoch_go_with_the_snapshot_of_the_next() -> None:
    bus = MemoryBus()
    sequencer, key = Sequencer("e"), Key(engine="e")
    async with bus.subscribe(["state.>"], name="reader") as subscription:
        for _ in range(3):
            bus.publish(sequencer.wrap(QueueChanged(), key, 0.0))
        sequencer.restart()
        bus.publish(change := sequencer.wrap(QueueChanged(), key, 0.0))
        bus.provide_snapshots(
            QUEUE.format("e"), lambda: [sequencer.wrap_snapshot(QueueSnapshot(), key, 0.0)]
        )
        subscription.request_snapshot(change)
        batch = await subscription.receive()
        assert [(e.epoch, e.kind, e.seq) for e in batch] == [(2, "queue_snapshot", 1)]


async def test_a_snapshot_in_more_parts_than_the_queue_holds_comes_whole() -> None:
    bus = MemoryBus()
    engine = Engine(bus)
    bus.provide_snapshots(QUEUE.format("e"), lambda: engine.snapshot() * 50)
    async with bus.subscribe(["state.>"], name="reader", capacity=2) as subscription:
        engine.queue()
        assert len(await subscription.receive()) == 50


async def test_every_matching_stream_is_told_to_a_late_reader_in_the_order_of_its_providers() -> (
    None
):
    bus = MemoryBus()
    engines = [Engine(bus, name) for name in ("c", "a", "b")]
    for engine in engines:
        engine.provide()
    key = Key(engine="a")
    wrapped = Sequencer("a").wrap_snapshot(CapabilitiesReported(), key, 0.0)
    bus.provide_snapshots("state.default.a.capabilities", lambda: [wrapped])
    async with (
        bus.subscribe(["state.>"], name="all") as everything,
        bus.subscribe(["state.default.a.>"], name="a") as one,
        bus.subscribe(["state.default.b.queue.-"], name="one subject") as subject,
    ):
        heard = [(e.source, e.kind) for e in await everything.receive()]
        assert heard == [
            ("c", "queue_snapshot"),
            ("a", "queue_snapshot"),
            ("b", "queue_snapshot"),
            ("a", "capabilities_reported"),
        ]
        assert {e.source for e in await one.receive()} == {"a"}
        assert {e.source for e in await subject.receive()} == {"b"}


async def test_asking_for_a_snapshot_wakes_a_reader_who_waits() -> None:
    bus = MemoryBus()
    engine = Engine(bus)
    async with bus.subscribe(["state.>"], name="reader") as subscription:
        engine.provide()
        change = engine.queue()
        await subscription.receive()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def read() -> None:
                assert kinds(await subscription.receive()) == [("queue_snapshot", 1)]

            await trio.testing.wait_all_tasks_blocked()
            subscription.request_snapshot(change)


async def test_a_snapshot_that_nobody_gives_or_may_get_is_not_waited_for() -> None:
    bus = MemoryBus()
    engine, empty, foreign = Engine(bus), Engine(bus, "empty"), Engine(bus, "foreign")
    bus.provide_snapshots(QUEUE.format("empty"), list)
    foreign.provide()
    patterns = ["*.*.e.>", "*.*.empty.>"]
    async with bus.subscribe(patterns, name="reader") as subscription:
        subscription.request_snapshot(engine.queue())
        subscription.request_snapshot(foreign.queue())
        subscription.request_snapshot(empty.snapshot()[0])
        assert kinds(await subscription.receive()) == [("queue_changed", 1)]
        subscription.request_snapshot(empty.snapshot()[0])
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def read() -> None:
                assert kinds(await subscription.receive()) == [("operation_outcome", 1)]

            await trio.testing.wait_all_tasks_blocked()
            engine.outcome()
    assert foreign.snapshots_made == 0
    subscription.request_snapshot(engine.queue())  # after the end: nothing


async def test_a_loss_at_the_end_of_a_stream_brings_a_snapshot_unasked() -> None:
    bus = MemoryBus()
    engine = Engine(bus)
    async with bus.subscribe(["state.>"], name="reader", capacity=2) as subscription:
        engine.provide()
        engine.queue()
        for _ in range(3):
            engine.pressure()
        batch = await subscription.receive()
        assert kinds(batch)[0] == ("queue_snapshot", 1)
        assert kinds(batch)[1:] == [("pressure_reported", 2), ("pressure_reported", 3)]
        engine.queue()
        engine.queue()
        engine.queue()
        # Here the reader sees the gap by itself, and decides by itself.
        assert kinds(await subscription.receive()) == [("queue_changed", 3), ("queue_changed", 4)]


# -- a stuck reader, closing ------------------------------------------------------------------


async def test_a_lagging_reader_is_told_what_it_left_unread_and_holds_no_memory() -> None:
    bus = MemoryBus()
    engine = Engine(bus)
    async with bus.subscribe([">"], name="gateway", capacity=3) as subscription:
        engine.queue()
        for _ in range(4):
            engine.outcome()
        assert subscription.statistics().queued == 0
        assert bus.statistics().lagged == 1
        engine.outcome()
        for _ in range(2):
            with pytest.raises(LaggedError, match=r"'gateway'.* 3 reliable.*4 in all.*limit is 3"):
                await subscription.receive()
        assert subscription.statistics().queued == 0
    assert bus.statistics().lagged == 1


async def test_a_reader_who_waits_is_woken_by_leaving_and_by_closing() -> None:
    bus = MemoryBus()
    for end in ("left", "closed"):
        subscription = bus.subscribe([">"], name="reader")
        async with trio.open_nursery() as nursery, subscription:

            async def read(end: str, subscription: Mailbox) -> None:
                with pytest.raises(BusError, match=end):
                    await subscription.receive()

            nursery.start_soon(read, end, subscription)
            await trio.testing.wait_all_tasks_blocked()
            if end == "closed":
                bus.close()


async def test_what_was_unread_at_closing_can_still_be_read() -> None:
    bus = MemoryBus()
    engine = Engine(bus)
    engine.provide()
    async with bus.subscribe([">"], name="recording") as subscription:
        await subscription.receive()
        engine.queue()
        engine.outcome()
        await bus.aclose()
        assert await subscription.receive() == engine.log
        with pytest.raises(BusError, match="'recording': the bus is closed"):
            await subscription.receive()


async def test_a_closed_bus_refuses_everything() -> None:
    bus = MemoryBus()
    engine = Engine(bus)
    early = bus.subscribe([">"], name="early")
    bus.close()
    bus.close()
    with pytest.raises(BusError, match="e-1-1"):
        engine.queue()
    with pytest.raises(BusError, match="'late'"):
        bus.subscribe([">"], name="late")
    with pytest.raises(BusError, match="closed"):
        engine.provide()
    with pytest.raises(BusError, match="'early'"):
        async with early:
            pass
    assert bus.statistics().subscriptions == ()


async def test_a_subscription_is_entered_once_and_read_while_entered() -> None:
    bus = MemoryBus()
    subscription = bus.subscribe([">"], name="reader")
    with pytest.raises(BusError, match="before it was entered"):
        await subscription.receive()
    async with subscription:
        with pytest.raises(BusError, match="entered before"):
            await subscription.__aenter__()
    with pytest.raises(BusError, match="was left"):
        await subscription.receive()
    with pytest.raises(BusError, match="entered before"):
        await subscription.__aenter__()


async def test_cancelling_while_entering_leaves_nothing_behind() -> None:
    bus = MemoryBus()
    with trio.CancelScope() as scope:
        scope.cancel()
        async with bus.subscribe([">"], name="reader"):
            raise AssertionError("not reached")
    assert scope.cancelled_caught
    assert bus.statistics().subscriptions == ()


async def test_cancelling_a_reader_at_any_moment_loses_nothing(
    autojump_clock: trio.abc.Clock,
) -> None:
    bus = MemoryBus()
    engine = Engine(bus)
    heard: list[Envelope] = []
    async with (
        bus.subscribe(["outcome.>"], name="reader") as subscription,
        trio.open_nursery() as nursery,
    ):

        @nursery.start_soon
        async def publish() -> None:
            for _ in range(200):
                engine.outcome()
                await trio.sleep(0.01)

        with trio.fail_after(60):
            while len(heard) < 200:
                with trio.move_on_after(0.01):  # ends just as a message comes
                    while True:
                        heard += await subscription.receive()
    assert heard == engine.log


async def test_arguments_that_make_no_sense_are_refused() -> None:
    bus = MemoryBus()
    for capacity in (0, -1):
        with pytest.raises(LocalProtocolError, match="capacity"):
            bus.subscribe([">"], name="reader", capacity=capacity)
    with pytest.raises(LocalProtocolError, match="pattern"):
        bus.subscribe(["state..>"], name="reader")
    for subject in ("state.default.e", "state.default.*.queue", "state.default.e.queue.-", ">"):
        with pytest.raises(LocalProtocolError, match=r"snapshots of|pattern"):
            bus.provide_snapshots(subject, list)


# -- bounds -----------------------------------------------------------------------------------


async def test_memory_stays_bounded_however_many_workflows_come() -> None:
    bus = MemoryBus()
    sequencer = Sequencer("harness")
    async with bus.subscribe(["intent.>"], name="stuck", capacity=4):
        for number in range(20_000):
            key = Key(workflow=f"w{number}", request="r")
            bus.publish(sequencer.wrap(RequestDescribed(), key, 0.0))
    assert len(bus._routes) <= 16_384
    assert bus.statistics().published["intent"] == 20_000


async def test_unknown_categories_are_carried_and_counted_together() -> None:
    bus = MemoryBus()
    sequencer = Sequencer("e")
    known = sequencer.wrap(OperationOutcome(status="failed"), Key(engine="e"), 0.0)
    async with bus.subscribe([">"], name="tap") as subscription:
        for number in range(3):
            fields = {name: getattr(known, name) for name in known.__struct_fields__}
            bus.publish(Envelope(**fields | {"category": f"later{number}", "kind": "new"}))
        heard = deque(await subscription.receive())
    assert [e.category for e in heard] == ["later0", "later1", "later2"]
    assert bus.statistics().published["other"] == 3


def test_the_stem_of_a_queue_is_what_these_tests_take_it_for() -> None:
    made = stem("state", DEFAULT_TENANT, Key(engine="e"), "queue_snapshot")
    assert made == QUEUE.format("e")
