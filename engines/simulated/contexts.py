"""What each context was last served with, so that controls can speak of a context's blocks."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hear.engines.kv.shared_prefixes import SharedPrefixes
from hear.operation import Ref

MAX_CONTEXTS: Final = 100_000
"""Contexts that are remembered; of more, the one that was served longest ago is forgotten."""


@dataclass(slots=True)
class ServedContext:
    """The blocks that a context was last served with, and when that was."""

    blocks: list[int]
    idle_since: float


class Contexts:
    """The contexts that were served most recently."""

    def __init__(self) -> None:
        self._served: OrderedDict[Ref, ServedContext] = OrderedDict()
        self._prefixes = SharedPrefixes[Ref]()

    def __len__(self) -> int:
        return len(self._served)

    def get(self, name: Ref) -> ServedContext | None:
        """What a context was last served with."""
        return self._served.get(name)

    def shared(self, name: Ref, blocks: Sequence[int]) -> int:
        """How many of these blocks, from the first on, another that is not released has, too."""
        return self._prefixes.shared(name, list(blocks))

    def release(self, name: Ref) -> None:
        """Let it keep no blocks for others until it is served again."""
        self._prefixes.drop(name)

    def arrived(self, name: Ref, blocks: Sequence[int], now: float) -> None:
        """A request of a context has come: controls may speak of it from now on."""
        served = self._served.get(name)
        if served is None:
            self.served(name, blocks, now)
        else:
            self._served.move_to_end(name)
            self._prefixes.put(name, served.blocks)

    def served(self, name: Ref, blocks: Sequence[int], now: float) -> None:
        """A request of a context has completed, with these blocks."""
        blocks = list(blocks)  # of one kind, since they are compared
        self._served[name] = ServedContext(blocks, now)
        self._served.move_to_end(name)
        self._prefixes.put(name, blocks)
        if len(self._served) > MAX_CONTEXTS:
            oldest, _ = self._served.popitem(last=False)
            self._prefixes.drop(oldest)

    def clear(self) -> None:
        """Forget all."""
        self._served.clear()
        self._prefixes = SharedPrefixes()
