"""A day of a cluster in virtual time: what is kept must not grow, and no policy may be lost.

    python -m benchmarks.soak --hours 24

Two simulated engines behind a pool, under Cache-Aware, Guard-40 and Session-Aware, serve the agents
of ``benchmarks.day`` on a bus that loses messages, through every fault that is there.

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
from typing import Any, Final

import trio
import trio.testing

from benchmarks.day import BLOCK, PROFILE, Day, FaultyBus
from hear.app.cluster import running
from hear.kept import Kept

POLICIES: Final = "cache-aware+guard:40+session-aware"
WARM_UP_H: Final = 2.0
QUIET_H: Final = 2.0
SESSIONS_PER_HOUR: Final = 180
SPARE: Final = 64
GROWTH: Final = 1.25

BOUNDED: Final = {
    "EngineOperations._ended": "ends of operations, the last 65,536",
    "EngineOperations._versions": "versions of contexts, the last 65,536",
    "HarnessView._seen": "ids of messages, the last 65,536",
    "HarnessView._completed": "requests that have completed, the last 100,000",
    "GapDetector._heard": "channels of messages",
    "EvictionOrder._plain": "blocks of a cache, which has as many as its engine holds",
    "EvictionOrder._ranked": "blocks of a cache",
    "EvictionOrder._heap": "blocks of a cache",
    "KvCache._parents": "blocks of a cache",
    "ResidencyDirectory._children": "blocks of a cache",
    "ResidencyDirectory._unreachable": "blocks of a cache",
    "Preferences._heap": "as many as a policy has open, and 1,024",
    "EngineWorker._sessions": "tenants of an engine, at most 256",
    "Arbiter.ranks": "those of the operator, for each tenant of an engine",
    "Preferences._ranks": "those of the operator, for each tenant of an engine",
    "Tenants._names": "tenants that an engine has had, at most 4,096",
    "Tenants._numbers": "tenants that an engine has had, at most 4,096",
    "EngineViews._views": "engines that were heard of, the last 4,096",
    "EngineView._asked_s": "engines that were heard of",
    "EngineView._heard_s": "engines that were heard of",
    "ResidencyDirectory._tiers": "engines that were heard of",
    "SenderOperations._epochs": "engines that were heard of, the last 4,096",
    "PolicyRunner._engines": "engines that were heard of, the last 4,096",
    "MemoryBus._providers": "five a tenant of an engine, which has at most 256",
    "Sequencer._seqs": "what a source says to a tenant of an engine, which has at most 256",
    "ContextView.gaps_s": "pauses, at most 1,000 of a context that a view has",
    "HarnessView.contexts": "contexts of which something was heard within six hours",
    "HarnessView._closed": "contexts that were closed of late",
    "ServedContext.blocks": "contexts that an engine remembers",
    "EngineOperations._gone": "requests that ended within 5 s before the last one",
    "SenderOperations._timers": "as many as it has operations open, and 1,024",
    "Contexts._served": "contexts that an engine remembers, the last 100,000",
    "SharedPrefixes._rows": "contexts that an engine remembers",
    "SharedPrefixes._beginning": "contexts that an engine remembers",
}
"""Tables that fill up to a bound of their own, and what it is. A day may not reach it."""


def tables() -> Counter[str]:
    """How many entries each table of HEAR's objects has, over all objects of its class."""
    sizes: Counter[str] = Counter()
    for found in gc.get_objects():
        kind = type(found)
        if not str(kind.__module__).startswith("hear."):  # of some it is no text
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


async def soak(hours: float, seed: int, sessions_per_hour: float = SESSIONS_PER_HOUR) -> list[str]:
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

    bus = FaultyBus(seed)
    async with running(
        engine="simulated", profile=PROFILE, block_size=BLOCK, policy=POLICIES, engines=2, bus=bus
    ) as cluster:
        agents = Day(cluster, bus, seed, sessions_per_hour)
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
        faults = ", ".join(f"{name} {count}" for name, count in agents.faults.items())
        print(f"{bus.lost:,} messages lost, {bus.repeated:,} repeated; {faults}")
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
