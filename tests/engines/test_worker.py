"""The worker between a bus and a backend that does only what the test says."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import structlog
import trio
from trio.testing import MockClock

from hear.blocks import pack, unpack
from hear.buses.memory import MemoryBus
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engine_view import EngineViews
from hear.engines.worker import tenant_session
from hear.engines.worker.loop import IDLE_S, EngineWorker
from hear.engines.worker.operation_log import OperationLog
from hear.errors import BusError, ConfigError, EngineError
from hear.interfaces import ApplyResult, OperationEnded, Report
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    BoundWait,
    Cancel,
    CapabilitiesReported,
    Control,
    CostsReported,
    Envelope,
    Key,
    Message,
    OperationOutcome,
    PressureReported,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    RequestOutcome,
    ResidencyChanged,
    ResidencyPartial,
    ResidencySnapshot,
    WaitingRequest,
    Withdraw,
)
from hear.operation import Operation


class Backend:
    """Says what it is told to say, and notes what it is asked to do."""

    def __init__(self) -> None:
        self.results: dict[str, ApplyResult | Exception | None] = {}
        self.calls: list[tuple[str, str]] = []
        self.expected: list[str | None] = []
        self.chains: list[BlocksStored] = []
        self.known = True
        self.step_s = 1.0
        self.runs = 0
        self.report: Callable[[Report], None] = lambda report: None
        self._fail = trio.Event()
        self._error: Exception = EngineError("crashed")

    def capabilities(self) -> CapabilitiesReported:
        return CapabilitiesReported(controls=("prioritise", "bound_wait"))

    def costs(self) -> CostsReported:
        return CostsReported(
            basis="estimated",
            prefill_tokens_per_s=1.0,
            decode_step_s=self.step_s,
            kv_bytes_per_token=1.0,
        )

    def pressure(self) -> PressureReported:
        return PressureReported(num_running=self.runs)

    def queue(self, tenant: str = DEFAULT_TENANT) -> QueueSnapshot:
        return QueueSnapshot()

    def residency(self, tenant: str = DEFAULT_TENANT) -> Iterable[BlocksStored]:
        return self.chains

    def residency_known(self) -> bool:
        return self.known

    def apply(self, operation: Operation) -> ApplyResult | None:
        kind = type(operation.control).__name__
        self.calls.append(("apply", kind))
        result = self.results.get(kind, ApplyResult("completed"))
        if isinstance(result, Exception):
            raise result
        return result

    def expect(self, operation: Operation) -> None:
        self.expected.append(operation.key.request)

    def revert(self, operation: Operation) -> None:
        self.calls.append(("revert", type(operation.control).__name__))

    async def run(self, report: Callable[[Report], None]) -> None:
        self.runs += 1
        self.report = report
        await self._fail.wait()
        self._fail = trio.Event()
        raise self._error

    def fail(self, error: Exception | None = None) -> None:
        self._error = error or EngineError("crashed")
        self._fail.set()


@dataclass
class Bench:
    """A worker with its bus, and all that it has published."""

    bus: MemoryBus
    backend: Backend
    worker: EngineWorker
    nursery: trio.Nursery
    heard: list[Envelope] = field(default_factory=list)
    sequencer: Sequencer = field(default_factory=lambda: Sequencer("policy"))
    sent: list[Envelope] = field(default_factory=list)

    def send(self, control: Control, request: str | None = None) -> str:
        operation = self.sequencer.next_id()
        full = Key(engine="e0", operation=operation, request=request)
        envelope = self.sequencer.wrap(control, full, trio.current_time())
        self.sent.append(envelope)
        self.bus.publish(envelope)
        return operation

    def messages(self, of: type[Message]) -> list[Message]:
        bodies = [open_body(envelope) for envelope in self.heard]
        return [body for body in bodies if isinstance(body, of)]

    def outcomes(self, operation: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for envelope in self.heard:
            body = open_body(envelope)
            if envelope.key.operation == operation and isinstance(body, OperationOutcome):
                found.append((body.status, body.reason))
        return found

    async def settle(self) -> None:
        await trio.sleep(0.01)


@asynccontextmanager
async def bench(**settings: object) -> AsyncIterator[Bench]:
    backend = Backend()
    with structlog.testing.capture_logs():
        async with MemoryBus() as bus, trio.open_nursery() as nursery:
            worker = EngineWorker(bus, backend, name="e0", **settings)  # type: ignore[arg-type]
            made = Bench(bus, backend, worker, nursery)

            async def listen(task_status: trio.TaskStatus[None]) -> None:
                async with bus.subscribe(["state.>", "outcome.>"], name="tap") as tap:
                    task_status.started()
                    while True:
                        made.heard += await tap.receive()

            await nursery.start(listen)
            await nursery.start(worker.run)
            await made.settle()
            yield made
            nursery.cancel_scope.cancel()


def opened(envelope: Envelope) -> Message:
    message = open_body(envelope)
    assert message is not None
    return message


def arrived(request: str) -> Report:
    return Report(arrived=[Key(request=request)])


# -- state ----------------------------------------------------------------------------------------


async def test_a_worker_introduces_itself(autojump_clock: MockClock) -> None:
    async with bench() as b:
        kinds = [envelope.kind for envelope in b.heard]
        assert kinds == [
            "capabilities_reported",
            "costs_reported",
            "residency_snapshot",
            "queue_snapshot",
        ]
        assert {e.source for e in b.heard} == {e.key.engine for e in b.heard} == {"e0"}
        assert {e.epoch for e in b.heard} == {1}


async def test_each_report_is_published_once_with_the_engine_in_its_keys(
    autojump_clock: MockClock,
) -> None:
    async with bench() as b:
        b.heard.clear()
        stored = BlocksStored(tier="gpu", prefix_hashes=pack([1, 2]))
        b.backend.report(
            Report(
                arrived=[Key(request="r", context="c")],
                blocks=[stored],
                queue=QueueChanged(num_waiting=1),
                requests=[(Key(request="r", context="c"), RequestOutcome(status="accepted"))],
            )
        )
        await b.settle()
        said = [(e.kind, e.key.engine, e.seq) for e in b.heard]
        assert said == [
            ("residency_changed", "e0", 1),
            ("queue_changed", "e0", 1),
            ("request_outcome", "e0", 1),
            ("pressure_reported", "e0", 1),
        ]
        assert b.messages(ResidencyChanged) == [ResidencyChanged(changes=(stored,))]


async def test_pressure_is_told_with_reports_and_not_too_often(autojump_clock: MockClock) -> None:
    async with bench(pressure_interval_s=1.0) as b:
        for _ in range(10):
            b.backend.report(Report())
            await trio.sleep(0.25)
        await b.settle()
        assert len(b.messages(PressureReported)) == 3


async def test_costs_are_told_with_pressure_where_they_have_changed(
    autojump_clock: MockClock,
) -> None:
    async with bench(pressure_interval_s=1.0) as b:
        for step_s in (1.0, 2.0, 2.0):
            b.backend.step_s = step_s
            b.backend.report(Report())
            await trio.sleep(1.5)
        told = [m.decode_step_s for m in b.messages(CostsReported) if isinstance(m, CostsReported)]
        assert told == [1.0, 2.0]


async def test_a_large_snapshot_comes_in_parts_of_one_number(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_session, "SNAPSHOT_BLOCKS", 5)
    async with bench() as b:
        b.backend.chains = [
            BlocksStored(tier="gpu", prefix_hashes=pack(range(start, start + 3)))
            for start in (0, 10, 20, 30)
        ]
        parts: list[Envelope] = []
        async with b.bus.subscribe(["state.*.*.residency.>"], name="late") as late:
            parts += await late.receive()
        bodies = [open_body(part) for part in parts]
        assert [
            (body.part, body.parts, len(body.chains))
            for body in bodies
            if isinstance(body, ResidencySnapshot)
        ] == [(n, 4, 1) for n in range(4)]
        assert len({part.seq for part in parts}) == 1


async def test_a_snapshot_carries_the_number_of_the_last_change(autojump_clock: MockClock) -> None:
    async with bench() as b:
        for block in (1, 2):
            b.backend.report(Report(blocks=[BlocksStored(tier="gpu", prefix_hashes=pack([block]))]))
        b.backend.chains = [BlocksStored(tier="gpu", prefix_hashes=pack([1, 2]))]
        async with b.bus.subscribe(["state.*.*.residency.>"], name="late") as late:
            [snapshot] = await late.receive()
        body = open_body(snapshot)
        assert isinstance(body, ResidencySnapshot)
        assert (snapshot.kind, snapshot.seq) == ("residency_snapshot", 2)
        assert list(unpack(body.chains[0].prefix_hashes)) == [1, 2]


# -- controls -------------------------------------------------------------------------------------


async def test_what_came_along_with_a_request_is_taken_in_as_off_the_bus(
    autojump_clock: MockClock,
) -> None:
    async with bench(ranks={"e0/hints": 1}) as b:
        came = Key(operation="h1", request="r")
        b.backend.report(replace(arrived("r"), asked=[(came, Prioritise(priority=3))]))
        await b.settle()
        assert b.outcomes("h1") == [("completed", "")]
        weaker = b.send(Prioritise(priority=-1), "r")
        await b.settle()
        assert b.outcomes(weaker) == [("rejected", "outranked")]
        again = Key(operation="h1", request="r")
        b.backend.report(Report(asked=[(again, Prioritise(priority=5))]))
        elsewhere = Key(operation="h2", request="r", engine="e1")
        b.backend.report(Report(asked=[(elsewhere, Prioritise(priority=5))]))
        await b.settle()
        assert b.backend.calls == [("apply", "Prioritise")]
        assert b.outcomes("h2") == [("rejected", "wrong_engine")]


async def test_a_control_goes_to_the_backend_and_its_result_back(
    autojump_clock: MockClock,
) -> None:
    async with bench() as b:
        b.backend.report(arrived("r"))
        b.backend.results["BoundWait"] = ApplyResult("accepted", standing=True)
        done = b.send(Prioritise(priority=1), request="r")
        guard = b.send(BoundWait(max_wait_s=1.0), request="r")
        await b.settle()
        assert b.outcomes(done) == [("completed", "")]
        assert b.outcomes(guard) == [("accepted", "")]
        b.backend.report(
            Report(operations=[OperationEnded(guard, OperationOutcome(status="completed"))])
        )
        await b.settle()
        assert b.outcomes(guard) == [("accepted", ""), ("completed", "")]
        assert b.worker.num_open == 0


async def test_a_control_that_is_replaced_is_reverted_before_the_new_one_is_applied(
    autojump_clock: MockClock,
) -> None:
    async with bench() as b:
        b.backend.report(arrived("r"))
        b.backend.results["BoundWait"] = ApplyResult("accepted", standing=True)
        old = b.send(BoundWait(max_wait_s=1.0), request="r")
        new = b.send(BoundWait(max_wait_s=2.0), request="r")
        await b.settle()
        assert b.backend.calls == [
            ("apply", "BoundWait"),
            ("revert", "BoundWait"),
            ("apply", "BoundWait"),
        ]
        assert b.outcomes(old)[-1] == ("completed", "renewed")
        undo = b.send(Cancel(target=new))
        await b.settle()
        assert b.outcomes(new)[-1] == ("failed", "cancelled")
        assert b.outcomes(undo) == [("completed", "")]
        assert b.backend.calls[-2:] == [("revert", "BoundWait"), ("apply", "Cancel")]


async def test_a_backend_may_give_its_result_later(autojump_clock: MockClock) -> None:
    async with bench() as b:
        b.backend.report(arrived("r"))
        b.backend.results["Prioritise"] = None
        refused = b.send(Prioritise(priority=1), request="r")
        await b.settle()
        assert b.outcomes(refused) == []
        b.backend.report(Report(results=[(refused, ApplyResult("rejected", "already_running"))]))
        await b.settle()
        assert b.outcomes(refused) == [("rejected", "already_running")]
        assert b.worker.num_open == 0


async def test_a_result_that_does_not_come_is_not_waited_for_beyond_the_deadline(
    autojump_clock: MockClock,
) -> None:
    async with bench() as b:
        b.backend.report(arrived("r"))
        b.backend.results["Prioritise"] = None
        deadline_s = trio.current_time() + 2.0
        late = b.send(Prioritise(priority=1, deadline_s=deadline_s), request="r")
        await trio.sleep(2.1)
        assert b.outcomes(late) == [("failed", "deadline")]
        assert b.backend.calls[-1] == ("revert", "Prioritise")
        b.backend.report(Report(results=[(late, ApplyResult("completed"))]))
        await b.settle()
        assert b.outcomes(late) == [("failed", "deadline")]


async def test_deadlines_pass_while_no_message_comes(autojump_clock: MockClock) -> None:
    async with bench() as b:
        soon = b.send(Prioritise(priority=1, deadline_s=trio.current_time() + 2.0), request="x")
        await trio.sleep(1.9)
        assert b.outcomes(soon) == [("accepted", "")]
        await trio.sleep(0.2)
        assert b.outcomes(soon) == [("accepted", ""), ("failed", "deadline")]
        assert (b.backend.calls, b.backend.expected) == ([], ["x"])


async def test_an_error_of_the_backend_is_the_outcome_of_the_control(
    autojump_clock: MockClock,
) -> None:
    async with bench() as b:
        b.backend.report(arrived("r"))
        b.backend.results["Prioritise"] = EngineError("no answer from the scheduler")
        failed = b.send(Prioritise(priority=1), request="r")
        await b.settle()
        assert b.outcomes(failed) == [("failed", "engine_error")]
        b.backend.results.clear()
        fine = b.send(Prioritise(priority=1), request="r")
        await b.settle()
        assert b.outcomes(fine) == [("completed", "")]


async def test_a_request_that_ends_takes_its_controls_along(autojump_clock: MockClock) -> None:
    async with bench() as b:
        b.backend.report(arrived("r"))
        b.backend.results["BoundWait"] = ApplyResult("accepted", standing=True)
        guard = b.send(BoundWait(max_wait_s=1.0), request="r")
        await b.settle()
        ended = RequestOutcome(status="failed", reason="client_gone")
        b.backend.report(Report(requests=[(Key(request="r"), ended)]))
        late = b.send(Prioritise(priority=1), request="r")
        await b.settle()
        assert b.outcomes(guard)[-1] == ("failed", "request_gone")
        assert b.outcomes(late) == [("failed", "request_gone")]


async def test_a_control_for_another_engine_is_not_heard(autojump_clock: MockClock) -> None:
    async with bench() as b:
        key = Key(engine="e1", operation="x", request="r")
        b.bus.publish(b.sequencer.wrap(Prioritise(priority=1), key, trio.current_time()))
        await b.settle()
        assert b.outcomes("x") == []


# -- restarts, and the end ------------------------------------------------------------------------


async def test_a_restart_begins_a_new_epoch_and_fails_what_was_open(
    autojump_clock: MockClock,
) -> None:
    async with bench(restart_delay_s=1.0) as b:
        accepted = RequestOutcome(status="accepted")
        b.backend.report(
            Report(arrived=[Key(request="r")], requests=[(Key(request="r"), accepted)])
        )
        kept = b.send(Prioritise(priority=1), request="later")
        await b.settle()
        b.heard.clear()
        b.backend.fail()
        await b.settle()
        assert b.outcomes(kept) == [("failed", "engine_restarted")]
        assert b.messages(RequestOutcome) == [
            RequestOutcome(status="failed", reason="engine_restarted")
        ]
        epochs = {e.kind: e.epoch for e in b.heard}
        assert epochs["operation_outcome"] == epochs["request_outcome"] == 1
        assert epochs["capabilities_reported"] == epochs["residency_snapshot"] == 2
        assert b.backend.runs == 1
        await trio.sleep(1.0)
        assert (b.backend.runs, b.worker.epoch) == (2, 2)
        b.backend.fail()
        await trio.sleep(1.1)
        assert b.worker.epoch == 3
        assert len(b.messages(RequestOutcome)) == 1  # it has failed already
        b.backend.report(Report(queue=QueueChanged()))
        await b.settle()
        assert [(e.epoch, e.seq) for e in b.heard if e.kind == "queue_changed"] == [(3, 1)]


async def test_a_backend_that_fails_again_and_again_ends_the_worker(
    autojump_clock: MockClock,
) -> None:
    backend = Backend()
    with structlog.testing.capture_logs() as logs:
        async with MemoryBus() as bus:
            worker = EngineWorker(bus, backend, name="e0", max_restarts=2, restart_delay_s=1.0)

            async def fail_often() -> None:
                for _ in range(3):
                    await trio.sleep(5.0)
                    backend.fail(EngineError("no GPU"))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail_often)
                with pytest.raises(EngineError, match="no GPU"):
                    await worker.run()
    assert backend.runs == 3
    assert [log["event"] for log in logs] == ["engine.failed"] * 3


async def test_a_backend_that_fails_now_and_then_is_not_given_up(autojump_clock: MockClock) -> None:
    async with bench(max_restarts=2, restart_delay_s=1.0) as b:
        for _ in range(24):
            await trio.sleep(2_000)
            b.backend.fail(EngineError("no GPU"))
        await trio.sleep(5)
        assert (b.backend.runs, b.worker.epoch) == (25, 25)


async def test_who_comes_after_a_worker_has_left_is_given_no_snapshot_of_its_engine(
    autojump_clock: MockClock,
) -> None:
    async with MemoryBus() as bus:
        worker = EngineWorker(bus, Backend(), name="e0")
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.run)
            nursery.cancel_scope.cancel()
        async with bus.subscribe(["state.>"], name="late") as late:
            with trio.move_on_after(5) as waiting:
                await late.receive()
            assert waiting.cancelled_caught


async def test_a_worker_that_is_started_again_begins_where_it_is_told(
    autojump_clock: MockClock,
) -> None:
    async with bench(epoch=7) as b:
        assert b.worker.epoch == 7
        assert {e.epoch for e in b.heard} == {7}


async def test_when_it_is_stopped_what_is_open_fails(autojump_clock: MockClock) -> None:
    backend = Backend()
    async with MemoryBus() as bus, trio.open_nursery() as nursery:
        worker = EngineWorker(bus, backend, name="e0")
        scope = trio.CancelScope()

        async def work(task_status: trio.TaskStatus[None]) -> None:
            with scope:
                await worker.run(task_status)

        await nursery.start(work)
        async with bus.subscribe(["outcome.>"], name="tap") as tap:
            key = Key(engine="e0", operation="x", request="later")
            bus.publish(Sequencer("p").wrap(Prioritise(priority=1), key, 0.0))
            said = [open_body(e) for e in await tap.receive()]
            scope.cancel()
            said += [open_body(e) for e in await tap.receive()]
        assert [(o.status, o.reason) for o in said if isinstance(o, OperationOutcome)] == [
            ("accepted", ""),
            ("failed", "engine_stopped"),
        ]


# -- without a bus --------------------------------------------------------------------------------


async def test_a_bus_that_cannot_be_joined_is_an_error(autojump_clock: MockClock) -> None:
    bus = MemoryBus()
    worker = EngineWorker(bus, Backend(), name="e0")
    bus.close()
    with pytest.raises(BusError):
        await worker.run()


async def test_a_bus_that_is_lost_does_not_stop_the_engine(autojump_clock: MockClock) -> None:
    backend = Backend()
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            bus = MemoryBus()
            await nursery.start(EngineWorker(bus, backend, name="e0").run)
            await trio.sleep(1)
            bus.close()
            await trio.sleep(1)
            for _ in range(3):
                backend.report(Report(queue=QueueChanged()))
            await trio.sleep(1)
            assert backend.runs == 1
            nursery.cancel_scope.cancel()
    assert [log["event"] for log in logs] == ["bus.lost"]


async def test_a_worker_that_lagged_subscribes_anew(autojump_clock: MockClock) -> None:
    class SmallBus(MemoryBus):
        def subscribe(self, patterns: Iterable[str], *, name: str, capacity: int = 4):  # type: ignore[no-untyped-def]
            return super().subscribe(patterns, name=name, capacity=min(capacity, 4))

    backend = Backend()
    sender = Sequencer("policy")
    with structlog.testing.capture_logs() as logs:
        async with SmallBus() as bus, trio.open_nursery() as nursery:
            await nursery.start(EngineWorker(bus, backend, name="e0").run)
            await trio.sleep(1)
            for number in range(10):  # more than it can hold, before it can read
                key = Key(engine="e0", operation=f"x{number}")
                bus.publish(sender.wrap(Withdraw(), key, trio.current_time()))
            await trio.sleep(1)
            async with bus.subscribe(["outcome.>"], name="tap") as tap:
                key = Key(engine="e0", operation="last")
                bus.publish(sender.wrap(Withdraw(), key, trio.current_time()))
                [answer] = await tap.receive()
            assert answer.key.operation == "last"
            nursery.cancel_scope.cancel()
    assert [log["event"] for log in logs] == ["controls.lost"]


# -- across the lives of workers --------------------------------------------------------------


async def test_a_worker_after_one_that_was_killed_acts_on_nothing_twice(tmp_path: Path) -> None:
    async with bench(operation_log=OperationLog(tmp_path / "e0")) as b:
        b.backend.results["BoundWait"] = ApplyResult("accepted", standing=True)
        b.backend.report(arrived("r"))
        done, standing = b.send(Prioritise(priority=1), "r"), b.send(BoundWait(max_wait_s=9), "r")
        parked = b.send(Prioritise(priority=1), "not there")
        await b.settle()
        asked = list(b.sent)
        assert len(b.backend.calls) == 2
        # The file as a kill would leave it: nothing was said of an end.
        (tmp_path / "killed").write_bytes((tmp_path / "e0").read_bytes())
    async with bench(operation_log=OperationLog(tmp_path / "killed"), epoch=2) as b:
        for id in (standing, parked):
            assert b.outcomes(id) == [("failed", "engine_restarted")]
        b.backend.report(arrived("r"))
        for envelope in asked:
            b.bus.publish(envelope)
        await b.settle()
        # Told as it began, since the one before may not have come to that, and when asked again.
        assert b.outcomes(done) == [("completed", "")] * 2
        for id in (standing, parked):
            assert b.outcomes(id) == [("failed", "engine_restarted")] * 2
        assert b.backend.calls == []


async def test_a_control_for_an_earlier_epoch_fails_even_if_nothing_is_known_of_it() -> None:
    async with bench(epoch=5) as b:
        b.backend.report(arrived("r"))
        id = b.send(Prioritise(priority=1, engine_epoch=4), "r")
        now = b.send(Prioritise(priority=1, engine_epoch=5), "r")
        await b.settle()
        assert b.outcomes(id) == [("failed", "engine_restarted")]
        assert b.outcomes(now) == [("completed", "")]
        assert b.backend.calls == [("apply", "Prioritise")]


async def test_a_worker_whose_operation_log_cannot_be_written_serves_on(tmp_path: Path) -> None:
    log = OperationLog(tmp_path / "e0")
    async with bench(operation_log=log) as b:
        log.close()
        b.backend.report(arrived("r"))
        ids = [b.send(Prioritise(priority=n), "r") for n in range(2)]
        await b.settle()
        assert [b.outcomes(id) for id in ids] == [[("completed", "")]] * 2


# -- tenants --------------------------------------------------------------------------------------


def told(b: Bench, tenant: str) -> list[str]:
    return [envelope.kind for envelope in b.heard if envelope.tenant == tenant]


INTRODUCED = [
    "capabilities_reported",
    "costs_reported",
    "residency_snapshot",
    "queue_snapshot",
]


async def test_tenants_named_at_the_start_are_told_of_the_engine_at_once(
    autojump_clock: MockClock,
) -> None:
    async with bench(tenants=("acme", "umbra")) as b:
        assert told(b, "acme") == told(b, "umbra") == INTRODUCED
        assert told(b, DEFAULT_TENANT) == []
        b.backend.report(Report())
        await b.settle()
        assert told(b, "acme")[4:] == told(b, "umbra")[4:] == ["pressure_reported"]
        assert len({envelope.id for envelope in b.heard}) == len(b.heard)


async def test_any_other_is_told_with_its_first_request_or_control(
    autojump_clock: MockClock,
) -> None:
    async with bench() as b:
        b.backend.report(
            Report(
                arrived=[Key(request="r")],
                requests=[(Key(request="r"), RequestOutcome(status="accepted"))],
                tenant="acme",
            )
        )
        await b.settle()
        assert told(b, "acme") == [
            *INTRODUCED,
            "pressure_reported",
            "request_outcome",
            "pressure_reported",
        ]
        sender = Sequencer("policy", tenant="umbra")
        key = Key(engine="e0", operation=sender.next_id())
        b.bus.publish(sender.wrap(Cancel(target="x"), key, trio.current_time()))
        await b.settle()
        assert told(b, "umbra") == [*INTRODUCED, "pressure_reported", "operation_outcome"]
        async with b.bus.subscribe(["state.umbra.>"], name="late") as late:
            assert {e.kind for e in await late.receive()} > {"queue_snapshot"}


async def test_a_tenant_too_many_is_neither_told_nor_heard_and_that_is_said_once(
    autojump_clock: MockClock,
) -> None:
    async with bench(max_tenants=2) as b:
        with structlog.testing.capture_logs() as logs:
            b.backend.report(Report(arrived=[Key(request="r")], tenant="acme"))
            for tenant in ("umbra", "initech", "a" * 10_000, "\ud800"):
                b.backend.report(Report(arrived=[Key(request="r")], tenant=tenant))
            sender = Sequencer("policy", tenant="umbra")
            key = Key(engine="e0", operation=sender.next_id())
            b.bus.publish(sender.wrap(Withdraw(), key, trio.current_time()))
            await b.settle()
        assert {envelope.tenant for envelope in b.heard} == {DEFAULT_TENANT, "acme"}
        assert [(log["event"], log["tenant"]) for log in logs] == [("tenants.too_many", "umbra")]


async def test_the_tenant_that_has_been_idle_longest_gives_way_and_may_come_again(
    autojump_clock: MockClock,
) -> None:
    async with bench(max_tenants=3) as b:

        def come(tenant: str) -> None:
            b.heard.clear()
            waiting = (WaitingRequest(request="r", since_s=0.0),)
            came = Report(arrived=[Key(request="r")], queue=QueueChanged(waiting=waiting))
            b.backend.report(replace(came, tenant=tenant))

        def go(tenant: str) -> None:
            ended = (Key(request="r"), RequestOutcome(status="completed"))
            gone = Report(queue=QueueChanged(ended=("r",)), requests=[ended])
            b.backend.report(replace(gone, tenant=tenant))

        come("acme")
        await b.settle()
        views = EngineViews()
        for envelope in (e for e in b.heard if (e.tenant, e.category) == ("acme", "state")):
            views.apply(envelope, opened(envelope))
        go("acme")
        await trio.sleep(1)
        come("umbra")
        go("umbra")
        come("initech")
        await b.settle()
        assert "initech" not in {e.tenant for e in b.heard}, "nobody has been idle for long"
        await trio.sleep(IDLE_S)
        come("initech")
        await b.settle()
        async with b.bus.subscribe(["state.*.*.queue.>"], name="late") as late:
            assert {e.tenant for e in await late.receive()} == {DEFAULT_TENANT, "umbra", "initech"}
        come("acme")
        await b.settle()
        again = [e for e in b.heard if (e.tenant, e.category) == ("acme", "state")]
        assert len(again) > 5
        for envelope in again:  # none is stale to who remembers the last time
            views.apply(envelope, opened(envelope))
        assert list(views["e0"].waiting) == ["r"]
        assert len({e.id for e in again}) == len(again)
        come("umbra")
        await b.settle()
        assert "umbra" not in {e.tenant for e in b.heard}, "all have something going on"


@pytest.mark.parametrize("tenants", [("",), ("a" * 300,), ("a", "b", "c")])
def test_tenants_that_cannot_be_served_are_one_error(tenants: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="engine 'e0': tenant"):
        EngineWorker(MemoryBus(), Backend(), name="e0", tenants=tenants, max_tenants=2)


async def test_a_crash_ends_what_is_open_of_every_tenant(autojump_clock: MockClock) -> None:
    async with bench(tenants=(DEFAULT_TENANT, "acme")) as b:
        for tenant in (DEFAULT_TENANT, "acme"):
            b.backend.report(Report(arrived=[Key(request="r")], tenant=tenant))
        b.heard.clear()
        b.backend.fail()
        await trio.sleep(2)
        for tenant in (DEFAULT_TENANT, "acme"):
            [failed] = [e for e in b.heard if (e.kind, e.tenant) == ("request_outcome", tenant)]
            body = open_body(failed)
            assert isinstance(body, RequestOutcome)
            assert (failed.epoch, body.reason) == (1, "engine_restarted")
            snapshots = [e for e in b.heard if (e.kind, e.tenant) == ("queue_snapshot", tenant)]
            assert [e.epoch for e in snapshots] == [2]


async def test_the_next_worker_answers_each_tenant_for_its_own(tmp_path: Path) -> None:
    async with bench(operation_log=OperationLog(tmp_path / "e0")) as b:
        for tenant in (DEFAULT_TENANT, "acme"):
            sender = Sequencer("policy", tenant=tenant)
            key = Key(engine="e0", operation="same")
            target = Cancel(target=f"of {tenant}")
            b.bus.publish(sender.wrap(target, key, trio.current_time()))
        await b.settle()
        (tmp_path / "killed").write_bytes((tmp_path / "e0").read_bytes())
    async with bench(operation_log=OperationLog(tmp_path / "killed"), epoch=2) as b:
        ends = [e for e in b.heard if e.kind == "operation_outcome"]
        bodies = {e.tenant: open_body(e) for e in ends}
        assert len(ends) == 2
        for tenant, body in bodies.items():
            assert isinstance(body, OperationOutcome)
            assert (body.reason, body.detail) == ("unknown_operation", f"of {tenant}")


# -- what a backend cannot tell -------------------------------------------------------------------


async def test_a_backend_that_lost_sight_of_its_cache_is_told_of_in_part_under_a_new_number(
    autojump_clock: MockClock,
) -> None:
    async with bench() as b:
        b.backend.known = False
        b.backend.chains = [BlocksStored(tier="gpu", prefix_hashes=pack([1]))]
        b.backend.report(Report(residency_anew=True))
        await b.settle()
        assert b.heard[-2].kind == "residency_partial"  # the last is of pressure
        assert (b.heard[-2].seq, open_body(b.heard[-2])) == (
            1,
            ResidencyPartial(chains=tuple(b.backend.chains)),
        )
        b.backend.report(Report(blocks=[BlocksStored(tier="gpu", prefix_hashes=pack([2]))]))
        async with b.bus.subscribe(["state.*.e0.residency.>"], name="late") as late:
            with trio.fail_after(1):
                [said] = await late.receive()
        assert (said.kind, said.seq) == ("residency_partial", 2)
        b.backend.known = True
        b.backend.report(Report(residency_anew=True))
        await b.settle()
        last = [e for e in b.heard if e.kind.startswith("residency")][-1]
        assert (last.kind, last.seq) == ("residency_snapshot", 2)


async def test_capabilities_that_changed_are_told_with_the_endpoint(
    autojump_clock: MockClock,
) -> None:
    async with bench(endpoint="sim+tcp://here:1") as b:
        b.backend.report(Report(capabilities=CapabilitiesReported(hash_scheme="found")))
        await b.settle()
        told = b.messages(CapabilitiesReported)[-1]
        assert told == CapabilitiesReported(hash_scheme="found", endpoint="sim+tcp://here:1")
