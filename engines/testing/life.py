"""Rules on the life of a control: legal steps and one end, whatever comes between."""

import trio

from hear.engines.testing.bench import Call, bench
from hear.engines.testing.samples import ALL_KINDS, REQUEST_KINDS, sample, send_sample
from hear.engines.testing.setup import EngineFactory, RuleBook, require
from hear.messages import BoundWait, Hold, Prepare, Retain

DATA = "docs/design.md: the control plane stands beside the data path"
LIFE = "paper, section 3.3: acceptance is not completion"

rule = RuleBook()

# -- one end --------------------------------------------------------------------------------------


@rule("HEAR-LIFE-1", "Each control is answered, and ends once, by legal steps", LIFE)
async def each_control_ends_once(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await b.serve("before", context="c", num_blocks=2)
        async with b.busy():
            call = await b.launch(b.request("r", context="r"))
            operations = [send_sample(b, kind) for kind in ALL_KINDS]
            await b.until(
                lambda: all(o in b.heard for o in operations), "all controls are answered at once"
            )
        await b.result(call)
        for kind, operation in zip(ALL_KINDS, operations, strict=True):
            outcome = await b.end_of(operation)
            require(outcome.control == kind, f"the outcome names {kind}, not {outcome.control}")
            unsupported = outcome.status == "unsupported"
            require(unsupported != b.claims(kind), f"{kind}: as claimed, not {outcome}")


@rule("HEAR-LIFE-2", "A control for a request that has ended fails: request_gone", LIFE)
async def request_has_ended(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await b.serve("r", context="r")
        for kind in REQUEST_KINDS:
            operation = send_sample(b, kind)
            if b.claims(kind):
                await b.end_of(operation, "failed", "request_gone")
            else:
                await b.end_of(operation, "unsupported")


@rule(
    "HEAR-LIFE-3",
    "What is open for a request that goes away fails: request_gone",
    LIFE,
    needs=("bound_wait",),
)
async def request_goes_away(factory: EngineFactory) -> None:
    async with bench(factory) as b, b.busy():
        call = await b.launch(b.request("r", context="r"))
        guard = send_sample(b, "bound_wait")
        await b.accepted(guard)
        call.leave()
        await b.end_of(guard, "failed", "request_gone")
        await b.until(
            lambda: [o.status for o in b.requests["r"]] == ["accepted", "failed"],
            "the request's own outcome says so too",
        )


@rule("HEAR-LIFE-4", "A control whose request does not come fails by its deadline: deadline", LIFE)
async def request_does_not_come(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        deadline_s = trio.current_time() + b.engine.quiet_s
        operations = {
            kind: b.send(sample(b, kind, deadline_s), by=kind, request="r")
            for kind in REQUEST_KINDS
        }
        for kind, operation in operations.items():
            if not b.claims(kind):
                await b.end_of(operation, "unsupported")
                continue
            await b.accepted(operation)
            early = b.outcome(operation)
            require(early is None or trio.current_time() >= deadline_s, f"not yet: {early}")
            await b.end_of(operation, "failed", "deadline")
            require(trio.current_time() >= deadline_s, f"{kind} is kept until its deadline")
        await b.serve("r", context="r")
        require(not b.backend.applied, f"nothing is applied any more: {b.backend.applied}")


@rule("HEAR-LIFE-5", "A control that comes after its deadline is rejected: deadline_passed", LIFE)
async def deadline_has_passed(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await b.quiet()
        late_s = trio.current_time() - b.engine.quiet_s / 2
        for kind in ALL_KINDS:
            operation = b.send(sample(b, kind, late_s), request="r", context="c")
            if b.claims(kind):
                await b.end_of(operation, "rejected", "deadline_passed")
            else:
                await b.end_of(operation, "unsupported")


@rule(
    "HEAR-LIFE-6",
    "A control whose effect is not there by its deadline fails, and has no effect later",
    LIFE,
    needs=("prepare",),
    looks_at=("residency",),
)
async def effect_comes_too_late(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        made = b.request("x", context="x", num_blocks=b.quarter)
        await b.serve("x", context="x", num_blocks=b.quarter)
        blocks = set(made.prompt_hashes)
        await b.press(lambda: not blocks & b.resident("gpu"), "pressure evicts it from the GPU")
        if not blocks <= set().union(*(b.resident(t.name) for t in b.capabilities.tiers)):
            operation = b.send(Prepare(), context="x")
            await b.end_of(operation, "rejected")  # there is nowhere to bring it from
            return
        async with b.busy():
            deadline_s = trio.current_time() + b.engine.quiet_s
            operation = b.send(Prepare(deadline_s=deadline_s), context="x")
            outcome = await b.end_of(operation)
            if outcome.status == "completed":
                require(trio.current_time() <= deadline_s, "completed by its deadline, not after")
                return
            require(outcome.reason == "deadline", f"it fails: deadline, not {outcome}")
            require(trio.current_time() >= deadline_s, "it is tried until its deadline")
        await b.quiet()
        require(not blocks & b.resident("gpu"), "what has failed is not done after all")


@rule("HEAR-LIFE-7", "When the worker stops, what is open fails: engine_stopped", LIFE)
async def worker_stops(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        kept = [send_sample(b, kind) for kind in REQUEST_KINDS if b.claims(kind)]
        await b.serve("before", context="c")
        if b.claims("retain"):
            kept.append(b.send(Retain(lease_s=b.engine.patience_s), context="c"))
        for operation in kept:
            await b.accepted(operation)
        await b.stop_worker()
        for operation in kept:
            await b.end_of(operation, "failed", "engine_stopped")


@rule(
    "HEAR-LIFE-8",
    "When the engine crashes, what is open fails: engine_restarted; its requests too",
    LIFE,
    crashes=True,
)
async def engine_crashes(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        kept = [send_sample(b, kind) for kind in REQUEST_KINDS if b.claims(kind)]
        await b.serve("before", context="c")
        if b.claims("retain"):
            kept.append(b.send(Retain(lease_s=b.engine.patience_s), context="c"))
        for operation in kept:
            await b.accepted(operation)
        long = b.engine.long_output_tokens
        running = await b.launch(b.request("running", context="a", output_tokens=long))
        waiting = await b.launch(b.request("waiting", context="b"))
        await b.quiet()
        epoch = b.worker.epoch
        await b.crash()
        for operation in kept:
            await b.end_of(operation, "failed", "engine_restarted")
        for call in (running, waiting):
            id = call.request.id
            result = await b.result(call)
            require(result.outcome.status == "failed", f"{id} fails, not {result.outcome}")
            ends = [o for o in b.requests[id] if o.status != "accepted"]
            require(
                [(o.status, o.reason) for o in ends] == [("failed", "engine_restarted")],
                f"the outcome of {id} is failed: engine_restarted, not {ends}",
            )
        epochs = [e.epoch for e in b.published if e.source == b.name]
        require(epochs == sorted(epochs), "the epoch never goes back")
        require(epochs[-1] == epoch + 1, f"a new epoch begins: {epoch + 1}, not {epochs[-1]}")


@rule("HEAR-LIFE-9", "After a crash it serves again, and what it says adds up", LIFE, crashes=True)
async def engine_comes_back(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await b.serve("before", context="c", num_blocks=b.quarter)
        await b.crash()
        await b.until(lambda: b.views()[b.name].residency_known, "residency is known anew")
        there = {t.name: b.resident(t.name) for t in b.capabilities.tiers}
        view = b.views()[b.name]
        require(view.epoch == b.worker.epoch, f"readers know of epoch {b.worker.epoch}")
        said = {tier: view.residency.num_blocks(tier) for tier in there}
        counts = {tier: len(blocks) for tier, blocks in there.items()}
        require(said == counts, f"it is said to hold {said}, and holds {counts}")
        during = await b.launch(b.request("during", context="d"))
        require(
            (await b.result(during)).outcome.status == "completed", "what came while it was down"
        )
        ends = [o.status for o in b.requests["during"]]
        require(ends == ["accepted", "completed"], f"and is told of, not {ends}")
        await b.serve("after", context="c", num_blocks=b.quarter)
        for kind in ("prioritise", "bound_wait", "retain"):
            operation = send_sample(b, kind, "a request that never comes")
            if b.claims(kind):
                await b.accepted(operation)


@rule(
    "HEAR-LIFE-10",
    "A bound ends with its request, and is not that of a later one with the same id",
    LIFE,
    needs=("bound_wait", "hold"),
)
async def id_is_used_again(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        bound = BoundWait(max_wait_s=4 * b.engine.quiet_s, force="requirement")
        guard = b.send(bound, by="guard", request="r")
        await b.serve("r", context="r")
        await b.end_of(guard, "completed")
        async with b.busy():
            again = await b.launch(b.request("r", context="s"))
            sent_s, hold_s = trio.current_time(), 8 * b.engine.quiet_s
            await b.end_of(b.send(Hold(hold_s=hold_s), by="holds", request="r"), "completed")
        held_s = (await b.result(again)).started_s - sent_s
        require(held_s >= hold_s, f"nothing ends its hold of {hold_s} s after {held_s} s")


@rule("HEAR-DATA-1", "When the bus is lost, requests are served as before", DATA)
async def bus_is_lost(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        first = b.request("before", context="c", num_blocks=2, output_tokens=3)
        before = await b.result(await b.launch(first))
        during = Call(b.request("during", context="c", output_tokens=3))
        after = Call(b.request("after", context="c", num_blocks=2, output_tokens=3))
        b.start(during)
        await b.lose_bus()
        b.start(after)
        for call in (during, after):
            result = await b.result(call)
            require(result.outcome.status == "completed", f"it is served, not {result.outcome}")
        was = b.engine.output_of(first, before)
        now = b.engine.output_of(after.request, after.ended)
        require(was == now, f"the output is {was}, not {now}")


@rule("HEAR-REQUEST-1", "Each request is accepted, and ends once, as its client is told", LIFE)
async def each_request_ends_once(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        calls = [await b.launch(b.request(id, context=id, output_tokens=3)) for id in "abc"]
        long = b.request("long", context="d", output_tokens=b.engine.long_output_tokens)
        gone = await b.launch(long)
        for call in calls:
            await b.result(call)
        gone.leave()
        expected = {"a": "completed", "b": "completed", "c": "completed", "long": "failed"}
        await b.until(
            lambda: all(len(b.requests.get(id, ())) > 1 for id in expected), "all ends are told"
        )
        await b.quiet()
        for id, end in expected.items():
            said = [outcome.status for outcome in b.requests[id]]
            require(said == ["accepted", end], f"{id} is accepted, and then {end}, not {said}")
        for call in calls:
            seen, told = call.ended.outcome, b.requests[call.request.id][-1]
            require(
                (seen.status, seen.output_tokens) == (told.status, told.output_tokens),
                f"its client is told {seen}, and the bus {told}",
            )
