"""Joining a running bus from a command: its address, the clock, and an end that is never late.

Commands of all wings use this, so that each takes the same ``--bus`` and ``--key`` and each ends
on SIGINT and SIGTERM within the same time.
"""

import argparse
import gc
import math
import os
import re
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from hashlib import sha256
from pathlib import Path

import trio

from hear.app import plugins
from hear.app.clock import SharedClock
from hear.app.nursery import unwrapped
from hear.app.own_files import check_socket, own_folder
from hear.errors import ConfigError
from hear.interfaces import Bus

NAME = r"[A-Za-z0-9_\-+:][A-Za-z0-9_\-.+:]{0,127}"
"""What a part of a cluster may be named."""

_ENDING = (signal.SIGINT, signal.SIGTERM)

END_WITHIN_S = 1.5
"""What a command may take to end after a signal before the process is ended for it."""


def run_directory() -> Path:
    """Where sockets and other files of running clusters of this user live.

    Another user may have made it: use what is in it only after ``make_own_folders``.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isabs(base):  # which the XDG specification wants ignored
        return Path(f"/tmp/hear-{os.getuid()}")
    return Path(os.path.normpath(base)) / "hear"


def own_name(what: str) -> str:
    """A name on the bus for a command that may run many times, on many machines."""
    return f"{what}-{socket.gethostname().partition('.')[0]}-{os.getpid()}"


def positive_seconds(word: str) -> float:
    """The type of an argument that says for how long.

    Raises:
        argparse.ArgumentTypeError: it is no positive number of seconds.
    """
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a positive number of seconds")
    return seconds


def check_name(name: str) -> str:
    """See that a name can be one on a bus, and of a file: letters, digits and ``_ - . + :``.

    Raises:
        ConfigError: it cannot.
    """
    if not re.fullmatch(NAME, name):
        raise ConfigError(
            f"name {name!r}: expected 1 to 128 of letters, digits and '_-.+:', not first a dot"
        )
    return name


def cluster_directory(url: str) -> Path:
    """Where the sockets and the state of one cluster live, apart from those on other buses."""
    return run_directory() / sha256(url.encode()).hexdigest()[:12]


def make_own_folders(path: Path) -> None:
    """Make the folders from the run directory down to ``path``, and see that they are ours alone.

    Who joins or connects makes them too: where nothing is yet, another could come first while one
    waits for a hub. A path that is not in the run directory is left to whoever has chosen it.

    Raises:
        ConfigError: one cannot be made, or others could put files of theirs there.
    """
    for folder in _own_folders(path):
        own_folder(folder)


def check_own_folders(path: Path) -> bool:
    """The same for an address that somebody else has told, for which nothing is made; returns
    whether the folders are there.

    Raises:
        ConfigError: others could put files of theirs into one.
    """
    return all(own_folder(folder, make=False) for folder in _own_folders(path))


def _own_folders(path: Path) -> list[Path]:
    base = run_directory()
    inside = Path(os.path.abspath(path))
    if not inside.is_relative_to(base):
        return []
    return [base / folder for folder in reversed(inside.relative_to(base).parents)]


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


def check_url(url: str) -> str:
    """The scheme of a bus's address, which names its kind.

    Raises:
        ConfigError: this is no address of a bus that is known here.
    """
    scheme, separator, rest = url.partition("://")
    known = [name for name in plugins.names("buses") if name != "memory"]
    if not separator or not rest or scheme not in known:
        starts = ", ".join(f"{name}://" for name in known)
        raise ConfigError(f"bus {url!r}: expected an address that begins with one of {starts}")
    return scheme


def connected(url: str, *, name: str, key: Path | None = None) -> AbstractAsyncContextManager[Bus]:
    """Join the bus at ``url`` under ``name``. Leaving the context leaves the bus.

    The part of the URL before ``://`` names the kind of bus, an entry point of ``hear.buses``.

    Raises:
        ConfigError: this is no URL of a bus that is known here, or its socket is another user's and
            no key is given.
        BusError: nobody answers there, or it refuses this name or key.
    """
    scheme = check_url(url)
    if scheme == "ipc":
        path = Path(url.removeprefix("ipc://"))
        make_own_folders(path)
        if key is None:  # with one, the hub shows that it knows it
            check_socket(path)
    made: AbstractAsyncContextManager[Bus] = plugins.load_installed("buses", scheme)(
        url, name=name, key=key
    )
    return made


def run(main: Callable[[], Awaitable[int]]) -> int:
    """Run a command's coroutine on the shared clock until it ends, or until a signal cancels it.

    Returns its exit code; 130 after SIGINT and 143 after SIGTERM.

    Raises:
        HearError: raised by ``main``, in however many nurseries; of several, the first.
    """

    async def cancelled_by(stopping: trio.Event) -> int:
        code = 0
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await stopping.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            code = await main()
            nursery.cancel_scope.cancel()
        return code

    return run_until_signal(cancelled_by)


def run_until_signal(main: Callable[[trio.Event], Awaitable[int]]) -> int:
    """Run a command's coroutine on the shared clock; SIGINT or SIGTERM sets the event it is given.

    If it then takes longer than ``END_WITHIN_S``, the process is ended: a command that hangs at its
    end helps nobody, and all that it owes is in the hands of its peers.

    Returns its exit code if it ended by itself, 130 after SIGINT and 143 after SIGTERM.
    """
    caught: list[int] = []
    _quieten_collector()

    async def guarded() -> int:
        stopping = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def catch(number: int, frame: object) -> None:
            # The time begins here and not in a task, since tasks may be what hangs.
            caught.append(number)
            timer = threading.Timer(END_WITHIN_S, os._exit, (128 + number,))
            timer.daemon = True
            timer.start()
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(stopping.set)

        before = {number: signal.signal(number, catch) for number in _ENDING}
        try:
            return await main(stopping)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    with unwrapped():
        code: int = trio.run(guarded, clock=SharedClock())
    return 128 + caught[0] if caught else code


def _quieten_collector() -> None:
    """Let the garbage collector look seldom, since its pauses are pauses of all who wait.

    What was imported stays for good, and what messages leave behind is freed by its counts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 500, 100)


def end_with_standard_input(descriptor: int) -> None:
    """Have this process end when its standard input does: whoever started it is gone."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(descriptor, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
