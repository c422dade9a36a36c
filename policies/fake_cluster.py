"""A harness and a pool of two engines, played to one policy as its runner would, without a bus.

Owns what the checks of ``hear.policies.testing`` have in common: what is said, and that each
answer of the policy is one that it may give. It must not know which policy it plays to.
"""

from collections.abc import Iterable, Iterator

from hear.blocks import pack
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engine_view import EngineViews
from hear.errors import HearError
from hear.harness_view import HarnessView
from hear.interfaces import Ask, Policy
from hear.messages import (
    AXES,
    DEFAULT_TENANT,
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
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    ResidencyChanged,
    ResidencySnapshot,
    WaitingRequest,
)
from hear.policies.runtime.asks import check_ask
from hear.policies.runtime.runner import always_heard
from hear.policies.runtime.watchdog import TimeLimitPassed, time_limit
from hear.subjects import Matcher, subject

TIMEOUT_S = 10.0
ENGINES = ("engine0", "engine1")
POOL = "pool"
BLOCK_SIZE = 16
NUM_BLOCKS = 4


def require(condition: bool, promise: str) -> None:
    """Raise ``AssertionError`` if a promise was not kept."""
    if not condition:
        raise AssertionError(f"broken promise of the policy: {promise}")


def decide(policy: Policy, h: HarnessView, s: EngineViews, scene: str) -> list[Ask]:
    """Let a policy decide; whatever keeps it from returning is a broken promise."""
    try:
        with time_limit(TIMEOUT_S):
            return list(policy.decide(h, s))
    except TimeLimitPassed:
        problem = f"{scene}: decide does not return"
    except (Exception, SystemExit) as error:
        problem = f"{scene}: decide raised {error!r}"
    raise AssertionError(f"broken promise of the policy: {problem}")


class World:
    """Says what a harness and two engines would say. ``said`` holds what nobody has read yet."""

    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[Envelope] = []
        self._harness = Sequencer("harness")
        self._engines = {name: Sequencer(name) for name in (*ENGINES, POOL)}

    def begin(self) -> None:
        """The engines introduce themselves, and their pool."""
        for engine in ENGINES:
            self.introduce(engine)
        self.snapshot(POOL, CapabilitiesReported(controls=("route",), targets=ENGINES))

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

    def describe(
        self, context: int, turn: int = 1, *, ready: bool = True, engine: str | None = None
    ) -> None:
        if turn == 1:
            self.intent(ContextOpened(), context=context_of(context))
        described = RequestDescribed(
            turn=turn,
            ready=ready,
            prompt_tokens=NUM_BLOCKS * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            prefix_hashes=pack(blocks_of(context)),
        )
        self.intent(
            described,
            request=request_of(context, turn),
            context=context_of(context),
            context_version=turn,
            engine=engine or engine_of(context),
        )

    def outcome(self, context: int, turn: int, outcome: RequestOutcome) -> None:
        self.engine(
            engine_of(context),
            outcome,
            request=request_of(context, turn),
            context=context_of(context),
            context_version=turn,
        )

    def wait(self, context: int, turn: int = 1) -> None:
        self.outcome(context, turn, RequestOutcome(status="accepted"))
        waiting = WaitingRequest(
            request=request_of(context, turn), context=context_of(context), since_s=self.now
        )
        self.engine(engine_of(context), QueueChanged(waiting=(waiting,), num_waiting=1))

    def start(self, context: int, turn: int = 1) -> None:
        self.engine(engine_of(context), QueueChanged(started=(request_of(context, turn),)))

    def end(self, context: int, turn: int = 1, status: str = "completed") -> None:
        self.engine(engine_of(context), QueueChanged(ended=(request_of(context, turn),)))
        self.outcome(context, turn, RequestOutcome(status=status))  # type: ignore[arg-type]

    def store(self, context: int, count: int = NUM_BLOCKS) -> None:
        stored = BlocksStored(tier="gpu", prefix_hashes=pack(blocks_of(context)[:count]))
        self.engine(engine_of(context), ResidencyChanged(changes=(stored,)))

    def evict(self, context: int, keep: int = 0) -> None:
        removed = BlocksRemoved(tier="gpu", prefix_hashes=pack(blocks_of(context)[keep:][::-1]))
        self.engine(engine_of(context), ResidencyChanged(changes=(removed,)))

    def close(self, context: int) -> None:
        self.intent(ContextClosed(), context=context_of(context))

    def serve(self, context: int) -> Iterator[None]:
        """Two turns from beginning to end, a burst at a time."""
        for turn in (1, 2):
            self.describe(context, turn, engine=POOL)
            yield
            self.describe(context, turn)  # the pool has found an engine for it
            yield
            self.wait(context, turn)
            yield
            self.store(context, NUM_BLOCKS // 2)
            yield
            self.store(context)
            yield
            self.evict(context, keep=1)
            self.engine(engine_of(context), PressureReported(num_waiting=1))
            yield
            self.now += 1.0
            self.start(context, turn)
            self.store(context)
            yield
            self.now += 1.0
            self.end(context, turn)
            yield
            self.intent(ContextPaused(cause="person"), context=context_of(context))
            self.now += 10.0
            yield
        self.close(context)
        yield


def context_of(number: int) -> str:
    return f"c{number}"


def request_of(context: int, turn: int) -> str:
    return f"c{context}/{turn}"


def engine_of(context: int) -> str:
    return ENGINES[context % len(ENGINES)]


def blocks_of(context: int) -> list[int]:
    return [context * NUM_BLOCKS + place + 1 for place in range(NUM_BLOCKS)]


class FakeCluster:
    """Plays a world to one policy, as the runner would, without a bus."""

    def __init__(self, policy: Policy, scene: str) -> None:
        self.world = World()
        self.policy = policy
        self.h = HarnessView()
        self.s = EngineViews()
        self.asked: list[tuple[bytes, Key]] = []
        self._scene = scene
        self._hears = Matcher((*self.policy.observes, *always_heard(DEFAULT_TENANT)))
        self.world.begin()
        self.decide()

    def decide(self) -> None:
        """Let the policy hear what was said, as one burst, and check what it asks for."""
        for envelope in self.world.said:
            self._hear(envelope)
        self.world.said.clear()
        self.h.advance(self.world.now)
        self.s.advance(self.world.now)
        asks = decide(self.policy, self.h, self.s, self._scene)
        self.h.clear_changes()
        self.s.clear_changes()
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
            require(
                key.engine in (*ENGINES, POOL),
                f"{what} names an engine that is there: {key.engine}",
            )
            axis = AXES[type(message)]
            if axis in ("retention", "placement"):
                require(key.context is not None, f"{what} names its context")
            elif axis != "none":
                require(key.request is not None, f"{what} names its request")
        self.asked.append((bytes(envelope.body), key))
