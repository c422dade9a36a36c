"""What becomes of each thing that a peer says: passed on, noted, fetched, answered, or refused.

Owns what things cost: each method that does one returns how many units it took, of about a
microsecond, by what it takes at worst. Whose turn it is, and what comes and goes, is the hub's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from hear.buses.nng.access import EVERYTHING
from hear.buses.nng.backlog import Bounds, Receipt
from hear.buses.nng.frames import (
    MAX_NAME,
    MAX_WILL_BYTES,
    MAX_WILL_RUNS,
    Answer,
    CutOff,
    Fetch,
    Item,
    Lost,
    Provide,
    Question,
    Run,
    Snapshot,
    Standing,
    Subscribe,
    Subscribed,
    Unprovide,
    Unsubscribe,
    Will,
)
from hear.buses.nng.history import History
from hear.buses.nng.index import index_of
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
from hear.buses.nng.settlement import Settlement
from hear.buses.nng.snapshots import MAX_KEY_STREAM_BYTES, Snapshots
from hear.errors import LocalProtocolError, RemoteProtocolError
from hear.interfaces import BusStatistics

MAX_KEY_PATTERNS: Final = 16_384
"""Most patterns that all peers of one key subscribe to."""

_MAX_SUBSCRIPTIONS: Final = 4_096
_ANSWER_BELOW_BYTES: Final = 1 << 20  # an answer goes on while less than this waits for its peer

# What things take, in units of about a microsecond.
_ITEM: Final = 5
_MESSAGE: Final = 12  # that is looked at
_READER: Final = 4
_PATTERN: Final = 10
_SUBSCRIBE: Final = 20
_FETCH: Final = 15
_ROW: Final = 3
_ANSWER: Final = 500
_ANSWER_BYTES_A_UNIT: Final = 20
# How much of one thing is done at once.
_MOST_MESSAGES: Final = 128
_MOST_STEMS: Final = 16


class Tell(Protocol):
    """Takes note of something for the log."""

    def __call__(self, name: str, **facts: Any) -> None: ...


class Handler:
    """Does what peers ask for."""

    def __init__(
        self,
        *,
        peers: Peers,
        bounds: Bounds,
        screening: Screening,
        routes: Routes,
        settlement: Settlement,
        snapshots: Snapshots,
        history: History,
        gone: Gone,
        has_to_send: Callable[[Peer], None],
        event: Tell,
    ) -> None:
        """``has_to_send`` is called with each peer that something was put in the backlog of, and
        ``event`` with what is to be logged."""
        self._peers = peers
        self._too_many = (
            f"more than {bounds.reliable_messages} reliable messages or "
            f"{bounds.reliable_bytes} bytes of them were left untaken at the hub"
        )
        self._screening = screening
        self._routes = routes
        self._settlement = settlement
        self._snapshots = snapshots
        self._history = history
        self._gone = gone
        self._has_to_send = has_to_send
        self._event = event

    def forget(self, peer: Peer) -> None:
        """A peer is gone: what it subscribes to, provides and waits for goes."""
        for subscription in peer.subscriptions.values():
            self._routes.remove(peer, subscription)
        self._snapshots.forget(peer)
        peer.drop_reliable()

    def can_answer(self, peer: Peer) -> bool:
        """Whether a peer has a question open, and takes the answer."""
        return peer.answer is not None and peer.backlog.owed_bytes < _ANSWER_BELOW_BYTES

    def do(self, peer: Peer, item: Item) -> int:
        """Do one thing that a peer has said; returns how many units it took.

        Raises:
            RemoteProtocolError: no peer may say so.
        """
        if peer.gone:
            assert isinstance(item, Run)  # of its will
            return self._pass_on(peer, item, Receipt(0))
        receipt = peer.receipt
        assert receipt is not None
        if isinstance(item, Run):
            run = self._screening.run(peer, item)
            spent = _MESSAGE * len(item.messages) if peer.grants.checks_sources else 0
            spent += self._screening.spent()
            return spent + (self._pass_on(peer, run, receipt) if run.messages else _ITEM)
        return _ITEM + self._other(peer, item)

    def _other(self, peer: Peer, item: Item) -> int:
        if isinstance(item, Subscribe | Fetch | Question) and peer.backlog.is_overdrawn:
            raise RemoteProtocolError(f"peer {peer.name!r} asks, and does not take the answers")
        if isinstance(item, Subscribe):
            return self._subscribe(peer, item)
        if isinstance(item, Provide):
            return self._provide(peer, item)
        if isinstance(item, Unsubscribe):
            subscription = peer.remove(item.subscription)
            if subscription is not None:
                self._routes.remove(peer, subscription)
                return _PATTERN * len(subscription.patterns)
        elif isinstance(item, Unprovide):
            self._snapshots.unprovide(peer, item.stem)
            return _FETCH
        elif isinstance(item, Fetch):
            if item.subscription in peer.subscriptions:
                self._snapshots.fetch(peer, item.subscription, item.stem)
            return _FETCH
        elif isinstance(item, Snapshot):
            messages = self._screening.messages(peer, item.stem, item.messages)
            spent = _FETCH + _MESSAGE * len(item.messages) + self._screening.spent()
            return spent + self._snapshots.take(peer, item, messages)
        elif isinstance(item, Lost):
            return self._pass_on_lost(peer, item.stems)
        elif isinstance(item, Will):
            self._leave_will(peer, item)
            return _MESSAGE * len(peer.will) + self._screening.spent()
        elif isinstance(item, Standing):
            stand(peer, item)
            return _ROW * len(item.rows)
        elif isinstance(item, Question):
            return self._question(peer, item)
        else:
            raise RemoteProtocolError(f"a {type(item).__name__} from a client")
        return 0

    def _leave_will(self, peer: Peer, item: Will) -> None:
        before = peer.will if item.more else []
        will = [*before, *item.runs]
        size_bytes = sum(len(run.stem) + sum(map(len, run.messages)) for run in will)
        count = sum(max(len(run.messages), 1) for run in will)
        if count > MAX_WILL_RUNS or size_bytes > MAX_WILL_BYTES:
            raise RemoteProtocolError(
                f"a will of {count} messages and {size_bytes} bytes, expected at most "
                f"{MAX_WILL_RUNS} and {MAX_WILL_BYTES}"
            )
        peer.will = [*before, *(self._screening.run(peer, run) for run in item.runs)]
        peer.will_bytes = size_bytes

    def _pass_on(self, peer: Peer, run: Run, receipt: Receipt) -> int:
        count = len(run.messages)
        category = self._screening.category(run.stem)
        peer.published[category] = peer.published.get(category, 0) + count
        size_bytes = sum(map(len, run.messages))
        self._history.remember(run, size_bytes)
        readers = self._routes.of(run.stem)
        for reader in readers:
            if not run.reliable:
                reader.backlog.put_state(run, size_bytes)
            elif not reader.backlog.put(run, size_bytes, count, receipt):
                self.cut_off(reader, self._too_many)
            self._has_to_send(reader)
        if run.reliable and self._settlement.waits:
            self._settlement.keep(run, size_bytes, receipt)
        return _ITEM + _READER * len(readers)

    def _pass_on_lost(self, peer: Peer, stems: Sequence[str]) -> int:
        spent = 0
        for stem in stems:
            if self._screening.category(stem) == "state" and peer.grants.may_publish(stem):
                readers = self._routes.of(stem)
                spent += _ITEM + _READER * len(readers)
                for reader in readers:
                    reader.backlog.put_lost(stem)
                    self._has_to_send(reader)
        return spent

    def cut_off(self, peer: Peer, reason: str) -> None:
        """A peer gets no reliable messages any more, and none of those that wait for it."""
        peer.drop_reliable()
        for subscription in peer.subscriptions.values():
            if not subscription.only_state and not subscription.cut:
                self._routes.cut(peer, subscription)
                subscription.cut = True
                peer.cut_off += 1
        peer.backlog.put(CutOff(reason))
        self._event("peer.cut_off", peer=peer.name, reason=reason)

    # -- subscriptions and questions ----------------------------------------------------------

    def _subscribe(self, peer: Peer, item: Subscribe) -> int:
        number = item.subscription
        spent = _SUBSCRIBE + self._peers.count(peer.grants) // 8 + _PATTERN * len(item.patterns)
        refused = self._why_not(peer, item)
        try:
            patterns = parse(item.patterns) if not refused else ()
        except LocalProtocolError as error:
            refused = str(error)
        if refused:
            peer.backlog.put_subscribed(Subscribed(number, [], refused=refused[:MAX_NAME]))
            self._has_to_send(peer)
            return spent
        before = peer.remove(number)
        if before is not None:
            self._routes.remove(peer, before)
        subscription = Subscription(number, item.name, patterns)
        peer.add(subscription)
        self._routes.add(peer, subscription)
        texts = tuple(pattern.text for pattern in patterns)
        provided = self._snapshots.covered(texts)
        streams = [stem for stem in provided if peer.grants.may_hear(stem)]
        complete = not item.resumed or self._settlement.waits or subscription.only_state
        peer.backlog.put_subscribed(Subscribed(number, streams, complete))
        if item.resumed:
            covered: dict[str, bool] = {}
            index = index_of(texts)
            for run, receipt in self._settlement.kept():
                spent += 1
                if run.stem not in covered:
                    spent += _FETCH
                    covered[run.stem] = bool(index.find(run.stem)) and peer.grants.may_hear(
                        run.stem
                    )
                if covered[run.stem]:
                    size_bytes = sum(map(len, run.messages))
                    if not peer.backlog.put(run, size_bytes, len(run.messages), receipt):
                        self.cut_off(peer, self._too_many)
                        break
        for stem in streams:
            self._snapshots.fetch(peer, number, stem)
        self._has_to_send(peer)
        return spent + _FETCH * len(streams)

    def _why_not(self, peer: Peer, item: Subscribe) -> str:
        """Why a subscription is refused; nothing if it is not."""
        if len(peer.subscriptions) >= _MAX_SUBSCRIPTIONS:
            return f"{_MAX_SUBSCRIPTIONS} subscriptions are the most that one peer may have"
        if len(item.name) > MAX_NAME:
            return f"expected a name of {MAX_NAME} letters at most"
        if peer.grants is not EVERYTHING:
            there = sum(p.num_patterns for p in self._peers.with_grants(peer.grants))
            if there + max(len(item.patterns), 1) > MAX_KEY_PATTERNS:
                return f"{MAX_KEY_PATTERNS} patterns are the most that all with one key may have"
        return ""

    def _provide(self, peer: Peer, item: Provide) -> int:
        self._screening.category(item.stem)
        if not self._screening.may_publish(peer, item.stem):
            return 0
        if not self._snapshots.provide(peer, item.stem):
            self._screening.deny(
                peer,
                f"the streams that all with one key provide have {MAX_KEY_STREAM_BYTES} bytes "
                "at most",
            )
            return 0
        spent = _FETCH
        if item.resumed:
            for reader in self._routes.of(item.stem):
                for subscription in reader.subscriptions.values():
                    spent += len(subscription.patterns)
                    if subscription.covers(item.stem):
                        spent += _FETCH
                        self._snapshots.fetch(reader, subscription.number, item.stem)
        return spent

    def _question(self, peer: Peer, question: Question) -> int:
        """Begin to answer, instead of what was asked before. History is told as it is taken."""
        if question.about == "history":
            peer.answer = answer_history(question, self._history, peer.grants)
        elif question.about == "statistics":
            # Made at once, since what waits at the hub is counted, and what is to be made is not.
            peer.answer = None
            told = answer_statistics(question, self._statistics_for(peer))
            return _ANSWER + sum(self._give(peer, answer) for answer in told)
        else:
            peer.answer = iter((Answer(question.number, [], True),))
        return 0

    def statistics(self) -> BusStatistics:
        """What has passed, and how each subscription of each peer fares."""
        return statistics(list(self._peers), self._gone)

    def _statistics_for(self, peer: Peer) -> BusStatistics:
        if peer.grants.may_hear_all:
            return self.statistics()
        return statistics(self._peers.with_grants(peer.grants), Gone(), own_key_only=True)

    def go_on_answering(self, peer: Peer) -> int:
        """Give a part of an answer, or look for one; returns how many units it took."""
        assert peer.answer is not None
        answer = next(peer.answer, None)
        if answer is None:
            return _ANSWER
        if answer.last:
            peer.answer = None
        return _ANSWER + self._give(peer, answer)

    def _give(self, peer: Peer, answer: Answer) -> int:
        size_bytes = sum(map(len, answer.parts))
        peer.backlog.put(answer, size_bytes)
        self._has_to_send(peer)
        return size_bytes // _ANSWER_BYTES_A_UNIT


def next_of(items: deque[Item]) -> Item:
    """Take out the next thing to do; of one that is long its beginning, so that it takes turns."""
    item = items.popleft()
    if isinstance(item, Run) and len(item.messages) > _MOST_MESSAGES:
        items.appendleft(Run(item.stem, item.reliable, item.messages[_MOST_MESSAGES:]))
        return Run(item.stem, item.reliable, item.messages[:_MOST_MESSAGES])
    if isinstance(item, Snapshot) and len(item.messages) > _MOST_MESSAGES:
        stem, ticket, messages = item.stem, item.ticket, item.messages
        items.appendleft(Snapshot(stem, ticket, messages[_MOST_MESSAGES:], item.last))
        return Snapshot(stem, ticket, messages[:_MOST_MESSAGES], False)
    if isinstance(item, Lost) and len(item.stems) > _MOST_STEMS:
        items.appendleft(Lost(item.stems[_MOST_STEMS:]))
        return Lost(item.stems[:_MOST_STEMS])
    return item
