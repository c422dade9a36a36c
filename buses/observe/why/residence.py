"""The blocks of one prompt in the cache of one engine: what was there, what went, and for whom.

Follows the residency stream for these blocks alone. Who took the room is no fact of the protocol;
it is told from who started in the same report, or else from who has computed what the report says
was stored (``owners``). It knows nothing of queues.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from hear.blocks import unpack
from hear.buses.observe.why.facts import Blocks, Evicted
from hear.messages import BlockChange, BlocksRemoved, BlocksStored

SAME_REPORT_S: Final = 0.002
"""Within this time after a change of the cache, what is said of the queue is of the same report."""

MERGE_WITHIN_S: Final = 5.0
"""Evictions of one tier that follow each other within this time are told as one."""


class Residence:
    """Where each block of a prompt is. ``known`` is False after a gap, until a snapshot."""

    def __init__(self, hashes: Sequence[int], owners: Callable[[set[int]], list[str]]) -> None:
        """``owners`` names the requests in service whose prompts hold some of these blocks."""
        self.known = False
        self.most = 0
        self.most_s: float | None = None
        self.evicted: list[Evicted] = []
        self._owners = owners
        self._hashes = list(hashes)
        self._wanted = set(self._hashes)
        self._tiers: dict[int, set[str]] = {}
        self._unexplained: tuple[float, int, set[int]] | None = None
        self._prefix: int | None = 0
        self._next_part = 0
        self._before: tuple[float, int, int, float | None] = -1.0, 0, 0, None

    @property
    def prefix(self) -> int:
        """How many blocks from the start of the prompt some tier holds."""
        if self._prefix is None:
            self._prefix = 0
            for block in self._hashes:
                if not self._tiers.get(block):
                    break
                self._prefix += 1
        return self._prefix

    def forget(self) -> None:
        """Something was missed, or the engine restarted: nothing is known to be there."""
        self._tiers.clear()
        self._prefix = None
        self.known = False
        self._next_part = 0

    def replace(self, chains: Iterable[BlocksStored], part: int, parts: int, time_s: float) -> None:
        """A part of a snapshot; the first one drops what was held.

        Raises:
            RemoteProtocolError: it cannot be read; nothing was changed.
        """
        held = [(chain.tier, unpack(chain.prefix_hashes)) for chain in chains]
        if part == 0:
            self.forget()
        elif part != self._next_part:
            return  # a part before it was not read, so the whole of it is not known
        self._next_part = part + 1
        for tier, hashes in held:
            self._store(tier, hashes, time_s)
        self.known = part + 1 >= parts

    def change(self, changes: Iterable[BlockChange], time_s: float) -> None:
        """Changes, in the order in which they happened.

        Raises:
            RemoteProtocolError: one cannot be read.
        """
        self.explain(time_s)
        self._before = time_s, self.prefix, self.most, self.most_s
        before = len(self.evicted)
        for change in changes:
            if isinstance(change, BlocksStored):
                self._store(change.tier, unpack(change.prefix_hashes), time_s)
            elif isinstance(change, BlocksRemoved):
                blocks = self._wanted.intersection(unpack(change.prefix_hashes))
                self._remove(change.tier, blocks, time_s)
            else:
                tiers = {t for held in self._tiers.values() for t in held}
                for tier in tiers if change.tier is None else {change.tier}:
                    self._remove(tier, set(self._tiers), time_s)
        if len(self.evicted) > before:
            stored: set[int] = set()
            for change in changes:
                if isinstance(change, BlocksStored):
                    stored.update(unpack(change.prefix_hashes))
            self._unexplained = time_s, before, stored

    def served(self, time_s: float) -> int:
        """The request has started; returns the prefix that it found.

        An engine tells what a request stores in the same report as that it has started, so what
        this report stored is not what it found.
        """
        when, prefix, most, most_s = self._before
        if not when <= time_s <= when + SAME_REPORT_S:
            return self.prefix
        self.most, self.most_s = most, most_s
        return min(prefix, most)

    def explain(self, time_s: float, started: Sequence[str] = ()) -> None:
        """Say who started at a time, so that what went at that time is put down to them."""
        if self._unexplained is None:
            return
        when, first, stored = self._unexplained
        self._unexplained = None
        at_once = when <= time_s <= when + SAME_REPORT_S
        takers = list(started) if started and at_once else self._owners(stored)
        fresh = self.evicted[first:]
        del self.evicted[first:]
        for gone in fresh:
            self._add(gone, takers)

    def facts(self, block_size: int, at_arrival: int | None, at_start: int | None) -> Blocks:
        """What came of it."""
        self.explain(-1.0)
        return Blocks(
            blocks=len(self._hashes),
            block_size=block_size,
            most=self.most,
            most_s=self.most_s,
            at_arrival=at_arrival,
            at_start=at_start,
            evicted=tuple(self.evicted),
        )

    def _store(self, tier: str, hashes: Sequence[int], time_s: float) -> None:
        found = self._wanted.intersection(hashes)
        if not found:
            return
        for block in found:
            self._tiers.setdefault(block, set()).add(tier)
        self._prefix = None
        if self.prefix >= self.most:
            self.most, self.most_s = self.prefix, time_s

    def _remove(self, tier: str, blocks: set[int], time_s: float) -> None:
        gone = [b for b in blocks if tier in self._tiers.get(b, ())]
        if not gone:
            return
        if self.known and self.prefix == self.most:
            self.most_s = time_s  # until now all of it was there
        lost = 0
        for block in gone:
            self._tiers[block].discard(tier)
            if not self._tiers[block]:
                del self._tiers[block]
                lost += 1
        self._prefix = None
        self.evicted.append(
            Evicted(time_s=time_s, until_s=time_s, tier=tier, blocks=len(gone), lost=lost)
        )

    def _add(self, gone: Evicted, takers: list[str]) -> None:
        last = next((e for e in reversed(self.evicted) if e.tier == gone.tier), None)
        if last is None or gone.time_s - last.until_s > MERGE_WITHIN_S:
            self.evicted.append(replace(gone, takers=tuple(takers)))
            return
        self.evicted[self.evicted.index(last)] = replace(
            last,
            until_s=gone.until_s,
            blocks=last.blocks + gone.blocks,
            lost=last.lost + gone.lost,
            takers=tuple(dict.fromkeys([*last.takers, *takers])),
        )
