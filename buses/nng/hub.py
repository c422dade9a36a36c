"""The hub's side of the bus, without I/O: it joins peers, routes what they say, and forgets them.

Owns the order of things: what happens to a frame, in which sequence, and what happens when a peer
comes, goes or is too slow. Each idea behind it stands alone: who is there (``peers``), who may
come (``joining``), what may pass (``screening``), who gets it (``routing``), what is settled
(``settlement``), snapshots (``snapshots``), and what is remembered (``history``).

It must not know what a message means. It is told what came and when, and says what to send.
"""

from typing import Any, Final, NamedTuple

import msgspec

from hear.buses.mailbox import with_any_key
from hear.buses.nng.access import Keyring
from hear.buses.nng.backlog import Backlog, Bounds, Receipt
from hear.buses.nng.frames import (
    LINK_VERSION,
    Answer,
    Challenge,
    CutOff,
    Fetch,
    Frame,
    Goodbye,
    Hello,
    Lost,
    Provide,
    Question,
    Refused,
    Run,
    Snapshot,
    Standing,
    Stranger,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Welcome,
    Will,
    Wire,
    decode,
    encode,
)
from hear.buses.nng.history import HISTORY_BYTES, History
from hear.buses.nng.joining import MAX_NAME, Admit, Joining, Resume
from hear.buses.nng.link import Link
from hear.buses.nng.peers import Peer, Peers, Subscription
from hear.buses.nng.routing import Routes
from hear.buses.nng.screening import CATEGORIES, Screening
from hear.buses.nng.settlement import SETTLE_S, Settlement
from hear.buses.nng.snapshots import Snapshots
from hear.errors import LocalProtocolError, RemoteProtocolError
from hear.seams import BusStatistics, SubscriptionStatistics
from hear.subjects import Pattern

HUB_WINDOW: Final = 3
"""Frames on their way to one peer. nng holds so many for one connection; more it would drop."""

AWAY_S: Final = 20.0
"""A peer whose connection is lost is remembered for so long, and what it missed is kept."""

