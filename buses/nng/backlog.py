"""What waits to be sent over a link, in order and within bounds.

State gives way: when there is too much of it the oldest goes, and it is noted of which stream.
Reliable messages stay; when there are too many of them, the next is refused. What else is *owed*
(snapshots, answers) is counted apart, and whoever puts it in looks at the count before. Owns the
bounds and the order.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from hear.buses.nng.frames import (
    FIELD_BYTES,
    FRAME_FILL_BYTES,
    Item,
    Lost,
    Run,
    SnapshotFor,
    Subscribed,
    size_of,
    split,
)

_ITEM_BYTES: Final = 160  # what an item costs beside its bytes
_MESSAGE_BYTES: Final = 64  # what a message costs beside its bytes
_MOST_IN_A_RUN: Final = 64  # since state gives way by whole runs
_MOST_LOST_BYTES_IN_AN_ITEM: Final = 4 << 10
_MOST_LOST: Final = 4_096


class Bounds(NamedTuple):
    """Most messages, and most bytes of them, of each class, and most items that are owed."""

    state_messages: int = 8_192
    state_bytes: int = 32 << 20
    reliable_messages: int = 65_536
    reliable_bytes: int = 64 << 20
    owed_items: int = 16_384
    owed_bytes: int = 64 << 20


class Receipt:
    """Counts those who still have to take over what frame ``number`` of a sender brought."""

    __slots__ = ("number", "open")

    def __init__(self, number: int) -> None:
        self.number = number
        self.open = 0


@dataclass(slots=True, eq=False)
class _Entry:
    serial: int
    item: Any
    size_bytes: int
    num_messages: int = 0
    receipt: Receipt | None = None


class Load(NamedTuple):
    """What one frame takes: its items, what its acknowledgement settles, and the reliable runs that
    are whole with it, which is later than their first piece."""

    items: list[Item]
    receipts: list[Receipt]
    runs: list[Run]


class Backlog:
    """What waits for one link."""

    def __init__(
        self,
        bounds: Bounds | None = None,
        split: Callable[[Item], Iterable[Item]] = split,
    ) -> None:
        self._split = split
        self.bounds = bounds or Bounds()
        self._state: deque[_Entry] = deque()
        self._other: deque[_Entry] = deque()
        self._state_messages = 0
        self._state_bytes = 0
        self._reliable_messages = 0
        self._reliable_bytes = 0
        self.owed_items = 0
        """Items that are no messages, and wait."""
        self.owed_bytes = 0
        """Bytes of them."""
        self._serial = 0
        self._mark: tuple[int, float] | None = None  # what waited last, when it was looked at
        self._lost: _Entry | None = None  # what was lost, as long as more may join it
        self._num_lost = 0
        self._tail: _Entry | None = None  # of single messages, as long as others may join it
        self._begun: _Entry | None = None  # of which some pieces were taken
        self._pieces: deque[Item] = deque()  # and the rest
        self.dropped = 0
        """Messages of state that gave way."""

    def __bool__(self) -> bool:
        return bool(self._pieces or self._state or self._other)

    @property
    def size_bytes(self) -> int:
        """What all that waits takes, in memory as well."""
        begun = self._begun.size_bytes if self._begun else 0
        return self._state_bytes + self._reliable_bytes + self.owed_bytes + begun

    @property
    def reliable_bytes(self) -> int:
        """What of it are reliable messages."""
        return self._reliable_bytes

    def is_slow(self, now: float, most_s: float) -> bool:
        """Whether reliable messages that waited ``most_s`` ago wait still. To be asked often; and
        of one that was away, to ``forgive`` it that time."""
        if not self._reliable_messages:
            self._mark = None
            return False
        oldest = next(e.serial for e in self._other if e.num_messages)
        if self._mark is None or oldest > self._mark[0]:
            self._mark = self._serial, now
        return now >= self._mark[1] + most_s

    def forgive(self) -> None:
        """The other end was away: what waits does so from now on."""
        self._mark = None

    def __len__(self) -> int:
        return self._state_messages + self._reliable_messages

    @property
    def is_overdrawn(self) -> bool:
        """Whether more is owed than the bounds allow."""
        return self.owed_items > self.bounds.owed_items or self.owed_bytes > self.bounds.owed_bytes

    def add(self, stem: str, reliable: bool, message: bytes) -> bool:
        """Add one message; returns False, and adds nothing, if it is a reliable one too many.

        Messages that follow each other on one stem become one run.
        """
        size_bytes = len(message) + _MESSAGE_BYTES
        tail = self._tail
        if (
            tail is not None
            and tail.num_messages < _MOST_IN_A_RUN
            and tail.size_bytes + size_bytes <= FRAME_FILL_BYTES
            and tail.item.stem == stem
        ):
            if reliable and self._is_full(1, size_bytes):
                return False
            tail.item.messages.append(message)
            tail.num_messages += 1
            tail.size_bytes += size_bytes
            if reliable:
                self._reliable_messages += 1
                self._reliable_bytes += size_bytes
            else:
                self._state_messages += 1
                self._state_bytes += size_bytes
                self._make_room()
        else:
            run = Run(stem, reliable, [message])
            if not reliable:
                self.put_state(run, len(message))
                self._tail = self._state[-1] if self._state else None
                return True
            if not self.put(run, len(message), 1):
                return False
            self._tail = self._other[-1]
        return True

    def put_state(self, run: Run, size_bytes: int) -> None:
        """Add a run of state."""
        count = len(run.messages)
        size_bytes += count * _MESSAGE_BYTES + _ITEM_BYTES + len(run.stem)
        self._serial += 1
        self._tail = None
        self._state.append(_Entry(self._serial, run, size_bytes, count))
        self._state_messages += count
        self._state_bytes += size_bytes
        self._make_room()

    def _make_room(self) -> None:
        bounds = self.bounds
        while (
            self._state_messages > bounds.state_messages or self._state_bytes > bounds.state_bytes
        ):
            gone = self._state.popleft()
            if gone is self._tail:
                self._tail = None
            self._count_out(gone)
            self.dropped += gone.num_messages
            self.put_lost(gone.item.stem)

    def put_lost(self, stem: str) -> None:
        """Pass on that something of a stream was dropped here, or before it came here."""
        lost = self._lost
        if self._num_lost >= _MOST_LOST:
            return  # so many streams has nobody
        if lost is None or lost.size_bytes >= _MOST_LOST_BYTES_IN_AN_ITEM:
            self._serial += 1
            lost = self._lost = _Entry(self._serial, Lost([]), _ITEM_BYTES)
            self._other.append(lost)
            self.owed_items += 1
            self.owed_bytes += lost.size_bytes
        if stem not in lost.item.stems:
            self._num_lost += 1
            lost.item.stems.append(stem)
            lost.size_bytes += len(stem) + FIELD_BYTES
            self.owed_bytes += len(stem) + FIELD_BYTES

    def put_subscribed(self, item: Subscribed) -> None:
        """Tell of a new reader, which must hear of all that is lost from here on."""
        self.put(item)
        self._lost = None

    def put(
        self,
        item: Item,
        size_bytes: int = 0,
        num_messages: int = 0,
        receipt: Receipt | None = None,
        *,
        anyway: bool = False,
    ) -> bool:
        """Add anything else; returns False, and adds nothing, if it is a message too many.

        ``size_bytes`` are those of its messages; of an item without any, and of one for many
        subscriptions, its own are counted.
        ``anyway``: it was taken before, and has only to wait once more.
        """
        if isinstance(item, Run):
            size_bytes += len(item.stem)
        elif not size_bytes or isinstance(item, SnapshotFor):
            size_bytes = size_of(item)
        size_bytes += num_messages * _MESSAGE_BYTES + _ITEM_BYTES
        if not num_messages:
            self.owed_items += 1
            self.owed_bytes += size_bytes
        elif not anyway and self._is_full(num_messages, size_bytes):
            return False
        else:
            self._reliable_messages += num_messages
            self._reliable_bytes += size_bytes
        self._serial += 1
        self._tail = None
        self._other.append(_Entry(self._serial, item, size_bytes, num_messages, receipt))
        if receipt is not None:
            receipt.open += 1
        return True

    def take(self, fill_bytes: int = FRAME_FILL_BYTES) -> Load:
        """What the next frame takes.

        Runs of one stem that follow each other become one. An item that is too large for a frame
        goes in pieces, one a frame, before anything else.
        """
        if not self._pieces:
            load = self._take_items(fill_bytes)
            if load is not None:
                return load
        return self._take_piece()

    def _take_items(self, fill_bytes: int) -> Load | None:
        items: list[Item] = []
        receipts: list[Receipt] = []
        merged: Run | None = None
        size_bytes = 0
        while size_bytes < fill_bytes and (entry := self._next(fill_bytes - size_bytes, items)):
            item, last = entry.item, items[-1] if items else None
            if not items and entry.size_bytes > FRAME_FILL_BYTES:
                self._pieces.extend(self._split(item))
                if len(self._pieces) > 1:
                    self._begun = entry
                    return None
                self._pieces.clear()
            size_bytes += entry.size_bytes
            if entry.receipt is not None:
                receipts.append(entry.receipt)
            if isinstance(item, Run) and isinstance(last, Run) and item.stem == last.stem:
                if last is not merged:  # the run itself may wait for other links too
                    items[-1] = merged = Run(last.stem, last.reliable, list(last.messages))
                merged.messages.extend(item.messages)
            else:
                items.append(item)
                merged = None
        runs = [item for item in items if isinstance(item, Run) and item.reliable]
        return Load(items, receipts, runs)

    def _take_piece(self) -> Load:
        piece = self._pieces.popleft()
        entry = self._begun
        if self._pieces or entry is None:
            return Load([piece], [], [])
        self._begun = None
        receipts = [] if entry.receipt is None else [entry.receipt]
        is_reliable = isinstance(entry.item, Run) and entry.item.reliable
        return Load([piece], receipts, [entry.item] if is_reliable else [])

    def drain(self) -> Iterator[Item]:
        """Take out all items in order, each whole, also one of which some pieces were taken."""
        begun, self._begun = self._begun, None
        self._pieces.clear()
        if begun is not None:
            yield begun.item
        while entry := self._next(0, []):
            yield entry.item

    def _next(self, room_bytes: int, items: list[Item]) -> _Entry | None:
        state, other = self._state, self._other
        if not state and not other:
            return None
        queue = state if not other or (state and state[0].serial < other[0].serial) else other
        if items and queue[0].size_bytes > room_bytes:
            return None
        entry = queue.popleft()
        if entry is self._tail:
            self._tail = None
        self._count_out(entry)
        if not entry.num_messages and isinstance(entry.item, Lost):
            self._num_lost -= len(entry.item.stems)
            if entry is self._lost:
                self._lost = None
        return entry

    def _is_full(self, num_messages: int, size_bytes: int) -> bool:
        bounds = self.bounds
        return (
            self._reliable_messages + num_messages > bounds.reliable_messages
            or self._reliable_bytes + size_bytes > bounds.reliable_bytes
        )

    def _count_out(self, entry: _Entry) -> None:
        if not entry.num_messages:
            self.owed_items -= 1
            self.owed_bytes -= entry.size_bytes
        elif entry.item.reliable:
            self._reliable_messages -= entry.num_messages
            self._reliable_bytes -= entry.size_bytes
        else:
            self._state_messages -= entry.num_messages
            self._state_bytes -= entry.size_bytes

    def drop_reliable(self) -> list[Receipt]:
        """Drop the runs that are not state; returns the receipts that were waiting for them.

        One that the other end has begun to take over is still sent, but nobody waits for it.
        """
        self._tail = None
        runs = [entry for entry in self._other if isinstance(entry.item, Run)]
        self._other = deque(entry for entry in self._other if not isinstance(entry.item, Run))
        for entry in runs:
            self._count_out(entry)
        receipts = [entry.receipt for entry in runs if entry.receipt is not None]
        if self._begun is not None and self._begun.receipt is not None:
            receipts.append(self._begun.receipt)
            self._begun.receipt = None
        return receipts
