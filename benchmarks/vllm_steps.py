"""What a step of decoding costs in vLLM's scheduler, as it comes and with HEAR in it. No model.

    python -m benchmarks.vllm_steps [--steps N] [--json FILE]

Needs vLLM (docs/vllm.md). The tokens are given, so a step is the scheduler's own work: ``schedule``
and ``update_from_output``, in microseconds of processor time, which other work on the machine does
not lengthen by much. Beside it, what HEAR's thread does with the events of a step: the copy of the
queue, the worker, and messages on a bus in memory. Not in it: the hand-over between two threads,
which may keep each other from the interpreter, and pressure, told twice a second by the clock.
"""

import argparse
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any, Final

import trio
from rich.table import Table

from benchmarks.parity_engines import Real, block_hashes
from benchmarks.parity_workload import Arrival, Workload
from hear.app import log
from hear.app.console import of_results
from hear.buses.memory import MemoryBus
from hear.engines.worker.loop import EngineWorker

CONCURRENCY: Final = (1, 8, 16)
BLOCK_SIZE: Final = 16
PROMPT_TOKENS: Final = 64


def workload(count: int, steps: int) -> Workload:
    """Requests that all come at once, and decode side by side for so many steps."""
    arrivals = tuple(
        Arrival(
            id=f"r{number}",
            step=0,
            arrival_s=float(number),
            tokens=tuple(number * 7 + at % 251 for at in range(PROMPT_TOKENS + steps)),
            output_tokens=steps,
            priority=0,
        )
        for number in range(count)
    )
    blocks = count * (-(-(PROMPT_TOKENS + steps) // BLOCK_SIZE) + 1)
    return Workload(0, BLOCK_SIZE, blocks, count, 2048, "fcfs", False, arrivals)


class Timed:
    """One scheduler, and the microseconds of each of its steps."""

    def __init__(self, made: Workload, scheduler: Any) -> None:
        self._real = Real(made, scheduler)
        self._arrivals = made.arrivals
        self.scheduler = self._real.scheduler
        self.engine_us: list[float] = []
        self.hear_us: list[float] = []
        for method in ("schedule", "update_from_output"):
            setattr(self.scheduler, method, self._timed(getattr(self.scheduler, method)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begun_s = thread_time()
            returned = method(*args)
            self.engine_us[-1] += 1e6 * (thread_time() - begun_s)
            return returned

        return timed

    async def run(self, let_hear_work: Callable[[], Awaitable[None]]) -> None:
        """Serve all requests to their ends."""
        for arrival in self._arrivals:
            self._real.add(arrival, block_hashes(arrival, BLOCK_SIZE))
        while True:
            self.engine_us.append(0.0)
            output = self.scheduler.schedule()
            if not (names := list(output.num_scheduled_tokens)):
                break
            self.scheduler.update_from_output(output, self._real.model_output(names))
            begun_s = thread_time()
            await let_hear_work()
            self.hear_us.append(1e6 * (thread_time() - begun_s))
        # The first step is prefill, and at the end they leave one after the other.
        del self.engine_us[:2], self.engine_us[-2:], self.hear_us[:2], self.hear_us[-1:]


async def stock(count: int, steps: int) -> Timed:
    """vLLM's own scheduler."""
    from vllm.v1.core.sched.scheduler import Scheduler

    made = Timed(workload(count, steps), Scheduler)
    made.scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = False  # as it comes
    await made.run(trio.lowlevel.checkpoint)
    return made


async def with_hear(count: int, steps: int) -> Timed:
    """The same with HEAR in it, its worker on a bus."""
    from hear.engines.vllm.plugin.scheduler import HearScheduler

    made = Timed(workload(count, steps), HearScheduler)
    backend = made.scheduler.hear_host.backend
    backend.listen()
    async with MemoryBus() as bus, trio.open_nursery() as nursery:
        await nursery.start(EngineWorker(bus, backend, name="vllm0").run)
        await made.run(trio.lowlevel.checkpoint)
        nursery.cancel_scope.cancel()
    return made


async def measure(steps: int, repeats: int = 5) -> dict[int, dict[str, float]]:
    """Medians of a step's microseconds, by concurrency: of both in turns."""
    found: dict[int, dict[str, float]] = {}
    for count in CONCURRENCY:
        own: list[float] = []
        engine: list[float] = []
        thread: list[float] = []
        for _ in range(repeats):
            plain = await stock(count, steps)
            heard = await with_hear(count, steps)
            own.append(median(plain.engine_us))
            engine.append(median(heard.engine_us))
            # Most steps tell nothing; what a few tell is spread over all.
            spent = sum(heard.hear_us) - sum(plain.hear_us)
            thread.append(max(spent, 0.0) / len(heard.hear_us))
        found[count] = {
            "stock_us": median(own),
            "hear_us": median(engine),
            "hear_thread_us": median(thread),
        }
    return found


def main() -> int:
    """Carry out the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=512, help="of each request (512)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    log.to_stderr("warning")
    found = trio.run(measure, arguments.steps)
    table = Table("requests", "stock, us", "with HEAR, us", "more, us", "HEAR's thread, us")
    for count, row in found.items():
        more = row["hear_us"] - row["stock_us"]
        values = (row["stock_us"], row["hear_us"], more, row["hear_thread_us"])
        table.add_row(str(count), *(f"{value:.1f}" for value in values))
    of_results(120).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
