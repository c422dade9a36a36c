"""Does the simulated engine decide as vLLM does? The same requests through both schedulers.

    python benchmarks/vllm_parity.py [--workloads N] [--seed S] [--quick] [--json FILE]

Needs vLLM (docs/vllm.md says how to install it), and neither model nor GPU: vLLM's own Scheduler,
KV cache manager and block pool run in process, and are told made-up tokens. In each step the two
must give the same requests the same tokens, in the same order; take the same ones out of the queue,
with the same reused tokens; preempt the same ones; and give up the same blocks. The first step in
which a workload differs is printed. Exit status 1 if any does.

One difference is meant. Under priority scheduling a request may be preempted in the very step in
which it was given tokens. vLLM 0.32 then leaves the blocks that those would have filled under their
hashes, although nothing was computed, and other requests can find them; the simulated engine takes
the hashes back. A workload that differs is therefore run again with a simulated engine that leaves
them too: if it is then alike in every step, that was all, and it is counted apart.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
from rich.progress import track

# Run as a script, Python looks for modules in this folder and not in the one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parity_engines import Actions, Real, Simulated, Stepped, block_hashes
from benchmarks.parity_workload import Workload, make_workload
from hear.app import output
from hear.app.console import of_errors

MAX_STEPS = 20_000
WORKLOADS, QUICK = 1000, 200


@dataclass(slots=True)
class Difference:
    """The first step in which the two differ: ``what``, and what each of them did."""

    step: int
    what: str
    vllm: object
    simulated: object


@dataclass(slots=True)
class Compared:
    """One workload through both. ``kept_names``: alike, but for the difference that is meant."""

    seed: int
    requests: int
    steps: int = 0
    tokens: int = 0
    reused_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    kept_names: bool = False
    difference: Difference | None = None


@dataclass(slots=True)
class Report:
    """All workloads."""

    workloads: list[Compared] = field(default_factory=list)

    @property
    def differing(self) -> list[Compared]:
        """Those in which the two were not alike."""
        return [compared for compared in self.workloads if compared.difference is not None]

    def total(self, name: str) -> int:
        """A sum over all workloads."""
        return sum(getattr(compared, name) for compared in self.workloads)


def compare(workload: Workload) -> Compared:
    """Run a workload through both, up to the first difference that is not meant."""
    compared = _compare(workload, Simulated(workload))
    if compared.difference is not None and workload.order == "priority":
        again = _compare(workload, Simulated(workload, keeps_names=True))
        if again.difference is None:
            again.kept_names = True
            return again
    return compared


def _compare(workload: Workload, simulated_engine: Simulated) -> Compared:
    compared = Compared(workload.seed, len(workload.arrivals))
    steps = zip(
        steps_of(Real(workload), workload), steps_of(simulated_engine, workload), strict=False
    )
    for number, (real, simulated) in enumerate(steps):
        if real is None or simulated is None:
            if real is not simulated:
                compared.difference = Difference(number, "end", real, simulated)
            return compared
        for what, of_real in asdict(real).items():
            if of_real != getattr(simulated, what):
                of_simulated = getattr(simulated, what)
                compared.difference = Difference(number, what, of_real, of_simulated)
                return compared
        compared.steps += 1
        compared.tokens += sum(share for _, share in real.shares)
        compared.reused_tokens += sum(reused for _, reused in real.admitted)
        compared.evictions += len(real.evicted)
        compared.preemptions += len(real.preempted)
    raise AssertionError("both end with None")


def steps_of(engine: Stepped, workload: Workload) -> Iterator[Actions | None]:
    """All steps of an engine, None at the end. A request that comes while it is idle starts one.

    Raises:
        RuntimeError: it has not ended after 20,000 steps.
    """
    coming = list(workload.arrivals)
    for now in range(MAX_STEPS):
        while coming and coming[0].step <= now:
            arrival = coming.pop(0)
            engine.add(arrival, block_hashes(arrival, workload.block_size))
        step = engine.step()
        if step is not None:
            yield step
        elif not coming:
            yield None
            return
    raise RuntimeError(f"workload {workload.seed} has not ended after {MAX_STEPS} steps")


def measure(seeds: Sequence[int], *, quiet: bool = False) -> Report:
    """Compare the workloads of all seeds."""
    report = Report()
    console = of_errors()
    for seed in track(seeds, "comparing", console=console, transient=True, disable=quiet):
        report.workloads.append(compare(make_workload(seed)))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", type=int, metavar="N", help=f"how many ({WORKLOADS})")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first one (0)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} workloads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each workload to FILE too")
    options = parser.parse_args(arguments)
    count = options.workloads or (QUICK if options.quick else WORKLOADS)
    with warnings.catch_warnings():  # those of vLLM, torch and what they use are not ours
        warnings.simplefilter("ignore")
        report = measure(range(options.seed, options.seed + count))
    for compared in report.differing:
        difference = compared.difference
        assert difference is not None
        output.say(f"workload {compared.seed}, step {difference.step}: {difference.what}")
        output.say(f"  vLLM      {difference.vllm}")
        output.say(f"  simulated {difference.simulated}")
    apart = sum(compared.kept_names for compared in report.workloads)
    alike = count - len(report.differing) - apart
    output.say(
        f"{alike} of {count} workloads alike in every step, {apart} but for hashes of blocks that "
        f"were never computed, {len(report.differing)} not: "
        f"{report.total('requests'):,} requests, {report.total('steps'):,} steps, "
        f"{report.total('tokens'):,} tokens computed, {report.total('reused_tokens'):,} reused, "
        f"{report.total('evictions'):,} evictions, {report.total('preemptions'):,} preemptions"
    )
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return 1 if report.differing else 0


if __name__ == "__main__":
    sys.exit(main())
