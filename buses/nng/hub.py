"""The hub's side of the bus, without I/O: who is there, and who gets what.

A *peer* is one process that joined, known by its session and not by its connection: a connection
may break and another take its place. The hub routes runs of messages by their stem, has snapshots
made by those who provide them, settles reliable messages once all whom they are for have taken them
over, remembers the latest of what passed, and publishes the will of a peer that is lost.

It must not know what a message means. It is told what came and when, and says what to send.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, NamedTuple

import msgspec

from hear.buses.mailbox import with_any_key
from hear.buses.nng.access import EVERYTHING, Grants, Keyring, new_nonce
from hear.buses.nng.backlog import Backlog, Bounds, Receipt
from hear.buses.nng.frames import (
    FRAME_FILL_BYTES,
    LINK_VERSION,
    MAX_MESSAGE_BYTES,
    Answer,
    Challenge,
    CutOff,
    Denied,
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
    SnapshotFor,
    Standing,
    Stranger,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Wanted,
    Welcome,
    Will,
    Wire,
    decode,
    encode,
)
from hear.buses.nng.link import Link
from hear.codec import decode as decode_envelope
from hear.errors import LocalProtocolError, RemoteProtocolError
from hear.seams import BusStatistics, SubscriptionStatistics
from hear.subjects import NOBODY, Pattern, stem_of

HUB_WINDOW: Final = 3
"""Frames on their way to one peer. nng holds so many for one connection; more it would drop."""

AWAY_S: Final = 20.0
"""A peer whose connection is lost is remembered for so long, and what it missed is kept."""

SETTLE_S: Final = 3.0
"""A hub that has just begun settles nothing before peers of an earlier hub had this time to come
back, since reliable messages may be meant for them."""

HISTORY_BYTES: Final = 32 << 20
_MAX_ROUTES: Final = 16_384
_MAX_DENIALS: Final = 64
_MAX_NAME: Final = 256
_MAX_SUBSCRIPTIONS: Final = 4_096
_RUN_BYTES: Final = 128


class HubEvent(NamedTuple):
    """Something for the log: what happened, and to whom."""

    name: str
    facts: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Subscription:
    number: int
    name: str
    patterns: tuple[Pattern, ...]
    cut: bool = False

    def covers(self, stem: str) -> bool:
        example = f"{stem}.{NOBODY}"
        return any(pattern.matches(example) for pattern in self.patterns)


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    session: str
    grants: Grants
    link: Link
    backlog: Backlog
    connection: int | None
    away_since_s: float = inf
    subscriptions: dict[int, _Subscription] = field(default_factory=dict)
    will: list[Run] = field(default_factory=list)
    rows: list[tuple[str, int, int, int]] = field(default_factory=list)
    lagged: int = 0
    delivered: int = 0
    on_their_way: deque[tuple[int, list[Receipt]]] = field(default_factory=deque)
    unsettled: deque[Receipt] = field(default_factory=deque)
    denials: set[str] = field(default_factory=set)
    left: bool = False


@dataclass(slots=True, eq=False)
class _Ticket:
    stem: str
    provider: _Peer
    waiting: list[tuple[_Peer, int]] = field(default_factory=list)
    begun: bool = False


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
        self._keyring = keyring
        self._bounds = bounds or Bounds()
        self._away_s = away_s
        self._settles_s = now + settle_s
        self._settle_log: list[tuple[Run, Receipt]] | None = []
        self._settle_log_bytes = 0
        self._peers: dict[str, _Peer] = {}  # by session
        self._names: dict[str, _Peer] = {}
        self._connections: dict[int, _Peer] = {}
        self._nonces: dict[int, bytes] = {}
        self._providers: dict[str, _Peer] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._fresh: dict[str, int] = {}  # tickets of which no part has come, by stem
        self._last_ticket = 0
        self._routes: dict[str, tuple[_Peer, ...]] = {}
        self._dirty: dict[_Peer, None] = {}
        self._history: deque[tuple[Run, int]] = deque()
        self._history_bytes = 0
        self._max_history_bytes = history_bytes
        self._published: dict[str, int] = dict.fromkeys(
            ("intent", "control", "state", "outcome"), 0
        )
        self._lagged = 0
        self.refused = 0
        """Frames and messages that were turned away: garbage, oversized, not granted."""

    @property
    def peers(self) -> list[str]:
        """Names of those who are there, or away for a moment."""
        return list(self._names)

    # -- what the driver tells ----------------------------------------------------------------

    def receive(self, connection: int, data: bytes, now: float) -> None:
        """Take in what came over a connection."""
        try:
            wire = decode(data)
        except RemoteProtocolError as error:
            self._turn_away(connection, "frame.unreadable", error=str(error))
            return
        peer = self._connections.get(connection)
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
                    self._forget(peer, "peer.left", now)
            else:
                raise RemoteProtocolError(f"a {type(wire).__name__} from a client")
        except RemoteProtocolError as error:
            who = peer.name if peer else None
            self._turn_away(connection, "frame.unusable", peer=who, error=str(error))

    def closed(self, connection: int, now: float) -> None:
        """A connection is gone."""
        self._nonces.pop(connection, None)
        peer = self._connections.pop(connection, None)
        if peer is not None and peer.connection == connection:
            peer.connection = None
            peer.away_since_s = now
            self._event("peer.away", peer=peer.name)

    def tick(self, now: float) -> None:
        """Do what is due by now."""
        if self._settle_log is not None and now >= self._settles_s:
            self._settle_log = None
            for peer in self._peers.values():
                self._settle(peer)
        for peer in list(self._peers.values()):
            if peer.connection is None:
                if now >= peer.away_since_s + self._away_s:
                    self._forget(peer, "peer.lost", now)
            elif peer.link.lost(now):
                self._drop_connection(peer, now)
            else:
                for data in peer.link.due(now):
                    self.output.append((peer.connection, data))

    def next_due(self) -> float:
        """When ``tick`` has to be called next."""
        due = self._settles_s if self._settle_log is not None else inf
        for peer in self._peers.values():
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
        for peer in self._peers.values():
            if peer.connection is not None:
                self._send(peer.connection, Goodbye())

    def statistics(self) -> BusStatistics:
        """What has passed, and how each subscription of each peer fares.

        What waits for a peer at the hub counts for each of its subscriptions.
        """
        rows = []
        for peer in self._peers.values():
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
        lagged = self._lagged + sum(peer.lagged for peer in self._peers.values())
        return BusStatistics(
            published=dict(self._published), subscriptions=tuple(rows), lagged=lagged
        )

    # -- joining ------------------------------------------------------------------------------

    def _hello(self, connection: int, hello: Hello, now: float) -> None:
        if hello.version != LINK_VERSION:
            self._refuse(
                connection,
                hello,
                f"speaks version {hello.version} of the link, this hub speaks {LINK_VERSION}",
            )
            return
        if not hello.name or len(hello.name) > _MAX_NAME or not hello.session:
            self._refuse(connection, hello, f"name {hello.name[:40]!r}: expected 1 to 256 letters")
            return
        grants = EVERYTHING
        if self._keyring is not None:
            nonce = self._nonces.pop(connection, None)
            if nonce is None or not hello.proof:
                self._nonces[connection] = nonce = new_nonce()
                self._send(connection, Challenge(nonce))
                return
            found = self._keyring.check(hello.key, nonce, hello.session, hello.name, hello.proof)
            if found is None:
                self._refuse(connection, hello, f"key {hello.key!r} is not valid here")
                return
            grants = found
        peer = self._peers.get(hello.session)
        if peer is not None and (peer.name != hello.name or peer.grants is not grants):
            self._refuse(connection, hello, "the session is another's")
            return
        if peer is not None and hello.hub != self.id:
            if self._connections.get(connection) is peer and peer.link.received == 0:
                # It said hello more than once before it heard the answer.
                self._send(connection, Welcome(LINK_VERSION, self.id, False, 0))
                return
            self._forget(peer, "peer.astray", now)
            peer = None
        if peer is not None and peer.link.number < hello.received:
            self._forget(peer, "peer.astray", now)  # it speaks of what was never sent
            peer = None
        if peer is None:
            holder = self._names.get(hello.name)
            if holder is not None and holder.connection is not None and not holder.link.lost(now):
                reason = f"the name {hello.name!r} is in use on this bus"
                self._refuse(connection, hello, reason, final=False)
                return
            if holder is not None:
                self._forget(holder, "peer.replaced", now)
            self._admit(connection, hello, grants, now)
        else:
            self._resume(peer, connection, hello, now)

    def _admit(self, connection: int, hello: Hello, grants: Grants, now: float) -> None:
        peer = _Peer(
            name=hello.name,
            session=hello.session,
            grants=grants,
            link=Link(window=HUB_WINDOW, now=now),
            backlog=Backlog(self._bounds),
            connection=connection,
        )
        self._peers[hello.session] = self._names[hello.name] = peer
        self._connections[connection] = peer
        self._send(connection, Welcome(LINK_VERSION, self.id, False, 0))
        self._event("peer.joined", peer=peer.name)

    def _resume(self, peer: _Peer, connection: int, hello: Hello, now: float) -> None:
        if peer.connection is not None and peer.connection != connection:
            self._connections.pop(peer.connection, None)
            self.to_close.append(peer.connection)
        peer.connection = connection
        peer.away_since_s = inf
        self._connections[connection] = peer
        self._send(connection, Welcome(LINK_VERSION, self.id, True, peer.link.received))
        for data in peer.link.resume(hello.received, now):
            self.output.append((connection, data))
        self._taken_over(peer, hello.received)
        self._dirty[peer] = None
        self._event("peer.resumed", peer=peer.name)

    def _refuse(self, connection: int, hello: Hello, reason: str, *, final: bool = True) -> None:
        self.refused += 1
        self._send(connection, Refused(reason, final))
        self._event("peer.refused", peer=hello.name[:_MAX_NAME], reason=reason)

    def _turn_away(self, connection: int, event: str, **facts: Any) -> None:
        """Nothing that makes sense comes over this connection."""
        self.refused += 1
        self._event(event, connection=connection, **facts)
        self.to_close.append(connection)

    def _drop_connection(self, peer: _Peer, now: float) -> None:
        connection = peer.connection
        assert connection is not None
        self.to_close.append(connection)
        self.closed(connection, now)

    def _forget(self, peer: _Peer, event: str, now: float) -> None:
        """A peer is gone for good: what it provided and asked for goes, and its will is done."""
        self._event(event, peer=peer.name)
        self._peers.pop(peer.session, None)
        if self._names.get(peer.name) is peer:
            del self._names[peer.name]
        if peer.connection is not None:
            self._connections.pop(peer.connection, None)
            peer.connection = None
        self._routes.clear()
        self._dirty.pop(peer, None)
        for stem in [s for s, provider in self._providers.items() if provider is peer]:
            del self._providers[stem]
        for number, ticket in list(self._tickets.items()):
            if ticket.provider is peer:
                self._end_ticket(number, ticket, [])
            else:
                ticket.waiting = [(p, s) for p, s in ticket.waiting if p is not peer]
        self._release(peer, peer.backlog.drop_reliable())
        while peer.on_their_way:
            self._release(peer, peer.on_their_way.popleft()[1])
        if not peer.left and peer.will:
            self._event(
                "will.done", peer=peer.name, messages=sum(len(r.messages) for r in peer.will)
            )
            for run in peer.will:
                self._publish(peer, run, Receipt(0))

    # -- what a peer says ---------------------------------------------------------------------

    def _frame(self, peer: _Peer, frame: Frame, now: float) -> None:
        items, acknowledged = peer.link.receive(frame, now)
        self._taken_over(peer, acknowledged)
        self._dirty[peer] = None
        if not items:
            return
        receipt = Receipt(frame.number)
        peer.unsettled.append(receipt)
        for item in items:
            if isinstance(item, Run):
                self._publish(peer, item, receipt)
            else:
                self._other(peer, item)
        self._settle(peer)

    def _other(self, peer: _Peer, item: object) -> None:
        if isinstance(item, Subscribe):
            self._subscribe(peer, item)
        elif isinstance(item, Unsubscribe):
            if peer.subscriptions.pop(item.subscription, None) is not None:
                self._routes.clear()
        elif isinstance(item, Provide):
            self._provide(peer, item)
        elif isinstance(item, Fetch):
            if item.subscription in peer.subscriptions:
                self._fetch(peer, item.subscription, item.stem)
        elif isinstance(item, Snapshot):
            self._snapshot(peer, item)
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

    def _publish(self, peer: _Peer, run: Run, receipt: Receipt) -> None:
        stem = run.stem
        category = stem.partition(".")[0]
        run = self._check_run(peer, run, category)
        if not run.messages:
            return
        self._published[category] += len(run.messages)
        size_bytes = sum(map(len, run.messages))
        self._remember(run, size_bytes)
        route = self._routes.get(stem)
        if route is None:
            route = self._find_route(stem)
        if run.reliable:
            for reader in route:
                reader.delivered += len(run.messages)
                if not reader.backlog.put(run, size_bytes, len(run.messages), receipt):
                    self._cut_off(reader)
                self._dirty[reader] = None
            if self._settle_log is not None:
                self._keep_for_the_late(run, size_bytes, receipt)
        else:
            for reader in route:
                reader.delivered += len(run.messages)
                reader.backlog.put_state(run, size_bytes)
                self._dirty[reader] = None

    def _check_run(self, peer: _Peer, run: Run, category: str) -> Run:
        """The messages of a run that may pass."""
        stem = run.stem
        if category not in self._published or stem.count(".") != 3:
            raise RemoteProtocolError(f"a run on {stem[:80]!r}, which is no stem of a subject")
        if run.reliable is (category == "state"):
            raise RemoteProtocolError(f"a run on {stem[:80]!r} in the wrong class")
        if not self._granted(peer, stem, publish=True):
            return Run(stem, run.reliable, [])
        messages = run.messages
        if any(len(message) > MAX_MESSAGE_BYTES for message in messages):
            self._deny(peer, f"a message on {stem} is larger than {MAX_MESSAGE_BYTES} bytes")
            messages = [m for m in messages if len(m) <= MAX_MESSAGE_BYTES]
        if peer.grants.checks_sources:
            messages = [m for m in messages if self._is_own(peer, stem, m)]
        return run if messages is run.messages else Run(stem, run.reliable, messages)

    def _is_own(self, peer: _Peer, stem: str, message: bytes) -> bool:
        """Whether a message belongs to its run, and speaks under a name that is granted."""
        envelope = decode_envelope(message)
        if stem_of(envelope) != stem:
            self._deny(peer, f"a message of {stem_of(envelope)} was sent as one of {stem}")
            return False
        if not peer.grants.may_be(envelope.source):
            self._deny(peer, f"the key does not grant to speak as {envelope.source!r}")
            return False
        return True

    def _granted(self, peer: _Peer, stem: str, *, publish: bool) -> bool:
        may = peer.grants.may_publish(stem) if publish else peer.grants.may_hear(stem)
        if not may:
            self._deny(peer, f"the key does not grant to publish on {stem}")
        return may

    def _deny(self, peer: _Peer, reason: str) -> None:
        self.refused += 1
        if reason not in peer.denials and len(peer.denials) < _MAX_DENIALS:
            peer.denials.add(reason)
            peer.backlog.put(Denied(reason))
            self._dirty[peer] = None
            self._event("message.denied", peer=peer.name, reason=reason)

    def _remember(self, run: Run, size_bytes: int) -> None:
        size_bytes += _RUN_BYTES
        self._history.append((run, size_bytes))
        self._history_bytes += size_bytes
        while self._history_bytes > self._max_history_bytes:
            self._history_bytes -= self._history.popleft()[1]

    def _keep_for_the_late(self, run: Run, size_bytes: int, receipt: Receipt) -> None:
        assert self._settle_log is not None
        self._settle_log_bytes += size_bytes
        if self._settle_log_bytes > self._bounds.reliable_bytes:
            self._settle_log = None  # whoever comes now is told that something is missing
        else:
            self._settle_log.append((run, receipt))

    def _pass_on_lost(self, peer: _Peer, stems: list[str]) -> None:
        for stem in stems:
            if peer.grants.may_publish(stem):
                for reader in self._routes.get(stem) or self._find_route(stem):
                    reader.backlog.put_lost([stem])
                    self._dirty[reader] = None

    def _find_route(self, stem: str) -> tuple[_Peer, ...]:
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        reliable = not stem.startswith("state.")
        route = self._routes[stem] = tuple(
            peer
            for peer in self._peers.values()
            if peer.grants.may_hear(stem)
            and any(
                subscription.covers(stem) and not (reliable and subscription.cut)
                for subscription in peer.subscriptions.values()
            )
        )
        return route

    # -- taken over, settled, cut off ---------------------------------------------------------

    def _taken_over(self, peer: _Peer, number: int) -> None:
        while peer.on_their_way and peer.on_their_way[0][0] <= number:
            self._release(peer, peer.on_their_way.popleft()[1])

    def _release(self, peer: _Peer, receipts: list[Receipt]) -> None:
        for receipt in receipts:
            receipt.open -= 1

    def _settle(self, peer: _Peer) -> None:
        """Move on what this peer is told of how far its reliable messages have come."""
        if self._settle_log is not None:
            return
        unsettled = peer.unsettled
        while unsettled and unsettled[0].open <= 0:
            peer.link.settled = unsettled.popleft().number

    def _cut_off(self, peer: _Peer) -> None:
        self._lagged += 1
        self._release(peer, peer.backlog.drop_reliable())
        for subscription in peer.subscriptions.values():
            if not _only_state(subscription.patterns):
                subscription.cut = True
        self._routes.clear()
        reason = (
            f"more than {self._bounds.reliable_messages} reliable messages or "
            f"{self._bounds.reliable_bytes} bytes of them were left untaken at the hub"
        )
        peer.backlog.put(CutOff(reason))
        self._event("peer.cut_off", peer=peer.name, reason=reason)

    # -- subscriptions and snapshots ----------------------------------------------------------

    def _subscribe(self, peer: _Peer, item: Subscribe) -> None:
        number = item.subscription
        if len(peer.subscriptions) >= _MAX_SUBSCRIPTIONS:
            refused = f"{_MAX_SUBSCRIPTIONS} subscriptions are the most that one peer may have"
            peer.backlog.put(Subscribed(number, [], refused=refused))
            return
        try:
            patterns = tuple(with_any_key(Pattern(text)) for text in item.patterns)
        except LocalProtocolError as error:
            peer.backlog.put(Subscribed(number, [], refused=str(error)))
            return
        subscription = _Subscription(number, item.name, patterns)
        peer.subscriptions[number] = subscription
        self._routes.clear()
        streams = [
            stem
            for stem in self._providers
            if subscription.covers(stem) and peer.grants.may_hear(stem)
        ]
        complete = not item.resumed or self._settle_log is not None or _only_state(patterns)
        peer.backlog.put(Subscribed(number, streams, complete))
        if item.resumed and self._settle_log is not None:
            for run, receipt in self._settle_log:
                if subscription.covers(run.stem) and peer.grants.may_hear(run.stem):
                    size_bytes = sum(map(len, run.messages))
                    peer.backlog.put(run, size_bytes, len(run.messages), receipt)
        for stem in streams:
            self._fetch(peer, number, stem)

    def _provide(self, peer: _Peer, item: Provide) -> None:
        if not self._granted(peer, item.stem, publish=True):
            return
        self._providers[item.stem] = peer
        if item.resumed:
            for reader in self._routes.get(item.stem) or self._find_route(item.stem):
                for subscription in reader.subscriptions.values():
                    if subscription.covers(item.stem):
                        self._fetch(reader, subscription.number, item.stem)

    def _fetch(self, peer: _Peer, subscription: int, stem: str) -> None:
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
            self._dirty[provider] = None
        if (peer, subscription) not in self._tickets[number].waiting:
            self._tickets[number].waiting.append((peer, subscription))

    def _snapshot(self, peer: _Peer, item: Snapshot) -> None:
        ticket = self._tickets.get(item.ticket)
        if ticket is None or ticket.provider is not peer or ticket.stem != item.stem:
            return
        if not ticket.begun:
            # Who asks from here on may have missed what this snapshot does not include.
            ticket.begun = True
            self._fresh.pop(ticket.stem, None)
        if item.last:
            self._end_ticket(item.ticket, ticket, item.messages)
        else:
            self._hand_out(ticket, item.messages, last=False)

    def _end_ticket(self, number: int, ticket: _Ticket, messages: list[bytes]) -> None:
        self._tickets.pop(number, None)
        if self._fresh.get(ticket.stem) == number:
            del self._fresh[ticket.stem]
        self._hand_out(ticket, messages, last=True)

    def _hand_out(self, ticket: _Ticket, messages: list[bytes], *, last: bool) -> None:
        by_peer: dict[_Peer, list[int]] = {}
        for peer, subscription in ticket.waiting:
            by_peer.setdefault(peer, []).append(subscription)
        size_bytes = sum(map(len, messages))
        for peer, subscriptions in by_peer.items():
            peer.backlog.put(SnapshotFor(subscriptions, ticket.stem, messages, last), size_bytes)
            self._dirty[peer] = None

    # -- questions ----------------------------------------------------------------------------

    def _question(self, peer: _Peer, question: Question) -> None:
        if question.about == "statistics":
            parts = [msgspec.msgpack.encode(self.statistics())]
            peer.backlog.put(Answer(question.number, parts, True), len(parts[0]))
        elif question.about == "history":
            self._tell_history(peer, question)
        else:
            peer.backlog.put(Answer(question.number, [], True))

    def _tell_history(self, peer: _Peer, question: Question) -> None:
        try:
            patterns = tuple(with_any_key(Pattern(text)) for text in question.patterns)
        except LocalProtocolError:
            patterns = ()
        asked = _Subscription(0, "", patterns)
        parts: list[bytes] = []
        size_bytes = 0
        heard: dict[str, bool] = {}
        for run, run_bytes in self._history:
            wanted = heard.get(run.stem)
            if wanted is None:
                wanted = asked.covers(run.stem) and peer.grants.may_hear(run.stem)
                heard[run.stem] = wanted
            if not wanted:
                continue
            parts.extend(run.messages)
            size_bytes += run_bytes
            if size_bytes >= FRAME_FILL_BYTES:
                peer.backlog.put(Answer(question.number, parts, False), size_bytes)
                parts, size_bytes = [], 0
        peer.backlog.put(Answer(question.number, parts, True), size_bytes)

    # -- pieces -------------------------------------------------------------------------------

    def _send(self, connection: int, wire: Wire) -> None:
        self.output.append((connection, encode(wire)))

    def _event(self, name: str, **facts: Any) -> None:
        self.events.append(HubEvent(name, facts))


def _only_state(patterns: tuple[Pattern, ...]) -> bool:
    return all(pattern.text.startswith("state.") for pattern in patterns)


def _row_name(peer: str, subscription: str) -> str:
    return peer if peer == subscription else f"{peer}/{subscription}"
