"""What HEAR's order of giving up blocks costs vLLM's block pool, beside vLLM's own.

    python benchmarks/vllm_queue.py [--quick] [--json FILE]

Needs vLLM (docs/vllm.md says how to install it), and no model. The pool is full of blocks that may
be reused, so that each block taken is one evicted. A round takes blocks, gives them content, gives
them back, and reuses them; the sides take turns round by round. All figures are for one block, of
the pool's own methods, since a user of vLLM pays these and never the queue's alone; and of
processor time, since each is short and others may use the machine. Where half the pool is leased,
each round puts a lease on its blocks and ends an old one; where all of it is, leases yield as they
must, and taking a block includes that.
"""

import argparse
import sys
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from typing import Any

# Run as a script, Python looks for modules in this folder and not in the one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Report, as_json, no_gc, print_report
from hear.app.console import of_results
from hear.engines.kv.leases import Lease, LeaseBook


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much. A pool of 40,000 blocks of 16 tokens is about that of an 8B model on 80 GiB."""

    num_blocks: int = 40_000
    request_blocks: int = 256
    rounds: int = 300


class Side:
    """One pool with one order. ``leased`` tells whose blocks have a lease."""

    def __init__(self, who: str, sizes: Sizes, leased: str | None) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.who = who
        self.pool: Any = BlockPool(sizes.num_blocks, True, 16)
        self.leases: LeaseBook[str] = LeaseBook(400.0)
        self.queue: Any = None
        self._sizes = sizes
        self._leased = leased
        self._next = 0
        self.samples: dict[str, list[float]] = {}
        self._held: deque[Lease[str]] = deque()
        if leased is not None:
            from hear.engines.vllm.plugin.retention_queue import RetentionQueue

            self.queue = RetentionQueue.install(self.pool, self.leases, self._yield)
        if leased == "others":
            # A tenth of the pool is leased, and none of what comes and goes.
            for number in range(sizes.num_blocks // (10 * sizes.request_blocks)):
                self._lease(f"other{number}", self._round())
        while self._next < 2 * sizes.num_blocks:
            self._round()
        self.samples.clear()

    def round(self) -> None:
        """One turn."""
        self._round()

    def _round(self) -> list[int]:
        count = self._sizes.request_blocks
        hashes = list(range(self._next, self._next + count))
        self._next += count
        keys = [bytes(24) + number.to_bytes(8, "big") + bytes(4) for number in hashes]
        pool = self.pool
        times = [thread_time()]
        blocks = pool.get_new_blocks(count)
        times.append(thread_time())
        for key, block in zip(keys, blocks, strict=True):
            pool._insert_block_hash(key, block, num_tokens=None)
        times.append(thread_time())
        if self._leased in ("half", "all"):
            self._lease(f"context{self._next}", hashes)
            if self._leased == "half" and len(self._held) * count > self._sizes.num_blocks // 2:
                self.queue.rerank(self.leases.drop(self._held.popleft()))
            times[-1] = thread_time()
        backwards = blocks[::-1]
        pool.free_blocks(backwards)
        times.append(thread_time())
        pool.touch(blocks)
        times.append(thread_time())
        pool.free_blocks(backwards)
        if self._leased == "half":
            times.append(thread_time())
            self.queue.rerank(hashes)
            times.append(thread_time())
            self._note("rerank", times[-1] - times[-2])
        for what, begun, ended in zip(
            ("take and evict", "give content", "give back", "reuse"),
            times,
            times[1:],
            strict=False,
        ):
            if what != "give content" or self._leased in (None, "none"):  # else a lease is in it
                self._note(what, ended - begun)
        return hashes

    def _lease(self, context: str, hashes: Sequence[int]) -> None:
        held = Lease(context, context, 1.0, 1e9, hashes, float(self._next))
        self.leases.put(held)
        self._held.append(held)
        self.queue.rerank(hashes)

    def _yield(self, block_hash: int) -> None:
        for held in self.leases.of_block(block_hash):
            self._held.remove(held)
            self.queue.rerank(self.leases.drop(held))

    def _note(self, what: str, took: float) -> None:
        took_ns = 1e9 * took / self._sizes.request_blocks
        self.samples.setdefault(what, []).append(took_ns)


def measure(sizes: Sizes) -> Report:
    """Take every figure."""
    sides = [
        Side("vLLM", sizes, None),
        Side("HEAR, no leases", sizes, "none"),
        Side("HEAR, leases on others", sizes, "others"),
        Side("HEAR, half the pool leased", sizes, "half"),
        Side("HEAR, all of it leased", sizes, "all"),
    ]
    with no_gc():
        for _ in range(sizes.rounds):
            for side in sides:
                side.round()
    report = Report()
    for what in sides[0].samples | sides[3].samples:
        for side in sides:
            if what in side.samples:
                section = f"block pool of {sizes.num_blocks:,} blocks"
                report.add(section, what, side.who, "ns", side.samples[what])
    return report


def main(arguments: Sequence[str] | None = None, sizes: Sizes | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE too")
    options = parser.parse_args(arguments)
    if sizes is None:
        sizes = Sizes(rounds=60) if options.quick else Sizes()
    with warnings.catch_warnings():  # those of vLLM, torch and what they use are not ours
        warnings.simplefilter("ignore")
        report = measure(sizes)
    print_report(report, of_results(140))
    if options.json is not None:
        options.json.write_bytes(as_json(report, sizes))


if __name__ == "__main__":
    main()
