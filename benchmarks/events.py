"""Residency events taken over by a full index, with and without waiting requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.indexes import Indexes
from benchmarks.measuring import ENGINE, Report, Sizes, no_gc, seconds
from benchmarks.peer import radix_removed, radix_stored
from hear.blocks import pack, unpack
from hear.codec import decode, encode, open_body
from hear.delivery import Sequencer
from hear.messages import BlocksRemoved, BlocksStored, Key, ResidencyChanged

Change = BlocksStored | BlocksRemoved
Times = dict[str, dict[str, list[float]]]
"""Seconds an event, by what is done and by who does it."""


@dataclass(slots=True)
class Burst:
    """Events that grow prompts by a few blocks each, and those that take them back, end first."""

    stored: list[BlocksStored] = field(default_factory=list)
    removed: list[BlocksRemoved] = field(default_factory=list)

    def add(self, parent: int, packed: bytes) -> None:
        """Another prompt grows."""
        self.stored.append(BlocksStored(tier="gpu", parent=parent, prefix_hashes=packed))
        backwards = pack(reversed(unpack(packed)))
        self.removed.append(BlocksRemoved(tier="gpu", prefix_hashes=backwards))

    @property
    def both(self) -> tuple[tuple[str, Sequence[Change]], ...]:
        """What has to be applied, in this order."""
        return ("stored", self.stored), ("removed", self.removed)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits: the index holds its prompt up to ``parent``, and not ``tail``."""

    name: str
    prompt: Sequence[int]
    parent: int
    tail: bytes


def applying(indexes: Indexes, sizes: Sizes, report: Report) -> None:
    """Residency events taken over by a full index, with and without waiting requests."""
    half = sizes.prompt_blocks // 2
    waiting: list[Waiting] = []
    for number in range(sizes.waiting):
        head = indexes.chains[number % len(indexes.chains)][: 8 * half]
        tail = indexes.fresh(half)
        waiting.append(Waiting(f"r{number}", unpack(head + tail), unpack(head)[-1], tail))
    for length in (1, 64, 512):
        if length > half:
            continue
        count = max(min(sizes.apply_blocks // length, 256), 1)
        times: Times = {"stored": {}, "removed": {}}
        with no_gc():
            for _ in range(sizes.apply_repeats):
                _apply_alone(indexes, times, _burst(indexes, length, count))
                _apply_watched(indexes, times, length, count, waiting)
        section = f"applying {count} residency events, blocks in each: {length}"
        for what, rows in times.items():
            for who, taken in rows.items():
                report.add(section, what, who, "blocks/s", (length / each for each in taken))
    _apply_to_all(indexes, sizes, report)


def _burst(indexes: Indexes, length: int, count: int) -> Burst:
    burst = Burst()
    for _ in range(count):
        chain = indexes.draw.choice(indexes.chains)
        burst.add(unpack(chain)[-1], indexes.fresh(length))
    return burst


def _apply_alone(indexes: Indexes, times: Times, burst: Burst) -> None:
    directory, tree = indexes.directory, indexes.tree
    sequencer = Sequencer(ENGINE)

    def write(change: Change) -> bytes:
        message = ResidencyChanged(changes=(change,))
        return encode(sequencer.wrap(message, Key(engine=ENGINE), 1.0))

    def read(frame: bytes) -> None:
        message = open_body(decode(frame))
        assert isinstance(message, ResidencyChanged)
        for change in message.changes:
            directory.apply(change)

    def write_json(change: Change) -> bytes:
        if isinstance(change, BlocksStored):
            return radix_stored(1, change.parent, change.prefix_hashes)
        return radix_removed(1, change.prefix_hashes)

    def read_json(event: bytes) -> None:
        assert tree is not None
        tree.apply_event(0, event)

    def take(who: str, function: Callable[[Any], object], prepare: Callable[[Change], Any]) -> None:
        for what, changes in burst.both:
            given = [prepare(change) for change in changes]
            times[what].setdefault(who, []).extend(seconds(function, one) for one in given)

    take("HEAR, message at hand", directory.apply, lambda change: change)
    take("HEAR, from its bytes", read, write)
    take("HEAR, encoded and decoded", lambda change: read(write(change)), lambda change: change)
    if tree is not None:
        take("RadixTree, from its bytes", read_json, write_json)
        take(
            "RadixTree, encoded and decoded",
            lambda change: read_json(write_json(change)),
            lambda change: change,
        )


def _apply_watched(
    indexes: Indexes, times: Times, length: int, count: int, waiting: Sequence[Waiting]
) -> None:
    """The same while requests wait."""
    directory = indexes.directory
    concerning = Burst()
    for one in indexes.draw.sample(waiting, min(count, len(waiting))):
        concerning.add(one.parent, one.tail[: 8 * length])
    for one in waiting:
        directory.watch(one.name, one.prompt)
    for who, burst in (
        (f"HEAR, {len(waiting):,} wait, none concerned", _burst(indexes, length, count)),
        (f"HEAR, {len(waiting):,} wait, each event concerns one", concerning),
    ):
        for what, changes in burst.both:
            taken = [seconds(directory.apply, change) for change in changes]
            times[what].setdefault(who, []).extend(taken)
    if directory.take_changed():
        raise AssertionError("all that was stored was removed again, so nothing changed")
    for one in waiting:
        directory.unwatch(one.name)


def _apply_to_all(indexes: Indexes, sizes: Sizes, report: Report) -> None:
    """The worst case: all that wait share a prompt, and every event concerns them all."""
    directory = indexes.directory
    burst = Burst()
    head, tail = indexes.chains[0], indexes.fresh(64)
    burst.add(unpack(head)[-1], tail)
    for number in range(sizes.waiting):
        directory.watch(f"r{number}", unpack(head + tail))
    times: dict[str, list[float]] = {"stored": [], "removed": []}
    with no_gc():
        for _ in range(sizes.apply_repeats):
            times["stored"].append(seconds(directory.apply, burst.stored[0]) * 1e6)
            if directory.count("r0") != sizes.prompt_blocks + 64:
                raise AssertionError("a waiting request was not told of its blocks")
            times["removed"].append(seconds(directory.apply, burst.removed[0]) * 1e6)
    for number in range(sizes.waiting):
        directory.unwatch(f"r{number}")
    section = f"one residency event that concerns all of {sizes.waiting:,} waiting requests"
    for what, taken in times.items():
        report.add(section, f"{what}, 64 blocks", "HEAR", "us", taken)
