"""A workload by its tokens: made of a seed or a trace, kept in a file, sent to a real engine.

A generated session is one stream of tokens, and the prompt of each turn a beginning of it: the
context, then question after question with the answer to the one before. The answers in it are made
up, so that every prompt is the same whatever the engine answers. A turn of a trace has a prompt of
its own, which has in common with others what the trace says.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from hear.codec import UNREADABLE
from hear.errors import ConfigError
from hear.harnesses.eval.report.output import write_whole
from hear.harnesses.eval.workloads.arrivals import poisson_arrivals
from hear.harnesses.eval.workloads.workload import LeftOut, Session, Turn, Workload
from hear.messages.intent import PauseCause

NAME: Final = "scbench-small"

TOKENS: Final = (16, 500)
"""Tokens that are drawn from: it leaves out those that mean something to most tokenizers."""

MAX_TOKENS: Final = 20_000_000
"""Of all prompts of a trace: a script holds each of them whole."""

Hasher = Callable[[Sequence[int]], Sequence[int]]
"""Ids of tokens to the hashes of the full blocks that they fill."""

_Token = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Positive = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0.0)]


class Shape(Struct, frozen=True, kw_only=True):
    """What the sessions look like. ``context_tokens`` is the range of a uniform draw.

    Sessions start by a Poisson process of ``rate`` a second; think times are normal and not below
    0. Tokens are drawn from the range ``tokens``.
    """

    sessions: int = 14
    turns: int = 5
    context_tokens: tuple[int, int] = (1500, 2900)
    question_tokens: int = 32
    output_tokens: int = 16
    rate: float = 2.0
    think_mean_s: float = 1.0
    think_sd_s: float = 0.2
    tokens: tuple[int, int] = TOKENS

    @property
    def max_tokens(self) -> int:
        """The longest prompt with its answer."""
        return self.context_tokens[1] + self.turns * (self.question_tokens + self.output_tokens)


class ScriptTurn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request: how far its prompt reaches into the session, and what comes before it.

    A turn with ``token_ids`` has a prompt of its own. The other fields are those of ``Turn``.
    """

    prompt_tokens: _Positive
    output_tokens: _Positive
    token_ids: tuple[_Token, ...] = ()
    at_s: _Seconds | None = None
    think_s: _Seconds = 0.0
    waits_for: tuple[str, ...] = ()
    after: tuple[tuple[str, int], ...] = ()
    pause: PauseCause = "person"


