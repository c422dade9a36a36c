"""Checks that any policy can be put through (``hear.interfaces.Policy``), a user's own as well.

``check_policy`` runs them all; ``CHECKS`` lists them, so that a test suite can name each. A check
takes a factory and makes its own policies with it, plays a harness and a pool of two engines to
them, and raises ``AssertionError`` that says which promise was broken. None waits for the clock.

It must not know which policy it checks, nor any test framework.
"""

import gc
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from random import Random
from types import BuiltinFunctionType, FunctionType, ModuleType

import trio

from hear.app import plugins
from hear.blocks import pack
from hear.delivery import Sequencer
from hear.engine_view import EngineView, EngineViews
from hear.harness_view import HarnessView
from hear.interfaces import Bus, Policy
from hear.messages import (
    DEFAULT_TENANT,
    BlocksCleared,
    BlocksStored,
    OperationOutcome,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    RequestReadinessChanged,
    ResidencyChanged,
    ResidencySnapshot,
    WaitingRequest,
)
from hear.policies.fake_cluster import (
    ENGINES,
    POOL,
    TIMEOUT_S,
    FakeCluster,
    World,
    blocks_of,
    decide,
    engine_of,
    request_of,
    require,
)
from hear.policies.runtime.runner import PolicyRunner
from hear.policies.runtime.spec import shape_problem

PolicyFactory = Callable[[], Policy]
"""Makes a new policy; a class without required arguments is one."""

Check = Callable[[PolicyFactory, int], Awaitable[None]]

_DAY_S = 86_400.0
_ROUND = 300
_BYTES_A_REQUEST = 8


async def check_policy(factory: PolicyFactory, *, remembers: int = 0) -> None:
    """Check that a policy keeps what ``hear.interfaces.Policy`` and docs/protocol.md ask of one.

    ``remembers`` is how many requests a policy may remember, on purpose and with a bound, after
    they have ended: before the check of memory measures anything, it serves that many.

    Raises:
        AssertionError: a promise was broken; the message says which.
    """
    for check in CHECKS:
        await check(factory, remembers)


async def check_shape(factory: PolicyFactory, remembers: int) -> None:
    """It has a name, observes subject patterns, and decides."""
    policy = factory()
    problem = shape_problem(policy)
    require(not problem, f"it has name, observes and decide: {problem}")
    other = factory()
    require(other is not policy, "the factory makes a new one each time")
    require(other.name == policy.name, "all that one factory makes have the same name")
    await trio.lowlevel.checkpoint()


async def check_empty(factory: PolicyFactory, remembers: int) -> None:
    """It decides when nothing is known yet, and asks nothing of engines that nobody knows."""
    asks = decide(factory(), HarnessView(), EngineViews(), "empty views")
    require(not asks, f"empty views: asks nothing, got {asks}")
    cluster = FakeCluster(factory(), "nothing but engines")
    cluster.decide()
    await trio.lowlevel.checkpoint()


async def check_asks(factory: PolicyFactory, remembers: int) -> None:
    """It asks only for controls, each of an engine, and for predictions marked as such."""
    cluster = FakeCluster(factory(), "asks")
    for context in range(6):
        cluster.play(cluster.world.serve(context))
    await trio.lowlevel.checkpoint()
    lives = [cluster.world.serve(context) for context in range(10, 16)]
    for _ in zip(*lives, strict=True):  # all at once
        cluster.decide()


async def check_gap(factory: PolicyFactory, remembers: int) -> None:
    """It goes on when state was lost, while residency and queue are unknown, and after."""
    cluster = FakeCluster(factory(), "after a gap")
    world = cluster.world
    for context in range(4):
        world.describe(context)
        world.wait(context)
    for context in (30, 31):
        world.describe(context, engine=POOL)
    cluster.decide()
    for lost in (0, 1):
        world.store(lost)
        world.start(lost)
    cluster.lose()
    for context in (2, 3):
        world.store(context)
        cluster.decide()
        world.describe(context + 10)
        world.wait(context + 10)
        world.describe(context + 20, engine=POOL)
        cluster.decide()
    for engine in ENGINES:
        mine = [c for c in (2, 3, 12, 13) if engine_of(c) == engine]
        chains = tuple(BlocksStored(tier="gpu", prefix_hashes=pack(blocks_of(c))) for c in mine)
        waiting = tuple(WaitingRequest(request=request_of(c, 1), since_s=0.0) for c in mine)
        world.snapshot(engine, ResidencySnapshot(chains=chains))
        cluster.decide()
        world.snapshot(engine, QueueSnapshot(waiting=waiting))
        cluster.decide()
    for context in (0, 1, 2, 3, 12, 13):
        world.start(context)
        world.end(context)
        world.close(context)
        cluster.decide()
    cluster.play(world.serve(20))
    await trio.lowlevel.checkpoint()


