"""The bus inside one process: the embedded default, and the one that runs in virtual time.

Owns the queues of its subscribers and what happens when one is full: state loses its oldest
message, which the reader sees as a gap; of reliable messages none is ever lost, and a reader that
leaves too many unread is closed with ``LaggedError``. A snapshot is made when its reader comes to
fetch it and is never queued, so one that is stuck costs nobody anything, and a snapshot in many
parts can't be cut by the limit of the queue.

It must not know what any message says: it reads envelopes, and bodies stay raw. It reads no clock
and starts no task, so what one subscription gets, and in which order, follows from the calls alone.
"""

from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

import trio

from hear.errors import BusError, LaggedError, LocalProtocolError
from hear.messages import Envelope
from hear.seams import BusStatistics, SnapshotProvider, SubscriptionStatistics
from hear.subjects import NOBODY, Pattern, stem_of, subject

DEFAULT_CAPACITY = 4096
_MAX_ROUTES = 16_384
_STEM_TOKENS = 4
_STATE: Final = "state"
_OTHER: Final = "other"

_Entry = tuple[int, str, Envelope]
"""Place in the order of publication, stem of the subject, message."""


def _with_any_key(pattern: Pattern) -> Pattern:
    head, _, last = pattern.text.rpartition(".")
    if last in ("*", ">") or head.count(".") != _STEM_TOKENS - 1:
        return pattern
    return Pattern(f"{head}.*")


