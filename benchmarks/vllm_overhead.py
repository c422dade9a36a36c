"""What HEAR costs a real vLLM, how soon a control takes hold in it, and what a flood of them does.

    python -m benchmarks.vllm_overhead [--quick] [--json FILE] [--model DIR] [PART ...]

Needs vLLM (docs/vllm.md). Three servers run at once on one model: vLLM as it comes, vLLM with HEAR
and no policy, and with Cache-Aware at work; they are measured in turns, one at a time, so that what
the machine does meanwhile falls on all of them. Ratios are taken within a turn; many short turns
tell more than a few long ones. Decode throughput is the sum over concurrent requests of tokens
after the first by the time that they took.

Hub, policies and the flood are processes of their own and share the cores with the engine, so on
few cores what they take is in the figures: the flood is therefore measured three ways, with none,
with one past the engine (at a name that nobody has), and with one at it.
"""

import argparse
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, Final

import trio
from rich.table import Table

from benchmarks.vllm_controls import LAST_S, NOBODY, Engine, Latencies, flood, latencies
from hear.app import log, output
from hear.app.connection import connected, run
from hear.app.console import Console, of_results
from hear.blocks import pack
from hear.errors import ConfigError, EngineError
from hear.harnesses.eval.bench import servers
from hear.harnesses.eval.bench.places import ENGINE_NAME
from hear.harnesses.eval.replay.live import find_engines
from hear.harnesses.openai.client import OpenAIClient, connect
from hear.harnesses.pool.reaching import hasher_of
from hear.harnesses.session import HarnessSession
from hear.interfaces import Bus, InferenceRequest
from hear.messages import CapabilitiesReported, RequestDescribed

PARTS: Final = ("throughput", "latency", "flood")
CONCURRENCY: Final = (1, 8, 16)
STOCK, IDLE, WORKING = "stock vLLM", "HEAR, no policy", "HEAR, cache-aware"
OPTIONS: Final = (
    *("--max-num-seqs", "16", "--block-size", "32", "--max-model-len", "4096"),
    *("--enforce-eager", "--dtype", "float32"),  # bfloat16 is slow where it has to be emulated
    # Tokens are told in bundles, so that it is decoding that is measured and not the telling.
    *("--stream-interval", "16"),
)
PROMPT_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    repeats: int = 40
    output_tokens: int = 128
    controls: int = 300
    flood_s: float = 10.0
    flood_per_s: int = 10_000
    floods: int = 3


QUICK: Final = Sizes(repeats=5, controls=60, flood_s=3.0, flood_per_s=2_000, floods=1)


@dataclass
class Found:
    """All samples: tokens a second by part, concurrency and server, and the rest by name."""

    decode: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    latency_ms: dict[str, Latencies] = field(default_factory=dict)
    flood: list[dict[str, Any]] = field(default_factory=list)


class Server:
    """One server, what reaches it, and a harness that describes requests if policies listen."""

    def __init__(
        self,
        client: OpenAIClient,
        bus: Bus | None = None,
        capabilities: CapabilitiesReported | None = None,
        *,
        describes: bool = False,
    ) -> None:
        self.client = client
        self.bus = bus
        self._hash = (
            hasher_of(ENGINE_NAME, capabilities.hash_scheme) if capabilities is not None else None
        )
        self._block_size = capabilities.block_size if capabilities is not None else 1
        self._harness: HarnessSession | None = None
        if describes and bus is not None:
            self._harness = HarnessSession(bus, workflow="overhead", source="overhead")
        self._numbers = iter(range(1, 1 << 60))
        self._draw = random.Random(1)

    async def decode(self, count: int, output_tokens: int) -> float:
        """Serve ``count`` requests at once; returns tokens a second of all of them together."""
        rates: list[float] = []
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(self._one, output_tokens, rates)
        return sum(rates)

    async def _one(self, output_tokens: int, rates: list[float]) -> None:
        request = self.request(output_tokens)
        if self._harness is not None and self._hash is not None:
            described = RequestDescribed(
                prompt_tokens=PROMPT_TOKENS,
                block_size=self._block_size,
                prefix_hashes=pack(self._hash(request.prompt, self._block_size)),
            )
            self._harness.say(
                described, request=request.id, context=request.context, engine=ENGINE_NAME
            )
        result = await self.client.generate(request)
        if result.outcome.status != "completed":
            raise EngineError(f"{request.id}: {result.outcome.reason}")
        took_s = result.finished_s - result.first_token_s
        rates.append((result.outcome.output_tokens - 1) / took_s)

    def request(self, output_tokens: int) -> InferenceRequest:
        """A request that shares nothing with those before it."""
        number = next(self._numbers)
        prompt = tuple(self._draw.choices(range(16, 500), k=PROMPT_TOKENS))
        name = f"overhead/{number}"
        return InferenceRequest(
            id=name,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=output_tokens,
            prompt_hashes=(),
            context=name,
            context_version=1,
            prompt=prompt,
        )