async def check_restart(factory: PolicyFactory, remembers: int) -> None:
    """It goes on when an engine restarts and knows nothing of before."""
    cluster = FakeCluster(factory(), "after a restart")
    world = cluster.world
    for context in range(4):
        world.describe(context)
        world.wait(context)
        world.store(context)
        cluster.decide()
    world.start(0)
    cluster.decide()
    for engine in ENGINES:
        for context in range(4):
            if engine_of(context) == engine:
                failed = RequestOutcome(status="failed", reason="engine_restarted")
                world.outcome(context, 1, failed)
        world.restart(engine)
        cluster.decide()
        world.describe(4, engine=POOL)
        cluster.decide()
    for context in range(4):  # the harness sends them again, under the same names
        world.describe(context)
        world.wait(context)
        cluster.decide()
        world.store(context)
        cluster.decide()
        world.start(context)
        world.end(context)
        cluster.decide()
    cluster.play(world.serve(20))
    await trio.lowlevel.checkpoint()


async def check_disorder(factory: PolicyFactory, remembers: int) -> None:
    """It goes on when requests end before they start, or are told of in any order or in part."""
    cluster = FakeCluster(factory(), "in disorder")
    world = cluster.world
    refused = RequestOutcome(status="rejected", reason="too_long")
    world.describe(0)
    cluster.decide()
    world.outcome(0, 1, refused)
    cluster.decide()
    world.describe(1)  # described and refused in one burst
    world.outcome(1, 1, refused)
    cluster.decide()
    world.describe(2)  # its whole life in one burst
    world.wait(2)
    world.start(2)
    world.end(2)
    world.close(2)
    cluster.decide()
    world.wait(3)  # heard of from the engine first
    cluster.decide()
    world.describe(3)
    cluster.decide()
    world.end(3, status="failed")
    cluster.decide()
    world.end(4)  # never described
    world.start(5)
    cluster.decide()
    world.describe(4)
    cluster.decide()
    world.describe(6, ready=False)
    cluster.decide()
    world.intent(RequestReadinessChanged(ready=True), request=request_of(6, 1))
    world.intent(RequestReadinessChanged(ready=True), request="nobody's")
    cluster.decide()
    world.wait(6)
    world.close(6)  # closed before its last outcome is heard
    cluster.decide()
    world.end(6)
    cluster.decide()
    world.wait(7)
    cluster.decide()
    world.describe(7)
    world.describe(7, turn=2)  # without waiting for the first
    world.wait(7, turn=2)
    cluster.decide()
    world.end(7, turn=2)
    cluster.decide()
    world.start(7)
    world.end(7)
    world.close(7)
    world.close(8)
    cluster.decide()
    for number, (key, described) in enumerate(
        (
            ({"engine": ENGINES[0]}, RequestDescribed()),
            ({"engine": ENGINES[0], "context": "c"}, RequestDescribed(prefix_hashes=pack([1, 2]))),
            ({"context": "c"}, RequestDescribed(prompt_tokens=64, block_size=16)),
            ({}, RequestDescribed(depends_on=("nobody's",))),
        )
    ):
        request = f"odd{number}"
        world.intent(described, request=request, **key)
        waiting = WaitingRequest(request=request, since_s=world.now)
        world.engine(ENGINES[0], QueueChanged(waiting=(waiting,)))
        world.store(0)
        cluster.decide()
        world.engine(ENGINES[0], QueueChanged(started=(request,)))
        world.engine(ENGINES[0], QueueChanged(ended=(request,)))
        world.engine(ENGINES[0], RequestOutcome(status="completed"), request=request)
        cluster.decide()
    world.intent(RequestDescribed(), engine=ENGINES[0])
    cluster.decide()
    world.intent(RequestDescribed(), request="bare", engine=POOL)
    world.describe(9, ready=False, engine=POOL)
    cluster.decide()
    world.intent(RequestReadinessChanged(ready=True), request=request_of(9, 1))
    cluster.decide()
    world.describe(9, engine=POOL)  # said again, and then not sent at all
    cluster.decide()
    cluster.play(world.serve(20))
    await trio.lowlevel.checkpoint()


