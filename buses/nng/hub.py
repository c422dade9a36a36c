"""The hub's side of the bus, without I/O: it joins peers, routes what they say, and forgets them.

Owns the order of things: what happens to a frame, in which sequence, and what happens when a peer
comes, goes or is too slow. Each idea behind it stands alone: who is there (``peers``), who may
come (``joining``), what may pass (``screening``), who gets it (``routing``), what is settled
(``settlement``), snapshots (``snapshots``), what is remembered (``history``), and what may be
asked (``questions``).

It must not know what a message means. It is told what came and when, and says what to send.
"""

from collections.abc import Iterable
from itertools import count
from typing import Any, Final, NamedTuple

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
from hear.buses.nng.link import HUB_WINDOW, MEMBER_WINDOW, Link
from hear.buses.nng.peers import Peer, Peers, Subscription
from hear.buses.nng.questions import (
    Gone,
    answer_history,
    answer_statistics,
    parse,
    stand,
    statistics,
)
from hear.buses.nng.routing import Routes
from hear.buses.nng.screening import Screening
from hear.buses.nng.settlement import SETTLE_S, Settlement
from hear.buses.nng.snapshots import Snapshots
from hear.errors import LocalProtocolError, RemoteProtocolError
from hear.seams import BusStatistics

AWAY_S: Final = 20.0
"""A peer whose connection is lost is remembered for so long, and what it missed is kept."""

