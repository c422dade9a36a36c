"""What each context was last served with, so that controls can speak of a context's blocks.

vLLM knows requests and blocks, and no contexts. This remembers, of the most recent ones, the hashes
of their blocks and the tokens behind them, without which nothing could be prefilled again. The
scheduler lock guards it (``bridge``).
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from hear.engines.kv.shared_prefixes import SharedPrefixes
from hear.engines.vllm.hashing import low64
from hear.operation import Ref

MAX_TOKENS: Final = 32_000_000
"""Tokens that are remembered, of all contexts together: 128 MB."""


class Served(NamedTuple):
    """One context. ``blocks`` are HEAR's hashes of its full blocks.

    ``idle_since`` is in ``time.monotonic`` seconds; ``cache_salt`` and ``lora`` are what its
    requests named.
    """

    blocks: list[int]
    tokens: "array[int]"
    idle_since: float
    cache_salt: str | None
    lora: Any


class Contexts:
    """The contexts that were served most recently, within a bound on their tokens."""

    def __init__(self) -> None:
        self._served: OrderedDict[Ref, Served] = OrderedDict()
        self._num_tokens = 0
        self._prefixes = SharedPrefixes[Ref]()

    def get(self, name: Ref) -> Served | None:
        """What a context was last served with."""
        return self._served.get(name)

    def shared(self, name: Ref, blocks: Sequence[int]) -> int:
        """How many of these blocks, from the first on, another that is not released has, too."""
        return self._prefixes.shared(name, list(blocks))

    def release(self, name: Ref) -> None:
        """Let it keep no blocks for others until it is served again."""
        self._prefixes.drop(name)

    def note(self, name: Ref, request: Any, now: float) -> Served | None:
        """A request of vLLM's has come, or has been served: what its context now consists of.

        Returns None if nobody knows: it came as embeddings.
        """
        if request.prompt_token_ids is None:
            return None
        served = Served(
            [low64(key) for key in request.block_hashes],
            array("I", request.all_token_ids),
            now,
            request.cache_salt,
            request.lora_request,
        )
        self._put(name, served)
        return served

    def with_blocks(self, name: Ref, blocks: Sequence[int]) -> Served | None:
        """A context, cut to the given blocks, if they are its first; else another of its tenant."""
        own = self._served.get(name)
        others = (served for other, served in self._served.items() if other[0] == name[0])
        for served in (own, *others) if own else others:
            if list(served.blocks[: len(blocks)]) == list(blocks):
                return served._replace(blocks=served.blocks[: len(blocks)])
        return None

    def _put(self, name: Ref, served: Served) -> None:
        if (former := self._served.pop(name, None)) is not None:
            self._num_tokens -= len(former.tokens)
        self._served[name] = served
        self._num_tokens += len(served.tokens)
        self._prefixes.put(name, served.blocks)
        while self._num_tokens > MAX_TOKENS and len(self._served) > 1:
            oldest, forgotten = self._served.popitem(last=False)
            self._num_tokens -= len(forgotten.tokens)
            self._prefixes.drop(oldest)
