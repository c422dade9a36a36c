"""The residency directory: what a reader believes one engine holds, and what of it is of use.

A block is *reachable* when some tier holds it and its parent is reachable (or it is a first
block). Only reachable blocks can be reused, since a prefix with a hole is none. Along any prompt
the reachable blocks come first, so the length of a reusable prefix is found by bisection: 13
look-ups in a prompt of 8,192 blocks. For the same reason a waiting request needs to be told of
two blocks only, the last one that is reachable and the first that is not (the paper, appendix
A.2, counts reusable blocks up to the first that is missing).

Removing a block makes its descendants unreachable, which costs as much as there are; engines evict
the ends of prompts first, so there are seldom any.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from hear.blocks import unpack
from hear.errors import RemoteProtocolError
from hear.messages import BlockChange, BlocksRemoved, BlocksStored

_NO_CHILDREN: Final[tuple[int, ...]] = ()
_MAX_MOVES: Final = 200_000
_LONG: Final = 8
"""From how many blocks on it pays to look at a chain as a whole first (benchmarks/hot_paths.py)."""


class _Watch:
    """``told`` is the count that the reader last heard of."""

    __slots__ = ("count", "hashes", "name", "told")

    def __init__(self, name: str, hashes: Sequence[int], count: int) -> None:
        self.name = name
        self.hashes = hashes
        self.count = self.told = count


class ResidencyDirectory:
    """The blocks of one engine, by tier."""

    def __init__(self) -> None:
        # Each tier maps its blocks to their parents. With millions of blocks each further table
        # that a block stands in costs memory and a cache miss.
        self._tiers: dict[str, dict[int, int | None]] = {}
        self._num_blocks = 0
        # Nearly every block has one child at most, so a lone child is kept bare.
        self._children: dict[int, int | set[int]] = {}
        # Kept rather than the reachable ones, since there are hardly ever any.
        self._unreachable: set[int] = set()
        self._watches: dict[str, _Watch] = {}
        self._watchers: dict[int, set[_Watch]] = {}
        # Watched blocks that came or went within the message that is being applied.
        self._touched: set[int] = set()
        self._num_moves = 0
        self._changed: set[_Watch] = set()

    # -- what the engine reports --------------------------------------------------------------

    def apply_all(self, changes: Iterable[BlockChange]) -> None:
        """Take over the changes of one message.

        Each prompt that is watched is matched anew once at most, however many changes concern it:
        what a message costs beside its own length is bounded by what this reader watches.

        Raises:
            RemoteProtocolError: packed hashes cannot be read, or the beginnings of long chains come
                and go so often that no engine can have done it. Some of the changes are applied.
        """
        self._num_moves = 0
        most_held = self._num_blocks
        try:
            for change in changes:
                self._apply(change)
                most_held = max(most_held, self._num_blocks)
                if self._num_moves > _MAX_MOVES + 2 * most_held:
                    raise RemoteProtocolError(
                        f"changes of residency: {self._num_moves} blocks became reachable or no "
                        f"longer were, in one message, where at most {most_held} were held"
                    )
        finally:
            self._settle()

    def apply(self, change: BlockChange) -> None:
        """Take over one reported change.

        Raises:
            RemoteProtocolError: the packed hashes cannot be read; nothing is changed.
        """
        self._apply(change)
        self._settle()

    def _apply(self, change: BlockChange) -> None:
        if isinstance(change, BlocksStored):
            self._stored(change.tier, change.parent, unpack(change.prefix_hashes))
        elif isinstance(change, BlocksRemoved):
            self._removed(change.tier, unpack(change.prefix_hashes))
        else:
            self._cleared(change.tier)

    def clear(self) -> None:
        """Forget every block, but not who watches."""
        self._cleared(None)
        self._settle()

    def _stored(self, tier: str, parent: int | None, hashes: Sequence[int]) -> None:
        held = self._tiers.setdefault(tier, {})
        others = self._others(held)
        if len(hashes) >= _LONG and self._stored_new(held, others, parent, list(hashes)):
            return
        for block in hashes:
            if block not in held:
                for other in others:
                    if block in other:
                        held[block] = other[block]
                        break
                else:
                    self._add(held, block, parent)
            parent = block

    def _stored_new(
        self,
        held: dict[int, int | None],
        others: Sequence[dict[int, int | None]],
        parent: int | None,
        blocks: list[int],
    ) -> bool:
        """Take over a whole chain at once; returns False if it is not reachable and all new."""
        if self._unreachable or not (parent is None or self._is_reachable(parent)):
            return False
        if not all(known.keys().isdisjoint(blocks) for known in (held, *others)):
            return False
        num_held = len(held)
        held.update(zip(blocks, [parent, *blocks], strict=False))
        if len(held) < num_held + len(blocks):  # a block stands in it twice
            for block in blocks:
                held.pop(block, None)
            return False
        self._num_blocks += len(blocks)
        if parent is not None:
            self._adopt(parent, blocks[0])
        self._children.update(pairwise(blocks))
        if self._watchers and not self._watchers.keys().isdisjoint(blocks):
            for block in blocks:
                self._touch(block)
        return True

    def _removed(self, tier: str, hashes: Iterable[int]) -> None:
        held = self._tiers.get(tier)
        if not held:
            return
        others = self._others(held)
        for block in hashes:
            if block in held:
                parent = held.pop(block)
                for other in others:
                    if block in other:
                        break
                else:
                    self._forget(block, parent)

    def _cleared(self, tier: str | None) -> None:
        if tier is None:
            for held in self._tiers.values():
                held.clear()
            self._num_blocks = 0
            self._children.clear()
            self._unreachable.clear()
            self._touched.update(self._watchers)
        else:
            self._removed(tier, list(self._tiers.get(tier, ())))

    def _others(self, held: dict[int, int | None]) -> list[dict[int, int | None]]:
        if len(self._tiers) == 1:
            return []
        return [other for other in self._tiers.values() if other is not held and other]

    def _is_reachable(self, block: int) -> bool:
        for held in self._tiers.values():
            if block in held:
                return block not in self._unreachable
        return False

    def _add(self, held: dict[int, int | None], block: int, parent: int | None) -> None:
        reachable = parent is None or self._is_reachable(parent)
        held[block] = parent
        self._num_blocks += 1
        if parent is not None:
            self._adopt(parent, block)
        if not reachable:
            self._unreachable.add(block)
            return
        self._touch(block)
        if self._unreachable:
            for found in self._descendants(block):
                self._unreachable.discard(found)
                self._touch(found)

    def _forget(self, block: int, parent: int | None) -> None:
        self._num_blocks -= 1
        if parent is not None:
            children = self._children[parent]
            if isinstance(children, set):
                children.discard(block)
                if len(children) == 1:
                    self._children[parent] = children.pop()
            else:
                del self._children[parent]
        if block in self._unreachable:
            self._unreachable.discard(block)
            return
        self._touch(block)
        if block in self._children:
            for lost in self._descendants(block):
                self._unreachable.add(lost)
                self._touch(lost)

    def _adopt(self, parent: int, block: int) -> None:
        children = self._children.setdefault(parent, block)
        if isinstance(children, set):
            children.add(block)
        elif children != block:
            self._children[parent] = {children, block}

    def _descendants(self, block: int) -> Iterator[int]:
        todo = [block]
        while todo:
            self._num_moves += 1
            children = self._children.get(todo.pop(), _NO_CHILDREN)
            more = (children,) if isinstance(children, int) else children
            yield from more
            todo.extend(more)

    def _touch(self, block: int) -> None:
        if block in self._watchers:
            self._touched.add(block)

    # -- what a reader asks -------------------------------------------------------------------

    def match(self, hashes: Sequence[int]) -> int:
        """How many blocks from the start of a prompt can be reused, in any tier."""
        nothing: dict[int, int | None] = {}
        tier, *others = [held for held in self._tiers.values() if held] or [nothing]
        unreachable = self._unreachable
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            block = hashes[middle]
            if (block in tier or (others and any(block in other for other in others))) and not (
                unreachable and block in unreachable
            ):
                low = middle + 1
            else:
                high = middle
        return low

    def match_by_tier(self, hashes: Sequence[int]) -> dict[str, int]:
        """How many blocks of the reusable prefix each tier holds; this looks at each block."""
        prefix = hashes[: self.match(hashes)]
        return {tier: sum(map(held.__contains__, prefix)) for tier, held in self._tiers.items()}

    def holds(self, tier: str, block: int) -> bool:
        """Whether a tier holds a block, reachable or not."""
        return block in self._tiers.get(tier, ())

    def num_blocks(self, tier: str | None = None) -> int:
        """How many different blocks a tier, or any tier, holds."""
        return self._num_blocks if tier is None else len(self._tiers.get(tier, ()))

    # -- who is told --------------------------------------------------------------------------

    def watch(self, name: str, hashes: Sequence[int]) -> int:
        """Follow the reusable prefix of a prompt from now on; returns its length in blocks."""
        self.unwatch(name)
        watch = self._watches[name] = _Watch(name, hashes, self.match(hashes))
        self._post(watch)
        return watch.count

    def unwatch(self, name: str) -> None:
        """Stop following a prompt. Nothing happens if it was not followed."""
        watch = self._watches.pop(name, None)
        if watch is not None:
            self._unpost(watch)
            self._changed.discard(watch)

    def count(self, name: str) -> int:
        """The current length in blocks of a watched prompt's reusable prefix.

        Raises:
            KeyError: nobody watches under that name.
        """
        return self._watches[name].count

    def take_changed(self) -> list[str]:
        """The watched prompts whose count is not what it was when this was last asked, by name."""
        changed = sorted(watch.name for watch in self._changed if watch.count != watch.told)
        for watch in self._changed:
            watch.told = watch.count
        self._changed.clear()
        return changed

    def _settle(self) -> None:
        # Once a message, not once a block: a chain of 500 blocks may move 100 waiting requests.
        if not self._touched:
            return
        touched = set[_Watch]().union(*map(self._watchers.__getitem__, self._touched))
        self._touched.clear()
        for watch in touched:
            count = self.match(watch.hashes)
            if count != watch.count:
                self._unpost(watch)
                watch.count = count
                self._post(watch)
                self._changed.add(watch)

    def _posts(self, watch: _Watch) -> Sequence[int]:
        first = max(watch.count - 1, 0)
        return watch.hashes[first : watch.count + 1]

    def _post(self, watch: _Watch) -> None:
        for block in self._posts(watch):
            self._watchers.setdefault(block, set()).add(watch)

    def _unpost(self, watch: _Watch) -> None:
        for block in self._posts(watch):
            watchers = self._watchers.get(block)
            if watchers is not None:
                watchers.discard(watch)
                if not watchers:
                    del self._watchers[block]
