"""Server-sent events: bytes of a stream in, the data of each event out. Does no I/O.

Source: WHATWG HTML, section 9.2.6, as far as OpenAI's protocol uses it: names, ids and retry
times of events are read over.
"""

from collections.abc import Iterator
from typing import Final

from hear.errors import RemoteProtocolError

MAX_EVENT_BYTES: Final = 8 << 20


class EventReader:
    """Collects what comes, and gives out the data of each event that is whole."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of the events that ``chunk`` completes.

        Raises:
            RemoteProtocolError: an event is longer than any that a server has reason to send.
        """
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            line = bytes(self._line + part).removesuffix(b"\r")
            self._line.clear()
            if line:
                self._take(line)
            elif self._data:
                yield b"\n".join(self._data)
                self._data.clear()
                self._size = 0
        self._line += rest
        if self._size + len(self._line) > MAX_EVENT_BYTES:
            raise RemoteProtocolError(
                f"an event of more than {MAX_EVENT_BYTES} bytes, expected a few tokens"
            )

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            data = line[5:].removeprefix(b" ")
            self._data.append(data)
            self._size += len(data)
