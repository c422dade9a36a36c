"""A bus of one's own, inside one process. A mailbox does what every bus owes its readers."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import trio

from hear import Envelope
from hear.buses.mailbox import Mailbox, check_stem
from hear.buses.testing import check_bus
from hear.errors import BusError
from hear.interfaces import BusStatistics, SnapshotProvider
from hear.subjects import stem_of, subject


class PlainBus:
    def __init__(self) -> None:
        self._readers: dict[Mailbox, None] = {}
        self._providers: dict[str, SnapshotProvider] = {}
        self._published = dict.fromkeys(("intent", "control", "state", "outcome"), 0)
        self._lagged = 0
        self._closed = False

    def publish(self, envelope: Envelope) -> None:
        self._check_open()
        self._published[envelope.category] += 1
        entry = (sum(self._published.values()), stem_of(envelope), envelope)
        for reader in [r for r in self._readers if r.matches(subject(envelope))]:
            if envelope.category == "state":
                reader.put_state(entry)
            elif not reader.put_reliable(entry):
                reader.lag()  # it is told, and gets no more
                self._lagged += 1
                self.leave(reader)

    def subscribe(self, patterns: Iterable[str], *, name: str, capacity: int = 4096) -> Mailbox:
        self._check_open()
        return Mailbox(self, patterns, name, capacity)

    def provide_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        self._check_open()
        check_stem(subject)
        self._providers[subject] = provider

    def withdraw_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        if self._providers.get(subject) == provider:
            del self._providers[subject]

    def set_will(self, source: str, envelopes: Iterable[Envelope]) -> None:
        """It does not outlive those who are on it."""

    def statistics(self) -> BusStatistics:
        rows = tuple(reader.statistics() for reader in self._readers)
        return BusStatistics(dict(self._published), rows, self._lagged)

    def close(self) -> None:
        self._closed = True
        for reader in self._readers:
            reader.end(BusError("the bus is closed"), keep_unread=True)

    def _check_open(self) -> None:
        if self._closed:
            raise BusError("the bus is closed")

    # -- what a mailbox asks of the bus that it belongs to ------------------------------------

    async def join(self, reader: Mailbox) -> None:
        await trio.lowlevel.checkpoint()
        self._check_open()
        self._readers[reader] = None
        reader.want(self._providers)

    def leave(self, reader: Mailbox) -> None:
        self._readers.pop(reader, None)

    def provides(self, scope: str) -> bool:
        return scope in self._providers

    def snapshots(self, reader: Mailbox, wanted: Iterable[str]) -> list[Envelope]:
        providers = [self._providers[scope] for scope in wanted if scope in self._providers]
        return [envelope for provider in providers for envelope in provider()]


@asynccontextmanager
async def plain_bus() -> AsyncIterator[PlainBus]:
    bus = PlainBus()
    yield bus
    bus.close()


if __name__ == "__main__":
    trio.run(check_bus, plain_bus)
    print("keeps what every bus promises")