class ScriptSession(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One context, with its stream of tokens. The other fields are those of ``Session``."""

    id: str
    start_s: _Seconds
    turns: tuple[ScriptTurn, ...]
    token_ids: tuple[_Token, ...] = ()
    role: str | None = None
    parent: str | None = None
    after_turns: int = 0

    def prompt(self, turn: ScriptTurn) -> tuple[int, ...]:
        """The tokens of a turn's prompt."""
        return turn.token_ids or self.token_ids[: turn.prompt_tokens]


class Script(Struct, frozen=True, kw_only=True):
    """All sessions of a workload, and the seed that they were drawn from.

    ``left_out`` and ``remarks`` are those of the workload that it was made of.
    """

    name: str
    seed: int
    sessions: tuple[ScriptSession, ...]
    left_out: tuple[LeftOut, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def num_turns(self) -> int:
        """How many requests there are in all."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def max_tokens(self) -> int:
        """The longest prompt with its answer."""
        turns = (turn for session in self.sessions for turn in session.turns)
        return max(turn.prompt_tokens + turn.output_tokens for turn in turns)

    @property
    def longest_prompt(self) -> tuple[int, ...]:
        """The tokens of the longest prompt."""
        turns = ((session, turn) for session in self.sessions for turn in session.turns)
        session, turn = max(turns, key=lambda each: each[1].prompt_tokens)
        return session.prompt(turn)

    def workload(self, block_size: int, hash_prefix: Hasher) -> Workload:
        """The workload as the harness replays it, on an engine with such blocks."""
        return Workload(
            name=self.name,
            block_size=block_size,
            sessions=tuple(
                Session(
                    id=session.id,
                    start_s=session.start_s,
                    turns=tuple(_turns(session, block_size, hash_prefix)),
                    role=session.role,
                    parent=session.parent,
                    after_turns=session.after_turns,
                )
                for session in self.sessions
            ),
            left_out=self.left_out,
            remarks=self.remarks,
        )


def _turns(session: ScriptSession, block_size: int, hash_prefix: Hasher) -> Iterator[Turn]:
    stream = hash_prefix(session.token_ids)
    for turn in session.turns:
        prompt = session.prompt(turn)
        hashes = hash_prefix(prompt) if turn.token_ids else stream
        yield Turn(
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.output_tokens,
            prompt_hashes=tuple(hashes[: turn.prompt_tokens // block_size]),
            prompt_token_ids=prompt,
            at_s=turn.at_s,
            think_s=turn.think_s,
            waits_for=turn.waits_for,
            after=turn.after,
            pause=turn.pause,
        )


def of_workload(workload: Workload, seed: int, tokens: tuple[int, int] = TOKENS) -> Script:
    """Give the prompts of a workload tokens, so that a real engine can serve them.

    Where it has none, the tokens of a block are drawn by the block's hash, from the range
    ``tokens``, and those after the last full block by the turn: prompts have in common what they
    have in truth, in whole blocks.

    Raises:
        ConfigError: there are more than ``MAX_TOKENS`` in all.
    """
    total = sum(turn.prompt_tokens for session in workload.sessions for turn in session.turns)
    if total > MAX_TOKENS:
        raise ConfigError(
            f"{workload.name}: got prompts of {total:,} tokens in all, expected at most "
            f"{MAX_TOKENS:,}; --load, --window, --first and --max-tokens take fewer"
        )

    @cache
    def drawn(content: str, count: int) -> list[int]:
        return random.Random(content).choices(range(*tokens), k=count)

    def prompt(session: Session, number: int, turn: Turn) -> tuple[int, ...]:
        if turn.prompt_token_ids:
            return tuple(turn.prompt_token_ids)
        ids: list[int] = []
        for hashed in turn.prompt_hashes:
            ids += drawn(f"block {hashed}", workload.block_size)
        return (*ids, *drawn(f"{session.id} {number}", turn.prompt_tokens - len(ids)))

    return Script(
        name=workload.name,
        seed=seed,
        sessions=tuple(
            ScriptSession(
                id=session.id,
                start_s=session.start_s,
                role=session.role,
                parent=session.parent,
                after_turns=session.after_turns,
                turns=tuple(
                    ScriptTurn(
                        prompt_tokens=turn.prompt_tokens,
                        output_tokens=turn.output_tokens,
                        token_ids=prompt(session, number, turn),
                        at_s=turn.at_s,
                        think_s=turn.think_s,
                        waits_for=turn.waits_for,
                        after=turn.after,
                        pause=turn.pause,
                    )
                    for number, turn in enumerate(session.turns, 1)
                ),
            )
            for session in workload.sessions
        ),
        left_out=workload.left_out,
        remarks=workload.remarks,
    )


def generate(seed: int, shape: Shape | None = None) -> Script:
    """Draw a script; equal arguments give equal scripts.

    Raises:
        ConfigError: the shape is impossible.
    """
    shape = shape or Shape()
    _check(shape)
    sessions = []
    for index, start_s in enumerate(poisson_arrivals(shape.sessions, shape.rate, seed)):
        draw = random.Random(f"{NAME} {seed} {index}")  # so none depends on how many there are
        context = draw.randint(*shape.context_tokens)
        each = shape.question_tokens + shape.output_tokens
        stream = draw.choices(range(*shape.tokens), k=context + shape.turns * each)
        thinks = [0.0]
        thinks += [
            max(0.0, draw.gauss(shape.think_mean_s, shape.think_sd_s))
            for _ in range(shape.turns - 1)
        ]
        sessions.append(
            ScriptSession(
                id=f"{NAME}-{index:03d}",
                start_s=start_s,
                token_ids=tuple(stream),
                turns=tuple(
                    ScriptTurn(
                        prompt_tokens=context + number * each + shape.question_tokens,
                        output_tokens=shape.output_tokens,
                        think_s=think_s,
                    )
                    for number, think_s in enumerate(thinks)
                ),
            )
        )
    return Script(name=NAME, seed=seed, sessions=tuple(sessions))


def _check(shape: Shape) -> None:
    low, high = shape.context_tokens
    if not 1 <= low <= high:
        raise ConfigError(f"context: got {low}:{high} tokens, expected MIN:MAX from 1")
    for name in ("sessions", "turns", "question_tokens", "output_tokens"):
        if (value := getattr(shape, name)) < 1:
            raise ConfigError(f"{name.replace('_', ' ')}: got {value}, expected at least 1")
    if not (0 <= shape.think_mean_s < float("inf") and 0 <= shape.think_sd_s < float("inf")):
        raise ConfigError(
            f"think time: got mean {shape.think_mean_s:g} and deviation {shape.think_sd_s:g} s, "
            "expected both at least 0"
        )


def save(scripts: Sequence[Script], path: Path) -> None:
    """Write the scripts of all rounds, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, msgspec.json.encode(scripts))


def load(path: Path) -> tuple[Script, ...]:
    """Read the scripts that ``save`` has written.

    Raises:
        ConfigError: the file cannot be read, or holds no scripts.
    """
    try:
        scripts = msgspec.json.decode(path.read_bytes(), type=tuple[Script, ...])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path}: holds no workload of hear bench: {error}") from error
    if not scripts:
        raise ConfigError(f"{path}: holds no workload, expected at least one")
    for script in scripts:
        _check_script(script, path)
    return scripts


def _check_script(script: Script, path: Path) -> None:
    if not script.sessions:
        raise ConfigError(f"{path}: {script.name}: no session, expected at least one")
    for session in script.sessions:
        of_stream = [turn.prompt_tokens for turn in session.turns if not turn.token_ids]
        longest = max(of_stream, default=0)
        if not bool(of_stream) <= longest <= len(session.token_ids):
            raise ConfigError(
                f"{path}: {session.id}: a prompt of {longest} tokens, expected 1 to the "
                f"{len(session.token_ids)} of its session"
            )
        for turn in session.turns:
            if turn.token_ids and len(turn.token_ids) != turn.prompt_tokens:
                raise ConfigError(
                    f"{path}: {session.id}: a prompt of {turn.prompt_tokens} tokens, expected the "
                    f"{len(turn.token_ids)} that it has"
                )
    script.workload(1 << 20, lambda token_ids: ())  # sees that names are not there twice
