"""KV events as they come inside vLLM's engine: copies, parents, tenants, and what is of no use."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hear.blocks import unpack
from hear.engines.residents import Residents
from hear.engines.vllm.own_events import OwnEvents
from hear.messages import DEFAULT_TENANT, BlockChange, BlocksCleared, BlocksRemoved, BlocksStored


@dataclass
class BlockStored:
    """Looks like vLLM's event of this name."""

    block_hashes: list[Any]
    parent_block_hash: Any = None
    medium: str | None = "GPU"
    group_idx: int | None = 0
    extra_keys: list[Any] | None = None


@dataclass
class BlockRemoved:
    """Looks like vLLM's event of this name."""

    block_hashes: list[Any]
    medium: str | None = "GPU"
    group_idx: int | None = 0


@dataclass
class AllBlocksCleared:
    """Looks like vLLM's event of this name."""

    nothing: list[int] = field(default_factory=list)


def said(changes: list[BlockChange]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for change in changes:
        if isinstance(change, BlocksStored):
            found.append(("+", change.tier, change.parent, *unpack(change.prefix_hashes)))
        elif isinstance(change, BlocksRemoved):
            found.append(("-", change.tier, *unpack(change.prefix_hashes)))
        else:
            assert isinstance(change, BlocksCleared)
            found.append(("0", change.tier))
    return found


def heard(events: OwnEvents, *told: Any, tenant: str = DEFAULT_TENANT) -> list[tuple[Any, ...]]:
    return said(events.changes(told).get(tenant, []))


def test_a_chain_is_told_as_it_is_stored() -> None:
    events = OwnEvents()
    assert heard(events, BlockStored([1, 2]), BlockStored([3], 2)) == [
        ("+", "gpu", None, 1, 2),
        ("+", "gpu", 2, 3),
    ]
    assert heard(events, BlockRemoved([3, 2])) == [("-", "gpu", 3, 2)]


def test_hashes_are_the_low_64_bits_whether_bytes_or_numbers() -> None:
    digest = bytes(range(32))
    low = int.from_bytes(digest[-8:], "big")
    for form in (digest, int.from_bytes(digest, "big"), low):
        assert heard(OwnEvents(), BlockStored([form])) == [("+", "gpu", None, low)]


def test_a_block_goes_with_its_last_copy() -> None:
    events = OwnEvents()
    heard(events, BlockStored([1, 2]))
    assert heard(events, BlockStored([1, 2])) == []
    assert heard(events, BlockRemoved([2])) == []
    assert heard(events, BlockRemoved([2])) == [("-", "gpu", 2)]
    assert heard(events, BlockRemoved([2])) == [], "it is not there"


def test_the_offloading_tier_takes_parents_from_the_first() -> None:
    events = OwnEvents()
    heard(events, BlockStored([1, 2, 3]))
    assert heard(events, BlockStored([2], medium="CPU"), BlockStored([1], medium="CPU")) == [
        ("+", "cpu", 1, 2),
        ("+", "cpu", None, 1),
    ]
    heard(events, BlockRemoved([3]))  # its copy is still under way
    assert heard(events, BlockStored([3], medium="CPU")) == [("+", "cpu", 2, 3)]


def test_a_reset_clears_the_first_tier_alone() -> None:
    events = OwnEvents()
    heard(events, BlockStored([1, 2]), BlockStored([1], medium="CPU"))
    assert heard(events, AllBlocksCleared()) == [("0", "gpu")]
    assert heard(events, BlockRemoved([1], medium="CPU")) == [("-", "cpu", 1)]
    assert heard(events, BlockStored([1, 2])) == [("+", "gpu", None, 1, 2)]


def test_a_block_is_of_the_tenant_whose_salt_its_prompt_begins_with() -> None:
    events = OwnEvents()
    events.knows("salt-of-acme", "acme")
    made = events.changes(
        [
            BlockStored([1, 2], extra_keys=[("salt-of-acme",), None]),
            BlockStored([9], extra_keys=[("another",)]),
            BlockStored([3], 2, extra_keys=[None]),
            BlockStored([3], medium="CPU"),
        ]
    )
    assert {tenant: said(changes) for tenant, changes in made.items()} == {
        "acme": [("+", "gpu", None, 1, 2), ("+", "gpu", 2, 3), ("+", "cpu", 2, 3)],
        DEFAULT_TENANT: [("+", "gpu", None, 9)],
    }
    assert events.changes([BlockRemoved([9, 3])]).keys() == {"acme", DEFAULT_TENANT}


def test_other_groups_and_media_are_left_out_and_counted() -> None:
    events = OwnEvents()
    assert heard(events, BlockStored([1], group_idx=1), BlockStored([1], medium="STORAGE")) == []
    assert events.left_out == 2


EVENTS = st.lists(
    st.one_of(
        st.builds(
            BlockStored,
            block_hashes=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
            parent_block_hash=st.none() | st.integers(0, 9),
            medium=st.sampled_from(["GPU", "CPU", None]),
        ),
        st.builds(
            BlockRemoved,
            block_hashes=st.lists(st.integers(0, 9), max_size=4, unique=True),
            medium=st.sampled_from(["GPU", "CPU", None]),
        ),
        st.builds(AllBlocksCleared),
    ),
    max_size=40,
)


@given(told=EVENTS)
def test_what_was_told_adds_up_to_what_there_are_copies_of(told: list[Any]) -> None:
    events, residents = OwnEvents(), Residents()
    copies: dict[tuple[str, int], int] = {}
    for event in told:
        for change in events.changes([event]).get(DEFAULT_TENANT, []):
            residents.apply(change)
        if isinstance(event, AllBlocksCleared):
            copies = {key: n for key, n in copies.items() if key[0] != "gpu"}
            continue
        tier = "cpu" if event.medium == "CPU" else "gpu"
        step = 1 if isinstance(event, BlockStored) else -1
        for block in event.block_hashes:
            copies[tier, block] = max(copies.get((tier, block), 0) + step, 0)
    for tier in ("gpu", "cpu"):
        for block in range(10):
            assert residents.holds(tier, block) == (copies.get((tier, block), 0) > 0)
