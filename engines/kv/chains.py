"""Blocks that follow each other, as HEAR's messages tell of them."""

from collections.abc import Iterable, Iterator

from hear.blocks import pack
from hear.messages import BlocksStored


def chains_of(tier: str, blocks: Iterable[tuple[int, int | None]]) -> Iterator[BlocksStored]:
    """Join neighbours that follow each other into chains; ``blocks`` are hashes and parents."""
    run: list[int] = []
    first_parent: int | None = None
    for block, parent in blocks:
        if run and parent != run[-1]:
            yield BlocksStored(tier=tier, parent=first_parent, prefix_hashes=pack(run))
            run = []
        if not run:
            first_parent = parent
        run.append(block)
    if run:
        yield BlocksStored(tier=tier, parent=first_parent, prefix_hashes=pack(run))
