"""``hear play``: a workload on a running cluster, in real time."""

import argparse
from pathlib import Path

from hear import output
from hear.cli import Command
from hear.connection import add_bus_arguments, connected, own_name, run
from hear.errors import ConfigError
from hear.escaping import to_json
from hear.harnesses.replay.comparison import notes_of, scope_of
from hear.harnesses.replay.live import play
from hear.harnesses.replay.output import write_whole
from hear.harnesses.replay.plan import Source, parse_window
from hear.log import to_stderr
from hear.messages import DEFAULT_TENANT


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("workload", choices=("mooncake", "scbench", "agentic"))
    parser.add_argument("--load", type=float, default=10.0, help="percent of the sessions (10)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (1)")
    parser.add_argument(
        "--window",
        default="0:120",
        metavar="START:SECONDS",
        help="mooncake: a slice of the trace (0:120)",
    )
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
    source = Source(
        name=namespace.workload,
        window=parse_window(namespace.window) if namespace.workload == "mooncake" else None,
    )
    workload = source.sampled(namespace.load, namespace.seed)

    async def main() -> int:
        async with connected(namespace.bus, name=own_name("play"), key=namespace.key) as bus:
            output.remark(
                f"playing {workload.num_turns} turns of {len(workload.sessions)} sessions of "
                f"{workload.name} on {namespace.bus}"
            )
            row, problems = await play(
                bus,
                workload,
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


COMMAND = Command(
    "send a recorded workload to a running cluster, in real time", configure, run_play
)
