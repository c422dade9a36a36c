"""The bus inside one process: the embedded default, and the one that runs in virtual time.

Owns who subscribes to what and who provides snapshots. A snapshot is made when its reader comes to
fetch it and is never queued, so a reader that is stuck costs nobody anything.

It must not know what any message says: it reads envelopes, and bodies stay raw. It reads no clock
and starts no task, so what one subscription gets, and in which order, follows from the calls alone.
"""

from collections.abc import Iterable
from typing import Final

import trio

from hear.buses.mailbox import Entry, Mailbox, check_stem
from hear.errors import BusError
from hear.interfaces import BusStatistics, SnapshotProvider
from hear.messages import Envelope
from hear.subjects import stem_of, subject

DEFAULT_CAPACITY = 4096
_MAX_ROUTES = 16_384
_STATE: Final = "state"
_OTHER: Final = "other"


_Route = tuple[tuple[Mailbox, bool], ...]
"""Who may get the messages of one stem, and whether the key of each has to be looked at."""


class MemoryBus(trio.abc.AsyncResource):
    """Publish-subscribe in one process, on trio, in real or in virtual time.

    All memory is bounded: each subscription holds up to its capacity of either class.
    """

    def __init__(self) -> None:
        self._subscriptions: dict[Mailbox, None] = {}  # entered and not yet left
        self._live: dict[Mailbox, None] = {}  # of these, the ones that get messages
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
        entry: Entry = (self._serial, scope, envelope)
        for reader, keyed in route:
            if keyed and not reader.matches(subject(envelope)):
                continue
            if category == _STATE:
                reader.put_state(entry)
            elif not reader.put_reliable(entry):
                self._lag(reader)

    def subscribe(
        self, patterns: Iterable[str], *, name: str, capacity: int = DEFAULT_CAPACITY
    ) -> Mailbox:
        """Make a subscription that holds up to ``capacity`` unread messages of each class.

        It is live from entering its context to leaving it. What it is first given is a snapshot
        of every matching stream that has a provider.

        Raises:
            LocalProtocolError: a pattern is not one, or the capacity is less than 1.
            BusError: the bus is closed (also on entering).
        """
        if self._closed:
            raise BusError(f"subscription {name!r}: the bus is closed")
        return Mailbox(self, patterns, name, capacity)

    def provide_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        """Name who answers for the state of one stream (a subject's stem); the last one counts.

        Raises:
            LocalProtocolError: ``subject`` is not the stem of a subject.
            BusError: the bus is closed.
        """
        if self._closed:
            raise BusError(f"snapshots of {subject!r}: the bus is closed")
        check_stem(subject)
        self._providers[subject] = provider

    def withdraw_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        """``provider`` answers for a stream no more, if it still does."""
        if self._providers.get(subject) == provider:
            del self._providers[subject]

    def set_will(self, source: str, envelopes: Iterable[Envelope]) -> None:
        """Nothing to do: this bus does not outlive those who are on it."""

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
            reader.end(
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

    async def join(self, reader: Mailbox) -> None:
        """Enter a reader, which first wants a snapshot of all that it covers."""
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise BusError(f"subscription {reader.name!r}: the bus is closed")
        self._subscriptions[reader] = None
        self._live[reader] = None
        self._routes.clear()
        reader.want(self._providers)

    def leave(self, reader: Mailbox) -> None:
        """Forget a reader."""
        self._subscriptions.pop(reader, None)
        self._live.pop(reader, None)
        self._routes.clear()

    def provides(self, scope: str) -> bool:
        """Whether someone provides snapshots of a stream."""
        return scope in self._providers

    def snapshots(self, reader: Mailbox, wanted: Iterable[str]) -> list[Envelope]:
        """Have snapshots made, in order, by those who provide them."""
        made: list[Envelope] = []
        for scope in wanted:
            provider = self._providers.get(scope)
            if provider is not None:
                made.extend(provider())
        return made

    def _lag(self, reader: Mailbox) -> None:
        reader.lag()
        self._lagged += 1
        self._live.pop(reader, None)
        self._routes.clear()

    def _find_route(self, scope: str) -> _Route:
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        route = self._routes[scope] = tuple(
            (reader, reader.keyed()) for reader in self._live if reader.covers(scope)
        )
        return route
