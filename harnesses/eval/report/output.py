"""Writing results to files: whole or not at all, and into what is there, not over it."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from hear.app.own_files import open_new
from hear.errors import ConfigError
from hear.messages import Envelope
from hear.recording import MAGIC, Header, Recorder


def check_outputs(outputs: Iterable[Path], inputs: Iterable[Path]) -> None:
    """See before anything runs that there is a place for what comes of it.

    Raises:
        ConfigError: there is none, two outputs are the same file, or one is also an input.
    """
    taken = {path.resolve(): "is read" for path in inputs}
    for path in outputs:
        target = path.resolve()
        try:
            if path.is_dir():
                raise ConfigError(f"{path}: is a folder, expected a file")
            if path.exists() and not path.is_file():
                continue  # a terminal, a pipe
            if target in taken:
                raise ConfigError(f"{path}: {taken[target]} already, expected a file of its own")
            with TemporaryFile(dir=target.parent):
                pass
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
        taken[target] = "is written"


def check_recording(path: Path) -> None:
    """See that a recording takes the place of nothing but a recording.

    Raises:
        ConfigError: something else is there.
    """
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            begin = file.read(len(MAGIC))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if begin not in (b"", MAGIC):
        raise ConfigError(f"{path}: exists and is no recording; give another name, or remove it")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; a link is followed, and a pipe or device written to.

    Raises:
        OSError: it cannot be written; what stood there before still does.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open_new(temporary) as file:
            file.write(data)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def recording(path: str | None) -> Iterator[Callable[[Sequence[Envelope], float], object]]:
    """Give what is to be told all that is heard in virtual time; it is recorded in ``path``.

    With None nothing is. The file is there when all has ended well, and else not.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        yield lambda envelopes, time_s: None
        return
    target = Path(path).resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    recorder = Recorder(Header(bus="memory://replay", clock="virtual"))
    last_s = 0.0
    try:
        with open_new(temporary) as file:
            file.write(recorder.begin())

            def tap(envelopes: Sequence[Envelope], time_s: float) -> None:
                nonlocal last_s
                last_s = time_s
                file.write(recorder.hear(envelopes, time_s))

            yield tap
            file.write(recorder.end(last_s))
        temporary.replace(target)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
