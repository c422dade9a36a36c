"""The runner of a policy: bursts, gaps, retries, leaving, and policies that misbehave."""

import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import repeat
from threading import Thread
from typing import Any

import msgspec
import pytest
import structlog
import trio
import trio.testing
from trio.testing import MockClock

from hear.buses.memory import MemoryBus
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engine_operations import Actions, EngineOperations
from hear.engine_view import EngineViews
from hear.errors import BusError, LocalProtocolError
from hear.harness_view import HarnessView
from hear.interfaces import ApplyResult, Ask, Policy
from hear.messages import (
    BoundWait,
    Cancel,
    CapabilitiesReported,
    ContextClosed,
    Envelope,
    Key,
    Message,
    OperationOutcome,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    ResidencyChanged,
    ResidencySnapshot,
    Retain,
    ReuseExpected,
    Withdraw,
)
from hear.operation import Operation
from hear.policies.guard import Guard
from hear.policies.runtime.runner import PolicyRunner
from hear.subjects import stem

Decide = Callable[[HarnessView, EngineViews], Iterable[Ask]]
CONTROLS = ("prioritise", "bound_wait", "retain", "release")
ASK = Ask(Prioritise(priority=-1), Key(request="r", engine="e"))


class Script:
    """A policy that does as it is told; ``bursts`` counts the changes of each decision."""

    observes: tuple[str, ...] = ("intent.>", "state.>")

    def __init__(self, decide: Decide = lambda h, s: (), name: str = "script") -> None:
        self.name = name
        self.bursts: list[int] = []
        self._decide = decide

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        self.bursts.append(len(h.changes) + len(s.changes))
        return self._decide(h, s)


class Engine:
    """An engine without an engine: the protocol's own operations, and what is in effect."""

    def __init__(self, bus: MemoryBus, *, deaf: bool = False) -> None:
        self.deaf = deaf
        self.mute = False
        self.heard: list[Envelope] = []
        self.effects: dict[str, Message] = {}
        self._bus = bus
        self._sequencer = Sequencer("e")
        self._operations = EngineOperations(engine="e", controls=CONTROLS)
        for kind, message in (
            ("capabilities_reported", CapabilitiesReported(controls=CONTROLS)),
            ("residency_snapshot", ResidencySnapshot()),
            ("queue_snapshot", QueueSnapshot()),
        ):
            scope = stem("state", "default", Key(engine="e"), kind)
            bus.provide_snapshots(scope, lambda m=message: [self._snapshot(m)])  # type: ignore[misc]

    @property
    def num_open(self) -> int:
        return len(self._operations.open_operations)

    def _snapshot(self, message: Message) -> Envelope:
        return self._sequencer.wrap_snapshot(message, Key(engine="e"), trio.current_time())

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        controls_of_e = self._bus.subscribe(["control.default.e.>"], name="e", capacity=65_536)
        async with controls_of_e as controls:
            task_status.started()
            with suppress(BusError):
                while True:
                    for envelope in await controls.receive():
                        self.heard.append(envelope)
                        if not self.deaf:
                            self._carry_out(self._operations.receive(envelope, trio.current_time()))

    def accept(self, request: str) -> None:
        self._carry_out(self._operations.request_arrived(Key(request=request), trio.current_time()))

    def end(self, request: str) -> None:
        self._carry_out(self._operations.request_ended(request, trio.current_time()))

    def restart(self, *, forget: bool = False) -> None:
        if forget:
            self._operations = EngineOperations(engine="e", controls=CONTROLS)
            self.effects.clear()
        else:
            self._carry_out(self._operations.shut("engine_restarted"))
        self._sequencer.restart()
        self._operations.epoch = self._sequencer.epoch
        self._bus.publish(self._snapshot(CapabilitiesReported(controls=CONTROLS)))

    def say(self, message: Message, key: Key | None = None, *, lose: bool = False) -> None:
        envelope = self._sequencer.wrap(message, key or Key(engine="e"), trio.current_time())
        if not (lose or self.mute):
            self._bus.publish(envelope)

    def _carry_out(self, actions: Actions) -> None:
        for operation in actions.revert:
            self.effects.pop(operation.id, None)
        for answer in actions.outcomes:
            self.say(answer.outcome, answer.key)
        for operation in actions.apply:
            if not isinstance(operation.control, Cancel | Withdraw):
                self.effects[operation.id] = operation.control
            standing = isinstance(operation.control, BoundWait | Retain)
            result = (
                ApplyResult("accepted", standing=True) if standing else ApplyResult("completed")
            )
            self._carry_out(self._operations.applied(operation, result))


