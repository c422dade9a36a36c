"""How far the reliable messages of each peer have come.

A sender keeps what it said until the hub calls it settled: taken over by all whom it is for. A hub
that has just begun settles nothing for a while, and keeps what passes, since peers of an earlier
hub have yet to come back. Owns that log and its end. It must not know who they are.
"""

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import Final

from hear.buses.nng.backlog import Receipt
from hear.buses.nng.frames import Run
from hear.buses.nng.peers import Peer

SETTLE_S: Final = 3.0
"""A hub that has just begun settles nothing before peers of an earlier hub had this time to come
back, since reliable messages may be meant for them."""

_RUN_BYTES: Final = 128
_MESSAGE_BYTES: Final = 64
_COMPACT: Final = 4_096
_MAX_KEPT: Final = 16_384  # runs, since whoever comes back has all of them looked through


class Settlement:
    """What is settled, and what is kept for those who come late."""

    def __init__(self, *, until_s: float, max_bytes: int) -> None:
        self._until_s = until_s
        self._max_bytes = max_bytes
        self.waits = True
        """Whether nothing is settled yet, and whoever comes back is given all that has passed."""
        self._log: list[tuple[Run, Receipt]] = []
        self._size_bytes = 0

    def next_due(self) -> float:
        """When ``tick`` has to be called."""
        return self._until_s if self.waits else inf

    def tick(self, now: float) -> bool:
        """Returns whether it begins to settle now."""
        if self.waits and now >= self._until_s:
            self._begin()
            return True
        return False

    def keep(self, run: Run, size_bytes: int, receipt: Receipt) -> None:
        """Keep a run for those who come late."""
        if not self.waits:
            return
        self._size_bytes += size_bytes + _RUN_BYTES + len(run.messages) * _MESSAGE_BYTES
        if self._size_bytes > self._max_bytes or len(self._log) >= _MAX_KEPT:
            self._begin()  # whoever comes now is told that something is missing
        else:
            self._log.append((run, receipt))

    def kept(self) -> Iterator[tuple[Run, Receipt]]:
        """What passed since this hub began."""
        return iter(self._log)

    def note(self, peer: Peer, receipt: Receipt) -> None:
        """A frame of a peer has been handed out, for as many as its receipt counts."""
        if receipt.open <= 0 and not self.waits:
            return
        unsettled = peer.unsettled
        unsettled.append(receipt)
        if len(unsettled) % _COMPACT == 0 and not self.waits:
            # What is settled is told by the first that is open; those between count for nothing.
            peer.unsettled = deque(r for r in unsettled if r.open > 0)

    def settle(self, peer: Peer) -> None:
        """Move on what a peer is told of how far its reliable messages have come."""
        if self.waits:
            return
        unsettled = peer.unsettled
        while unsettled and unsettled[0].open <= 0:
            unsettled.popleft()
        peer.link.settled = unsettled[0].number - 1 if unsettled else peer.link.received

    def _begin(self) -> None:
        self.waits = False
        self._log = []
