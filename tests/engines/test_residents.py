"""What a backend keeps of its engine's blocks, against a plain model."""

from hypothesis import given
from hypothesis import strategies as st

from hear.blocks import pack, unpack
from hear.engines.residents import Residents, chains_of
from hear.messages import BlockChange, BlocksCleared, BlocksRemoved, BlocksStored

TIERS = st.sampled_from(["gpu", "cpu"])
BLOCKS = st.integers(0, 30)
CHANGES = st.lists(
    st.one_of(
        st.builds(
            BlocksStored,
            tier=TIERS,
            parent=st.none() | BLOCKS,
            prefix_hashes=st.lists(BLOCKS, unique=True, max_size=6).map(pack),
        ),
        st.builds(BlocksRemoved, tier=TIERS, prefix_hashes=st.lists(BLOCKS, max_size=6).map(pack)),
        st.builds(BlocksCleared, tier=st.none() | TIERS),
    ),
    max_size=30,
)


def held_by(chains: list[BlocksStored]) -> dict[tuple[str, int], int | None]:
    found: dict[tuple[str, int], int | None] = {}
    for chain in chains:
        parent = chain.parent
        for block in unpack(chain.prefix_hashes):
            assert (chain.tier, block) not in found
            found[chain.tier, block] = parent
            parent = block
    return found


@given(changes=CHANGES)
def test_the_chains_are_what_the_changes_left(changes: list[BlockChange]) -> None:
    residents, model = Residents(), dict[tuple[str, int], int | None]()
    for change in changes:
        residents.apply(change)
        if isinstance(change, BlocksStored):
            model.update(held_by([change]))
        elif isinstance(change, BlocksRemoved):
            for block in unpack(change.prefix_hashes):
                model.pop((change.tier, block), None)
        else:
            model = {k: v for k, v in model.items() if change.tier not in (None, k[0])}
    assert held_by(list(residents.chains())) == model
    for tier in ("gpu", "cpu"):
        assert residents.count(tier) == sum(held == tier for held, _ in model)
        assert all(residents.holds(tier, b) == ((tier, b) in model) for b in range(31))


def test_neighbours_that_follow_each_other_are_one_chain() -> None:
    chains = list(chains_of("gpu", [(1, None), (2, 1), (3, 2), (9, 2), (10, 9), (4, 3)]))
    assert [(c.parent, list(unpack(c.prefix_hashes))) for c in chains] == [
        (None, [1, 2, 3]),
        (2, [9, 10]),
        (3, [4]),
    ]
