"""Errors that come out of a nursery as they went in, if there is just one."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the sole error of an exception group for itself; who calls has no need of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if error is group:
            raise
        try:
            raise error
        finally:
            error.__context__ = None  # the group would be shown with it, and says nothing more