class Stage:
    """A bus with a harness, an engine and any number of policies."""

    def __init__(self, bus: MemoryBus, engine: Engine, nursery: trio.Nursery) -> None:
        self.bus = bus
        self.engine = engine
        self._nursery = nursery
        self._harness = Sequencer("harness")

    async def add(
        self,
        policy: Policy,
        *,
        decide_limit_s: float = 5.0,
        leave_limit_s: float = 60.0,
        epoch: int = 1,
    ) -> PolicyRunner:
        runner = PolicyRunner(
            self.bus,
            policy,
            decide_limit_s=decide_limit_s,
            leave_limit_s=leave_limit_s,
            epoch=epoch,
        )
        await self._nursery.start(runner.run)
        await self.settle()
        return runner

    async def describe(self, request: str = "r") -> None:
        self.publish_described(request)
        await self.settle()

    def publish_described(self, request: str) -> None:
        key = Key(request=request, context="c", engine="e")
        self.bus.publish(self._harness.wrap(RequestDescribed(), key, trio.current_time()))

    async def settle(self) -> None:
        """Let all that can be done now be done, without moving the clock."""
        await trio.testing.wait_all_tasks_blocked()

    async def stop(self, runner: PolicyRunner) -> None:
        runner.stop()
        await runner.stopped.wait()


@asynccontextmanager
async def staged(*, deaf: bool = False, limit_s: float = 1000) -> AsyncIterator[Stage]:
    async with MemoryBus() as bus, trio.open_nursery() as nursery:
        engine = Engine(bus, deaf=deaf)
        await nursery.start(engine.run)
        with trio.fail_after(limit_s):
            yield Stage(bus, engine, nursery)
        nursery.cancel_scope.cancel()


