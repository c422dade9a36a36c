"""Snapshots on their way from those who provide them to those who asked.

A *ticket* is one snapshot that was asked of a provider. Who asks before its first part has come
shares it; who asks later may have missed what it does not include, and gets another. A peer that
does not take over what was fetched for it has no more fetched, so what waits for it is bounded.
Owns tickets and who provides what. It must not know what is in a snapshot.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hear.buses.nng.access import EVERYTHING, Grants
from hear.buses.nng.frames import Snapshot, SnapshotFor, Wanted
from hear.buses.nng.index import StemIndex
from hear.buses.nng.peers import Peer
from hear.errors import RemoteProtocolError

MAX_TICKETS: Final = 4
"""Snapshots that are fetched for one peer at once from those with one key."""

FETCH_BELOW_BYTES: Final = 8 << 20
"""No more is fetched for a peer to which so much is owed."""

MAX_KEY_STREAM_BYTES: Final = 1 << 20
"""Most bytes of the streams that all with one key provide, some 16,000 streams."""

_STREAM_BYTES: Final = 32  # what a stream takes beside its letters
_MAX_WANTS: Final = 32_768
_MAX_STREAMS: Final = 4_096
MAX_SNAPSHOT_BYTES: Final = 64 << 20
"""Most bytes of one snapshot: a reader keeps all its parts until it is whole."""

_MESSAGE_BYTES: Final = 256  # what a message takes beside its bytes, at a reader


@dataclass(slots=True, eq=False)
class _Ticket:
    number: int
    stem: str
    provider: Peer
    size_bytes: int = 0
    waiting: dict[tuple[Peer, int], None] = field(default_factory=dict)


class Snapshots:
    """Who provides what, and who waits for it."""

    def __init__(self, has_to_send: Callable[[Peer], None]) -> None:
        """``has_to_send`` is called with each peer that something was put in the backlog of."""
        self._has_to_send = has_to_send
        self._providers: dict[str, Peer] = {}
        self._stems = StemIndex()  # of these
        self._tickets: dict[int, _Ticket] = {}
        self._fresh: dict[str, _Ticket] = {}  # of which no part has come, by stem
        self._begun: dict[str, _Ticket] = {}  # of which some have, by stem
        self._last_ticket = 0
        self._key_bytes: dict[Grants, int] = {}  # of the streams that those with a key provide

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def provided(self) -> list[str]:
        """The streams of which there are snapshots."""
        return list(self._providers)

    def covered(self, patterns: tuple[str, ...]) -> list[str]:
        """The streams among them that one of some patterns covers."""
        return list(self._stems.covered(patterns))

    def provide(self, peer: Peer, stem: str) -> bool:
        """A peer answers for a stream from now on; returns whether it may.

        All whose patterns match are told of each stream, so those with one key may not fill their
        memory with streams.

        Raises:
            RemoteProtocolError: it provides too many.
        """
        before = self._providers.get(stem)
        if before is peer:
            return True
        if not self._has_room(peer.grants, stem):
            return False
        if len(peer.provides) >= _MAX_STREAMS:
            raise RemoteProtocolError(f"more than {_MAX_STREAMS} streams are provided")
        if before is None:
            self._stems.add(stem)
        else:
            self._not_any_more(before, stem)
        self._providers[stem] = peer
        peer.provides[stem] = None
        peer.text_bytes += len(stem)
        self._count(peer, len(stem) + _STREAM_BYTES)
        asked = self._fresh.get(stem)
        if asked is not None:  # whoever was to answer may never do so
            self._close(asked)
            for reader, subscription in asked.waiting:
                self.fetch(reader, subscription, stem)
        return True

    def unprovide(self, peer: Peer, stem: str) -> None:
        """A peer answers for a stream no more, if it does; who waits for its snapshot gets none."""
        if self._providers.get(stem) is not peer:
            return
        self._drop(peer, stem)
        for table in (self._fresh, self._begun):
            ticket = table.get(stem)
            if ticket is not None and ticket.provider is peer:
                self._end(ticket, failed=True)

    def fetch(self, peer: Peer, subscription: int, stem: str) -> None:
        """A subscription of a peer wants a snapshot of a stream. If it wants too many already,
        which may be others' doing, there is none of this one."""
        if peer.num_wants >= _MAX_WANTS:
            peer.backlog.put(SnapshotFor([subscription], stem, [], True))
            self._has_to_send(peer)
            return
        provider = self._providers.get(stem)
        wants = peer.wants.setdefault(None if provider is None else provider.grants, {})
        if (stem, subscription) not in wants:
            wants[stem, subscription] = None
            peer.text_bytes += len(stem)
        self.go_on(peer)

    def go_on(self, peer: Peer) -> None:
        """Begin to fetch what a peer wants, as far as there is room for it.

        Those who provide for one key may be slow, or never answer: then it has nothing of theirs,
        and goes on with what others provide.
        """
        keys = list(peer.wants)
        for key in keys:  # which become more where another took a provider's place
            keys += self._go_on(peer, key)
            if not peer.wants.get(key, True):
                del peer.wants[key]

    def _go_on(self, peer: Peer, key: Grants | None) -> list[Grants]:
        """The same with what those with one key provide; returns the keys of others that do now."""
        backlog, wants = peer.backlog, peer.wants.get(key, {})
        moved: dict[Grants, None] = {}
        while (
            wants
            and list(peer.tickets.values()).count(key) < MAX_TICKETS
            and backlog.owed_bytes < FETCH_BELOW_BYTES
        ):
            stem, subscription = next(iter(wants))
            del wants[stem, subscription]
            provider = self._providers.get(stem)
            if provider is not None and provider.grants is not key:
                peer.wants.setdefault(provider.grants, {})[stem, subscription] = None
                moved[provider.grants] = None
                continue
            peer.text_bytes -= len(stem)
            if provider is None or not peer.grants.may_hear(stem):
                backlog.put(SnapshotFor([subscription], stem, [], True))
                self._has_to_send(peer)
                continue
            ticket = self._fresh.get(stem)
            if ticket is None:
                self._last_ticket += 1
                ticket = _Ticket(self._last_ticket, stem, provider)
                self._tickets[ticket.number] = self._fresh[stem] = ticket
                provider.backlog.put(Wanted(stem, ticket.number))
                self._has_to_send(provider)
            ticket.waiting[peer, subscription] = None
            peer.tickets[ticket.number] = provider.grants
        return list(moved)

    def take(self, peer: Peer, item: Snapshot, messages: list[bytes]) -> int:
        """A part of a snapshot has come, of which ``messages`` may pass; returns how many
        subscriptions it is for."""
        ticket = self._tickets.get(item.ticket)
        if ticket is None or ticket.provider is not peer or ticket.stem != item.stem:
            return 0
        count = len(ticket.waiting)
        if self._begun.get(ticket.stem) is not ticket:
            # Who asks from here on may have missed what this snapshot does not include.
            before = self._begun.pop(ticket.stem, None)
            if before is not None:
                self._end(before, failed=True)  # nothing follows it any more
            if self._fresh.get(ticket.stem) is ticket:
                del self._fresh[ticket.stem]
            self._begun[ticket.stem] = ticket
        ticket.size_bytes += sum(map(len, messages)) + _MESSAGE_BYTES * len(messages)
        if ticket.size_bytes > MAX_SNAPSHOT_BYTES:
            self._end(ticket, failed=True)
        elif item.last:
            self._end(ticket, messages)
        else:
            self._hand_out(ticket, messages)
        return count

    def forget(self, peer: Peer) -> None:
        """A peer is gone: what it provided and asked for goes."""
        for stem in list(peer.provides):
            self._drop(peer, stem)
        peer.text_bytes -= sum(len(stem) for wants in peer.wants.values() for stem, _ in wants)
        peer.wants.clear()
        for ticket in list(self._tickets.values()):
            for waits in [w for w in ticket.waiting if w[0] is peer]:
                del ticket.waiting[waits]
            if ticket.provider is peer:
                self._end(ticket, failed=True)

    def _drop(self, peer: Peer, stem: str) -> None:
        """Nobody answers for a stream any more that this peer has answered for."""
        del self._providers[stem]
        self._stems.remove(stem)
        self._not_any_more(peer, stem)

    def _not_any_more(self, peer: Peer, stem: str) -> None:
        del peer.provides[stem]
        peer.text_bytes -= len(stem)
        self._count(peer, -len(stem) - _STREAM_BYTES)

    def _count(self, peer: Peer, size_bytes: int) -> None:
        self._key_bytes[peer.grants] = self._key_bytes.get(peer.grants, 0) + size_bytes

    def _has_room(self, grants: Grants, stem: str) -> bool:
        there = self._key_bytes.get(grants, 0)
        return grants is EVERYTHING or there + len(stem) + _STREAM_BYTES <= MAX_KEY_STREAM_BYTES

    def _end(
        self, ticket: _Ticket, messages: list[bytes] | None = None, *, failed: bool = False
    ) -> None:
        self._close(ticket)
        self._hand_out(ticket, messages or [], last=True, failed=failed)
        for peer in dict.fromkeys(peer for peer, _ in ticket.waiting):
            self.go_on(peer)

    def _close(self, ticket: _Ticket) -> None:
        self._tickets.pop(ticket.number, None)
        for table in (self._fresh, self._begun):
            if table.get(ticket.stem) is ticket:
                del table[ticket.stem]
        for peer, _ in ticket.waiting:
            peer.tickets.pop(ticket.number, None)

    def _hand_out(
        self, ticket: _Ticket, messages: list[bytes], *, last: bool = False, failed: bool = False
    ) -> None:
        by_peer: dict[Peer, list[int]] = {}
        for peer, subscription in ticket.waiting:
            by_peer.setdefault(peer, []).append(subscription)
        size_bytes = sum(map(len, messages))
        for peer, subscriptions in by_peer.items():
            item = SnapshotFor(subscriptions, ticket.stem, messages, last, failed)
            if peer.backlog.is_overdrawn and not last:
                item = SnapshotFor(subscriptions, ticket.stem, [], True, failed=True)
                for subscription in subscriptions:
                    del ticket.waiting[peer, subscription]
                peer.tickets.pop(ticket.number, None)
            peer.backlog.put(item, size_bytes)
            self._has_to_send(peer)
