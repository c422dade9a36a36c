"""The Mooncake traces: production requests with lengths, arrival times and block ids.

Knows the trace's format and how its sessions are told; what is done with a turn that arrives
before its predecessor has ended is the runner's to say.

Source: Qin et al., "Mooncake", FAST 2025, repository kvcache-ai/Mooncake. An id of the trace
stands for one block of 512 tokens and for the whole prefix before it.
"""

from collections import defaultdict
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from hear.blocks import HASH_SCHEME, chain
from hear.errors import ConfigError
from hear.harnesses.replay.lines import read_lines, shipped
from hear.harnesses.replay.sessions import SessionRule, rebuild
from hear.harnesses.replay.workload import LeftOut, Session, Turn, Workload

BLOCK_SIZE = 512
SHIPPED = "mooncake_conversation.jsonl.gz"
SHIPPED_WINDOW = (0.0, 900.0)

_NotNegative = Annotated[int, Meta(ge=0)]
_Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Row(Struct, frozen=True, kw_only=True):
    """One line of the trace. ``session`` and ``turn`` are there only in a derived trace."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: _NotNegative
    hash_ids: tuple[_Id, ...]
    session: _NotNegative | None = None
    turn: Annotated[int, Meta(ge=1)] | None = None


def load(
    path: Path | None = None,
    *,
    window: tuple[float, float] | None = None,
    max_tokens: int = 40_960,
    layer: int = 0,
    sessions: SessionRule | None = None,
    whole_sessions: bool = False,
) -> Workload:
    """Load a Mooncake trace; without a path, the first 900 s of the conversation trace.

    ``window`` keeps the turns that arrive from its first second up to, not including, its second
    one; ``Turn.at_s`` counts from its start. With ``whole_sessions`` it keeps the sessions that
    begin in it, with all their turns, and no others. Turns of more than ``max_tokens``, prompt and
    output together, are left out, the other turns of their sessions stay and are counted anew from
    1. A session keeps the number that it has in the whole trace. An output is at least one token.

    A ``layer`` above 0 is what that many windows later there is to lay over the first: the turns
    that arrive in that window, of the sessions that begin in it. So no two layers share a session.

    ``sessions`` says where they are from: the trace's own fields (``told``), ``sessions.rebuild``
    over all its rows, before window and length choose (``rebuilt``), or each request is one
    (``none``). Without it, what the trace tells is taken, and rebuilt where it tells nothing, as
    the published ones do.

    Raises:
        ConfigError: the file, one of its lines or the window cannot be used, the trace ends before
            the layer begins, or it does not tell sessions that are to be told.
    """
    source = shipped(SHIPPED) if path is None else path
    if window is None and path is None:
        window = SHIPPED_WINDOW
    start, end = window if window is not None else (0.0, float("inf"))
    if not 0 <= start < end:
        raise ConfigError(f"window: got {start:g} to {end:g} s, expected 0 <= start < end")
    rows = _read(source)
    last_s = rows[-1].timestamp / 1000
    if layer:
        start, end = start + layer * (end - start), end + layer * (end - start)
        if not start <= last_s:  # nor without a window, which leaves nothing to lay over it
            raise ConfigError(
                f"load: {source} ends after {last_s:g} s, expected at most {100 * layer}% of its "
                f"window{'' if window else ', the whole of it'}"
            )
    numbers, remark = _sessions_of(source, rows, sessions)
    begins: dict[int, float] = {}
    hashes: dict[tuple[int | None, int], int] = {}
    turns: dict[int, list[Turn]] = defaultdict(list)
    arrived: list[tuple[int, Row]] = []
    for row, session in zip(rows, numbers, strict=True):
        begun = begins.setdefault(session, row.timestamp)
        if (whole_sessions or layer) and not start * 1000 <= begun < end * 1000:
            continue
        if not whole_sessions and not start * 1000 <= row.timestamp < end * 1000:
            continue
        arrived.append((session, row))
        output_tokens = max(1, row.output_length)
        if row.input_length + output_tokens > max_tokens:
            continue
        turns[session].append(
            Turn(
                prompt_tokens=row.input_length,
                output_tokens=output_tokens,
                prompt_hashes=_prompt_hashes(row, hashes),
                at_s=row.timestamp / 1000 - start,
            )
        )
    if not arrived:
        raise ConfigError(
            f"{source}: window: got {start:g} to {end:g} s, in which no request arrives, "
            f"expected one within {rows[0].timestamp / 1000:g} to {last_s:g} s"
        )
    if not turns:
        raise ConfigError(
            f"{source}: max_tokens: got {max_tokens}, expected as many as the shortest of the "
            f"{len(arrived)} requests in the window has"
        )
    return Workload(
        name="mooncake",
        block_size=BLOCK_SIZE,
        hash_scheme=HASH_SCHEME,
        sessions=tuple(
            Session(id=f"mooncake-{number:05d}", turns=tuple(its), start_s=its[0].at_s or 0.0)
            for number, its in turns.items()
        ),
        left_out=_too_long(arrived, turns, max_tokens),
        remarks=(remark,),
    )


def _sessions_of(
    source: Path | Traversable, rows: list[Row], rule: SessionRule | None
) -> tuple[list[int], str]:
    """The number of each row's session, and how it is known."""
    told = [row.session for row in rows if row.session is not None]
    if rule == "none":
        return list(range(len(rows))), "each request is a session"
    if rule != "rebuilt" and told:
        return told, "sessions as the trace tells them"
    if rule == "told":
        raise ConfigError(f"{source}: --sessions told: got no session fields, expected some")
    rebuilt = rebuild(rows, BLOCK_SIZE)
    return rebuilt.sessions, (
        f"sessions rebuilt: of {len(rows):,} requests in the trace {rebuilt.links:,} continue "
        f"another by blocks that no other session has, {rebuilt.ambiguous:,} that might were left "
        "by themselves"
    )


