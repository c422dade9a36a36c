"""Snapshots on their way from those who provide them to those who asked.

A *ticket* is one snapshot that was asked of a provider. Who asks before its first part has come
shares it; who asks later may have missed what it does not include, and gets another. Owns tickets
and who provides what. It must not know what is in a snapshot.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from hear.buses.nng.frames import Snapshot, SnapshotFor, Wanted
from hear.buses.nng.peers import Peer


@dataclass(slots=True, eq=False)
class _Ticket:
    stem: str
    provider: Peer
    waiting: list[tuple[Peer, int]] = field(default_factory=list)
    begun: bool = False


class Snapshots:
    """Who provides what, and who waits for it."""

    def __init__(self, has_to_send: Callable[[Peer], None]) -> None:
        """``has_to_send`` is called with each peer that something was put in the backlog of."""
        self._has_to_send = has_to_send
        self._providers: dict[str, Peer] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._fresh: dict[str, int] = {}  # tickets of which no part has come, by stem
        self._last_ticket = 0

    @property
    def provided(self) -> list[str]:
        """The streams of which there are snapshots."""
        return list(self._providers)

    def provide(self, peer: Peer, stem: str) -> None:
        """A peer answers for a stream from now on."""
        self._providers[stem] = peer

    def fetch(self, peer: Peer, subscription: int, stem: str) -> None:
        """A subscription of a peer wants a snapshot of a stream."""
        provider = self._providers.get(stem)
        if provider is None or not peer.grants.may_hear(stem):
            peer.backlog.put(SnapshotFor([subscription], stem, [], True))
            return
        number = self._fresh.get(stem)
        if number is None:
            self._last_ticket += 1
            number = self._fresh[stem] = self._last_ticket
            self._tickets[number] = _Ticket(stem, provider)
            provider.backlog.put(Wanted(stem, number))
            self._has_to_send(provider)
        if (peer, subscription) not in self._tickets[number].waiting:
            self._tickets[number].waiting.append((peer, subscription))

    def take(self, peer: Peer, item: Snapshot) -> None:
        """A part of a snapshot has come."""
        ticket = self._tickets.get(item.ticket)
        if ticket is None or ticket.provider is not peer or ticket.stem != item.stem:
            return
        if not ticket.begun:
            # Who asks from here on may have missed what this snapshot does not include.
            ticket.begun = True
            self._fresh.pop(ticket.stem, None)
        if item.last:
            self._end(item.ticket, ticket, item.messages)
        else:
            self._hand_out(ticket, item.messages, last=False)

    def forget(self, peer: Peer) -> None:
        """A peer is gone: what it provided and asked for goes."""
        for stem in [s for s, provider in self._providers.items() if provider is peer]:
            del self._providers[stem]
        for number, ticket in list(self._tickets.items()):
            if ticket.provider is peer:
                self._end(number, ticket, [])
            else:
                ticket.waiting = [(p, s) for p, s in ticket.waiting if p is not peer]

    def _end(self, number: int, ticket: _Ticket, messages: list[bytes]) -> None:
        self._tickets.pop(number, None)
        if self._fresh.get(ticket.stem) == number:
            del self._fresh[ticket.stem]
        self._hand_out(ticket, messages, last=True)

    def _hand_out(self, ticket: _Ticket, messages: list[bytes], *, last: bool) -> None:
        by_peer: dict[Peer, list[int]] = {}
        for peer, subscription in ticket.waiting:
            by_peer.setdefault(peer, []).append(subscription)
        size_bytes = sum(map(len, messages))
        for peer, subscriptions in by_peer.items():
            peer.backlog.put(SnapshotFor(subscriptions, ticket.stem, messages, last), size_bytes)
            self._has_to_send(peer)