def on_described(*asks: Ask) -> Decide:
    """Ask for the same whenever a request was described."""

    def decide(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        return asks if any(isinstance(m, RequestDescribed) for _, m in h.changes) else ()

    return decide


# -- hearing and asking -----------------------------------------------------------------------


async def test_a_burst_is_one_decision() -> None:
    policy = Script()
    async with staged() as stage:
        runner = await stage.add(policy)
        assert policy.bursts == [3]  # what a late subscriber is given
        harness = Sequencer("crowd")
        for number in range(100):
            key = Key(request=f"r{number}", engine="e")
            stage.bus.publish(harness.wrap(RequestDescribed(), key, 0.0))
            stage.engine.say(QueueChanged())
        await stage.settle()
        assert policy.bursts == [3, 200]
        assert runner.statistics.decisions == 2


async def test_its_own_outcomes_alone_are_no_reason_to_decide() -> None:
    policy = Script(on_described(ASK))
    async with staged() as stage:
        runner = await stage.add(policy)
        stage.engine.accept("r")
        await stage.describe()
        assert runner.statistics.outcomes == {"completed": 1}
        assert len(policy.bursts) == 2


async def test_each_control_is_an_operation_with_a_name_of_its_own() -> None:
    async with staged() as stage:
        runner = await stage.add(Script(on_described(ASK, ASK)))
        await stage.describe()
        names = [e.key.operation for e in stage.engine.heard]
        assert len(set(names)) == 2
        assert None not in names
        assert {e.source for e in stage.engine.heard} == {"script"}
        assert runner.statistics.controls == runner.num_open == 2


async def test_a_later_incarnation_uses_no_name_again() -> None:
    async with staged() as stage:
        first = await stage.add(Script(on_described(ASK)))
        await stage.describe()
        await stage.stop(first)
        second = PolicyRunner(stage.bus, Script(on_described(ASK)), epoch=2)
        async with trio.open_nursery() as nursery:
            await nursery.start(second.run)
            stage.engine.accept("r")
            await stage.describe()
            await stage.stop(second)
        names = [e.key.operation for e in stage.engine.heard]
        assert len(set(names)) == len(names) == 5


async def test_a_prediction_is_published_as_intent() -> None:
    prediction = ReuseExpected(basis="predicted", probability=0.5, predictor="script")
    async with staged() as stage, stage.bus.subscribe(["intent.>"], name="tap") as tap:
        await stage.add(Script(on_described(Ask(prediction, Key(context="c", engine="e")))))
        await stage.describe()
        envelope = (await tap.receive())[-1]
        assert (envelope.source, open_body(envelope)) == ("script", prediction)
        assert stage.engine.heard == []


async def test_after_a_gap_a_snapshot_is_asked_for() -> None:
    known: list[bool] = []

    def decide(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        known.append(s["e"].residency_known)
        return ()

    async with staged() as stage:
        runner = await stage.add(Script(decide))
        stage.engine.say(ResidencyChanged(changes=()))
        await stage.settle()
        stage.engine.say(ResidencyChanged(changes=()), lose=True)
        stage.engine.say(ResidencyChanged(changes=()))
        await stage.settle()
        assert known == [True, True, False, True]
        assert runner.statistics.gaps == 1


async def test_what_its_views_gave_up_is_counted_and_said_once_in_a_while(
    autojump_clock: MockClock,
) -> None:
    """As beside an engine that HEAR sees from outside, which tells no outcomes."""
    policy, harness = Script(), Sequencer("harness")
    with structlog.testing.capture_logs() as logs:
        async with staged(limit_s=10_000) as stage:
            runner = await stage.add(policy)
            for number in range(100):
                key = Key(request=f"r{number}", engine="e")
                described = RequestDescribed()
                stage.bus.publish(harness.wrap(described, key, trio.current_time()))
                await trio.sleep(90)
            await stage.settle()
    assert runner.statistics.failure is None
    assert 50 < runner.statistics.forgotten < 65
    told = [line for line in logs if line["event"] == "view.forgotten"]
    assert len(told) == 2  # and not once for each
    assert sum(line["forgotten"] for line in told) <= runner.statistics.forgotten


async def test_the_end_of_a_context_is_heard_whatever_a_policy_observes() -> None:
    policy = Script(on_described())
    policy.observes = ("intent.*.*.request_described.>",)
    views: list[HarnessView] = []
    policy._decide = lambda h, s: (views.append(h), ())[1]  # type: ignore[func-returns-value]
    async with staged() as stage:
        await stage.add(policy)
        await stage.describe("r")
        assert list(views[-1].contexts) == ["c"]
        closed = Sequencer("harness").wrap(ContextClosed(), Key(context="c"), 0.0)
        stage.bus.publish(msgspec.structs.replace(closed, id="closed"))
        await stage.settle()
        assert not views[-1].contexts


async def test_a_message_that_cannot_be_read_is_passed_over() -> None:
    policy = Script(on_described(ASK))
    async with staged() as stage:
        runner = await stage.add(policy)
        stage.engine.say(Prioritise(priority="no"), Key(request="r", engine="e"))  # type: ignore[arg-type]
        stage.engine.say(ResidencyChanged(changes="no"))  # type: ignore[arg-type]
        stage.engine.say(RequestOutcome(status="no"), Key(request="r", engine="e"))  # type: ignore[arg-type]
        await stage.describe()
        assert runner.statistics.failure is None
        assert [e.kind for e in stage.engine.heard][-1] == "prioritise"


async def test_block_hashes_that_cannot_be_read_are_left_out() -> None:
    heard: list[RequestDescribed] = []

    def decide(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        heard.extend(m for _, m in h.changes if isinstance(m, RequestDescribed))
        return ()

    async with staged() as stage:
        runner = await stage.add(Script(decide))
        described = RequestDescribed(prompt_tokens=9, prefix_hashes=b"not eights")
        stage.bus.publish(Sequencer("harness").wrap(described, Key(request="r"), 0.0))
        await stage.settle()
        assert heard == [RequestDescribed(prompt_tokens=9)]
        assert runner.statistics.failure is None


# -- answers ----------------------------------------------------------------------------------


async def test_a_control_is_sent_again_until_it_is_answered(autojump_clock: MockClock) -> None:
    async with staged(deaf=True) as stage:
        runner = await stage.add(Script(on_described(ASK)))
        stage.engine.accept("r")
        await stage.describe()
        await trio.sleep(10)
        sent = [e.id for e in stage.engine.heard]
        assert len(sent) == 4  # at 0, 1, 3 and 7 s
        assert len(set(sent)) == 1
        stage.engine.deaf = False
        await trio.sleep(10)
        assert len(stage.engine.heard) == 5
        assert runner.statistics.outcomes == {"completed": 1}
        await trio.sleep(100)
        assert len(stage.engine.heard) == 5


async def test_a_control_that_nobody_answers_is_given_up(autojump_clock: MockClock) -> None:
    async with staged(deaf=True) as stage:
        runner = await stage.add(Script(on_described(ASK)))
        await stage.describe()
        await trio.sleep(200)
        assert runner.num_open == 0
        assert runner.statistics.outcomes == {"failed": 1}


async def test_what_was_open_when_an_engine_restarted_is_asked_about_again() -> None:
    bound = Ask(BoundWait(max_wait_s=40), Key(request="r", engine="e"))
    async with staged() as stage:
        runner = await stage.add(Script(on_described(bound)))
        stage.engine.accept("r")
        await stage.describe()
        assert runner.num_open == 1
        stage.engine.restart(forget=True)
        await stage.settle()
        assert runner.num_open == 0
        assert runner.statistics.outcomes == {"failed": 1}
        assert stage.engine.effects == {}, "it must not act again in the new epoch"


async def test_a_lost_outcome_is_asked_for_when_the_next_one_shows_that_it_is_missing() -> None:
    bound = Ask(BoundWait(max_wait_s=40), Key(request="r", engine="e"))
    async with staged() as stage:
        runner = await stage.add(Script(on_described(bound)))
        stage.engine.accept("r")
        await stage.describe()
        assert runner.num_open == 1
        stage.engine.mute = True
        stage.engine.end("r")
        await stage.settle()
        assert runner.num_open == 1
        stage.engine.mute = False
        stage.engine.say(OperationOutcome(status="completed"), Key(engine="e", operation="else"))
        await stage.settle()
        assert runner.num_open == 0


async def test_one_that_begins_anew_first_takes_back_what_an_earlier_one_left() -> None:
    async with staged() as stage:
        await stage.add(Script(on_described(ASK)), epoch=7)
        await stage.settle()
        assert [envelope.kind for envelope in stage.engine.heard] == ["withdraw"]


async def test_leaves_word_to_withdraw_where_it_asked_for_something() -> None:
    async with staged() as stage:
        wills: dict[str, list[Envelope]] = {}
        stage.bus.set_will = (  # type: ignore[method-assign]
            lambda source, envelopes: wills.update({source: list(envelopes)})
        )
        runner = await stage.add(Script(on_described(ASK)))
        assert wills == {}
        await stage.describe()
        (will,) = wills[runner.source]
        assert (will.kind, will.key.engine, will.source) == ("withdraw", "e", runner.source)
        runner.stop()
        await runner.stopped.wait()
        assert wills[runner.source] == []


# -- leaving ----------------------------------------------------------------------------------


STANDING = (
    Ask(BoundWait(max_wait_s=40, force="requirement"), Key(request="r", engine="e")),
    Ask(Retain(lease_s=1000), Key(context="c", engine="e")),
    Ask(Prioritise(priority=-3), Key(request="r", engine="e")),
    Ask(Prioritise(priority=-3), Key(request="not there yet", engine="e")),
)


async def test_stopping_takes_back_what_was_asked_and_leaves_nothing_open() -> None:
    async with staged() as stage:
        runner = await stage.add(Script(on_described(*STANDING)))
        stage.engine.accept("r")
        await stage.describe()
        assert len(stage.engine.effects) == 3
        await stage.stop(runner)
        assert isinstance(open_body(stage.engine.heard[-1]), Withdraw)
        assert stage.engine.effects == {}
        assert stage.engine.num_open == runner.num_open == 0
        assert runner.statistics.failure is None
        assert sum(runner.statistics.outcomes.values()) == runner.statistics.controls


async def test_stopping_waits_for_a_silent_engine_only_so_long(autojump_clock: MockClock) -> None:
    async with staged(deaf=True) as stage:
        runner = await stage.add(Script(on_described(*STANDING)), leave_limit_s=30)
        await stage.describe()
        begun = trio.current_time()
        await stage.stop(runner)
        assert trio.current_time() - begun == 30
        assert runner.num_open == 0
        assert runner.statistics.outcomes == {"failed": len(STANDING) + 1}


async def test_a_withdrawal_that_was_lost_is_sent_again(autojump_clock: MockClock) -> None:
    async with staged() as stage:
        runner = await stage.add(Script(on_described(*STANDING)))
        stage.engine.accept("r")
        await stage.describe()
        stage.engine.deaf = True
        runner.stop()
        await trio.sleep(5)
        assert len(stage.engine.effects) == 3
        stage.engine.deaf = False
        await runner.stopped.wait()
        assert stage.engine.effects == {}


async def test_one_that_was_stopped_before_it_began_ends_at_once() -> None:
    async with staged() as stage:
        runner = PolicyRunner(stage.bus, Script())
        runner.stop()
        await runner.run()
        assert runner.stopped.is_set()


async def test_a_policy_that_loses_its_bus_is_reported() -> None:
    async with staged() as stage:
        runner = await stage.add(Script(on_described(*STANDING)))
        await stage.describe()
        stage.bus.close()
        await runner.stopped.wait()
        assert runner.statistics.failure is not None
        assert runner.statistics.failure.startswith("lost the bus")
        assert runner.num_open == 0


def flood(bus: MemoryBus) -> None:
    harness = Sequencer("flood")
    for number in range(66_000):
        key = Key(request=f"x{number}", engine="e")
        bus.publish(harness.wrap(RequestDescribed(), key, 0.0))


async def test_a_policy_that_was_cut_off_once_goes_on_with_what_it_knows() -> None:
    async with staged() as stage:
        runner = await stage.add(Script(on_described(*STANDING)))
        stage.engine.accept("r")
        await stage.describe()
        flood(stage.bus)
        await stage.settle()
        assert runner.statistics.failure is None
        assert len(stage.engine.effects) == 3
        said = [envelope.id for envelope in stage.engine.heard]
        assert said.count(said[0]) == 2, "it asks again, since an answer may have been missed"
        before = runner.statistics.controls
        await stage.describe("after")
        assert runner.statistics.controls > before


async def test_a_policy_that_is_too_slow_to_hear_is_left_out_and_takes_back_what_it_asked() -> None:
    async with staged() as stage:
        runner = await stage.add(Script(on_described(*STANDING)))
        stage.engine.accept("r")
        await stage.describe()
        assert len(stage.engine.effects) == 3
        flood(stage.bus)
        await stage.settle()
        flood(stage.bus)
        await runner.stopped.wait()
        assert runner.statistics.failure is not None
        assert runner.statistics.failure.startswith("was too slow")
        assert stage.engine.effects == {}
        assert runner.num_open == stage.engine.num_open == 0


# -- policies that misbehave ------------------------------------------------------------------


def raises(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
    raise ValueError("on purpose")


def raises_midway(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
    yield ASK
    raise ValueError("on purpose")


def exits(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
    raise SystemExit(3)


def returns_nothing(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
    return None  # type: ignore[return-value]


def returns(*asks: object) -> Decide:
    return lambda h, s: asks  # type: ignore[return-value]


def replaces_its_changes(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
    s.changes = 3  # type: ignore[assignment]
    return ()


MISBEHAVE = [
    (raises, "raised ValueError: on purpose"),
    (raises_midway, "raised ValueError: on purpose"),
    (exits, "raised SystemExit: 3"),
    (returns_nothing, "raised TypeError: 'NoneType' object is not iterable"),
    (lambda h, s: 7, "raised TypeError: 'int' object is not iterable"),
    (returns("now"), "asked for 'now', expected an Ask"),
    (returns((1, 2, 3)), "asked for (1, 2, 3), expected an Ask"),
    (returns((1, 2)), "asked for int, expected a control or a prediction"),
    (returns((Prioritise(priority=1), "r")), "expected a Key"),
    (returns((Prioritise(priority=1), Key(engine=7))), "expected a Key"),  # type: ignore[arg-type]
    (returns((Prioritise(priority=1), Key(request="r"))), "without an engine in the key"),
    (returns((Prioritise(priority=object()), ASK.key)), "body cannot be encoded"),  # type: ignore[arg-type]
    (returns((QueueChanged(), Key(engine="e"))), "asked for QueueChanged, expected a control"),
    (returns((ReuseExpected(basis="known"), Key(context="c"))), "expected predicted"),
    (replaces_its_changes, "raised AttributeError"),
]


@pytest.mark.parametrize(("decide", "says"), MISBEHAVE)
async def test_a_policy_that_misbehaves_is_left_out_and_the_others_go_on(
    decide: Decide, says: str
) -> None:
    calls = 0

    def turns_bad(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        nonlocal calls
        if not any(isinstance(m, RequestDescribed) for _, m in h.changes):
            return ()
        calls += 1
        return STANDING if calls == 1 else decide(h, s)

    async with staged() as stage:
        bad = await stage.add(Script(turns_bad, name="bad"))
        good = await stage.add(Script(on_described(ASK), name="good"))
        stage.engine.accept("r")
        stage.engine.accept("r2")
        await stage.describe()
        assert any(isinstance(c, Retain) for c in stage.engine.effects.values())
        await stage.describe("r2")
        assert bad.stopped.is_set()
        assert bad.statistics.failure is not None
        assert says in bad.statistics.failure
        assert bad.num_open == 0
        assert not any(isinstance(c, BoundWait | Retain) for c in stage.engine.effects.values())
        await stage.describe("r3")
        assert calls == 2
        assert good.statistics.failure is None
        assert good.statistics.controls == 3


# -- at the limit of open operations ----------------------------------------------------------


def leases(*scores: float) -> list[Ask]:
    return [
        Ask(Retain(lease_s=600.0, score=score), Key(context=f"{score}", engine="e"))
        for score in scores
    ]


def standing(engine: Engine) -> list[float]:
    return sorted(c.score for c in engine.effects.values() if isinstance(c, Retain))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hear.policies.runtime.runner.MAX_OPEN", 3)


@pytest.mark.usefixtures("few")
async def test_at_its_limit_the_least_worthy_preferences_of_a_policy_give_way() -> None:
    async with staged() as stage:
        with structlog.testing.capture_logs() as logs:
            runner = await stage.add(Script(on_described(*leases(0.5, 0.3, 0.7, 0.4, 0.2, 0.9))))
            await stage.describe()
        assert standing(stage.engine) == [0.5, 0.7, 0.9]
        assert runner.num_open == 3
        statistics = runner.statistics
        assert (statistics.gave_way, statistics.unasked) == (2, 1)
        assert statistics.failure is None
        said = [entry for entry in logs if entry["event"] == "policy.asks_too_much"]
        assert len(said) == 1
        assert said[0]["policy"] == "script"
        await stage.stop(runner)
        assert stage.engine.effects == {}


@pytest.mark.usefixtures("few")
async def test_requirements_never_give_way_and_are_sent_beyond_the_limit() -> None:
    bounds = [
        Ask(BoundWait(max_wait_s=5.0, force="requirement"), Key(request=f"r{n}", engine="e"))
        for n in range(8)
    ]
    async with staged() as stage:
        for number in range(8):
            stage.engine.accept(f"r{number}")
        runner = await stage.add(Script(on_described(*leases(0.5, 0.3), *bounds, *leases(0.9))))
        await stage.describe()
        assert standing(stage.engine) == []
        assert len(stage.engine.effects) == len(bounds) == runner.num_open
        assert (runner.statistics.gave_way, runner.statistics.unasked) == (2, 1)
        assert runner.statistics.failure is None


@pytest.mark.usefixtures("few")
async def test_a_policy_that_floods_an_engine_that_is_gone_stays_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hear.policies.runtime.runner.MAX_REQUIRED", 20)
    required = [
        Ask(BoundWait(max_wait_s=5.0, force="requirement"), Key(request=f"r{n}", engine="e"))
        for n in range(50)
    ]
    async with staged(deaf=True) as stage:
        flood = leases(*(n / 100 for n in range(1, 51)))
        runner = await stage.add(Script(on_described(*flood, *required)))
        await stage.describe()
        assert runner.num_open <= 22  # and one may be a cancellation
        assert runner.statistics.unasked >= 70
        assert runner.statistics.failure is None


async def test_a_guard_bounds_17_000_requests_at_once() -> None:
    async with staged() as stage:
        runner = await stage.add(Guard(5.0))
        for number in range(17_000):
            stage.engine.accept(f"r{number}")
            stage.publish_described(f"r{number}")
        await stage.settle()
        assert runner.statistics.failure is None
        assert len(stage.engine.effects) == runner.num_open == 17_000
        assert (runner.statistics.gave_way, runner.statistics.unasked) == (0, 0)


async def test_a_policy_that_damages_its_views_is_left_out() -> None:
    def damages(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        h.requests = None  # type: ignore[assignment]
        return ()

    async with staged() as stage:
        bad = await stage.add(Script(damages, name="bad"))
        good = await stage.add(Script(on_described(ASK), name="good"))
        stage.engine.accept("r")
        await stage.describe()
        await stage.describe("r2")
        assert bad.stopped.is_set()
        assert bad.statistics.failure is not None
        assert bad.statistics.failure.startswith("left its views unusable")
        assert good.statistics.failure is None


async def test_a_fault_in_our_own_code_ends_the_policy_and_not_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the pause before another attempt had grown past what a number holds."""
    async with staged() as stage:
        bad = await stage.add(Script(on_described(*STANDING), name="bad"))
        good = await stage.add(Script(on_described(ASK), name="good"))
        stage.engine.accept("r")
        await stage.describe()
        assert stage.engine.effects
        due, faults = (
            bad._open_operations.due,
            [OverflowError("(34, 'Numerical result out of range')")],
        )

        def faulty(now: float) -> tuple[list[Envelope], list[Operation]]:
            if faults:
                raise faults.pop()
            return due(now)

        monkeypatch.setattr(bad._open_operations, "due", faulty)
        await stage.describe("r2")
        await stage.settle()
        assert bad.stopped.is_set()
        assert (bad.statistics.failure or "").startswith("fault in HEAR: OverflowError")
        assert bad.num_open == 0, "what it had asked for is withdrawn"
        assert good.statistics.failure is None
        assert not good.stopped.is_set()


async def test_what_a_policy_asked_before_the_nonsense_is_withdrawn_too() -> None:
    async with staged() as stage:
        stage.engine.accept("r")
        runner = await stage.add(Script(returns(*STANDING, "nonsense")))
        assert runner.statistics.failure is not None
        assert runner.statistics.controls == len(STANDING) + 1
        assert stage.engine.effects == {}


async def test_a_policy_may_cancel_its_own() -> None:
    async with staged() as stage:
        runner = await stage.add(Script(on_described(*STANDING[:2])))
        stage.engine.accept("r")
        await stage.describe()
        target = stage.engine.heard[0].key.operation
        assert target is not None
        runner.policy = Script(on_described(Ask(Cancel(target=target), Key(engine="e"))))
        await stage.describe("r2")
        assert len(stage.engine.effects) == 1
        assert runner.statistics.outcomes == {"failed": 1, "completed": 1}


def spins(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
    while True:
        pass


def sleeps(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
    time.sleep(1000)
    return ()


def never_ends(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
    for _ in repeat(None):
        yield from ()


def catches_exceptions(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
    while True:
        with suppress(Exception):
            time.sleep(1000)


@pytest.mark.parametrize("decide", [spins, sleeps, never_ends, catches_exceptions])
async def test_a_policy_that_does_not_return_is_left_out_and_the_others_go_on(
    decide: Decide,
) -> None:
    async with staged() as stage:
        good = await stage.add(Script(on_described(ASK), name="good"))
        begun = time.perf_counter()
        bad = await stage.add(Script(decide, name="bad"), decide_limit_s=0.05)
        assert bad.stopped.is_set()
        assert time.perf_counter() - begun < 2
        assert bad.statistics.failure == "did not decide within 0.05 s"
        await stage.describe()
        assert good.statistics.controls == 1


async def test_one_that_catches_even_that_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hear.policies.runtime.watchdog._AGAIN_S", 0.05)

    def stubborn(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        for _ in range(3):
            with suppress(BaseException):
                time.sleep(1000)
        time.sleep(1000)
        return ()

    async with staged() as stage:
        bad = await stage.add(Script(stubborn), decide_limit_s=0.05)
        assert bad.statistics.failure == "did not decide within 0.05 s"


def takes_a_while(h: HarnessView, s: EngineViews) -> Iterable[Ask]:
    time.sleep(0.02)
    return ()


async def test_a_decision_within_its_time_is_left_alone_and_so_is_the_alarm() -> None:
    async with staged() as stage:
        runner = await stage.add(Script(takes_a_while), decide_limit_s=0.2)
        await stage.describe()
        signal.sigtimedwait([], 0.25)  # in which an alarm that was left behind would go off
        assert runner.statistics.failure is None


def test_outside_the_main_thread_a_policy_runs_without_a_limit() -> None:
    failures = []

    async def main() -> None:
        async with staged() as stage:
            runner = await stage.add(Script(takes_a_while), decide_limit_s=0.001)
            failures.append(runner.statistics.failure)

    thread = Thread(target=trio.run, args=(main,))
    thread.start()
    thread.join()
    assert failures == [None]


async def test_outcomes_of_operations_that_are_not_its_own_do_not_matter() -> None:
    async with staged() as stage:
        runner = await stage.add(Script(on_described(ASK)))
        key = Key(engine="e", operation="somebody's")
        stage.engine.say(OperationOutcome(status="completed"), key)
        await stage.settle()
        assert runner.statistics.outcomes == {}


# -- tenants --------------------------------------------------------------------------------------


async def test_a_policy_hears_its_own_tenant_whatever_it_observes(
    autojump_clock: MockClock,
) -> None:
    for observes in ((">",), ("intent.>", "state.>"), ("*.*.*.*.*",)):
        heard: list[tuple[str | None, int]] = []

        def decide(h: HarnessView, s: EngineViews, heard: Any = heard) -> Iterable[Ask]:
            heard += [(key.request, len(s)) for key, _ in h.changes]
            return ()

        policy = Script(decide)
        policy.observes = observes
        async with MemoryBus() as bus, trio.open_nursery() as nursery:
            runner = PolicyRunner(bus, policy, tenant="acme")
            await nursery.start(runner.run)
            for tenant in ("default", "acme", "umbra"):
                engine, harness = Sequencer("e", tenant=tenant), Sequencer("h", tenant=tenant)
                queue = QueueChanged(num_waiting=1)
                bus.publish(engine.wrap(queue, Key(engine=f"e of {tenant}"), 0.0))
                key = Key(request=f"r of {tenant}", workflow="w")
                bus.publish(harness.wrap(RequestDescribed(), key, 0.0))
            await trio.testing.wait_all_tasks_blocked()
            runner.stop()
        assert heard == [("r of acme", 1)]


def test_a_policy_that_observes_another_tenant_is_one_error() -> None:
    policy = Script()
    policy.observes = ("intent.umbra.>",)
    with pytest.raises(LocalProtocolError, match=r"observes 'intent.umbra.>', of another tenant"):
        PolicyRunner(MemoryBus(), policy, tenant="acme")
