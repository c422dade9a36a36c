"""Where the log goes: lines on standard error, so that results on standard output stay clean."""

import sys

import structlog


def to_stderr(level: str = "info") -> None:
    """Send what is of ``level`` or above to standard error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
            structlog.processors.ExceptionPrettyPrinter(sys.stderr),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=20),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
