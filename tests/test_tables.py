"""Whoever reads a bus ends where it began: days of requests, contexts, engines and tenants whose
ids never repeat, half of which nobody ends, leave no table larger.
"""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from hear.blocks import pack
from hear.buses.observe.metrics.collecting import Collecting
from hear.buses.observe.tap.board import MAX_ENGINES, Board
from hear.codec import open_body
from hear.delivery import MAX_SCOPES, Arrival, GapDetector, Sequencer
from hear.engine_operations import EngineOperations
from hear.engine_view import EngineViews
from hear.harness_view import HarnessView
from hear.interfaces import Ask, Policy
from hear.messages import (
    CapabilitiesReported,
    ContextClosed,
    ContextOpened,
    ContextPaused,
    Envelope,
    Key,
    Message,
    PressureReported,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    ResidencyChanged,
    ResidencySnapshot,
    Retain,
    WorkflowDescribed,
)
from hear.policies.cache_aware import CacheAware
from hear.policies.guard import Guard
from hear.policies.routing import CacheAwareRouting, LeastLoaded, RoundRobin
from hear.policies.session_aware import SessionAware
from hear.sender_operations import MAX_ENGINES as MAX_EPOCHS
from hear.sender_operations import SenderOperations
from tests.policies.stage import stored, waiting
from tests.tables import sizes

ROUNDS = 300
ROUND_S = 60.0
DAY_S = 86_400.0
BLOCK_SIZE = 10


class World:
    """Harnesses and engines that come and go. ``round`` returns what is said in one minute."""

    def __init__(self, tenants: int = 1) -> None:
        self.now = 0.0
        self._tenants = tenants
        self._number = 0
        self._living = Sequencer("living")

    def heartbeat(self) -> list[Envelope]:
        """An engine that stays, and does nothing."""
        return [self._living.wrap(PressureReported(), Key(engine="living"), self.now)]

    def round(self) -> list[Envelope]:
        self.now += ROUND_S
        self._number += 1
        n = self._number
        tenant = "default" if n % self._tenants == 0 else f"tenant{n}"
        engine, pool, context = f"e{n}", f"pool{n}", f"c{n}"
        harness = Sequencer(f"harness{n}", tenant=tenant)
        served, dispatcher = Sequencer(engine, tenant=tenant), Sequencer(pool, tenant=tenant)
        said: list[Envelope] = []

        def intent(message: Message, **key: str | int) -> None:
            key.setdefault("workflow", f"w{n}")
            said.append(harness.wrap(message, Key(**key), self.now))  # type: ignore[arg-type]

        def state(message: Message, by: Sequencer = served, **key: str) -> None:
            key.setdefault("engine", engine)
            said.append(by.wrap(message, Key(**key), self.now))  # type: ignore[arg-type]

        said += [
            served.wrap_snapshot(snapshot, Key(engine=engine), self.now)
            for snapshot in (CapabilitiesReported(), QueueSnapshot(), ResidencySnapshot())
        ]
        said.append(
            dispatcher.wrap_snapshot(
                CapabilitiesReported(targets=(engine,)), Key(engine=pool), self.now
            )
        )
        intent(WorkflowDescribed(roles=("coder",)))
        intent(ContextOpened(), context=context)
        blocks = range(100 * n, 100 * n + 8)
        state(ResidencyChanged(changes=(stored(blocks),)))
        described = RequestDescribed(
            prompt_tokens=80, block_size=BLOCK_SIZE, prefix_hashes=pack(blocks)
        )
        names = [
            f"r{n}-{fate}" for fate in ("ends", "attached", "dies", "waits", "pooled", "planned")
        ]
        ends, attached, dies, waits, pooled, planned = names
        for request in (ends, attached, dies, waits):
            intent(described, request=request, context=context, context_version=1, engine=engine)
        intent(described, request=pooled, context=context, engine=pool)
        intent(RequestDescribed(ready=False), request=planned, context=f"d{n}")
        intent(ContextPaused(), context=f"paused{n}")
        for request in (ends, dies, waits):
            state(RequestOutcome(status="accepted"), request=request, context=context)
            state(QueueChanged(waiting=(waiting(request),)))
        state(QueueChanged(started=(ends, dies)))
        state(QueueChanged(ended=(ends,)))
        state(RequestOutcome(status="completed"), request=ends, context=context)
        if n % 2:
            intent(ContextClosed(), context=context)
            # An outcome may come after the end of its context, and opens it no more.
            state(RequestOutcome(status="completed"), request=f"r{n}-late", context=context)
        return said


