"""``hear replay``: a recorded workload under several policies, side by side."""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar, get_args

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hear.app import output, plugins
from hear.app.cli import Command
from hear.app.console import of_errors
from hear.app.log import to_stderr
from hear.errors import ConfigError
from hear.escaping import cell, to_json
from hear.harnesses.eval.replay.nearest import nearest_profile
from hear.harnesses.eval.replay.plan import Plan, Run, Source, parse_window
from hear.harnesses.eval.replay.processes import run_all
from hear.harnesses.eval.report.output import check_outputs, check_recording, write_whole
from hear.harnesses.eval.report.page import write_report
from hear.harnesses.eval.report.results import Row, RunResult
from hear.harnesses.eval.report.table import print_results
from hear.harnesses.eval.workloads import recorded
from hear.harnesses.eval.workloads.recorded import SUFFIX
from hear.harnesses.eval.workloads.scbench import TASKS
from hear.harnesses.eval.workloads.sessions import SessionRule

PAPER_MOONCAKE = (
    "fcfs,cache-aware,cache-aware+guard:40,session-aware,cache-aware+guard:40+session-aware"
)
PAPER_SCBENCH = "fcfs,cache-aware,cache-aware+guard:40,cache-aware+guard:60"
TRACE = "TRACE"
"""Stands for the path of a trace."""

DEFAULTS: dict[str, dict[str, str]] = {
    "mooncake": {"engine": "h100-qwen3-8b", "policy": PAPER_MOONCAKE},
    "scbench": {"engine": "rtx-pro-6000-qwen3-8b", "policy": PAPER_SCBENCH},
    "agentic": {"engine": "h100-qwen3-8b", "policy": PAPER_MOONCAKE},
    f"FILE{SUFFIX}": {"engine": "", "policy": PAPER_MOONCAKE},
    TRACE: {"engine": "h100-qwen3-8b", "policy": PAPER_MOONCAKE},
}
DEFAULT_SEED = "1"
MAX_LOAD = 10_000
MAX_ENGINES = 256
MAX_COUNT = 1_000_000  # of jobs, sessions or tokens; more is a slip of the keyboard

