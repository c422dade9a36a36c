"""The format of the recorded coding-agent sessions, and the block ids that it leaves to decode.

One session a line. A request names its prompt's full blocks either by ``hash_ids`` (the published
form) or, compactly, by ``keep`` and ``runs``: the first ``keep`` ids of the request before it in
the same list, then the ids a to a + n - 1 of each run ``[a, n]``.

Source: repository callanjfox/kv-cache-tester (WEKA), ``traces/``.
"""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct, field

from hear.blocks import chain, pack
from hear.errors import ConfigError

_Count = Annotated[int, Meta(ge=0, le=100_000_000)]  # no trace has more; keeps typos from memory
_Id = Annotated[int, Meta(ge=0, le=2**62)]
_Seconds = Annotated[float, Meta(ge=0)]


class Request(Struct, frozen=True, kw_only=True, tag_field="type", tag="n"):
    """One request, ``t_s`` seconds after its session, or its sub-agent, began.

    ``api_time_s`` is how long it took, ``think_time_s`` how long its client waited before it.
    """

    t_s: _Seconds = field(name="t")
    tokens_in: Annotated[int, Meta(ge=1, le=100_000_000)] = field(name="in")
    tokens_out: _Count = field(name="out")
    stop: str = ""
    api_time_s: _Seconds = field(name="api_time", default=0.0)
    think_time_s: _Seconds | None = field(name="think_time", default=None)
    hash_ids: list[_Id] | None = None
    keep: _Count | None = None
    runs: list[tuple[_Id, _Count]] | None = None

    @property
    def end_s(self) -> float:
        """When it ended, as far as the trace tells: it has no ``api_time`` for some."""
        return self.t_s + self.api_time_s


class StreamingRequest(Request, frozen=True, kw_only=True, tag_field="type", tag="s"):
    """A request whose answer was streamed."""


class SubAgent(Struct, frozen=True, kw_only=True, tag_field="type", tag="subagent"):
    """A sub-agent that the session started at ``t_s``, with a context of its own."""

    t_s: _Seconds = field(name="t")
    agent_id: str
    requests: list[Request | StreamingRequest]
    subagent_type: str = "subagent"
    duration_ms: _Seconds | None = None

    @property
    def end_s(self) -> float:
        """When it ended, on its session's clock."""
        if self.duration_ms is not None:
            return self.t_s + self.duration_ms / 1000
        return self.t_s + (self.requests[-1].end_s if self.requests else 0.0)


class Recording(Struct, frozen=True, kw_only=True):
    """One line: one session, its main list of requests and the sub-agents between them."""

    id: str
    block_size: Annotated[int, Meta(ge=1)]
    requests: list[Request | StreamingRequest | SubAgent]


class PromptBlocks:
    """Decodes the prompts of one list of requests in order, into chained hashes of larger blocks.

    A block of ``group`` source blocks is full only if all of them are. ``root`` is the hash that
    the first block is chained to, and so says within what ids mean the same content.
    """

    def __init__(self, root: int, source_block: int, group: int) -> None:
        self._root = root
        self._source_block = source_block
        self._group = group
        self._ids: list[int] = []
        self._hashes: list[int] = []

    def next(self, where: str, request: Request) -> tuple[int, ...]:
        """The hashes of the next request's full blocks; ``where`` begins the message of an error.

        Raises:
            ConfigError: the request's ids are not one for each full block of its prompt.
        """
        keep, ids = self._decode(where, request)
        hashes = self._hashes[: keep // self._group]
        parent = hashes[-1] if hashes else self._root
        for start in range(len(hashes) * self._group, len(ids) - self._group + 1, self._group):
            parent = chain(parent, pack(ids[start : start + self._group]))
            hashes.append(parent)
        self._ids, self._hashes = ids, hashes
        return tuple(hashes)

    def _decode(self, where: str, request: Request) -> tuple[int, list[int]]:
        """How many ids the request shares with the one before it, and all its ids."""
        full = request.tokens_in // self._source_block
        if request.hash_ids is not None:
            if request.keep is not None or request.runs is not None:
                raise ConfigError(f"{where}: got hash_ids and keep or runs, expected one form")
            _check_length(where, len(request.hash_ids), full, request, self._source_block)
            return _common(self._ids, request.hash_ids), request.hash_ids
        if request.keep is None or request.runs is None:
            raise ConfigError(
                f"{where}: got no prompt blocks, expected hash_ids, or keep together with runs"
            )
        if request.keep > len(self._ids):
            raise ConfigError(
                f"{where}: keep: got {request.keep}, expected at most the {len(self._ids)} ids "
                "of the request before it"
            )
        length = request.keep + sum(count for _, count in request.runs)
        _check_length(where, length, full, request, self._source_block)
        ids = self._ids[: request.keep]
        for first, count in request.runs:
            ids.extend(range(first, first + count))
        return request.keep, ids


def _check_length(where: str, got: int, full: int, request: Request, block: int) -> None:
    if got != full:
        raise ConfigError(
            f"{where}: got {got} block ids, expected {full}, one for each full block of {block} "
            f"of the {request.tokens_in} tokens"
        )


def _common(before: Sequence[int], ids: Sequence[int]) -> int:
    for place, (one, other) in enumerate(zip(before, ids, strict=False)):
        if one != other:
            return place
    return min(len(before), len(ids))
