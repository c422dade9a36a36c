"""Ends code that does not return: a limit on wall time for code without a checkpoint."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 1.0


class TimeLimitPassed(BaseException):
    """Raised inside the code that takes too long. Not an Exception, so that few catch it."""


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise ``TimeLimitPassed`` in the code inside once ``limit_s`` of wall time have passed.

    It is raised once more a second, should the code catch it. Python can only be interrupted by a
    signal, in the main thread, and between two of its own instructions: in another thread, where
    there are no interval timers, and within one long call into C, nothing is limited.
    """
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    over = False

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if not over:
            raise TimeLimitPassed

    handler = signal.signal(signal.SIGALRM, on_alarm)
    timer = signal.setitimer(signal.ITIMER_REAL, limit_s, _AGAIN_S)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if timer[0]:  # somebody else's, which was only put off
            signal.setitimer(signal.ITIMER_REAL, *timer)
