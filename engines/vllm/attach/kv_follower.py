"""Follows what one vLLM server publishes of its cache, and knows whether anything is missing.

A publisher numbers its batches from 0 since its server began, and keeps the last of them to be
asked for again. Does no I/O: who drives it hands in frames, and asks the replay endpoint where
``wants`` says so. The form of frames is ``kv_events``' affair.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hear.engines.vllm.holdings import GPU, Cleared, Holdings
from hear.engines.vllm.identity import Tenants
from hear.engines.vllm.kv_events import Batch, EventReader, number_of
from hear.errors import EngineError, RemoteProtocolError
from hear.messages import BlockChange


@dataclass(slots=True)
class Heard:
    """What was made of some messages: changes of residency, in order, by tenant.

    ``anew``: it was lost sight of what the engine holds, or found again, so that changes alone do
    not tell what it is now.
    """

    changes: dict[str, list[BlockChange]] = field(default_factory=dict)
    anew: bool = False


@dataclass(frozen=True, slots=True)
class _Lost:
    """What was held before a gap that nobody has closed yet, and the number that came next."""

    next_seq: int
    holdings: Holdings
    known: bool


class KvFollower:
    """Follows the batches of one server from its first to its last, and keeps what it holds.

    ``known`` tells whether ``holdings`` are all that the engine holds; else they are what is known
    of it. ``next_seq`` is the number of the batch that comes next, None before anything was heard;
    ``wants`` the one from which batches are to be asked for again, if any are.
    ``scheme`` is how the server hashes blocks, if that could be told (empty: by none known here).
    """

    def __init__(
        self,
        block_size: int,
        *,
        tenants: Tenants | None = None,
        tiers: Iterable[str] = (GPU,),
        served: bool = False,
    ) -> None:
        """Follow a server.

        Args:
            tenants: those whose blocks are told apart.
            tiers: those that the engine has, as far as is known beforehand.
            served: whether it has served requests: if so, that it keeps no batches does not mean
                that there were none.
        """
        self.reader = EventReader(block_size)
        self._tenants = tenants or Tenants()
        self.holdings = Holdings(self._tenants)
        self.known = False
        self.wants: int | None = 0
        self.scheme: str | None = None
        self.duplicates = 0
        self.gaps = 0
        self.unclosed = 0
        self._tiers = set(tiers)
        self._served = served
        self.next_seq: int | None = None
        self._last_s = 0.0
        self._waiting: Batch | None = None
        self._lost: _Lost | None = None
        self._keeps_batches = False

    def live(self, frames: Sequence[bytes]) -> Heard:
        """Take over a message of the publisher. ``wants`` may be set afterwards.

        Raises:
            EngineError: the server has begun anew.
        """
        heard = Heard()
        try:
            batch = self.reader.read(frames)
        except RemoteProtocolError:
            self.reader.left_out["unreadable"] += 1
            number = number_of(frames)
            if number is not None and number == self.next_seq:
                self._lose(heard)  # whatever it said; of any other the numbers will tell
                self.next_seq = number + 1
            return heard
        if batch is None:
            return heard
        if self.next_seq is None:
            self._begin(batch.seq, heard)
        assert self.next_seq is not None
        if batch.seq > self.next_seq:
            self.gaps += 1
            self.wants = max(self.next_seq - 1, 0)
            self._waiting = batch
        else:
            self._take(batch, heard)
        return heard

    def check(self) -> None:
        """Ask whether anything was missed since the last batch, and if it is the same server.

        A gap that could not be closed, since nobody answered, is asked for again: until the
        publisher answers that it has those batches no more.
        """
        if self.wants is None:
            next_seq = self.next_seq if self._lost is None else self._lost.next_seq
            self.wants = max((next_seq or 0) - 1, 0)

    def replayed(self, messages: Iterable[Sequence[bytes]] | None) -> Heard:
        """Take over what was asked for from ``wants`` on; None if nobody answers.

        Raises:
            EngineError: the server has begun anew.
        """
        heard = Heard()
        first, self.wants = self.wants, None
        waiting, self._waiting = self._waiting, None
        answered = messages is not None
        batches = self._readable(messages or (), heard)
        if self.next_seq is None:
            if batches or (answered and not self._served):  # where there were none, 0 comes next
                self._begin(batches[0].seq if batches else 0, heard)
        elif answered and first is not None and self.next_seq > 0:
            self._recognise(batches)
        self._keeps_batches = self._keeps_batches or bool(batches)
        if answered and self._lost is not None:
            self._find_again(self._lost, batches, heard)
        for batch in batches:
            assert self.next_seq is not None
            if batch.seq >= self.next_seq:
                self._take(batch, heard)
        if waiting is not None:
            assert self.next_seq is not None
            if not answered and self._lost is None and waiting.seq > self.next_seq:
                self._lost = _Lost(self.next_seq, self.holdings, self.known)
            self._take(waiting, heard, again=True)
        return heard

    def _find_again(self, lost: _Lost, batches: Sequence[Batch], heard: Heard) -> None:
        """Close a gap that nobody had closed, if what was missed is still told."""
        self._lost = None
        assert self.next_seq is not None
        missed = [batch for batch in batches if lost.next_seq <= batch.seq < self.next_seq]
        if [batch.seq for batch in missed] != list(range(lost.next_seq, self.next_seq)):
            return  # the publisher has them no more
        for batch in missed:
            lost.holdings.take(batch.events)
        self.holdings, self.known = lost.holdings, lost.known
        heard.anew = True

    def _readable(self, messages: Iterable[Sequence[bytes]], heard: Heard) -> list[Batch]:
        batches = []
        for frames in messages:
            try:
                batch = self.reader.read(frames)
            except RemoteProtocolError:
                self.reader.left_out["unreadable"] += 1
                continue  # its number will be missed
            if batch is not None:
                batches.append(batch)
        return batches

    def _recognise(self, batches: Sequence[Batch]) -> None:
        """See by the batch that was heard last, and asked for again, that this is its server."""
        assert self.next_seq is not None
        last = self.next_seq - 1
        if not batches:
            other = self._keeps_batches
        else:
            same = next((batch for batch in batches if batch.seq == last), None)
            other = batches[0].seq <= last and (same is None or same.time_s != self._last_s)
        if other:
            raise EngineError(f"the server has begun anew: its batch {last} is not the one heard")

    def _begin(self, seq: int, heard: Heard) -> None:
        self.next_seq = seq
        self.known = seq == 0  # nothing was held before the first
        heard.anew = True

    def _take(self, batch: Batch, heard: Heard, *, again: bool = False) -> None:
        assert self.next_seq is not None
        if batch.seq < self.next_seq:
            if batch.time_s > self._last_s:
                raise EngineError(
                    f"the server has begun anew: batch {batch.seq} came, expected {self.next_seq}"
                )
            self.duplicates += not again
            return
        if batch.seq > self.next_seq:
            self._lose(heard)
        self.next_seq = batch.seq + 1
        self._last_s = batch.time_s
        if batch.first is not None and self.scheme is None:
            self.scheme = batch.first.scheme()
        for tenant, changes in self.holdings.take(batch.events).items():
            heard.changes.setdefault(tenant, []).extend(changes)
        self._tiers.update(event.tier for event in batch.events)
        if not self.known and Cleared(GPU) in batch.events and self._tiers == {GPU}:
            self.known = heard.anew = True

    def _lose(self, heard: Heard) -> None:
        """Something was missed for good: of what is held it is known only what comes from here."""
        self.unclosed += 1
        self.known = False
        self.holdings = Holdings(self._tenants)
        heard.anew = True
