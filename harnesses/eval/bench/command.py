"""``hear bench``: policies side by side on a real engine, in real time."""

import argparse
import math
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from hear.app import output, plugins
from hear.app.cli import Command
from hear.app.clock import new_epoch
from hear.app.connection import add_bus_arguments, run
from hear.app.console import of_results
from hear.app.log import to_stderr
from hear.errors import ConfigError, EngineError
from hear.escaping import to_json
from hear.harnesses.eval.bench import script as scripts
from hear.harnesses.eval.bench import servers
from hear.harnesses.eval.bench.answers import differences, num_told
from hear.harnesses.eval.bench.arm import ArmResult, serve
from hear.harnesses.eval.bench.places import STOCK, Place, Simulated, Vllm, fresh, joined
from hear.harnesses.eval.bench.rounds import Paired, order, pair, print_pairs
from hear.harnesses.eval.bench.script import Script, Shape
from hear.harnesses.eval.replay.command import add_trace_arguments
from hear.harnesses.eval.replay.plan import Source, parse_window
from hear.harnesses.eval.report.output import check_outputs, write_whole
from hear.harnesses.eval.report.page import write_report
from hear.harnesses.eval.report.results import Row, RunResult
from hear.harnesses.eval.report.table import print_results

GUARD: Final = "cache-aware+guard:15"
"""A bound of some four fifths of what the longest wait is without policies, on two cores."""

ARMS: Final = f"fcfs,cache-aware,{GUARD},session-aware,{GUARD}+session-aware"
BLOCK_SIZE: Final = 32
MODEL_SHAPE: Final = ("--layers", "6", "--hidden", "256")
"""Of the generated model: prefill of the workload's prompts takes most of the time."""

SCALE: Final = {"--max-num-seqs": 2, "--block-size": BLOCK_SIZE, "--num-gpu-blocks-override": 420}
"""A batch and a KV pool as small beside the workload as those of the paper are beside theirs."""

GENERATED: Final = ("--enforce-eager", "--dtype", "float32")
"""In bfloat16 how a prompt is cut into steps can decide between two nearly equal tokens."""

TOLD: Final = ("--enable-prompt-tokens-details", "--enable-per-request-metrics")
"""So that a client learns what was reused and how long it waited, also without a bus."""


TRACE_OPTIONS: Final = ("load", "window", "max_tokens", "first", "tokenizer", "block_size")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    shape = Shape()
    where = parser.add_argument_group("engine")
    where.add_argument(
        "--engine",
        default="vllm",
        metavar="vllm|simulated:PROFILE",
        help="what is started anew for each arm (vllm)",
    )
    where.add_argument(
        "--model", metavar="DIR|NAME", help="model of vLLM (a small Qwen3, generated)"
    )
    where.add_argument(
        "--engine-url", metavar="URL", help="an engine that runs already, on the bus of --bus"
    )
    where.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of servers here")
    add_bus_arguments(parser)
    what = parser.add_argument_group("workload")
    what.add_argument("--seed", type=int, default=1, help="of the first round (1)")
    what.add_argument("--repeat", type=_count, default=1, metavar="N", help="rounds (1)")
    what.add_argument("--sessions", type=_count, default=shape.sessions, help="how many (14)")
    what.add_argument("--turns", type=_count, default=shape.turns, help="of each session (5)")
    what.add_argument(
        "--context",
        type=_range,
        default=shape.context_tokens,
        metavar="MIN:MAX",
        help="tokens of a session's context (1500:2900)",
    )
    what.add_argument("--output-tokens", type=_count, default=shape.output_tokens, help="(16)")
    what.add_argument("--rate", type=float, default=shape.rate, help="sessions a second (2)")
    what.add_argument("--think", type=float, default=shape.think_mean_s, help="mean, s (1)")
    what.add_argument("--save-workload", type=Path, metavar="FILE", help="write what is served")
    what.add_argument("--workload", type=Path, metavar="FILE", help="serve what was written")
    trace = parser.add_argument_group("trace", "a trace instead of a generated workload")
    trace.add_argument("--trace", metavar="FILE|DIR", help="its file (docs/traces.md)")
    trace.add_argument("--load", type=float, help="percent of its sessions (100)")
    trace.add_argument("--window", metavar="START:SECONDS", help="a slice of it")
    trace.add_argument("--max-tokens", type=_count, help="leave out what is longer")
    add_trace_arguments(trace)
    parser.add_argument(
        "--policy",
        metavar="P,P,...",
        help=f"the arms: policies joined by '+', fcfs for none, {STOCK} for vLLM without HEAR "
        f"(with vllm {STOCK} first, then {ARMS})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page")
    parser.add_argument(
        "options", nargs="*", metavar="-- OPTION", help="further options of vLLM, after --"
    )


