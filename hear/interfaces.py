"""The interfaces of the protocol: what a bus, an engine backend, a policy and a client offer.

Each is a ``Protocol`` that others may implement; ``hear.buses.testing``, ``hear.engines.testing``
and ``hear.policies.testing`` hold the checks that an implementation can be put through.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from hear.messages import (
    DEFAULT_TENANT,
    BlockChange,
    BlocksStored,
    CapabilitiesReported,
    Control,
    CostsReported,
    Envelope,
    Key,
    OperationOutcome,
    OperationStatus,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestOutcome,
    ReuseExpected,
)
from hear.messages.envelope import Time
from hear.operation import Operation

if TYPE_CHECKING:
    from hear.engine_view import EngineViews
    from hear.harness_view import HarnessView


@dataclass(frozen=True, slots=True)
class SubscriptionStatistics:
    """``dropped`` counts state messages that this reader was too slow for."""

    name: str
    queued: int
    received: int
    dropped: int


@dataclass(frozen=True, slots=True)
class BusStatistics:
    """Messages published by category, and how each subscription fares.

    ``lagged`` counts the subscriptions that were closed with ``LaggedError``. ``own_key_only``: a
    bus with keys counts no more than the participants with the same key for who may not hear all.
    """

    published: dict[str, int]
    subscriptions: tuple[SubscriptionStatistics, ...]
    lagged: int = 0
    own_key_only: bool = False


class Subscription(Protocol):
    """One reader's place on a bus, from entering its context to leaving it."""

    async def receive(self) -> Sequence[Envelope]:
        """Wait for messages; returns all that are there, at least one, in order.

        Raises:
            LaggedError: too many reliable messages were left unread; the subscription is over.
            BusError: the bus or the subscription is closed.
        """
        ...

    def request_snapshot(self, envelope: Envelope) -> None:
        """Ask for a snapshot of the stream that ``envelope`` (one with a gap before it) is of.

        It arrives among the other messages. Nothing happens if nobody provides one.
        """
        ...

    def statistics(self) -> SubscriptionStatistics:
        """How this reader fares."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


SnapshotProvider = Callable[[], Iterable[Envelope]]


class Bus(Protocol):
    """Publish-subscribe in two delivery classes (docs/protocol.md).

    State is in order per channel, and a slow reader loses the oldest and sees the gap. Control,
    outcome and intent are reliable: never dropped for a reader that keeps up, and a reader that
    does not is closed with ``LaggedError`` rather than being lied to.
    """

    def publish(self, envelope: Envelope) -> None:
        """Send a message to all whose patterns match. Never waits for a reader.

        Raises:
            BusError: the bus is closed.
        """
        ...

    def subscribe(
        self, patterns: Iterable[str], *, name: str, capacity: int = 4096
    ) -> Subscription:
        """Make a subscription that holds up to ``capacity`` unread messages of each class.

        A subscriber that comes late is first given a snapshot of every matching stream.
        """
        ...

    def provide_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        """Name who answers for the state of one stream (a subject's stem)."""
        ...

    def withdraw_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        """``provider`` answers for a stream no more, if it still does; there are no snapshots then.

        Whoever provides has to withdraw when it ends, since a bus that outlives it would keep it.
        """
        ...

    def set_will(self, source: str, envelopes: Iterable[Envelope]) -> None:
        """Leave word what to publish if this process is lost without leaving the bus.

        Replaces what ``source`` left before. A bus that lives in its participants' process has
        nothing to do here, since it does not outlive them.
        """
        ...

    def statistics(self) -> BusStatistics:
        """What has passed, and who lags."""
        ...


class RememberingBus(Bus, Protocol):
    """A bus that keeps the most recent messages, so that one can ask what has happened."""

    async def history(self, patterns: Iterable[str]) -> Sequence[Envelope]:
        """The messages that it still remembers and that a pattern matches, oldest first.

        How far back that goes is bounded in bytes, and differs from bus to bus.

        Raises:
            BusError: the bus is closed or did not answer in time.
        """
        ...


class CentralBus(RememberingBus, Protocol):
    """A bus with a centre, which knows how every participant fares and not only this one."""

    async def central_statistics(self) -> BusStatistics:
        """The same as ``statistics``, with rows of all participants (but for ``own_key_only``).

        Raises:
            BusError: the bus is closed or did not answer in time.
        """
        ...


class ApplyResult(NamedTuple):
    """What a backend says of a control that it was handed.

    ``accepted`` means that the effect is under way or has a span of its own (a lease, a guard),
    and that an ``OperationEnded`` will follow; ``standing`` tells that it has already taken hold,
    so that the control's deadline no longer concerns it.
    """

    status: OperationStatus
    reason: str = ""
    detail: str = ""
    fallback: str | None = None
    standing: bool = False


class OperationEnded(NamedTuple):
    """The end of an operation that the backend had accepted, of the tenant of its report."""

    operation: str
    outcome: OperationOutcome


@dataclass(slots=True)
class Report:
    """What happened in an engine since its last report, as far as it concerns one tenant.

    ``arrived`` holds keys of new requests; ``asked`` controls that came to the engine itself, along
    with a request, to be taken in as if off the bus; ``results`` what became of operations, by id,
    of which ``EngineBackend.apply`` could not tell at once. ``residency_anew``: the backend lost
    sight of what the engine holds, or found it again, so all is to be told anew, and ``blocks`` of
    such a report say nothing. ``capabilities`` is what the engine can do, where that has changed
    other than in its controls. These two concern every tenant, whichever the report is of.
    """

    arrived: list[Key] = field(default_factory=list)
    asked: list[tuple[Key, Control]] = field(default_factory=list)
    results: list[tuple[str, ApplyResult]] = field(default_factory=list)
    blocks: list[BlockChange] = field(default_factory=list)
    residency_anew: bool = False
    capabilities: CapabilitiesReported | None = None
    queue: QueueChanged | None = None
    operations: list[OperationEnded] = field(default_factory=list)
    requests: list[tuple[Key, RequestOutcome]] = field(default_factory=list)
    tenant: str = DEFAULT_TENANT


class EngineBackend(Protocol):
    """One inference library behind the worker. All methods but ``run`` return at once.

    One engine may serve several tenants. Requests, contexts, operations and blocks are of one each:
    two may use the same ids and the same block hashes, and neither meets what is the other's.
    """

    def capabilities(self) -> CapabilitiesReported:
        """What this engine can do."""
        ...

    def costs(self) -> CostsReported:
        """What work costs on it."""
        ...

    def pressure(self) -> PressureReported:
        """How full it is now."""
        ...

    def queue(self, tenant: str = DEFAULT_TENANT) -> QueueSnapshot:
        """Which requests of a tenant wait and which run now."""
        ...

    def residency(self, tenant: str = DEFAULT_TENANT) -> Iterable[BlocksStored]:
        """All resident blocks of a tenant, as chains, in any order."""
        ...

    def residency_known(self) -> bool:
        """Whether ``residency`` is all that is resident, and not only what is known of."""
        ...

    def apply(self, operation: Operation) -> ApplyResult | None:
        """Carry out a control, or begin to.

        None if only the engine's own thread can tell how it goes: the result then comes in a
        ``Report``, in the order in which operations were handed over, or the deadline passes.
        A ``Cancel`` or ``Withdraw`` comes after the reverts that it brings about, and is completed
        when their effects are gone.
        """
        ...

    def expect(self, operation: Operation) -> None:
        """A control is kept for a request that has not come.

        When it comes, it must not start before the worker has been told of it and has answered.
        """
        ...

    def revert(self, operation: Operation) -> None:
        """End what an operation still effects. It gets no ``OperationEnded`` any more."""
        ...

    async def run(self, report: Callable[[Report], None]) -> None:
        """Serve until cancelled, and report each change, to each tenant its own."""
        ...


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One generation, as a client sends it to an engine on the data path.

    ``prompt_hashes`` names the full blocks of the prompt; ``output_hashes`` those that prompt and
    output fill together, as far as the one who replays a recording knows them. Ids and hashes are
    those of ``tenant``, and mean nothing to others.

    A real engine needs the prompt itself: ``prompt`` is a text or the ids of its tokens, or else
    ``messages`` are those of a chat. ``cache_salt`` keeps its blocks apart from equal ones of
    other salts. ``priority`` is the one that it is sent with: smaller goes first, 0 is the default.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    prompt_hashes: Sequence[int]
    output_hashes: Sequence[int] = ()
    context: str | None = None
    context_version: int | None = None
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    prompt: str | Sequence[int] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """How a generation went, as its client saw it. Times are of the clock that trio reads.

    ``text`` and ``token_ids`` are the answer, where the engine makes one and tells. ``unserved``
    says of a failure that nothing of an answer has come, so that another engine may be asked.
    """

    outcome: RequestOutcome
    sent_s: Time
    started_s: Time
    first_token_s: Time
    finished_s: Time
    text: str = ""
    token_ids: Sequence[int] = ()
    unserved: bool = False


class InferenceClient(Protocol):
    """The data path: requests go straight to the engine, whatever happens to the bus."""

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        """Send a request and wait for its last token, or for its refusal.

        Raises:
            UnservedError: the engine cannot be reached, or has gone before anything of an answer
                came. A client may as well return a failed result that is ``unserved``.
        """
        ...


class Ask(NamedTuple):
    """What a policy wants published, and what it is about: a control, or a marked prediction."""

    message: Control | ReuseExpected
    key: Key


class Policy(Protocol):
    """An independent subscriber that turns both views into controls: d = pi(h, s), equation 1.

    ``observes`` are the subject patterns that the policy needs. ``decide`` is called once for each
    burst of messages; what changed since the last call stands in ``h.changes`` and ``s.changes``.
    It must return at once, and may keep what it learns in the object.
    """

    @property
    def name(self) -> str:
        """The source of its messages, if nothing else is configured."""
        ...

    @property
    def observes(self) -> tuple[str, ...]:
        """Subject patterns."""
        ...

    def decide(self, h: "HarnessView", s: "EngineViews") -> Iterable[Ask]:
        """Decide what to ask of the engines now."""
        ...
