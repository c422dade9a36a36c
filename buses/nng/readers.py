"""The readers of one process, without I/O: who among them gets what the hub sends.

Owns what each of them subscribes to and which snapshots are on their way to it, by the same
mailboxes as the memory bus. What is asked of the hub is put to the ``Member``. It must not know how
bytes travel.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import structlog
import trio

from hear.buses.mailbox import Entry, Home, Mailbox
from hear.buses.nng.frames import (
    FRAME_FILL_BYTES,
    MAX_ROWS,
    CutOff,
    Fetch,
    Lost,
    Run,
    SnapshotFor,
    Standing,
    Subscribed,
)
from hear.buses.nng.member import Member
from hear.buses.nng.remembered import remember
from hear.codec import decode
from hear.errors import BusError, LaggedError, RemoteProtocolError
from hear.messages import Envelope
from hear.subjects import subject

_log = structlog.get_logger("hear.bus")

_ROW_BYTES: Final = 32
_MAX_TRIES: Final = 3


class NngSubscription(Mailbox):
    """One reader's place on a bus between processes. Made by ``NngBus.subscribe``."""

    def __init__(
        self, home: Home, number: int, patterns: Iterable[str], name: str, capacity: int
    ) -> None:
        super().__init__(home, patterns, name, capacity)
        self.number = number
        self.joined = trio.Event()
        self.refused = ""
        self._fetching: dict[str, bool] = {}  # streams; whether another snapshot is wanted after
        self._parts: dict[str, list[Envelope]] = {}
        self._withheld: set[str] = set()
        self._failures: dict[str, int] = {}

    @property
    def only_state(self) -> bool:
        """Whether it hears nothing that is reliable."""
        return all(pattern.startswith("state.") for pattern in self.patterns)

    def begin(self, streams: Sequence[str]) -> None:
        """It is entered at the hub, which sends a snapshot of each of these streams.

        Until it has come whole nothing else of a stream is taken, since it will be included.
        """
        self._withheld = set(streams)
        self._fetching = dict.fromkeys(streams, False)
        self._parts.clear()
        self._failures.clear()

    def fetch(self, stem: str) -> bool:
        """Note that a snapshot is wanted; returns whether the hub has to be asked now.

        One that is on its way already may not include what made the reader want another.
        """
        asked = stem in self._fetching
        self._fetching[stem] = asked
        return not asked

    def take_part(
        self, stem: str, envelopes: Sequence[Envelope], *, last: bool, failed: bool
    ) -> bool:
        """Take a part of a snapshot, asked for or not; returns whether to ask for another."""
        if not last:
            self._parts.setdefault(stem, []).extend(envelopes)
            return False
        parts = [*self._parts.pop(stem, ()), *envelopes]
        again = self._fetching.pop(stem, False)
        self._withheld.discard(stem)
        if failed:
            failures = self._failures[stem] = self._failures.get(stem, 0) + 1
            again = failures < _MAX_TRIES
        else:
            self._failures.pop(stem, None)
            if parts:
                self.put_snapshot(parts)
        if again:
            self._fetching[stem] = False
        return again

    def put_run(self, entries: Sequence[Entry]) -> None:
        """Take messages of one stream of state at once, unless its snapshot will include them."""
        if not (self._withheld and entries and entries[0][1] in self._withheld):
            super().put_run(entries)


_Route = tuple[tuple[NngSubscription, bool], ...]


