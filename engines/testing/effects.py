"""Rules on effects: completed is said of a control when what it asked for is there, and not before.

A probe looks at the engine in the very moment in which the outcome is published.
"""

import trio

from hear.blocks import pack
from hear.engines.testing.bench import Bench, bench
from hear.engines.testing.setup import EngineFactory, RuleBook, require
from hear.messages import (
    Admit,
    BoundWait,
    Cancel,
    Configure,
    Hold,
    Place,
    Prepare,
    Prioritise,
    Retain,
    Route,
    Withdraw,
)

EFFECT = "paper, section 3.3: completed only when the effect is there"

rule = RuleBook()


@rule(
    "HEAR-EFFECT-1", "Prioritise: the queue holds the request there", EFFECT, needs=("prioritise",)
)
async def prioritise(factory: EngineFactory) -> None:
    async with bench(factory) as b:

        def probe() -> None:
            queue = b.waiting()
            require(list(queue) == ["b", "a", "c"], f"the queue is b, a, c, not {list(queue)}")
            require(queue["b"].priority == -5, f"b has priority -5, not {queue['b'].priority}")

        async with b.busy():
            calls = [await b.launch(b.request(id, context=id)) for id in "abc"]
            order = list(b.waiting())
            require(order == ["a", "b", "c"], f"without controls it is first come, not {order}")
            await b.end_of(b.send(Prioritise(priority=7), request="c"), "completed")
            sent = b.send(Prioritise(priority=-5), request="b", probe=probe)
            await b.end_of(sent, "completed")
        order = await b.order_of(calls)
        require(order == ["b", "a", "c"], f"they start as b, a, c, not {order}")


@rule(
    "HEAR-EFFECT-2",
    "BoundWait: after its bound no later one passes; completed as it leaves the queue",
    EFFECT,
    needs=("bound_wait",),
)
async def bound_wait(factory: EngineFactory) -> None:
    async with bench(factory) as b:

        def probe() -> None:
            require("a" not in b.waiting(), "the guarded request has left the queue")

        async with b.busy():
            calls = [await b.launch(b.request("a", context="a"))]
            bound = BoundWait(max_wait_s=b.engine.quiet_s, force="requirement")
            guard = b.send(bound, by="guard", request="a", probe=probe)
            await b.accepted(guard)
            require(not b.waiting()["a"].protected, "it is not protected before its bound")
            for id in ("b", "c"):
                calls.append(await b.launch(b.request(id, context=id)))
                if b.has("prioritise"):
                    await b.end_of(b.send(Prioritise(priority=-9), request=id), "completed")
            await b.quiet()
            await b.until(lambda: b.waiting()["a"].protected, "it is protected after its bound")
            require(b.outcome(guard) is None, "it has not left the queue, so this is not the end")
            order = list(b.waiting())
            require(order[0] == "a", f"it is first in the queue, which is {order}")
        await b.end_of(guard, "completed")
        order = await b.order_of(calls)
        require(order[0] == "a", f"it starts first, not {order}")


@rule("HEAR-EFFECT-3", "Hold: the request does not start, and others do", EFFECT, needs=("hold",))
async def hold(factory: EngineFactory) -> None:
    async with bench(factory) as b:

        def probe() -> None:
            require(b.waiting()["a"].held, "the queue says that it is held")

        async with b.busy():
            call = await b.launch(b.request("a", context="a"))
            held_from = trio.current_time()
            control = Hold(hold_s=4 * b.engine.quiet_s)
            await b.end_of(b.send(control, request="a", probe=probe), "completed")
        await b.serve("b", context="b")
        require(call.result is None and "a" in b.waiting(), "it waits while a later one is served")
        result = await b.result(call)
        held = result.started_s - held_from
        require(held >= control.hold_s, f"it is held for {control.hold_s} s, not {held} s")
        require(
            held <= control.hold_s + b.engine.quiet_s, f"and no longer: {held} s, with nobody else"
        )


@rule("HEAR-EFFECT-4", "Admit: the request can be scheduled", EFFECT, needs=("hold", "admit"))
async def admit(factory: EngineFactory) -> None:
    async with bench(factory) as b:

        def probe() -> None:
            waiting = b.waiting().get("a")
            require(waiting is None or not waiting.held, "it is not held any more")

        async with b.busy():
            call = await b.launch(b.request("a", context="a"))
            held = b.send(Hold(hold_s=10 * b.engine.patience_s), request="a")
            await b.end_of(held, "completed")
        await b.quiet()
        require("a" in b.waiting(), "it is held on an idle engine")
        await b.end_of(b.send(Admit(), request="a", probe=probe), "completed")
        await b.result(call)


