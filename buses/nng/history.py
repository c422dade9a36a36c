"""The latest of what passed the hub, bounded in bytes, oldest first."""

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from hear.buses.nng.access import Grants
from hear.buses.nng.frames import FRAME_FILL_BYTES, Run
from hear.buses.nng.index import index_of

HISTORY_BYTES: Final = 32 << 20
_RUN_BYTES: Final = 128
_MESSAGE_BYTES: Final = 64
_RUNS_AT_ONCE: Final = 256


class _Chapter(NamedTuple):
    number: int
    # Tuples of bytes and numbers are none of the garbage collector's business, runs would be.
    runs: list[tuple[str, tuple[bytes, ...], int]]


class History:
    """What is remembered, in chapters of some runs each."""

    def __init__(self, max_bytes: int = HISTORY_BYTES) -> None:
        self._chapters: deque[_Chapter] = deque([_Chapter(0, [])])
        self._first = 0  # runs of the oldest chapter that are forgotten
        self._size_bytes = 0
        self._max_bytes = max_bytes

    def remember(self, run: Run, size_bytes: int) -> None:
        """Note what has passed; the oldest goes if there is no room."""
        size_bytes += _RUN_BYTES + len(run.stem) + len(run.messages) * _MESSAGE_BYTES
        last = self._chapters[-1]
        if len(last.runs) >= _RUNS_AT_ONCE:
            last = _Chapter(last.number + 1, [])
            self._chapters.append(last)
        last.runs.append((run.stem, tuple(run.messages), size_bytes))
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_bytes:
            oldest = self._chapters[0]
            self._size_bytes -= oldest.runs[self._first][-1]
            oldest.runs[self._first] = ("", (), 0)
            self._first += 1
            if self._first == len(oldest.runs):
                self._first = 0
                self._chapters.popleft()
                if not self._chapters:
                    self._chapters.append(_Chapter(oldest.number + 1, []))

    def tell(
        self, patterns: tuple[str, ...], grants: Grants
    ) -> Iterator[tuple[list[bytes], bool] | None]:
        """What matches and may be heard, in parts: messages, and whether they are the last.

        None comes after so many runs as may be looked at in a turn. What is forgotten meanwhile is
        not told.
        """
        wanted = index_of(patterns)
        parts: list[bytes] = []
        size_bytes = 0
        number = self._chapters[0].number
        end = self._chapters[-1].number
        while number <= end:
            number = max(number, self._chapters[0].number)
            chapter = self._chapters[number - self._chapters[0].number]
            for stem, messages, run_bytes in list(chapter.runs):  # more may come while it is told
                if not messages or not wanted.find(stem) or not grants.may_hear(stem):
                    continue
                if parts and size_bytes + run_bytes > FRAME_FILL_BYTES:
                    yield parts, False
                    parts, size_bytes = [], 0
                parts.extend(messages)
                size_bytes += run_bytes
            number += 1
            yield None
        yield parts, True
