"""Following without an end: numbers, history without a break, coming back when cut off."""

from collections.abc import Iterable, Sequence

import pytest
import trio

from hear.buses.memory import MemoryBus
from hear.buses.observe.tap import follow
from hear.buses.observe.tap.follow import Follower, Numbers
from hear.delivery import Arrival
from hear.errors import BusError, LaggedError
from hear.messages import ContextOpened, Envelope, QueueChanged, QueueSnapshot
from hear.subjects import Pattern, subject
from tests.buses.tap.builders import Voice


class Heard:
    """Keeps what it is given; ``wanted`` streams are asked for."""

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []
        self.sizes: list[int] = []
        self.cuts: list[LaggedError] = []
        self.wanted: list[Envelope] = []
        self.came = trio.Event()

    def take(self, envelopes: Sequence[Envelope]) -> Iterable[Envelope]:
        self.envelopes += envelopes
        self.sizes.append(len(envelopes))
        self.came.set()
        wanted, self.wanted = self.wanted, []
        return wanted

    def cut_off(self, error: LaggedError) -> None:
        self.cuts.append(error)


class Remembering(MemoryBus):
    """A bus that keeps everything; ``meanwhile`` is said while somebody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Envelope] = []
        self.meanwhile: list[Envelope] = []

    def publish(self, envelope: Envelope) -> None:
        self.kept.append(envelope)
        super().publish(envelope)

    async def history(self, patterns: Iterable[str]) -> Sequence[Envelope]:
        await trio.lowlevel.checkpoint()
        for envelope in self.meanwhile:
            self.publish(envelope)
        made = [Pattern(text) for text in patterns]
        return [e for e in self.kept if any(p.matches(subject(e)) for p in made)]


def opened(voice: Voice, n: int = 0) -> Envelope:
    return voice.say(ContextOpened(), context=f"c{n}", workflow="w")


# -- numbers ----------------------------------------------------------------------------------


def test_where_a_tap_joins_late_is_no_loss() -> None:
    voice, numbers = Voice("h"), Numbers()
    for _ in range(7):
        opened(voice)
    assert numbers.observe(opened(voice)) == (Arrival.NEXT, 0)
    assert numbers.observe(opened(voice)) == (Arrival.NEXT, 0)


def test_a_hole_is_told_with_its_size_once() -> None:
    voice, numbers = Voice("h"), Numbers()
    numbers.observe(opened(voice))
    for _ in range(17):
        opened(voice)
    last = opened(voice)
    assert numbers.observe(last) == (Arrival.GAP, 17)
    assert numbers.observe(last) == (Arrival.STALE, 0)
    assert numbers.observe(opened(voice)) == (Arrival.NEXT, 0)
    assert (numbers.gaps, numbers.missed) == (1, 17)


def test_the_beginning_of_a_new_epoch_that_was_missed_is_a_hole() -> None:
    voice, numbers = Voice("h"), Numbers()
    numbers.observe(opened(voice))
    voice.restart()
    opened(voice)
    assert numbers.observe(opened(voice)) == (Arrival.GAP, 1)


def test_each_source_and_stream_is_counted_for_itself() -> None:
    numbers, engine = Numbers(), Voice("e")
    for n in range(3):
        assert numbers.observe(engine.say(QueueChanged(), engine="e"))[1] == 0
        assert numbers.observe(opened(Voice(f"h{n}")))[1] == 0


def test_a_stranger_with_endless_streams_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_MAX_CHANNELS", 10)
    numbers = Numbers()
    for n in range(100):
        numbers.observe(opened(Voice(f"h{n}")))
    assert len(numbers._heard) <= 10
    assert numbers.gaps == 0


# -- following --------------------------------------------------------------------------------


async def test_history_comes_first_and_nothing_is_missed_or_said_twice(
    autojump_clock: trio.abc.Clock,
) -> None:
    bus, heard, voice = Remembering(), Heard(), Voice("h")
    before = [opened(voice, n) for n in range(3)]
    bus.meanwhile = [opened(voice, n) for n in range(3, 5)]
    for envelope in before:
        bus.publish(envelope)
    live = trio.Event()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            follower = Follower(bus, [">"], name="tap")
            nursery.start_soon(lambda: follower.run(heard, history=True, on_live=live.set))
            await live.wait()
            after = opened(voice, 5)
            bus.publish(after)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert heard.envelopes == [*before, *bus.meanwhile, after]


async def test_a_bus_without_history_is_followed_from_now_on(
    autojump_clock: trio.abc.Clock,
) -> None:
    bus, heard, voice = MemoryBus(), Heard(), Voice("h")
    bus.publish(opened(voice))
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            live = trio.Event()
            follower = Follower(bus, [">"], name="tap")
            nursery.start_soon(lambda: follower.run(heard, history=True, on_live=live.set))
            await live.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert heard.envelopes == []
            nursery.cancel_scope.cancel()


async def test_one_that_is_cut_off_says_so_and_comes_back(autojump_clock: trio.abc.Clock) -> None:
    bus, heard, voice = MemoryBus(), Heard(), Voice("h")
    follower = Follower(bus, [">"], name="tap", capacity=8)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follower.run, heard)
            await trio.testing.wait_all_tasks_blocked()
            for n in range(20):
                bus.publish(opened(voice, n))
            await trio.testing.wait_all_tasks_blocked()
            assert len(heard.cuts) == follower.times_cut_off == 1
            bus.publish(opened(voice, 99))
            await heard.came.wait()
            nursery.cancel_scope.cancel()
    assert [e.key.context for e in heard.envelopes] == ["c99"]
    assert bus.statistics().subscriptions == ()


async def test_state_that_was_dropped_is_counted_over_all_subscriptions(
    autojump_clock: trio.abc.Clock,
) -> None:
    bus, heard, engine, voice = MemoryBus(), Heard(), Voice("e"), Voice("h")
    follower = Follower(bus, [">"], name="tap", capacity=8)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follower.run, heard)
        for _ in range(2):
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(10):
                bus.publish(engine.say(QueueChanged(), engine="e"))
            for n in range(20):
                bus.publish(opened(voice, n))
        await trio.testing.wait_all_tasks_blocked()
        assert follower.dropped == 4
        nursery.cancel_scope.cancel()


async def test_a_snapshot_that_the_receiver_needs_is_asked_for(
    autojump_clock: trio.abc.Clock,
) -> None:
    bus, heard, engine = MemoryBus(), Heard(), Voice("e")
    changed = engine.say(QueueChanged(), engine="e")
    bus.provide_snapshots(
        "state.default.e.queue", lambda: [engine.snapshot(QueueSnapshot(), engine="e")]
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Follower(bus, [">"], name="tap").run, heard)
        await trio.testing.wait_all_tasks_blocked()
        heard.wanted = [changed]
        bus.publish(changed)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert [e.kind for e in heard.envelopes] == [
        "queue_snapshot",
        "queue_changed",
        "queue_snapshot",
    ]


async def test_a_long_batch_is_given_in_pieces_between_which_it_can_be_cancelled(
    autojump_clock: trio.abc.Clock,
) -> None:
    bus, heard, voice = MemoryBus(), Heard(), Voice("h")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Follower(bus, [">"], name="tap").run, heard)
        await trio.testing.wait_all_tasks_blocked()
        for n in range(5000):
            bus.publish(opened(voice, n))
        await heard.came.wait()
        nursery.cancel_scope.cancel()
    assert max(heard.sizes) <= 512
    assert len(heard.envelopes) < 5000


async def test_a_bus_that_is_closed_ends_it() -> None:
    bus = MemoryBus()
    with pytest.RaisesGroup(BusError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Follower(bus, [">"], name="tap").run, Heard())
            await trio.testing.wait_all_tasks_blocked()
            bus.close()