@asynccontextmanager
async def started(model: str, folder: Path, who: str) -> AsyncIterator[Server]:
    """One of the three servers, with a hub of its own if it has HEAR in it."""
    async with AsyncExitStack() as stack:
        port = servers.free_port()
        endpoint = f"http://127.0.0.1:{port}"
        if who == STOCK:
            command = servers.stock_vllm("stock", model, OPTIONS, port=port)
            server = await stack.enter_async_context(servers.running(command, folder))
            await server.until(partial(_reached, endpoint), "starting")
            yield Server(await stack.enter_async_context(connect(endpoint)))
            return
        url = f"ipc://{folder}/bus"
        hub = await stack.enter_async_context(servers.running(servers.hub(url), folder))
        await hub.until(partial(_joined, url), "starting", 15.0)
        bus = await stack.enter_async_context(connected(url, name="overhead"))
        ranks = "cache-aware=1"
        command = servers.vllm(ENGINE_NAME, model, OPTIONS, port=port, bus=url, ranks=ranks)
        server = await stack.enter_async_context(servers.running(command, folder))
        capabilities = await server.until(partial(_told, bus), "starting")
        await server.until(partial(_reached, endpoint), "starting")
        client = await stack.enter_async_context(connect(endpoint))
        if who == WORKING:
            policy = servers.hear("run", "policy", "cache-aware", "--bus", url, "--with-parent")
            await stack.enter_async_context(
                servers.running(servers.Command("policy", policy), folder)
            )
        yield Server(client, bus, capabilities, describes=who == WORKING)


async def _reached(endpoint: str) -> None:
    async with connect(endpoint):
        pass


async def _joined(url: str) -> None:
    async with connected(url, name="overhead-probe"):
        pass


async def _told(bus: Bus) -> CapabilitiesReported:
    found = await find_engines(bus, within_s=servers.LOOK_EVERY_S)
    if ENGINE_NAME not in found:
        raise EngineError(f"{ENGINE_NAME} has not told of itself on the bus")
    return found[ENGINE_NAME]


# -- the parts ------------------------------------------------------------------------------------


async def throughput(up: dict[str, Server], sizes: Sizes, found: Found) -> None:
    """Decode at each concurrency on each server, in turns."""
    names = list(up)
    for turn in range(sizes.repeats):
        for count in CONCURRENCY:
            row = found.decode.setdefault(count, {name: [] for name in names})
            for place in range(len(names)):
                name = names[(place + turn) % len(names)]
                row[name].append(await up[name].decode(count, sizes.output_tokens))


async def latency(server: Server, sizes: Sizes, found: Found) -> None:
    """Controls one at a time: on an idle engine, and while it decodes and another waits."""
    assert server.bus is not None
    engine = Engine(server.bus, ENGINE_NAME, server.client, server.request)
    for state in ("idle", "busy"):
        found.latency_ms |= {
            f"{what}, {state}": measured
            for what, measured in (
                await latencies(engine, sizes.controls, busy=state == "busy")
            ).items()
        }


async def floods(server: Server, url: str, sizes: Sizes, found: Found) -> None:
    """Decode with no flood, with one past the engine, and with one at it, in turns."""
    for turn in range(sizes.floods):
        ways = [None, NOBODY, ENGINE_NAME]
        for target in ways[turn % 3 :] + ways[: turn % 3]:
            found.flood.append(await _flooded(server, url, target, sizes))


async def _flooded(server: Server, url: str, target: str | None, sizes: Sizes) -> dict[str, Any]:
    told: dict[str, Any] = {"at": target}
    told |= dict.fromkeys(("sent", "ended", "lost", "ended_twice"))
    rates: list[float] = []
    done = trio.Event()

    async def decode() -> None:
        begun_s = trio.current_time()
        while trio.current_time() < begun_s + sizes.flood_s:
            rates.append(await server.decode(8, 128))

    async def send() -> None:
        if target is not None:
            arguments = ["--flood", url, target, str(sizes.flood_s), str(sizes.flood_per_s)]
            command = [sys.executable, "-m", "benchmarks.vllm_overhead", *arguments]
            with trio.fail_after(sizes.flood_s + LAST_S + 60):
                process = await trio.run_process(command, capture_stdout=True)
            told.update(json.loads(process.stdout))
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        if target is not None:
            await trio.sleep(1.5)  # until it has begun
        await decode()
        await done.wait()
    told["tokens_per_s"] = median(rates)
    return told


# -- what comes out -------------------------------------------------------------------------------