async def _off_the_gpu(b: Bench) -> list[int]:
    """A context ``x`` that was served, and pushed from the GPU by others; returns its blocks."""
    made = b.request("x1", context="x", num_blocks=b.quarter)
    await b.serve("x1", context="x", num_blocks=b.quarter)
    blocks = list(made.prompt_hashes)
    require(set(blocks) <= b.resident("gpu"), "what was just served is on the GPU")
    await b.press(lambda: not set(blocks) & b.resident("gpu"), "pressure evicts it from the GPU")
    await b.quiet()
    return blocks


@rule(
    "HEAR-EFFECT-5",
    "Prepare: the blocks are on the GPU, or it is said that they cannot be",
    EFFECT,
    needs=("prepare",),
)
async def prepare(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        blocks = await _off_the_gpu(b)

        def probe() -> None:
            missing = len(set(blocks) - b.resident("gpu"))
            require(not missing, f"all blocks are on the GPU, {missing} are missing")

        below = set().union(*(b.resident(t.name) for t in b.capabilities.tiers))
        outcome = await b.end_of(b.send(Prepare(), context="x", probe=probe))
        if not set(blocks) <= below:
            require(outcome.status == "rejected", f"there is nothing to bring, so not {outcome}")
            return
        require(outcome.status == "completed", f"a lower tier has the blocks, so not {outcome}")
        result = await b.serve("x2", context="x", num_blocks=b.quarter)
        expected = len(blocks) * b.capabilities.block_size
        reused = result.outcome.reused_tokens.get("gpu", 0)
        require(reused == expected, f"the next one reuses {expected} tokens, not {reused}")


@rule(
    "HEAR-EFFECT-6",
    "Prepare with compute: blocks that were nowhere are there, or it is rejected",
    EFFECT,
    needs=("prepare",),
)
async def prepare_computes(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        for tier in ("gpu", "cpu"):
            made = b.request(tier, context=tier, num_blocks=b.quarter)
            hashes = pack(made.prompt_hashes)
            wanted = set(made.prompt_hashes)

            def probe(tier: str = tier, wanted: set[int] = wanted) -> None:
                missing = len(wanted - b.resident(tier))
                require(not missing, f"all are on the {tier} tier, {missing} are missing")

            may = Prepare(tier=tier, prefix_hashes=hashes, compute=True)
            outcome = await b.end_of(b.send(may, context=tier, probe=probe))
            require(outcome.status in ("completed", "rejected"), f"one or the other: {outcome}")
        made = b.request("never", context="never", num_blocks=2)
        may_not = Prepare(prefix_hashes=pack(made.prompt_hashes))
        await b.end_of(b.send(may_not, context="never"), "rejected")


@rule(
    "HEAR-EFFECT-7",
    "Prepare and Place on a lower tier: the blocks are there, and Place takes them from the GPU",
    EFFECT,
    needs=("prepare", "place"),
)
async def lower_tier(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        made = b.request("x1", context="x", num_blocks=b.quarter)
        blocks = set(made.prompt_hashes)
        await b.serve("x1", context="x", num_blocks=b.quarter)

        def copied() -> None:
            missing = len(blocks - b.resident("cpu"))
            require(not missing, f"all blocks are on the CPU, {missing} are missing")

        def moved() -> None:
            copied()
            left = len(blocks & b.resident("gpu"))
            require(not left, f"none of them is on the GPU, {left} are")

        outcome = await b.end_of(b.send(Prepare(tier="cpu"), context="x", probe=copied))
        require(outcome.status in ("completed", "rejected"), f"one or the other: {outcome}")
        if not b.tier_size("cpu"):
            require(outcome.status == "rejected", f"there is no such tier, so not {outcome}")
            await b.end_of(b.send(Place(tier="cpu"), context="x"), "rejected")
            return
        await b.end_of(b.send(Place(tier="cpu"), context="x", probe=moved), "completed")
        result = await b.serve("x2", context="x", num_blocks=b.quarter)
        expected = len(blocks) * b.capabilities.block_size
        reused = result.outcome.reused_tokens.get("cpu", 0)
        require(reused == expected, f"the next one reuses {expected} from there, not {reused}")


@rule(
    "HEAR-EFFECT-8", "Route: completed by a target, rejected by another", EFFECT, needs=("route",)
)
async def route(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        async with b.busy():
            call = await b.launch(b.request("r", context="r"))
            here = b.send(Route(targets=("elsewhere", b.name)), by="one", request="r")
            await b.end_of(here, "completed")
            there = b.send(Route(targets=("elsewhere",)), by="two", request="r")
            await b.end_of(there, "rejected")
        await b.result(call)


@rule(
    "HEAR-EFFECT-9",
    "Configure: the request runs in that mode, and its outcome says so",
    EFFECT,
    needs=("configure",),
)
async def configure(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        require(bool(b.capabilities.modes), "an engine that can be configured names its modes")
        for mode in b.capabilities.modes:
            id = f"r-{mode}"
            async with b.busy():
                call = await b.launch(b.request(id, context="c", num_blocks=2))
                control = Configure(modes=("no-such-mode", mode))
                await b.end_of(b.send(control, request=id), "completed")
            result = await b.result(call)
            require(result.outcome.mode == mode, f"it runs in {mode}, not {result.outcome.mode}")


@rule(
    "HEAR-EFFECT-10",
    "Cancel: the operation fails as cancelled, and its effect goes",
    EFFECT,
    needs=("bound_wait",),
)
async def cancel(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        async with b.busy():
            calls = [await b.launch(b.request(id, context=id)) for id in "ab"]
            guard = b.send(BoundWait(max_wait_s=0.0, force="requirement"), request="b")
            await b.accepted(guard)
            await b.until(lambda: list(b.waiting()) == ["b", "a"], "b is protected, and goes first")

            def probe() -> None:
                queue = b.waiting()
                require(list(queue) == ["a", "b"], f"the queue is a, b, not {list(queue)}")
                require(not queue["b"].protected, "b is not protected any more")

            undo = b.send(Cancel(target=guard), request="b", probe=probe)
            await b.end_of(undo, "completed")
            await b.end_of(guard, "failed", "cancelled")
        order = await b.order_of(calls)
        require(order == ["a", "b"], f"they start as they came, not as {order}")
        await b.end_of(b.send(Cancel(target=guard)), "rejected", "already_terminal")


@rule(
    "HEAR-EFFECT-11",
    "Cancel: nobody ends what another has asked for",
    EFFECT,
    needs=("retain",),
)
async def cancel_of_another(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await b.serve("x", context="x")
        lease = b.send(Retain(lease_s=2 * b.engine.quiet_s), by="one", context="x")
        await b.accepted(lease)
        await b.end_of(b.send(Cancel(target=lease), by="two"), "rejected", "not_yours")
        require(b.outcome(lease) is None, "the lease goes on")
        await b.end_of(lease, "completed")


@rule(
    "HEAR-EFFECT-12",
    "BoundWait: of a request that runs it is completed, and can be taken back",
    EFFECT,
    needs=("bound_wait",),
)
async def bound_of_one_that_runs(factory: EngineFactory) -> None:
    async with bench(factory) as b, b.busy() as running:
        bound = BoundWait(max_wait_s=b.engine.quiet_s, force="requirement")
        guard = b.send(bound, by="guard", request=running.request.id)
        await b.end_of(guard, "completed")
        late = b.send(Cancel(target=guard), by="guard", request=running.request.id)
        await b.end_of(late, "rejected", "already_terminal")
        await b.end_of(b.send(Withdraw(), by="guard"), "completed")


@rule(
    "HEAR-EFFECT-13",
    "Prepare: completed when the step that computes the blocks has ended, and not before",
    EFFECT,
    needs=("prepare",),
)
async def prepared_by_another(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        completed_s: list[float] = []
        call = await b.launch(b.request("r", context="c", num_blocks=3))
        await b.until(lambda: "r" not in b.waiting(), "the request starts")
        await b.end_of(
            b.send(Prepare(), context="c", probe=lambda: completed_s.append(trio.current_time()))
        )
        result = await b.result(call)
        middle_s = (result.sent_s + result.first_token_s) / 2  # clients measure no better
        require(
            not completed_s or completed_s[0] >= middle_s,
            f"its prefill ends at {result.first_token_s} s, so the blocks are not there at "
            f"{completed_s} s",
        )
