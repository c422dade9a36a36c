"""What a peer may ask the hub: what has passed, and how everybody fares.

Who may hear everything is told of everybody; anyone else of those with the same key alone.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec

from hear.buses.nng.access import Grants
from hear.buses.nng.frames import (
    FRAME_FILL_BYTES,
    MAX_NAME,
    MAX_PATTERN_BYTES,
    MAX_PATTERNS,
    MAX_ROWS,
    Answer,
    Question,
    Standing,
)
from hear.buses.nng.history import History
from hear.buses.nng.peers import Peer
from hear.buses.nng.screening import CATEGORIES
from hear.errors import LocalProtocolError
from hear.interfaces import BusStatistics, SubscriptionStatistics
from hear.subjects import Pattern

MAX_TOLD: Final = 2_048
"""Most subscriptions that an answer tells of; messages are counted of all."""

_MAX_COUNT: Final = 2**53


class Gone:
    """What those have published, and how often they lagged, who are not there any more."""

    def __init__(self) -> None:
        self.published = dict.fromkeys(CATEGORIES, 0)
        self.lagged = 0

    def add(self, peer: Peer) -> None:
        """A peer is gone."""
        for category, count in peer.published.items():
            self.published[category] += count
        self.lagged += peer.num_lagged


def parse(patterns: Sequence[str]) -> tuple[Pattern, ...]:
    """Patterns that a peer asks for, or sent.

    Raises:
        LocalProtocolError: one is not a pattern, or they are too many or too long.
    """
    size_bytes = sum(len(text.encode(errors="replace")) for text in patterns)
    if len(patterns) > MAX_PATTERNS or size_bytes > MAX_PATTERN_BYTES:
        raise LocalProtocolError(
            f"{len(patterns)} patterns of {size_bytes} bytes in all, expected at most "
            f"{MAX_PATTERNS} of {MAX_PATTERN_BYTES} bytes"
        )
    return tuple(Pattern(text) for text in patterns)


def stand(peer: Peer, standing: Standing) -> None:
    """Note what a peer says of its subscriptions."""
    peer.rows = [
        (name[:MAX_NAME], _count(queued), _count(received), _count(dropped))
        for name, queued, received, dropped in standing.rows[:MAX_ROWS]
    ]
    peer.lagged = _count(standing.lagged)


def statistics(peers: list[Peer], gone: Gone, *, own_key_only: bool = False) -> BusStatistics:
    """What these peers have published, and how each subscription of each of them fares.

    What waits for a peer at the hub counts for each of its subscriptions.
    """
    published = dict(gone.published)
    rows: list[SubscriptionStatistics] = []
    for peer in peers:
        for category, count in peer.published.items():
            published[category] += count
        if len(rows) >= MAX_TOLD:
            continue
        told = {name: row for name, *row in peer.rows}
        waiting, dropped = len(peer.backlog), peer.backlog.dropped
        for subscription in islice(peer.subscriptions.values(), MAX_TOLD - len(rows)):
            queued, received, missed = told.get(subscription.name, (0, 0, 0))
            rows.append(
                SubscriptionStatistics(
                    name=_row_name(peer.name, subscription.name),
                    queued=queued + waiting,
                    received=received,
                    dropped=missed + dropped,
                )
            )
    lagged = gone.lagged + sum(peer.num_lagged for peer in peers)
    return BusStatistics(
        published=published,
        subscriptions=tuple(rows),
        lagged=lagged,
        own_key_only=own_key_only,
    )


def answer_history(question: Question, history: History, grants: Grants) -> Iterator[Answer | None]:
    """What has passed that the patterns of a question match and that may be heard, part by part;
    None where a turn ends without one."""
    try:
        patterns = tuple(pattern.text for pattern in parse(question.patterns))
    except LocalProtocolError:
        patterns = ()
    for told in history.tell(patterns, grants):
        yield None if told is None else Answer(question.number, *told)


def answer_statistics(question: Question, told: BusStatistics) -> Iterator[Answer]:
    """The bytes of the statistics, in pieces."""
    data = msgspec.msgpack.encode(told)
    for start in range(0, len(data), FRAME_FILL_BYTES):
        piece = data[start : start + FRAME_FILL_BYTES]
        yield Answer(question.number, [piece], start + len(piece) == len(data))


def _count(number: int) -> int:
    return min(max(number, 0), _MAX_COUNT)


def _row_name(peer: str, subscription: str) -> str:
    return peer if peer == subscription else f"{peer}/{subscription}"
