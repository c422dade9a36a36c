"""What to replay: which workload, and under which configurations.

A plan is plain data, so that it can be handed to another process, which then makes the very same
workload from it.
"""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from hear.errors import ConfigError
from hear.harnesses.eval.replay.runner import Loop, replay
from hear.harnesses.eval.report.output import recording
from hear.harnesses.eval.report.results import RunResult
from hear.harnesses.eval.workloads import agentic, mooncake, recorded, scbench, traced
from hear.harnesses.eval.workloads.sessions import SessionRule
from hear.harnesses.eval.workloads.traces import formats
from hear.harnesses.eval.workloads.workload import Workload

Name = Literal["mooncake", "scbench", "agentic", "recorded", "trace"]

MAX_TOKENS = 131_072
"""Of a turn of a trace that is not the paper's, prompt and answer together."""


class Source(Struct, frozen=True, kw_only=True):
    """A workload by name and options; None stands for the workload's own default.

    ``trace`` of a recorded one is the recording. ``first`` and ``tokenizer`` are those of
    ``formats.read``, and ``block_size`` that of ``traced.make``.
    """

    name: Name
    trace: str | None = None
    window: tuple[float, float] | None = None
    max_tokens: int | None = None
    task: str = "fitted"
    sessions: int | None = None
    rate: float | None = None
    loop: Loop = "closed"
    tenant: str | None = None
    session_rule: SessionRule | None = None
    whole_sessions: bool = False
    first: int | None = None
    tokenizer: str | None = None
    block_size: int | None = None

    def sampled(self, load: float, seed: int) -> Workload:
        """Make the workload at a load, in percent of its sessions.

        Above 100%, as many further windows of the trace are laid over the first as are needed, the
        last of them sampled. So what a load keeps, a higher one keeps too.

        Raises:
            ConfigError: a file or an option cannot be used, or there are not so many sessions.
        """
        num_layers = max(math.ceil(load / 100), 1)
        if num_layers > 1 and self.name not in ("mooncake", "trace"):
            raise ConfigError(
                f"load: got {load:g}%, expected at most 100% of {self.name}"
                + ("; more --sessions at a higher --rate are more load" * (self.name == "scbench"))
            )
        layers = [self.load(seed, layer) for layer in range(num_layers)]
        layers[-1] = layers[-1].sample(load - 100 * (num_layers - 1), seed)
        return layers[0].overlaid(layers[1:])

    def load(self, seed: int, layer: int = 0) -> Workload:
        """Make the workload, or a layer to lay over it (``mooncake.load``).

        Raises:
            ConfigError: a file or an option cannot be used.
        """
        path = Path(self.trace) if self.trace is not None else None
        limit: dict[str, Any] = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        if self.name == "recorded" and path is not None:
            return recorded.load(path, loop=self.loop, tenant=self.tenant, **limit).workload
        rate: dict[str, Any] = {} if self.rate is None else {"rate": self.rate}
        if self.name == "scbench":
            return scbench.generate(self.task, sessions=self.sessions, seed=seed, **limit, **rate)
        if self.name == "agentic" and path is None:
            return agentic.load(seed=seed, **limit, **rate)
        options: dict[str, Any] = {
            "window": self.window,
            "layer": layer,
            "sessions": self.session_rule,
            "whole_sessions": self.whole_sessions,
        }
        if path is None:
            return mooncake.load(**options, **limit)
        if self.block_size is not None:
            options["block_size"] = self.block_size
        return self._of_trace(path, seed, {**options, **limit, **rate})

    def _of_trace(self, path: Path, seed: int, options: dict[str, Any]) -> Workload:
        """Make the workload of a trace, in whatever format it is."""
        if formats.detect(path) is formats.AGENTIC:
            for option, at_rest in RESTING.items():
                if options.pop(option, at_rest) != at_rest:
                    raise ConfigError(
                        f"{path}: {option}: expected none, since {formats.AGENTIC.what} have no "
                        "times of their own and tell what follows what"
                    )
            return agentic.load(path, seed=seed, **options)
        tokenizer = None if self.tokenizer is None else Path(self.tokenizer)
        trace = formats.read(path, first=self.first, tokenizer=tokenizer)
        default = mooncake.MAX_TOKENS if self.name == "mooncake" else MAX_TOKENS
        options.setdefault("max_tokens", default)
        return traced.make(trace, str(path), seed=seed, **options)


RESTING = {"window": None, "layer": 0, "sessions": None, "whole_sessions": False}
"""Options of a trace that are not those of recordings of agents, and what they are if not given."""


class Run(Struct, frozen=True, kw_only=True):
    """One row of the table to be."""

    source: Source
    engine: str
    load: float
    policy: str
    seed: int
    loop: Loop = "closed"
    record: str | None = None
    engines: int = 1

    def workload(self) -> Workload:
        """What it replays: the source, sampled to its load."""
        return self.source.sampled(self.load, self.seed)


class Plan(Struct, frozen=True, kw_only=True):
    """All rows, in the order of the table."""

    source: Source
    engine: str
    loads: tuple[float, ...]
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    loop: Loop = "closed"
    record: str | None = None
    engines: int = 1

    def runs(self) -> list[Run]:
        """One run for each load, policy and seed."""
        return [
            Run(
                source=self.source,
                engine=self.engine,
                load=load,
                policy=policy,
                seed=seed,
                loop=self.loop,
                record=self.record,
                engines=self.engines,
            )
            for load, policy, seed in product(self.loads, self.policies, self.seeds)
        ]

    def count_turns(self) -> list[int]:
        """The number of turns of each run. It makes every workload once.

        So what cannot be used is said before anything runs.

        Raises:
            ConfigError: a file or an option cannot be used, or a sample holds no session.
        """
        counts: dict[tuple[float, int], int] = {}
        for seed in self.seeds:
            for load in self.loads:
                counts[load, seed] = self.source.sampled(load, seed).num_turns
        return [counts[run.load, run.seed] for run in self.runs()]


def execute(run: Run, progress: Callable[[int], None]) -> RunResult:
    """Carry out one run, and record it if that was asked for.

    Raises:
        ConfigError: something cannot be used, or the recording cannot be written.
    """
    workload = run.workload()
    with recording(run.record) as tap:
        return replay(
            workload,
            engine=run.engine,
            policy=run.policy,
            engines=run.engines,
            load=run.load,
            seed=run.seed,
            loop=run.loop,
            progress=progress,
            tap=tap,
        )


def parse_window(text: str) -> tuple[float, float]:
    """Begin and end, in seconds, of a slice of a trace that is given as START:SECONDS.

    Raises:
        ConfigError: it is no such slice.
    """
    start, colon, seconds = text.partition(":")
    try:
        begin, length = float(start), float(seconds)
    except ValueError:
        begin = length = math.nan
    if not colon or not (begin >= 0 and length > 0):
        raise ConfigError(f"--window {text!r}: expected START:SECONDS, as in 0:900")
    return begin, begin + length
