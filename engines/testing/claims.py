"""Rules on who prevails when several take hold of the same thing, and on leaving it again."""

from hear.engines.testing.bench import Bench, bench
from hear.engines.testing.setup import EngineFactory, RuleBook, require
from hear.messages import Admit, BoundWait, Force, Hold, Prioritise, Retain, Withdraw

ARBITRATION = "docs/design.md: arbitration"
WITHDRAW = "docs/design.md: a policy that leaves withdraws its effects"

rule = RuleBook()


def _priority(b: Bench, expected: int, why: str) -> None:
    priority = b.waiting()["r"].priority
    require(priority == expected, f"{why}: priority {expected}, not {priority}")


async def _prioritise(b: Bench, by: str, priority: int, force: Force = "preference") -> str:
    control = Prioritise(priority=priority, force=force)
    operation = b.send(control, by=by, request="r")
    await b.end_of(operation)
    return operation


@rule(
    "HEAR-CLAIM-1", "A requirement prevails over a preference", ARBITRATION, needs=("prioritise",)
)
async def requirement_prevails(factory: EngineFactory) -> None:
    async with bench(factory, ranks={"wishes": 9}) as b, b.busy():
        await b.launch(b.request("r", context="r"))
        await _prioritise(b, "wishes", 1)
        needs = await _prioritise(b, "needs", 2, "requirement")
        await b.end_of(needs, "completed")
        _priority(b, 2, "a requirement takes it from a preference of higher rank")
        loser = await _prioritise(b, "wishes", 3)
        await b.end_of(loser, "rejected", "outranked")
        _priority(b, 2, "and keeps it")


@rule(
    "HEAR-CLAIM-2",
    "Of two alike the one of higher rank prevails",
    ARBITRATION,
    needs=("prioritise",),
)
async def rank_prevails(factory: EngineFactory) -> None:
    async with bench(factory, ranks={"high": 2, "low": 1}) as b, b.busy():
        await b.launch(b.request("r", context="r"))
        await _prioritise(b, "low", 1)
        await b.end_of(await _prioritise(b, "high", 2), "completed")
        _priority(b, 2, "the higher rank takes it")
        await b.end_of(await _prioritise(b, "low", 3), "rejected", "outranked")
        _priority(b, 2, "and keeps it")


@rule("HEAR-CLAIM-3", "Of two equal ones the later prevails", ARBITRATION, needs=("prioritise",))
async def later_prevails(factory: EngineFactory) -> None:
    async with bench(factory) as b, b.busy():
        await b.launch(b.request("r", context="r"))
        for by, priority in (("one", 1), ("two", 2), ("one", 3)):
            await b.end_of(await _prioritise(b, by, priority), "completed")
            _priority(b, priority, f"{by} was the last to ask")


