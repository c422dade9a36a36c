"""What a rule of ``hear.engines.testing`` is, and what it is told of the engine that it checks."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn, Protocol

from hear.interfaces import (
    ApplyResult,
    Bus,
    BusStatistics,
    EngineBackend,
    InferenceClient,
    InferenceRequest,
    InferenceResult,
    Report,
    SnapshotProvider,
    Subscription,
)
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    Cancel,
    CapabilitiesReported,
    CostsReported,
    Envelope,
    PressureReported,
    QueueSnapshot,
    Withdraw,
)
from hear.operation import Operation


class MakeRequest(Protocol):
    """Makes a request whose prompt begins with ``num_blocks`` blocks of a context's history."""

    def __call__(
        self, id: str, *, context: str, num_blocks: int, output_tokens: int
    ) -> InferenceRequest:
        """The prompt is those blocks and at least one token more, but not a whole block more.

        Requests of one context share the blocks that both have; of different contexts none. With
        the same number of blocks they are the same prompt, and so have the same output. The
        request names its context, and its ``prompt_hashes`` are those that the engine reports.
        """
        ...


def _of_tenant(request: InferenceRequest, tenant: str) -> InferenceRequest:
    return replace(request, tenant=tenant)


def _output_of(request: InferenceRequest, result: InferenceResult) -> object:
    return result.outcome.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUnderTest:
    """One engine, new and empty, and what the rules have to know of it.

    Set it up to run one request at a time, and with little room, 16 to 64 blocks on the GPU, so
    that pressure comes soon. All seconds are of the clock that trio reads, real or virtual.

    Attributes:
        long_output_tokens: an output that keeps the engine busy for a good while: longer than
            ``quiet_s`` many times over, and it must fit beside 3/4 of the blocks.
        output_of: what a client was answered, as something that can be compared.
        quiet_s: how long to wait before it is said that nothing happens.
        patience_s: how long to wait for anything that should happen.
        of_tenant: the same request, of another tenant, with the hashes that this one is told.
        crash: kills the engine, so that the backend's ``run`` raises ``EngineError``; None if
            there is no way to.
        check: looks whether the engine is in order, and raises ``AssertionError`` if it is not.
        shows: what the backend can tell of the engine's insides.
    """

    name: str
    backend: EngineBackend
    client: InferenceClient
    make_request: MakeRequest
    long_output_tokens: int
    output_of: Callable[[InferenceRequest, InferenceResult], object] = _output_of
    quiet_s: float = 1.0
    patience_s: float = 60.0
    of_tenant: Callable[[InferenceRequest, str], InferenceRequest] = _of_tenant
    crash: Callable[[], None] | None = None
    check: Callable[[], None] = lambda: None
    shows: frozenset[str] = frozenset({"queue", "residency"})


EngineFactory = Callable[[], AbstractAsyncContextManager[EngineUnderTest]]
"""Makes an engine that holds nothing, and that is gone when its context is left."""


def fail(message: str) -> NoReturn:
    """Say which promise was broken."""
    raise AssertionError(f"broken promise of the engine: {message}")


def require(condition: bool, message: str) -> None:
    """Check a promise."""
    if not condition:
        fail(message)


class WatchedBackend:
    """An ``EngineBackend`` that passes all on, and counts what is handed to the one behind it."""

    def __init__(self, engine: EngineUnderTest) -> None:
        self._inner = engine.backend
        self._check = engine.check
        self.applied: Counter[tuple[str, str]] = Counter()  # by tenant and operation

    def capabilities(self) -> CapabilitiesReported:
        return self._inner.capabilities()

    def costs(self) -> CostsReported:
        return self._inner.costs()

    def pressure(self) -> PressureReported:
        return self._inner.pressure()

    def queue(self, tenant: str = DEFAULT_TENANT) -> QueueSnapshot:
        return self._inner.queue(tenant)

    def residency(self, tenant: str = DEFAULT_TENANT) -> Iterable[BlocksStored]:
        return self._inner.residency(tenant)

    def residency_known(self) -> bool:
        return self._inner.residency_known()

    def apply(self, operation: Operation) -> ApplyResult | None:
        if not isinstance(operation.control, Cancel | Withdraw):  # these act by what they revert
            self.applied[operation.ref] += 1
        result = self._inner.apply(operation)
        self._check()
        return result

    def expect(self, operation: Operation) -> None:
        self._inner.expect(operation)

    def revert(self, operation: Operation) -> None:
        self._inner.revert(operation)
        self._check()

    async def run(self, report: Callable[[Report], None]) -> None:
        def checked(made: Report) -> None:
            self._check()
            report(made)

        await self._inner.run(checked)


class Wire:
    """A bus that lets the bench see each message in the moment in which it is published."""

    def __init__(self, bus: Bus, seen: Callable[[Envelope], None]) -> None:
        self._bus = bus
        self._seen = seen
        self.providers: dict[str, SnapshotProvider] = {}

    def publish(self, envelope: Envelope) -> None:
        self._seen(envelope)
        self._bus.publish(envelope)

    def subscribe(
        self, patterns: Iterable[str], *, name: str, capacity: int = 4096
    ) -> Subscription:
        return self._bus.subscribe(patterns, name=name, capacity=capacity)

    def provide_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        self.providers[subject] = provider
        self._bus.provide_snapshots(subject, provider)

    def withdraw_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        self._bus.withdraw_snapshots(subject, provider)

    def set_will(self, source: str, envelopes: Iterable[Envelope]) -> None:
        self._bus.set_will(source, envelopes)

    def statistics(self) -> BusStatistics:
        return self._bus.statistics()


class Rule(NamedTuple):
    """One promise.

    ``needs`` are the kinds of control without which there is nothing to check, ``looks_at`` is what
    the engine has to show for it, and ``crashes`` tells that it has to be killed.
    """

    title: str
    source: str
    check: Callable[[EngineFactory], Awaitable[None]]
    needs: tuple[str, ...]
    looks_at: tuple[str, ...]
    crashes: bool


class RuleBook(dict[str, Rule]):
    """The rules of one module by id; it is called as a decorator to enter a check.

    An id keeps its meaning for ever; one that is given up is not used again.
    """

    def __call__(
        self,
        id: str,
        title: str,
        source: str,
        *,
        needs: Iterable[str] = (),
        looks_at: Iterable[str] = (),
        crashes: bool = False,
    ) -> Callable[[Callable[[EngineFactory], Awaitable[None]]], None]:
        """Enter the check that is defined next."""

        def enter(check: Callable[[EngineFactory], Awaitable[None]]) -> None:
            assert id not in self, id
            self[id] = Rule(title, source, check, tuple(needs), tuple(looks_at), crashes)

        return enter
