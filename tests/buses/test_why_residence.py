"""The blocks of one prompt: what was there, what went, and to whom the room went."""

from collections.abc import Sequence

import pytest

from hear.blocks import pack
from hear.buses.observe.why.facts import Evicted
from hear.buses.observe.why.residence import Residence
from hear.messages import BlocksCleared, BlocksRemoved, BlocksStored


def nobody(stored: set[int]) -> list[str]:
    return []


def stored(*blocks: int, tier: str = "gpu") -> BlocksStored:
    return BlocksStored(tier=tier, prefix_hashes=pack(blocks))


def removed(*blocks: int, tier: str = "gpu") -> BlocksRemoved:
    return BlocksRemoved(tier=tier, prefix_hashes=pack(blocks))


def known(hashes: Sequence[int] = (1, 2, 3, 4)) -> Residence:
    residence = Residence(hashes, nobody)
    residence.replace([], 0, 1, 0.0)
    return residence


def test_the_prefix_ends_at_the_first_block_that_no_tier_holds() -> None:
    residence = known()
    residence.change([stored(1, 2), stored(4), stored(3, tier="cpu")], 1.0)
    assert residence.prefix == 4
    residence.change([removed(2)], 2.0)
    assert (residence.prefix, residence.most, residence.most_s) == (1, 4, 2.0)
    residence.change([stored(2, tier="disk")], 3.0)
    assert (residence.prefix, residence.most_s) == (4, 3.0)


def test_blocks_of_others_are_no_concern_of_it() -> None:
    residence = known()
    residence.change([stored(7, 8), removed(7), removed(1)], 1.0)
    assert (residence.prefix, residence.evicted) == (0, [])


def test_what_stays_in_another_tier_is_given_up_and_not_lost() -> None:
    residence = known()
    residence.change([stored(1, 2), stored(1, tier="cpu")], 1.0)
    residence.change([removed(1, 2)], 2.0)
    facts = residence.facts(16, 2, 1)
    assert facts.evicted == (Evicted(time_s=2.0, until_s=2.0, tier="gpu", blocks=2, lost=1),)
    assert (facts.most, facts.most_s, facts.at_arrival, facts.at_start) == (2, 2.0, 2, 1)


def test_evictions_that_follow_each_other_are_one_and_keep_all_takers() -> None:
    residence = known()
    residence.change([stored(1, 2, 3, 4)], 1.0)
    for time_s, block, started in ((2.0, 4, ["a"]), (4.0, 3, ["b", "a"]), (20.0, 2, [])):
        residence.change([removed(block)], time_s)
        residence.explain(time_s, started)
    assert [
        (e.time_s, e.until_s, e.blocks, e.takers) for e in residence.facts(1, 0, 0).evicted
    ] == [
        (2.0, 4.0, 2, ("a", "b")),
        (20.0, 20.0, 1, ()),
    ]


def test_if_nobody_started_the_room_went_to_who_computed_what_was_stored() -> None:
    residence = Residence([1, 2], lambda blocks: ["grows"] if 9 in blocks else [])
    residence.replace([stored(1, 2)], 0, 1, 0.0)
    residence.change([stored(9), removed(2)], 1.0)
    residence.explain(1.5, ["started later"])
    assert residence.facts(1, 2, 1).evicted[0].takers == ("grows",)


def test_what_a_request_stores_as_it_starts_is_not_what_it_found() -> None:
    residence = known()
    residence.change([stored(1)], 1.0)
    residence.change([stored(2, 3, 4)], 5.0)
    assert residence.served(5.0005) == 1  # on a real clock, the next message is a little later
    assert (residence.most, residence.most_s) == (1, 1.0)


def test_after_a_gap_nothing_is_known_until_a_snapshot_is_whole() -> None:
    residence = known()
    residence.change([stored(1, 2)], 1.0)
    residence.forget()
    assert (residence.known, residence.prefix) == (False, 0)
    residence.replace([stored(1)], 0, 2, 2.0)
    assert not residence.known
    residence.replace([stored(2)], 1, 2, 2.0)
    assert (residence.known, residence.prefix) == (True, 2)


@pytest.mark.parametrize("tier", ["gpu", None])
def test_a_tier_that_is_cleared_gives_up_all(tier: str | None) -> None:
    residence = known()
    residence.change([stored(1, 2), stored(1, tier="cpu")], 1.0)
    residence.change([BlocksCleared(tier=tier)], 2.0)
    assert residence.prefix == (1 if tier else 0)
    assert sum(e.lost for e in residence.facts(1, 0, 0).evicted) == (1 if tier else 2)
