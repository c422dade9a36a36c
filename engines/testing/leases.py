"""Rules on retention: a lease that ranks blocks under pressure, ends, and never blocks service."""

import math
from dataclasses import replace

import trio

from hear.engines.testing.bench import Bench, bench
from hear.engines.testing.setup import EngineFactory, RuleBook, require
from hear.messages import Cancel, Release, Retain

LEASE = "paper, section 4.2 and appendix A.2; docs/design.md: retention is a lease"
NEEDS = ("retain",)

rule = RuleBook()


async def _serve(b: Bench, context: str, *, num_blocks: int | None = None) -> set[int]:
    """Serve a context; returns its blocks."""
    id = f"{context}-{len(b.requests)}"
    size = num_blocks or b.quarter
    await b.serve(id, context=context, num_blocks=size)
    return set(b.request(id, context=context, num_blocks=size).prompt_hashes)


async def _lease(
    b: Bench, context: str, *, lease_s: float | None = None, score: float = 1.0
) -> str:
    if lease_s is None:  # for as long as the rule may take
        lease_s = min(10 * b.engine.patience_s, b.capabilities.max_lease_s or math.inf)
    operation = b.send(Retain(lease_s=lease_s, score=score), context=context)
    await b.accepted(operation)
    return operation


async def _first_to_go(b: Bench, older: set[int], newer: set[int]) -> str:
    """Which of two contexts pressure takes from the GPU first."""

    def gone(blocks: set[int]) -> bool:
        return not blocks <= b.resident("gpu")

    await b.press(lambda: gone(older) or gone(newer), "pressure evicts one of them")
    if gone(older) and gone(newer):
        return "both"
    return "older" if gone(older) else "newer"


