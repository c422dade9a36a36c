"""Rules on controls that are odd, come twice, come early, or come too late."""

import msgspec
import trio

from hear.codec import kind_of
from hear.engines.testing.bench import Bench, bench
from hear.engines.testing.samples import (
    ALL_KINDS,
    CONTEXT_KINDS,
    REQUEST_KINDS,
    sample,
    send_sample,
)
from hear.engines.testing.setup import EngineFactory, RuleBook, require
from hear.messages import (
    DEFAULT_TENANT,
    Envelope,
    Hold,
    Key,
    Place,
    Prepare,
    Prioritise,
    Retain,
    Withdraw,
)

ONCE = "docs/design.md: operations are idempotent"
EARLY = "docs/design.md: a control may come before its request"
VERSION = "docs/design.md: stale versions"
UNKNOWN = "docs/design.md: an unknown kind or a newer field never kills anyone"

rule = RuleBook()


# -- what cannot be read --------------------------------------------------------------------------


def _envelope(
    b: Bench, kind: str, body: bytes, *, request: str | None = None, context: str | None = None
) -> Envelope:
    now = trio.current_time()
    operation = b.sequencer("odd").next_id()
    made = Envelope(
        id=operation,
        source="odd",
        epoch=1,
        seq=0,
        time_s=now,
        category="control",
        kind=kind,
        key=Key(request=request, context=context, engine=b.name, operation=operation),
        body=msgspec.Raw(body),
    )
    b.sent[operation] = made
    b.bus.publish(made)
    return made


