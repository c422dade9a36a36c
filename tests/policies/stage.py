"""Plays a harness and engines to one policy, without a bus: the least that its tests need."""

from collections.abc import Sequence

from hear.blocks import pack
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engine_view import EngineView, EngineViews
from hear.harness_view import HarnessView
from hear.interfaces import Ask, Policy
from hear.messages import (
    BlockChange,
    BlocksRemoved,
    BlocksStored,
    CapabilitiesReported,
    Envelope,
    Key,
    Message,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    RequestStatus,
    ResidencyChanged,
    ResidencySnapshot,
    WaitingRequest,
)

ENGINE = "e0"
BLOCK_SIZE = 10


class Stage:
    """What is said waits until ``decide``, as a burst; ``lose`` drops it instead."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.h = HarnessView()
        self.s = EngineViews()
        self.now = 0.0
        self._said: list[Envelope] = []
        self._harness = Sequencer("harness")
        self._engines = {ENGINE: Sequencer(ENGINE)}
        self.snapshot(QueueSnapshot())
        self.snapshot(ResidencySnapshot())
        assert self.decide() == []

    @property
    def view(self) -> EngineView:
        return self.s[ENGINE]

    def decide(self) -> list[Ask]:
        for envelope in self._said:
            message = open_body(envelope)
            assert message is not None
            if envelope.category == "state":
                self.s.apply(envelope, message)
            else:
                self.h.apply(envelope, message)
        self._said.clear()
        self.h.advance(self.now)
        self.s.advance(self.now)
        asks = list(self.policy.decide(self.h, self.s))
        self.h.clear_changes()
        self.s.clear_changes()
        return asks

    def lose(self) -> None:
        self._said.clear()

    def restart(self, engine: str = ENGINE) -> None:
        self._engines[engine].restart()
        self.snapshot(ResidencySnapshot(), engine)
        self.snapshot(QueueSnapshot(), engine)

    def intent(self, message: Message, key: Key) -> None:
        self._said.append(self._harness.wrap(message, key, self.now))

    def engine(self, message: Message, key: Key | None = None) -> None:
        key = key or Key(engine=ENGINE)
        self._said.append(self._sequencer(key.engine or ENGINE).wrap(message, key, self.now))

    def snapshot(self, message: Message, engine: str = ENGINE) -> None:
        sequencer = self._sequencer(engine)
        self._said.append(sequencer.wrap_snapshot(message, Key(engine=engine), self.now))

    def pool(self, *engines: str) -> None:
        """A pool says which engines it has."""
        offered = CapabilitiesReported(controls=("route",), targets=engines or (ENGINE,))
        self.snapshot(offered, "pool")

    def _sequencer(self, engine: str) -> Sequencer:
        return self._engines.setdefault(engine, Sequencer(engine))

    # -- what is said most often ---------------------------------------------------------------

    def describe(
        self,
        request: str,
        hashes: Sequence[int] = (),
        *,
        tokens: int | None = None,
        context: str | None = None,
        engine: str | None = ENGINE,
        ready: bool = True,
        turn: int = 0,
    ) -> None:
        described = RequestDescribed(
            turn=turn,
            ready=ready,
            prompt_tokens=len(hashes) * BLOCK_SIZE if tokens is None else tokens,
            block_size=BLOCK_SIZE,
            prefix_hashes=pack(hashes),
        )
        version = turn if context is not None else None
        key = Key(request=request, context=context, context_version=version, engine=engine)
        self.intent(described, key)

    def wait(self, *requests: str, priority: int = 0) -> None:
        self.engine(QueueChanged(waiting=tuple(waiting(r, priority) for r in requests)))

    def start(self, *requests: str) -> None:
        self.engine(QueueChanged(started=requests))

    def leave(self, *requests: str) -> None:
        self.engine(QueueChanged(ended=requests))

    def outcome(self, request: str, status: RequestStatus, context: str | None = None) -> None:
        key = Key(request=request, context=context, engine=ENGINE)
        self.engine(RequestOutcome(status=status), key)

    def blocks(self, *changes: BlockChange) -> None:
        self.engine(ResidencyChanged(changes=changes))

    def queue(self, *requests: str) -> None:
        self.snapshot(QueueSnapshot(waiting=tuple(waiting(r, 0) for r in requests)))


def waiting(request: str, priority: int = 0) -> WaitingRequest:
    return WaitingRequest(request=request, since_s=0.0, priority=priority)


def stored(hashes: Sequence[int], *, parent: int | None = None, tier: str = "gpu") -> BlocksStored:
    return BlocksStored(tier=tier, parent=parent, prefix_hashes=pack(hashes))


def removed(hashes: Sequence[int], *, tier: str = "gpu") -> BlocksRemoved:
    return BlocksRemoved(tier=tier, prefix_hashes=pack(hashes))
