"""Who is on the bus: one ``Peer`` for each process that joined, and what it subscribes to.

A peer is known by its session and not by its connection: a connection may break and another take
its place. A name belongs to one peer of each key, so that nobody can take that of another tenant's.
Owns the three ways to find a peer. It must not know what any of them said.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from hear.buses.nng.access import Grants
from hear.buses.nng.backlog import Backlog, Receipt
from hear.buses.nng.frames import Answer, Item, Run
from hear.buses.nng.link import Link
from hear.buses.nng.seal import Seals
from hear.subjects import Pattern

_PEER_BYTES = 16 << 10  # what a peer takes that does nothing
_TEXT_BYTES = 128  # what a text that is kept takes beside its letters
_PATTERN_BYTES = 1_024  # and a pattern, in both indexes


@dataclass(slots=True, eq=False)
class Subscription:
    """What one reader of a peer asked for. ``cut``: it gets no reliable messages any more."""

    number: int
    name: str
    patterns: tuple[Pattern, ...]
    cut: bool = False

    def covers(self, stem: str) -> bool:
        """Whether messages of a stem may match."""
        return any(pattern.covers(stem) for pattern in self.patterns)

    @property
    def only_state(self) -> bool:
        """Whether it hears nothing that is reliable."""
        return all(pattern.text.startswith("state.") for pattern in self.patterns)

    @property
    def num_patterns(self) -> int:
        """How many patterns it counts for: one at least, since it takes its place without any."""
        return max(len(self.patterns), 1)

    @property
    def size_bytes(self) -> int:
        """What it takes in memory, about."""
        return _TEXT_BYTES + sum(_PATTERN_BYTES + len(p.text) for p in self.patterns)


@dataclass(slots=True, eq=False)
class Peer:
    """One process that joined, there or away for a moment."""

    name: str
    session: str
    stay: str
    """Names this stay at this hub (``Welcome.hub``)."""
    grants: Grants
    link: Link
    backlog: Backlog
    seals: Seals | None = None
    """What frames of this connection are sealed with; None without keys."""
    connection: int | None = None
    away_since_s: float = inf
    subscriptions: dict[int, Subscription] = field(default_factory=dict)
    inbox: deque[tuple[int, bytes]] = field(default_factory=deque)
    """Frames that have come and were not looked at yet, and over which connection."""
    inbox_bytes: int = 0
    items: deque[Item] = field(default_factory=deque)
    """What is left to do of the frame that was looked at last."""
    receipt: Receipt | None = None
    """Of that frame."""
    answer: Iterator[Answer | None] | None = None
    """The answer to its question, as far as it has not been given; None where it takes time."""
    will: list[Run] = field(default_factory=list)
    will_bytes: int = 0
    subscription_bytes: int = 0
    num_patterns: int = 0
    provides: dict[str, None] = field(default_factory=dict)
    """Streams whose snapshots it answers for."""
    text_bytes: int = 0
    """Letters of the streams that it provides and of the snapshots that it waits for."""
    rows: list[tuple[str, int, int, int]] = field(default_factory=list)
    lagged: int = 0
    cut_off: int = 0
    """Subscriptions that the hub has cut off."""
    published: dict[str, int] = field(default_factory=dict)
    wants: dict[Grants | None, dict[tuple[str, int], None]] = field(default_factory=dict)
    """Snapshots that it asked for and that are not being fetched yet, by the key of who provides
    them: stem, subscription."""
    tickets: dict[int, Grants | None] = field(default_factory=dict)
    """Snapshots that are being fetched for it, and the keys of who provides them."""
    on_their_way: deque[tuple[int, int, list[Receipt]]] = field(default_factory=deque)
    """Frames that it has not taken over: number, bytes, receipts."""
    on_their_way_bytes: int = 0
    unsettled: deque[Receipt] = field(default_factory=deque)
    denials: set[str] = field(default_factory=set)
    left: bool = False
    gone: bool = False

    @property
    def size_bytes(self) -> int:
        """What is kept for it, about."""
        texts = len(self.provides) + self.num_wants + len(self.denials) + len(self.rows)
        return (
            _PEER_BYTES
            + self.backlog.size_bytes
            + 2 * self.on_their_way_bytes  # nng has a copy
            + self.inbox_bytes
            + _TEXT_BYTES * len(self.items)
            + self.link.assembly_bytes
            + self.will_bytes
            + self.subscription_bytes
            + self.text_bytes
            + 2 * _TEXT_BYTES * texts
        )

    @property
    def num_wants(self) -> int:
        """How many snapshots it asked for that are not being fetched yet."""
        return sum(map(len, self.wants.values()))

    def add(self, subscription: Subscription) -> None:
        """It subscribes."""
        self.subscriptions[subscription.number] = subscription
        self.subscription_bytes += subscription.size_bytes
        self.num_patterns += subscription.num_patterns

    def remove(self, number: int) -> Subscription | None:
        """It subscribes no more; returns what it had subscribed to."""
        subscription = self.subscriptions.pop(number, None)
        if subscription is not None:
            self.subscription_bytes -= subscription.size_bytes
            self.num_patterns -= subscription.num_patterns
        return subscription

    @property
    def num_lagged(self) -> int:
        """Subscriptions that have lagged: as it says, and before it does, as the hub knows."""
        return max(self.lagged, self.cut_off)

    def taken_over(self, number: int) -> None:
        """It has taken over what went out in frames up to ``number``."""
        while self.on_their_way and self.on_their_way[0][0] <= number:
            _, size_bytes, receipts = self.on_their_way.popleft()
            self.on_their_way_bytes -= size_bytes
            for receipt in receipts:
                receipt.open -= 1

    def drop_reliable(self) -> None:
        """It will not get the reliable messages that wait for it, and nobody waits for it."""
        for receipt in self.backlog.drop_reliable():
            receipt.open -= 1
        for _, _, receipts in self.on_their_way:
            for receipt in receipts:
                receipt.open -= 1
            receipts.clear()


class Peers:
    """All peers, by session, by name and by connection."""

    def __init__(self) -> None:
        # Sessions travel in the clear, so one key may not take those of another.
        self._by_session: dict[tuple[Grants, str], Peer] = {}
        self._by_name: dict[tuple[Grants, str], Peer] = {}
        self._by_connection: dict[int, Peer] = {}
        self._by_grants: dict[Grants, dict[Peer, None]] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_session.values()))

    def __len__(self) -> int:
        return len(self._by_session)

    @property
    def names(self) -> list[str]:
        """Names of those who are there, or away for a moment."""
        return [name for _, name in self._by_name]

    def by_session(self, grants: Grants, session: str) -> Peer | None:
        """Who of those with a key has a session."""
        return self._by_session.get((grants, session))

    def by_name(self, grants: Grants, name: str) -> Peer | None:
        """Who of those with a key has a name."""
        return self._by_name.get((grants, name))

    def count(self, grants: Grants) -> int:
        """How many hold a key."""
        return len(self._by_grants.get(grants, ()))

    def with_grants(self, grants: Grants) -> list[Peer]:
        """Those who hold a key."""
        return list(self._by_grants.get(grants, ()))

    def at(self, connection: int) -> Peer | None:
        """Who speaks over a connection."""
        return self._by_connection.get(connection)

    def add(self, peer: Peer, connection: int) -> None:
        """A peer has joined over a connection."""
        self._by_session[peer.grants, peer.session] = peer
        self._by_name[peer.grants, peer.name] = peer
        self._by_grants.setdefault(peer.grants, {})[peer] = None
        self.attach(peer, connection)

    def remove(self, peer: Peer) -> None:
        """A peer is gone for good."""
        self._by_session.pop((peer.grants, peer.session), None)
        self._by_grants.get(peer.grants, {}).pop(peer, None)
        if self._by_name.get((peer.grants, peer.name)) is peer:
            del self._by_name[peer.grants, peer.name]
        if peer.connection is not None:
            del self._by_connection[peer.connection]
            peer.connection = None

    def attach(self, peer: Peer, connection: int) -> None:
        """A peer speaks over a connection from here on."""
        peer.connection = connection
        peer.away_since_s = inf
        peer.backlog.forgive()
        self._by_connection[connection] = peer

    def detach(self, connection: int, now: float) -> Peer | None:
        """A connection is gone; returns the peer that is away by that."""
        peer = self._by_connection.pop(connection, None)
        if peer is None or peer.connection != connection:
            return None
        peer.connection = None
        peer.away_since_s = now
        return peer