def ratios(row: dict[str, list[float]], name: str) -> list[float]:
    """Throughput of a server by that of the stock one in the same turn."""
    return [own / stock for own, stock in zip(row[name], row[STOCK], strict=True)]


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Between which samples their true median lies, with 95% confidence; of too few, their ends."""
    ordered, n = sorted(samples), len(samples)
    below, tail = 0, 0.5**n
    while tail <= 0.025:  # the chance that so few samples are below the median
        below += 1
        tail += comb(n, below) * 0.5**n
    return ordered[max(below - 1, 0)], ordered[min(n - below, n - 1)]


def percentile(samples: Sequence[float], percent: int) -> float:
    """The value that so many percent do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def as_dict(found: Found, sizes: Sizes) -> dict[str, Any]:
    """All samples, and what they come to."""
    return {
        "machine": f"{os.cpu_count()} CPUs, Python {platform.python_version()}",
        "sizes": {name: getattr(sizes, name) for name in Sizes.__slots__},
        "decode_tokens_per_s": found.decode,
        "decode_ratio_to_stock": {
            count: {
                name: {"median": median(ratios(row, name)), "ci95": interval(ratios(row, name))}
                for name in row
                if name != STOCK
            }
            for count, row in found.decode.items()
            if STOCK in row
        },
        "control_latency_ms": {
            what: {
                "count": len(measured.applied_ms),
                "applied_p50": median(measured.applied_ms),
                "applied_p99": percentile(measured.applied_ms, 99),
                "answered_p50": median(measured.answered_ms),
                "answered_p99": percentile(measured.answered_ms, 99),
            }
            for what, measured in found.latency_ms.items()
        },
        "flood": found.flood,
    }


def show(found: Found, console: Console) -> None:
    """The same as tables."""
    if found.decode:
        table = Table("requests", "server", "tokens/s", "of stock", "95% of the median")
        for count, row in found.decode.items():
            for name, samples in row.items():
                share = ratios(row, name)
                low, high = interval(share)
                cells = [f"{median(samples):,.0f}", f"{median(share):.3f}", f"{low:.3f}-{high:.3f}"]
                table.add_row(str(count), name, *cells)
        console.print(table)
    if found.latency_ms:
        table = Table("control", "count", "applied P50 ms", "P99", "answered P50 ms", "P99")
        for what, measured in found.latency_ms.items():
            numbers = [
                f"{value:.2f}"
                for samples in (measured.applied_ms, measured.answered_ms)
                for value in (median(samples), percentile(samples, 99))
            ]
            table.add_row(what, str(len(measured.applied_ms)), *numbers)
        console.print(table)
    if found.flood:
        table = Table("flood at", "tokens/s", "sent", "ended", "lost", "ended twice")
        for told in found.flood:
            values = (told[name] for name in ("sent", "ended", "lost", "ended_twice"))
            counts = ["-" if value is None else f"{value:,}" for value in values]
            table.add_row(told["at"] or "none", f"{told['tokens_per_s']:,.0f}", *counts)
        console.print(table)


async def measure(model: str, parts: Sequence[str], sizes: Sizes, found: Found) -> int:
    """Start what the parts need, and measure them."""
    names = [STOCK, IDLE, WORKING] if "throughput" in parts else [IDLE]
    with tempfile.TemporaryDirectory(prefix="hear-overhead-") as temporary:
        async with AsyncExitStack() as stack:
            up: dict[str, Server] = {}
            for place, name in enumerate(names):
                folder = Path(temporary) / str(place)
                folder.mkdir()
                up[name] = await stack.enter_async_context(started(model, folder, name))
                await up[name].decode(16, 64)  # what is computed first takes longer
            if "throughput" in parts:
                await throughput(up, sizes, found)
            if "latency" in parts:
                await latency(up[IDLE], sizes, found)
            if "flood" in parts:
                url = f"ipc://{temporary}/{names.index(IDLE)}/bus"
                await floods(up[IDLE], url, sizes, found)
    return 0


def main() -> int:
    """Carry out the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (all)")
    parser.add_argument("--quick", action="store_true", help="a few minutes: less of everything")
    parser.add_argument("--model", help="folder of the model (one is generated)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--flood", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    log.to_stderr("warning")  # standard output is for what was measured
    if arguments.flood:
        url, engine, seconds, rate = arguments.flood
        return run(partial(flood, url, engine, float(seconds), int(rate)))
    parts = arguments.parts or PARTS
    for part in parts:
        if part not in PARTS:
            parser.error(f"{part!r}: expected {', '.join(PARTS)}")
    sizes = QUICK if arguments.quick else Sizes()
    found = Found()
    with tempfile.TemporaryDirectory(prefix="hear-model-") as folder:
        model = arguments.model or f"{folder}/model"
        try:
            if arguments.model is None:
                servers.carry_out(servers.hear("vllm", "make-model", model))
            return run(partial(measure, model, parts, sizes, found))
        except (ConfigError, EngineError) as error:
            output.remark(f"vllm_overhead: {error}")
            return 1
        finally:  # what was measured before something failed took its time too
            show(found, of_results(120))
            if arguments.json is not None:
                text = json.dumps(as_dict(found, sizes), indent=2)
                arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
