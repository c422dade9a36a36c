"""One look at a cluster: who is there, who does not answer, and how long it may take."""

import json
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from hear.app.cluster import running
from hear.buses.memory import MemoryBus
from hear.buses.observe.tap.status import LOOK_S, PolicyStatus, Status, look, to_json
from hear.buses.observe.tap.status_command import bar, show, text
from hear.errors import BusError
from hear.interfaces import BusStatistics, SubscriptionStatistics
from hear.messages import (
    CapabilitiesReported,
    OperationOutcome,
    OperationStatus,
    PressureReported,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    TierPressure,
    WaitingRequest,
)
from hear.subjects import token
from tests.buses.tap.builders import Voice, foreign
from tests.buses.tap.scene import Load, serving
from tests.buses.tap.test_follow import Remembering

INSTALLED = ("cache-aware", "guard", "session-aware")


def engine(bus: MemoryBus, name: str, *, epoch: int = 1, without: tuple[str, ...] = ()) -> Voice:
    """An engine that answers for its streams, but for some."""
    voice = Voice(name, epoch)
    waiting = WaitingRequest(request="r", since_s=0.0)
    for stream, message in (
        ("capabilities", CapabilitiesReported(model="m", controls=("retain",), modes=("dense",))),
        ("queue", QueueSnapshot(waiting=(waiting,))),
        ("pressure", PressureReported(tiers=(TierPressure(tier="gpu", num_blocks=8, used=2),))),
    ):
        if stream not in without:
            bus.provide_snapshots(
                f"state.default.{token(name)}.{stream}",
                lambda m=message: [voice.snapshot(m, trio.current_time(), engine=name)],  # type: ignore[misc]
            )
    return voice


async def seen(bus: MemoryBus) -> Status:
    with trio.fail_after(LOOK_S + 1):
        return await look(bus, name="status", policies=INSTALLED)