@rule("HEAR-LEASE-1", "A leased context outlasts one without a lease", LEASE, needs=NEEDS)
async def leased_outlasts(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        older = await _serve(b, "older")
        newer = await _serve(b, "newer")
        first = await _first_to_go(b, older, newer)
        require(first == "older", f"without a lease the older one goes first, not {first}")
    async with bench(factory) as b:
        older = await _serve(b, "older")
        lease = await _lease(b, "older")
        newer = await _serve(b, "newer")
        await b.press(lambda: not newer & b.resident("gpu"), "all of the newer one goes")
        lost = len(older - b.resident("gpu"))
        require(not lost, f"the leased one is still there, whole; {lost} blocks are lost")
        require(b.outcome(lease) is None, "and its lease goes on")


@rule(
    "HEAR-LEASE-2", "Of two leased contexts the one of lower score goes first", LEASE, needs=NEEDS
)
async def score_ranks(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        older = await _serve(b, "older")
        newer = await _serve(b, "newer")
        await _lease(b, "older", score=1.0)
        await _lease(b, "newer", score=0.001)
        filler = {name: await _serve(b, name) for name in ("p", "q", "s")}
        for name in filler:
            await _lease(b, name)
        first = await _first_to_go(b, older, newer)
        require(first == "newer", f"the one of score 0.001 goes before that of 1, not {first}")


@rule("HEAR-LEASE-3", "A lease ends by itself, completed, and no longer keeps", LEASE, needs=NEEDS)
async def lease_expires(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        older = await _serve(b, "older")
        newer = await _serve(b, "newer")
        begun_s = trio.current_time()
        lease = await _lease(b, "older", lease_s=b.engine.quiet_s)
        await b.end_of(lease, "completed")
        lasted = trio.current_time() - begun_s
        require(lasted >= b.engine.quiet_s, f"it lasts {b.engine.quiet_s} s, not {lasted} s")
        require(older <= b.resident("gpu"), "its end alone evicts nothing")
        first = await _first_to_go(b, older, newer)
        require(first == "older", f"after it the context goes first, not {first}")


@rule("HEAR-LEASE-4", "A lease that is asked for anew is renewed", LEASE, needs=NEEDS)
async def lease_is_renewed(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await _serve(b, "c")
        one = await _lease(b, "c", lease_s=2 * b.engine.quiet_s)
        begun_s = trio.current_time()
        two = await _lease(b, "c", lease_s=3 * b.engine.quiet_s)
        await b.end_of(one, "completed", "renewed")
        require(trio.current_time() < begun_s + b.engine.quiet_s, "the first ends at once")
        await b.end_of(two, "completed")
        lasted = trio.current_time() - begun_s
        require(lasted >= 3 * b.engine.quiet_s, f"the second lasts its time, not {lasted} s")


@rule("HEAR-LEASE-5", "Under pressure a lease yields, and its outcome says so", LEASE, needs=NEEDS)
async def lease_yields(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        leases = []
        room = sum(tier.num_blocks for tier in b.capabilities.tiers)
        for number in range(2 * room // b.quarter + 2):
            context = f"c{number}"
            blocks = await _serve(b, context)
            require(blocks <= b.resident("gpu"), "leases do not keep a new context out")
            leases.append(await _lease(b, context))
        await b.end_of(leases[0])  # of equal score the oldest yields first
        ended = [outcome for lease in leases if (outcome := b.outcome(lease)) is not None]
        for outcome in ended:
            require(
                (outcome.status, outcome.reason) == ("failed", "yielded"),
                f"those that gave way failed: yielded, not {outcome}",
            )
        require(b.outcome(leases[-1]) is None, "the newest does not yield")


@rule(
    "HEAR-LEASE-6", "Leases on everything do not block a request that needs it", LEASE, needs=NEEDS
)
async def leases_do_not_block(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        for number in range(4):
            await _serve(b, f"c{number}")
            await _lease(b, f"c{number}")
        await _serve(b, "all", num_blocks=b.tier_size("gpu") - 2)


@rule("HEAR-LEASE-7", "A lease longer than the engine grants is rejected", LEASE, needs=NEEDS)
async def lease_has_a_limit(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await _serve(b, "c")
        limit = b.capabilities.max_lease_s
        require(limit > 0, "an engine that retains says for how long at most")
        await b.end_of(b.send(Retain(lease_s=2 * limit), context="c"), "rejected")
        await _lease(b, "c", lease_s=limit)


@rule(
    "HEAR-LEASE-8",
    "Since a lease yields, a requirement to retain is rejected or names its fallback",
    LEASE,
    needs=NEEDS,
)
async def required_lease(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await _serve(b, "c")
        required = Retain(lease_s=b.engine.quiet_s, force="requirement")
        await b.end_of(b.send(required, context="c"), "rejected")
        with_fallback = Retain(
            lease_s=b.engine.quiet_s, force="requirement", fallback=("preference",)
        )
        outcome = await b.end_of(b.send(with_fallback, context="c"))
        met = outcome.status == "completed" and outcome.fallback == "preference"
        require(met or outcome.status == "rejected", f"by the fallback or not at all: {outcome}")


@rule(
    "HEAR-LEASE-9",
    "Release: the lease ends, and the blocks of the context go first",
    LEASE,
    needs=("retain", "release"),
)
async def release(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        older = await _serve(b, "older")
        newer = await _serve(b, "newer")
        lease = await _lease(b, "newer")
        await b.end_of(b.send(Release(), context="newer"), "completed")
        await b.end_of(lease, "completed")
        require(newer <= b.resident("gpu"), "a release alone evicts nothing")
        first = await _first_to_go(b, older, newer)
        require(first == "newer", f"what was released goes first, not {first}")
        await b.end_of(b.send(Release(), context="a context that never was"), "rejected")


@rule("HEAR-LEASE-10", "A lease that is cancelled keeps nothing", LEASE, needs=NEEDS)
async def lease_is_cancelled(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        older = await _serve(b, "older")
        lease = await _lease(b, "older")
        newer = await _serve(b, "newer")
        await b.end_of(b.send(Cancel(target=lease)), "completed")
        await b.end_of(lease, "failed", "cancelled")
        first = await _first_to_go(b, older, newer)
        require(first == "older", f"it goes as without a lease, older first, not {first}")


@rule("HEAR-LEASE-11", "Retaining what the engine does not know is rejected", LEASE, needs=NEEDS)
async def unknown_context(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        unknown = b.send(Retain(lease_s=b.engine.quiet_s), context="a context that never was")
        await b.end_of(unknown, "rejected")


@rule(
    "HEAR-LEASE-12",
    "Release of a context that is served: completed when its blocks have come free",
    LEASE,
    needs=("release",),
)
async def release_of_what_runs(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        async with b.busy() as running:
            sent = b.send(Release(), context=running.request.context)
            await b.accepted(sent)
            await b.quiet()
            require(b.outcome(sent) is None, "it is not released while its request runs")
        await b.end_of(sent, "completed")


@rule(
    "HEAR-LEASE-13",
    "Release of a context whose request waits: completed when that has been served",
    LEASE,
    needs=("release",),
)
async def release_of_what_waits(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        async with b.busy():
            waiting = await b.launch(b.request("r", context="c", num_blocks=2))
            await b.quiet()
            sent = b.send(Release(), context="c")
            await b.accepted(sent)
            await b.quiet()
            require(waiting.result is None, "all others wait while the engine is busy")
            require(b.outcome(sent) is None, "it is not released before its request was served")
        await b.result(waiting)
        await b.end_of(sent, "completed")


@rule(
    "HEAR-LEASE-14",
    "A lease on a context without a full block ends at once, or as its request does",
    LEASE,
    needs=NEEDS,
)
async def lease_on_no_blocks(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        lease_s = min(10 * b.engine.patience_s, b.capabilities.max_lease_s or math.inf)
        async with b.busy():
            waiting = await b.launch(b.request("r", context="short", num_blocks=0))
            early = b.send(Retain(lease_s=lease_s), context="short")
            await b.accepted(early)
            await b.quiet()
            require(b.outcome(early) is None, "its request may bring it blocks")
        await b.result(waiting)
        await b.end_of(early, "completed", "no_blocks")
        late = b.send(Retain(lease_s=lease_s), context="short")
        await b.end_of(late, "completed", "no_blocks")


@rule(
    "HEAR-LEASE-15",
    "Release leaves the blocks with which another context begins, too, where use has put them",
    LEASE,
    needs=("release",),
)
async def release_of_what_is_shared(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        shared = await _serve(b, "one")
        older = await _serve(b, "older")
        same = replace(b.request("other-0", context="one", num_blocks=b.quarter), context="other")
        await b.result(await b.launch(same))
        await b.end_of(b.send(Release(), context="one"), "completed")
        first = await _first_to_go(b, older, shared)
        require(first == "older", f"what was used last goes last, not {first} first")
