"""The hub's side of the bus, without I/O: it joins peers, routes what they say, and forgets them.

Owns the order of things: what happens to a frame, in which sequence, and what happens when a peer
comes, goes or is too slow. Each idea behind it stands alone: who is there (``peers``), who may
come (``joining``), what may pass (``screening``), who gets it (``routing``), what is settled
(``settlement``), snapshots (``snapshots``), what is remembered (``history``), what may be asked
(``questions``), and what becomes of each thing that is said (``handling``).

It must not know what a message means. It is told what came and when, and says what to send.

Theory of operation. A connection becomes a peer's by a hello (``joining``). A peer is *here*, while
it has a connection; *away*, from when that is lost, for ``AWAY_S``; and then *gone*. A hello of the
same session brings one that is away back to where it was; a goodbye makes it gone at once, and so
does, where ``joining`` allows it, a hello of another session under its name.

Invariants:

1. A frame counts only if it came over the connection that its peer has now.
2. What a peer says is done in the order in which it was said, and what it is sent is in the order
   in which it was put into its backlog.
3. A reliable message is told its sender as settled once each reader that it was for has taken it
   over, was cut off, or is gone; so a sender that is still here can say again all that is not.
4. What is kept for a peer that is away is what is kept for one that is here and does not read, and
   has the same bounds.
5. When a peer is gone, what it provided, subscribed to and asked for goes, and its will is done,
   unless it said goodbye.

What comes over a connection that has joined waits in its peer's inbox. ``turn`` then does so much
of it as takes a few milliseconds: one key after the other, and of each one peer after the other
(``turns``). What is done is counted in units of about a microsecond, since this module has no
clock. So whoever asks for much waits, and others do not. What is kept for all peers of a key is
bounded too; with too much, the peer goes for which most is kept.
"""

from itertools import count
from typing import Any, Final, NamedTuple

from hear.buses.nng.access import Grants, Keyring
from hear.buses.nng.backlog import Backlog, Bounds, Receipt
from hear.buses.nng.frames import (
    LINK_VERSION,
    MAX_NAME,
    Challenge,
    Frame,
    Goodbye,
    Hello,
    Refused,
    Splitter,
    Stranger,
    Welcome,
    Wire,
    decode,
    encode,
)
from hear.buses.nng.handling import Handler, next_of
from hear.buses.nng.history import HISTORY_BYTES, History
from hear.buses.nng.joining import MAX_UNKNOWN_BYTES, Admit, Joining, Resume
from hear.buses.nng.link import HUB_WINDOW, MEMBER_WINDOW, Link
from hear.buses.nng.peers import Peer, Peers
from hear.buses.nng.questions import Gone
from hear.buses.nng.routing import Routes
from hear.buses.nng.screening import Screening
from hear.buses.nng.seal import Seals, is_sealed
from hear.buses.nng.settlement import SETTLE_S, Settlement
from hear.buses.nng.snapshots import Snapshots
from hear.buses.nng.turns import Ring
from hear.errors import RemoteProtocolError
from hear.interfaces import BusStatistics

AWAY_S: Final = 20.0
"""A peer whose connection is lost is remembered for so long, and what it missed is kept."""

ASSEMBLE_S: Final = 20.0
"""Time that the pieces of one item may take."""

MAX_ITEMS: Final = 1_024
"""Most items in a frame."""

SLOW_S: Final = 15.0
"""A peer that is there and has not taken over for so long what waited for it is cut off: whoever
sent it is told of nothing later as settled, so one reader would hold up all its senders."""

MAX_INBOX_FRAMES: Final = 32
"""Frames of one peer that wait for their turn: its window, and what it acknowledges meanwhile."""

MAX_INBOX_BYTES: Final = 16 << 20
"""Most bytes of such frames of one key. More is dropped, and comes again."""

MAX_ASSEMBLY_BYTES: Final = 32 << 20
"""Most bytes of items in pieces that are on their way from the peers of one key."""

# What a turn may take, and one peer of it, in units of about a microsecond, and what frames take.
_TURN: Final = 2_000
_SHARE: Final = 500
_FRAME: Final = 20
_HELLO: Final = 200
_BYTES_A_UNIT: Final = 200
# And what may be sent in a turn.
_TURN_BYTES: Final = 1 << 20
_FILL: Final = 16 << 10  # what looking at a peer counts for


class HubEvent(NamedTuple):
    """Something for the log: what happened, and to whom."""

    name: str
    facts: dict[str, Any]


