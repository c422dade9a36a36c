"""Rules on what an engine says of itself: it was observed, it is numbered, and it adds up."""

import math

import trio

from hear.blocks import pack
from hear.codec import open_body
from hear.engine_view import EngineView, EngineViews
from hear.engines.testing.bench import Bench, bench
from hear.engines.testing.setup import EngineFactory, RuleBook, require
from hear.messages import Key, RequestDescribed
from hear.subjects import channel, stem

STATE = "paper, section 3.3: observation is not guarantee"

rule = RuleBook()


async def _work(b: Bench) -> None:
    for number in range(6):
        await b.serve(f"w{number}", context=f"w{number % 4}", num_blocks=b.quarter)
    await b.quiet()


@rule("HEAR-STATE-1", "State carries source, epoch, a number without holes, and its time", STATE)
async def state_is_numbered(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await _work(b)
        async with b.busy():
            await b.launch(b.request("r", context="r"))
        seqs: dict[object, int] = {}
        last_s = -math.inf
        for envelope in b.states():
            what = f"{envelope.kind} {envelope.id}"
            require(envelope.source == envelope.key.engine == b.name, f"{what}: from the engine")
            require(envelope.epoch == b.worker.epoch, f"{what}: of its epoch {b.worker.epoch}")
            before = seqs.get(channel(envelope), 0)
            step = 0 if envelope.kind.endswith("_snapshot") else 1
            steps = (0, 1) if envelope.kind.endswith("_reported") else (step,)
            require(
                envelope.seq - before in steps,
                f"{what}: number {before + step} on its channel, not {envelope.seq}",
            )
            seqs[channel(envelope)] = envelope.seq
            require(last_s <= envelope.time_s <= trio.current_time(), f"{what}: time goes forward")
            last_s = envelope.time_s


def _agree(b: Bench, view: EngineView, when: str) -> None:
    require(view.residency_known and view.queue_known, f"{when}: residency and queue are known")
    for tier in b.capabilities.tiers:
        there = b.resident(tier.name)
        count = view.residency.num_blocks(tier.name)
        require(
            count == len(there) and all(view.residency.holds(tier.name, x) for x in there),
            f"{when}: the {tier.name} tier is said to hold {count} blocks, and holds {len(there)}",
        )
    waiting = b.waiting()
    require(
        set(view.waiting) == set(waiting),
        f"{when}: {set(view.waiting)} are said to wait, and {set(waiting)} do",
    )


@rule("HEAR-STATE-2", "What is reported adds up to what is there", STATE)
async def reports_add_up(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await _work(b)
        _agree(b, b.views()[b.name], "after some work")
        async with b.busy():
            calls = [await b.launch(b.request(f"r{n}", context=f"r{n}")) for n in range(3)]
            await b.quiet()
            _agree(b, b.views()[b.name], "while some wait")
        for call in calls:
            await b.result(call)
        await b.quiet()
        _agree(b, b.views()[b.name], "after all have ended")


@rule("HEAR-STATE-3", "One who comes late is told capabilities, queue and residency at once", STATE)
async def late_reader_is_told(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await _work(b)
        views = EngineViews()
        async with b.bus.subscribe(["state.>"], name="late") as late:
            with trio.move_on_after(b.engine.patience_s):
                while not (b.name in views and _complete(views[b.name])):
                    for envelope in await late.receive():
                        message = open_body(envelope)
                        assert message is not None
                        views.apply(envelope, message)
        require(b.name in views and _complete(views[b.name]), "capabilities, queue and residency")
        require(views[b.name].capabilities == b.capabilities, "the capabilities are those it has")
        _agree(b, views[b.name], "late")


def _complete(view: EngineView) -> bool:
    return view.capabilities is not None and view.queue_known and view.residency_known


@rule(
    "HEAR-STATE-4",
    "After a gap residency is unknown until a snapshot makes it right",
    STATE,
    looks_at=("residency",),
)
async def gap_makes_residency_unknown(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        await _work(b)
        changes = [e for e in b.states() if e.kind == "residency_changed"]
        require(len(changes) >= 2, "new contexts change residency, and it is reported")
        lost = changes[-2]
        views = EngineViews()
        asked = False
        for envelope in b.states():
            message = open_body(envelope)
            assert message is not None
            if envelope is not lost:
                asked = views.apply(envelope, message)
            if envelope is changes[-1]:
                break
        view = views[b.name]
        require(asked and not view.residency_known, "a reader that missed one knows nothing more")
        provider = b.bus.providers[stem("state", "default", Key(engine=b.name), lost.kind)]
        queue = [envelope for envelope in b.states() if envelope.kind.startswith("queue_")]
        for envelope in (*provider(), *queue):
            message = open_body(envelope)
            assert message is not None
            views.apply(envelope, message)
        _agree(b, view, "after the snapshot")


@rule(
    "HEAR-STATE-5",
    "The engine looks again when it executes: hot then, and evicted now",
    STATE,
    looks_at=("residency",),
)
async def engine_looks_again(factory: EngineFactory) -> None:
    async with bench(factory) as b:
        first = b.request("x1", context="x", num_blocks=b.quarter, output_tokens=3)
        fresh = await b.result(await b.launch(first))
        blocks = set(first.prompt_hashes)
        require(blocks <= b.resident("gpu"), "what was just served is on the GPU")
        again = b.request("x2", context="x", num_blocks=b.quarter, output_tokens=3)
        hot = RequestDescribed(
            prompt_tokens=again.prompt_tokens,
            block_size=b.capabilities.block_size,
            prefix_hashes=pack(again.prompt_hashes),
        )
        b.say(hot, key=Key(request="x2", context="x", engine=b.name))
        await b.press(lambda: not blocks & b.resident("gpu"), "pressure evicts it")
        result = await b.result(await b.launch(again))
        require(result.outcome.status == "completed", f"it runs all the same: {result.outcome}")
        reused = result.outcome.reused_tokens.get("gpu", 0)
        require(reused == 0, f"nothing of it was on the GPU, and {reused} tokens were reused")
        was, now = b.engine.output_of(first, fresh), b.engine.output_of(again, result)
        require(was == now, f"the output is {was}, not {now}")
