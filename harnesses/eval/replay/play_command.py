"""``hear play``: a workload on a running cluster, in real time."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import trio
from msgspec import structs

from hear.app import output
from hear.app.cli import Command
from hear.app.connection import add_bus_arguments, connected, own_name, run
from hear.app.log import to_stderr
from hear.errors import ConfigError
from hear.escaping import to_json
from hear.harnesses.eval.replay.command import add_trace_arguments, is_path
from hear.harnesses.eval.replay.live import find_engines, play
from hear.harnesses.eval.replay.plan import Source, parse_window
from hear.harnesses.eval.report.comparison import notes_of, scope_of
from hear.harnesses.eval.report.output import write_whole
from hear.messages import DEFAULT_TENANT, CapabilitiesReported

WORKLOADS: Final = ("mooncake", "scbench", "agentic")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "workload",
        metavar="WORKLOAD",
        type=_workload,
        help=f"{', '.join(WORKLOADS)}, or the file or folder of a trace (docs/traces.md)",
    )
    parser.add_argument("--load", type=float, default=10.0, help="percent of the sessions (10)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (1)")
    parser.add_argument(
        "--window",
        metavar="START:SECONDS",
        help="a slice of a trace that tells times (of mooncake 0:120)",
    )
    parser.add_argument("--max-tokens", type=int, help="leave out what is longer")
    add_trace_arguments(parser)
    parser.add_argument("--tenant", default=DEFAULT_TENANT, help="whose requests they are")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the row as JSON")
    add_bus_arguments(parser)


def run_play(namespace: argparse.Namespace) -> int:
    """Carry out the command; 1 if something was broken."""
    to_stderr("warning")
    if not 0 < namespace.load <= 400 or not 0 <= namespace.seed < 2**63:
        raise ConfigError(
            f"--load {namespace.load:g} --seed {namespace.seed}: expected a load above 0 and up to "
            "400 percent, and a seed from 0"
        )
    is_trace = namespace.workload not in WORKLOADS
    window = namespace.window or ("0:120" if namespace.workload == "mooncake" else None)
    source = Source(
        name="trace" if is_trace else namespace.workload,
        trace=namespace.workload if is_trace else None,
        window=None if window is None else parse_window(window),
        max_tokens=namespace.max_tokens,
        first=namespace.first,
        tokenizer=namespace.tokenizer,
        block_size=namespace.block_size,
    )
    source.sampled(namespace.load, namespace.seed)  # what cannot be used is told before all else

    async def main() -> int:
        async with connected(namespace.bus, name=own_name("play"), key=namespace.key) as bus:
            engines = await find_engines(bus, namespace.tenant)
            workload = await trio.to_thread.run_sync(
                _fitting(source, engines).sampled, namespace.load, namespace.seed
            )
            output.remark(
                f"playing {workload.num_turns} turns of {len(workload.sessions)} sessions of "
                f"{workload.name} on {namespace.bus}"
            )
            row, problems = await play(
                bus,
                workload,
                engines,
                load=namespace.load,
                seed=namespace.seed,
                loop="closed",
                tenant=namespace.tenant,
            )
        if namespace.json is not None:
            write_whole(namespace.json, f"{to_json(row, pretty=True)}\n".encode())
        served_on = sum(map(bool, row.turns_by_engine.values()))
        output.say(
            f"{row.turns} turns served on {served_on} of {row.engines} engines: "
            f"TTFT P50 {row.ttft_p50_s:.2f} s, P95 {row.ttft_p95_s:.2f} s, "
            f"max {row.ttft_max_s:.2f} s; reuse {row.reuse_pct:.1f}% "
            f"of follow-up turns; operations {dict(row.operations)}"
        )
        for line in (*scope_of([row]), *notes_of([row])):
            output.remark(line)
        for problem in problems:
            output.complain(problem)
        return 1 if problems else 0

    return run(main)


def _fitting(source: Source, engines: Mapping[str, CapabilitiesReported]) -> Source:
    """The source with blocks of the engines' size, where a trace's can be made such."""
    sizes = {capabilities.block_size for capabilities in engines.values()}
    if source.name != "trace" or source.block_size is not None or len(sizes) != 1:
        return source
    return structs.replace(source, block_size=sizes.pop())


def _workload(word: str) -> str:
    if word in WORKLOADS or is_path(word):
        return word
    raise argparse.ArgumentTypeError(
        f"got {word!r}, expected {', '.join(WORKLOADS)}, or the file or folder of a trace"
    )


COMMAND = Command(
    "send a recorded workload to a running cluster, in real time", configure, run_play
)
