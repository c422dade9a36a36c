"""Checks that any policy can be put through (``hear.seams.Policy``), a user's own as well.

``check_policy`` runs them all; ``CHECKS`` lists them, so that a test suite can name each. A check
takes a factory and makes its own policies with it, plays a harness and two engines to them, and
raises ``AssertionError`` that says which promise was broken. None waits for the clock.

It must not know which policy it checks, nor any test framework.
"""

import gc
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from random import Random
from types import BuiltinFunctionType, FunctionType, ModuleType

import trio

from hear import plugins
from hear.blocks import pack
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engine_view import EngineView, EngineViews
from hear.errors import HearError
from hear.harness_view import HarnessView
from hear.messages import (
    AXES,
    DEFAULT_TENANT,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CapabilitiesReported,
    ContextClosed,
    ContextOpened,
    ContextPaused,
    Control,
    Envelope,
    Key,
    Message,
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
from hear.policies.asks import check_ask
from hear.policies.runner import PolicyRunner
from hear.policies.spec import shape_problem
from hear.policies.watchdog import TimeLimitPassed, time_limit
from hear.seams import Ask, Bus, Policy
from hear.subjects import Matcher, subject

PolicyFactory = Callable[[], Policy]
"""Makes a new policy; a class without required arguments is one."""

Check = Callable[[PolicyFactory, int], Awaitable[None]]

TIMEOUT_S = 10.0
ENGINES = ("engine0", "engine1")
BLOCK_SIZE = 16
NUM_BLOCKS = 4
_DAY_S = 86_400.0
_ROUND = 300
_BYTES_A_REQUEST = 8


async def check_policy(factory: PolicyFactory, *, remembers: int = 0) -> None:
    """Check that a policy keeps what ``hear.seams.Policy`` and docs/protocol.md ask of one.

    ``remembers`` is how many requests a policy may remember, on purpose and with a bound, after
    they have ended: before the check of memory measures anything, it serves that many.

    Raises:
        AssertionError: a promise was broken; the message says which.
    """
    for check in CHECKS:
        await check(factory, remembers)


def _require(condition: bool, promise: str) -> None:
    if not condition:
        raise AssertionError(f"broken promise of the policy: {promise}")


def _decide(policy: Policy, h: HarnessView, s: EngineViews, scene: str) -> list[Ask]:
    try:
        with time_limit(TIMEOUT_S):
            return list(policy.decide(h, s))
    except TimeLimitPassed:
        problem = f"{scene}: decide does not return"
    except (Exception, SystemExit) as error:
        problem = f"{scene}: decide raised {error!r}"
    raise AssertionError(f"broken promise of the policy: {problem}")


class _World:
    """Says what a harness and two engines would say. ``said`` holds what nobody has read yet."""

    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[Envelope] = []
        self._harness = Sequencer("harness")
        self._engines = {name: Sequencer(name) for name in ENGINES}

    def begin(self) -> None:
        """The engines introduce themselves."""
        for engine in ENGINES:
            self.introduce(engine)

    def introduce(self, engine: str) -> None:
        for message in (
            CapabilitiesReported(controls=("prioritise", "bound_wait", "retain", "release")),
            ResidencySnapshot(),
            QueueSnapshot(),
        ):
            self.snapshot(engine, message)

    def restart(self, engine: str) -> None:
        self._engines[engine].restart()
        self.introduce(engine)

    def intent(self, message: Message, **key: str | int | None) -> None:
        self._say(self._harness, message, Key(**key, workflow="w"))  # type: ignore[arg-type]

    def engine(self, engine: str, message: Message, **key: str | int | None) -> None:
        self._say(self._engines[engine], message, Key(**key, engine=engine))  # type: ignore[arg-type]

    def snapshot(self, engine: str, message: Message) -> None:
        sequencer = self._engines[engine]
        self.said.append(sequencer.wrap_snapshot(message, Key(engine=engine), self.now))

    def _say(self, sequencer: Sequencer, message: Message, key: Key) -> None:
        self.said.append(sequencer.wrap(message, key, self.now))

    # -- the life of one request, on a context of its own or a later turn of one ----------------

    def describe(self, context: int, turn: int = 1, *, ready: bool = True) -> None:
        if turn == 1:
            self.intent(ContextOpened(), context=_context(context))
        described = RequestDescribed(
            turn=turn,
            ready=ready,
            prompt_tokens=NUM_BLOCKS * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            prefix_hashes=pack(_blocks(context)),
        )
        self.intent(
            described,
            request=_request(context, turn),
            context=_context(context),
            context_version=turn,
            engine=_engine_of(context),
        )

    def outcome(self, context: int, turn: int, outcome: RequestOutcome) -> None:
        self.engine(
            _engine_of(context),
            outcome,
            request=_request(context, turn),
            context=_context(context),
            context_version=turn,
        )

    def wait(self, context: int, turn: int = 1) -> None:
        self.outcome(context, turn, RequestOutcome(status="accepted"))
        waiting = WaitingRequest(
            request=_request(context, turn), context=_context(context), since_s=self.now
        )
        self.engine(_engine_of(context), QueueChanged(waiting=(waiting,), num_waiting=1))

    def start(self, context: int, turn: int = 1) -> None:
        self.engine(_engine_of(context), QueueChanged(started=(_request(context, turn),)))

    def end(self, context: int, turn: int = 1, status: str = "completed") -> None:
        self.engine(_engine_of(context), QueueChanged(ended=(_request(context, turn),)))
        self.outcome(context, turn, RequestOutcome(status=status))  # type: ignore[arg-type]

    def store(self, context: int, count: int = NUM_BLOCKS) -> None:
        stored = BlocksStored(tier="gpu", prefix_hashes=pack(_blocks(context)[:count]))
        self.engine(_engine_of(context), ResidencyChanged(changes=(stored,)))

    def evict(self, context: int, keep: int = 0) -> None:
        removed = BlocksRemoved(tier="gpu", prefix_hashes=pack(_blocks(context)[keep:][::-1]))
        self.engine(_engine_of(context), ResidencyChanged(changes=(removed,)))

    def close(self, context: int) -> None:
        self.intent(ContextClosed(), context=_context(context))

    def serve(self, context: int) -> Iterator[None]:
        """Two turns from beginning to end, a burst at a time."""
        for turn in (1, 2):
            self.describe(context, turn)
            yield
            self.wait(context, turn)
            yield
            self.store(context, NUM_BLOCKS // 2)
            yield
            self.store(context)
            yield
            self.evict(context, keep=1)
            self.engine(_engine_of(context), PressureReported(num_waiting=1))
            yield
            self.now += 1.0
            self.start(context, turn)
            self.store(context)
            yield
            self.now += 1.0
            self.end(context, turn)
            yield
            self.intent(ContextPaused(cause="person"), context=_context(context))
            self.now += 10.0
            yield
        self.close(context)
        yield


def _context(number: int) -> str:
    return f"c{number}"


def _request(context: int, turn: int) -> str:
    return f"c{context}/{turn}"


def _engine_of(context: int) -> str:
    return ENGINES[context % len(ENGINES)]


def _blocks(context: int) -> list[int]:
    return [context * NUM_BLOCKS + place + 1 for place in range(NUM_BLOCKS)]


class _Stage:
    """Plays a world to one policy, as the runner would, without a bus."""

    def __init__(self, factory: PolicyFactory, scene: str) -> None:
        self.world = _World()
        self.policy = factory()
        self.h = HarnessView()
        self.s = EngineViews()
        self.asked: list[tuple[bytes, Key]] = []
        self._scene = scene
        own = (f"outcome.{DEFAULT_TENANT}.>", f"state.{DEFAULT_TENANT}.*.capabilities.>")
        self._hears = Matcher((*self.policy.observes, *own))
        self.world.begin()
        self.decide()

    def decide(self) -> None:
        """Let the policy hear what was said, as one burst, and check what it asks for."""
        for envelope in self.world.said:
            self._hear(envelope)
        self.world.said.clear()
        self.h.now = self.world.now
        asks = _decide(self.policy, self.h, self.s, self._scene)
        self.h.changes.clear()
        self.s.changes.clear()
        for ask in asks:
            self._take(ask)

    def play(self, bursts: Iterable[None]) -> None:
        for _ in bursts:
            self.decide()

    def lose(self) -> None:
        """What was said does not reach the policy."""
        self.world.said.clear()

    def _hear(self, envelope: Envelope) -> None:
        if not self._hears.matches(subject(envelope)):
            return
        message = open_body(envelope)
        assert message is not None
        if envelope.category == "state":
            self.s.apply(envelope, message)
        elif envelope.category == "intent" or isinstance(message, RequestOutcome):
            self.h.apply(envelope, message)

    def _take(self, ask: Ask) -> None:
        try:
            message, key = check_ask(ask)
            envelope = Sequencer("policy").wrap(message, key, self.world.now)
            open_body(envelope)
        except HearError as error:
            raise AssertionError(f"broken promise of the policy: {self._scene}: {error}") from error
        if isinstance(message, Control):
            what = f"{self._scene}: {envelope.kind}"
            _require(key.engine in ENGINES, f"{what} names an engine that is there: {key.engine}")
            axis = AXES[type(message)]
            if axis in ("retention", "placement"):
                _require(key.context is not None, f"{what} names its context")
            elif axis != "none":
                _require(key.request is not None, f"{what} names its request")
        self.asked.append((bytes(envelope.body), key))


async def check_shape(factory: PolicyFactory, remembers: int) -> None:
    """It has a name, observes subject patterns, and decides."""
    policy = factory()
    problem = shape_problem(policy)
    _require(not problem, f"it has name, observes and decide: {problem}")
    other = factory()
    _require(other is not policy, "the factory makes a new one each time")
    _require(other.name == policy.name, "all that one factory makes have the same name")
    await trio.lowlevel.checkpoint()


async def check_empty(factory: PolicyFactory, remembers: int) -> None:
    """It decides when nothing is known yet, and asks nothing of engines that nobody knows."""
    asks = _decide(factory(), HarnessView(), EngineViews(), "empty views")
    _require(not asks, f"empty views: asks nothing, got {asks}")
    stage = _Stage(factory, "nothing but engines")
    stage.decide()
    await trio.lowlevel.checkpoint()


async def check_asks(factory: PolicyFactory, remembers: int) -> None:
    """It asks only for controls, each of an engine, and for predictions marked as such."""
    stage = _Stage(factory, "asks")
    for context in range(6):
        stage.play(stage.world.serve(context))
    await trio.lowlevel.checkpoint()
    lives = [stage.world.serve(context) for context in range(10, 16)]
    for _ in zip(*lives, strict=True):  # all at once
        stage.decide()


async def check_gap(factory: PolicyFactory, remembers: int) -> None:
    """It goes on when state was lost, while residency and queue are unknown, and after."""
    stage = _Stage(factory, "after a gap")
    world = stage.world
    for context in range(4):
        world.describe(context)
        world.wait(context)
    stage.decide()
    for lost in (0, 1):
        world.store(lost)
        world.start(lost)
    stage.lose()
    for context in (2, 3):
        world.store(context)
        stage.decide()
        world.describe(context + 10)
        world.wait(context + 10)
        stage.decide()
    for engine in ENGINES:
        mine = [c for c in (2, 3, 12, 13) if _engine_of(c) == engine]
        chains = tuple(BlocksStored(tier="gpu", prefix_hashes=pack(_blocks(c))) for c in mine)
        waiting = tuple(WaitingRequest(request=_request(c, 1), since_s=0.0) for c in mine)
        world.snapshot(engine, ResidencySnapshot(chains=chains))
        stage.decide()
        world.snapshot(engine, QueueSnapshot(waiting=waiting))
        stage.decide()
    for context in (0, 1, 2, 3, 12, 13):
        world.start(context)
        world.end(context)
        world.close(context)
        stage.decide()
    stage.play(world.serve(20))
    await trio.lowlevel.checkpoint()


async def check_restart(factory: PolicyFactory, remembers: int) -> None:
    """It goes on when an engine restarts and knows nothing of before."""
    stage = _Stage(factory, "after a restart")
    world = stage.world
    for context in range(4):
        world.describe(context)
        world.wait(context)
        world.store(context)
        stage.decide()
    world.start(0)
    stage.decide()
    for engine in ENGINES:
        for context in range(4):
            if _engine_of(context) == engine:
                failed = RequestOutcome(status="failed", reason="engine_restarted")
                world.outcome(context, 1, failed)
        world.restart(engine)
        stage.decide()
    for context in range(4):  # the harness sends them again, under the same names
        world.describe(context)
        world.wait(context)
        stage.decide()
        world.store(context)
        stage.decide()
        world.start(context)
        world.end(context)
        stage.decide()
    stage.play(world.serve(20))
    await trio.lowlevel.checkpoint()


async def check_disorder(factory: PolicyFactory, remembers: int) -> None:
    """It goes on when requests end before they start, or are told of in any order or in part."""
    stage = _Stage(factory, "in disorder")
    world = stage.world
    refused = RequestOutcome(status="rejected", reason="too_long")
    world.describe(0)
    stage.decide()
    world.outcome(0, 1, refused)
    stage.decide()
    world.describe(1)  # described and refused in one burst
    world.outcome(1, 1, refused)
    stage.decide()
    world.describe(2)  # its whole life in one burst
    world.wait(2)
    world.start(2)
    world.end(2)
    world.close(2)
    stage.decide()
    world.wait(3)  # heard of from the engine first
    stage.decide()
    world.describe(3)
    stage.decide()
    world.end(3, status="failed")
    stage.decide()
    world.end(4)  # never described
    world.start(5)
    stage.decide()
    world.describe(4)
    stage.decide()
    world.describe(6, ready=False)
    stage.decide()
    world.intent(RequestReadinessChanged(ready=True), request=_request(6, 1))
    world.intent(RequestReadinessChanged(ready=True), request="nobody's")
    stage.decide()
    world.wait(6)
    world.close(6)  # closed before its last outcome is heard
    stage.decide()
    world.end(6)
    stage.decide()
    world.wait(7)
    stage.decide()
    world.describe(7)
    world.describe(7, turn=2)  # without waiting for the first
    world.wait(7, turn=2)
    stage.decide()
    world.end(7, turn=2)
    stage.decide()
    world.start(7)
    world.end(7)
    world.close(7)
    world.close(8)
    stage.decide()
    for number, (key, described) in enumerate(
        (
            ({"engine": ENGINES[0]}, RequestDescribed()),
            ({"engine": ENGINES[0], "context": "c"}, RequestDescribed(prefix_hashes=b"odd")),
            ({"context": "c"}, RequestDescribed(prompt_tokens=64, block_size=16)),
            ({}, RequestDescribed(depends_on=("nobody's",))),
        )
    ):
        request = f"odd{number}"
        world.intent(described, request=request, **key)
        waiting = WaitingRequest(request=request, since_s=world.now)
        world.engine(ENGINES[0], QueueChanged(waiting=(waiting,)))
        world.store(0)
        stage.decide()
        world.engine(ENGINES[0], QueueChanged(started=(request,)))
        world.engine(ENGINES[0], QueueChanged(ended=(request,)))
        world.engine(ENGINES[0], RequestOutcome(status="completed"), request=request)
        stage.decide()
    world.intent(RequestDescribed(), engine=ENGINES[0])
    stage.decide()
    stage.play(world.serve(20))
    await trio.lowlevel.checkpoint()


async def check_memory(factory: PolicyFactory, remembers: int) -> None:
    """It holds nothing that grows with the requests and contexts that have ended."""
    stage = _Stage(factory, "memory")
    world = stage.world
    served = 0

    def serve(count: int) -> int:
        nonlocal served
        for context in range(served, served + count):
            stage.play(world.serve(context))
            world.evict(context)
        served += count
        for engine in ENGINES:
            world.engine(engine, ResidencyChanged(changes=(BlocksCleared(),)))
        # Who remembers for a while may; after a day without a message, that while is over.
        world.now += _DAY_S
        stage.decide()
        return _size([stage.policy, *(view.residency for view in stage.s.values())])

    before = serve(max(remembers, _ROUND))
    await trio.lowlevel.checkpoint()
    after = serve(_ROUND)
    _require(
        after - before <= _ROUND * _BYTES_A_REQUEST,
        f"holds nothing that grows: {_ROUND} more contexts of 2 requests, all of which have "
        f"ended, left {after - before} bytes more (of {after}) in the policy and its watches",
    )
    await trio.lowlevel.checkpoint()


async def check_determinism(factory: PolicyFactory, remembers: int) -> None:
    """It asks the same when it hears the same."""
    asked = []
    for _ in range(2):
        stage = _Stage(factory, "hearing the same twice")
        _improvise(stage, Random(0))
        asked.append(stage.asked)
        await trio.lowlevel.checkpoint()
    _require(asked[0] == asked[1], "asks the same when it hears the same")


def _improvise(stage: _Stage, draw: Random) -> None:
    """Many requests at once, each at its own pace, in bursts of any size."""
    waiting = list(range(40))
    lives: list[Iterator[None]] = []
    while waiting or lives:
        if waiting and (len(lives) < 8 or not lives):
            lives.append(stage.world.serve(waiting.pop()))
        life = draw.choice(lives)
        if next(life, "over") == "over":
            lives.remove(life)
        if draw.random() < 0.1:
            engine = draw.choice(ENGINES)
            stage.world.snapshot(engine, PressureReported())
        if draw.random() < 0.5:
            stage.decide()


async def check_runner(factory: PolicyFactory, remembers: int) -> None:
    """Under its runner, on a bus, it does not fail, and leaves nothing open when it leaves."""
    bus: Bus = plugins.load("buses", "memory")()
    runner = PolicyRunner(bus, factory())
    world = _World()

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
            for engine in ENGINES:
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
    _require(failure is None, f"under its runner: does not fail, but it {failure}")
    _require(finished, "under its runner: comes to its end when it is stopped")
    lost = runner.statistics.outcomes["failed"]
    _require(lost == 0, f"under its runner: {lost} of its operations were never answered")


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