class Deciding:
    """A policy with its views, as its runner drives it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.h, self.s = HarnessView(), EngineViews()
        self.asked: list[Ask] = []

    def hear(self, said: list[Envelope], now: float) -> None:
        self.h.advance(now)
        self.s.advance(now)
        for envelope in said:
            message = open_body(envelope)
            assert message is not None
            if envelope.category == "state":
                self.s.apply(envelope, message)
            else:
                self.h.apply(envelope, message)
        self.asked += self.policy.decide(self.h, self.s)
        self.h.clear_changes()
        self.s.clear_changes()


POLICIES: list[Callable[[], Policy]] = [
    CacheAware,
    Guard,
    SessionAware,
    RoundRobin,
    LeastLoaded,
    CacheAwareRouting,
]

BY_NUMBER = {
    "s._views": 4_096,  # names and capabilities: a pool may say nothing for days, and serve
    "s._detector._heard": 65_536,
    "policy._picked": 4_096,
    "policy._estimator._depths": 6,  # what was learned: a depth and a pause, not a name
    "policy._estimator._cells": 30,
    "s._views[]._heard_s": 5 * 4_096,  # streams of engines
    "s._views[]._asked_s": 5 * 4_096,
    "s._views[].residency._tiers": 4 * 4_096,
}


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {
        path: (before.get(path, 0), size)
        for path, size in after.items()
        if size > max(before.get(path, 0), BY_NUMBER.get(path, 0))
    }


@pytest.mark.parametrize("factory", POLICIES, ids=lambda f: f.__name__)
def test_a_policy_and_its_views_end_where_they_began(factory: Callable[[], Policy]) -> None:
    reader, world = Deciding(factory()), World()
    reader.hear(world.heartbeat(), world.now)
    before = sizes(reader)
    most = before
    for number in range(ROUNDS):
        reader.hear([*world.round(), *world.heartbeat()], world.now)
        if number % 100 == 99:
            most = {path: max(most.get(path, 0), size) for path, size in sizes(reader).items()}
    assert grown(before, most), "what is measured is not what is kept"
    assert reader.asked
    reader.asked.clear()
    while world.now < 2 * DAY_S:
        world.now += 600.0
        reader.hear(world.heartbeat(), world.now)
    assert grown(before, sizes(reader)) == {}


def test_an_engine_that_tells_no_outcomes_takes_a_bounded_memory() -> None:
    """As one that was attached: nothing is heard of what others send there."""
    view, harness = HarnessView(max_bytes=1 << 20), Sequencer("harness")
    prompt = pack(range(7_000))
    for number in range(1_000):
        key = Key(request=f"r{number}", context=f"c{number}", engine="attached")
        described = RequestDescribed(prefix_hashes=prompt)
        view.apply(harness.wrap(described, key, 0.0), described)
    assert view.requests.size_bytes <= 1 << 20
    assert len(view.requests) == (1 << 20) // view_size(view)
    assert len(view.requests) + view.num_forgotten == 1_000
    assert [key.request for key in view.forgotten] == [
        f"r{number}" for number in range(view.num_forgotten)
    ]


def view_size(view: HarnessView) -> int:
    """Bytes of one of the requests of a view, all of which are alike."""
    return view.requests.size_bytes // len(view.requests)


def test_the_board_of_a_tap_ends_where_it_began() -> None:
    board, world = Board(), World(tenants=3)
    for envelope in world.heartbeat():
        board.apply(envelope, world.now)
    for _ in range(ROUNDS):
        for envelope in [*world.round(), *world.heartbeat()]:
            board.apply(envelope, world.now)
    picture = board.picture(world.now)
    assert len(picture.engines) <= MAX_ENGINES
    # The engines that came last are shown, and not those that came first.
    names = {engine.name.split(" ")[0] for engine in picture.engines}
    assert any(name.startswith(f"e{ROUNDS}") for name in names), names
    assert any(name.startswith("living") for name in names), names
    assert len(board._harness) <= MAX_ENGINES
    while world.now < 2 * DAY_S:
        world.now += 600.0
        for envelope in world.heartbeat():
            board.apply(envelope, world.now)
        board.picture(world.now)
    after = sizes(board)
    for path in ("requests._entries", "contexts._entries", "workflows._entries"):
        assert after.get(f"_harness[].{path}", 0) == 0
    for path in ("waiting", "running", "residency._children"):
        assert after.get(f"_engines[]._views[].{path}", 0) == 0


def test_the_metrics_end_where_they_began() -> None:
    registry = CollectorRegistry()
    collecting, world = Collecting(registry), World()

    def hear(said: list[Envelope]) -> None:
        for envelope in said:
            collecting.hear(envelope, world.now)
        collecting.settle(world.now)

    def engines() -> set[str]:
        return {
            sample.labels["engine"]
            for family in registry.collect()
            for sample in family.samples
            if "engine" in sample.labels
        }

    hear(world.heartbeat())
    before = sizes(collecting._engines), engines()
    for _ in range(ROUNDS):
        hear([*world.round(), *world.heartbeat()])
    assert len(engines()) == 2 * ROUNDS + 1
    while world.now < 2 * DAY_S:
        world.now += 600.0
        hear(world.heartbeat())
    assert (sizes(collecting._engines), engines()) == before


def test_the_intake_of_an_engine_ends_where_it_began() -> None:
    operations = EngineOperations(engine="e", controls=("prioritise", "retain"), remember=10)
    before = sizes(operations)
    policy, now = Sequencer("policy"), 0.0
    for number in range(2_000):
        now += 1.0
        for control, about in (
            (Prioritise(priority=-1), {"request": f"never{number}"}),
            (Prioritise(priority=-1), {"request": f"r{number}"}),
            (Retain(score=0.5, lease_s=9.0), {"context": f"c{number}", "context_version": 1}),
        ):
            key = Key(**about, engine="e", operation=policy.next_id())
            operations.receive(policy.wrap(control, key, now), now)
        operations.request_arrived(Key(request=f"r{number}", context=f"c{number}"), now)
        operations.request_ended(f"r{number}", now)
        operations.expire(now)
    assert operations.expire(now + 4_000.0).outcomes
    operations.expire(now + 8_000.0)
    retains = [op for op in operations.open_operations if isinstance(op.control, Retain)]
    assert len(retains) == 2_000  # which the backend was handed, and has not answered
    operations.shut("engine_stopped")
    remembered = {"_ended._entries": 10, "_gone": 10, "_versions._entries": 10}
    assert {
        path: size for path, size in sizes(operations).items() if size > before.get(path, 0)
    }.keys() <= remembered.keys()
    assert all(sizes(operations)[path] <= most for path, most in remembered.items())


def test_controls_without_an_end_are_bounded_in_bytes() -> None:
    operations = EngineOperations(engine="e", controls=("prioritise",), max_open_bytes=100_000)
    policy = Sequencer("policy")
    answers = []
    for number in range(20):
        key = Key(request=f"r{number}", engine="e", operation=policy.next_id())
        control = Prioritise(priority=-1, reason="x" * 20_000)
        answers += operations.receive(policy.wrap(control, key, 0.0), 0.0).outcomes
    told = [(answer.outcome.status, answer.outcome.reason) for answer in answers]
    assert told == [("accepted", "")] * 4 + [("failed", "overloaded"), ("accepted", "")] * 16
    assert len(operations.open_operations) == 4  # the oldest gives way to one that is worth as much
    operations.expire(100.0)
    key = Key(request="r", engine="e", operation=policy.next_id())
    [answer] = operations.receive(policy.wrap(Prioritise(priority=1), key, 100.0), 100.0).outcomes
    assert answer.outcome.status == "accepted"


def test_a_source_that_speaks_of_ever_new_workflows_uses_no_number_twice() -> None:
    harness, reader = Sequencer("harness"), GapDetector()
    message = ContextOpened()

    def say(workflow: str) -> Arrival:
        return reader.observe(harness.wrap(message, Key(context="c", workflow=workflow), 0.0))

    for _ in range(3):
        say("first")
    for number in range(MAX_SCOPES + 5):
        say(f"w{number}")
    assert sizes(harness)["_seqs"] == MAX_SCOPES
    assert say("first") is not Arrival.STALE
    assert say("first") is Arrival.NEXT


def test_a_policy_remembers_the_epochs_of_so_many_engines() -> None:
    sender_operations = SenderOperations()
    for number in range(2 * MAX_EPOCHS):
        sender_operations.hear_epoch("living", 7, 0.0)
        sender_operations.hear_epoch(f"e{number}", 1, 0.0)
    assert sizes(sender_operations)["_epochs"] == MAX_EPOCHS
    assert sender_operations.epoch_of("living") == 7
