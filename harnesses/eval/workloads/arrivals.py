"""When sessions start whose trace does not say when: by a Poisson process."""

import random
from collections.abc import Sequence

from hear.errors import ConfigError
from hear.harnesses.eval.workloads.workload import Session

WORK_PER_S = 1_670.0
"""Tokens that sessions without times bring in a second for an engine with endless memory to
compute: as many as the shipped agentic sample at 0.007 sessions a second."""


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Draw the first ``count`` arrivals, in seconds, of a Poisson process of ``rate`` a second.

    Of one seed, more arrivals begin with the same ones, and another rate stretches all gaps alike.

    Raises:
        ConfigError: ``rate`` is not above 0.
    """
    if not 0 < rate < float("inf"):
        raise ConfigError(f"rate: got {rate:g} sessions a second, expected above 0")
    draw = random.Random(f"arrivals {seed}")  # a text seed: apart from all else drawn of this seed
    arrivals: list[float] = []
    unit = 0.0
    for _ in range(count):
        unit += draw.expovariate(1.0)
        arrivals.append(unit / rate)
    return arrivals


def fitting_rate(families: Sequence[Sequence[Session]], block_size: int) -> float:
    """How many families of sessions start in a second so that they bring ``WORK_PER_S``."""
    return WORK_PER_S * len(families) / _work(families, block_size)


def _work(families: Sequence[Sequence[Session]], block_size: int) -> int:
    """The tokens that an engine with endless memory computes for sessions."""
    tokens = 0
    for family in families:
        for session in family:
            before: tuple[int, ...] = ()
            for turn in session.turns:
                known = sum(a == b for a, b in zip(before, turn.prompt_hashes, strict=False))
                tokens += turn.prompt_tokens - known * block_size + turn.output_tokens
                before = tuple(turn.prompt_hashes)
    return tokens