class MemorySubscription:
    """One reader's place on a ``MemoryBus``. Made by ``MemoryBus.subscribe``."""

    def __init__(self, bus: "MemoryBus", patterns: Iterable[str], name: str, capacity: int) -> None:
        self.name = name
        self._bus = bus
        self._patterns = tuple(Pattern(text) for text in patterns)
        self._by_stem = tuple(_with_any_key(pattern) for pattern in self._patterns)
        self._capacity = capacity
        self._state: deque[_Entry] = deque()
        self._reliable: deque[_Entry] = deque()
        self._wanted: dict[str, None] = {}  # stems to make a snapshot of
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
        await trio.lowlevel.checkpoint()
        self._entered = True
        self._bus._join(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bus._leave(self)
        self._end(BusError(f"subscription {self.name!r} was left"), keep_unread=False)
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
            if self._state or self._reliable or self._wanted or self._error is not None:
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
            if scope in self._bus._providers and self._covers(scope):
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
        snapshots = self._make_snapshots() if self._wanted else []
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
        wanted, self._wanted = self._wanted, {}
        snapshots: list[Envelope] = []
        for scope in wanted:
            provider = self._bus._providers.get(scope)
            if provider is not None:
                snapshots.extend(provider())
        return snapshots

    # -- for the bus --------------------------------------------------------------------------

    def _covers(self, scope: str) -> bool:
        example = f"{scope}.{NOBODY}"
        return any(pattern.matches(example) for pattern in self._by_stem)

    def _keyed(self) -> bool:
        return self._by_stem != self._patterns

    def _matches(self, subject: str) -> bool:
        return any(pattern.matches(subject) for pattern in self._patterns)

    def _want(self, scopes: Iterable[str]) -> None:
        self._wanted.update((scope, None) for scope in scopes if self._covers(scope))

    def _put_state(self, entry: _Entry) -> None:
        queue = self._state
        if len(queue) >= self._capacity:
            scope = queue.popleft()[1]
            self._dropped += 1
            if scope in self._bus._providers:
                self._lost[scope] = None
        queue.append(entry)
        if self._sleeper is not None:
            self._wake()

    def _put_reliable(self, entry: _Entry) -> bool:
        """Take a message; returns False if there is no room."""
        if len(self._reliable) >= self._capacity:
            return False
        self._reliable.append(entry)
        if self._sleeper is not None:
            self._wake()
        return True

    def _end(self, error: BusError, *, keep_unread: bool) -> None:
        """Give the reader nothing more, or nothing more than what it has not read yet."""
        if self._error is None:
            self._error = error
        self._wanted.clear()
        self._lost.clear()
        if not keep_unread:
            self._state.clear()
            self._reliable.clear()
        self._wake()

    def _wake(self) -> None:
        sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            trio.lowlevel.reschedule(sleeper)


_Route = tuple[tuple[MemorySubscription, bool], ...]
"""Who may get the messages of one stem, and whether the key of each has to be looked at."""


class MemoryBus(trio.abc.AsyncResource):
    """Publish-subscribe in one process, on trio, in real or in virtual time.

    All memory is bounded: each subscription holds up to its capacity of either class.
    """

    def __init__(self) -> None:
        self._subscriptions: dict[MemorySubscription, None] = {}  # entered and not yet left
        self._live: dict[MemorySubscription, None] = {}  # of these, the ones that get messages
        self._providers: dict[str, SnapshotProvider] = {}
        self._routes: dict[str, _Route] = {}
        self._published = dict.fromkeys(("intent", "control", _STATE, "outcome"), 0)
        self._serial = 0
        self._lagged = 0
        self._closed = False

    def publish(self, envelope: Envelope) -> None:
        """Send a message to all whose patterns match. Never waits for a reader.

        Raises:
            BusError: the bus is closed.
        """
        if self._closed:
            raise BusError(f"message {envelope.id} ({envelope.kind}): the bus is closed")
        category = envelope.category
        scope = stem_of(envelope)
        route = self._routes.get(scope)
        if route is None:
            route = self._find_route(scope)
        counted = category if category in self._published else _OTHER
        self._published[counted] = self._published.get(counted, 0) + 1
        self._serial += 1
        entry = (self._serial, scope, envelope)
        for reader, keyed in route:
            if keyed and not reader._matches(subject(envelope)):
                continue
            if category == _STATE:
                reader._put_state(entry)
            elif not reader._put_reliable(entry):
                self._lag(reader)

    def subscribe(
        self, patterns: Iterable[str], *, name: str, capacity: int = DEFAULT_CAPACITY
    ) -> MemorySubscription:
        """Make a subscription that holds up to ``capacity`` unread messages of each class.

        It is live from entering its context to leaving it. What it is first given is a snapshot
        of every matching stream that has a provider.

        Raises:
            LocalProtocolError: a pattern is not one, or the capacity is less than 1.
            BusError: the bus is closed (also on entering).
        """
        if self._closed:
            raise BusError(f"subscription {name!r}: the bus is closed")
        if capacity < 1:
            raise LocalProtocolError(
                f"subscription {name!r}: capacity {capacity}, expected 1 or more"
            )
        return MemorySubscription(self, patterns, name, capacity)

    def provide_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        """Name who answers for the state of one stream (a subject's stem); the last one counts.

        Raises:
            LocalProtocolError: ``subject`` is not the stem of a subject.
            BusError: the bus is closed.
        """
        if self._closed:
            raise BusError(f"snapshots of {subject!r}: the bus is closed")
        Pattern(subject)
        tokens = subject.split(".")
        if len(tokens) != _STEM_TOKENS or not {"*", ">"}.isdisjoint(tokens):
            raise LocalProtocolError(
                f"snapshots of {subject!r}: expected <category>.<tenant>.<instance>.<topic>"
            )
        self._providers[subject] = provider

    def statistics(self) -> BusStatistics:
        """What has passed, and who lags: one row for each subscription that was not left."""
        return BusStatistics(
            published=dict(self._published),
            subscriptions=tuple(reader.statistics() for reader in self._subscriptions),
            lagged=self._lagged,
        )

    def close(self) -> None:
        """End all subscriptions: a reader gets what it has not read yet, and then ``BusError``."""
        self._closed = True
        for reader in self._live:
            reader._end(
                BusError(f"subscription {reader.name!r}: the bus is closed"), keep_unread=True
            )
        self._live.clear()
        self._routes.clear()
        self._providers.clear()

    async def aclose(self) -> None:
        """Close, and let others run."""
        self.close()
        await trio.lowlevel.checkpoint()

    # -- for the subscriptions ----------------------------------------------------------------

    def _join(self, reader: MemorySubscription) -> None:
        if self._closed:
            raise BusError(f"subscription {reader.name!r}: the bus is closed")
        self._subscriptions[reader] = None
        self._live[reader] = None
        self._routes.clear()
        reader._want(self._providers)

    def _leave(self, reader: MemorySubscription) -> None:
        self._subscriptions.pop(reader, None)
        self._live.pop(reader, None)
        self._routes.clear()

    def _lag(self, reader: MemorySubscription) -> None:
        statistics = reader.statistics()
        reader._end(
            LaggedError(
                f"subscription {reader.name!r} was closed: {reader._capacity} reliable messages "
                f"unread ({statistics.queued} in all) as one more came, the limit is "
                f"{reader._capacity}"
            ),
            keep_unread=False,
        )
        self._lagged += 1
        self._live.pop(reader, None)
        self._routes.clear()

    def _find_route(self, scope: str) -> _Route:
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        route = self._routes[scope] = tuple(
            (reader, reader._keyed()) for reader in self._live if reader._covers(scope)
        )
        return route
