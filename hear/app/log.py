"""Where the log goes: lines on standard error, so that results on standard output stay clean.

Every value of every entry, and every traceback, goes through ``hear.escaping`` here, whatever the
version of structlog: names of peers are logged before anyone has checked them.
"""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from hear.app import output
from hear.escaping import MAX_LOGGED, one_line


def to_stderr(level: str = "info") -> None:
    """Send what is of ``level`` or above to standard error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
            escaped,
            structlog.processors.ExceptionPrettyPrinter(sys.stderr),
            # The width of the event; the name of this parameter changed between versions.
            structlog.dev.ConsoleRenderer(20, colors=output.errors_are_seen()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]  # older versions know no names
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        # A logger that was used before would keep writing as it was set up then: behind the screen
        # of hear tap, for one.
        cache_logger_on_first_use=False,
    )
    # What libraries log reaches standard error as well, unless somebody has set it up otherwise.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Escaped())


def to_stderr_unless_set_up(level: str = "info") -> None:
    """The same in a process of somebody else's, who may have set up structlog in his own way."""
    if not structlog.is_configured():
        to_stderr(level)


def escaped(logger: Any, method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Make all of an entry printable; a processor of structlog."""
    error = _error_of(entry.pop("exc_info", None))
    for key, value in list(entry.items()):
        if value is None or isinstance(value, bool | int | float):
            continue
        if isinstance(value, str):
            entry[key] = one_line(value, MAX_LOGGED)
        else:
            # It is shown by its repr(), which escapes what str holds, but need not be str's.
            shown = repr(value)
            safe = one_line(shown, MAX_LOGGED)
            entry[key] = value if safe == shown else _Shown(safe)
    if error is not None:
        entry["exception"] = output.traceback_of(error)
    return entry


class _Shown:
    """Stands for a value, and shows as this text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _error_of(exc_info: Any) -> BaseException | None:
    """The exception that an entry is about, in each of the forms in which it may be named."""
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        return exc_info[1] if isinstance(exc_info[1], BaseException) else None
    return sys.exc_info()[1] if exc_info else None


class _Escaped(logging.Formatter):
    """Entries of libraries that log with the standard library."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, of logging
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802, of logging
        return output.traceback_of(ei[1]) if ei[1] is not None else ""