@dataclass
class _Bench:
    """What was asked for, and what has come of it so far."""

    arms: list[str]
    rounds: Sequence[Script]
    results: list[list[ArmResult]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    compared: int = 0

    @property
    def runs(self) -> list[RunResult]:
        """All arms of all rounds, the arms in the order in which they were named."""
        place = {arm: number for number, arm in enumerate(self.arms)}
        runs = [arm.run for results in self.results for arm in results]
        return sorted(runs, key=lambda run: place[run.row.policy])

    @property
    def pairs(self) -> list[Paired]:
        """Medians and ratios over the rounds so far."""
        return pair([[arm.run.row for arm in results] for results in self.results], self.arms)


def run_bench(namespace: argparse.Namespace) -> int:
    """Carry out the command; 1 if something was broken or could not be served."""
    to_stderr("warning")
    bench = _Bench(_arms(namespace), _rounds(namespace))
    wanted = (namespace.json, namespace.report, namespace.save_workload)
    check_outputs([p for p in wanted if p], [p for p in (namespace.workload,) if p])
    if namespace.save_workload is not None:
        scripts.save(bench.rounds, namespace.save_workload)
    with tempfile.TemporaryDirectory(prefix="hear-bench-") as temporary:
        logs = namespace.logs or Path(temporary)
        save = partial(_write_json, namespace.json, bench)
        code = run(partial(_serve_all, bench, _opener(namespace, bench, logs), save))
    if bench.runs:
        save()
        if namespace.report is not None:
            write = partial(write_report, bench.runs, command=_command_line(), title="Bench")
            _try_to_write(bench, write, namespace.report)
        _print(bench)
    for error in bench.errors:
        output.complain(error)
    broken = any(r.problems or r.row.policy_failures or r.row.guard_violations for r in bench.runs)
    return code or (1 if bench.errors or broken else 0)


_Opener = Callable[[str, int], Any]
"""Opens the place of an arm in a round."""


async def _serve_all(bench: _Bench, opener: _Opener, save: Callable[[], None]) -> int:
    """Serve all arms of all rounds; what has come of it is saved after each, lest it be lost."""
    for number, script in enumerate(bench.rounds):
        bench.results.append([])
        for arm in order(bench.arms, number):
            name = f"round {number + 1} of {len(bench.rounds)}, {arm}"
            begun_s = trio.current_time()
            try:
                async with opener(arm, number) as place:
                    up_s = trio.current_time() - begun_s
                    served = await serve(place, script, arm, _progress(name, script))
            except EngineError as error:
                bench.errors.append(f"{name}: {error}")
                output.complain(f"{name}: {error}")
                if not any(bench.results):
                    return 1  # what keeps the very first from starting keeps them all
                continue
            if unserved := served.unserved:
                # It had less to do than the others, so it stands beside none of them.
                bench.errors.append(f"{name}: {unserved}; this arm is left out")
                output.complain(f"{name}: {unserved}")
                continue
            served = _compared(bench, number, served)
            bench.results[number].append(served)
            save()
            row = served.run.row
            output.remark(
                f"{name}: up in {up_s:.0f} s, {row.turns} turns in {row.batch_s:.1f} s, "
                f"TTFT P50 {row.ttft_p50_s:.2f} s, reuse {row.reuse_pct:.0f}%"
            )
    return 0


def _progress(name: str, script: Script) -> Callable[[int], None]:
    """Tells how far an arm is, where somebody may be looking."""
    if not output.errors_are_seen():
        return lambda done: None

    def tell(done: int) -> None:
        ended = done >= script.num_turns
        output.progress("" if ended else f"{name}: {done} of {script.num_turns} turns")

    return tell


def _compared(bench: _Bench, number: int, served: ArmResult) -> ArmResult:
    """Compare what was answered with the answers of this round's first arm."""
    if not bench.results[number]:
        return served
    first = bench.results[number][0]
    bench.compared += num_told(served.answers)
    differing = differences(served.answers, first.answers)
    if not differing:
        return served
    problem = (
        f"{len(differing)} answers are not those of {first.run.row.policy}: {differing[0]}"
        f"{' and others' if len(differing) > 1 else ''}"
    )
    problems = (*served.run.problems, problem)
    return ArmResult(msgspec.structs.replace(served.run, problems=problems), served.answers)


# -- what comes out ---------------------------------------------------------------------------


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """The file of ``--json``: the rows of all runs, and medians over rounds.

    ``answers_compared`` counts the answers that were held against those of another arm.
    """

    command: str
    rows: list[Row]
    paired: list[Paired]
    answers_compared: int
    problems: list[str]


def _command_line() -> str:
    return shlex.join(["hear", *sys.argv[1:]])


def _write_json(path: Path | None, bench: _Bench) -> None:
    if path is None:
        return
    written = Written(
        command=_command_line(),
        rows=[run.row for run in bench.runs],
        paired=bench.pairs,
        answers_compared=bench.compared,
        problems=[
            *bench.errors,
            *(f"{run.row.policy}: {problem}" for run in bench.runs for problem in run.problems),
        ],
    )
    data = f"{to_json(written, pretty=True)}\n".encode()
    _try_to_write(bench, lambda path: write_whole(path, data), path)


def _try_to_write(bench: _Bench, write: Callable[[Path], None], path: Path) -> None:
    try:
        write(path)
    except OSError as error:
        problem = f"{path}: cannot be written: {error.strerror}"
        if problem not in bench.errors:
            bench.errors.append(problem)


def _print(bench: _Bench) -> None:
    console = of_results()
    try:
        print_results(bench.runs, console)
        console.print(f"answers compared with those of another arm: {bench.compared:,}")
        if len(bench.rounds) > 1:
            console.print()
            print_pairs(bench.pairs, console)
        output.flush()
    except OSError as error:
        bench.errors.append(f"the table cannot be printed: {error.strerror}")
        output.give_up()


# -- what is asked for ------------------------------------------------------------------------


def _arms(namespace: argparse.Namespace) -> list[str]:
    stock = namespace.engine == "vllm" and namespace.engine_url is None
    text = namespace.policy or (f"{STOCK},{ARMS}" if stock else ARMS)
    arms = [word.strip() for word in text.split(",")]
    for arm in arms:
        if arms.count(arm) > 1:
            raise ConfigError(f"--policy: {arm} is named twice")
        if arm == STOCK and not stock:
            raise ConfigError(f"--policy: {STOCK} is vLLM without HEAR, started anew")
        if arm != STOCK:
            plugins.load_installed("parts", "policy-spec")(arm)
    return arms


def _rounds(namespace: argparse.Namespace) -> Sequence[Script]:
    """The scripts of all rounds: each of a seed of its own, or what a file holds in turns."""
    if namespace.trace is not None:
        return _of_trace(namespace)
    for option in TRACE_OPTIONS:
        if getattr(namespace, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')}: is of a --trace, and there is none")
    if namespace.workload is not None:
        kept = scripts.load(namespace.workload)
        return [kept[number % len(kept)] for number in range(namespace.repeat)]
    if not 0 <= namespace.seed < 2**63:
        raise ConfigError(f"--seed {namespace.seed}: expected a whole number from 0 to below 2**63")
    shape = Shape(
        sessions=namespace.sessions,
        turns=namespace.turns,
        context_tokens=namespace.context,
        output_tokens=namespace.output_tokens,
        rate=namespace.rate,
        think_mean_s=namespace.think,
        think_sd_s=namespace.think / 5,
    )
    return [scripts.generate(namespace.seed + n, shape) for n in range(namespace.repeat)]


def _of_trace(namespace: argparse.Namespace) -> Sequence[Script]:
    if namespace.workload is not None:
        raise ConfigError("--trace: got --workload as well, expected one of them")
    source = Source(
        name="trace",
        trace=namespace.trace,
        window=None if namespace.window is None else parse_window(namespace.window),
        max_tokens=namespace.max_tokens,
        first=namespace.first,
        tokenizer=namespace.tokenizer,
        block_size=namespace.block_size,
    )
    load = 100.0 if namespace.load is None else namespace.load
    seeds = range(namespace.seed, namespace.seed + namespace.repeat)
    return [scripts.of_workload(source.sampled(load, seed), seed) for seed in seeds]


def _opener(namespace: argparse.Namespace, bench: _Bench, logs: Path) -> _Opener:
    if namespace.engine_url is not None:
        if namespace.options or namespace.model:
            raise ConfigError("--engine-url: that engine runs already, so nothing is set of it")

        def join(arm: str, number: int) -> Any:
            salt = f"{new_epoch():x}-{number}-{bench.arms.index(arm)}"
            return joined(namespace.bus, namespace.engine_url, salt=salt, key=namespace.key)

        return join
    engine = _engine(namespace, bench, logs)

    @asynccontextmanager
    async def start(arm: str, number: int) -> AsyncIterator[Place]:
        folder = logs / f"{number + 1}-{bench.arms.index(arm)}"
        folder.mkdir(parents=True, exist_ok=True)
        async with fresh(engine, arm, folder) as place:
            yield place

    return start


def _engine(namespace: argparse.Namespace, bench: _Bench, logs: Path) -> Vllm | Simulated:
    kind, colon, profile = namespace.engine.partition(":")
    if kind == "simulated" and profile:
        if namespace.options or namespace.model:
            raise ConfigError("--engine simulated: has a profile, and no model or options of vLLM")
        plugins.load_installed("engines", "simulated")(
            profile, block_size=BLOCK_SIZE, name="engine0"
        )
        return Simulated(profile, BLOCK_SIZE)
    if kind != "vllm" or colon:
        raise ConfigError(
            f"--engine {namespace.engine!r}: expected vllm, or simulated: and a profile"
        )
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed: on a machine with a GPU, pip install 'hear-protocol[vllm]'; on "
            "one without, hear vllm install-cpu (--engine simulated:PROFILE needs none)"
        )
    longest = max(script.max_tokens for script in bench.rounds)
    options = [word for name, value in SCALE.items() for word in (name, str(value))]
    options += ["--max-model-len", str(math.ceil(longest / 1024) * 1024), *TOLD]
    model = namespace.model
    if model is None:
        model = str(logs / "small-qwen3")
        servers.carry_out(servers.hear("vllm", "make-model", model, *MODEL_SHAPE))
        options += GENERATED
    return Vllm(model, (*options, *namespace.options), BLOCK_SIZE)


def _count(word: str) -> int:
    number = int(word) if word.isdecimal() else 0
    if not 1 <= number <= 1_000_000:
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a whole number of at least 1")
    return number


def _range(word: str) -> tuple[int, int]:
    low, colon, high = word.partition(":")
    if not (colon and low.isdecimal() and high.isdecimal()):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected MIN:MAX, as in 1500:2900")
    return int(low), int(high)


COMMAND = Command("policies side by side on a real engine, in real time", configure, run_bench)
