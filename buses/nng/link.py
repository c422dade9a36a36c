"""One end of a link: frames are numbered, acknowledged and sent again, without I/O.

The connection under a link may break, and a few frames may vanish in it; items still arrive once,
in order, as long as both ends live. Each end acknowledges what it has taken over, and no more than
``window`` frames are on their way. So frames fill up while one waits for the other end: at low load
each message travels at once, and at high load many travel together.

Owns the numbers and the timers. It must not know what items are, or how bytes travel.
"""

from collections import deque
from dataclasses import dataclass
from math import inf

from hear.buses.nng.frames import Frame, Item, encode

MEMBER_WINDOW = 16
"""Frames on their way to the hub. A client's own socket has a queue for more than these."""

HUB_WINDOW = 3
"""Frames on their way to one peer. nng holds so many for one connection; more it would drop."""

HEARTBEAT_S = 1.0
"""An end that has nothing to say says so this often."""

SILENCE_S = 4.0
"""An end that has not been heard for so long is taken for lost."""

ACKNOWLEDGE_S = 0.02
"""An acknowledgement waits so long for a frame that carries it."""
STUCK_S = 60.0
"""An end that is there, and takes nothing over for so long, is given up."""

FIRST_RETRY_S = 0.5
MAX_RETRY_S = 4.0


@dataclass(slots=True)
class _Sent:
    number: int
    data: bytes


class Link:
    """One end of a link."""

    def __init__(self, *, window: int, now: float, owe_most: int = 1) -> None:
        """``window`` frames may be on their way; every ``owe_most`` frames that come, the other
        end is told so, which has to be well before its own window is full."""
        self._window = window
        self._number = 0
        self._unacknowledged: deque[_Sent] = deque()
        self._retry_s = inf
        self._retry_pause_s = FIRST_RETRY_S
        self._sent_s = now
        self._owe_most = owe_most
        self._num_owed = 0
        self._acknowledge_s = inf
        self._progress_s = now
        self.heard_s = now
        self.received = 0
        """Number of the last frame taken over from the other end."""
        self.settled = 0
        """What to tell the other end of its reliable messages (``Frame.settled``)."""

    @property
    def can_send(self) -> bool:
        """Whether another frame may be on its way."""
        return len(self._unacknowledged) < self._window

    @property
    def num_unacknowledged(self) -> int:
        """Frames that the other end has not acknowledged."""
        return len(self._unacknowledged)

    @property
    def number(self) -> int:
        """Number of the last frame with items."""
        return self._number

    def send(self, items: list[Item], now: float) -> bytes:
        """Make the next frame; its bytes are kept until they are acknowledged."""
        self._number += 1
        data = encode(Frame(self._number, self.received, self.settled, items))
        if not self._unacknowledged:
            self._retry_pause_s = FIRST_RETRY_S
            self._retry_s = now + FIRST_RETRY_S
            self._progress_s = now
        self._unacknowledged.append(_Sent(self._number, data))
        self._said(now)
        return data

    def acknowledgement(self, now: float) -> bytes | None:
        """A frame without items, if the other end has waited for one long enough."""
        return self._bare(now) if now >= self._acknowledge_s else None

    def receive(self, frame: Frame, now: float) -> tuple[list[Item], int]:
        """Take over a frame; returns the items that are new, and the number acknowledged by it."""
        self.heard_s = now
        acknowledged = self._acknowledge(frame.ack, now)
        if frame.number == 0:
            return [], acknowledged
        self._num_owed += 1
        enough = self._num_owed >= self._owe_most
        self._acknowledge_s = now if enough else min(self._acknowledge_s, now + ACKNOWLEDGE_S)
        if frame.number != self.received + 1:
            return [], acknowledged  # seen before, or one before it is missing and will come again
        self.received = frame.number
        return frame.items, acknowledged

    def due(self, now: float) -> list[bytes]:
        """What has to be sent by now: frames again, or a sign of life."""
        if now >= self._retry_s and self._unacknowledged:
            self._retry_pause_s = min(self._retry_pause_s * 2, MAX_RETRY_S)
            self._retry_s = now + self._retry_pause_s
            self._said(now)
            return [sent.data for sent in self._unacknowledged]
        if now >= self._sent_s + HEARTBEAT_S:
            return [self._bare(now)]
        return []

    def next_due(self) -> float:
        """When ``due`` has to be asked next."""
        return min(self._retry_s, self._acknowledge_s, self._sent_s + HEARTBEAT_S)

    def lost(self, now: float) -> bool:
        """Whether the other end has been silent for too long."""
        return now >= self.heard_s + SILENCE_S

    def stuck(self, now: float) -> bool:
        """Whether the other end has taken nothing over for too long, although it is there."""
        return bool(self._unacknowledged) and now >= self._progress_s + STUCK_S

    def can_resume(self, received: int) -> bool:
        """Whether what the other end has not taken over is still here."""
        return self._number - len(self._unacknowledged) <= received <= self._number

    def resume(self, received: int, now: float) -> list[bytes]:
        """Go on over a new connection; returns what the other end has not taken over."""
        self.heard_s = now
        self._acknowledge(received, now)
        self._said(now)
        self._retry_pause_s = FIRST_RETRY_S
        self._retry_s = now + FIRST_RETRY_S if self._unacknowledged else inf
        return [sent.data for sent in self._unacknowledged]

    def _acknowledge(self, number: int, now: float) -> int:
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            self._unacknowledged.popleft()
            self._progress_s = now
            self._retry_pause_s = FIRST_RETRY_S
            self._retry_s = now + FIRST_RETRY_S
        if not self._unacknowledged:
            self._retry_s = inf
        return min(number, self._number)

    def _bare(self, now: float) -> bytes:
        self._said(now)
        return encode(Frame(0, self.received, self.settled))

    def _said(self, now: float) -> None:
        self._num_owed = 0
        self._acknowledge_s = inf
        self._sent_s = now
