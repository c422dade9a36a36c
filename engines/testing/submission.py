"""Rules on controls that act on a request only if they come before it."""

from hear.engines.testing.bench import bench
from hear.engines.testing.samples import REQUEST_KINDS, send_sample
from hear.engines.testing.setup import EngineFactory, RuleBook, require
from hear.messages import DEFAULT_TENANT, Prioritise

SUBMIT = "docs/protocol.md: controls at submission"

rule = RuleBook()


@rule("HEAR-SUBMIT-1", "A control at submission acts before its request, and not after", SUBMIT)
async def acts_before_and_not_after(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        kinds = b.capabilities.at_submission
        for kind in kinds:
            require(kind in REQUEST_KINDS, f"{kind}: a control on requests")
            require(not b.has(kind), f"{kind}: it acts at submission, or whenever it comes")
        async with b.busy():
            early = {kind: send_sample(b, kind, "r") for kind in kinds}
            for operation in early.values():
                await b.accepted(operation)
            call = await b.launch(b.request("r", context="r"))
            for operation in early.values():
                outcome = await b.end_of(operation)
                require(outcome.status == "completed", f"it acts, and ends as {outcome}")
                require(
                    b.backend.applied[DEFAULT_TENANT, operation] == 1, "the engine was handed it"
                )
            for kind in kinds:
                late = send_sample(b, kind, "r")
                await b.end_of(late, "rejected", "already_submitted")
                require(
                    not b.backend.applied[DEFAULT_TENANT, late],
                    "the engine is not handed what is too late",
                )
        await b.result(call)


@rule(
    "HEAR-SUBMIT-2",
    "A priority at submission is the one that the request waits with",
    SUBMIT,
)
async def priority_at_submission(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        if "prioritise" not in b.capabilities.at_submission:
            return
        one = b.send(Prioritise(priority=-5), by="one", request="second")
        await b.accepted(one)
        need = Prioritise(priority=-7, force="requirement")
        other = b.send(need, by="other", request="second")
        await b.accepted(other)
        async with b.busy():
            calls = [await b.launch(b.request(id, context=id)) for id in ("first", "second")]
            await b.end_of(other, "completed")
            await b.end_of(one, "failed", "outranked")
            if "queue" in b.engine.shows:
                queue = b.waiting()
                require(list(queue) == ["second", "first"], f"second, first, not {list(queue)}")
                require(queue["second"].priority == -7, f"at -7, not {queue['second'].priority}")
        order = await b.order_of(calls)
        require(order == ["second", "first"], f"they start as second, first, not as {order}")
