"""Standard output that never holds anyone up: what it does not take in time is dropped and counted.

A thread of its own writes, since a pipe or terminal that nobody reads blocks the writer, and making
the descriptor non-blocking would do so for every process that shares it.
"""

import errno
import os
import select
import threading
from collections import deque
from collections.abc import Callable

MAX_LINES = 4096
MAX_BYTES = 4 * 1024 * 1024
_LOOK_AGAIN_S = 0.5
_GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL


class Output:
    """A bounded queue of lines in front of one descriptor."""

    def __init__(
        self,
        descriptor: int,
        *,
        on_closed: Callable[[OSError], None],
        dropped_line: Callable[[int], str],
        encoding: str = "utf-8",
        max_lines: int = MAX_LINES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Begin to write.

        Args:
            on_closed: called from the writing thread, once, if nothing can be written any more;
                that nobody reads is a ``BrokenPipeError``.
            dropped_line: the line that stands where a number of lines were dropped.
            max_lines, max_bytes: most that waits to be written.
        """
        self.dropped = 0
        self._descriptor = descriptor
        self._on_closed = on_closed
        self._dropped_line = dropped_line
        self._encoding = encoding
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._dropped_here = 0
        self._ending = False
        self._closed = False
        self._change = threading.Condition()
        # A daemon: at the end of the process a write that is stuck is left alone.
        self._thread = threading.Thread(target=self._serve, name="tap output", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether a line would be taken; asked before one is made, which costs more."""
        return len(self._waiting) < self._max_lines and self._num_bytes < self._max_bytes

    def put(self, line: str) -> bool:
        """Write a line some time; returns False if there was no room and it was dropped."""
        with self._change:
            if self._closed:
                return True
            if not self.has_room:
                self._drop()
                return False
            if self._dropped_here:
                note = self._dropped_line(self._dropped_here)
                self._dropped_here = 0
                self._append(note)
            self._append(line)
            self._change.notify_all()
        return True

    def drop(self) -> None:
        """Count a line that was not made, as there is no room."""
        with self._change:
            self._drop()

    def finish(self) -> None:
        """Take no more lines. What waits is still written."""
        with self._change:
            if self._dropped_here and not self._closed:
                self._append(self._dropped_line(self._dropped_here))
                self._dropped_here = 0
            self._ending = True
            self._change.notify_all()

    def join(self, within_s: float) -> bool:
        """After ``finish``, wait until all is written; returns whether it was, within the time."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _drop(self) -> None:
        self.dropped += 1
        self._dropped_here += 1

    def _append(self, line: str) -> None:
        data = f"{line}\n".encode(self._encoding, "replace")
        self._waiting.append(data)
        self._num_bytes += len(data)

    # -- the writing thread -------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while (data := self._next()) is not None:
                while data:
                    data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self._give_up(error)

    def _next(self) -> bytes | None:
        """All that waits; None at the end."""
        with self._change:
            while not self._waiting:
                if self._ending:
                    return None
                if not self._change.wait(_LOOK_AGAIN_S) and _is_gone(self._descriptor):
                    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._num_bytes = 0
            return data

    def _give_up(self, error: OSError) -> None:
        with self._change:
            self._closed = True
            self._waiting.clear()
            self._num_bytes = 0
        if error.errno == errno.EIO:  # a terminal that has gone
            error = BrokenPipeError(*error.args)
        self._on_closed(error)


def _is_gone(descriptor: int) -> bool:
    """Whether the reader of a pipe or terminal has gone; a write would tell, but later."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & _GONE for _, event in poll.poll(0))
