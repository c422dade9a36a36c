"""A reader's mailbox: the two bounded queues behind every subscription, whatever the bus.

Owns what happens when one is full: state loses its oldest message, which the reader sees as a gap;
of reliable messages none is ever lost, and a reader that leaves too many unread is closed with
``LaggedError``. Snapshots come from the bus that the mailbox belongs to, and are not counted
against the limit, so a snapshot in many parts can't be cut by it.

It must not know how messages come in, nor what any of them says: bodies stay raw. It reads no
clock and starts no task, so what one reader gets, and in which order, follows from the calls alone.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

import trio

from hear.errors import BusError, LaggedError, LocalProtocolError
from hear.interfaces import SubscriptionStatistics
from hear.messages import Envelope
from hear.subjects import Pattern, stem_of

STEM_TOKENS = 4

Entry = tuple[int, str, Envelope]
"""Place in the order of publication, stem of the subject, message."""


class Home(Protocol):
    """What a mailbox needs of the bus that it belongs to."""

    async def join(self, reader: "Mailbox") -> None:
        """The reader has been entered; raises BusError if it cannot be."""
        ...

    def leave(self, reader: "Mailbox") -> None:
        """The reader has been left."""
        ...

    def provides(self, scope: str) -> bool:
        """Whether asking for a snapshot of a stream may bring one."""
        ...

    def snapshots(self, reader: "Mailbox", wanted: Iterable[str]) -> list[Envelope]:
        """Snapshots for a reader that are there now, or None of them and they are on their way."""
        ...


def check_stem(text: str) -> None:
    """See that a text is the stem of a subject.

    Raises:
        LocalProtocolError: it is not.
    """
    Pattern(text)
    tokens = text.split(".")
    if len(tokens) != STEM_TOKENS or not {"*", ">"}.isdisjoint(tokens):
        raise LocalProtocolError(
            f"snapshots of {text[:80]!r}: expected <category>.<tenant>.<instance>.<topic>"
        )


class Mailbox:
    """One reader's place on a bus. Made by ``subscribe`` of the bus."""

    def __init__(self, home: Home, patterns: Iterable[str], name: str, capacity: int) -> None:
        """Hold up to ``capacity`` unread messages of each class.

        Raises:
            LocalProtocolError: a pattern is not one, or the capacity is less than 1.
        """
        if capacity < 1:
            raise LocalProtocolError(
                f"subscription {name!r}: capacity {capacity}, expected 1 or more"
            )
        self.name = name
        self._home = home
        self._patterns = tuple(Pattern(text) for text in patterns)
        self._capacity = capacity
        self._state: deque[Entry] = deque()
        self._reliable: deque[Entry] = deque()
        self._wanted: dict[str, None] = {}  # stems to ask a snapshot of
        self._arrived: list[Envelope] = []  # snapshots that came by themselves
        self._lost: dict[str, None] = {}  # stems that lost something since the last receive
        self._received = 0
        self._dropped = 0
        self._entered = False
        self._error: BusError | None = None
        self._receiving = False
        self._sleeper: trio.lowlevel.Task | None = None

    # -- for the reader -----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._entered:
            raise BusError(f"subscription {self.name!r} was entered before; make another")
        self._entered = True
        await self._home.join(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._home.leave(self)
        self.end(BusError(f"subscription {self.name!r} was left"), keep_unread=False)
        if error is None:
            await trio.lowlevel.checkpoint()

    async def receive(self) -> list[Envelope]:
        """Wait for messages; returns all that are there, at least one, in order.

        Snapshots that are owed come first, and without the queued messages that they include.
        What is there when the bus is closed can still be read. An error that a snapshot's provider
        raises comes out here.

        Raises:
            LaggedError: too many reliable messages were left unread; the subscription is over.
            BusError: the bus or the subscription is closed, or another task receives.
        """
        if not self._entered:
            raise BusError(f"subscription {self.name!r}: receive before it was entered")
        if self._receiving:
            raise BusError(f"subscription {self.name!r}: another task is receiving already")
        self._receiving = True
        try:
            if self._has_something():
                await trio.lowlevel.checkpoint()
            else:
                await self._park()
            while True:
                batch = self._take()
                if batch:
                    self._received += len(batch)
                    return batch
                if self._error is not None:
                    raise self._error.with_traceback(None)
                await self._park()
        finally:
            self._receiving = False

    def request_snapshot(self, envelope: Envelope) -> None:
        """Ask for a snapshot of the stream that ``envelope`` is of.

        It is made when this reader next receives, and comes first. Nothing happens if nobody
        provides one, if the stream is not one of this subscription, or after its end.
        """
        if self._entered and self._error is None:
            scope = stem_of(envelope)
            if self._home.provides(scope) and self.covers(scope):
                self._wanted[scope] = None
                self._wake()

    def statistics(self) -> SubscriptionStatistics:
        """How this reader fares. Snapshots that are still to be made are not counted as queued."""
        return SubscriptionStatistics(
            name=self.name,
            queued=len(self._state) + len(self._reliable),
            received=self._received,
            dropped=self._dropped,
        )

    def _has_something(self) -> bool:
        return bool(
            self._state
            or self._reliable
            or self._wanted
            or self._arrived
            or self._error is not None
        )

    async def _park(self) -> None:
        # A ParkingLot would do, at twice the cost of waking a reader.
        self._sleeper = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._sleeper = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _take(self) -> list[Envelope]:
        if self._lost:
            # What was lost from the end of a stream leaves no gap to be seen, so a snapshot of it
            # comes unasked; any other loss the reader finds by itself.
            seen = {scope for _, scope, _ in self._state}
            self._wanted.update((scope, None) for scope in self._lost if scope not in seen)
            self._lost.clear()
        snapshots = self._make_snapshots() if self._wanted or self._arrived else []
        if not self._state:
            entries = self._reliable
        elif not self._reliable:
            entries = self._state
        else:
            entries = deque(sorted([*self._state, *self._reliable]))
        if snapshots:
            included: dict[tuple[str, str], tuple[int, int]] = {}
            for made in snapshots:
                included[made.source, stem_of(made)] = made.epoch, made.seq
            nothing = (-1, -1)
            batch = snapshots + [
                e
                for _, scope, e in entries
                if (e.epoch, e.seq) > included.get((e.source, scope), nothing)
            ]
        else:
            batch = [envelope for _, _, envelope in entries]
        self._state.clear()
        self._reliable.clear()
        return batch

    def _make_snapshots(self) -> list[Envelope]:
        snapshots, self._arrived = self._arrived, []
        if self._wanted:
            wanted, self._wanted = self._wanted, {}
            snapshots += self._home.snapshots(self, wanted)
        return snapshots

    # -- for the bus --------------------------------------------------------------------------

    @property
    def patterns(self) -> tuple[str, ...]:
        """What it subscribes to."""
        return tuple(pattern.text for pattern in self._patterns)

    def covers(self, scope: str) -> bool:
        """Whether messages of a stem may match."""
        return any(pattern.covers(scope) for pattern in self._patterns)

    def keyed(self) -> bool:
        """Whether the key of each message has to be looked at."""
        return any(pattern.names_key for pattern in self._patterns)

    def matches(self, subject: str) -> bool:
        """Whether a subject matches."""
        return any(pattern.matches(subject) for pattern in self._patterns)

    def want(self, scopes: Iterable[str]) -> None:
        """Ask for snapshots of those streams that match, when the reader next receives."""
        self._wanted.update((scope, None) for scope in scopes if self.covers(scope))

    def put_snapshot(self, envelopes: Iterable[Envelope]) -> None:
        """Take a snapshot, whole, that the bus was asked for before."""
        self._arrived.extend(envelopes)
        self._wake()

    def put_state(self, entry: Entry) -> None:
        """Take a message of state; the oldest goes if there is no room."""
        queue = self._state
        if len(queue) >= self._capacity:
            scope = queue.popleft()[1]
            self._dropped += 1
            if self._home.provides(scope):
                self._lost[scope] = None
        queue.append(entry)
        if self._sleeper is not None:
            self._wake()

    def put_run(self, entries: Sequence[Entry]) -> None:
        """Take messages of one stream of state at once."""
        if len(self._state) + len(entries) > self._capacity:
            for entry in entries:
                self.put_state(entry)
            return
        self._state.extend(entries)
        if self._sleeper is not None:
            self._wake()

    def put_reliable(self, entry: Entry) -> bool:
        """Take a message; returns False if there is no room."""
        if len(self._reliable) >= self._capacity:
            return False
        self._reliable.append(entry)
        if self._sleeper is not None:
            self._wake()
        return True

    def lose(self, scope: str) -> None:
        """Note that something of a stream was lost before it came here.

        It may have been the end of the stream, whatever is queued here, so a snapshot is wanted.
        """
        if self._error is None and self.covers(scope):
            self._wanted[scope] = None
            self._wake()

    def lag(self) -> LaggedError:
        """End it, since one more reliable message came than it can hold."""
        error = LaggedError(
            f"subscription {self.name!r} was closed: {self._capacity} reliable messages "
            f"unread ({len(self._state) + len(self._reliable)} in all) as one more came, the limit "
            f"is {self._capacity}"
        )
        self.end(error, keep_unread=False)
        return error

    def end(self, error: BusError, *, keep_unread: bool) -> None:
        """Give the reader nothing more, or nothing more than what it has not read yet."""
        if self._error is None:
            self._error = error
        self._wanted.clear()
        self._arrived.clear()
        self._lost.clear()
        if not keep_unread:
            self._state.clear()
            self._reliable.clear()
        self._wake()

    def _wake(self) -> None:
        sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            trio.lowlevel.reschedule(sleeper)
