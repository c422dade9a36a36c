"""Rules on tenants: of an engine that serves several, each sees and moves what is its own alone."""

from collections.abc import Iterator

import msgspec
import trio

from hear.blocks import pack, unpack
from hear.codec import open_body
from hear.engines.testing.bench import Bench, bench, name_of
from hear.engines.testing.samples import ALL_KINDS, CONTEXT_KINDS, REQUEST_KINDS, sample
from hear.engines.testing.setup import EngineFactory, RuleBook, require
from hear.messages import (
    DEFAULT_TENANT,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Envelope,
    Message,
    Prepare,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    ResidencyChanged,
    ResidencySnapshot,
    Retain,
    Withdraw,
)

TENANT = "docs/protocol.md: nothing of one tenant is shown to another"
OTHER = "acme"

rule = RuleBook()


def _names(message: Message | None) -> Iterator[str | None]:
    """The requests and contexts that a report names."""
    if isinstance(message, QueueChanged | QueueSnapshot):
        for waiting in message.waiting:
            yield from (waiting.request, waiting.context)
    if isinstance(message, QueueChanged):
        yield from (*message.started, *message.ended)
    elif isinstance(message, QueueSnapshot):
        for running in message.running:
            yield from (running.request, running.context)


def _hashes(message: Message | None) -> Iterator[int]:
    """The blocks that a report names."""
    changes: tuple[BlocksStored | BlocksRemoved | BlocksCleared, ...] = ()
    if isinstance(message, ResidencyChanged):
        changes = message.changes
    elif isinstance(message, ResidencySnapshot):
        changes = message.chains
    for change in changes:
        if not isinstance(change, BlocksCleared):
            yield from unpack(change.prefix_hashes)


def _foreign(envelope: Envelope, names: set[str], hashes: set[int]) -> list[str | int]:
    """What a message names that is not among these."""
    message, key = open_body(envelope), envelope.key
    named = {key.request, key.context, *_names(message)} - {None} - names
    return [*filter(None, named), *set(_hashes(message)).difference(hashes)]


