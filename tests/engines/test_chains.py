"""Blocks as chains."""

from hear.blocks import unpack
from hear.engines.kv.chains import chains_of


def test_neighbours_that_follow_each_other_are_one_chain() -> None:
    chains = list(chains_of("gpu", [(1, None), (2, 1), (3, 2), (9, 2), (10, 9), (4, 3)]))
    assert [(c.parent, list(unpack(c.prefix_hashes))) for c in chains] == [
        (None, [1, 2, 3]),
        (2, [9, 10]),
        (3, [4]),
    ]
