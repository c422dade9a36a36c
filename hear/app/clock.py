"""The clock of a deployment: seconds since the Unix epoch, and never backwards.

Trio's own clock has a random origin in each process, and times on the bus are compared between
processes. This one takes the wall clock once, as it starts, and from there on counts monotonic
seconds, so that a step of the wall clock makes no deadline jump.
"""

import time
from math import inf

import trio


class SharedClock(trio.abc.Clock):
    """Give it to ``trio.run(..., clock=SharedClock())`` in each process that joins a bus."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def start_clock(self) -> None:
        """Nothing to do: it runs since it was made."""

    def current_time(self) -> float:
        """Seconds since the Unix epoch, as of the wall clock when this clock was made."""
        return time.monotonic() + self._offset_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Seconds from now to ``deadline``, 0 if it has passed."""
        return inf if deadline == inf else max(0.0, deadline - self.current_time())


_newest = 0


def new_epoch() -> int:
    """An epoch larger than that of any earlier incarnation on this machine: Unix milliseconds.

    Two in one millisecond, or after the wall clock was set back, differ as well.
    """
    global _newest
    _newest = max(_newest + 1, time.time_ns() // 1_000_000)
    return _newest