def _too_long(
    arrived: list[tuple[int, Row]], turns: Mapping[int, list[Turn]], max_tokens: int
) -> tuple[LeftOut, ...]:
    """What had more than ``max_tokens``."""
    kept = sum(map(len, turns.values()))
    if kept == len(arrived):
        return ()
    tokens = sum(row.input_length for _, row in arrived)
    kept_tokens = sum(turn.prompt_tokens for its in turns.values() for turn in its)
    return (
        LeftOut(
            why=f"of more than {max_tokens:,} tokens each",
            turns=len(arrived) - kept,
            sessions=len({session for session, _ in arrived} - turns.keys()),
            prompt_tokens=tokens - kept_tokens,
            of_prompt_tokens=tokens,
        ),
    )


def _read(source: Path | Traversable) -> list[Row]:
    rows: list[Row] = []
    last_turn: dict[int, int] = defaultdict(int)
    for number, row in read_lines(source, Row):
        where = f"{source}:{number}"
        _check(where, row, rows[-1] if rows else None)
        if row.session is not None and row.turn is not None:
            if row.turn <= last_turn[row.session]:
                raise ConfigError(
                    f"{where}: turn: got {row.turn}, expected more than "
                    f"{last_turn[row.session]}, the turn before it in session {row.session}"
                )
            last_turn[row.session] = row.turn
        rows.append(row)
    if not rows:
        raise ConfigError(f"{source}: got no request at all, expected one JSON object a line")
    return rows


def _check(where: str, row: Row, before: Row | None) -> None:
    blocks = -(-row.input_length // BLOCK_SIZE)
    if len(row.hash_ids) != blocks:
        raise ConfigError(
            f"{where}: hash_ids: got {len(row.hash_ids)} ids, expected {blocks}, one for each "
            f"{BLOCK_SIZE} of the {row.input_length} tokens"
        )
    if (row.session is None) is not (row.turn is None):
        there, lacking = ("turn", "session") if row.session is None else ("session", "turn")
        raise ConfigError(f"{where}: got {there} without {lacking}, expected both or neither")
    if before is None:
        return
    if row.timestamp < before.timestamp:
        raise ConfigError(
            f"{where}: timestamp: got {row.timestamp:g} after {before.timestamp:g}, "
            "expected times that never run backwards"
        )
    if (row.session is None) is not (before.session is None):
        here, there = ("no", "one") if row.session is None else ("a", "none")
        raise ConfigError(
            f"{where}: got {here} session and {there} on the line before, "
            "expected sessions on every line or on none"
        )


def _prompt_hashes(row: Row, known: dict[tuple[int | None, int], int]) -> tuple[int, ...]:
    # An id names its whole prefix already. To chain the ids all the same costs nothing and keeps
    # the hashes sound should a trace ever use one id under two prefixes.
    hashes: list[int] = []
    parent: int | None = None
    for block in row.hash_ids[: row.input_length // BLOCK_SIZE]:
        hashed = known.get((parent, block))
        if hashed is None:
            hashed = known[parent, block] = chain(parent, block.to_bytes(8, "little"))
        hashes.append(hashed)
        parent = hashed
    return tuple(hashes)