_T = TypeVar("_T")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the workloads and their options."""
    workloads = parser.add_subparsers(
        dest="workload", required=True, metavar="WORKLOAD", action=_Workloads
    )
    for name, text in (
        ("mooncake", "the Mooncake conversation trace, its first 900 seconds"),
        ("scbench", "a closed loop in the shape of SCBench"),
        ("agentic", "sessions of coding agents, sub-agents included"),
        (f"FILE{SUFFIX}", "what hear record has written to FILE.hear"),
        (TRACE, "the trace in a file or folder, of any format of docs/traces.md"),
    ):
        sub = workloads.add_parser(name, help=text, description=f"Replay {text}.")
        sub.add_argument(
            "--policy",
            default=DEFAULTS[name]["policy"],
            metavar="P,P,...",
            help="configurations, each policies joined by '+', or fcfs for none; installed are "
            f"{', '.join(plugins.names('policies'))}; your own is package.module:Class "
            "(default: the paper's)",
        )
        sub.add_argument(
            "--load",
            default="100",
            metavar="N,N,...",
            help="percent of the sessions (100); above 100, "
            "further windows of the Mooncake trace are laid over the first",
        )
        sub.add_argument(
            "--seed", default=DEFAULT_SEED, metavar="N,N,...", help=f"seeds ({DEFAULT_SEED})"
        )
        sub.add_argument(
            "--engine",
            default=DEFAULTS[name]["engine"],
            metavar="NAME|FILE",
            help="profile of the simulated engine, or a TOML file "
            f"({DEFAULTS[name]['engine'] or 'the one nearest to what was recorded'})",
        )
        sub.add_argument(
            "--engines",
            type=_engines,
            default=1,
            metavar="N",
            help="how many such engines, from two on behind a pool (1)",
        )
        sub.add_argument(
            "--jobs", type=_positive, default=os.cpu_count() or 1, help="runs at a time"
        )
        sub.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
        sub.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page")
        sub.add_argument(
            "--record",
            type=Path,
            metavar="FILE",
            help="record all that is on the bus, for hear why and the like; of one run alone",
        )
        sub.add_argument("--max-tokens", type=_positive, help="leave out or cut what is longer")
        if name != "scbench":
            sub.add_argument(
                "--loop",
                choices=("closed", "open"),
                default="closed",
                help="whether a turn waits for the one before it (closed)",
            )
        if name.endswith(SUFFIX):
            sub.add_argument("--tenant", help="whose requests, if it holds those of several")
        if name in ("mooncake", "agentic"):
            sub.add_argument("--trace", metavar="FILE", help="another trace (docs/traces.md)")
        if name in ("mooncake", TRACE):
            sub.add_argument("--window", metavar="START:SECONDS", help="a slice of the trace")
            sub.add_argument(
                "--whole-sessions",
                action="store_true",
                help="the sessions that begin in the window, with all their turns, instead of the "
                "turns that arrive in it",
            )
            sub.add_argument(
                "--sessions",
                dest="session_rule",
                choices=get_args(SessionRule),
                help="whether each request is a session of its own, or they are told by the trace, "
                "or rebuilt from its blocks (told if it tells them, else rebuilt)",
            )
        if name in ("scbench", "agentic", TRACE):
            sub.add_argument("--rate", type=_rate, help="sessions that start in a second")
        if name == TRACE:
            add_trace_arguments(sub)
        if name == "scbench":
            sub.add_argument("--task", choices=sorted(TASKS), default="fitted")
            sub.add_argument("--sessions", type=_positive, help="how many sessions")


def add_trace_arguments(parser: argparse._ActionsContainer) -> None:
    """Add how the file of a trace is read."""
    parser.add_argument("--first", type=_positive, metavar="N", help="lines or chats to read")
    parser.add_argument(
        "--tokenizer", metavar="FILE|DIR", help="tokenizer.json that measures a trace of text"
    )
    parser.add_argument(
        "--block-size",
        type=_positive,
        metavar="N",
        help="tokens a block, a multiple of the trace's",
    )


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command; 0 if every run kept its promises, 130 after Ctrl-C."""
    to_stderr("warning")
    plan = _plan(namespace)
    asked = (namespace.json, namespace.report, namespace.record)
    outputs = [path for path in asked if path is not None]
    check_outputs(outputs, [Path(name) for name in (plan.source.trace, plan.engine) if name])
    if namespace.record is not None:
        check_recording(namespace.record)
    num_turns = plan.count_turns()
    runs = plan.runs()
    if plan.record is not None and len(runs) > 1:
        raise ConfigError(f"--record: got {len(runs)} runs, expected one policy, load and seed")
    results: list[RunResult | None] = [None] * len(runs)
    errors: list[str] = []
    interrupted = False
    try:
        _run_all(runs, num_turns, namespace.jobs, results, errors)
    except KeyboardInterrupt:
        interrupted = True
    finished = [result for result in results if result is not None]
    if finished:
        _write_all(finished, namespace, errors)  # first, since a terminal may have gone
        _print(finished, errors)
    for error in errors:
        output.complain(error)
    if interrupted:
        output.complain(f"stopped; {len(finished)} of {len(runs)} runs finished")
        return 130
    broken = any(r.problems or r.row.policy_failures for r in finished)
    return 1 if errors or broken else 0


def _write_all(
    results: Sequence[RunResult], namespace: argparse.Namespace, errors: list[str]
) -> None:
    command = shlex.join(["hear", *sys.argv[1:]])
    rows = [result.row for result in results]
    outputs: list[tuple[Path | None, Callable[[Path], None]]] = [
        (namespace.json, lambda path: write_whole(path, _as_json(rows))),
        (namespace.report, lambda path: write_report(results, path, command=command)),
    ]
    for path, write in outputs:
        if path is not None:
            try:
                write(path)
            except OSError as error:
                errors.append(f"{path}: cannot be written: {error.strerror}")


def _print(results: Sequence[RunResult], errors: list[str]) -> None:
    try:
        print_results(results)
        output.flush()
    except OSError as error:
        errors.append(f"the table cannot be printed: {error.strerror}")
        output.give_up()


def _as_json(rows: Sequence[Row]) -> bytes:
    return f"{to_json(rows, pretty=True)}\n".encode()


