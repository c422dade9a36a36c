"""What one engine holds, kept by a backend that hears of changes and is asked for the whole.

An engine that tells of its blocks by events (vLLM's KV events, from inside or over its publisher)
cannot be asked for all of them. A backend therefore keeps its own count beside the events that it
passes on. For the readers' side, which also asks what of it can be reused, see ``hear.residency``.
"""

from collections.abc import Iterable, Iterator

from hear.blocks import pack, unpack
from hear.messages import BlockChange, BlocksRemoved, BlocksStored


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


class Residents:
    """The blocks of one engine, by tier, each with its parent."""

    def __init__(self) -> None:
        self._tiers: dict[str, dict[int, int | None]] = {}

    def apply(self, change: BlockChange) -> None:
        """Take over one change.

        Raises:
            RemoteProtocolError: packed hashes cannot be read; nothing is changed.
        """
        if isinstance(change, BlocksStored):
            held = self._tiers.setdefault(change.tier, {})
            parent = change.parent
            for block in unpack(change.prefix_hashes):
                held[block] = parent
                parent = block
        elif isinstance(change, BlocksRemoved):
            held = self._tiers.get(change.tier, {})
            for block in unpack(change.prefix_hashes):
                held.pop(block, None)
        elif change.tier is None:
            self._tiers.clear()
        else:
            self._tiers.pop(change.tier, None)

    def chains(self) -> Iterator[BlocksStored]:
        """All of them, as chains."""
        for tier, held in self._tiers.items():
            yield from chains_of(tier, held.items())

    def holds(self, tier: str, block: int) -> bool:
        """Whether a tier holds a block."""
        return block in self._tiers.get(tier, ())

    def count(self, tier: str) -> int:
        """How many blocks a tier holds."""
        return len(self._tiers.get(tier, ()))
