"""Rules on what words bind: intent asks for nothing, a preference yields, outputs stay the same."""

import msgspec
import trio

from hear.blocks import pack
from hear.engines.testing.bench import Bench, bench
from hear.engines.testing.setup import EngineFactory, RuleBook, require
from hear.messages import (
    BoundWait,
    Configure,
    ContextClosed,
    ContextForked,
    ContextOpened,
    ContextPaused,
    ContextResumed,
    ContextVersioned,
    Control,
    Hold,
    Key,
    Message,
    Place,
    Prepare,
    Prioritise,
    RequestDescribed,
    RequestReadinessChanged,
    Retain,
    ReuseExpected,
    Route,
    WorkflowDescribed,
)

INTENT = "paper, section 3.3: intent is not control"
FORCE = "paper, section 3.3: preference is not requirement"
SAME = "paper, section 3.3: the semantics of the workflow are untouched"

rule = RuleBook()


# -- intent is not control ------------------------------------------------------------------------


def _say_all(b: Bench, request: str, context: str, num_blocks: int) -> None:
    """Say everything about a request and its context that a harness could."""
    hashes = pack(b.request(request, context=context, num_blocks=num_blocks).prompt_hashes)
    key = Key(request=request, context=context, engine=b.name, workflow="workflow")
    described = RequestDescribed(
        role="judge",
        ready=False,
        depends_on=("a request that never comes",),
        prompt_tokens=b.capabilities.block_size * num_blocks,
        block_size=b.capabilities.block_size,
        prefix_hashes=hashes,
        max_output_tokens=1,
    )
    messages: tuple[Message, ...] = (
        WorkflowDescribed(roles=("judge",)),
        ContextOpened(role="judge"),
        described,
        RequestReadinessChanged(ready=False),
        ContextVersioned(prefix_hashes=hashes, block_size=b.capabilities.block_size),
        ContextForked(parent="another"),
        ContextPaused(cause="tool", expected_pause_s=0.0),
        ContextResumed(),
        ReuseExpected(basis="known", probability=1.0, horizon_s=3600.0),
        ReuseExpected(basis="predicted", probability=0.5),
        ContextClosed(),
    )
    for message in messages:
        b.say(message, key=key)


async def _play(factory: EngineFactory, *, intent: bool) -> tuple[object, ...]:
    """Contexts at once, then some again, then others; returns all that can be seen of it."""
    async with bench(factory) as b:
        requests, calls = [], []
        for number in range(6):
            request = b.request(f"r{number}", context=f"c{number}", num_blocks=2, output_tokens=2)
            if intent:
                _say_all(b, request.id, f"c{number}", 2)
            requests.append(request)
            calls.append(await b.launch(request))
        results = [await b.result(call) for call in calls]
        for number in range(3):
            if intent:
                _say_all(b, f"again{number}", f"c{number}", 2)
            await b.serve(f"again{number}", context=f"c{number}", num_blocks=2)
        if intent:
            _say_all(b, "r0", "c0", 2)
        for number in range(4):
            await b.serve(f"p{number}", context=f"p{number}", num_blocks=b.quarter)
        await b.quiet()
        require(not b.backend.applied, f"nothing is applied: {b.backend.applied}")
        require(not b.heard, f"no operation has an outcome: {b.heard}")
        order = await b.order_of(calls)
        outputs = [b.engine.output_of(r, x) for r, x in zip(requests, results, strict=True)]
        tiers = {tier.name: b.resident(tier.name) for tier in b.capabilities.tiers}
        return order, outputs, tiers


@rule("HEAR-INTENT-1", "No intent message changes order, outputs or residency", INTENT)
async def intent_changes_nothing(factory: EngineFactory) -> None:
    without = await _play(factory, intent=False)
    with_it = await _play(factory, intent=True)
    for what, expected, seen in zip(
        ("order", "outputs", "residency"), without, with_it, strict=True
    ):
        require(expected == seen, f"{what} without intent is {expected}, and with it {seen}")


