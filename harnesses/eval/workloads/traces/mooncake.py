"""The Mooncake form: requests with lengths, times and block ids, and what others have added to it.

Source: Qin et al., "Mooncake", FAST 2025, repository kvcache-ai/Mooncake, whose blocks have 512
tokens. ``session_id`` and ``delay`` (milliseconds after the turn before it) are AIPerf's and
DynoSim's, ``delay_ms``, ``request_id``, ``wait_for`` and ``tool_wait_ms`` are DynoSim's;
``session`` and ``turn`` are those of traces that were derived for this project.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta, Struct, structs

from hear.errors import ConfigError
from hear.harnesses.eval.workloads.lines import File, read_rows
from hear.harnesses.eval.workloads.traces.trace import (
    MAX_TOKENS,
    BlockId,
    Budget,
    Milliseconds,
    Name,
    PromptTokens,
    Tokens,
    Trace,
    TracedRequest,
)

NAME = "mooncake"
BLOCK_SIZES = (512, 1024, 256, 128, 64, 32, 16)
"""What blocks may have, the likeliest first; an id stands for one block."""


class Row(Struct, frozen=True, kw_only=True):
    """One line. Times are in milliseconds."""

    input_length: PromptTokens
    output_length: Tokens
    hash_ids: tuple[BlockId, ...]
    timestamp: Milliseconds | None = None
    session: BlockId | None = None
    turn: Annotated[int, Meta(ge=1, le=1 << 32)] | None = None
    session_id: Name | BlockId | None = None
    delay: Milliseconds | None = None
    delay_ms: Milliseconds | None = None
    request_id: Name | None = None
    wait_for: tuple[Name, ...] = ()
    tool_wait_ms: Milliseconds | None = None

    @property
    def of_session(self) -> str | int | None:
        """Its session, by whichever field tells it."""
        return self.session if self.session_id is None else self.session_id

    @property
    def think_s(self) -> float | None:
        """The pause before it, None where it has a time instead."""
        told = self.delay if self.delay_ms is None else self.delay_ms
        if told is None and self.tool_wait_ms is None and not self.wait_for:
            return None
        return ((told or 0.0) + (self.tool_wait_ms or 0.0)) / 1000


def read(files: Sequence[File], first: int | None = None) -> Trace:
    """Read a trace.

    Raises:
        ConfigError: a file or a line cannot be used.
    """
    rows: list[tuple[str, Row]] = []
    last, budget = _Last(), Budget()
    for where, row in read_rows(files, Row, first):
        last.check(where, row)
        budget.take(where, row.hash_ids)
        rows.append((where, row))
    block_size = _block_size([row for _, row in rows])
    for where, row in rows:
        blocks = -(-row.input_length // block_size)
        if len(row.hash_ids) != blocks:
            raise ConfigError(
                f"{where}: hash_ids: got {len(row.hash_ids)} ids, expected {blocks}, one for each "
                f"{block_size} of the {row.input_length} tokens"
            )
    requests = tuple(_request(where, row) for where, row in rows)
    remarks: tuple[str, ...] = ()
    if _are_deltas(requests):
        requests = tuple(_grown(requests, block_size))
        remarks = (
            "prompts are what a turn adds, so each begins with all before it in its session",
        )
    return Trace(format=NAME, block_size=block_size, requests=requests, remarks=remarks)


class _Last:
    """What came before, as far as a line has to fit to it."""

    def __init__(self) -> None:
        self._before: Row | None = None
        self._at_ms: dict[str | int | None, float] = {}
        self._turn: dict[int, int] = {}
        self._ids: set[str] = set()

    def check(self, where: str, row: Row) -> None:
        """Check a line.

        Raises:
            ConfigError: it does not fit to those before it.
        """
        if (row.session is None) is not (row.turn is None):
            there, lacking = ("turn", "session") if row.session is None else ("session", "turn")
            raise ConfigError(f"{where}: got {there} without {lacking}, expected both or neither")
        if row.timestamp is None and not row.wait_for and row.of_session is None:
            raise ConfigError(
                f"{where}: got no `timestamp`, `session_id` or `wait_for`, expected one of them"
            )
        before_ms = self._at_ms.get(row.of_session, 0.0)
        if row.timestamp is not None and row.timestamp < before_ms:
            raise ConfigError(
                f"{where}: timestamp: got {row.timestamp:g} after {before_ms:g}, "
                "expected times that never run backwards"
            )
        self._at_ms[row.of_session] = before_ms if row.timestamp is None else row.timestamp
        if self._before is not None and (row.session is None) is not (self._before.session is None):
            here, there = ("no", "one") if row.session is None else ("a", "none")
            raise ConfigError(
                f"{where}: got {here} session and {there} on the line before, "
                "expected sessions on every line or on none"
            )
        if row.session is not None and row.turn is not None:
            if row.turn <= (turn := self._turn.get(row.session, 0)):
                raise ConfigError(
                    f"{where}: turn: got {row.turn}, expected more than {turn}, the turn before it "
                    f"in session {row.session}"
                )
            self._turn[row.session] = row.turn
        for name in row.wait_for:
            if name not in self._ids:
                raise ConfigError(
                    f"{where}: wait_for: got {name!r:.80}, expected the request_id of a line "
                    "before it"
                )
        if row.request_id is not None:
            if row.request_id in self._ids:
                raise ConfigError(
                    f"{where}: request_id: got {row.request_id!r:.80} again, expected it once"
                )
            self._ids.add(row.request_id)
        self._before = row


def _block_size(rows: Sequence[Row]) -> int:
    """The size of blocks that fits to the most lines; of equal ones the likeliest."""
    fits: Counter[int] = Counter()
    for row in rows:
        for size in BLOCK_SIZES:
            fits[size] += -(-row.input_length // size) == len(row.hash_ids)
    return max(BLOCK_SIZES, key=lambda size: (fits[size], -BLOCK_SIZES.index(size)))


def _request(where: str, row: Row) -> TracedRequest:
    return TracedRequest(
        where=where,
        prompt_tokens=row.input_length,
        output_tokens=max(1, row.output_length),
        blocks=row.hash_ids,
        at_s=None if row.timestamp is None else row.timestamp / 1000,
        think_s=row.think_s,
        session=row.of_session,
        id=row.request_id,
        after=row.wait_for,
        pause="tool" if row.tool_wait_ms else "person",
    )


def _are_deltas(requests: Sequence[TracedRequest]) -> bool:
    """Whether prompts are told without what came before them in their sessions.

    Both readings of the form are in use. Whole prompts nearly always begin with the first block of
    the prompt before them; what a turn adds never does.
    """
    before: dict[str | int, int] = {}
    whole = deltas = 0
    for request in requests:
        if request.session is None or not request.blocks:
            continue
        first = before.setdefault(request.session, request.blocks[0])
        if request.think_s is not None and not request.after:  # the form of AIPerf's sessions
            whole += request.blocks[0] == first
            deltas += request.blocks[0] != first
    return deltas > whole


def _grown(requests: Sequence[TracedRequest], block_size: int) -> Iterator[TracedRequest]:
    """The requests with whole prompts: those before them, the answers to them, and their own."""
    length: Counter[str | int] = Counter()
    known: dict[str | int, list[int]] = {}
    budget = Budget()
    fresh = -1  # ids of the trace are not below 0
    for request in requests:
        if request.session is None:
            yield request
            continue
        blocks = known.get(request.session)
        if blocks is None:
            full = request.prompt_tokens // block_size
            blocks = known[request.session] = list((request.blocks or ())[:full])
        prompt = length[request.session] + request.prompt_tokens
        total = length[request.session] = prompt + request.output_tokens
        if total > MAX_TOKENS:
            raise ConfigError(
                f"{request.where}: got a session of {total:,} tokens up to here, expected at most "
                f"{MAX_TOKENS:,}"
            )
        while len(blocks) < total // block_size:
            blocks.append(fresh)
            fresh -= 1
        budget.take(request.where, blocks)
        full = prompt // block_size
        yield structs.replace(
            request,
            prompt_tokens=prompt,
            blocks=tuple(blocks[:full]),
            output_blocks=tuple(blocks[full : total // block_size]),
        )
