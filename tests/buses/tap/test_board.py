"""The model of the screen: a real cluster on a virtual clock, and what goes wrong."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import trio
import trio.testing

from hear.blocks import pack
from hear.buses.memory import MemoryBus
from hear.buses.observe.tap.board import MAX_ENGINES, RATE_S, Board, Picture
from hear.buses.observe.tap.follow import Follower
from hear.errors import LaggedError
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    CapabilitiesReported,
    ContextOpened,
    ContextPaused,
    Envelope,
    OperationOutcome,
    PressureReported,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    ResidencyChanged,
    TierPressure,
    WaitingRequest,
)
from tests.buses.tap.builders import Voice, foreign
from tests.buses.tap.scene import Load, serving


class Fed:
    """A board that follows a bus."""

    def __init__(self) -> None:
        self.board = Board()

    def take(self, envelopes: Sequence[Envelope]) -> Iterable[Envelope]:
        return [e for e in envelopes if self.board.apply(e, trio.current_time())]

    def cut_off(self, error: LaggedError) -> None:
        raise error


async def picture_of_a_cluster(requests: int, after_s: float) -> Picture:
    """What a board shows of a serving cluster, so long after so many requests came at once."""
    bus, fed = MemoryBus(), Fed()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Follower(bus, [">"], name="tap").run, fed)
        async with serving(bus) as cluster, trio.open_nursery() as load:
            load.start_soon(Load(cluster).burst, requests)
            await trio.sleep(after_s)
            await trio.testing.wait_all_tasks_blocked()
            picture = fed.board.picture(trio.current_time())
            load.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
    return picture


async def test_a_serving_cluster_is_all_there(autojump_clock: trio.testing.MockClock) -> None:
    picture = await picture_of_a_cluster(requests=100, after_s=4.0)
    [engine] = picture.engines
    assert (engine.name, engine.model, engine.epoch) == ("engine0", "Qwen3-8B", 1)
    active = [r for r in picture.requests if r.active]
    assert engine.num_waiting == sum(r.status == "waiting" for r in active)
    assert engine.num_running == sum(r.status == "running" for r in active)
    assert len(picture.requests) == 100
    assert engine.residency_known
    gpu, cpu = engine.tiers
    assert gpu.held is not None
    assert gpu.held > 0
    assert (gpu.tier, cpu.tier) == ("gpu", "cpu")
    assert engine.age_s is not None
    assert engine.age_s < 1
    assert {policy.name for policy in picture.policies} == {"cache-aware", "guard:40"}
    for policy in picture.policies:
        assert policy.asked > 0
        assert all(d.reason for d in policy.decisions)
        assert any(d.status == "completed" for d in policy.decisions)
    assert (picture.gaps, picture.missed, picture.unknown, picture.unreadable) == (0, 0, 0, 0)
    assert dict(picture.rates)["intent"] > 0
    assert picture.num_contexts == 4


async def test_a_request_that_was_served_shows_all_its_phases(
    autojump_clock: trio.testing.MockClock,
) -> None:
    picture = await picture_of_a_cluster(requests=8, after_s=5.0)
    for request in picture.requests:
        assert request.status == "completed"
        assert [s.phase for s in request.stretches] == ["queue", "prefill", "decode"]
        first, second, third = request.stretches
        assert first.start_s <= second.start_s <= third.start_s
        assert any("asks engine0: bound the wait" in line for line in request.messages)
    assert picture.num_paused == 4


# -- what goes wrong --------------------------------------------------------------------------


def test_what_was_missed_is_counted_by_engine_and_its_state_is_unknown() -> None:
    board, engine = Board(), Voice("e0")
    stored = BlocksStored(tier="gpu", prefix_hashes=pack([1, 2]))
    changed = ResidencyChanged(changes=(stored,))
    assert not board.apply(engine.say(changed, engine="e0"), 0.0)
    for _ in range(3):
        engine.say(changed, engine="e0")
    assert board.apply(engine.say(changed, engine="e0"), 1.0)  # it asks for a snapshot
    picture = board.picture(1.0)
    assert (picture.gaps, picture.missed) == (1, 3)
    assert picture.losses[-1].stem == "state.default.e0.residency"
    assert picture.engines[0].gaps == 1
    assert not picture.engines[0].residency_known


def test_a_queue_that_is_not_known_has_no_length() -> None:
    board, engine = Board(), Voice("e0")
    engine.say(QueueChanged(), engine="e0")
    board.apply(engine.say(QueueChanged(num_waiting=3), engine="e0"), 0.0)
    assert board.picture(0.0).engines[0].num_waiting is None
    waiting = WaitingRequest(request="r", since_s=0.0)
    board.apply(engine.snapshot(QueueSnapshot(waiting=(waiting,)), engine="e0"), 0.0)
    assert board.picture(0.0).engines[0].num_waiting == 1


def test_the_age_of_the_last_word_grows_while_an_engine_is_silent() -> None:
    board, engine = Board(), Voice("e0")
    board.apply(engine.say(PressureReported(), 10.0, engine="e0"), 10.0)
    assert board.picture(12.5).engines[0].age_s == 2.5
    assert board.picture(9.0).engines[0].age_s == 0.0  # its clock is ahead of ours


def test_what_cannot_be_read_or_is_not_known_is_counted_and_nothing_more() -> None:
    board = Board()
    assert not board.apply(foreign("foo", {"kind": "foo"}), 0.0)
    assert not board.apply(foreign("queue_changed", b"\xc1"), 0.0)
    odd = BlocksStored(tier="gpu", prefix_hashes=b"odd")
    assert board.apply(Voice("e0").say(ResidencyChanged(changes=(odd,)), engine="e0"), 0.0)
    picture = board.picture(0.0)
    assert (picture.unknown, picture.unreadable, picture.num_messages) == (1, 2, 3)


def test_a_restarted_engine_begins_anew() -> None:
    board, engine = Board(), Voice("e0")
    tiers = (TierPressure(tier="gpu", num_blocks=8, used=8),)
    board.apply(engine.say(PressureReported(tiers=tiers), engine="e0"), 0.0)
    board.apply(engine.say(QueueChanged(started=("r1",)), engine="e0"), 0.0)
    engine.restart()
    board.apply(engine.snapshot(CapabilitiesReported(model="m"), engine="e0"), 1.0)
    [shown] = board.picture(1.0).engines
    assert (shown.epoch, shown.model, shown.num_running) == (2, "m", None)


def test_rates_are_of_the_last_seconds() -> None:
    board, voice = Board(), Voice("h")
    for n in range(30):
        board.apply(voice.say(ContextOpened(), context="c", workflow="w"), n / 10)
    assert dict(board.picture(3.0).rates) == {
        "intent": 30 / RATE_S,
        "control": 0.0,
        "state": 0.0,
        "outcome": 0.0,
    }
    assert dict(board.picture(60.0).rates)["intent"] == 0.0


def test_contexts_that_pause_are_counted() -> None:
    board, voice = Board(), Voice("h")
    board.apply(voice.say(ContextPaused(cause="tool"), context="c1", workflow="w"), 0.0)
    board.apply(voice.say(ContextOpened(), context="c2", workflow="w"), 0.0)
    assert (board.picture(0.0).num_contexts, board.picture(0.0).num_paused) == (2, 1)


@pytest.mark.parametrize("category", ["state", "gossip"])
def test_strangers_without_end_fill_no_memory(category: str) -> None:
    board = Board()
    for n in range(3 * MAX_ENGINES):
        name = f"e{n}"
        board.apply(Voice(name).say(PressureReported(), engine=name), 0.0)
        board.apply(foreign("foo", {}, source=name, category=f"{category}{n}"), 0.0)
    picture = board.picture(0.0)
    assert len(picture.engines) == MAX_ENGINES
    assert len(picture.rates) < 20


def test_a_picture_does_not_change_any_more() -> None:
    board, voice = Board(), Voice("e0")
    board.apply(voice.say(QueueChanged(started=("r1",)), engine="e0"), 0.0)
    before = board.picture(0.0)
    board.apply(voice.say(QueueChanged(ended=("r1",)), engine="e0"), 1.0)
    assert before.requests[0].status == "running"
    assert before.engines[0].num_running == 1
    assert hash(before) != hash(board.picture(1.0))


def test_what_two_tenants_hear_of_one_engine_stands_apart() -> None:
    board = Board()
    for tenant, number in ((DEFAULT_TENANT, 2), ("acme", 3)):
        engine, policy = Voice("e0", tenant=tenant), Voice("p", tenant=tenant)
        stored = BlocksStored(tier="gpu", prefix_hashes=pack(range(number)))
        board.apply(engine.say(ResidencyChanged(changes=(stored,)), engine="e0"), 0.0)
        started = tuple(f"r{n}" for n in range(number))
        board.apply(engine.say(QueueChanged(started=started), engine="e0"), 0.0)
        key: dict[str, Any] = {"engine": "e0", "request": "r0", "operation": "o"}
        board.apply(policy.say(Prioritise(priority=number), **key), 0.0)
        board.apply(voice_of(tenant).say(ContextOpened(), context="c", workflow="w"), 0.0)
    board.apply(engine.say(OperationOutcome(status="completed"), engine="e0", operation="o"), 0.0)
    picture = board.picture(0.0)
    engines = {e.name: (e.num_running, e.num_blocks) for e in picture.engines}
    assert engines == {"e0": (2, 2), "e0 (acme)": (3, 3)}
    assert {r.id for r in picture.requests} == {"r0", "r1", *(f"r{n} (acme)" for n in range(3))}
    policies = {p.name: (p.asked, p.outcomes) for p in picture.policies}
    assert policies == {"p": (1, ()), "p (acme)": (1, (("completed", 1),))}
    assert picture.num_contexts == 2


def test_tenants_without_end_fill_no_memory() -> None:
    board = Board()
    for n in range(3 * MAX_ENGINES):
        board.apply(Voice("e0", tenant=f"t{n}").say(PressureReported(), engine="e0"), 0.0)
        board.apply(voice_of(f"t{n}").say(ContextOpened(), context="c", workflow="w"), 0.0)
    picture = board.picture(0.0)
    assert len(picture.engines) == picture.num_contexts == MAX_ENGINES


def voice_of(tenant: str) -> Voice:
    """A harness of a tenant."""
    return Voice("h", tenant=tenant)
