"""One end of a link: frames are numbered, acknowledged and sent again, without I/O.

The connection under a link may break, and a few frames may vanish in it; items still arrive once,
in order, as long as both ends live. Each end acknowledges what it has taken over, and no more than
``window`` frames are on their way. So frames fill up while one waits for the other end: at low load
each message travels at once, and at high load many travel together.

Owns the numbers, the timers, and the item that is being put together from pieces. It must not know
what items are, or how bytes travel.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from hear.buses.nng.frames import MAX_ITEM_BYTES, Frame, Item, Piece, encode, join
from hear.errors import RemoteProtocolError

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

    def __init__(
        self,
        *,
        window: int,
        now: float,
        owe_most: int = 1,
        from_hub: bool = True,
        room: Callable[[int], bool] = lambda size_bytes: True,
    ) -> None:
        """``window`` frames may be on their way; every ``owe_most`` frames that come, the other
        end is told so, which has to be well before its own window is full.

        What comes is ``from_hub``, or from a client. ``room`` says whether an item of so many bytes
        may come in pieces now; its first piece is not taken over before, and comes again.
        """
        self._window = window
        self._from_hub = from_hub
        self._room = room
        self._pieces: list[bytes] = []
        self._missing_bytes = 0
        self.assembly_bytes = 0
        """Size of the item of which some pieces have come."""
        self.assembly_since_s = inf
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
        """Take over a frame; returns the items that are new, and the number acknowledged by it.

        Raises:
            RemoteProtocolError: pieces do not make up an item.
        """
        self.heard_s = now
        acknowledged = self._acknowledge(frame.ack, now)
        if frame.number == 0:
            return [], acknowledged
        self._num_owed += 1
        enough = self._num_owed >= self._owe_most
        self._acknowledge_s = now if enough else min(self._acknowledge_s, now + ACKNOWLEDGE_S)
        if frame.number != self.received + 1:
            return [], acknowledged  # seen before, or one before it is missing and will come again
        if frame.items and isinstance(frame.items[0], Piece):
            return self._piece(frame, frame.items[0], now), acknowledged
        if self._pieces:
            raise RemoteProtocolError(f"frame {frame.number} comes between pieces of an item")
        self.received = frame.number
        return frame.items, acknowledged

    def _piece(self, frame: Frame, piece: Piece, now: float) -> list[Item]:
        if len(frame.items) != 1 or not piece.data:
            raise RemoteProtocolError(f"frame {frame.number}: expected one piece, not empty")
        if not self._pieces:
            if not len(piece.data) < piece.size_bytes <= MAX_ITEM_BYTES:
                raise RemoteProtocolError(
                    f"pieces of {piece.size_bytes} bytes, expected more than one and at most "
                    f"{MAX_ITEM_BYTES} bytes"
                )
            if not self._room(piece.size_bytes):
                return []
            self.assembly_bytes = self._missing_bytes = piece.size_bytes
            self.assembly_since_s = now
        if piece.size_bytes != self.assembly_bytes or len(piece.data) > self._missing_bytes:
            raise RemoteProtocolError(f"frame {frame.number}: a piece of another item")
        self.received = frame.number
        self._pieces.append(piece.data)
        self._missing_bytes -= len(piece.data)
        if self._missing_bytes:
            return []
        pieces, self._pieces = self._pieces, []
        self.assembly_bytes, self.assembly_since_s = 0, inf
        return [join(b"".join(pieces), from_hub=self._from_hub)]

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

    def send_again(self, now: float) -> None:
        """Have what is not acknowledged sent as soon as ``due`` is asked."""
        if self._unacknowledged:
            self._retry_s, self._retry_pause_s = now, FIRST_RETRY_S / 2

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
