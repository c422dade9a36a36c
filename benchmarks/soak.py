"""A day of a cluster in virtual time: what is kept must not grow, and no policy may be lost.

    python -m benchmarks.soak --hours 24

Two simulated engines behind a pool serve agents that come and go: sessions of one to six turns, of
which some are never closed, some requests are described and never sent, and some clients hang up.
Each hour a tenant comes with a policy of its own and leaves; every second hour an engine joins the
bus, crashes once, and leaves, and the harness goes on describing requests for it. No name is ever
used twice. Cache-Aware, Guard-40 and Session-Aware stay all day.

After two hours of that, and again at the end, the harness is silent for two hours, so that leases,
deadlines and spans of remembering end. The sizes of all tables of HEAR's objects are then compared:
each dict, set, list and deque that an object of a class of ``hear`` holds. One that has grown by
more than a quarter, beyond a few entries, is a leak, unless ``BOUNDED`` says what bounds it.
"""

import argparse
import gc
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Collection
from random import Random
from typing import Any, Final

import trio
import trio.testing

from hear.blocks import chain_all, pack
from hear.cluster import Cluster, running
from hear.engines.simulated.backend import SimulatedEngine
from hear.engines.simulated.profile import load_profile
from hear.engines.worker import EngineWorker
from hear.errors import EngineError
from hear.harnesses.session import HarnessSession
from hear.kept import Kept
from hear.messages import ContextClosed, ContextOpened, RequestDescribed
from hear.policies.guard import Guard
from hear.policies.runner import PolicyRunner
from hear.seams import InferenceRequest

BLOCK: Final = 512
PROFILE: Final = "h100-qwen3-8b"
POLICIES: Final = "cache-aware+guard:40+session-aware"
WARM_UP_H: Final = 2.0
QUIET_H: Final = 2.0
SESSIONS_PER_HOUR: Final = 180
SPARE: Final = 64
GROWTH: Final = 1.25

BOUNDED: Final = {
    "Intake._ended": "ends of operations, the last 65,536",
    "Intake._versions": "versions of contexts, the last 65,536",
    "HarnessView._seen": "ids of messages, the last 65,536",
    "HarnessView._completed": "requests that have completed, the last 100,000",
    "GapDetector._heard": "channels of messages",
    "EvictionOrder._plain": "blocks of a cache, which has as many as its engine holds",
    "EvictionOrder._ranked": "blocks of a cache",
    "EvictionOrder._heap": "blocks of a cache",
    "KvCache._parents": "blocks of a cache",
    "ResidencyDirectory._children": "blocks of a cache",
    "ContextView.gaps_s": "pauses, at most 1,000 of a context that a view has",
    "HarnessView.contexts": "contexts of which something was heard within six hours",
    "HarnessView._closed": "contexts that were closed of late",
    "ServedContext.blocks": "contexts that an engine remembers",
    "Intake._gone": "requests that ended within a minute before the last one",
    "Outbox._timers": "as many as it has operations open, and 1,024",
    "Contexts._served": "contexts that an engine remembers, the last 100,000",
    "SharedPrefixes._blocks": "contexts that an engine remembers",
    "SharedPrefixes._beginning": "contexts that an engine remembers",
}
"""Tables that fill up to a bound of their own, and what it is. A day may not reach it."""


def tables() -> Counter[str]:
    """How many entries each table of HEAR's objects has, over all objects of its class."""
    sizes: Counter[str] = Counter()
    for found in gc.get_objects():
        kind = type(found)
        if not kind.__module__.startswith("hear."):
            continue
        if kind is Kept:
            continue  # it is counted as what its owner calls it
        for name, value in _attributes(found, kind):
            if isinstance(value, dict | set | list | deque | Kept):
                sizes[f"{kind.__name__}.{name}"] += len(value)
    return sizes