_MAX_SUBSCRIPTIONS: Final = 4_096
_MAX_PATTERNS: Final = 256
_MAX_UNKNOWN_BYTES: Final = 4_096


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
        self._parted: set[int] = set()  # connections over which a goodbye was said
        self._stays = count(1)
        self._gone = Gone()
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
        peer = self._peers.at(connection)
        if peer is None and len(data) > _MAX_UNKNOWN_BYTES:  # no hello is so long
            self._send(connection, Stranger(self.id))
            return
        try:
            wire = decode(data)
        except RemoteProtocolError as error:
            self._turn_away(connection, "frame.unreadable", error=str(error))
            return
        try:
            if isinstance(wire, Hello):
                self._hello(connection, wire, now)
            elif isinstance(wire, Frame):
                if peer is None:
                    self._send(connection, Stranger(self.id))
                else:
                    self._frame(peer, wire, now)
            elif isinstance(wire, Goodbye):
                self._goodbye(connection, peer)
            else:
                raise RemoteProtocolError(f"a {type(wire).__name__} from a client")
        except RemoteProtocolError as error:
            who = peer.name if peer else None
            self._turn_away(connection, "frame.unusable", peer=who, error=str(error))

    def closed(self, connection: int, now: float) -> None:
        """A connection is gone."""
        self._joining.closed(connection)
        self._parted.discard(connection)
        peer = self._peers.detach(connection, now)
        if peer is not None:
            self._event("peer.away", peer=peer.name)

    def tick(self, now: float) -> None:
        """Do what is due by now."""
        if self._settlement.tick(now):
            self._dirty.update(dict.fromkeys(self._peers))
        for peer in self._peers:
            if peer.connection is None:
                if now >= peer.away_since_s + self._away_s:
                    self._forget(peer, "peer.lost")
            elif peer.link.lost(now):
                self.to_close.append(peer.connection)
                self.closed(peer.connection, now)
            elif peer.link.stuck(now):
                self._forget(peer, "peer.stuck")
            else:
                for data in peer.link.due(now):
                    self.output.append((peer.connection, data))
                acknowledgement = peer.link.acknowledgement(now)
                if acknowledgement is not None:
                    self.output.append((peer.connection, acknowledgement))

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
        while self._dirty:  # what one takes over may let another be asked for more
            dirty, self._dirty = self._dirty, {}
            for peer in dirty:
                if peer.connection is not None:
                    self._fill(peer, peer.connection, now)

    def _fill(self, peer: Peer, connection: int, now: float) -> None:
        self._settlement.settle(peer)
        while peer.backlog and peer.link.can_send:
            items, receipts = peer.backlog.take()
            data = peer.link.send(items, now)
            peer.on_their_way.append((peer.link.number, receipts))
            self.output.append((connection, data))
            if peer.wants:
                self._snapshots.go_on(peer)
        acknowledgement = peer.link.acknowledgement(now)
        if acknowledgement is not None:
            self.output.append((connection, acknowledgement))

    def stop(self) -> None:
        """Tell all peers that the hub stops."""
        for peer in self._peers:
            if peer.connection is not None:
                self._send(peer.connection, Goodbye())

    def statistics(self) -> BusStatistics:
        """What has passed, and how each subscription of each peer fares.

        What waits for a peer at the hub counts for each of its subscriptions.
        """
        return statistics(list(self._peers), self._gone)

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
            self._resume(decision, connection, hello, now)
        else:
            if decision.replaced is not None:
                self._forget(decision.replaced, decision.event)
            self._admit(connection, hello, decision, now)

    def _admit(self, connection: int, hello: Hello, decision: Admit, now: float) -> None:
        self._displace(connection, None)
        peer = Peer(
            name=hello.name,
            session=hello.session,
            stay=f"{self.id}/{next(self._stays)}",
            grants=decision.grants,
            link=Link(window=HUB_WINDOW, owe_most=MEMBER_WINDOW // 2, now=now),
            backlog=Backlog(self._bounds),
        )
        self._peers.add(peer, connection)
        self._send(connection, Welcome(LINK_VERSION, peer.stay, False, 0))
        self._event("peer.joined", peer=peer.name)

    def _resume(self, decision: Resume, connection: int, hello: Hello, now: float) -> None:
        peer = decision.peer
        self._displace(connection, peer)
        if peer.connection is not None and peer.connection != connection:
            self.to_close.append(peer.connection)
            self._peers.detach(peer.connection, now)
        self._peers.attach(peer, connection)
        resumed = not decision.from_start
        self._send(connection, Welcome(LINK_VERSION, peer.stay, resumed, peer.link.received))
        received = hello.received if resumed else 0
        for data in peer.link.resume(received, now):
            self.output.append((connection, data))
        peer.taken_over(received)
        self._has_to_send(peer)
        self._event("peer.resumed", peer=peer.name)

    def _displace(self, connection: int, peer: Peer | None) -> None:
        """Nobody else speaks over this connection any more."""
        before = self._peers.at(connection)
        if before is not None and before is not peer:
            self._forget(before, "peer.replaced")

    def _goodbye(self, connection: int, peer: Peer | None) -> None:
        if peer is not None:
            peer.left = True
            self._parted.add(connection)
            self._forget(peer, "peer.left")
        if connection in self._parted:
            self._send(connection, Goodbye())
        else:  # it may have come over another connection, and would then be taken for lost
            self._send(connection, Stranger(self.id))

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
        if not peer.left and peer.will:
            self._event(
                "will.done", peer=peer.name, messages=sum(len(r.messages) for r in peer.will)
            )
            for run in peer.will:
                self._pass_on(peer, run, Receipt(0))
        self._gone.add(peer)

    # -- what a peer says ---------------------------------------------------------------------

    def _frame(self, peer: Peer, frame: Frame, now: float) -> None:
        items, acknowledged = peer.link.receive(frame, now)
        peer.taken_over(acknowledged)
        self._has_to_send(peer)
        if not items:
            return
        receipt = Receipt(frame.number)
        try:
            for item in items:
                if isinstance(item, Run):
                    run = self._screening.run(peer, item)
                    if run.messages:
                        self._pass_on(peer, run, receipt)
                else:
                    self._other(peer, item)
        finally:
            self._settlement.note(peer, receipt)

    def _other(self, peer: Peer, item: object) -> None:
        if isinstance(item, Subscribe | Fetch | Question) and peer.backlog.is_overdrawn:
            raise RemoteProtocolError(f"peer {peer.name!r} asks, and does not take the answers")
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
            messages = self._screening.messages(peer, item.stem, item.messages)
            self._snapshots.take(peer, item, messages)
        elif isinstance(item, Lost):
            self._pass_on_lost(peer, item.stems)
        elif isinstance(item, Will):
            peer.will = [self._screening.run(peer, run) for run in item.runs]
        elif isinstance(item, Standing):
            stand(peer, item)
        elif isinstance(item, Question):
            self._question(peer, item)
        else:
            raise RemoteProtocolError(f"a {type(item).__name__} from a client")

    def _pass_on(self, peer: Peer, run: Run, receipt: Receipt) -> None:
        count = len(run.messages)
        category = self._screening.category(run.stem)
        peer.published[category] = peer.published.get(category, 0) + count
        size_bytes = sum(map(len, run.messages))
        self._history.remember(run, size_bytes)
        if run.reliable:
            for reader in self._routes.of(run.stem):
                if not reader.backlog.put(run, size_bytes, count, receipt):
                    self._cut_off(reader)
                self._dirty[reader] = None
            if self._settlement.waits:
                self._settlement.keep(run, size_bytes, receipt)
        else:
            for reader in self._routes.of(run.stem):
                reader.backlog.put_state(run, size_bytes)
                self._dirty[reader] = None

    def _pass_on_lost(self, peer: Peer, stems: list[str]) -> None:
        for stem in stems:
            if self._screening.category(stem) == "state" and peer.grants.may_publish(stem):
                for reader in self._routes.of(stem):
                    reader.backlog.put_lost(stem)
                    self._dirty[reader] = None

    def _cut_off(self, peer: Peer) -> None:
        peer.drop_reliable()
        for subscription in peer.subscriptions.values():
            if not subscription.only_state and not subscription.cut:
                subscription.cut = True
                peer.cut_off += 1
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
            peer.backlog.put_subscribed(Subscribed(number, [], refused=refused))
            return
        if len(item.name) > MAX_NAME or len(item.patterns) > _MAX_PATTERNS:
            refused = f"expected a name of {MAX_NAME} letters and {_MAX_PATTERNS} patterns at most"
            peer.backlog.put_subscribed(Subscribed(number, [], refused=refused))
            return
        try:
            patterns = parse(item.patterns)
        except LocalProtocolError as error:
            peer.backlog.put_subscribed(Subscribed(number, [], refused=str(error)))
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
        peer.backlog.put_subscribed(Subscribed(number, streams, complete))
        if item.resumed:
            for run, receipt in self._settlement.kept():
                if subscription.covers(run.stem) and peer.grants.may_hear(run.stem):
                    size_bytes = sum(map(len, run.messages))
                    if not peer.backlog.put(run, size_bytes, len(run.messages), receipt):
                        self._cut_off(peer)
                        break
        for stem in streams:
            self._snapshots.fetch(peer, number, stem)

    def _provide(self, peer: Peer, item: Provide) -> None:
        self._screening.category(item.stem)
        if not self._screening.may_publish(peer, item.stem):
            return
        self._snapshots.provide(peer, item.stem)
        if item.resumed:
            for reader in self._routes.of(item.stem):
                for subscription in reader.subscriptions.values():
                    if subscription.covers(item.stem):
                        self._snapshots.fetch(reader, subscription.number, item.stem)

    def _question(self, peer: Peer, question: Question) -> None:
        answers: Iterable[Answer]
        if question.about == "history":
            answers = answer_history(question, self._history, peer.grants)
        elif question.about == "statistics":
            if peer.grants.may_hear_all:
                told = self.statistics()
            else:
                told = statistics([p for p in self._peers if p.grants is peer.grants], Gone())
            answers = answer_statistics(question, told)
        else:
            answers = [Answer(question.number, [], True)]
        for answer in answers:
            peer.backlog.put(answer, sum(map(len, answer.parts)))

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