def _run_all(
    runs: Sequence[Run],
    num_turns: Sequence[int],
    jobs: int,
    results: list[RunResult | None],
    errors: list[str],
) -> None:
    console = of_errors()
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("turns"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bars if console.is_terminal else nullcontext():
        tasks = [
            bars.add_task(f"{cell(r.policy)} {r.load:g}% seed {r.seed}", start=False, total=total)
            for r, total in zip(runs, num_turns, strict=True)
        ]

        def progress(place: int, done: int) -> None:
            if not bars.tasks[place].started:
                bars.start_task(tasks[place])
            bars.update(tasks[place], completed=done)

        for ended in run_all(runs, jobs, progress if console.is_terminal else _no_progress):
            results[ended.place] = ended.result
            if ended.result is None:
                of = runs[ended.place]
                errors.append(f"{of.policy} at {of.load:g}%, seed {of.seed}: {ended.error}")
            else:
                bars.update(tasks[ended.place], completed=len(ended.result.turns))


def _no_progress(index: int, done: int) -> None:
    pass


def _plan(namespace: argparse.Namespace) -> Plan:
    policies = _once("--policy", [word.strip() for word in namespace.policy.split(",")])
    for policy in policies:
        plugins.load_installed("parts", "policy-spec")(policy)
    recording = namespace.workload if namespace.workload.endswith(SUFFIX) else None
    is_trace = recording is None and namespace.workload not in DEFAULTS
    engine = namespace.engine
    if recording is not None:
        engine = _consider(Path(recording), namespace)
    plugins.load_installed("engines", "simulated")(engine, block_size=512, name="engine0")
    options = {
        name: getattr(namespace, name, None)
        for name in (
            "trace",
            "max_tokens",
            "sessions",
            "rate",
            "tenant",
            "first",
            "tokenizer",
            "block_size",
        )
    }
    if recording is not None or is_trace:
        options["trace"] = namespace.workload
    window = getattr(namespace, "window", None)
    return Plan(
        source=Source(
            name="recorded" if recording else "trace" if is_trace else namespace.workload,
            loop=getattr(namespace, "loop", "closed"),
            window=None if window is None else parse_window(window),
            task=getattr(namespace, "task", "fitted"),
            session_rule=getattr(namespace, "session_rule", None),
            whole_sessions=getattr(namespace, "whole_sessions", False),
            **options,
        ),
        engine=engine,
        loads=_once("--load", [_load(word) for word in namespace.load.split(",")]),
        policies=policies,
        seeds=_once("--seed", [_seed(word) for word in namespace.seed.split(",")]),
        loop=getattr(namespace, "loop", "closed"),
        record=None if namespace.record is None else str(namespace.record),
        engines=namespace.engines,
    )


def _consider(path: Path, namespace: argparse.Namespace) -> str:
    """Say what a recording holds; returns the profile to serve it on."""
    loaded = recorded.load(
        path, loop=namespace.loop, max_tokens=namespace.max_tokens, tenant=namespace.tenant
    )
    remarks = [loaded.as_served, *loaded.remarks]
    engine: str = namespace.engine
    if not engine and loaded.engines:
        name, capabilities = next(iter(loaded.engines.items()))
        profiles = sorted({row["engine"] for row in DEFAULTS.values()} - {""})
        engine, how = nearest_profile(
            capabilities, loaded.costs.get(name), profiles, loaded.workload.block_size
        )
        remarks.append(f"served on {engine}, of the profiles the nearest to {name} ({how})")
    elif not engine:
        engine = DEFAULTS["mooncake"]["engine"]
        remarks.append(f"served on {engine}, since no engine described itself")
    output.complain(f"{path}: {'; '.join(remarks)}")
    return engine


class _Workloads(argparse._SubParsersAction):  # type: ignore[type-arg]
    """The workloads by name; a path is one as well, of a recording if it ends in ``.hear``.

    Argparse knows subcommands by their names alone, and asks for them in this mapping.
    """

    class _Known(dict[str, argparse.ArgumentParser]):
        def __missing__(self, name: str) -> argparse.ArgumentParser:
            return self[f"FILE{SUFFIX}" if name.endswith(SUFFIX) else TRACE]

    class _Choices(list[str]):
        def __contains__(self, name: object) -> bool:
            return super().__contains__(name) or is_path(str(name))

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._name_parser_map = self._Known()
        self.choices = self._Choices(DEFAULTS)  # type: ignore[assignment]


def is_path(name: str) -> bool:
    """Whether a word is meant for a file: a slip of a workload's name has neither dot nor slash."""
    return "." in name or os.sep in name or Path(name).exists()


def _once(option: str, values: list[_T]) -> tuple[_T, ...]:
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{option}: {value} is named twice")
    return tuple(values)


def _load(word: str) -> float:
    try:
        load = float(word)
    except ValueError:
        load = math.nan
    if not 0 < load <= MAX_LOAD:
        raise ConfigError(f"--load {word!r}: expected percents above 0 and at most {MAX_LOAD}")
    return load


def _seed(word: str) -> int:
    try:
        seed = int(word)
    except ValueError:
        seed = -1
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed {word!r}: expected whole numbers from 0 to below 2**63")
    return seed


def _positive(word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_COUNT:
        raise argparse.ArgumentTypeError(
            f"got {word!r}, expected a whole number of at least 1 and at most {MAX_COUNT}"
        )
    return number


def _engines(word: str) -> int:
    number = _positive(word)
    if number > MAX_ENGINES:
        raise argparse.ArgumentTypeError(f"got {word!r}, expected at most {MAX_ENGINES} engines")
    return number


def _rate(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a positive number")
    return number


COMMAND = Command("replay a recorded workload under several policies", configure, run)
