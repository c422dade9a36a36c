"""Reading a recording line by line, and saying what is wrong with it in one line.

Owns the file, its compression and the shape of each line; knows nothing of sessions or blocks.
"""

import gzip
import re
import zlib
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hear.codec import UNREADABLE
from hear.errors import ConfigError
from hear.escaping import cell

_T = TypeVar("_T")
_AT = re.compile(r" - at `\$(?P<at>[^`]*)`$")
_STEP = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")
_GZIP = b"\x1f\x8b"


def shipped(name: str) -> Traversable:
    """A recording that is shipped with this package."""
    return files("hear.harnesses.replay") / "data" / name


def read_lines(path: Path | Traversable, type_: type[_T]) -> Iterator[tuple[int, _T]]:
    """Read JSON Lines, gzip or plain (told by content, not by name), with line numbers from 1.

    Blank lines are skipped. The file is read as the iterator goes on.

    Raises:
        ConfigError: the file cannot be read, is cut short, or a line is not a ``type_``.
    """
    decoder = msgspec.json.Decoder(type_)
    number = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
            raw.seek(0)
            lines = gzip.GzipFile(fileobj=raw) if packed else raw
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                try:
                    row = decoder.decode(line)
                except msgspec.ValidationError as error:
                    raise ConfigError(f"{path}:{number}: {_explain(line, str(error))}") from error
                except UNREADABLE as error:
                    raise ConfigError(
                        f"{path}:{number}: got {_short(line.decode(errors='replace').strip())}, "
                        f"expected one JSON object ({error})"
                    ) from error
                yield number, row
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(
            f"{path}:{number + 1}: got gzip data that is cut short or damaged ({error}), "
            "expected a whole gzip file"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _explain(line: bytes, message: str) -> str:
    """Put what msgspec expected beside what the line has there."""
    at = _AT.search(message)
    steps = at["at"] if at else ""
    wanted = message[: at.start()] if at else message
    where = f"{steps.lstrip('.')}: " if steps else ""
    if wanted.startswith("Object missing required field "):
        return f"{where}got no {wanted.split()[-1]}, expected this field"
    expected = wanted.removeprefix("Expected ").partition(", got ")[0]
    if wanted.startswith("Invalid value"):
        expected = "one of the known values"
    try:
        value: Any = msgspec.json.decode(line)
    except UNREADABLE:  # in what the type leaves unread
        return f"{where}{wanted}"
    for step in _STEP.finditer(steps):
        value = value[step["key"]] if step["key"] else value[int(step["index"])]
    return f"{where}got {_short(repr(value))}, expected {expected}"


def _short(text: str) -> str:
    return cell(text, 60)