def _attributes(found: Any, kind: type) -> list[tuple[str, Any]]:
    slots: list[str] = []
    for base in kind.__mro__:
        own: str | Collection[str] = base.__dict__.get("__slots__", ())
        slots += [own] if isinstance(own, str) else own
    values = [(name, getattr(found, name, None)) for name in slots]
    return [*values, *getattr(found, "__dict__", {}).items()]


def grown(before: Counter[str], after: Counter[str]) -> list[str]:
    """The tables that have grown, and are not known to have a bound of their own."""
    return [
        f"{name}: {before[name]:,} entries before, {after[name]:,} after"
        for name in sorted(after)
        if name not in BOUNDED and after[name] > GROWTH * before[name] + SPARE
    ]


class Soak:
    """The agents of one day. ``served`` and ``failed`` count their requests."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._draw = Random(seed)
        self._number = 0
        self.served = self.failed = self.abandoned = 0

    async def hours(self, count: float) -> None:
        """Agents, tenants and engines for so many hours."""
        end_s = trio.current_time() + 3600 * count
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._visits, end_s)
            while trio.current_time() < end_s:
                await trio.sleep(self._draw.expovariate(SESSIONS_PER_HOUR / 3600))
                nursery.start_soon(self._session, self._name("agent"))

    def _name(self, kind: str) -> str:
        self._number += 1
        return f"{kind}-{self._number}"

    async def _session(self, name: str) -> None:
        draw = Random(name)
        harness = HarnessSession(self._cluster.bus, workflow=name, source=f"harness/{name}")
        harness.say(ContextOpened(role="agent"), context=name)
        blocks = draw.randint(1, 12)
        for turn in range(1, draw.randint(1, 6) + 1):
            blocks += draw.randint(0, 3)
            await self._turn(harness, name, turn, blocks, draw)
            await trio.sleep(draw.uniform(1, 90))
        if draw.random() < 0.7:
            harness.say(ContextClosed(), context=name)

    async def _turn(
        self, harness: HarnessSession, name: str, turn: int, blocks: int, draw: Random
    ) -> None:
        request, pool = f"{name}/{turn}", self._cluster.engine_name
        hashes = chain_all(f"{name}/{index}".encode() for index in range(blocks))
        tokens = blocks * BLOCK + draw.randint(1, BLOCK - 1)
        described = RequestDescribed(
            turn=turn, prompt_tokens=tokens, block_size=BLOCK, prefix_hashes=pack(hashes)
        )

        def describe(engine: str) -> None:
            harness.say(
                described, request=request, context=name, context_version=turn, engine=engine
            )

        describe(pool)
        if draw.random() < 0.05:
            self.abandoned += 1
            return  # described, and never sent
        asked = InferenceRequest(
            id=request,
            prompt_tokens=tokens,
            output_tokens=draw.randint(1, 200),
            prompt_hashes=hashes,
            context=name,
            context_version=turn,
        )
        patience_s = draw.uniform(0.1, 2.0) if draw.random() < 0.05 else 3600.0
        with trio.move_on_after(patience_s) as patience:
            try:
                await self._cluster.generate(asked, on_routed=describe)
                self.served += 1
            except EngineError:
                self.failed += 1
        self.abandoned += patience.cancelled_caught

    async def _visits(self, end_s: float) -> None:
        hour = 0
        while trio.current_time() + 3600 <= end_s:
            await self._tenant(self._name("tenant"))
            if hour % 2 == 0:
                await self._engine(self._name("guest"))
            hour += 1
            await trio.sleep_until(min(end_s, trio.current_time() + 3000))

    async def _tenant(self, name: str) -> None:
        """A tenant with a policy of its own, on one of the engines, for ten requests."""
        engine = min(self._cluster.engines)
        client = self._cluster.engines[engine]
        runner = PolicyRunner(self._cluster.bus, Guard(40), source=f"guard/{name}", tenant=name)
        harness = HarnessSession(
            self._cluster.bus, workflow=name, source=f"harness/{name}", tenant=name
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(runner.run)
            for number in range(10):
                described = RequestDescribed(prompt_tokens=700, block_size=BLOCK)
                harness.say(described, request=f"{name}/{number}", engine=engine)
                asked = InferenceRequest(f"{name}/{number}", 700, 8, [], tenant=name)
                await client.generate(asked)
            runner.stop()

    async def _engine(self, name: str) -> None:
        """An engine that joins, crashes once and leaves, and is spoken of after that."""
        engine = SimulatedEngine(load_profile(PROFILE), block_size=BLOCK, name=name)
        worker = EngineWorker(self._cluster.bus, engine, name=name)
        harness = HarnessSession(self._cluster.bus, workflow=name, source=f"harness/{name}")
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.run)
            for number in range(12):
                request = f"{name}/{number}"
                described = RequestDescribed(prompt_tokens=700, block_size=BLOCK)
                harness.say(described, request=request, engine=name)
                if number == 6:
                    engine.crash()
                    await trio.sleep(5)
                try:
                    await engine.generate(InferenceRequest(request, 700, 8, []))
                    self.served += 1
                except EngineError:
                    self.failed += 1
            nursery.cancel_scope.cancel()
        for number in range(3):  # the harness does not know yet
            described = RequestDescribed(prompt_tokens=700, block_size=BLOCK)
            harness.say(described, request=f"{name}/late{number}", engine=name)


async def soak(hours: float, seed: int) -> list[str]:
    """Run a day, or what was asked for; returns what did not hold."""
    problems: list[str] = []
    begun = time.perf_counter()

    def remark(what: str) -> None:
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{trio.current_time() / 3600:6.1f} h  {time.perf_counter() - begun:6.0f} s of wall "
            f"time  {peak_mb:5.0f} MB at most so far  {sum(tables().values()):9,} entries  {what}",
            flush=True,
        )

    async with running(
        engine="simulated", profile=PROFILE, block_size=BLOCK, policy=POLICIES, engines=2
    ) as cluster:
        agents = Soak(cluster, seed)
        await agents.hours(WARM_UP_H)
        await trio.sleep(3600 * QUIET_H)
        gc.collect()
        before = tables()
        remark("quiet after the first hours")
        left_h = hours - WARM_UP_H - 2 * QUIET_H
        while left_h > 0:
            await agents.hours(min(left_h, 2.0))
            left_h -= 2.0
            remark(f"{agents.served:,} served")
        await trio.sleep(3600 * QUIET_H)
        gc.collect()
        after = tables()
        remark("quiet at the end")
        problems += grown(before, after)
        problems += [
            f"policy {runner.source} was lost: {runner.statistics.failure}"
            for runner in cluster.policies
            if runner.statistics.failure is not None
        ]
        if cluster.num_open:
            problems.append(f"engines have {cluster.num_open} operations open after all is quiet")
        problems += [
            f"policy {runner.source} has {runner.num_open} operations open after all is quiet"
            for runner in cluster.policies
            if runner.num_open
        ]
        if agents.failed > agents.served / 100:
            problems.append(f"{agents.failed} of {agents.served} requests failed")
        largest = sorted(after.items(), key=lambda entry: -entry[1])[:12]
        print("largest tables at the end: " + ", ".join(f"{n} {size:,}" for n, size in largest))
        print(
            f"{agents.served:,} requests served, {agents.failed} failed, {agents.abandoned:,} "
            "described and not sent, or left by their clients"
        )
        await cluster.stop_policies()
    return problems


def main() -> int:
    """Run it, and say what did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=24.0, help="virtual hours (24)")
    parser.add_argument("--seed", type=int, default=1)
    namespace = parser.parse_args()
    if namespace.hours < WARM_UP_H + 2 * QUIET_H:
        parser.error(f"--hours: expected at least {WARM_UP_H + 2 * QUIET_H:g}")
    clock = trio.testing.MockClock(autojump_threshold=0)
    problems = trio.run(soak, namespace.hours, namespace.seed, clock=clock)
    for problem in problems:
        print(f"does not hold: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