class Hub:
    """Who is there, and who gets what."""

    def __init__(
        self,
        *,
        id: str,
        now: float,
        keyring: Keyring | None = None,
        bounds: Bounds | None = None,
        history_bytes: int = HISTORY_BYTES,
        settle_s: float = SETTLE_S,
        away_s: float = AWAY_S,
    ) -> None:
        """``id`` tells this hub from those before it; ``bounds`` are for each peer."""
        self.id = id
        self.output: list[tuple[int, bytes]] = []
        """What to send: connection and bytes. The driver takes it out."""
        self.to_close: list[int] = []
        """Connections to close."""
        self.events: list[HubEvent] = []
        self._bounds = bounds or Bounds()
        self._away_s = away_s
        self._peers = Peers()
        self._joining = Joining(keyring)
        self._screening = Screening(self._told)
        self._routes = Routes()
        self._settlement = Settlement(until_s=now + settle_s, max_bytes=self._bounds.reliable_bytes)
        self._snapshots = Snapshots(self._has_to_send)
        self._history = History(history_bytes)
        self._to_do = Ring()  # those who have said something
        self._dirty = Ring()  # those to whom something is to be sent
        self._inbox_bytes: dict[Grants, int] = {}
        self._grown: dict[Grants, None] = {}  # the keys for whose peers more is kept than before
        self._parted: set[int] = set()  # connections over which a goodbye was said
        self._closing: set[int] = set()  # those in ``to_close`` that are not closed yet
        self._stays = count(1)
        self._gone = Gone()
        self._splitter = Splitter()
        self._turned_away = 0
        self._handler = Handler(
            peers=self._peers,
            bounds=self._bounds,
            screening=self._screening,
            routes=self._routes,
            settlement=self._settlement,
            snapshots=self._snapshots,
            history=self._history,
            gone=self._gone,
            has_to_send=self._has_to_send,
            event=self._event,
        )

    @property
    def peers(self) -> list[str]:
        """Names of those who are there, or away for a moment."""
        return self._peers.names

    @property
    def refused(self) -> int:
        """Frames and messages that were turned away: garbage, oversized, not granted."""
        return self._turned_away + self._screening.refused

    # -- what the driver tells ----------------------------------------------------------------

    def opened(self, connection: int, now: float, certificate: str | None = None) -> None:
        """Someone has connected. ``certificate``: with TLS, the common name in that of the other
        end; None without TLS."""
        for superfluous in self._joining.opened(connection, certificate, now):
            self._close(superfluous, "connection.superfluous")

    def receive(self, connection: int, data: bytes, now: float) -> None:
        """Take in what came over a connection. What a peer says waits for its turn."""
        if connection in self._closing:
            return
        peer = self._peers.at(connection)
        if peer is None:
            self._hear_stranger(connection, data, now)
        else:
            self._keep(peer, connection, data, now)

    def closed(self, connection: int, now: float) -> None:
        """A connection is gone."""
        self._joining.closed(connection)
        self._parted.discard(connection)
        self._closing.discard(connection)
        peer = self._peers.detach(connection, now)
        if peer is not None:
            self._event("peer.away", peer=peer.name)

    def tick(self, now: float) -> None:
        """Do what is due by now."""
        if self._settlement.tick(now):
            for peer in self._peers:
                self._dirty.add(peer)
        for connection in self._joining.due(now):
            self._close(connection, "connection.did_not_join")
        for peer in self._peers:
            if peer.connection is None:
                if now >= peer.away_since_s + self._away_s:
                    self._forget(peer, "peer.lost", now)
            elif peer.link.lost(now) and not peer.inbox:
                lost = peer.connection
                self.closed(lost, now)
                self._give_up(lost)
            elif peer.link.stuck(now) or now >= peer.link.assembly_since_s + ASSEMBLE_S:
                self._forget(peer, "peer.stuck", now)
            else:
                if peer.backlog.is_slow(now, SLOW_S):
                    why = f"reliable messages were left untaken at the hub for {SLOW_S:g} s"
                    self._handler.cut_off(peer, why)
                    self._dirty.add(peer)
                if now >= peer.link.next_due():
                    self._dirty.add(peer)

    def next_due(self) -> float:
        """When ``tick`` has to be called next."""
        due = min(self._settlement.next_due(), self._joining.next_due())
        for peer in self._peers:
            if peer.connection is None:
                due = min(due, peer.away_since_s + self._away_s)
            else:
                due = min(due, peer.link.next_due())
        return due

    @property
    def busy(self) -> bool:
        """Whether there is more to do at once."""
        return bool(self._to_do or self._dirty)

    def turn(self, now: float) -> None:
        """Do a few milliseconds' worth of what was asked for, and of what is to be sent."""
        left = _TURN
        while left > 0 and self._to_do:
            peer = self._to_do.pop()
            spent = self._serve(peer, now)
            left -= spent
            if spent >= 2 * _SHARE:
                self._to_do.took(peer.grants, spent // _SHARE - 1)
            if self._has_more_to_do(peer):
                self._to_do.add(peer)
        left_bytes = _TURN_BYTES
        while left_bytes > 0 and self._dirty:
            peer = self._dirty.pop()
            if peer.connection is not None:
                left_bytes -= _FILL + self._fill(peer, peer.connection, now)
        while self._grown:
            grants = next(iter(self._grown))
            del self._grown[grants]
            self._keep_within(grants, now)

    # -- turns --------------------------------------------------------------------------------

    def _hear_stranger(self, connection: int, data: bytes, now: float) -> None:
        self.opened(connection, now)
        if not self._joining.hears(connection):
            return
        if self._joining.has_said_enough(connection):
            self._turn_away(connection, "frame.too_many")
            return
        if len(data) > MAX_UNKNOWN_BYTES or is_sealed(data):  # no hello is so
            self._send(connection, Stranger(self.id))
            return
        try:
            wire = decode(data)
        except RemoteProtocolError as error:
            self._turn_away(connection, "frame.unreadable", error=str(error))
            return
        if isinstance(wire, Hello):
            self._hello(connection, wire, now)
        elif isinstance(wire, Frame):
            self._send(connection, Stranger(self.id))
        elif isinstance(wire, Goodbye):
            self._goodbye(connection)
        else:
            self._turn_away(connection, "frame.unusable", error=f"a {type(wire).__name__}")

    def _keep(self, peer: Peer, connection: int, data: bytes, now: float) -> None:
        """Keep a frame for the turn of its peer, if there is room; else it will come again."""
        if peer.seals is None:  # else it may be somebody else's; ``_frame`` will see
            peer.link.heard_s = now
        kept_bytes = self._inbox_bytes.get(peer.grants, 0) + len(data)
        if len(peer.inbox) < MAX_INBOX_FRAMES and kept_bytes <= MAX_INBOX_BYTES:
            peer.inbox.append((connection, data))
            peer.inbox_bytes += len(data)
            self._inbox_bytes[peer.grants] = kept_bytes
            self._to_do.add(peer)

    def _empty(self, peer: Peer) -> None:
        """What a peer has said and nobody has looked at will never be."""
        self._inbox_bytes[peer.grants] = self._inbox_bytes.get(peer.grants, 0) - peer.inbox_bytes
        peer.inbox.clear()
        peer.inbox_bytes = 0
        peer.items.clear()
        peer.receipt = None
        peer.answer = None
        self._to_do.discard(peer)

    def _has_more_to_do(self, peer: Peer) -> bool:
        return bool(peer.items or peer.inbox or self._handler.can_answer(peer))

    def _serve(self, peer: Peer, now: float) -> int:
        """Do a share of what a peer has asked for; returns how many units it took."""
        spent = 1
        try:
            while spent < _SHARE:
                if peer.items:
                    spent += self._handler.do(peer, next_of(peer.items))
                    self._grown[peer.grants] = None
                    if not peer.items:
                        self._note(peer)
                elif peer.inbox:
                    connection, data = peer.inbox.popleft()
                    peer.inbox_bytes -= len(data)
                    self._inbox_bytes[peer.grants] -= len(data)
                    spent += _FRAME + len(data) // _BYTES_A_UNIT
                    spent += self._frame(peer, connection, data, now)
                elif self._handler.can_answer(peer):
                    spent += self._handler.go_on_answering(peer)
                else:
                    break
        except RemoteProtocolError as error:
            # What else was in the frame is lost, and its sender believes that it was taken over:
            # so it may not go on from here, but has to begin anew.
            self._turn_away(peer.connection, "frame.unusable", peer=peer.name, error=str(error))
            self._forget(peer, "peer.broke_off", now)
        return spent

    def _note(self, peer: Peer) -> None:
        """A frame of a peer has been handed out, or so much of it as will be."""
        if peer.receipt is not None:
            self._settlement.note(peer, peer.receipt)
            peer.receipt = None
        if peer.gone and not peer.items:
            self._gone.add(peer)

    def _keep_within(self, grants: Grants, now: float) -> None:
        """See that no more is kept for the peers of a key than may be."""
        peers = self._peers.with_grants(grants)
        sizes = {peer: peer.size_bytes for peer in peers}
        total = sum(sizes.values())
        while total > grants.max_bytes and sizes:
            largest = max(sizes, key=sizes.__getitem__)
            size_bytes = sizes[largest]
            if largest.backlog.reliable_bytes > size_bytes // 4:
                # What others have sent it; it lives, and is told that something is missing.
                why = (
                    f"more than {grants.max_bytes} bytes were left at the hub by all with this key"
                )
                self._handler.cut_off(largest, why)
                self._dirty.add(largest)
                sizes[largest] = largest.size_bytes
                total -= size_bytes - sizes[largest]
            else:
                total -= sizes.pop(largest)
                self._forget(largest, "peer.too_large", now)

    def _has_room(self, grants: Grants, size_bytes: int) -> bool:
        """Whether an item may come in pieces."""
        coming = sum(peer.link.assembly_bytes for peer in self._peers.with_grants(grants))
        return coming + size_bytes <= MAX_ASSEMBLY_BYTES

    def _fill(self, peer: Peer, connection: int, now: float) -> int:
        """Send a peer what its link takes; returns how many bytes that was."""
        self._settlement.settle(peer)
        sent = 0
        while peer.backlog and peer.link.can_send:
            load = peer.backlog.take()
            data = peer.link.send(load.items, now)
            peer.on_their_way.append((peer.link.number, len(data), load.receipts))
            peer.on_their_way_bytes += len(data)
            self._grown[peer.grants] = None
            sent += self._say(peer, connection, data)
            if peer.wants:
                self._snapshots.go_on(peer)
        for data in peer.link.due(now):
            sent += self._say(peer, connection, data)
        acknowledgement = peer.link.acknowledgement(now)
        if acknowledgement is not None:
            sent += self._say(peer, connection, acknowledgement)
        return sent

    def _say(self, peer: Peer, connection: int, data: bytes) -> int:
        self.output.append((connection, data if peer.seals is None else peer.seals.seal(data)))
        return len(data)

    def stop(self) -> None:
        """Tell all peers that the hub stops."""
        for peer in self._peers:
            if peer.connection is not None:
                self._say(peer, peer.connection, encode(Goodbye()))

    def statistics(self) -> BusStatistics:
        """What has passed, and how each subscription of each peer fares.

        What waits for a peer at the hub counts for each of its subscriptions.
        """
        return self._handler.statistics()

    # -- coming and going ---------------------------------------------------------------------

    def _hello(self, connection: int, hello: Hello, now: float) -> None:
        decision = self._joining.decide(connection, hello, self._peers, now)
        if isinstance(decision, Challenge):
            self._send(connection, decision)
        elif isinstance(decision, Refused):
            self._turned_away += 1
            self._send(connection, decision)
            self._joining.refused(connection, now)
            self._event("peer.refused", peer=hello.name[:MAX_NAME], reason=decision.reason)
        elif isinstance(decision, Resume):
            self._resume(decision, connection, hello, now)
        else:
            if decision.replaced is not None:
                self._forget(decision.replaced, decision.event, now)
            self._admit(connection, hello, decision, now)

    def _admit(self, connection: int, hello: Hello, decision: Admit, now: float) -> None:
        self._displace(connection, None, now)
        grants = decision.grants
        peer = Peer(
            name=hello.name,
            session=hello.session,
            stay=f"{self.id}/{next(self._stays)}",
            grants=grants,
            link=Link(
                window=HUB_WINDOW,
                owe_most=MEMBER_WINDOW // 2,
                now=now,
                from_hub=False,
                room=lambda size_bytes: self._has_room(grants, size_bytes),
            ),
            backlog=Backlog(self._bounds, self._splitter.split),
        )
        self._peers.add(peer, connection)
        self._joining.joined(connection)
        self._welcome(peer, connection, decision, False)
        self._grown[grants] = None
        self._event("peer.joined", peer=peer.name)

    def _resume(self, decision: Resume, connection: int, hello: Hello, now: float) -> None:
        peer = decision.peer
        self._displace(connection, peer, now)
        if peer.connection is not None and peer.connection != connection:
            self._give_up(peer.connection)
            self._peers.detach(peer.connection, now)
        self._peers.attach(peer, connection)
        self._joining.joined(connection)
        resumed = not decision.from_start
        self._welcome(peer, connection, decision, resumed)
        received = hello.received if resumed else 0
        peer.link.resume(received, now)
        peer.link.send_again(now)
        self._taken_over(peer, received)
        self._event("peer.resumed", peer=peer.name)

    def _welcome(
        self, peer: Peer, connection: int, decision: Admit | Resume, resumed: bool
    ) -> None:
        """Prove that the hub holds the key as well, and seal from here on what follows."""
        handshake, received = decision.handshake, peer.link.received
        proof = b""
        if handshake is not None:
            proof = handshake.prove_hub(decision.secret, peer.stay, resumed, received)
            to_hub, to_client = handshake.seals(decision.secret)
            peer.seals = Seals(to_client, to_hub)
        self._send(connection, Welcome(LINK_VERSION, peer.stay, resumed, received, proof))

    def _displace(self, connection: int, peer: Peer | None, now: float) -> None:
        """Nobody else speaks over this connection any more."""
        before = self._peers.at(connection)
        if before is not None and before is not peer:
            self._forget(before, "peer.replaced", now)

    def _leave(self, peer: Peer, now: float) -> None:
        """A peer has said goodbye. Its connection may have gone since."""
        peer.left = True
        if peer.connection is not None:
            self._parted.add(peer.connection)
            self._say(peer, peer.connection, encode(Goodbye()))
        self._forget(peer, "peer.left", now)

    def _goodbye(self, connection: int) -> None:
        if connection in self._parted:
            # Said again since the first answer was lost. Without keys, that is: with them, only
            # what is sealed tells that it is the hub's, and the member gives up waiting by itself.
            self._send(connection, Goodbye())
        else:  # it may have come over another connection, and would then be taken for lost
            self._send(connection, Stranger(self.id))

    def _turn_away(self, connection: int | None, event: str, **facts: Any) -> None:
        """Nothing that makes sense comes over this connection."""
        self._turned_away += 1
        self._close(connection, event, **facts)

    def _close(self, connection: int | None, event: str, **facts: Any) -> None:
        self._event(event, connection=connection, **facts)
        if connection is not None:
            self._joining.closed(connection)
            self._give_up(connection)

    def _give_up(self, connection: int) -> None:
        """Have a connection closed. Nothing that still comes over it counts, since nothing is known
        of it any more."""
        self.to_close.append(connection)
        self._closing.add(connection)

    def _forget(self, peer: Peer, event: str, now: float) -> None:
        """A peer is gone for good: what it provided and asked for goes, and its will is done."""
        self._event(event, peer=peer.name)
        if peer.connection is not None:
            self._joining.parted(peer.connection, now)  # it has to join again
        self._peers.remove(peer)
        self._handler.forget(peer)
        self._dirty.discard(peer)
        self._empty(peer)
        peer.gone = True
        if not peer.left and peer.will:
            self._event(
                "will.done", peer=peer.name, messages=sum(len(r.messages) for r in peer.will)
            )
            peer.items.extend(peer.will)
            self._to_do.add(peer)
        else:
            self._gone.add(peer)

    # -- what a peer says ---------------------------------------------------------------------

    def _frame(self, peer: Peer, connection: int, data: bytes, now: float) -> int:
        """Look at a frame of a peer; returns what that took, beside its bytes."""
        if _is_hello(data):
            if connection == peer.connection:  # else it speaks over another by now
                self._hear_stranger(connection, data, now)
            return _HELLO
        if peer.seals is not None:
            opened = peer.seals.open(data)
            if opened is None:
                self._turned_away += 1  # somebody else's word, or of another handshake
                return 0
            data = opened
        wire = decode(data)
        if isinstance(wire, Goodbye):
            self._leave(peer, now)
            return 0
        if not isinstance(wire, Frame):
            raise RemoteProtocolError(f"a {type(wire).__name__} from a client that has joined")
        if len(wire.items) > MAX_ITEMS:
            raise RemoteProtocolError(f"{len(wire.items)} items in a frame, at most {MAX_ITEMS}")
        items, acknowledged = peer.link.receive(wire, now)
        self._taken_over(peer, acknowledged)
        if items:
            peer.items.extend(items)
            self._grown[peer.grants] = None
            peer.receipt = Receipt(wire.number)
        return len(items)

    def _taken_over(self, peer: Peer, number: int) -> None:
        peer.taken_over(number)
        self._dirty.add(peer)
        if self._handler.can_answer(peer):
            self._to_do.add(peer)

    # -- pieces -------------------------------------------------------------------------------

    def _has_to_send(self, peer: Peer) -> None:
        self._dirty.add(peer)
        self._grown[peer.grants] = None

    def _told(self, peer: Peer, reason: str) -> None:
        self._has_to_send(peer)
        self._event("message.denied", peer=peer.name, reason=reason)

    def _send(self, connection: int, wire: Wire) -> None:
        self.output.append((connection, encode(wire)))

    def _event(self, name: str, **facts: Any) -> None:
        self.events.append(HubEvent(name, facts))


def _is_hello(data: bytes) -> bool:
    """Whether a frame looks like a hello: its tag is the first element of an array."""
    return data[1:3] == b"\xa1H"
