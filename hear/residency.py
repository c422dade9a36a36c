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
from hear.messages import BlockChange, BlocksRemoved, BlocksStored

_NO_CHILDREN: Final[tuple[int, ...]] = ()


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
        self._tiers: dict[str, set[int]] = {}
        self._reachable: set[int] = set()
        self._parents: dict[int, int | None] = {}
        # Nearly every block has one child at most, so a lone child is kept bare.
        self._children: dict[int, int | set[int]] = {}
        self._watches: dict[str, _Watch] = {}
        self._watchers: dict[int, set[_Watch]] = {}
        # Watches of which a watched block moved within the change that is being applied.
        self._touched: set[_Watch] = set()
        self._changed: set[_Watch] = set()

    # -- what the engine reports --------------------------------------------------------------

    def apply(self, change: BlockChange) -> None:
        """Take over one reported change.

        Raises:
            RemoteProtocolError: the packed hashes cannot be read; nothing is changed.
        """
        if isinstance(change, BlocksStored):
            self._stored(change.tier, change.parent, unpack(change.prefix_hashes))
        elif isinstance(change, BlocksRemoved):
            self._removed(change.tier, unpack(change.prefix_hashes))
        else:
            self._cleared(change.tier)
        self._settle()

    def clear(self) -> None:
        """Forget every block, but not who watches."""
        for held in self._tiers.values():
            held.clear()
        self._reachable.clear()
        self._parents.clear()
        self._children.clear()
        self._touched.update(self._watches.values())
        self._settle()

    def _stored(self, tier: str, parent: int | None, hashes: Sequence[int]) -> None:
        held = self._tiers.setdefault(tier, set())
        parents, children, reachable = self._parents, self._children, self._reachable
        for block in hashes:
            held.add(block)
            if block not in parents:
                parents[block] = parent
                if parent is not None:
                    if parent in children:
                        self._adopt(parent, block)
                    else:
                        children[parent] = block
                if parent is None or parent in reachable:
                    if block in children:
                        self._reach(block)
                    else:
                        reachable.add(block)
                        if block in self._watchers:
                            self._touched |= self._watchers[block]
            parent = block

    def _removed(self, tier: str, hashes: Iterable[int]) -> None:
        held = self._tiers.get(tier)
        if held is None:
            return
        others = [blocks for name, blocks in self._tiers.items() if name != tier and blocks]
        for block in hashes:
            if block in held:
                held.remove(block)
                for blocks in others:
                    if block in blocks:
                        break
                else:
                    self._forget(block)

    def _cleared(self, tier: str | None) -> None:
        if tier is None:
            self.clear()
        else:
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
        if block in self._reachable:
            self._unreach(block)

    def _adopt(self, parent: int, block: int) -> None:
        children = self._children[parent]
        if isinstance(children, set):
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
                self._touched |= self._watchers[block]
            if block in self._children:
                todo.extend(self._children_of(block))

    def _unreach(self, first: int) -> None:
        todo = [first]
        while todo:
            block = todo.pop()
            self._reachable.remove(block)
            if block in self._watchers:
                self._touched |= self._watchers[block]
            if block in self._children:
                todo.extend(self._children_of(block))

    # -- what a reader asks -------------------------------------------------------------------

    def match(self, hashes: Sequence[int]) -> int:
        """How many blocks from the start of a prompt can be reused, in any tier."""
        reachable = self._reachable
        low, high = 0, len(hashes)
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
        # Once a change, not once a block: a chain of 500 blocks may move 100 waiting requests.
        for watch in self._touched:
            count = self.match(watch.hashes)
            if count != watch.count:
                self._unpost(watch)
                watch.count = count
                self._post(watch)
                self._changed.add(watch)
        self._touched.clear()

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
