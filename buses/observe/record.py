"""``hear record``: writes all that is heard on a bus to a file, as it comes.

Owns the way from a subscription to a file. The subscription is the only buffer: while a write is
under way, in a thread, messages wait there, and if they come to be too many the bus cuts this
reader off, which is noted in the file. What the file looks like is ``hear.recording``'s.
"""

import argparse
import math
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Protocol

import trio

from hear.app import connection, output
from hear.app.cli import Command
from hear.app.log import to_stderr
from hear.errors import BusError, ConfigError, LaggedError
from hear.interfaces import Bus
from hear.recording import Header, Recorder
from hear.subjects import Pattern

CAPACITY = 65_536
_SLICE = 1024  # messages that are encoded before others get a turn


class Writable(Protocol):
    """The part of an unbuffered binary file object that is used here."""

    def write(self, data: bytes | memoryview, /) -> int | None: ...


class BusRecorder:
    """Writes what is heard on ``bus`` to ``file``.

    ``written`` counts the messages that are in the file for certain.
    """

    def __init__(
        self, bus: Bus, file: Writable, header: Header, *, capacity: int = CAPACITY
    ) -> None:
        self.recorder = Recorder(header)
        self.written = 0
        self._bus = bus
        self._file = file
        self._capacity = capacity

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Record until cancelled. After being cut off it notes so, and subscribes again.

        Raises:
            OSError: the file takes no more; what was written before can be read.
            BusError: the bus has closed.
        """
        recorder = self.recorder
        await _write(self._file, recorder.begin())
        try:
            while True:
                try:
                    await self._follow(task_status)
                except LaggedError as error:
                    await _write(self._file, recorder.cut_off(trio.current_time(), str(error)))
                    task_status = trio.TASK_STATUS_IGNORED
        except (BusError, trio.Cancelled):
            with trio.CancelScope(shield=True):
                await _write(self._file, recorder.end(trio.current_time()))
            raise

    async def _follow(self, task_status: trio.TaskStatus[None]) -> None:
        patterns = self.recorder.header.patterns
        async with self._bus.subscribe(
            patterns, name="record", capacity=self._capacity
        ) as messages:
            task_status.started()
            while True:
                batch = await messages.receive()
                now = trio.current_time()
                for begin in range(0, len(batch), _SLICE):
                    part = batch[begin : begin + _SLICE]
                    await _write(self._file, self.recorder.hear(part, now))
                    self.written += len(part)


async def _write(file: Writable, data: bytes) -> None:
    # Not abandoned when cancelled: what has begun is written to its end, or fails.
    await trio.to_thread.run_sync(write_all, file, data)


def write_all(file: Writable, data: bytes) -> None:
    """Write all of ``data``, however little an unbuffered file takes at once."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("file", type=Path, metavar="FILE", help="what to write, as in out.hear")
    parser.add_argument(
        "--for",
        dest="seconds",
        type=connection.positive_seconds,
        default=math.inf,
        metavar="SECONDS",
        help="how long to record (until Ctrl-C)",
    )
    parser.add_argument(
        "--subject",
        action="append",
        metavar="PATTERN",
        help="record only subjects that match, as in 'outcome.>'; may be said again (all)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    connection.add_bus_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command; 1 if the file cannot be written to its end."""
    to_stderr("warning")
    patterns = tuple(namespace.subject or [">"])
    for text in patterns:
        Pattern(text)
    _check(namespace.file, namespace.force)
    return connection.run(lambda: _main(namespace, patterns))


def _check(path: Path, force: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder, expected a file")
    if path.is_file() and not force:
        raise ConfigError(f"{path}: exists; give another name, or --force to overwrite it")


def _created(path: Path, force: bool) -> FileIO:
    """Open the file only once the bus was joined, so that a wrong address leaves none behind."""
    try:
        _check(path, force)
        return FileIO(path, "w" if force or path.exists() else "x")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


async def _main(namespace: argparse.Namespace, patterns: Sequence[str]) -> int:
    path: Path = namespace.file
    name = connection.own_name("record")
    async with connection.connected(namespace.bus, name=name, key=namespace.key) as bus:
        file = _created(path, namespace.force)
        begun_s = trio.current_time()
        header = Header(started_s=begun_s, bus=namespace.bus, patterns=tuple(patterns))
        recording = BusRecorder(bus, file, header)

        def say_what_came() -> None:
            seconds = trio.current_time() - begun_s
            output.say(f"{path}: {_summary(recording)} in {seconds:.1f} s")

        with file:
            try:
                with trio.move_on_after(namespace.seconds):
                    await recording.run()
            except OSError as error:
                output.complain(
                    f"{path}: cannot be written to its end: {error.strerror}; "
                    f"{_summary(recording)} can be read"
                )
                return 1
            except (BusError, trio.Cancelled):
                say_what_came()
                raise
        say_what_came()
    return 0


def _summary(recording: BusRecorder) -> str:
    recorder = recording.recorder
    parts = [f"{recording.written:,} messages"]
    if recorder.gaps:
        parts.append(f"{recorder.gaps:,} gaps ({recorder.missed:,} messages were not heard)")
    if recorder.cut_offs:
        parts.append(f"cut off {recorder.cut_offs:,} times, for being too slow")
    return ", ".join(parts)


COMMAND = Command("write all that is heard on a bus to a file", configure, run)
