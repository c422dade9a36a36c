"""Reading the files of a trace, and saying what is wrong with them in one line.

Owns files, their compression and size, and the shape of each line; knows nothing of sessions or
blocks.
"""

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import count, islice
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import msgspec

from hear.codec import UNREADABLE
from hear.errors import ConfigError
from hear.escaping import cell

_T = TypeVar("_T")
_AT = re.compile(r" - at `\$(?P<at>[^`]*)`$")
_STEP = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")
_GZIP = b"\x1f\x8b"
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some programs write before a text
_ENDINGS = (".json", ".jsonl", ".csv", ".json.gz", ".jsonl.gz", ".csv.gz")

MAX_LINE: Final = 64 << 20
MAX_DOCUMENT: Final = 1 << 30
MAX_FILES: Final = 100_000


File = Path | Traversable


def shipped(name: str) -> Traversable:
    """A recording that is shipped with this package."""
    return files("hear.harnesses.eval.workloads") / "data" / name


def files_of(path: File) -> list[File]:
    """The files of a trace: the path itself, or what a folder holds, in the order of their names.

    Raises:
        ConfigError: the folder holds no file of a trace, or too many.
    """
    if not (isinstance(path, Path) and path.is_dir()):
        return [path]
    found = sorted(
        each for each in path.iterdir() if each.name.endswith(_ENDINGS) and each.is_file()
    )
    if not 0 < len(found) <= MAX_FILES:
        raise ConfigError(
            f"{path}: got a folder of {len(found)} files that end in {', '.join(_ENDINGS)}, "
            f"expected 1 to {MAX_FILES:,}"
        )
    return list(found)


def beginning(path: File, size: int) -> bytes:
    """The first ``size`` bytes of a file, gzip or plain.

    Raises:
        ConfigError: it cannot be read.
    """
    with _reading(path), _opened(path) as raw:
        return _unpacked(raw).read(size).removeprefix(_MARK)


def raw_lines(path: File, most: int = MAX_LINE) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, gzip or plain (told by content, not by name), with numbers from 1.

    Blank lines are skipped. The file is read as the iterator goes on.

    Raises:
        ConfigError: the file cannot be read, is cut short, or a line is longer than ``most`` bytes.
    """
    with _reading(path), _opened(path) as raw:
        file = _unpacked(raw)
        for number in count(1):
            with _reading(path, f":{number}"):
                line = file.readline(most + 1)
            if not line:
                return
            if len(line) > most:
                raise ConfigError(
                    f"{path}:{number}: got a line of more than {most:,} bytes, expected "
                    "one request or session a line"
                )
            if number == 1:
                line = line.removeprefix(_MARK)
            if not line.isspace():
                yield number, line


def read_lines(path: File, type_: type[_T]) -> Iterator[tuple[int, _T]]:
    """Read JSON Lines, as ``raw_lines`` does, each line as a ``type_``.

    Raises:
        ConfigError: the file cannot be read, is cut short, or a line is not a ``type_``.
    """
    decoder = msgspec.json.Decoder(type_)
    for number, line in raw_lines(path):
        yield number, decoded(f"{path}:{number}", line, decoder)


def read_rows(
    files: Sequence[File], type_: type[_T], first: int | None = None
) -> Iterator[tuple[str, _T]]:
    """Read the lines of several files, of all together the ``first``, each with its place.

    Raises:
        ConfigError: as ``read_lines``; or there is no line at all.
    """
    rows = ((f"{path}:{number}", row) for path in files for number, row in read_lines(path, type_))
    empty = True
    for row in islice(rows, first):
        empty = False
        yield row
    if empty:
        raise ConfigError(f"{files[0]}: got no request at all, expected one JSON object a line")


def read_document(path: File, type_: type[_T]) -> _T:
    """Read a file that is one JSON document, gzip or plain.

    Raises:
        ConfigError: the file cannot be read, is too long, or is not a ``type_``.
    """
    with _reading(path), _opened(path) as raw:
        document = _unpacked(raw).read(MAX_DOCUMENT + 1)
    if len(document) > MAX_DOCUMENT:
        raise ConfigError(
            f"{path}: got a document of more than {MAX_DOCUMENT >> 20} MiB, expected a smaller one"
        )
    return decoded(str(path), document.removeprefix(_MARK), msgspec.json.Decoder(type_))


def decoded(where: str, text: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """What a line or a document says; ``where`` begins the message of an error.

    Raises:
        ConfigError: it says something else.
    """
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(text, str(error))}") from error
    except UNREADABLE as error:
        raise ConfigError(
            f"{where}: got {_short(text.decode(errors='replace').strip())}, "
            f"expected one JSON object ({error})"
        ) from error


@contextmanager
def _reading(path: File, at: str = "") -> Iterator[None]:
    """Says what is wrong with a file that cannot be read."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(
            f"{path}{at}: got gzip data that is cut short or damaged ({error}), "
            "expected a whole gzip file"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _opened(path: File) -> IO[bytes]:
    # A pipe would be waited for, and can be read only once, where a format takes two looks.
    if isinstance(path, Path) and path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path}: got no regular file, expected one")
    return path.open("rb")


def _unpacked(raw: IO[bytes]) -> IO[bytes]:
    packed = raw.read(2) == _GZIP
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[return-value]


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
