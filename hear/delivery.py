"""Sequence numbers and gaps, without I/O: the same for every bus.

``Sequencer`` numbers what one source says. ``GapDetector`` tells a reader what it missed.
"""

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from itertools import count

from hear.codec import encode_body, kind_of
from hear.messages import DEFAULT_TENANT, Envelope, Key, Message
from hear.subjects import channel, stem

MAX_SCOPES = 16_384
"""Scopes of which a ``Sequencer`` knows the last number: the ones that were spoken in last."""


class Sequencer:
    """Puts the messages of one source into envelopes, numbered by channel.

    Each workflow and each engine that a source speaks of brings channels of its own. Those that
    were silent longest are forgotten; when they are spoken in again, as in a new one, the numbers
    go on above all that were forgotten, so none is used twice.
    """

    def __init__(
        self, source: str, epoch: int = 1, tenant: str = DEFAULT_TENANT, *, above: int = 0
    ) -> None:
        """Number what ``source`` says to a tenant in an epoch, from ``above`` on."""
        self.source = source
        self.epoch = epoch
        self.tenant = tenant
        # Numbers shared among tenants would tell each how much the others are told.
        self._prefix = "" if tenant == DEFAULT_TENANT else f"{tenant}/"
        self._seqs: OrderedDict[str, int] = OrderedDict()
        self._forgotten_seq = above
        self._ids: Iterator[int] = count(above + 1)

    def restart(self) -> None:
        """Begin a new epoch: numbers start again."""
        self.epoch += 1
        self._seqs.clear()
        self._forgotten_seq = 0
        self._ids = count(1)

    def next_id(self) -> str:
        """An id that no other message or operation of this source has, for any tenant."""
        return f"{self._prefix}{self.source}-{self.epoch}-{next(self._ids)}"

    def wrap(self, message: Message, key: Key, time_s: float) -> Envelope:
        """Number a message and put it into an envelope."""
        return self._envelope(message, key, time_s, step=1)

    def wrap_snapshot(self, message: Message, key: Key, time_s: float) -> Envelope:
        """Put a snapshot into an envelope with the number of the last change that it includes."""
        return self._envelope(message, key, time_s, step=0)

    def _envelope(self, message: Message, key: Key, time_s: float, step: int) -> Envelope:
        kind = kind_of(message)
        scope = stem(kind.category, self.tenant, key, kind.name)
        seq = self._seqs[scope] = self._seqs.get(scope, self._forgotten_seq) + step
        self._seqs.move_to_end(scope)
        if len(self._seqs) > MAX_SCOPES:
            self._forgotten_seq = max(self._forgotten_seq, self._seqs.popitem(last=False)[1])
        return Envelope(
            id=self.next_id(),
            source=self.source,
            epoch=self.epoch,
            seq=seq,
            time_s=time_s,
            tenant=self.tenant,
            category=kind.category,
            kind=kind.name,
            key=key,
            body=encode_body(message),
        )


class Arrival(Enum):
    """How a message stands to those before it on its channel."""

    NEXT = "next"
    SNAPSHOT = "snapshot"
    STALE = "stale"  # a duplicate, out of order, or of an epoch that has ended
    GAP = "gap"  # something before it was lost, or never seen


SNAPSHOT_KINDS = frozenset(
    {
        "residency_snapshot",
        "residency_partial",
        "queue_snapshot",
        "pressure_reported",
        "capabilities_reported",
        "costs_reported",
    }
)
"""Kinds that stand for the whole of their stream, whatever was missed."""


class GapDetector:
    """Follows every channel that a reader hears, each source and stream for itself.

    The ``max_channels`` that were heard last are remembered. One that comes back after it was
    forgotten looks like a gap, so that its reader asks again and nothing wrong is believed.
    """

    def __init__(self, *, max_channels: int = 65_536) -> None:
        self._heard: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        self._max_channels = max_channels
        self.gaps = 0
        self.missed = 0

    def knows(self, envelope: Envelope) -> bool:
        """Whether anything was heard on the envelope's channel, in this epoch or before."""
        source, _, scope = channel(envelope)
        return (source, scope) in self._heard

    def observe(self, envelope: Envelope) -> Arrival:
        """Classify a message and move on."""
        source, epoch, scope = channel(envelope)
        heard = self._heard.get((source, scope))
        snapshot = envelope.kind in SNAPSHOT_KINDS
        if envelope.seq <= 0 and not snapshot:  # a channel without numbers
            return Arrival.STALE if heard is not None and epoch < heard[0] else Arrival.NEXT
        if heard is not None:
            if epoch < heard[0] or (epoch == heard[0] and envelope.seq < heard[1]):
                return Arrival.STALE
            if epoch == heard[0] and envelope.seq == heard[1] and not snapshot:
                return Arrival.STALE
        self._heard[source, scope] = epoch, envelope.seq
        self._heard.move_to_end((source, scope))
        if len(self._heard) > self._max_channels:
            self._heard.popitem(last=False)
        if snapshot:
            return Arrival.SNAPSHOT
        expected = heard[1] + 1 if heard is not None and heard[0] == epoch else 1
        if envelope.seq == expected:
            return Arrival.NEXT
        self.gaps += 1
        self.missed += envelope.seq - expected
        return Arrival.GAP