class Readers:
    """All readers of a process."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._entered: dict[int, NngSubscription] = {}  # and not yet left
        self._live: dict[int, NngSubscription] = {}  # of these, the ones that get messages
        self._routes: dict[str, _Route] = {}
        self._serial = 0
        self.lagged = 0
        """Readers that were closed with ``LaggedError``."""
        self.unreadable = 0
        """Messages from the bus that were no envelopes."""

    def __iter__(self) -> Iterator[NngSubscription]:
        return iter(self._entered.values())

    def enter(self, reader: NngSubscription) -> None:
        """Ask the hub for what a reader subscribes to."""
        self._entered[reader.number] = reader
        self._member.subscribe(reader.number, reader.name, list(reader.patterns))

    def leave(self, reader: NngSubscription) -> None:
        """Forget a reader."""
        if self._entered.pop(reader.number, None) is not None:
            self._live.pop(reader.number, None)
            self._member.unsubscribe(reader.number)
            self._routes.clear()

    def close(self) -> None:
        """End all readers: each gets what it has not read yet, and then ``BusError``."""
        for reader in self._entered.values():
            reader.end(
                BusError(f"subscription {reader.name!r}: the bus is closed"), keep_unread=True
            )
            reader.joined.set()
        self._live.clear()
        self._routes.clear()

    def fetch(self, reader: NngSubscription, stems: Iterable[str]) -> None:
        """Have snapshots sent to a reader."""
        for stem in stems:
            if reader.number in self._live and reader.fetch(stem):
                self._member.put(Fetch(reader.number, stem))

    def standing(self) -> Standing:
        """How they fare."""
        rows: list[tuple[str, int, int, int]] = []
        size_bytes = 0
        for reader in self._entered.values():
            row = reader.statistics()
            size_bytes += len(row.name.encode(errors="replace")) + _ROW_BYTES
            if len(rows) >= MAX_ROWS or size_bytes > FRAME_FILL_BYTES // 2:
                break  # of the rest the hub knows what waits for them
            rows.append((row.name, row.queued, row.received, row.dropped))
        return Standing(rows, self.lagged)

    # -- what the hub says --------------------------------------------------------------------

    def take_run(self, run: Run) -> None:
        """Messages of one stem have come."""
        stem = run.stem
        route = self._routes.get(stem)
        if route is None:
            route = self._find_route(stem)
        if not route:
            return
        entries: list[Entry] = []
        for message in run.messages:
            self._serial += 1
            try:
                entries.append((self._serial, stem, decode(message)))
            except RemoteProtocolError as error:
                self._count_unreadable(error)
        for reader, keyed in route:
            mine = [e for e in entries if reader.matches(subject(e[2]))] if keyed else entries
            if not run.reliable:
                reader.put_run(mine)
            elif not all(reader.put_reliable(entry) for entry in mine):
                reader.lag()
                self._drop(reader)

    def take_subscribed(self, item: Subscribed) -> None:
        """The hub has noted a subscription, or refuses it."""
        self._member.subscribed(item.subscription)
        reader = self._entered.get(item.subscription)
        if reader is None:
            return
        if item.refused:
            reader.refused = item.refused
        elif not item.complete and not reader.only_state:
            self._cut(reader, "it was away for too long, and messages may be missing")
        else:
            reader.begin(item.streams)
            self._live[reader.number] = reader
            self._routes.clear()
        reader.joined.set()

    def take_snapshot(self, item: SnapshotFor) -> None:
        """A part of a snapshot has come."""
        envelopes = []
        for message in item.messages:
            try:
                envelopes.append(decode(message))
            except RemoteProtocolError as error:
                self._count_unreadable(error)
        for number in item.subscriptions:
            reader = self._live.get(number)
            if reader is not None and reader.take_part(
                item.stem, envelopes, last=item.last, failed=item.failed
            ):
                self._member.put(Fetch(number, item.stem))

    def take_lost(self, item: Lost) -> None:
        """Something of these streams was lost on the way."""
        for reader in self._live.values():
            for stem in item.stems:
                reader.lose(stem)

    def cut_off(self, item: CutOff) -> None:
        """The hub could not keep all reliable messages for this process."""
        for reader in list(self._live.values()):
            if not reader.only_state:
                self._cut(reader, item.reason)

    # -- pieces -------------------------------------------------------------------------------

    def _find_route(self, stem: str) -> _Route:
        route = tuple(
            (reader, reader.keyed()) for reader in self._live.values() if reader.covers(stem)
        )
        return remember(self._routes, stem, stem, route)

    def _cut(self, reader: NngSubscription, reason: str) -> None:
        reader.end(LaggedError(f"subscription {reader.name!r}: {reason}"), keep_unread=False)
        self._drop(reader)

    def _drop(self, reader: NngSubscription) -> None:
        self.lagged += 1
        self._live.pop(reader.number, None)
        self._member.unsubscribe(reader.number)
        self._routes.clear()

    def _count_unreadable(self, error: RemoteProtocolError) -> None:
        self.unreadable += 1
        _log.warning("message.unreadable", client=self._member.name, error=str(error))
