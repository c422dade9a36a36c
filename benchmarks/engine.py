"""How fast virtual time passes in the simulated engine."""

import random
from collections.abc import Sequence
from time import perf_counter

import trio
from trio.testing import MockClock

from benchmarks.measuring import BLOCK_SIZE, Report, Sizes
from hear.app.cluster import running
from hear.blocks import pack, unpack
from hear.engines.simulated.backend import SimulatedEngine
from hear.engines.simulated.profile import EngineProfile, load_profile
from hear.engines.simulated.roofline import Roofline
from hear.harnesses.session import HarnessSession
from hear.interfaces import InferenceRequest
from hear.messages import RequestDescribed

PROFILE = "h100-qwen3-8b"


class CountingRoofline(Roofline):
    """Counts the steps that it is asked the time of: each step of the engine, once."""

    def __init__(self, profile: EngineProfile) -> None:
        super().__init__(profile, BLOCK_SIZE)
        self.steps = 0

    def step_s(self, new_tokens: int, pairs: int, kv_tokens: int) -> float:
        """Time of one step."""
        self.steps += 1
        return super().step_s(new_tokens, pairs, kv_tokens)


def engine_requests(kind: str, count: int) -> list[InferenceRequest]:
    """Requests of one kind of load. Every two share the first half of their prompt."""
    draw = random.Random(4)
    prompt_tokens, output_tokens = (512, 256) if kind == "decode-heavy" else (8192, 4)
    num_blocks = prompt_tokens // BLOCK_SIZE
    requests = []
    for number in range(count):
        if number % 2 == 0:
            head = draw.randbytes(8 * (num_blocks // 2))
        tail = draw.randbytes(8 * (num_blocks - num_blocks // 2))
        requests.append(
            InferenceRequest(
                id=f"r{number}",
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                prompt_hashes=unpack(head + tail),
                context=f"c{number}",
                context_version=1,
            )
        )
    return requests


async def serve_alone(requests: Sequence[InferenceRequest]) -> tuple[int, float]:
    """Serve all without protocol; returns the steps and the virtual time."""
    profile = load_profile(PROFILE)
    engine = SimulatedEngine(profile, block_size=BLOCK_SIZE)
    counting = engine.roofline = CountingRoofline(profile)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run, lambda report: None)
        async with trio.open_nursery() as clients:
            for request in requests:
                clients.start_soon(engine.generate, request)
        nursery.cancel_scope.cancel()
    return counting.steps, trio.current_time()


async def serve(requests: Sequence[InferenceRequest], policy: str) -> tuple[int, float]:
    """Serve all through worker, bus and policies; returns the steps and the virtual time."""
    async with running(
        engine="simulated", profile=PROFILE, block_size=BLOCK_SIZE, policy=policy
    ) as cluster:
        engine = cluster.engine
        assert isinstance(engine, SimulatedEngine)
        counting = engine.roofline = CountingRoofline(engine.profile)
        harness = HarnessSession(cluster.bus, workflow="w", source="harness")
        async with trio.open_nursery() as clients:
            for request in requests:
                harness.say(
                    RequestDescribed(
                        prompt_tokens=request.prompt_tokens,
                        block_size=BLOCK_SIZE,
                        prefix_hashes=pack(request.prompt_hashes),
                    ),
                    request=request.id,
                    context=request.context,
                    context_version=1,
                    engine=cluster.engine_name,
                )
                clients.start_soon(engine.generate, request)
        ended_s = trio.current_time()
        await cluster.stop_policies()
    return counting.steps, ended_s


def simulating(sizes: Sizes, report: Report) -> None:
    """How fast virtual time passes."""
    for kind in ("decode-heavy", "prefill-heavy"):
        requests = engine_requests(kind, sizes.engine_requests)
        rates: dict[str, list[tuple[float, float]]] = {}
        steps = 0
        for _ in range(sizes.engine_repeats):
            for who, main, arguments in (
                ("engine alone", serve_alone, ()),
                ("with worker and bus", serve, ("fcfs",)),
                ("with worker, bus and Cache-Aware", serve, ("cache-aware",)),
            ):
                clock = MockClock(autojump_threshold=0)
                begun_s = clock.current_time()
                begun = perf_counter()
                steps, ended_s = trio.run(main, requests, *arguments, clock=clock)
                took = perf_counter() - begun
                rates.setdefault(who, []).append((steps / took, (ended_s - begun_s) / took))
        section = f"simulated engine, {len(requests)} requests at once, about {steps:,} steps"
        for who, taken in rates.items():
            report.add(section, kind, who, "steps/s", (rate for rate, _ in taken))
        for who, taken in rates.items():
            report.add(
                section, f"{kind}: virtual time", who, "virtual s/s", (pace for _, pace in taken)
            )
