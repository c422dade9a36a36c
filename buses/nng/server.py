"""The hub as a running thing: a socket, the clock, and the log."""

import os
import resource
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Final

import structlog
import trio

from hear.app.clock import new_epoch
from hear.app.nursery import unwrapped
from hear.buses.nng.access import Keyring, TlsFiles, load_keyring
from hear.buses.nng.hub import Hub, HubEvent
from hear.buses.nng.wire import HubWire

_log = structlog.get_logger("hear.hub")

_IDLE_S: Final = 0.05
_TICK_S: Final = 0.005
_STOP_S: Final = 0.2
_LINES_A_SECOND: Final = 10
_SAME_S: Final = 10.0
_REMEMBERED: Final = 64
_DESCRIPTORS_LOW: Final = 0.9
_LOOK_S: Final = 1.0


async def serve(
    url: str,
    *,
    keys: Path | None = None,
    task_status: trio.TaskStatus[Hub] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be the hub at ``url`` until cancelled.

    Args:
        keys: a keyring (docs/security.md); without one, whoever reaches the address may do all.

    Raises:
        ConfigError: the address or the keyring cannot be used.
        BusError: the address is in use.
    """
    keyring: Keyring | None = None
    tls: TlsFiles | None = None
    if keys is not None:
        file = load_keyring(keys)
        keyring = Keyring(file.key)
        tls = file.tls if url.startswith("tls") else None
    wire = HubWire(url, tls)
    try:
        hub = Hub(
            id=f"{new_epoch()}-{secrets.token_hex(4)}", now=trio.current_time(), keyring=keyring
        )
        task_status.started(hub)
        _log.info("hub.listening", url=url, keys=keyring is not None)
        try:
            await _carry(wire, hub)
        finally:
            hub.stop()
            _send(wire, hub, _Log(), trio.current_time())
            with trio.move_on_after(_STOP_S, shield=True):
                await trio.sleep(_STOP_S / 4)  # for nng's threads to send the last word
    finally:
        wire.close()


async def _carry(wire: HubWire, hub: Hub) -> None:
    """Hand on what comes as it comes, and do beside it what is due."""
    log = _Log()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_keep_time, wire, hub, log)
        nursery.start_soon(_watch_descriptors)
        while True:
            await wire.readable()
            while True:
                now = trio.current_time()
                frames = wire.receive()
                _note_opened(wire, hub, now)
                for connection, data in frames:
                    hub.receive(connection, data, now)
                _turn(wire, hub, log, now)
                await trio.lowlevel.checkpoint()
                if not (frames or hub.busy or hub.output):
                    break


async def _keep_time(wire: HubWire, hub: Hub, log: "_Log") -> None:
    while True:
        now = trio.current_time()
        _note_opened(wire, hub, now)
        for connection in wire.closed():
            hub.closed(connection, now)
        hub.tick(now)
        to_close, hub.to_close = hub.to_close, []
        for connection in to_close:
            wire.close_connection(connection)
            hub.closed(connection, now)
        # Not until nothing is left to do: who floods would see to it that it never is.
        while (hub.busy or hub.output) and trio.current_time() < now + _TICK_S:
            _turn(wire, hub, log, now)
            await trio.lowlevel.checkpoint()
        _send(wire, hub, log, now)
        pause_s = (
            0.0 if hub.busy or hub.output else min(max(hub.next_due() - now, _TICK_S), _IDLE_S)
        )
        await trio.sleep(pause_s)


def _note_opened(wire: HubWire, hub: Hub, now: float) -> None:
    for connection, certificate in wire.opened():
        hub.opened(connection, now, certificate)


def _turn(wire: HubWire, hub: Hub, log: "_Log", now: float) -> None:
    """Do what is to be done, unless what was said last has yet to be sent."""
    if _send(wire, hub, log, now):
        hub.turn(now)
        _send(wire, hub, log, now)


def _send(wire: HubWire, hub: Hub, log: "_Log", now: float) -> bool:
    """Send and log what the hub has to say; returns whether there was room for all of it.

    What finds no room stays and is sent first next time. The link would say it again too, but half
    a second later, and one peer's many answers would cost all the others that.
    """
    for event in hub.events:
        log.write(event, now)
    hub.events.clear()
    for number, (connection, data) in enumerate(hub.output):
        if not wire.send(connection, data):
            del hub.output[:number]
            return False
    hub.output.clear()
    return True


class _Log:
    """Writes events, of each kind so many a second. Strangers can make as many as they like, and a
    line of the log takes longer than they do. The very same refusal, as of a client that tries a
    name in use again and again, is written once in ``_SAME_S``. How many were left out the next
    line of the kind says."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._last_s: OrderedDict[str, float] = OrderedDict()
        self._written: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()

    def write(self, event: HubEvent, now: float) -> None:
        if now >= self._began_s + 1.0:
            self._began_s = now
            self._written.clear()
        if self._written[event.name] >= _LINES_A_SECOND or self._is_repeated(event, now):
            self._left_out[event.name] += 1
            return
        self._written[event.name] += 1
        left_out = self._left_out.pop(event.name, 0)
        more = {"left_out": left_out} if left_out else {}
        _log.info(event.name, **event.facts, **more)

    def _is_repeated(self, event: HubEvent, now: float) -> bool:
        """Whether this refusal was written of late."""
        if event.name != "peer.refused":
            return False
        same = str(event.facts)[:200]
        if now < self._last_s.get(same, -inf) + _SAME_S:
            return True
        self._last_s[same] = now
        self._last_s.move_to_end(same)
        if len(self._last_s) > _REMEMBERED:
            self._last_s.popitem(last=False)
        return False


async def _watch_descriptors() -> None:
    """Say so before there are no more descriptors: then nobody new can connect, and nng does not
    tell."""
    low = False
    while True:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            used = os.dup(2)  # the lowest that is free, so about as many are in use
            os.close(used)
        except OSError:
            used = limit
        was_low, low = low, used > _DESCRIPTORS_LOW * limit
        if low and not was_low:
            _log.error("descriptors.low", used=used, limit=limit)
        elif was_low and not low:
            _log.info("descriptors.enough", used=used, limit=limit)
        await trio.sleep(_LOOK_S)


@asynccontextmanager
async def hub(url: str, *, keys: Path | None = None) -> AsyncIterator[Hub]:
    """A hub in this process, for tests and for clusters in one process."""
    with unwrapped():
        async with trio.open_nursery() as nursery:
            made: Hub = await nursery.start(lambda **kwargs: serve(url, keys=keys, **kwargs))
            yield made
            nursery.cancel_scope.cancel()