@rule(
    "HEAR-CLAIM-4",
    "Who has to give way while its control is open hears: outranked",
    ARBITRATION,
    needs=("bound_wait",),
)
async def open_one_gives_way(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        async with b.busy():
            call = await b.launch(b.request("r", context="r"))
            wish = b.send(BoundWait(max_wait_s=0.0), by="wishes", request="r")
            await b.accepted(wish)
            never = BoundWait(max_wait_s=100 * b.engine.patience_s, force="requirement")
            need = b.send(never, by="needs", request="r")
            await b.accepted(need)
            await b.end_of(wish, "failed", "outranked")
            await b.quiet(0.5)
            require(not b.waiting()["r"].protected, "the bound is that of the one who prevailed")
            late = b.send(BoundWait(max_wait_s=0.0), by="wishes", request="r")
            await b.end_of(late, "rejected", "outranked")
        await b.result(call)
        await b.end_of(need, "completed")


@rule(
    "HEAR-CLAIM-5", "One's own newer control replaces the older", ARBITRATION, needs=("bound_wait",)
)
async def own_newer_one(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        async with b.busy():
            call = await b.launch(b.request("r", context="r"))
            far = BoundWait(max_wait_s=100 * b.engine.patience_s, force="requirement")
            old = b.send(far, request="r")
            await b.accepted(old)
            new = b.send(BoundWait(max_wait_s=0.0, force="requirement"), request="r")
            await b.accepted(new)
            await b.end_of(old, "completed", "renewed")
            await b.until(lambda: b.waiting()["r"].protected, "the newer bound counts")
        await b.result(call)
        await b.end_of(new, "completed")


@rule(
    "HEAR-CLAIM-6",
    "A wish does not admit what another requires to be held",
    ARBITRATION,
    needs=("hold", "admit"),
)
async def required_hold(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        async with b.busy():
            call = await b.launch(b.request("r", context="r"))
            hold = Hold(hold_s=4 * b.engine.quiet_s, force="requirement")
            await b.end_of(b.send(hold, by="needs", request="r"), "completed")
            wish = b.send(Admit(), by="wishes", request="r")
            await b.end_of(wish, "rejected", "outranked")
            require(b.waiting()["r"].held, "it is held")
            own = b.send(Admit(force="requirement"), by="needs", request="r")
            await b.end_of(own, "completed")
        await b.result(call)


@rule(
    "HEAR-CLAIM-7", "What the engine turned down is in nobody's way", ARBITRATION, needs=("retain",)
)
async def refused_one_claims_nothing(factory: EngineFactory) -> None:
    async with bench(factory, ranks={"high": 1}) as b:
        await b.serve("c", context="c")
        too_long = Retain(lease_s=2 * b.capabilities.max_lease_s)
        await b.end_of(b.send(too_long, by="high", context="c"), "rejected")
        lease = b.send(Retain(lease_s=b.engine.quiet_s), by="low", context="c")
        await b.end_of(lease, "completed")


# -- leaving --------------------------------------------------------------------------------------


@rule("HEAR-WITHDRAW-1", "Withdraw ends what is open of its sender: withdrawn", WITHDRAW)
async def withdraw_ends_open_ones(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await b.serve("c", context="c")
        kept, other = [], []
        if b.claims("retain"):
            kept.append(b.send(Retain(lease_s=b.engine.patience_s), by="leaves", context="c"))
        if b.claims("bound_wait"):
            bound = BoundWait(max_wait_s=b.engine.patience_s)
            kept.append(b.send(bound, by="leaves", request="one that comes later"))
            other.append(b.send(bound, by="stays", request="another that comes later"))
        for operation in kept + other:
            await b.accepted(operation)
        await b.end_of(b.send(Withdraw(), by="leaves"), "completed")
        for operation in kept:
            await b.end_of(operation, "failed", "withdrawn")
        for operation in other:
            require(b.outcome(operation) is None, "what another asked for goes on")


@rule(
    "HEAR-WITHDRAW-2",
    "Withdraw undoes what its sender did to the queue",
    WITHDRAW,
    needs=("prioritise",),
)
async def withdraw_restores_the_queue(factory: EngineFactory) -> None:
    async with bench(factory) as b:

        def probe() -> None:
            queue = b.waiting()
            require(list(queue) == ["c", "a", "b"], f"the queue is c, a, b, not {list(queue)}")
            require(queue["b"].priority == 0, f"b has no priority, not {queue['b'].priority}")
            require(not queue["a"].held, "a is not held")

        async with b.busy():
            calls = [await b.launch(b.request(id, context=id)) for id in "abc"]
            wishes = [b.send(Prioritise(priority=-5), by="leaves", request="b")]
            if b.has("hold"):
                wishes.append(b.send(Hold(hold_s=b.engine.patience_s), by="leaves", request="a"))
            wishes.append(b.send(Prioritise(priority=-2), by="stays", request="c"))
            for wish in wishes:
                await b.end_of(wish, "completed")
            await b.end_of(b.send(Withdraw(), by="leaves", probe=probe), "completed")
        order = await b.order_of(calls)
        require(order == ["c", "a", "b"], f"they start as c, a, b, not {order}")


@rule(
    "HEAR-WITHDRAW-3",
    "Withdraw lifts its sender's bounds on waiting",
    WITHDRAW,
    needs=("bound_wait",),
)
async def withdraw_lifts_bounds(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        async with b.busy():
            calls = [await b.launch(b.request(id, context=id)) for id in "ab"]
            guard = b.send(BoundWait(max_wait_s=0.0), by="leaves", request="b")
            await b.accepted(guard)
            await b.until(lambda: list(b.waiting()) == ["b", "a"], "b is protected, and goes first")
            await b.end_of(b.send(Withdraw(), by="leaves"), "completed")
            await b.end_of(guard, "failed", "withdrawn")
            require(list(b.waiting()) == ["a", "b"], f"a goes first again: {list(b.waiting())}")
        order = await b.order_of(calls)
        require(order == ["a", "b"], f"they start as they came, not as {order}")
