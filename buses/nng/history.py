"""The latest of what passed the hub, bounded in bytes, oldest first."""

from collections import deque
from collections.abc import Iterator
from typing import Final

from hear.buses.nng.access import Grants
from hear.buses.nng.frames import FRAME_FILL_BYTES, Run
from hear.buses.nng.peers import covers
from hear.subjects import Pattern

HISTORY_BYTES: Final = 32 << 20
_RUN_BYTES: Final = 128
_MESSAGE_BYTES: Final = 64


class History:
    """What is remembered."""

    def __init__(self, max_bytes: int = HISTORY_BYTES) -> None:
        # Tuples of bytes and numbers are none of the garbage collector's business, runs would be.
        self._runs: deque[tuple[str, tuple[bytes, ...], int]] = deque()
        self._size_bytes = 0
        self._max_bytes = max_bytes

    def remember(self, run: Run, size_bytes: int) -> None:
        """Note what has passed; the oldest goes if there is no room."""
        size_bytes += _RUN_BYTES + len(run.messages) * _MESSAGE_BYTES
        self._runs.append((run.stem, tuple(run.messages), size_bytes))
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= self._runs.popleft()[-1]

    def tell(
        self, patterns: tuple[Pattern, ...], grants: Grants
    ) -> Iterator[tuple[list[bytes], bool]]:
        """What matches and may be heard, in parts: messages, and whether they are the last."""
        parts: list[bytes] = []
        size_bytes = 0
        heard: dict[str, bool] = {}
        for stem, messages, run_bytes in self._runs:
            wanted = heard.get(stem)
            if wanted is None:
                wanted = covers(patterns, stem) and grants.may_hear(stem)
                heard[stem] = wanted
            if not wanted:
                continue
            if parts and size_bytes + run_bytes > FRAME_FILL_BYTES:
                yield parts, False
                parts, size_bytes = [], 0
            parts.extend(messages)
            size_bytes += run_bytes
        yield parts, True