_MAX_SUBSCRIPTIONS: Final = 4_096


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
        self._routes = Routes(self._peers)
        self._settlement = Settlement(until_s=now + settle_s, max_bytes=self._bounds.reliable_bytes)
        self._snapshots = Snapshots(self._has_to_send)
        self._history = History(history_bytes)
        self._dirty: dict[Peer, None] = {}
        self._published: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self._lagged = 0
        self._turned_away = 0

    @property
    def peers(self) -> list[str]:
        """Names of those who are there, or away for a moment."""
        return self._peers.names

    @property
    def refused(self) -> int:
        """Frames and messages that were turned away: garbage, oversized, not granted."""
        return self._turned_away + self._screening.refused

    # -- what the driver tells ----------------------------------------------------------------

    def receive(self, connection: int, data: bytes, now: float) -> None:
        """Take in what came over a connection."""
        try:
            wire = decode(data)
        except RemoteProtocolError as error:
            self._turn_away(connection, "frame.unreadable", error=str(error))
            return
        peer = self._peers.at(connection)
        try:
            if isinstance(wire, Hello):
                self._hello(connection, wire, now)
            elif isinstance(wire, Frame):
                if peer is None:
                    self._send(connection, Stranger(self.id))
                else:
                    self._frame(peer, wire, now)
            elif isinstance(wire, Goodbye):
                self._send(connection, Goodbye())
                if peer is not None:
                    peer.left = True
                    self._forget(peer, "peer.left")
            else:
                raise RemoteProtocolError(f"a {type(wire).__name__} from a client")
        except RemoteProtocolError as error:
            who = peer.name if peer else None
            self._turn_away(connection, "frame.unusable", peer=who, error=str(error))

    def closed(self, connection: int, now: float) -> None:
        """A connection is gone."""
        self._joining.closed(connection)
        peer = self._peers.detach(connection, now)
        if peer is not None:
            self._event("peer.away", peer=peer.name)

    def tick(self, now: float) -> None:
        """Do what is due by now."""
        self._settlement.tick(self._peers, now)
        for peer in self._peers:
            if peer.connection is None:
                if now >= peer.away_since_s + self._away_s:
                    self._forget(peer, "peer.lost")
            elif peer.link.lost(now):
                self.to_close.append(peer.connection)
                self.closed(peer.connection, now)
            else:
                for data in peer.link.due(now):
                    self.output.append((peer.connection, data))

    def next_due(self) -> float:
        """When ``tick`` has to be called next."""
        due = self._settlement.next_due()
        for peer in self._peers:
            if peer.connection is None:
                due = min(due, peer.away_since_s + self._away_s)
            else:
                due = min(due, peer.link.next_due())
        return due

    def flush(self, now: float) -> None:
        """Fill frames with what waits, and acknowledge what came."""
        dirty, self._dirty = self._dirty, {}
        for peer in dirty:
            if peer.connection is None:
                continue
            while peer.backlog and peer.link.can_send:
                items, receipts = peer.backlog.take()
                data = peer.link.send(items, now)
                peer.on_their_way.append((peer.link.number, receipts))
                self.output.append((peer.connection, data))
            acknowledgement = peer.link.acknowledgement(now)
            if acknowledgement is not None:
                self.output.append((peer.connection, acknowledgement))

    def stop(self) -> None:
        """Tell all peers that the hub stops."""
        for peer in self._peers:
            if peer.connection is not None:
                self._send(peer.connection, Goodbye())

    def statistics(self) -> BusStatistics:
        """What has passed, and how each subscription of each peer fares.

        What waits for a peer at the hub counts for each of its subscriptions.
        """
        rows = []
        for peer in self._peers:
            told = {name: row for name, *row in peer.rows}
            waiting, dropped = len(peer.backlog), peer.backlog.dropped
            for subscription in peer.subscriptions.values():
                queued, received, missed = told.get(subscription.name, (0, 0, 0))
                rows.append(
                    SubscriptionStatistics(
                        name=_row_name(peer.name, subscription.name),
                        queued=queued + waiting,
                        received=received,
                        dropped=missed + dropped,
                    )
                )
        lagged = self._lagged + sum(peer.lagged for peer in self._peers)
        return BusStatistics(
            published=dict(self._published), subscriptions=tuple(rows), lagged=lagged
        )

    # -- coming and going ---------------------------------------------------------------------

    def _hello(self, connection: int, hello: Hello, now: float) -> None:
        decision = self._joining.decide(connection, hello, self._peers, now)
        if isinstance(decision, Challenge):
            self._send(connection, decision)
        elif isinstance(decision, Refused):
            self._turned_away += 1
            self._send(connection, decision)
            self._event("peer.refused", peer=hello.name[:MAX_NAME], reason=decision.reason)
        elif isinstance(decision, Resume):
            self._resume(decision.peer, connection, hello, now)
        else:
            if decision.replaced is not None:
                self._forget(decision.replaced, decision.event)
            self._admit(connection, hello, decision, now)

    def _admit(self, connection: int, hello: Hello, decision: Admit, now: float) -> None:
        peer = Peer(
            name=hello.name,
            session=hello.session,
            grants=decision.grants,
            link=Link(window=HUB_WINDOW, now=now),
            backlog=Backlog(self._bounds),
        )
        self._peers.add(peer, connection)
        self._send(connection, Welcome(LINK_VERSION, self.id, False, 0))
        self._event("peer.joined", peer=peer.name)

    def _resume(self, peer: Peer, connection: int, hello: Hello, now: float) -> None:
        if peer.connection is not None and peer.connection != connection:
            self.to_close.append(peer.connection)
            self._peers.detach(peer.connection, now)
        self._peers.attach(peer, connection)
        self._send(connection, Welcome(LINK_VERSION, self.id, True, peer.link.received))
        for data in peer.link.resume(hello.received, now):
            self.output.append((connection, data))
        peer.taken_over(hello.received)
        self._has_to_send(peer)
        self._event("peer.resumed", peer=peer.name)

    def _turn_away(self, connection: int, event: str, **facts: Any) -> None:
        """Nothing that makes sense comes over this connection."""
        self._turned_away += 1
        self._event(event, connection=connection, **facts)
        self.to_close.append(connection)

    def _forget(self, peer: Peer, event: str) -> None:
        """A peer is gone for good: what it provided and asked for goes, and its will is done."""
        self._event(event, peer=peer.name)
        self._peers.remove(peer)
        self._routes.changed()
        self._dirty.pop(peer, None)
        self._snapshots.forget(peer)
        peer.drop_reliable()
        peer.taken_over(peer.link.number)
        if not peer.left and peer.will:
            self._event(
                "will.done", peer=peer.name, messages=sum(len(r.messages) for r in peer.will)
            )
            for run in peer.will:
                self._publish(peer, run, Receipt(0))

    # -- what a peer says ---------------------------------------------------------------------

    def _frame(self, peer: Peer, frame: Frame, now: float) -> None:
        items, acknowledged = peer.link.receive(frame, now)
        peer.taken_over(acknowledged)
        self._has_to_send(peer)
        if not items:
            return
        receipt = Receipt(frame.number)
        peer.unsettled.append(receipt)
        for item in items:
            if isinstance(item, Run):
                self._publish(peer, item, receipt)
            else:
                self._other(peer, item)
        self._settlement.settle(peer)

    def _other(self, peer: Peer, item: object) -> None:
        if isinstance(item, Subscribe):
            self._subscribe(peer, item)
        elif isinstance(item, Unsubscribe):
            if peer.subscriptions.pop(item.subscription, None) is not None:
                self._routes.changed()
        elif isinstance(item, Provide):
            self._provide(peer, item)
        elif isinstance(item, Fetch):
            if item.subscription in peer.subscriptions:
                self._snapshots.fetch(peer, item.subscription, item.stem)
        elif isinstance(item, Snapshot):
            self._snapshots.take(peer, item)
        elif isinstance(item, Lost):
            self._pass_on_lost(peer, item.stems)
        elif isinstance(item, Will):
            peer.will = item.runs
        elif isinstance(item, Standing):
            peer.rows, peer.lagged = item.rows, item.lagged
        elif isinstance(item, Question):
            self._question(peer, item)
        else:
            raise RemoteProtocolError(f"a {type(item).__name__} from a client")

    def _publish(self, peer: Peer, run: Run, receipt: Receipt) -> None:
        run = self._screening.run(peer, run)
        if not run.messages:
            return
        count = len(run.messages)
        self._published[run.stem.partition(".")[0]] += count
        size_bytes = sum(map(len, run.messages))
        self._history.remember(run, size_bytes)
        if run.reliable:
            for reader in self._routes.of(run.stem):
                if not reader.backlog.put(run, size_bytes, count, receipt):
                    self._cut_off(reader)
                self._dirty[reader] = None
            self._settlement.keep(run, size_bytes, receipt)
        else:
            for reader in self._routes.of(run.stem):
                reader.backlog.put_state(run, size_bytes)
                self._dirty[reader] = None

    def _pass_on_lost(self, peer: Peer, stems: list[str]) -> None:
        for stem in stems:
            if peer.grants.may_publish(stem):
                for reader in self._routes.of(stem):
                    reader.backlog.put_lost([stem])
                    self._dirty[reader] = None

    def _cut_off(self, peer: Peer) -> None:
        self._lagged += 1
        peer.drop_reliable()
        for subscription in peer.subscriptions.values():
            if not subscription.only_state:
                subscription.cut = True
        self._routes.changed()
        reason = (
            f"more than {self._bounds.reliable_messages} reliable messages or "
            f"{self._bounds.reliable_bytes} bytes of them were left untaken at the hub"
        )
        peer.backlog.put(CutOff(reason))
        self._event("peer.cut_off", peer=peer.name, reason=reason)

    # -- subscriptions and questions ----------------------------------------------------------

    def _subscribe(self, peer: Peer, item: Subscribe) -> None:
        number = item.subscription
        if len(peer.subscriptions) >= _MAX_SUBSCRIPTIONS:
            refused = f"{_MAX_SUBSCRIPTIONS} subscriptions are the most that one peer may have"
            peer.backlog.put(Subscribed(number, [], refused=refused))
            return
        try:
            patterns = _parse(item.patterns)
        except LocalProtocolError as error:
            peer.backlog.put(Subscribed(number, [], refused=str(error)))
            return
        subscription = Subscription(number, item.name, patterns)
        peer.subscriptions[number] = subscription
        self._routes.changed()
        streams = [
            stem
            for stem in self._snapshots.provided
            if subscription.covers(stem) and peer.grants.may_hear(stem)
        ]
        complete = not item.resumed or self._settlement.waits or subscription.only_state
        peer.backlog.put(Subscribed(number, streams, complete))
        if item.resumed:
            for run, receipt in self._settlement.kept():
                if subscription.covers(run.stem) and peer.grants.may_hear(run.stem):
                    size_bytes = sum(map(len, run.messages))
                    peer.backlog.put(run, size_bytes, len(run.messages), receipt)
        for stem in streams:
            self._snapshots.fetch(peer, number, stem)

    def _provide(self, peer: Peer, item: Provide) -> None:
        if not self._screening.may_publish(peer, item.stem):
            return
        self._snapshots.provide(peer, item.stem)
        if item.resumed:
            for reader in self._routes.of(item.stem):
                for subscription in reader.subscriptions.values():
                    if subscription.covers(item.stem):
                        self._snapshots.fetch(reader, subscription.number, item.stem)

    def _question(self, peer: Peer, question: Question) -> None:
        number = question.number
        if question.about == "statistics":
            parts = [msgspec.msgpack.encode(self.statistics())]
            peer.backlog.put(Answer(number, parts, True), len(parts[0]))
        elif question.about == "history":
            try:
                patterns = _parse(question.patterns)
            except LocalProtocolError:
                patterns = ()
            for parts, size_bytes, last in self._history.tell(patterns, peer.grants):
                peer.backlog.put(Answer(number, parts, last), size_bytes)
        else:
            peer.backlog.put(Answer(number, [], True))

    # -- pieces -------------------------------------------------------------------------------

    def _has_to_send(self, peer: Peer) -> None:
        self._dirty[peer] = None

    def _told(self, peer: Peer, reason: str) -> None:
        self._has_to_send(peer)
        self._event("message.denied", peer=peer.name, reason=reason)

    def _send(self, connection: int, wire: Wire) -> None:
        self.output.append((connection, encode(wire)))

    def _event(self, name: str, **facts: Any) -> None:
        self.events.append(HubEvent(name, facts))


def _parse(patterns: list[str]) -> tuple[Pattern, ...]:
    return tuple(with_any_key(Pattern(text)) for text in patterns)


def _row_name(peer: str, subscription: str) -> str:
    return peer if peer == subscription else f"{peer}/{subscription}"
