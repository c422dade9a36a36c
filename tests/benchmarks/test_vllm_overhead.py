"""The benchmark of overhead: its arithmetic, and its controls on an engine that is not vLLM."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import trio

from benchmarks.vllm_controls import NOBODY, Engine, Latencies, flood, latencies
from benchmarks.vllm_overhead import (
    IDLE,
    STOCK,
    Found,
    Sizes,
    as_dict,
    interval,
    percentile,
    ratios,
)
from hear.app import plugins
from hear.app.clock import SharedClock
from hear.app.connection import connected
from hear.errors import EngineError
from hear.harnesses.eval.bench import servers
from hear.harnesses.eval.replay.live import find_engines
from hear.interfaces import InferenceRequest


def test_shares_are_of_the_stock_server_in_the_same_turn() -> None:
    row = {STOCK: [100.0, 50.0, 200.0], IDLE: [99.0, 50.0, 190.0]}
    assert ratios(row, IDLE) == pytest.approx([0.99, 1.0, 0.95])
    told = as_dict(Found(decode={8: row}), Sizes())
    assert told["decode_ratio_to_stock"][8][IDLE]["median"] == pytest.approx(0.99)


def test_percentiles_of_few_samples() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0], 99) == 1.0


def test_the_interval_of_a_median_is_by_how_many_may_lie_below_it() -> None:
    assert interval([2.0, 1.0]) == (1.0, 2.0)
    assert interval([float(n) for n in range(5, 0, -1)]) == (1.0, 5.0)
    assert interval([float(n) for n in range(1, 11)]) == (2.0, 9.0)
    assert interval([float(n) for n in range(1, 41)]) == (14.0, 27.0)


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[str]:
    """A hub and a simulated engine, as processes."""
    url = f"ipc://{folder}/bus"
    engine = servers.simulated("engine0", "h100-qwen3-8b", 32, url, "")

    async def joined() -> None:
        async with connected(url, name="probe") as bus:
            if "engine0" not in await find_engines(bus, within_s=0.2):
                raise EngineError("not yet")

    async with (
        servers.running(servers.hub(url), folder),
        servers.running(engine, folder) as server,
    ):
        await server.until(joined, "starting", 20)
        yield url


def on_the_shared_clock(main: Callable[[], Awaitable[None]]) -> None:
    """Run on the clock of a deployment, by which its processes tell times."""

    async def bounded() -> None:
        with trio.fail_after(90):
            await main()

    trio.run(bounded, clock=SharedClock())


async def flooded(folder: Path, engine: str, seconds: float, rate: int) -> None:
    async with cluster(folder) as url:
        assert await flood(url, engine, seconds, rate) == 0


def test_every_control_of_a_flood_is_answered_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_the_shared_clock(partial(flooded, tmp_path, "engine0", 0.5, 400))
    told = json.loads(capsys.readouterr().out)
    assert told["sent"] > 100
    assert told == {"sent": told["sent"], "ended": told["sent"], "lost": 0, "ended_twice": 0}


def test_a_flood_past_the_engine_is_answered_by_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_the_shared_clock(partial(flooded, tmp_path, NOBODY, 0.5, 100))
    told = json.loads(capsys.readouterr().out)
    assert told["sent"] > 0
    assert told["lost"] is told["ended"] is None


def test_what_goes_wrong_in_a_flood_is_not_said_on_standard_output(tmp_path: Path) -> None:
    arguments = [f"ipc://{tmp_path}/nobody", "engine0", "0.1", "10"]
    command = [sys.executable, "-m", "benchmarks.vllm_overhead", "--flood", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert (done.stdout, "nobody" in done.stderr) == ("", True)


def test_controls_are_timed_on_an_idle_engine(tmp_path: Path) -> None:
    numbers = count()
    found: dict[str, Latencies] = {}

    def request(output_tokens: int) -> InferenceRequest:
        name = f"r{next(numbers)}"
        return InferenceRequest(name, 64, output_tokens, (1, 2), context=name, context_version=1)

    async def measure() -> None:
        async with cluster(tmp_path) as url, connected(url, name="test") as bus:
            engines = await find_engines(bus, within_s=0.5)
            endpoint = engines["engine0"].endpoint
            async with plugins.load_installed("clients", "sim+tcp")(endpoint) as client:
                engine = Engine(bus, "engine0", client, request)
                found.update(await latencies(engine, 5, busy=False))

    on_the_shared_clock(measure)
    assert set(found) == {"retain"}
    assert len(found["retain"].answered_ms) == 5
    assert all(0 < ms < 5_000 for ms in found["retain"].answered_ms)