@rule("HEAR-INTENT-2", "A request that was described as not ready runs when it is sent", INTENT)
async def intent_withholds_nothing(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        _say_all(b, "r", "c", 2)
        await b.serve("r", context="c", num_blocks=2)


@rule(
    "HEAR-INTENT-3",
    "A reuse that is expected, and not asked for, keeps nothing",
    INTENT,
    looks_at=("residency",),
)
async def intent_keeps_nothing(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        made = b.request("x", context="x", num_blocks=b.quarter)
        await b.serve("x", context="x", num_blocks=b.quarter)
        _say_all(b, "x", "x", b.quarter)
        kept = set(made.prompt_hashes)
        await b.press(lambda: not kept & b.resident("gpu"), "the blocks go like any others")


# -- preference is not requirement ----------------------------------------------------------------


@rule(
    "HEAR-FORCE-1",
    "A preferred order does not pass a required bound on waiting",
    FORCE,
    needs=("prioritise", "bound_wait"),
)
async def order_yields_to_guard(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        async with b.busy():
            first = await b.launch(b.request("first", context="first"))
            later = await b.launch(b.request("later", context="later"))
            guard = b.send(
                BoundWait(max_wait_s=0.0, force="requirement"), by="guard", request="first"
            )
            await b.accepted(guard)
            await b.end_of(b.send(Prioritise(priority=-1_000_000), request="later"), "completed")
            await b.quiet()
        one, two = await b.result(first), await b.result(later)
        require(one.first_token_s < two.first_token_s, "the guarded request goes first")
        await b.end_of(guard, "completed")


@rule(
    "HEAR-FORCE-2",
    "A preferred hold does not outlast a required bound on waiting",
    FORCE,
    needs=("hold", "bound_wait"),
)
async def hold_yields_to_guard(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        wait_s = 2 * b.engine.quiet_s
        async with b.busy():
            call = await b.launch(b.request("r", context="c"))
            hold = Hold(hold_s=10 * b.engine.patience_s)
            await b.end_of(b.send(hold, by="holder", request="r"), "completed")
            guard = b.send(BoundWait(max_wait_s=wait_s, force="requirement"), request="r")
            await b.accepted(guard)
        result = await b.result(call)
        waited = result.started_s - result.sent_s
        require(waited >= wait_s, f"it is held until its bound, {wait_s} s, not {waited} s")
        await b.end_of(guard, "completed")


@rule(
    "HEAR-FORCE-3",
    "A preferred bound on waiting does not end a required hold",
    FORCE,
    needs=("hold", "bound_wait"),
)
async def preferred_guard_yields_to_hold(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        async with b.busy():
            call = await b.launch(b.request("r", context="c"))
            held_from = trio.current_time()
            hold = Hold(hold_s=3 * b.engine.quiet_s, force="requirement")
            await b.end_of(b.send(hold, by="holder", request="r"), "completed")
            b.send(BoundWait(max_wait_s=0.0), request="r")
        result = await b.result(call)
        held = result.started_s - held_from
        require(held >= hold.hold_s, f"it is held for {hold.hold_s} s, not {held} s")


_IMPOSSIBLE: dict[str, Control] = {
    "configure": Configure(modes=("no-such-mode",), force="requirement"),
    "route": Route(targets=("no-such-engine",), force="requirement"),
    "prepare": Prepare(tier="no-such-tier", force="requirement"),
    "place": Place(tier="no-such-tier", force="requirement"),
}


async def _ask(b: Bench, control: Control) -> str:
    if isinstance(control, Configure | Route):
        return b.send(control, request="r")
    return b.send(control, context="c")


@rule("HEAR-FORCE-4", "A requirement that cannot be met is rejected", FORCE)
async def impossible_is_rejected(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await b.serve("before", context="c")
        async with b.busy():
            await b.launch(b.request("r", context="r"))
            for kind, control in _IMPOSSIBLE.items():
                expected = "rejected" if b.claims(kind) else "unsupported"
                await b.end_of(await _ask(b, control), expected)


@rule(
    "HEAR-FORCE-5", "A requirement may be met by a listed fallback, which the outcome names", FORCE
)
async def fallback_is_named(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await b.serve("before", context="c")
        mode = b.capabilities.modes[0] if b.capabilities.modes else "default"
        listed = {"configure": mode, "route": b.name, "prepare": "gpu", "place": "gpu"}
        async with b.busy():
            await b.launch(b.request("r", context="r"))
            for kind, control in _IMPOSSIBLE.items():
                fallback = ("no-such-fallback-either", listed[kind])
                made = msgspec.structs.replace(control, fallback=fallback)
                operation = await _ask(b, made)
                if not b.has(kind):
                    await b.end_of(operation, "rejected" if b.claims(kind) else "unsupported")
                    continue
                outcome = await b.end_of(operation, "completed")
                require(
                    outcome.fallback == listed[kind],
                    f"{kind}: the outcome names {listed[kind]}, not {outcome.fallback}",
                )


# -- semantics are untouched ----------------------------------------------------------------------


async def _outputs(factory: EngineFactory, *, controlled: bool) -> list[object]:
    async with bench(factory) as b:
        requests = [
            b.request(f"r{n}", context=f"c{n % 3}", num_blocks=2 + n // 3, output_tokens=4)
            for n in range(9)
        ]
        results = []
        for start in range(0, 9, 3):
            calls = []
            for request in requests[start : start + 3]:
                if controlled:
                    _control_all(b, request.id, request.context or "")
                calls.append(await b.launch(request))
            results += [await b.result(call) for call in calls]
            if controlled:
                _control_all(b, requests[start].id, requests[start].context or "")
        return [b.engine.output_of(r, x) for r, x in zip(requests, results, strict=True)]


def _control_all(b: Bench, request: str, context: str) -> None:
    b.send(Prioritise(priority=-ord(request[-1])), request=request)
    b.send(BoundWait(max_wait_s=0.0), request=request)
    b.send(Hold(hold_s=b.engine.quiet_s / 10), request=request)
    b.send(Configure(modes=b.capabilities.modes[:1] or ("default",)), request=request)
    b.send(Retain(lease_s=b.engine.quiet_s), context=context)
    b.send(Prepare(), context=context)
    b.send(Place(tier="cpu"), context=context)


@rule("HEAR-SAME-1", "The same tokens come out with controls and without", SAME)
async def outputs_are_the_same(factory: EngineFactory) -> None:
    without = await _outputs(factory, controlled=False)
    with_them = await _outputs(factory, controlled=True)
    require(without == with_them, f"outputs are {without}, not {with_them}")
