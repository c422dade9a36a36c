"""What HEAR's hot paths cost: the residency directory, a decision, the codec, the simulated engine.

    python benchmarks/hot_paths.py [--quick] [--json FILE]

Every figure is a median over repeats with its quartiles. Figures of one comparison are taken in
one run and in turns, so that their ratio holds on a machine that others use too. The garbage
collector is off while a figure is taken, as in ``timeit``, but for those of the engine.

The peer of the residency directory is ``dynamo.llm.RadixTree``, an index in Rust that the optional
extra ``bench`` installs; without it the rest is measured. The two do not answer quite the same
question. HEAR names a block by a hash chained over all blocks before it and keeps one directory
for each engine, so it can bisect. RadixTree walks block by block by hashes of each block's own
tokens, needs no chained hash in the request, and answers for all workers at once. Both are given
the same numbers here, and must give the same match length. What is measured is what a Python
program pays, and RadixTree's share of that is often smaller than that of handing it its input.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Run as a script, Python looks for modules in this folder and not in the one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.coding import coding
from benchmarks.deciding import deciding
from benchmarks.engine import simulating
from benchmarks.events import applying
from benchmarks.indexes import build, matching
from benchmarks.measuring import QUICK, Report, Sizes, as_json, print_report
from hear.app.console import of_errors, of_results


def measure(sizes: Sizes, progress: Callable[[str], None] = lambda stage: None) -> Report:
    """Take every figure."""
    report = Report()
    progress("filling both indexes")
    indexes = build(sizes, report)
    progress("matching")
    matching(indexes, sizes, report)
    progress("applying")
    applying(indexes, sizes, report)
    del indexes
    progress("deciding")
    deciding(sizes, report)
    progress("encoding and decoding")
    coding(sizes, report)
    progress("simulating")
    simulating(sizes, report)
    return report


def main(arguments: Sequence[str] | None = None, sizes: Sizes | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, in under 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE too")
    options = parser.parse_args(arguments)
    if sizes is None:
        sizes = QUICK if options.quick else Sizes()
    console = of_results(140)
    with of_errors().status("") as status:
        report = measure(sizes, lambda stage: status.update(f"{stage} ..."))
    print_report(report, console)
    if options.json is not None:
        options.json.write_bytes(as_json(report, sizes))


if __name__ == "__main__":
    main()
