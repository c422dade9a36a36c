"""Joining a running bus from a command: its address, the clock, and an end that is never late.

Commands of all wings use this, so that each takes the same ``--bus`` and ``--key`` and each ends
on SIGINT and SIGTERM within the same time.
"""

import argparse
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import trio

from hear import plugins
from hear.clock import SharedClock
from hear.errors import ConfigError, HearError
from hear.seams import Bus

END_WITHIN_S = 1.5
"""What a command may take to end after a signal before the process is ended for it."""


def run_directory() -> Path:
    """Where sockets and other files of running clusters of this user live."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "hear" if base else Path(f"/tmp/hear-{os.getuid()}")


def default_url() -> str:
    """The address of the bus if none is given: ``$HEAR_BUS``, or a socket of this user."""
    return os.environ.get("HEAR_BUS") or f"ipc://{run_directory()}/bus"


def add_bus_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--bus`` and ``--key``."""
    parser.add_argument(
        "--bus",
        default=default_url(),
        metavar="URL",
        help="the bus to join: ipc://, tcp:// or tls+tcp:// ($HEAR_BUS, or %(default)s)",
    )
    parser.add_argument(
        "--key",
        type=Path,
        default=os.environ.get("HEAR_KEY"),
        metavar="FILE",
        help="the key to join with ($HEAR_KEY; none by default)",
    )


def connected(url: str, *, name: str, key: Path | None = None) -> AbstractAsyncContextManager[Bus]:
    """Join the bus at ``url`` under ``name``. Leaving the context leaves the bus.

    The part of the URL before ``://`` names the kind of bus, an entry point of ``hear.buses``.

    Raises:
        ConfigError: this is no URL of a bus that is known here.
        BusError: nobody answers there, or it refuses this name or key.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in plugins.names("buses"):
        known = ", ".join(f"{word}://" for word in plugins.names("buses"))
        raise ConfigError(f"bus {url!r}: expected an address that begins with one of {known}")
    made: AbstractAsyncContextManager[Bus] = plugins.load("buses", scheme)(url, name=name, key=key)
    return made


@asynccontextmanager
async def until_signal(
    *, on_signal: Callable[[int], None] = lambda number: None
) -> AsyncIterator[trio.CancelScope]:
    """Run what is inside until it ends, or until SIGINT or SIGTERM cancels it.

    If it then takes longer than ``END_WITHIN_S``, the process is ended: a command that hangs at
    its end helps nobody, and all that it owes is in the hands of its peers.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def watch() -> None:
                async for number in signals:
                    on_signal(number)
                    timer = threading.Timer(END_WITHIN_S, os._exit, (128 + number,))
                    timer.daemon = True
                    timer.start()
                    scope.cancel()
                    return

            nursery.start_soon(watch)
            with scope:
                yield scope
            nursery.cancel_scope.cancel()


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def run(main: Callable[[], Awaitable[int]]) -> int:
    """Run a command's coroutine on the shared clock until it ends or a signal comes.

    Returns its exit code; 130 after SIGINT and 143 after SIGTERM.

    Raises:
        HearError: raised by ``main``, in however many nurseries; of several, the first.
    """
    code = 0
    caught: list[int] = []

    async def guarded() -> None:
        nonlocal code
        async with until_signal(on_signal=caught.append):
            code = await main()

    try:
        trio.run(guarded, clock=SharedClock())
    except BaseExceptionGroup as group:
        # The nurseries that it came through have wrapped it; whoever catches wants the error.
        _, others = group.split(HearError)
        leaves = list(_leaves(group if others is None else others))
        if others is not None and len(leaves) > 1:
            raise
        raise leaves[0] from None
    return 128 + caught[0] if caught else code
