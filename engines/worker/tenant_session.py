"""What one tenant sees of an engine: its controls taken in, its requests and its state told.

A worker has one session for each tenant that it serves. A session owns the tenant's numbering, its
``EngineOperations`` and the requests of it that are being served, so nothing of one tenant can be
met by another: an id that is not its own is an id that nobody has. It knows neither other sessions
nor the bus, only how to send; the epoch is the engine's, and the worker begins each new one.
"""

from collections.abc import Callable, Iterable
from math import inf

import trio
from msgspec.structs import replace

from hear.blocks import HASH_BYTES
from hear.delivery import Sequencer
from hear.engine_operations import Actions, EngineOperations, KeyedOutcome
from hear.errors import EngineError
from hear.interfaces import ApplyResult, EngineBackend, Report, SnapshotProvider
from hear.messages import (
    BlocksStored,
    CapabilitiesReported,
    Envelope,
    Key,
    Message,
    RequestOutcome,
    ResidencyChanged,
    ResidencyPartial,
    ResidencySnapshot,
)
from hear.operation import Operation
from hear.subjects import stem

SNAPSHOT_BLOCKS = 65_536
"""Most blocks in one part of a residency snapshot, so that no message grows without bound."""

ASKED = "hints"
"""After the engine's name: the source of controls that came along with requests."""


