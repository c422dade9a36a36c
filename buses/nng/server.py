"""The hub as a running thing: a socket, the clock, and the log."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import structlog
import trio

from hear.buses.nng.access import Keyring, TlsFiles, load_keyring
from hear.buses.nng.hub import Hub
from hear.buses.nng.wire import HubWire
from hear.clock import new_epoch
from hear.nursery import unwrapped

_log = structlog.get_logger("hear.hub")

_IDLE_S: Final = 0.05
_TICK_S: Final = 0.005
_STOP_S: Final = 0.2


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
            _send(wire, hub)
            with trio.move_on_after(_STOP_S, shield=True):
                await trio.sleep(_STOP_S / 4)  # for nng's threads to send the last word
    finally:
        wire.close()


async def _carry(wire: HubWire, hub: Hub) -> None:
    """Hand on what comes as it comes, and do beside it what is due."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_keep_time, wire, hub)
        while True:
            await wire.readable()
            now = trio.current_time()
            while frames := wire.receive():
                for connection, data in frames:
                    hub.receive(connection, data, now)
                hub.flush(now)
                _send(wire, hub)
                await trio.lowlevel.checkpoint()
                now = trio.current_time()


async def _keep_time(wire: HubWire, hub: Hub) -> None:
    while True:
        now = trio.current_time()
        for connection in wire.closed():
            hub.closed(connection, now)
        hub.tick(now)
        to_close, hub.to_close = hub.to_close, []
        for connection in to_close:
            wire.close_connection(connection)
            hub.closed(connection, now)
        hub.flush(now)
        _send(wire, hub)
        await trio.sleep(min(max(hub.next_due() - now, _TICK_S), _IDLE_S))


def _send(wire: HubWire, hub: Hub) -> None:
    for connection, data in hub.output:
        wire.send(connection, data)  # what cannot be sent is sent again by the link
    hub.output.clear()
    for event in hub.events:
        _log.info(event.name, **event.facts)
    hub.events.clear()


@asynccontextmanager
async def hub(url: str, *, keys: Path | None = None) -> AsyncIterator[Hub]:
    """A hub in this process, for tests and for clusters in one process."""
    with unwrapped():
        async with trio.open_nursery() as nursery:
            made: Hub = await nursery.start(lambda **kwargs: serve(url, keys=keys, **kwargs))
            yield made
            nursery.cancel_scope.cancel()