@rule("HEAR-CAPABILITY-1", "A kind of control that it does not know is unsupported", UNKNOWN)
async def unknown_kind(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        body = msgspec.msgpack.encode({"kind": "levitate", "height_m": 3})
        sent = _envelope(b, "levitate", body, request="r")
        await b.end_of(sent.key.operation or "", "unsupported")
        await b.serve("after", context="c")


@rule("HEAR-CAPABILITY-2", "A field that it does not know is ignored", UNKNOWN)
async def unknown_field(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        body = msgspec.msgpack.encode({"kind": "withdraw", "as_of": [1, {"deep": None}]})
        sent = _envelope(b, "withdraw", body)
        await b.end_of(sent.key.operation or "", "completed")


@rule("HEAR-CAPABILITY-3", "What cannot be read is rejected, and serving goes on", UNKNOWN)
async def unreadable(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await b.serve("before", context="c", num_blocks=2)
        odd = {
            "body": {kind: b"\xc1 not msgpack" for kind in ALL_KINDS},
            "key": {kind: msgspec.msgpack.encode(sample(b, kind)) for kind in ALL_KINDS[:10]},
        }
        for what, bodies in odd.items():
            for kind, body in bodies.items():
                request, context = ("r", "c") if what == "body" else (None, None)
                sent = _envelope(b, kind, body, request=request, context=context)
                operation = sent.key.operation or ""
                expected = "rejected" if b.claims(kind) else "unsupported"
                if not b.claims(kind) and what == "body":
                    expected = ""  # whether it is read before it is turned down is its own affair
                await b.end_of(operation, expected)
        for hashes in (b"odd", b"12345678" * 2):
            for control in (
                Retain(lease_s=1.0, prefix_hashes=hashes),
                Prepare(prefix_hashes=hashes),
                Place(tier="gpu", prefix_hashes=hashes),
            ):
                operation = b.send(control, context="c")
                claimed = b.claims(kind_of(control).name)
                await b.end_of(operation, "rejected" if claimed else "unsupported")
        await b.serve("after", context="c", num_blocks=2)


# -- acting once ----------------------------------------------------------------------------------


@rule("HEAR-ONCE-1", "A control that is delivered twice at once acts once", ONCE)
async def delivered_twice(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await b.serve("before", context="c", num_blocks=2)
        async with b.busy():
            call = await b.launch(b.request("r", context="r"))
            operations = [send_sample(b, kind) for kind in ALL_KINDS]
            for operation in operations:
                b.send_again(operation)
            await b.until(lambda: all(o in b.heard for o in operations), "all are answered")
        await b.result(call)
        for operation in operations:
            await b.end_of(operation)  # and the audit counts how often each acted


@rule("HEAR-ONCE-2", "A control that is delivered again while it is open is acknowledged", ONCE)
async def delivered_while_open(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        for kind in REQUEST_KINDS:
            operation = send_sample(b, kind, "later")
            if not b.claims(kind):
                await b.end_of(operation, "unsupported")
                continue
            await b.accepted(operation)
            b.send_again(operation)
            answers = b.heard[operation]
            await b.until(lambda answers=answers: len(answers) > 1, "it is answered again")  # type: ignore[misc]
            require(answers[1].status == "accepted", f"accepted again, not {answers[1]}")


@rule("HEAR-ONCE-3", "A control that is delivered after its end gets the same outcome", ONCE)
async def delivered_after_the_end(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await b.serve("before", context="c", num_blocks=2)
        async with b.busy():
            call = await b.launch(b.request("r", context="r"))
            operations = [send_sample(b, kind) for kind in ALL_KINDS]
            await b.until(lambda: all(o in b.heard for o in operations), "all are answered")
        await b.result(call)
        for operation in operations:
            first = await b.end_of(operation)
            count = len(b.heard[operation])
            b.send_again(operation)
            answers = b.heard[operation]
            await b.until(lambda n=count, a=answers: len(a) > n, "it is answered again")  # type: ignore[misc]
            require(answers[-1] == first, f"the same outcome, {first}, not {answers[-1]}")


@rule(
    "HEAR-ONCE-4",
    "An old control that is delivered again does not undo a newer one",
    ONCE,
    needs=("prioritise",),
)
async def old_one_comes_again(factory: EngineFactory) -> None:
    async with bench(factory) as b, b.busy():
        await b.launch(b.request("r", context="r"))
        old = b.send(Prioritise(priority=-5), request="r")
        await b.end_of(old, "completed")
        await b.end_of(b.send(Prioritise(priority=5), request="r"), "completed")
        b.send_again(old)
        await b.until(lambda: len(b.heard[old]) > 1, "it is answered again")
        priority = b.waiting()["r"].priority
        require(priority == 5, f"the newer priority stands, 5, not {priority}")


@rule(
    "HEAR-ONCE-5",
    "A control that failed with a crash does not act when it comes again",
    ONCE,
    crashes=True,
)
async def old_one_after_a_crash(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        operations = [send_sample(b, kind) for kind in REQUEST_KINDS if b.claims(kind)]
        for operation in operations:
            await b.accepted(operation)
        await b.crash()
        for operation in operations:
            await b.end_of(operation, "failed", "engine_restarted")
            b.send_again(operation)
        await b.serve("r", context="r")
        require(not b.backend.applied, f"nothing is applied: {b.backend.applied}")


# -- before its request, and after its version ----------------------------------------------------


@rule("HEAR-EARLY-1", "A control that comes before its request is accepted and kept for it", EARLY)
async def kept_for_its_request(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        operations = {kind: send_sample(b, kind) for kind in REQUEST_KINDS}
        for kind, operation in operations.items():
            if b.claims(kind):
                await b.accepted(operation)
        async with b.busy():
            call = await b.launch(b.request("r", context="r"))
        await b.result(call)
        for kind, operation in operations.items():
            if not b.claims(kind):
                await b.end_of(operation, "unsupported")
                continue
            outcome = await b.end_of(operation)
            require(
                b.backend.applied[DEFAULT_TENANT, operation] == 1
                or outcome.reason in ("outranked", "replaced"),
                f"{kind} acts when its request has come, or gives way: {outcome}",
            )


@rule(
    "HEAR-EARLY-2",
    "An early control has its effect from the moment of arrival",
    EARLY,
    needs=("prioritise",),
)
async def effect_from_arrival(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        early = b.send(Prioritise(priority=-5), request="second")
        await b.accepted(early)
        async with b.busy():
            calls = [await b.launch(b.request(id, context=id)) for id in ("first", "second")]
            await b.end_of(early, "completed")
            order = list(b.waiting())
            require(order == ["second", "first"], f"the queue is second, first, not {order}")
        first, second = [await b.result(call) for call in calls]
        require(second.first_token_s < first.first_token_s, "the second goes first")


@rule("HEAR-EARLY-3", "A request that is held early does not start", EARLY, needs=("hold",))
async def held_from_arrival(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        hold = Hold(hold_s=2 * b.engine.quiet_s)
        early = b.send(hold, request="r")
        await b.accepted(early)
        sent_s = trio.current_time()
        result = await b.result(await b.launch(b.request("r", context="r")))
        held = result.started_s - sent_s
        require(held >= hold.hold_s, f"it starts after {hold.hold_s} s, not after {held} s")


@rule("HEAR-VERSION-1", "A control for an older version is rejected: stale_version", VERSION)
async def stale_version(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await b.result(await b.launch(b.request("r", context="c", num_blocks=2, version=3)))
        for kind in CONTEXT_KINDS:
            old = b.send(sample(b, kind), by=kind, context="c", version=2)
            if not b.claims(kind):
                await b.end_of(old, "unsupported")
                continue
            await b.end_of(old, "rejected", "stale_version")
        for version in (3, 4):
            for kind in filter(b.claims, CONTEXT_KINDS):
                fresh = b.send(sample(b, kind), by="one", context="c", version=version)
                outcome = await b.end_of(fresh)
                require(outcome.reason != "stale_version", f"{kind}: {version} is not stale")
        late = b.send(Retain(lease_s=1.0), context="c", version=3)
        expected = ("rejected", "stale_version") if b.claims("retain") else ("unsupported", None)
        await b.end_of(late, *expected)


@rule("HEAR-VERSION-2", "A control on a request is not stale for a sibling's version", VERSION)
async def siblings(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        async with b.busy():
            older = await b.launch(b.request("older", context="c", num_blocks=2, version=2))
            newer = await b.launch(b.request("newer", context="c", num_blocks=2, version=9))
            for kind in filter(b.claims, REQUEST_KINDS):
                old, fresh = (
                    b.send(sample(b, kind), by=kind, request="older", context="c", version=version)
                    for version in (1, 2)
                )
                await b.end_of(old, "rejected", "stale_version")
                await b.end_of(b.send(Withdraw(), by=kind), "completed")
                outcome = await b.end_of(fresh)
                require(
                    outcome.reason != "stale_version",
                    f"{kind} is about a request that is served, and not stale",
                )
        await b.result(older)
        await b.result(newer)
