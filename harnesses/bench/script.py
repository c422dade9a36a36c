"""A workload by its tokens: made once from a seed, kept in a file, sent to a real engine.

A session is one stream of tokens, and the prompt of each turn a beginning of it: the context, then
question after question with the answer to the one before. The answers in it are made up, so that
every prompt is the same whatever the engine answers.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from hear.codec import UNREADABLE
from hear.errors import ConfigError
from hear.harnesses.replay.arrivals import poisson_arrivals
from hear.harnesses.replay.output import write_whole
from hear.harnesses.replay.workload import Session, Turn, Workload

NAME: Final = "scbench-small"

Hasher = Callable[[Sequence[int]], Sequence[int]]
"""Ids of tokens to the hashes of the full blocks that they fill."""

_Token = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Positive = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0.0)]


class Shape(Struct, frozen=True, kw_only=True):
    """What the sessions look like. ``context_tokens`` is the range of a uniform draw.

    Sessions start by a Poisson process of ``rate`` a second; think times are normal and not below
    0. Tokens are drawn from the range ``tokens``, which leaves out those that mean something to
    most tokenizers.
    """

    sessions: int = 14
    turns: int = 5
    context_tokens: tuple[int, int] = (1500, 2900)
    question_tokens: int = 32
    output_tokens: int = 16
    rate: float = 2.0
    think_mean_s: float = 1.0
    think_sd_s: float = 0.2
    tokens: tuple[int, int] = (16, 500)

    @property
    def max_tokens(self) -> int:
        """The longest prompt with its answer."""
        return self.context_tokens[1] + self.turns * (self.question_tokens + self.output_tokens)


class ScriptTurn(Struct, frozen=True, kw_only=True):
    """One request: how far its prompt reaches into the session, and what comes before it."""

    prompt_tokens: _Positive
    output_tokens: _Positive
    think_s: _Seconds = 0.0


class ScriptSession(Struct, frozen=True, kw_only=True):
    """One context."""

    id: str
    start_s: _Seconds
    token_ids: tuple[_Token, ...]
    turns: tuple[ScriptTurn, ...]


class Script(Struct, frozen=True, kw_only=True):
    """All sessions of a workload, and the seed that they were drawn from."""

    name: str
    seed: int
    sessions: tuple[ScriptSession, ...]

    @property
    def num_turns(self) -> int:
        """How many requests there are in all."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def max_tokens(self) -> int:
        """The longest prompt with its answer."""
        turns = (turn for session in self.sessions for turn in session.turns)
        return max(turn.prompt_tokens + turn.output_tokens for turn in turns)

    def workload(self, block_size: int, hash_prefix: Hasher) -> Workload:
        """The workload as the harness replays it, on an engine with such blocks."""
        return Workload(
            name=self.name,
            block_size=block_size,
            sessions=tuple(
                Session(
                    id=session.id,
                    start_s=session.start_s,
                    turns=_turns(session, block_size, hash_prefix(session.token_ids)),
                )
                for session in self.sessions
            ),
        )


def _turns(session: ScriptSession, block_size: int, hashes: Sequence[int]) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.output_tokens,
            prompt_hashes=tuple(hashes[: turn.prompt_tokens // block_size]),
            prompt_token_ids=session.token_ids[: turn.prompt_tokens],
            think_s=turn.think_s,
        )
        for turn in session.turns
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
        longest = max((turn.prompt_tokens for turn in session.turns), default=0)
        if not 1 <= longest <= len(session.token_ids):
            raise ConfigError(
                f"{path}: {session.id}: a prompt of {longest} tokens, expected 1 to the "
                f"{len(session.token_ids)} of its session"
            )
    script.workload(1 << 20, lambda token_ids: ())  # sees that names are not there twice
