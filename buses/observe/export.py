"""``hear export``: a recording as a file for another program, written whole or not at all."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hear.app import output
from hear.app.cli import Command
from hear.app.own_files import open_new
from hear.buses.observe.trace_events import TraceEvents
from hear.errors import ConfigError
from hear.escaping import to_json
from hear.recording import Recording, opened


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("recording", type=Path, metavar="FILE", help="what hear record has written")
    parser.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="FILE",
        help="the trace to write, for ui.perfetto.dev or chrome://tracing",
    )


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command."""
    target: Path = namespace.to
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder, expected a file")
    if target.exists() and target.resolve() == namespace.recording.resolve():
        raise ConfigError(f"{target}: is the recording, expected another file")
    with opened(namespace.recording) as recording, written_whole(target) as file:
        count = write_trace(recording, file)
        tail = recording.tail()
    output.say(f"{target}: {count:,} events" + (f"; {tail}" if tail else ""))
    return 0


def write_trace(recording: Recording, file: BinaryIO) -> int:
    """Write a recording as Chrome trace events, one a line; returns how many there are.

    Raises:
        OSError: it cannot be written.
    """
    header = recording.header
    about = {"bus": header.bus, "clock": header.clock, "started_s": header.started_s}
    file.write(
        b'{"displayTimeUnit":"ms","otherData":' + to_json(about).encode() + b',"traceEvents":[\n'
    )
    count = 0
    for event in TraceEvents(header.started_s).events(recording):
        line = to_json(event).encode()
        file.write(b",\n" + line if count else line)
        count += 1
    file.write(b"\n]}\n")
    return count


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when all is written; a pipe is written to.

    Raises:
        ConfigError: it cannot be written; what stood there before still does.
    """
    target = path.resolve()
    in_place = target.exists() and not target.is_file()
    temporary = target if in_place else target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with target.open("wb") if in_place else open_new(temporary) as file:
            yield file
        if not in_place:
            temporary.replace(target)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if not in_place:
            temporary.unlink(missing_ok=True)


COMMAND = Command("a recording as a trace for Perfetto", configure, run)
