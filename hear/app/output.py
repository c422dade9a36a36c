"""Standard output and standard error: the only module of the commands that prints.

Whatever is said in words goes through ``hear.escaping``. Tables go through ``hear.app.console``,
which draws on the same streams, and the log through ``hear.app.log``.
"""

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import NewType, TextIO

from hear.errors import ConfigError
from hear.escaping import one_line, printable

Drawn = NewType("Drawn", str)
"""What ``hear.app.console`` has drawn, and nothing else: its colours must not be escaped."""


def say(text: str) -> None:
    """One line of the result, on standard output."""
    _write(sys.stdout, one_line(text))


def say_whole(text: str) -> None:
    """A result of any length, whose lines are our own and whose parts are printable (or JSON)."""
    _write(sys.stdout, printable(text, lines=True))


def say_drawn(text: Drawn) -> None:
    """A result that a console has drawn, with the colours that it gave it."""
    _write(sys.stdout, text)


def remark(text: str) -> None:
    """One line beside the result, on standard error."""
    _write(sys.stderr, one_line(text))


def complain(error: object) -> None:
    """What went wrong, in one line on standard error."""
    remark(f"hear: {' '.join(str(error).split())}")


def progress(text: str) -> None:
    """Write over the current line of a terminal on standard error; an empty text clears it."""
    if sys.stderr is not None:
        sys.stderr.write(f"\r{one_line(text)}" if text else "\r\x1b[K")
        sys.stderr.flush()


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def check_open() -> None:
    """See that there is a standard output, which a process may be started without.

    Raises:
        ConfigError: there is none.
    """
    if sys.stdout is None:
        raise ConfigError("standard output is closed, expected somewhere to write to")


def descriptor() -> tuple[int, str]:
    """Where standard output goes, for one who writes to it by himself, and its encoding."""
    check_open()
    return sys.stdout.fileno(), sys.stdout.encoding or "utf-8"


def errors_are_seen() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def flush() -> None:
    """See that all was written.

    Raises:
        OSError: standard output takes no more.
    """
    if sys.stdout is not None:
        sys.stdout.flush()


def give_up() -> None:
    """What is left in the buffer of standard output would fail again as Python ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


# -- exceptions that nobody expected -------------------------------------------------------------


def traceback_of(error: BaseException) -> str:
    """A traceback in which no message of an exception begins a line or steers a terminal.

    Messages of exceptions hold what others have sent; the rest is of this machine.
    """
    return "".join(_lines_of(error)).rstrip("\n")


def _lines_of(error: BaseException) -> Iterator[str]:
    for part in traceback.TracebackException.from_exception(error).format():
        # Frames are indented, as is all of a group; the words between two tracebacks are Python's.
        ours = part.startswith((" ", "Traceback (", _CAUSE, _CONTEXT))
        yield printable(part, lines=True) if ours else printable(part.rstrip("\n")) + "\n"


_CAUSE = "\nThe above exception was the direct cause"
_CONTEXT = "\nDuring handling of the above exception"


def show_uncaught() -> None:
    """From now on show what ends the process or a thread as ``traceback_of`` does, and warnings."""

    def of_process(
        kind: type[BaseException], error: BaseException, at: TracebackType | None
    ) -> None:
        _write(sys.stderr, traceback_of(error.with_traceback(at)))

    def of_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and arguments.exc_type is not SystemExit:
            name = arguments.thread.name if arguments.thread is not None else "?"
            text = f"Exception in thread {printable(name)}:\n{traceback_of(arguments.exc_value)}"
            _write(sys.stderr, text)

    def of_nobody(arguments: "sys.UnraisableHookArgs") -> None:
        if arguments.exc_value is not None:
            head = printable(f"{arguments.err_msg or 'Exception ignored in'}: {arguments.object!r}")
            _write(sys.stderr, f"{head}\n{traceback_of(arguments.exc_value)}")

    def of_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(printable(str(message)), category, filename, lineno, line)
        _write(sys.stderr if file is None else file, printable(text.rstrip("\n"), lines=True))

    warnings.showwarning = of_warning
    sys.excepthook = of_process
    threading.excepthook = of_thread
    sys.unraisablehook = of_nobody
