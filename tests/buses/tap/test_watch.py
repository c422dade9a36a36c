"""The tap as a whole: a bus in, lines out."""

import json
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing

from hear.buses.memory import MemoryBus
from hear.buses.observe.tap.filters import Filter, Wanted
from hear.buses.observe.tap.lines import Lines
from hear.buses.observe.tap.reading import read
from hear.buses.observe.tap.records import Records
from hear.buses.observe.tap.watch import Form, watch
from hear.errors import BusError, ConfigError
from hear.messages import ContextOpened, QueueChanged
from tests.buses.tap.builders import Voice, foreign
from tests.buses.tap.test_follow import Remembering, opened


class Terminal:
    """A pipe with a thread that reads it to its end."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._data = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while chunk := os.read(self._reader, 1 << 16):
            self._data += chunk

    def lines(self) -> list[str]:
        """All that was written; it is closed for writing."""
        os.close(self.writer)
        self._thread.join(10)
        os.close(self._reader)
        return self._data.decode().splitlines()


async def tapped(
    scene: Callable[[], Awaitable[None]],
    bus: MemoryBus,
    wanted: Wanted | None = None,
    form: Form | None = None,
    **options: Any,
) -> list[str]:
    """The lines that a tap writes while a scene plays."""
    terminal = Terminal()
    try:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:

                async def tap() -> None:
                    await watch(
                        bus,
                        Filter(wanted or Wanted()),
                        form or Lines(),
                        name="tap",
                        descriptor=terminal.writer,
                        **options,
                    )
                    nursery.cancel_scope.cancel()

                nursery.start_soon(tap)
                await trio.testing.wait_all_tasks_blocked(0.01)
                await scene()
                await trio.testing.wait_all_tasks_blocked(0.01)
                if not options.keys() & {"count", "for_s"}:
                    nursery.cancel_scope.cancel()
    finally:
        lines = terminal.lines()
    return lines


def words(lines: list[str]) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in lines]


async def test_what_comes_is_written_as_it_comes() -> None:
    bus, engine = MemoryBus(), Voice("e0")
    unreadable = foreign("queue_snapshot", b"\xc1", source="y")

    async def scene() -> None:
        bus.publish(engine.say(QueueChanged(num_waiting=3), engine="e0"))
        bus.publish(foreign("foo", {"kind": "foo", "n": 1}))
        bus.publish(unreadable)

    assert words(await tapped(scene, bus)) == [
        "state    e0           queue 3 waiting 0 running",
        "state    x            unknown kind 'foo' from x, 13 bytes: n=1",
        f"state    y            {read(unreadable).words}",
    ]


async def test_a_gap_is_written_before_the_message_that_shows_it() -> None:
    bus, engine = MemoryBus(), Voice("e0")

    async def scene() -> None:
        bus.publish(engine.say(QueueChanged(), engine="e0"))
        for _ in range(17):
            engine.say(QueueChanged(), engine="e0")
        bus.publish(engine.say(QueueChanged(num_waiting=1), engine="e0"))

    lines = words(await tapped(scene, bus))
    assert lines[1:] == [
        "e0           gap: 17 messages missed on state.default.e0.queue",
        "state    e0           queue 1 waiting 0 running",
    ]


async def test_a_tap_on_one_request_sees_no_gaps_where_others_speak() -> None:
    bus, voice = MemoryBus(), Voice("h")

    async def scene() -> None:
        for n in (1, 2, 2, 2, 1):
            bus.publish(opened(voice, n))

    lines = await tapped(scene, bus, Wanted(contexts=("c1",)))
    assert len(lines) == 2
    narrow = await tapped(scene, bus, Wanted(subjects=("intent.*.*.*.c1",)))
    assert len(narrow) == 2
    assert not any("gap" in line for line in narrow)


async def test_it_ends_after_a_count() -> None:
    bus, voice = MemoryBus(), Voice("h")

    async def scene() -> None:
        for n in range(10):
            bus.publish(opened(voice, n))

    lines = await tapped(scene, bus, count=3)
    assert [line.rsplit(maxsplit=1)[1] for line in lines] == ["c0", "c1", "c2"]


async def test_it_ends_after_a_time(autojump_clock: trio.testing.MockClock) -> None:
    bus, voice = MemoryBus(), Voice("h")

    async def scene() -> None:
        for n in range(5):
            bus.publish(opened(voice, n))
            await trio.sleep(2)

    assert len(await tapped(scene, bus, for_s=5.0)) == 3


async def test_a_name_that_shows_nothing_is_said_with_the_names_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hear.buses.observe.tap.watch.SILENT_S", 0.1)
    bus, engine = Remembering(), Voice("engine0")

    async def scene() -> None:
        bus.publish(engine.say(QueueChanged(), engine="engine0"))
        await trio.sleep(0.5)

    [line] = await tapped(scene, bus, Wanted(engines=("engin0",)), for_s=0.3)
    assert "nothing of engine 'engin0' so far; engines on this bus: engine0" in line
    [shown] = await tapped(scene, bus, Wanted(engines=("engine0",)), for_s=0.3)
    assert "nothing of" not in shown


async def test_history_alone_is_shown_if_there_is_no_time_for_more() -> None:
    bus, voice = Remembering(), Voice("h")
    for n in range(4):
        bus.publish(opened(voice, n))

    async def scene() -> None:
        await trio.sleep_forever()

    assert len(await tapped(scene, bus, history=True, for_s=0.0)) == 4


async def test_a_bus_without_history_is_said_to_have_none() -> None:
    async def scene() -> None:
        pass

    lines = words(await tapped(scene, MemoryBus(), history=True))
    assert lines == ["tap          this bus keeps no history"]


async def test_being_cut_off_is_said_and_what_was_missed_is_counted() -> None:
    bus, voice = MemoryBus(), Voice("h")

    async def scene() -> None:
        bus.publish(opened(voice))
        await trio.testing.wait_all_tasks_blocked(0.01)
        for _ in range(65_537):
            bus.publish(opened(voice))
        await trio.testing.wait_all_tasks_blocked(0.01)
        bus.publish(opened(voice))

    lines = words(await tapped(scene, bus))
    assert len(lines) == 4
    assert "cut off and subscribed again: subscription 'tap' was closed" in lines[1]
    assert "gap: 65537 messages missed on intent.default.w.context_opened" in lines[2]


async def test_lines_of_json_hold_messages_gaps_and_notices() -> None:
    bus, voice = MemoryBus(), Voice("h")

    async def scene() -> None:
        bus.publish(opened(voice))
        opened(voice)
        bus.publish(opened(voice))

    lines = await tapped(scene, bus, form=Records(), history=True)
    assert [json.loads(line)["type"] for line in lines] == ["notice", "message", "gap", "message"]


async def test_a_reader_that_leaves_ends_the_tap_quietly() -> None:
    bus, voice = MemoryBus(), Voice("h")
    reader, writer = os.pipe()
    try:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    lambda: watch(bus, Filter(Wanted()), Lines(), name="tap", descriptor=writer)
                )
                await trio.testing.wait_all_tasks_blocked(0.01)
                os.close(reader)
                bus.publish(opened(voice))
    finally:
        os.close(writer)
    assert bus.statistics().subscriptions == ()


async def test_a_disk_that_is_full_is_one_clear_error() -> None:
    bus, voice = MemoryBus(), Voice("h")
    writer = os.open("/dev/full", os.O_WRONLY)
    try:
        with (
            trio.fail_after(10),
            pytest.RaisesGroup(
                pytest.RaisesExc(ConfigError, match="standard output: No space left")
            ),
        ):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    lambda: watch(bus, Filter(Wanted()), Lines(), name="tap", descriptor=writer)
                )
                await trio.testing.wait_all_tasks_blocked(0.01)
                bus.publish(opened(voice))
    finally:
        os.close(writer)


async def test_a_reader_that_stops_slows_nobody_and_hears_how_much_it_missed() -> None:
    bus, voice = MemoryBus(), Voice("h")
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    data = b""
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                lambda: watch(bus, Filter(Wanted()), Lines(), name="tap", descriptor=writer)
            )
            await trio.testing.wait_all_tasks_blocked(0.01)
            for n in range(30):
                for _ in range(1000):
                    bus.publish(opened(voice, n))
                await trio.testing.wait_all_tasks_blocked()
            assert bus.statistics().lagged == 0
            [tap] = bus.statistics().subscriptions
            assert (tap.queued, tap.received) == (0, 30_000)
            while b"not shown" not in data or not data.endswith(b"the end\n"):
                with suppress(BlockingIOError):
                    data += os.read(reader, 1 << 20)
                bus.publish(voice.say(ContextOpened(role="the end"), context="c", workflow="w"))
                await trio.testing.wait_all_tasks_blocked(0.001)
            nursery.cancel_scope.cancel()
    os.close(reader)
    os.close(writer)
    note = next(line for line in data.decode().splitlines() if "not shown" in line)
    assert "messages not shown: the output was not read in time" in note


async def test_a_bus_that_is_lost_ends_it_with_an_error() -> None:
    bus = MemoryBus()

    async def scene() -> None:
        bus.close()

    with pytest.RaisesGroup(BusError):
        await tapped(scene, bus)


async def test_cancelling_ends_it_at_once_even_if_nobody_reads() -> None:
    bus, voice = MemoryBus(), Voice("h")
    reader, writer = os.pipe()
    with trio.fail_after(2):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                lambda: watch(bus, Filter(Wanted()), Lines(), name="tap", descriptor=writer)
            )
            await trio.testing.wait_all_tasks_blocked(0.01)
            for n in range(3000):
                bus.publish(opened(voice, n))
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.cancel_scope.cancel()
    os.close(reader)
    os.close(writer)
