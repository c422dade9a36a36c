"""The residency directory against a model that looks at every block each time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear import residency
from hear.blocks import pack, unpack
from hear.errors import RemoteProtocolError
from hear.messages import BlockChange, BlocksCleared, BlocksRemoved, BlocksStored
from hear.residency import ResidencyDirectory

TIERS = ("gpu", "cpu")


def stored(*hashes: int, parent: int | None = None, tier: str = "gpu") -> BlocksStored:
    return BlocksStored(tier=tier, parent=parent, prefix_hashes=pack(hashes))


def removed(*hashes: int, tier: str = "gpu") -> BlocksRemoved:
    return BlocksRemoved(tier=tier, prefix_hashes=pack(hashes))


def directory(*changes: BlockChange) -> ResidencyDirectory:
    made = ResidencyDirectory()
    for change in changes:
        made.apply(change)
    return made


@dataclass
class Model:
    """Which tier holds which blocks, and nothing else; every question is answered by a scan."""

    tiers: dict[str, set[int]] = field(default_factory=lambda: {tier: set() for tier in TIERS})
    watches: dict[str, list[int]] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)

    def apply(self, change: BlockChange) -> None:
        match change:
            case BlocksStored(tier=tier, prefix_hashes=packed):
                self.tiers[tier].update(unpack(packed))
            case BlocksRemoved(tier=tier, prefix_hashes=packed):
                self.tiers[tier].difference_update(unpack(packed))
            case BlocksCleared(tier=only):
                for tier in TIERS if only is None else (only,):
                    self.tiers[tier].clear()

    def match(self, prompt: Iterable[int]) -> int:
        count = 0
        for block in prompt:
            if not any(block in held for held in self.tiers.values()):
                break
            count += 1
        return count

    def watch(self, name: str, prompt: list[int]) -> int:
        self.watches[name] = prompt
        self.told[name] = self.match(prompt)
        return self.told[name]

    def unwatch(self, name: str) -> None:
        self.watches.pop(name, None)

    def take_changed(self) -> list[str]:
        counts = {name: self.match(prompt) for name, prompt in self.watches.items()}
        changed = sorted(name for name, count in counts.items() if count != self.told[name])
        self.told.update(counts)
        return changed


@dataclass(frozen=True)
class Forest:
    """Block ``i`` follows block ``parents[i]``, which is smaller, or begins a prompt (None)."""

    parents: tuple[int | None, ...]

    def path(self, block: int) -> list[int]:
        """The prompt that ends with a block."""
        path = [block]
        while (parent := self.parents[path[-1]]) is not None:
            path.append(parent)
        return path[::-1]


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    size = draw(st.integers(1, 24))
    # Mostly chains, as prompts are, with forks here and there.
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 2, 4, 99]), min_size=size, max_size=size))
    return Forest(tuple(None if step > i else i - step for i, step in enumerate(steps)))


@st.composite
def changes(draw: st.DrawFn, forest: Forest) -> BlockChange:
    blocks = st.integers(0, len(forest.parents) - 1)
    tier = draw(st.sampled_from(TIERS))
    kind = draw(st.sampled_from(["stored", "stored", "stored", "removed", "removed", "cleared"]))
    if kind == "stored":
        path = forest.path(draw(blocks))
        first = draw(st.integers(0, len(path) - 1))
        return stored(*path[first:], parent=path[first - 1] if first else None, tier=tier)
    if kind == "removed":
        return removed(*draw(st.lists(blocks, max_size=6)), tier=tier)
    return BlocksCleared(tier=draw(st.sampled_from([tier, None])))


@given(st.data())
def test_every_answer_is_that_of_a_scan_of_all_blocks(data: st.DataObject) -> None:
    forest = data.draw(forests())
    prompts: list[list[int]] = [forest.path(block) for block in range(len(forest.parents))]
    prompts += [[*path, 1000, 1001] for path in prompts] + [[], [1000]]
    names = st.sampled_from("uvw")
    real, model = ResidencyDirectory(), Model()
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["apply"] * 5 + ["watch", "watch", "unwatch", "take"]))
        if action == "apply":
            change = data.draw(changes(forest))
            real.apply(change)
            model.apply(change)
        elif action == "watch":
            name, followed = data.draw(names), data.draw(st.sampled_from(prompts))
            assert real.watch(name, followed) == model.watch(name, followed)
        elif action == "unwatch":
            name = data.draw(names)
            real.unwatch(name)
            model.unwatch(name)
        else:
            assert real.take_changed() == model.take_changed()
        for prompt in prompts:
            assert real.match(prompt) == model.match(prompt)
        for name, followed in model.watches.items():
            assert real.count(name) == model.match(followed)
    assert real.take_changed() == model.take_changed()
    for tier, held in model.tiers.items():
        assert real.num_blocks(tier) == len(held)
        assert {block for block in range(24) if real.holds(tier, block)} == held
        longest = max(prompts, key=model.match)
        reusable = set(longest[: model.match(longest)])
        assert real.match_by_tier(longest).get(tier, 0) == len(reusable & held)
    assert real.num_blocks() == len(set().union(*model.tiers.values()))


_any_change = st.one_of(
    st.builds(
        lambda tier, parent, hashes: stored(*hashes, parent=parent, tier=tier),
        st.sampled_from(TIERS),
        st.none() | st.integers(0, 5),
        st.lists(st.integers(0, 5), max_size=4),
    ),
    st.builds(
        lambda tier, hashes: removed(*hashes, tier=tier),
        st.sampled_from(TIERS),
        st.lists(st.integers(0, 5), max_size=4),
    ),
)


@given(st.lists(_any_change, max_size=20))
def test_an_engine_that_contradicts_itself_breaks_nothing(reports: list[BlockChange]) -> None:
    """Two parents for one block, a block before itself, a circle: wrong, and still no error."""
    confused, model = ResidencyDirectory(), Model()
    confused.watch("w", [0, 1, 2])
    for report in reports:
        confused.apply(report)
        model.apply(report)
    assert confused.num_blocks() == len(set().union(*model.tiers.values()))
    for tier, held in model.tiers.items():
        confused.apply(removed(*held, tier=tier))
    assert confused.num_blocks() == confused.count("w") == confused.match([0, 1, 2]) == 0
    assert not confused._children
    assert not confused._unreachable


@given(st.lists(_any_change, max_size=20))
def test_a_chain_taken_at_once_is_as_its_blocks_one_by_one(reports: list[BlockChange]) -> None:
    """Long chains have a way of their own, which must not show, whatever an engine reports."""
    at_once, one_by_one = ResidencyDirectory(), ResidencyDirectory()
    prompts = list(permutations(range(6), 3))
    for held in (at_once, one_by_one):
        held.watch("w", [0, 1, 2])
    for report in reports:
        with patch.object(residency, "_LONG", 1):
            at_once.apply(report)
        with patch.object(residency, "_LONG", 1_000):
            one_by_one.apply(report)
        assert at_once.count("w") == one_by_one.count("w")
        assert [at_once.match(p) for p in prompts] == [one_by_one.match(p) for p in prompts]
    assert at_once.take_changed() == one_by_one.take_changed()
    assert at_once.num_blocks() == one_by_one.num_blocks()
    assert at_once._tiers == one_by_one._tiers
    assert at_once._children == one_by_one._children


def test_a_prefix_with_a_hole_is_reused_up_to_the_hole() -> None:
    held = directory(stored(1, 2, 3, 4), removed(2))
    assert held.match([1, 2, 3, 4]) == 1
    held.apply(stored(2, parent=1))
    assert held.match([1, 2, 3, 4]) == 4


def test_blocks_may_be_reported_before_their_parents() -> None:
    held = directory(stored(3, 4, parent=2))
    assert held.match([1, 2, 3, 4]) == 0
    held.apply(stored(1, 2))
    assert held.match([1, 2, 3, 4]) == 4


def test_a_block_counts_while_any_tier_holds_it() -> None:
    held = directory(stored(1, 2), stored(1, 2, 3, tier="cpu"), removed(1, 2))
    assert held.match([1, 2, 3]) == 3
    assert held.match_by_tier([1, 2, 3]) == {"gpu": 0, "cpu": 3}
    held.apply(BlocksCleared(tier="cpu"))
    assert held.num_blocks() == held.match([1, 2, 3]) == 0


def test_removing_what_a_tier_does_not_hold_changes_nothing() -> None:
    held = directory(stored(1, 2, tier="cpu"))
    held.apply(removed(1, 2, 77, tier="gpu"))
    held.apply(removed(1, tier="a tier never heard of"))
    assert held.match([1, 2]) == 2


def test_a_watcher_hears_of_the_end_of_a_change_and_not_of_each_block() -> None:
    held = directory()
    assert held.watch("r", range(100)) == 0
    held.apply(stored(*range(60)))
    assert held.count("r") == 60
    assert held.take_changed() == ["r"]
    assert held.take_changed() == []


def test_a_count_that_is_again_what_was_told_has_not_changed() -> None:
    held = directory(stored(1, 2, 3))
    held.watch("r", [1, 2, 3])
    held.apply(removed(3))
    held.apply(stored(3, parent=2))
    assert held.take_changed() == []


def test_clearing_forgets_blocks_and_keeps_watchers() -> None:
    held = directory(stored(1, 2, 3))
    held.watch("r", [1, 2, 3])
    held.clear()
    assert (held.count("r"), held.take_changed()) == (0, ["r"])
    held.apply(stored(1))
    assert (held.count("r"), held.take_changed()) == (1, ["r"])


def test_what_is_watched_no_longer_is_not_reported() -> None:
    held = directory()
    held.watch("r", [1])
    held.apply(stored(1))
    held.unwatch("r")
    held.unwatch("never watched")
    assert held.take_changed() == []
    with pytest.raises(KeyError):
        held.count("r")
    assert not held._watchers


@pytest.mark.parametrize("kind", [BlocksStored, BlocksRemoved])
def test_hashes_that_cannot_be_read_raise_and_change_nothing(
    kind: type[BlocksStored | BlocksRemoved],
) -> None:
    held = directory(stored(1, 2))
    held.watch("r", [1, 2])
    with pytest.raises(RemoteProtocolError):
        held.apply(kind(tier="gpu", prefix_hashes=b"\0" * 12))
    assert (held.num_blocks(), held.count("r"), held.take_changed()) == (2, 2, [])


def test_many_watchers_of_one_long_prompt_cost_little() -> None:
    """100 waiting requests share a prompt of 2,000 blocks, stored 500 blocks a step."""
    matches = 0

    class Counting(ResidencyDirectory):
        def match(self, hashes: Sequence[int]) -> int:
            nonlocal matches
            matches += 1
            return super().match(hashes)

    held, prompt = Counting(), list(range(2_000))
    for number in range(100):
        held.watch(str(number), prompt)
    for first in range(0, 2_000, 500):
        held.apply(stored(*prompt[first : first + 500], parent=first - 1 if first else None))
    assert len(held.take_changed()) == 100
    assert matches == 100 + 4 * 100
