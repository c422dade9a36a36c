"""Members and a hub under everything that connections, processes and the hub may do.

First by chance, as a state machine of Hypothesis over a simulated network in virtual time; then,
one by one, the cases that were suspected or found.
"""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import hear.buses.nng.client as client
from hear.buses.nng.access import EVERYTHING, Grant, KeyFile, Keyring
from hear.buses.nng.backlog import Bounds
from hear.buses.nng.frames import (
    LINK_VERSION,
    Hello,
    Run,
    Snapshot,
    Wanted,
    Welcome,
    decode,
    encode,
)
from hear.buses.nng.hub import Hub
from hear.buses.nng.link import SILENCE_S
from hear.codec import encode as encode_envelope
from hear.errors import LaggedError
from tests.buses.nng_world import LOST_S, Listener, Process, World

SMALL = Bounds(state_messages=30, state_bytes=20_000, reliable_messages=40, reliable_bytes=20_000)
NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def _small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots travel in several parts."""
    monkeypatch.setitem(vars(client), "FRAME_FILL_BYTES", 100)


# -- by chance --------------------------------------------------------------------------------


class Faults(RuleBasedStateMachine):
    """Three processes that publish and hear, and a hub."""

    def __init__(self) -> None:
        super().__init__()
        self._fill = vars(client)["FRAME_FILL_BYTES"]
        vars(client)["FRAME_FILL_BYTES"] = 100

    @initialize(small=st.booleans(), parts=st.integers(1, 3))
    def begin(self, small: bool, parts: int) -> None:
        bounds = SMALL if small else None
        self.world = World(hub_bounds=bounds, member_bounds=bounds, snapshot_parts=parts)
        for name in NAMES:
            self.world.start(name)
        self.world.run(1.0)

    def _awake(self, number: int) -> Process | None:
        processes = self.world.processes
        process = processes.get(NAMES[number])
        return None if process is None or process.frozen(self.world.now) else process

    @rule(number=st.integers(0, 2), times=st.integers(1, 5))
    def change_queue(self, number: int, times: int) -> None:
        if process := self._awake(number):
            for _ in range(times):
                process.enqueue()

    @rule(number=st.integers(0, 2))
    def change_residency(self, number: int) -> None:
        if process := self._awake(number):
            process.store()

    @rule(number=st.integers(0, 2), times=st.integers(1, 60))
    def publish_reliably(self, number: int, times: int) -> None:
        if process := self._awake(number):
            for _ in range(times):
                process.outcome()

    @rule(number=st.integers(0, 2))
    def flood(self, number: int) -> None:
        if process := self._awake(number):
            for _ in range(40):
                process.pressure()

    @rule(
        number=st.integers(0, 2),
        patterns=st.sampled_from([[">"], ["state.>"], ["outcome.>"]]),
        capacity=st.sampled_from([4_096, 5]),
        reads=st.booleans(),
    )
    def subscribe(self, number: int, patterns: list[str], capacity: int, reads: bool) -> None:
        if process := self._awake(number):
            process.listen(patterns, capacity).reads = reads

    @rule(number=st.integers(0, 2))
    def unsubscribe(self, number: int) -> None:
        if (process := self._awake(number)) and process.listeners:
            process.unlisten(process.listeners[0])

    @rule(seconds=st.sampled_from([0.05, 0.05, 0.3, 1.0, 5.0, 30.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(number=st.integers(0, 2), frames=st.integers(1, 6), inwards=st.booleans())
    def lose_frames(self, number: int, frames: int, inwards: bool) -> None:
        if (process := self._awake(number)) and process.connection:
            if inwards:
                process.connection.lose_to_hub = frames
            else:
                process.connection.lose_to_process = frames

    @rule(number=st.integers(0, 2), frames=st.integers(1, 6), inwards=st.booleans())
    def repeat_frames(self, number: int, frames: int, inwards: bool) -> None:
        if (process := self._awake(number)) and process.connection:
            if inwards:
                process.connection.twice_to_hub = frames
            else:
                process.connection.twice_to_process = frames

    @rule(number=st.integers(0, 2), hub_notices=st.booleans())
    def break_connection(self, number: int, hub_notices: bool) -> None:
        if process := self.world.processes.get(NAMES[number]):
            self.world.break_connection(process, hub_notices=hub_notices)

    @rule(number=st.integers(0, 2))
    def break_unnoticed_by_the_process(self, number: int) -> None:
        if process := self.world.processes.get(NAMES[number]):
            self.world.cut_at_hub(process)

    @rule(number=st.integers(0, 2), stalled=st.booleans())
    def stall(self, number: int, stalled: bool) -> None:
        if (process := self.world.processes.get(NAMES[number])) and process.connection:
            process.connection.stalled = stalled

    @rule(number=st.integers(0, 2), seconds=st.sampled_from([1.0, 6.0, 60.0]))
    def freeze(self, number: int, seconds: float) -> None:
        if process := self._awake(number):
            process.frozen_until_s = self.world.now + seconds

    @rule(number=st.integers(0, 2))
    def kill(self, number: int) -> None:
        if NAMES[number] in self.world.processes:
            self.world.kill(NAMES[number])

    @rule(number=st.integers(0, 2))
    def leave(self, number: int) -> None:
        if self._awake(number):
            self.world.leave(NAMES[number])

    @rule(number=st.integers(0, 2))
    def start(self, number: int) -> None:
        if NAMES[number] not in self.world.processes:
            self.world.start(NAMES[number])

    @precondition(lambda self: self.world.hub is not None)
    @rule()
    def kill_hub(self) -> None:
        self.world.kill_hub()

    @precondition(lambda self: self.world.hub is None)
    @rule()
    def start_hub(self) -> None:
        self.world.start_hub()

    @invariant()
    def keeps_its_bounds(self) -> None:
        if hasattr(self, "world"):
            self.world.check_bounds()

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.world.calm()
                self.world.check()
        finally:
            vars(client)["FRAME_FILL_BYTES"] = self._fill


TestFaults = Faults.TestCase
TestFaults.settings = settings(
    settings.get_profile(settings.get_current_profile_name()), stateful_step_count=40
)


# -- one by one: pieces -----------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.calm()
    world.check()


def joined(world: World, *names: str) -> list[Process]:
    processes = [world.start(name) for name in names]
    world.run(5.0)
    return processes


def listening(world: World, process: Process, *patterns: str, capacity: int = 4_096) -> Listener:
    listener = process.listen(list(patterns or [">"]), capacity)
    world.run(0.3)
    assert listener.live
    return listener


def heard(listener: Listener, process: Process) -> list[int]:
    return listener.first.get((process.name, process.epoch, process.name), [])


def agrees(listener: Listener, process: Process) -> bool:
    view = listener.views.get(process.name)
    return view is not None and view.queue_known and list(view.waiting) == process.waiting


# -- the link ---------------------------------------------------------------------------------


def test_lost_and_repeated_frames_change_nothing(world: World) -> None:
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    for direction in ("to_hub", "to_process"):
        for process in (a, b):
            assert process.connection is not None
            setattr(process.connection, f"lose_{direction}", 3)
            setattr(process.connection, f"twice_{direction}", 5)
            for _ in range(4):
                a.outcome()
                a.enqueue()
            world.run(10.0)
    assert heard(listener, a) == list(range(1, 17))
    assert agrees(listener, a)
    assert listener.ended is None


@pytest.mark.parametrize("hub_notices", [True, False])
@pytest.mark.parametrize("who", ["publisher", "reader"])
def test_a_broken_connection_loses_nothing(world: World, who: str, hub_notices: bool) -> None:
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    for _ in range(5):
        a.outcome()
        a.enqueue()
        world.break_connection(a if who == "publisher" else b, hub_notices=hub_notices)
        a.outcome()
        a.enqueue()
        world.run(6.0)
    assert heard(listener, a) == list(range(1, 11))
    assert agrees(listener, a)
    assert listener.views.gaps == 0


def test_a_connection_that_only_the_hub_gave_up_is_found_out(world: World) -> None:
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    world.cut_at_hub(a)
    a.outcome()
    world.run(SILENCE_S + 2.0)
    assert heard(listener, a) == [1]


@pytest.mark.parametrize("lost", ["to_hub", "to_process"])
def test_a_welcome_or_hello_that_is_lost_is_said_again(world: World, lost: str) -> None:
    (b,) = joined(world, "b")
    listener = listening(world, b)
    a = world.start("a")
    a.outcome()
    world.tick()
    for _ in range(3):
        world.break_connection(a, hub_notices=True)
        world.tick()
        assert a.connection is not None
        setattr(a.connection, f"lose_{lost}", 4)
        a.outcome()
        world.run(3.0)
    world.kill_hub()
    world.run(1.0)
    world.start_hub()
    a.outcome()
    world.run(5.0)
    assert heard(listener, a)[-1] == 5


def test_a_welcome_of_a_new_hub_that_is_lost_does_not_leave_the_old_stay_half_alive() -> None:
    """The hub has taken it in; the member does not know, and says hello with what it had before."""
    world = World()
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    for _ in range(3):
        a.outcome()
    world.run(1.0)
    world.kill_hub()
    world.run(0.5)
    world.start_hub()
    world.tick()
    for process in (a, b):
        assert process.connection is not None
    # Both had been welcomed by now; so lose the next welcome, of a connection that breaks.
    world.kill_hub()
    world.run(0.5)
    a.wire.queue.clear()
    world.start_hub()
    for process in (a, b):
        process.connection = None
    world.run(0.01)
    for _ in range(5):
        if a.connection is not None:
            a.connection.lose_to_process = 2
        a.outcome()
        world.run(0.2)
    world.calm()
    world.check()
    assert heard(listener, a) == list(range(1, a.outcomes + 1))


def test_a_hub_whose_count_is_behind_takes_the_member_in_anew(world: World) -> None:
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    a.outcome()
    a.enqueue()
    world.run(1.0)
    assert world.hub is not None
    peer = world.hub._peers.by_session(EVERYTHING, "a-1")
    assert peer is not None
    peer.link.received -= 1  # as no hub should
    world.break_connection(a, hub_notices=True)
    a.outcome()
    a.enqueue()
    world.run(5.0)
    assert heard(listener, a) == [1, 2]
    assert agrees(listener, a)


def test_a_member_whose_count_is_behind_is_taken_in_anew(world: World) -> None:
    a, b = joined(world, "a", "b")
    listener = listening(world, b, "state.>")
    a.enqueue()
    world.run(1.0)
    b.member._link.received -= 1  # as no member should
    world.break_connection(b, hub_notices=True)
    a.enqueue()
    world.run(5.0)
    assert agrees(listener, a)


# -- joining ----------------------------------------------------------------------------------

SECRET = "ab" * 32


def keyed_world() -> World:
    grants = tuple(
        Grant(name=name, secret=SECRET, publish=(">",), subscribe=(">",)) for name in NAMES
    )
    keys = {name: KeyFile(name=name, secret=SECRET) for name in NAMES}
    return World(keyring=Keyring(grants), keys=keys)


def test_members_with_keys_survive_all_that_others_do() -> None:
    world = keyed_world()
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    a.outcome()
    world.break_connection(a, hub_notices=False)
    a.outcome()
    world.run(5.0)
    world.kill_hub()
    world.run(10.0)
    world.start_hub()
    a.outcome()
    world.calm()
    world.check()
    assert heard(listener, a) == [1, 2, 3]


def test_a_hello_said_again_before_the_challenge_is_heard_refuses_nobody() -> None:
    world = keyed_world()
    a = world.start("a")
    world._out(a)
    assert a.connection is not None
    a.connection.stalled = True
    world.run(1.0)  # the hellos pile up before the hub
    for _ in range(5):
        assert a.connection is not None
        a.connection.to_hub.append(encode(a.member._hello()))
    a.connection.stalled = False
    world.run(3.0)
    assert a.member.phase == "joined"
    assert a.member.connected
    world.calm()
    world.check()


def test_a_name_that_lives_is_refused_and_can_be_taken_over_after() -> None:
    world = World()
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    second = Process(world, "a", 99, None)
    world.processes["second"] = second
    world.run(3.0)
    assert second.member.phase == "joining"
    assert "'a' is in use" in second.member.refusal
    a.outcome()
    world.run(1.0)
    assert heard(listener, a) == [1], "the first goes on undisturbed"
    assert world.wills(listener, a) == 0
    world.kill("a")
    world.run(1.0)
    assert second.member.connected
    assert world.wills(listener, a) == 1
    second.outcome()
    world.run(1.0)
    assert heard(listener, second) == [1]


def test_a_name_whose_holder_is_frozen_can_be_taken_over_once_it_is_taken_for_lost() -> None:
    world = World()
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    a.frozen_until_s = world.now + 60.0
    second = Process(world, "a", 99, None)
    world.processes["second"] = second
    world.run(SILENCE_S - 1.5)
    early = second.member.connected
    world.run(3.0)
    assert not early
    assert second.member.phase == "joined"
    assert world.wills(listener, a) == 1
    world.run(70.0)
    assert [p.member.connected for p in (a, second)] == [False, True], "it has lost its name"


# -- reliable messages ------------------------------------------------------------------------


def test_reliable_messages_survive_the_hub(world: World) -> None:
    a, b, c = joined(world, "a", "b", "c")
    first, second = listening(world, b), listening(world, c, "outcome.>")
    for _ in range(4):
        for _ in range(10):
            a.outcome()
        world.tick()
        world.kill_hub()
        for _ in range(10):
            a.outcome()
        world.run(2.0)
        world.start_hub()
        world.run(5.0)
    for listener in (first, second):
        assert heard(listener, a) == list(range(1, 81))
        assert listener.ended is None


def test_a_reader_that_comes_back_after_the_hub_settles_is_ended_and_not_lied_to() -> None:
    world = World()
    a, b = joined(world, "a", "b")
    both, state = listening(world, b), listening(world, b, "state.>")
    a.outcome()
    a.enqueue()
    world.run(1.0)
    b.frozen_until_s = world.now + 8.0
    world.kill_hub()
    world.run(0.5)
    world.start_hub()
    a.outcome()
    a.enqueue()
    world.run(15.0)
    assert isinstance(both.ended, LaggedError)
    assert "away for too long" in str(both.ended)
    assert state.ended is None, "state can be had again"
    assert agrees(state, a)
    world.calm()
    world.check()


def test_a_reader_that_subscribes_while_the_hub_is_away_is_new_to_the_next_hub() -> None:
    world = World()
    a, b = joined(world, "a", "b")
    world.kill_hub()
    world.run(1.0)
    listener = b.listen([">"])
    b.frozen_until_s = world.now + 8.0
    world.start_hub()
    world.run(12.0)
    assert listener.live, "it has missed nothing that it was promised"
    a.outcome()
    world.run(1.0)
    assert heard(listener, a) == [1]
    world.calm()
    world.check()


def test_a_reader_frozen_for_a_minute_is_ended_and_all_others_go_on() -> None:
    world = World()
    a, b, c = joined(world, "a", "b", "c")
    frozen, other = listening(world, b), listening(world, c)
    b.frozen_until_s = world.now + 60.0
    for _ in range(30):
        a.outcome()
        world.run(1.0)
    assert heard(other, a) == list(range(1, 31))
    assert world.wills(other, b) == 1, "it was taken for lost"
    world.run(40.0)
    assert isinstance(frozen.ended, LaggedError)
    again = listening(world, b)
    a.outcome()
    world.calm()
    world.check()
    assert heard(again, a) == [31]


def test_one_frozen_reader_stops_no_publisher_for_ever() -> None:
    """Its retention is full at twice what the hub keeps for the frozen one, which is cut off."""
    world = World(hub_bounds=SMALL, member_bounds=SMALL)
    a, b, c = joined(world, "a", "b", "c")
    frozen, other = listening(world, b), listening(world, c)
    b.frozen_until_s = world.now + 3.0
    before = a.outcomes
    for _ in range(100):
        for _ in range(5):
            a.outcome()
        world.tick()
        assert a.member.num_unsettled <= 2 * SMALL.reliable_messages + 40
    assert a.outcomes == before + 500
    assert a.refused == 0
    world.calm()
    world.check()
    assert heard(other, a) == list(range(1, 501))
    assert isinstance(frozen.ended, LaggedError)
    assert "left untaken" in str(frozen.ended)


def test_a_publisher_whose_retention_is_full_goes_on_as_soon_as_it_is_settled() -> None:
    """It says nothing but that it lives, so the hub has to tell it on that."""
    world = World(member_bounds=SMALL)  # the hub keeps far more for the frozen one
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    b.frozen_until_s = world.now + 3.0
    while not a.refused:
        for _ in range(5):
            a.outcome()
        world.tick()
    said = a.outcomes
    assert a.member.num_unsettled >= 2 * SMALL.reliable_messages
    world.run(8.0)
    assert listener.ended is None
    assert heard(listener, a) == list(range(1, said + 1))
    for _ in range(10):
        a.outcome()
    world.calm()
    world.check()
    assert heard(listener, a) == list(range(1, said + 11))


def test_what_was_kept_is_said_again_to_a_new_hub_however_much_it_is() -> None:
    """Retention and backlog together hold more than the backlog alone may."""
    world = World(member_bounds=SMALL)
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    b.frozen_until_s = world.now + 3.0
    while not a.refused:
        for _ in range(5):
            a.outcome()
        world.tick()
    said = a.outcomes
    assert said > 2 * SMALL.reliable_messages
    world.kill_hub()
    world.run(1.0)
    world.start_hub()
    world.calm()
    world.check()
    assert listener.ended is None
    assert heard(listener, a) == list(range(1, said + 1))


def test_a_hub_that_dies_before_it_settles_has_told_nobody_to_forget() -> None:
    """Two hubs die, the second before the reader has come back to it."""
    world = World()
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    b.frozen_until_s = world.now + 3.0
    a.outcome()
    world.tick()
    for _ in range(3):
        world.kill_hub()
        world.run(0.3)
        world.start_hub()
        world.run(0.6)
    world.calm()
    world.check()
    assert listener.ended is None
    assert heard(listener, a) == [1]


def test_a_quiet_publisher_hears_that_what_it_said_is_settled(world: World) -> None:
    a, b = joined(world, "a", "b")
    listening(world, b)
    a.outcome()
    world.run(3.0)
    assert a.member.num_unsettled == 0


# -- state ------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [4_096, 5])
def test_a_lost_end_of_a_stream_is_noticed_wherever_it_was_lost(capacity: int) -> None:
    """In the reader, at the hub, and at the publisher; the stream itself says nothing more."""
    for where in ("reader", "hub", "publisher"):
        world = World(
            hub_bounds=SMALL if where == "hub" else None,
            member_bounds=SMALL if where == "publisher" else None,
        )
        a, b = joined(world, "a", "b")
        listener = listening(world, b, "state.>", capacity=capacity)
        a.enqueue()
        world.run(1.0)
        if where == "hub":
            b.frozen_until_s = world.now + 2.0
        elif where == "publisher":
            a.frozen_until_s = world.now + 2.0
        else:
            listener.reads = False
        a.enqueue()
        for _ in range(3):
            world.tick()
            for _ in range(20):
                a.pressure()
        world.run(3.0)
        world.calm()
        world.check()
        assert agrees(listener, a), where


def test_a_loss_at_the_hub_is_noticed_though_older_messages_are_still_unread() -> None:
    world = World(hub_bounds=SMALL)
    a, b = joined(world, "a", "b")
    listener = listening(world, b, "state.>")
    listener.reads = False
    a.enqueue()  # unread in the mailbox
    world.run(1.0)
    b.frozen_until_s = world.now + 2.0
    a.enqueue()  # this one the hub drops
    for _ in range(60):
        a.pressure()
    world.run(4.0)
    listener.reads = True
    world.calm()
    world.check()
    assert agrees(listener, a)


def test_a_loss_while_a_snapshot_is_on_its_way_brings_another() -> None:
    world = World(hub_bounds=SMALL)
    a, b = joined(world, "a", "b")
    listener = listening(world, b, "state.>")
    a.enqueue()
    world.run(1.0)
    scope = "state.default.a.queue"
    b.bus._readers.fetch(listener.subscription, [scope])
    b.bus._flush(world.now)
    world._out(b)
    world._hub_round()
    world._out(a)
    world._in(a)
    world._out(a)
    world._hub_round()  # the snapshot is there and waits for the reader, and now more comes
    b.frozen_until_s = world.now + 2.0
    a.enqueue()
    for _ in range(60):
        a.pressure()
        world.tick()
    world.calm()
    world.check()
    assert agrees(listener, a)


def test_a_reader_that_was_fetching_when_the_hub_died_gets_right_at_the_next(world: World) -> None:
    a, b = joined(world, "a", "b")
    listener = listening(world, b, "state.>")
    for _ in range(5):
        a.enqueue()
        a.store()
    world.run(1.0)
    for step in range(8):
        b.bus._readers.fetch(
            listener.subscription, ["state.default.a.queue", "state.default.a.residency"]
        )
        b.bus._flush(world.now)
        for number in range(step):
            [world._out(b), world._hub_round(), world._in(a), world._out(a)][number % 4 : 1]
        world.kill_hub()
        a.enqueue()
        a.store()
        world.run(0.5)
        world.start_hub()
        world.run(5.0)
        assert agrees(listener, a), step


@pytest.mark.parametrize("order", ["provider first", "reader first"])
def test_what_a_publisher_said_to_a_hub_that_died_is_made_good(order: str) -> None:
    world = World()
    a, b = joined(world, "a", "b")
    listener = listening(world, b, "state.>")
    a.enqueue()
    world.run(1.0)
    a.enqueue()
    world._out(a)  # it is in the connection as the hub dies
    world.kill_hub()
    world.run(0.5)
    world.start_hub()
    late = b if order == "provider first" else a
    late.frozen_until_s = world.now + 2.0
    world.run(8.0)
    assert agrees(listener, a), "and the stream has said nothing since"
    world.calm()
    world.check()


def test_a_provider_that_dies_midway_gives_nobody_half_a_snapshot() -> None:
    world = World(snapshot_parts=3)
    a, b = joined(world, "a", "b")
    for _ in range(6):
        a.store()
    world.run(1.0)
    assert world.hub is not None
    listener = b.listen(["state.>"])
    taken: list[Wanted] = []
    take = a.bus._take

    def keep(item: object) -> None:
        if isinstance(item, Wanted) and item.stem.endswith("residency"):
            taken.append(item)
            part = next(iter(a._residency()))
            a.member.put(Snapshot(item.stem, item.ticket, [encode_envelope(part)], last=False))
        else:
            take(item)  # type: ignore[arg-type]

    a.bus._take = keep  # type: ignore[method-assign]
    world.run(1.0)
    assert taken
    assert not any(e.kind == "residency_snapshot" and e.source == "a" for e in listener.heard)
    world.kill("a")
    again = world.start("a")
    again.store()
    world.calm()
    world.check()
    assert a.epoch not in {e.epoch for e in listener.heard if e.kind == "residency_snapshot"}


def test_snapshots_are_consistent_with_changes_while_they_are_made(world: World) -> None:
    a, b, c = joined(world, "a", "b", "c")
    listeners = []
    for number in range(30):
        a.enqueue()
        a.store()
        listeners.append((b if number % 2 else c).listen(["state.>"]))
        world._out(a)
        a.enqueue()
        world._hub_round()
        a.store()
        if number % 3 == 0:
            world.tick()
    world.run(2.0)
    for listener in listeners:
        assert agrees(listener, a)
        assert listener.views.gaps == 0, "what came before a snapshot was not taken for a gap"


# -- wills ------------------------------------------------------------------------------------


def test_a_will_is_done_once_if_a_process_dies(world: World) -> None:
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    world.kill("a")
    world.run(LOST_S - 5.0)
    assert world.wills(listener, a) == 0, "it may come back"
    world.run(10.0)
    assert world.wills(listener, a) == 1
    world.run(60.0)
    assert world.wills(listener, a) == 1


def test_a_will_is_done_once_if_another_takes_its_place(world: World) -> None:
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    world.kill("a")
    world.start("a")
    world.run(60.0)
    assert world.wills(listener, a) == 1


@pytest.mark.parametrize("trouble", ["none", "broken", "half-open", "new hub", "lost answer"])
def test_a_will_is_never_done_if_a_process_leaves(trouble: str) -> None:
    world = World()
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    if trouble == "broken":
        world.break_connection(a, hub_notices=True)
    elif trouble == "half-open":
        world.break_connection(a, hub_notices=False)
    elif trouble == "new hub":
        world.kill_hub()
        world.start_hub()
    elif trouble == "lost answer":
        assert a.connection is not None
        a.connection.lose_to_process = 1
    world.leave("a")
    assert a.member.phase == "left"
    world.run(60.0)
    assert world.wills(listener, a) == 0
    world.calm()
    world.check()


def test_a_will_is_not_done_while_a_process_is_away_for_a_moment(world: World) -> None:
    a, b = joined(world, "a", "b")
    listener = listening(world, b)
    for seconds in (3.0, 8.0, 15.0):
        a.frozen_until_s = world.now + seconds
        world.run(seconds + 5.0)
        assert world.wills(listener, a) == 0


def test_a_will_that_breaks_the_rules_is_refused_as_it_is_said_and_harms_no_hub() -> None:
    world = World()
    a, _ = joined(world, "a", "b")
    a.member.set_will([Run("no stem", True, [b"x"])])
    world.run(1.0)
    world.kill("a")
    world.run(60.0)
    assert world.hub is not None
    world.calm()
    world.check()


# -- statistics -------------------------------------------------------------------------------


def test_statistics_count_what_passed_and_what_waits() -> None:
    world = World()
    a, b, c = joined(world, "a", "b", "c")
    quick, slow = listening(world, b), listening(world, c)
    slow.reads = False
    for _ in range(7):
        a.outcome()
        a.enqueue()
    world.run(3.0)
    assert world.hub is not None
    told = world.hub.statistics()
    assert {k: n for k, n in told.published.items() if n} == {"outcome": 7, "state": 7}
    rows = {row.name: row for row in told.subscriptions}
    assert rows["c/reader-1"].queued == 14
    assert rows["b/reader-1"].queued == 0
    assert rows["b/reader-1"].received == len(quick.heard)
    c.frozen_until_s = world.now + 5.0
    for _ in range(10):
        a.outcome()
        world.tick()
    rows = {row.name: row for row in world.hub.statistics().subscriptions}
    assert rows["c/reader-1"].queued == 21, "so does what waits at the hub, but for three frames"
    assert told.lagged == 0


def test_statistics_count_those_who_were_cut_off_once() -> None:
    world = World(hub_bounds=SMALL)
    a, b, _ = joined(world, "a", "b", "c")
    listening(world, b)
    b.frozen_until_s = world.now + 3.0
    for _ in range(50):
        a.outcome()
        world.tick()
    assert world.hub is not None
    assert world.hub.statistics().lagged == 1, "before it has heard of it itself"
    for _ in range(50):
        a.outcome()
        world.tick()
    world.calm()
    world.check()
    assert world.hub.statistics().lagged == 1
    world.kill("b")
    world.run(30.0)
    assert world.hub.statistics().lagged == 1, "also when it is gone"


# -- the state of a hub with two hellos -------------------------------------------------------


def test_each_hello_before_anything_was_said_is_answered_by_the_same_welcome() -> None:
    hub = Hub(id="h", now=0.0)
    hello = encode(Hello(LINK_VERSION, "a", "s", 57, hub="another/1"))
    for _ in range(3):
        hub.receive(1, hello, 0.0)
    while hub.busy:
        hub.turn(0.0)
    welcomes = [decode(data) for _, data in hub.output]
    assert welcomes == [Welcome(LINK_VERSION, "h/1", False, 0)] * 3
    assert [event.name for event in hub.events if event.name != "peer.joined"] == [
        "peer.resumed",
        "peer.resumed",
    ]
