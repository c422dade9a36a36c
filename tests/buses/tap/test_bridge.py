"""The thread between bus and screen: pictures come over, and either end lets go of the other."""

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from hear.buses.memory import MemoryBus
from hear.buses.observe.tap.board import Picture
from hear.buses.observe.tap.bridge import Bridge
from hear.errors import BusError
from hear.interfaces import Bus
from hear.messages import ContextOpened
from tests.buses.tap.builders import Voice
from tests.buses.tap.scene import Load, serving

WITHIN_S = 10.0


class Gallery:
    """Waits for a picture of a kind."""

    def __init__(self) -> None:
        self.num_pictures = 0
        self._change = threading.Condition()
        self._newest: Picture | None = None

    def hang(self, picture: Picture) -> None:
        with self._change:
            self.num_pictures += 1
            self._newest = picture
            self._change.notify_all()

    def wait_for(self, num_messages: int) -> Picture:
        with self._change:
            assert self._change.wait_for(
                lambda: self._newest is not None and self._newest.num_messages >= num_messages,
                WITHIN_S,
            )
            assert self._newest is not None
            return self._newest


class Stage:
    """A memory bus in the thread of the bridge; ``say`` and ``close`` are for the test's thread."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.left = False
        self._token: trio.lowlevel.TrioToken | None = None

    @asynccontextmanager
    async def join(self) -> AsyncIterator[Bus]:
        self._token = trio.lowlevel.current_trio_token()
        try:
            yield self.bus
        finally:
            self.left = True

    def say(self, number: int) -> None:
        voice = Voice("h")

        def publish() -> None:
            for n in range(number):
                self.bus.publish(voice.say(ContextOpened(), context=f"c{n}", workflow="w"))

        assert self._token is not None
        self._token.run_sync_soon(publish)

    def close(self) -> None:
        assert self._token is not None
        self._token.run_sync_soon(self.bus.close)


def test_pictures_come_over_and_stopping_leaves_the_bus() -> None:
    stage, gallery = Stage(), Gallery()
    bridge = Bridge(stage.join, name="tap", interval_s=0.01, on_picture=gallery.hang)
    assert bridge.latest() is None
    bridge.start()
    assert bridge.wait_joined(WITHIN_S)
    stage.say(30)
    gallery.wait_for(30)
    latest = bridge.latest()
    assert latest is not None
    assert latest.num_contexts == 30
    assert bridge.stop()
    assert bridge.ended
    assert bridge.error is None
    assert stage.left
    assert stage.bus.statistics().subscriptions == ()


def test_a_flood_of_messages_makes_no_more_pictures() -> None:
    stage, gallery = Stage(), Gallery()
    bridge = Bridge(stage.join, name="tap", interval_s=0.2, on_picture=gallery.hang)
    began = time.monotonic()
    bridge.start()
    assert bridge.wait_joined(WITHIN_S)
    for _ in range(10):
        stage.say(1000)
    gallery.wait_for(10_000)
    assert bridge.stop()
    assert gallery.num_pictures <= (time.monotonic() - began) / 0.2 + 1


def test_a_bus_that_is_lost_ends_it_with_the_reason() -> None:
    stage, gallery = Stage(), Gallery()
    bridge = Bridge(stage.join, name="tap", on_picture=gallery.hang)
    bridge.start()
    assert bridge.wait_joined(WITHIN_S)
    stage.say(1)
    gallery.wait_for(1)
    stage.close()
    bridge._thread.join(WITHIN_S)
    assert bridge.ended
    assert isinstance(bridge.error, BusError)
    assert stage.left
    assert bridge.stop()


def test_a_bus_that_cannot_be_joined_ends_it() -> None:
    def refuse() -> Bus:
        raise BusError("nobody answers")

    @asynccontextmanager
    async def nobody() -> AsyncIterator[Bus]:
        await trio.lowlevel.checkpoint()
        yield refuse()

    bridge = Bridge(nobody, name="tap")
    bridge.start()
    assert bridge.wait_joined(WITHIN_S)
    assert bridge.stop()
    with pytest.raises(BusError, match="nobody answers"):
        raise bridge.error or AssertionError


def test_stopping_while_it_joins_does_not_wait_for_that() -> None:
    @asynccontextmanager
    async def slow() -> AsyncIterator[Bus]:
        await trio.Event().wait()
        yield MemoryBus()

    bridge = Bridge(slow, name="tap")
    bridge.start()
    assert bridge.stop(WITHIN_S)
    assert bridge.error is None
    assert bridge.latest() is None


def test_stopping_before_it_was_started_is_nothing() -> None:
    assert Bridge(Stage().join, name="tap").stop()


def test_a_cluster_in_real_time_is_followed() -> None:
    gallery = Gallery()

    @asynccontextmanager
    async def cluster() -> AsyncIterator[Bus]:
        bus = MemoryBus()
        async with serving(bus) as made, trio.open_nursery() as nursery:
            nursery.start_soon(Load(made).burst, 8)
            yield bus
            nursery.cancel_scope.cancel()

    bridge = Bridge(cluster, name="tap", interval_s=0.02, on_picture=gallery.hang)
    bridge.start()
    picture = gallery.wait_for(40)
    assert bridge.stop(WITHIN_S)
    assert bridge.error is None
    assert [engine.name for engine in picture.engines] == ["engine0"]
    assert picture.engines[0].age_s is not None
    assert len(picture.requests) == 8
