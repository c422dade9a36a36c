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

from collections.abc import Iterable, Sequence
from typing import Final

from hear.blocks import unpack
from hear.messages import BlockChange, BlocksCleared, BlocksRemoved, BlocksStored

_NO_CHILDREN: Final[tuple[int, ...]] = ()


class _Watch:
    __slots__ = ("count", "hashes", "name")

    def __init__(self, name: str, hashes: Sequence[int], count: int) -> None:
        self.name = name
        self.hashes = hashes
        self.count = count


class ResidencyDirectory:
    """The blocks of one engine, by tier."""

    def __init__(self) -> None:
        self._tiers: dict[str, set[int]] = {}
        self._reachable: set[int] = set()
        self._parents: dict[int, int | None] = {}
        # Nearly every block has one child at most, so a lone child is kept bare.
        self._children: dict[int, int | set[int]] = {}
        self._watches: dict[str, _Watch] = {}
        self._watchers: dict[int, set[_Watch]] = {}
        self._changed: dict[str, None] = {}

    # -- what the engine reports --------------------------------------------------------------

    def apply(self, change: BlockChange) -> None:
        """Take over one reported change."""
        if isinstance(change, BlocksStored):
            self._stored(change.tier, change.parent, unpack(change.prefix_hashes))
        elif isinstance(change, BlocksRemoved):
            self._removed(change.tier, unpack(change.prefix_hashes))
        else:
            self._cleared(change)

    def clear(self) -> None:
        """Forget every block, but not who watches."""
        for tier in list(self._tiers):
            self._cleared(BlocksCleared(tier=tier))

    def _stored(self, tier: str, parent: int | None, hashes: Sequence[int]) -> None:
        held = self._tiers.setdefault(tier, set())
        parents, reachable = self._parents, self._reachable
        for block in hashes:
            held.add(block)
            if block not in parents:
                parents[block] = parent
                if parent is not None:
                    self._adopt(parent, block)
                if parent is None or parent in reachable:
                    self._reach(block)
            parent = block

    def _removed(self, tier: str, hashes: Iterable[int]) -> None:
        held = self._tiers.setdefault(tier, set())
        others = [blocks for name, blocks in self._tiers.items() if name != tier]
        for block in hashes:
            held.discard(block)
            if block in self._parents and not any(block in blocks for blocks in others):
                self._forget(block)

    def _cleared(self, change: BlocksCleared) -> None:
        for tier in [change.tier] if change.tier is not None else list(self._tiers):
            self._removed(tier, list(self._tiers.get(tier, ())))

    def _forget(self, block: int) -> None:
        parent = self._parents.pop(block)
        if parent is not None:
            children = self._children[parent]
            if isinstance(children, set):
                children.discard(block)
                if len(children) == 1:
                    self._children[parent] = children.pop()
            else:
                del self._children[parent]
        self._unreach(block)

    def _adopt(self, parent: int, block: int) -> None:
        children = self._children.get(parent)
        if children is None:
            self._children[parent] = block
        elif isinstance(children, set):
            children.add(block)
        else:
            self._children[parent] = {children, block}

    def _children_of(self, block: int) -> Iterable[int]:
        children = self._children.get(block, _NO_CHILDREN)
        return (children,) if isinstance(children, int) else children

    def _reach(self, first: int) -> None:
        todo = [first]
        while todo:
            block = todo.pop()
            self._reachable.add(block)
            if block in self._watchers:
                self._moved(block)
            if block in self._children:
                todo.extend(self._children_of(block))

    def _unreach(self, first: int) -> None:
        todo = [first]
        while todo:
            block = todo.pop()
            if block not in self._reachable:
                continue
            self._reachable.discard(block)
            if block in self._watchers:
                self._moved(block)
            if block in self._children:
                todo.extend(self._children_of(block))

    # -- what a reader asks -------------------------------------------------------------------

    def match(self, hashes: Sequence[int]) -> int:
        """How many blocks from the start of a prompt can be reused, in any tier."""
        return self._match(hashes, 0, len(hashes))

    def _match(self, hashes: Sequence[int], low: int, high: int) -> int:
        reachable = self._reachable
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in reachable:
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
        return len(self._parents) if tier is None else len(self._tiers.get(tier, ()))

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
            self._changed.pop(name, None)

    def count(self, name: str) -> int:
        """The current length in blocks of a watched prompt's reusable prefix.

        Raises:
            KeyError: nobody watches under that name.
        """
        return self._watches[name].count

    def take_changed(self) -> list[str]:
        """The watched prompts whose count has changed since this was last asked."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def _moved(self, block: int) -> None:
        for watch in sorted(self._watchers[block], key=lambda w: w.name):
            low, high = 0, len(watch.hashes)
            if block in self._reachable:
                low = watch.count + 1
                # Blocks are reported in chains: most often the end of the prompt is not there.
            else:
                high = watch.count - 1
            count = self._match(watch.hashes, low, high)
            self._unpost(watch)
            watch.count = count
            self._post(watch)
            self._changed[watch.name] = None

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