async def check_memory(factory: PolicyFactory, remembers: int) -> None:
    """It holds nothing that grows with the requests and contexts that have ended."""
    cluster = FakeCluster(factory(), "memory")
    world = cluster.world
    served = 0

    def serve(count: int) -> int:
        nonlocal served
        for context in range(served, served + count):
            cluster.play(world.serve(context))
            world.evict(context)
        served += count
        for engine in ENGINES:
            world.engine(engine, ResidencyChanged(changes=(BlocksCleared(),)))
        # Who remembers for a while may; after a day without a message, that while is over.
        world.now += _DAY_S
        cluster.decide()
        return _size([cluster.policy, *(view.residency for view in cluster.s.values())])

    before = serve(max(remembers, _ROUND))
    await trio.lowlevel.checkpoint()
    after = serve(_ROUND)
    require(
        after - before <= _ROUND * _BYTES_A_REQUEST,
        f"holds nothing that grows: {_ROUND} more contexts of 2 requests, all of which have "
        f"ended, left {after - before} bytes more (of {after}) in the policy and its watches",
    )
    await trio.lowlevel.checkpoint()


async def check_determinism(factory: PolicyFactory, remembers: int) -> None:
    """It asks the same when it hears the same."""
    asked = []
    for _ in range(2):
        cluster = FakeCluster(factory(), "hearing the same twice")
        _improvise(cluster, Random(0))
        asked.append(cluster.asked)
        await trio.lowlevel.checkpoint()
    require(asked[0] == asked[1], "asks the same when it hears the same")


def _improvise(cluster: FakeCluster, draw: Random) -> None:
    """Many requests at once, each at its own pace, in bursts of any size."""
    waiting = list(range(40))
    lives: list[Iterator[None]] = []
    while waiting or lives:
        if waiting and (len(lives) < 8 or not lives):
            lives.append(cluster.world.serve(waiting.pop()))
        life = draw.choice(lives)
        if next(life, "over") == "over":
            lives.remove(life)
        if draw.random() < 0.1:
            engine = draw.choice(ENGINES)
            cluster.world.snapshot(engine, PressureReported())
        if draw.random() < 0.5:
            cluster.decide()


async def check_runner(factory: PolicyFactory, remembers: int) -> None:
    """Under its runner, on a bus, it does not fail, and leaves nothing open when it leaves."""
    bus: Bus = plugins.load_installed("buses", "memory")()
    runner = PolicyRunner(bus, factory())
    world = World()

    async def answer(
        engine: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        sequencer = Sequencer(engine)
        patterns = [f"control.{DEFAULT_TENANT}.{engine}.>"]
        async with bus.subscribe(patterns, name=engine) as controls:
            task_status.started()
            while True:
                for envelope in await controls.receive():
                    outcome = OperationOutcome(status="completed", control=envelope.kind)
                    bus.publish(sequencer.wrap(outcome, envelope.key, trio.current_time()))

    def say() -> None:
        for envelope in world.said:
            bus.publish(envelope)
        world.said.clear()

    finished = False
    with trio.move_on_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for engine in (*ENGINES, POOL):
                await nursery.start(answer, engine)
            await nursery.start(runner.run)
            world.begin()
            say()
            for context in range(10):
                for _ in world.serve(context):
                    say()
                    await trio.lowlevel.checkpoint()
            runner.stop()
            await runner.stopped.wait()
            finished = True
            nursery.cancel_scope.cancel()
    failure = runner.statistics.failure
    require(failure is None, f"under its runner: does not fail, but it {failure}")
    require(finished, "under its runner: comes to its end when it is stopped")
    lost = runner.statistics.outcomes["failed"]
    require(lost == 0, f"under its runner: {lost} of its operations were never answered")


# -- how much a policy holds --------------------------------------------------------------------

_NOT_ITS_OWN = (
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    HarnessView,
    EngineViews,
    EngineView,
)


def _size(roots: Iterable[object]) -> int:
    """The bytes of all that can be reached from some objects, but not code or the views."""
    todo, seen, size = list(roots), set[int](), 0
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, _NOT_ITS_OWN):
            continue
        seen.add(id(value))
        size += sys.getsizeof(value)
        todo.extend(gc.get_referents(value))
    return size


CHECKS: tuple[Check, ...] = (
    check_shape,
    check_empty,
    check_asks,
    check_gap,
    check_restart,
    check_disorder,
    check_memory,
    check_determinism,
    check_runner,
)