class TenantSession:
    """One tenant's side of one engine."""

    def __init__(
        self,
        tenant: str,
        *,
        engine: str,
        backend: EngineBackend,
        epoch: int,
        ranks: dict[str, int] | None,
        ended: Iterable[KeyedOutcome],
        endpoint: str,
        send: Callable[[Envelope], None],
        keep: Callable[[str, Actions], None],
        above: int = 0,
    ) -> None:
        """Open it.

        Args:
            above: what its messages are numbered from.
            ended: how its operations ended under earlier workers of this engine, oldest first.
            send: publishes an envelope.
            keep: writes down what is about to be told and done for this tenant.
        """
        self.tenant = tenant
        self._engine = engine
        self._backend = backend
        self._endpoint = endpoint
        self._send = send
        self._keep = keep
        self._key = Key(engine=engine)
        self._sequencer = Sequencer(engine, epoch, tenant, above=above)
        self._asking = Sequencer(f"{engine}/{ASKED}", epoch, tenant, above=above)
        self._operations = EngineOperations(
            engine=engine,
            controls=backend.capabilities().controls,
            at_submission=backend.capabilities().at_submission,
            ranks=ranks,
            epoch=epoch,
            ended=ended,
        )
        self._serving: dict[str, Key] = {}
        self._told_costs = backend.costs()
        self._used_s = -inf

    @property
    def num_open(self) -> int:
        """Operations without a terminal outcome."""
        return len(self._operations.open_operations)

    @property
    def idle_since(self) -> float:
        """When it was last used, by trio's clock; ``inf`` while something of it is open."""
        return inf if self._serving or self._operations.open_operations else self._used_s

    # -- controls -----------------------------------------------------------------------------

    def take_in(self, envelope: Envelope, now: float) -> None:
        """Take in one control of this tenant."""
        self._used_s = now
        self._carry_out(self._operations.receive(envelope, now))

    def expire(self, now: float) -> None:
        """End what has passed its deadline."""
        self._carry_out(self._operations.expire(now))

    def next_expiry(self) -> float | None:
        """When ``expire`` has to be called next."""
        return self._operations.next_expiry()

    def _carry_out(self, actions: Actions) -> None:
        for operation in actions.expect:
            self._backend.expect(operation)
        for operation in actions.revert:
            self._backend.revert(operation)
        self._keep(self.tenant, actions)
        for answer in actions.outcomes:
            self.answer(answer)
        for operation in actions.apply:
            result = self._apply(operation)
            if result is None:
                self._operations.handed_over(operation)
            else:
                self._carry_out(self._operations.applied(operation, result))

    def _apply(self, operation: Operation) -> ApplyResult | None:
        try:
            return self._backend.apply(operation)
        except EngineError as error:
            return ApplyResult("failed", "engine_error", str(error))

    # -- what the engine does -----------------------------------------------------------------

    def report(self, report: Report) -> None:
        """Tell what the backend reports of this tenant."""
        self._used_s = trio.current_time()
        for key in report.arrived:
            assert key.request is not None
            key = self._serving[key.request] = self._at_home(key)
            self._carry_out(self._operations.request_arrived(key, trio.current_time()))
        for key, control in report.asked:
            now = trio.current_time()
            self.take_in(self._asking.wrap(control, key, now), now)
        if report.blocks and not report.residency_anew:
            self._publish(ResidencyChanged(changes=tuple(report.blocks)), self._key)
        if report.queue is not None:
            self._publish(report.queue, self._key)
        for operation, result in report.results:
            self._carry_out(self._operations.applied_later(operation, result))
        for event in report.operations:
            self._carry_out(self._operations.ended(event))
        for key, outcome in report.requests:
            assert key.request is not None
            self._publish(outcome, self._at_home(key))
            if outcome.status != "accepted":
                self._serving.pop(key.request, None)
                self._carry_out(self._operations.request_ended(key.request, trio.current_time()))

    def tell_anew(self, report: Report) -> None:
        """Tell of what a report, of whichever tenant, says of the engine as a whole."""
        if report.capabilities is not None:
            self._send(self._snapshot(self._with_endpoint(report.capabilities)))
        if report.residency_anew:
            for envelope in self._residency_news():
                self._send(envelope)

    def restart(self) -> None:
        """The engine begins its next epoch; what was open under the old one fails."""
        self.shut("engine_restarted")
        for key in self._serving.values():
            self._publish(RequestOutcome(status="failed", reason="engine_restarted"), key)
        self._serving.clear()
        self._sequencer.restart()
        self._asking.restart()
        self._operations.epoch = self._sequencer.epoch
        self.introduce()

    def shut(self, reason: str) -> None:
        """End every operation that is open."""
        self._carry_out(self._operations.shut(reason))

    # -- what is published --------------------------------------------------------------------

    def providers(self) -> dict[str, SnapshotProvider]:
        """Who answers for the state that this tenant is told, by the stems of its subjects."""
        of_kind: dict[str, SnapshotProvider] = {
            "residency_snapshot": self._residency_snapshot,
            "queue_snapshot": self._queue_snapshot,
            "pressure_reported": self._pressure,
            "capabilities_reported": self._capabilities,
            "costs_reported": self._costs,
        }
        return {stem("state", self.tenant, self._key, kind): p for kind, p in of_kind.items()}

    def introduce(self) -> None:
        """Tell what there is to know of the engine."""
        self._told_costs = self._backend.costs()
        for provider in (
            self._capabilities,
            self._costs,
            self._residency_news,
            self._queue_snapshot,
        ):
            for envelope in provider():
                self._send(envelope)

    def tell_pressure(self) -> None:
        """Tell how full the engine is now, and what work costs if that has changed."""
        self._publish(self._backend.pressure(), self._key)
        costs = self._backend.costs()
        if costs != self._told_costs:
            self._told_costs = costs
            self._send(self._snapshot(costs))

    def answer(self, answer: KeyedOutcome) -> None:
        """Tell what became of an operation."""
        self._publish(answer.outcome, self._at_home(answer.key))

    def _at_home(self, key: Key) -> Key:
        return key if key.engine is not None else replace(key, engine=self._engine)

    def _publish(self, message: Message, key: Key) -> None:
        self._send(self._sequencer.wrap(message, key, trio.current_time()))

    def _snapshot(self, message: Message) -> Envelope:
        return self._sequencer.wrap_snapshot(message, self._key, trio.current_time())

    def _residency_parts(self) -> list[ResidencySnapshot | ResidencyPartial]:
        parts: list[list[BlocksStored]] = [[]]
        room = SNAPSHOT_BLOCKS
        for chain in self._backend.residency(self.tenant):
            size = len(chain.prefix_hashes) // HASH_BYTES
            if size > room and parts[-1]:
                parts.append([])
                room = SNAPSHOT_BLOCKS
            parts[-1].append(chain)
            room -= size
        kind = ResidencySnapshot if self._backend.residency_known() else ResidencyPartial
        return [
            kind(chains=tuple(chains), part=part, parts=len(parts))
            for part, chains in enumerate(parts)
        ]

    def _residency_snapshot(self) -> list[Envelope]:
        return [self._snapshot(part) for part in self._residency_parts()]

    def _residency_news(self) -> list[Envelope]:
        first, *others = self._residency_parts()
        if isinstance(first, ResidencySnapshot):
            told = self._snapshot(first)
        else:
            # It takes a number, so that a reader that does not know the kind misses it, and does
            # not go on believing what it held.
            told = self._sequencer.wrap(first, self._key, trio.current_time())
        return [told, *(self._snapshot(part) for part in others)]

    def _queue_snapshot(self) -> list[Envelope]:
        return [self._snapshot(self._backend.queue(self.tenant))]

    def _pressure(self) -> list[Envelope]:
        return [self._snapshot(self._backend.pressure())]

    def _capabilities(self) -> list[Envelope]:
        return [self._snapshot(self._with_endpoint(self._backend.capabilities()))]

    def _with_endpoint(self, capabilities: CapabilitiesReported) -> CapabilitiesReported:
        return replace(capabilities, endpoint=self._endpoint or capabilities.endpoint)

    def _costs(self) -> list[Envelope]:
        return [self._snapshot(self._backend.costs())]
