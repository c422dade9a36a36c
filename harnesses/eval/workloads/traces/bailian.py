"""Bailian's form: chats with their parents, and blocks of 16 tokens.

Source: repository alibaba-edu/qwen-bailian-usagetraces-anon; Wang et al., "KVCache Cache in the
Wild", USENIX ATC 2025. Times are in seconds; each line has the whole prompt of its turn.
"""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from hear.errors import ConfigError
from hear.harnesses.eval.workloads.lines import File, read_rows
from hear.harnesses.eval.workloads.traces.trace import (
    BlockId,
    Budget,
    PromptTokens,
    Tokens,
    Trace,
    TracedRequest,
)

NAME = "bailian"
BLOCK_SIZE = 16


class Row(Struct, frozen=True, kw_only=True):
    """One line. ``parent_chat_id`` is -1 for a chat that continues none."""

    chat_id: BlockId
    timestamp: Annotated[float, Meta(ge=0, le=1e12)]
    input_length: PromptTokens
    output_length: Tokens
    hash_ids: tuple[BlockId, ...]
    parent_chat_id: Annotated[int, Meta(ge=-1, le=2**63 - 1)] = -1


def read(files: Sequence[File], first: int | None = None) -> Trace:
    """Read a trace. A chat whose parent is not in it begins a session.

    Of several chats with one parent, the first continues its session and the others begin one each,
    since a session goes on one way only.

    Raises:
        ConfigError: a file or a line cannot be used.
    """
    requests: list[TracedRequest] = []
    session_of: dict[int, int] = {}
    newest: dict[int, int] = {}  # of each session the chat that was last in it
    at_s = 0.0
    budget = Budget()
    for where, row in read_rows(files, Row, first):
        budget.take(where, row.hash_ids)
        if row.timestamp < at_s:
            raise ConfigError(
                f"{where}: timestamp: got {row.timestamp:g} after {at_s:g}, "
                "expected times that never run backwards"
            )
        at_s = row.timestamp
        if row.chat_id in session_of:
            raise ConfigError(f"{where}: chat_id: got {row.chat_id} again, expected it once")
        full, blocks = row.input_length // BLOCK_SIZE, -(-row.input_length // BLOCK_SIZE)
        if len(row.hash_ids) not in (full, blocks):
            raise ConfigError(
                f"{where}: hash_ids: got {len(row.hash_ids)} ids, expected {blocks}, one for each "
                f"{BLOCK_SIZE} of the {row.input_length} tokens"
            )
        session = session_of.get(row.parent_chat_id)
        if session is None or newest[session] != row.parent_chat_id:
            session = row.chat_id
        session_of[row.chat_id] = session
        newest[session] = row.chat_id
        requests.append(
            TracedRequest(
                where=where,
                prompt_tokens=row.input_length,
                output_tokens=max(1, row.output_length),
                blocks=row.hash_ids,
                at_s=at_s,
                session=session,
            )
        )
    return Trace(format=NAME, block_size=BLOCK_SIZE, requests=tuple(requests))