async def test_a_serving_cluster_is_told_with_engine_policies_and_subscribers(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bus = Remembering()
    async with serving(bus) as cluster, trio.open_nursery() as nursery:
        nursery.start_soon(Load(cluster).burst, 100)
        await trio.sleep(1)
        status = await seen(bus)
        nursery.cancel_scope.cancel()
    [found] = status.engines
    assert (found.name, found.epoch, found.model, found.missing) == ("engine0", 1, "Qwen3-8B", [])
    assert found.num_waiting is not None
    assert found.num_running is not None
    assert found.num_waiting + found.num_running == 100
    assert [tier.tier for tier in found.tiers] == ["gpu", "cpu"]
    assert found.tiers[0].used > 0
    assert {"prioritise", "bound_wait"} <= set(found.controls)
    assert [policy.name for policy in status.policies] == ["cache-aware", "guard:40"]
    guard = status.policies[1]
    assert guard.asked == {"bound_wait": 100}
    assert guard.num_open + sum(guard.outcomes.values()) == 100
    assert guard.since_s is not None
    assert all(policy.subscribed for policy in status.policies)
    assert {row.name for row in status.subscribers} == {"engine0", "cache-aware", "guard:40"}


async def test_it_ends_soon_after_all_have_answered(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bus = MemoryBus()
    engine(bus, "e0")
    began = trio.current_time()
    status = await seen(bus)
    assert trio.current_time() - began < 0.5
    assert status.engines[0].tiers[0].num_blocks == 8


async def test_an_engine_that_does_not_answer_is_named_after_two_seconds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bus = Remembering()
    engine(bus, "e0")
    engine(bus, "e1", without=("queue",))
    bus.publish(Voice("gone").say(QueueChanged(), engine="gone"))
    began = trio.current_time()
    status = await seen(bus)
    assert trio.current_time() - began == pytest.approx(LOOK_S)
    assert {e.name: e.missing for e in status.engines} == {
        "e0": [],
        "e1": ["queue"],
        "gone": ["capabilities", "queue", "pressure"],
    }
    shown = text(status)
    assert "did not answer for: queue" in shown
    assert "did not answer within 2 s; known from the bus's history" in shown


async def test_a_busy_engine_that_never_falls_silent_does_not_hold_the_look(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bus = MemoryBus()
    voice = engine(bus, "e0")

    async def talk() -> None:
        while True:
            bus.publish(voice.say(QueueChanged(num_waiting=9), trio.current_time(), engine="e0"))
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        status = await seen(bus)
        nursery.cancel_scope.cancel()
    assert status.engines[0].num_waiting == 9


async def test_only_the_newest_epoch_of_an_engine_counts(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bus = Remembering()
    engine(bus, "e0", epoch=5)
    bus.publish(Voice("e0", 4).say(QueueChanged(num_waiting=77), engine="e0"))
    [found] = (await seen(bus)).engines
    assert (found.epoch, found.num_waiting) == (5, 1)


async def test_what_cannot_be_read_is_passed_over(autojump_clock: trio.testing.MockClock) -> None:
    bus = Remembering()
    engine(bus, "e0")
    bus.provide_snapshots(
        "state.default.e1.queue", lambda: [foreign("queue_snapshot", b"\xc1", source="e1")]
    )
    bus.publish(foreign("operation_outcome", b"\xc1", category="outcome"))
    assert [e.name for e in (await seen(bus)).engines] == ["e0"]


async def policy_of(*said: OperationStatus, epoch: int = 1, again: bool = False) -> PolicyStatus:
    bus, engine0, policy = Remembering(), Voice("e0"), Voice("p", epoch)
    about: dict[str, Any] = {"request": "r", "engine": "e0", "operation": "p-1-1"}
    control = policy.say(Prioritise(priority=1), 50.0, **about)
    bus.publish(control)
    if again:
        bus.publish(control)
    for status in said:
        bus.publish(engine0.say(OperationOutcome(status=status), **about))
    [found] = (await seen(bus)).policies
    return found


async def test_a_policy_counts_what_it_asked_and_how_that_ended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    assert (await policy_of("accepted", "completed")).outcomes == {"completed": 1}
    assert (await policy_of("accepted", "completed", "completed")).outcomes == {"completed": 1}
    assert (await policy_of("accepted")).num_open == 1
    assert (await policy_of()).num_open == 1
    assert (await policy_of(again=True)).asked == {"prioritise": 1}


async def test_a_policy_is_there_since_its_epoch_or_else_its_first_control(
    autojump_clock: trio.testing.MockClock,
) -> None:
    assert (await policy_of()).since_s == 50.0
    assert (await policy_of(epoch=1_764_504_590_123)).since_s == 1_764_504_590.123


async def test_a_policy_that_only_listens_is_known_by_its_subscription(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bus = MemoryBus()
    async with bus.subscribe([">"], name="guard:60"), bus.subscribe([">"], name="somebody"):
        status = await seen(bus)
    assert [(p.name, p.since_s, p.asked) for p in status.policies] == [("guard:60", None, {})]
    assert "guard:60  -      yes" in text(status)


async def test_policies_that_have_left_are_one_line_and_not_a_row_each(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bus, engine0 = Remembering(), Voice("e0")
    for number in range(20):
        policy = Voice(f"p{number}")
        about: dict[str, Any] = {"request": "r", "engine": "e0", "operation": f"p{number}-1-1"}
        bus.publish(policy.say(Prioritise(priority=1), 50.0, **about))
        if number % 2:
            bus.publish(engine0.say(OperationOutcome(status="completed"), **about))
    async with bus.subscribe([">"], name="p3"):
        shown = text(await seen(bus))
    [line] = [line for line in shown.splitlines() if line.startswith("policies that have left: p0")]
    assert line.endswith("p9; 10 of their operations were never answered")
    assert [row.split()[0] for row in shown.splitlines() if " yes " in row] == ["p3"]


async def test_a_pool_is_not_asked_for_what_it_does_not_have(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running(
        engine="simulated",
        profile="h100-qwen3-8b",
        block_size=512,
        policy="cache-aware",
        engines=2,
    ) as cluster:
        began = trio.current_time()
        status = await look(cluster.bus, name="status", policies=INSTALLED)
        assert trio.current_time() - began < 0.5
    [pool] = [engine for engine in status.engines if engine.name == "pool"]
    assert (pool.targets, pool.missing) == (["engine0", "engine1"], [])
    assert "pool of   engine0, engine1" in text(status)
    assert "did not answer" not in text(status)


class Central(Remembering):
    """A bus with a centre that knows of one more subscriber."""

    async def central_statistics(self) -> BusStatistics:
        await trio.lowlevel.checkpoint()
        far = SubscriptionStatistics(name="far", queued=3, received=9, dropped=2)
        return BusStatistics(published={"state": 12}, subscriptions=(far,), lagged=1)


async def test_a_bus_with_a_centre_is_asked_for_all_participants(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bus = Central()
    engine(bus, "e0")
    status = await seen(bus)
    assert [row.name for row in status.subscribers] == ["far"]
    assert text(status).splitlines()[-1] == (
        "published 12 state; 1 cut off for lagging (all participants)"
    )


async def test_who_is_told_of_its_own_key_alone_is_told_so(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class OfOneKey(Central):
        async def central_statistics(self) -> BusStatistics:
            told = await super().central_statistics()
            return replace(told, own_key_only=True)

    bus = OfOneKey()
    engine(bus, "e0")
    status = await seen(bus)
    assert text(status).splitlines()[-1] == (
        "published 12 state; 1 cut off for lagging (the participants with this key alone)"
    )
    assert [policy.subscribed for policy in status.policies] == [None] * len(status.policies)


async def test_nobody_there_is_one_line_and_code_2(
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    status = await seen(MemoryBus())
    assert status.nobody
    assert show(status, bus="ipc:///run/bus") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "hear: no engine and no policy on ipc:///run/bus (looked for 2 s)\n"


async def test_json_holds_all_of_it(
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    bus = MemoryBus()
    engine(bus, "e0")
    status = await seen(bus)
    assert show(status, bus="x", json=True) == 0
    made = json.loads(capsys.readouterr().out)
    assert made == json.loads(to_json(status))
    assert made["engines"][0]["tiers"] == [{"tier": "gpu", "num_blocks": 8, "used": 2, "cached": 0}]


async def test_a_closed_bus_is_an_error() -> None:
    bus = MemoryBus()
    bus.close()
    with pytest.raises(BusError):
        await look(bus, name="status")


async def test_names_that_a_terminal_would_obey_are_shown(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bus = MemoryBus()
    engine(bus, "e\x1b[2J")
    shown = text(await seen(bus))
    assert "\x1b" not in shown
    assert "e\\x1b[2J" in shown


def test_a_bar_is_full_at_one() -> None:
    assert bar(0.0, 4) == "░░░░"
    assert bar(0.5, 4) == "██░░"
    assert bar(1.0, 4) == "████"


async def test_what_an_engine_tells_each_tenant_stands_apart(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bus = Remembering()
    engine(bus, "e0")
    voice = Voice("e0", tenant="acme")
    queue = QueueSnapshot(waiting=tuple(WaitingRequest(request=r, since_s=0.0) for r in "abc"))
    bus.provide_snapshots("state.acme.e0.queue", lambda: [voice.snapshot(queue, engine="e0")])
    key: dict[str, Any] = {"engine": "e0", "operation": "o", "request": "r"}
    for tenant in ("default", "acme"):
        bus.publish(Voice("guard", tenant=tenant).say(Prioritise(priority=1), **key))
    bus.publish(voice.say(OperationOutcome(status="completed"), engine="e0", operation="o"))
    status = await seen(bus)
    found = {(e.name, e.tenant): (e.num_waiting, e.missing) for e in status.engines}
    assert found == {
        ("e0", "default"): (1, []),
        ("e0", "acme"): (3, ["capabilities", "pressure"]),
    }
    policies = {(p.name, p.tenant): (p.num_open, p.outcomes) for p in status.policies}
    assert policies == {("guard", "default"): (1, {}), ("guard", "acme"): (0, {"completed": 1})}
    assert "e0 (acme)" in text(status)
    assert "guard (acme)" in text(status)