@rule("HEAR-TENANT-1", "What a tenant is told is of its own requests and blocks", TENANT)
async def told_its_own(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        names: dict[str, set[str]] = {}
        hashes: dict[str, set[int]] = {}
        async with b.busy() as busy:
            calls = []
            for tenant in (DEFAULT_TENANT, OTHER):
                id = f"r-{tenant}"
                made = b.request(id, context=f"c-{tenant}", num_blocks=2, tenant=tenant)
                names[tenant] = {id, f"c-{tenant}"}
                hashes[tenant] = set(made.prompt_hashes)
                calls.append(await b.launch(made))
            await b.quiet()
            b.published += [e for provide in list(b.bus.providers.values()) for e in provide()]
            names[DEFAULT_TENANT] |= {busy.request.id, busy.request.context or ""}
            hashes[DEFAULT_TENANT] |= set(busy.request.prompt_hashes)
        for call in calls:
            await b.result(call)
        await b.quiet()
        b.published += [e for provide in list(b.bus.providers.values()) for e in provide()]
        for tenant in names:
            told = [e for e in b.published if e.tenant == tenant and e.category != "control"]
            kinds = {e.kind for e in told}
            for kind in ("capabilities_reported", "costs_reported", "pressure_reported"):
                require(kind in kinds, f"{tenant} is told of the engine: {kind}")
            for envelope in told:
                # What is written after a prompt has hashes that nobody else can know.
                written = set(_hashes(open_body(envelope))) - set().union(*hashes.values())
                foreign = _foreign(envelope, names[tenant], hashes[tenant] | written)
                require(not foreign, f"{tenant} is not told of {foreign}, as in {envelope.kind}")


@rule(
    "HEAR-TENANT-2",
    "Two tenants use the same ids, and do not touch each other",
    TENANT,
    looks_at=("queue",),
)
async def same_ids(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        at_submission = b.claims("prioritise") and not b.has("prioritise")
        async with b.busy():
            operations = _prioritise(b) if at_submission else []
            for operation in operations:
                await b.accepted(operation)
            mine = await b.launch(b.request("r", context="c"))
            theirs = await b.launch(b.request("r", context="c", tenant=OTHER))
            if b.has("prioritise"):
                operations = _prioritise(b)
            for operation in operations:
                await b.end_of(operation, "completed")
            if operations:
                found = b.waiting()["r"].priority, b.waiting(OTHER)["r"].priority
                require(found == (3, 5), f"each has the priority of its own: 3 and 5, not {found}")
            await b.end_of(b.send(Withdraw(), tenant=OTHER), "completed")
            if operations:
                left = (3, 5 if at_submission else 0)
                found = b.waiting()["r"].priority, b.waiting(OTHER)["r"].priority
                require(found == left, f"and withdraws its own: {left}, not {found}")
            theirs.leave()
            await b.until(lambda: "r" not in b.waiting(OTHER), "a request whose client left goes")
            require("r" in b.waiting(), "the one of the same id goes on")
        result = await b.result(mine)
        require(result.outcome.status == "completed", f"it is served: {result.outcome}")
        for tenant, status in ((DEFAULT_TENANT, "completed"), (OTHER, "failed")):
            name = name_of("r", tenant)
            await b.until(lambda name=name: len(b.requests[name]) > 1, f"{name} ends")  # type: ignore[misc]
            said = [outcome.status for outcome in b.requests[name]]
            require(said == ["accepted", status], f"{name}: accepted and {status}, not {said}")


def _prioritise(b: Bench) -> list[str]:
    """Both ask for a priority of their request, by the same ids."""
    return [
        b.send(Prioritise(priority=priority), request="r", id="op", tenant=tenant)
        for tenant, priority in ((DEFAULT_TENANT, 3), (OTHER, 5))
    ]


@rule(
    "HEAR-TENANT-3",
    "Equal hashes of two tenants are different blocks",
    TENANT,
    looks_at=("residency",),
)
async def equal_hashes(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        blocks = set(b.request("x", context="x", num_blocks=b.quarter).prompt_hashes)
        other = b.request("x", context="x", num_blocks=b.quarter, tenant=OTHER)
        blocks_there = set(other.prompt_hashes)
        await b.serve("mine", context="x", num_blocks=b.quarter)
        require(blocks <= b.resident("gpu"), "what was just served is on the GPU")
        require(not b.resident("gpu", OTHER), "another tenant has nothing there")
        theirs = await b.serve("theirs", context="x", num_blocks=b.quarter, tenant=OTHER)
        reused = theirs.outcome.reused_tokens
        require(not any(reused.values()), f"its first request reuses nothing, not {reused}")
        require(blocks_there <= b.resident("gpu", OTHER), "what it was served is its own")
        again = await b.serve("again", context="x", num_blocks=b.quarter, tenant=OTHER)
        expected = len(blocks) * b.capabilities.block_size
        found = again.outcome.reused_tokens.get("gpu", 0)
        require(found == expected, f"its next one reuses its own {expected} tokens, not {found}")


@rule(
    "HEAR-TENANT-4",
    "A control about what is another's is answered as one about nothing, and does nothing",
    TENANT,
)
async def no_reach(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        made = b.request("r", context="c", num_blocks=2)
        await b.serve("before", context="c", num_blocks=2)
        kept = b.send(Retain(lease_s=20 * b.engine.quiet_s), context="c", id="kept")
        if not b.claims("retain"):
            await b.end_of(kept, "unsupported")
        async with b.busy():
            call = await b.launch(made)
            queue = b.waiting()
            for kind in ALL_KINDS:
                theirs = await _answers(b, kind, "r", "c", "kept")
                nothing = await _answers(b, kind, "none", "none", "none")
                require(theirs == nothing, f"{kind}: {nothing}, not {theirs}")
            nowhere = b.request("none", context="none", num_blocks=2)
            for control in (Retain(lease_s=b.engine.quiet_s), Prepare()):
                said: list[str] = []
                for hashes in (made.prompt_hashes, nowhere.prompt_hashes):
                    named = msgspec.structs.replace(control, prefix_hashes=pack(hashes))
                    sent = b.send(named, context=f"with {len(said)}", tenant=OTHER)
                    said.append((await b.end_of(sent)).status)
                require(said[0] == said[1], f"{type(control).__name__} of blocks: {said}")
            require(b.waiting() == queue, f"the queue is as it was, {queue}, not {b.waiting()}")
            if "residency" in b.engine.shows:
                lost = len(set(made.prompt_hashes) - b.resident("gpu"))
                require(not lost, f"the blocks are where they were; {lost} are not")
            if b.claims("retain"):
                require(b.outcome(kept) is None, "its lease goes on")
        await b.result(call)


async def _answers(
    b: Bench, kind: str, request: str, context: str, target: str
) -> list[tuple[str, str, str]]:
    """All that another tenant is answered to a control about these."""
    control = sample(b, kind, trio.current_time() + b.engine.quiet_s, target)
    about = {"request": request} if kind in REQUEST_KINDS else {}
    about = {"context": context} if kind in CONTEXT_KINDS else about
    operation = b.send(control, tenant=OTHER, by=kind, **about)  # type: ignore[arg-type]
    await b.end_of(operation)
    answers: list[tuple[str, str, str]] = []
    for outcome in b.heard[operation]:
        detail = outcome.detail
        for name in {request, context, target}:
            detail = "named" if detail == name else detail
        answers.append((outcome.status, outcome.reason, detail))
    return answers
