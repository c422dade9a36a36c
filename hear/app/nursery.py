"""Errors that come out of nurseries as they went in."""

from collections.abc import Iterator
from contextlib import contextmanager

from hear.errors import HearError


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise an error for itself that came in a group of its own; of several of HEAR's, the first.

    The nurseries that an error came through have wrapped it; whoever catches it wants the error.
    One that is not HEAR's is a fault, and goes before those that are.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        _, faults = group.split(HearError)
        leaves = list(_leaves(group if faults is None else faults))
        if faults is not None and len(leaves) > 1:
            raise
        error = leaves[0]
        try:
            raise error
        finally:
            error.__context__ = None  # the group would be shown with it, and says nothing more


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
