"""The readers of one process: snapshots that are on their way, and what is withheld for them."""

from hear.buses.nng.client import NngBus
from hear.buses.nng.frames import Fetch, Frame, Lost, Run, SnapshotFor, Subscribed, Welcome
from hear.buses.nng.frames import decode as decode_frame
from hear.buses.nng.frames import encode as encode_frame
from hear.buses.nng.member import Member
from hear.buses.nng.readers import NngSubscription
from hear.codec import encode
from hear.delivery import Sequencer
from hear.errors import LaggedError
from hear.messages import Key, QueueChanged, QueueSnapshot
from tests.buses.nng_world import Wire

STEM = "state.default.e.queue"


class Stage:
    """A bus without a socket, with one reader."""

    def __init__(self, *streams: str) -> None:
        self.member = Member("m", session="s", now=0.0)
        self.member.receive(encode_frame(Welcome(1, "hub/1", False, 0)), 0.0)
        self.bus = NngBus(Wire(), self.member)  # type: ignore[arg-type]  # it has no socket
        self.sequencer = Sequencer("e")
        self.reader = self.bus.subscribe([">"], name="r")
        self.bus._readers.enter(self.reader)
        self.bus._take(Subscribed(self.reader.number, list(streams)))
        self.fetches()

    def fetches(self) -> int:
        """How many snapshots were asked for since this was asked last."""
        wires = [decode_frame(data) for data in self.member.poll(0.0)]
        self.member.receive(encode_frame(Frame(0, self.member._link.number)), 0.0)
        return sum(
            isinstance(item, Fetch)
            for wire in wires
            if isinstance(wire, Frame)
            for item in wire.items
        )

    def change(self) -> None:
        envelope = self.sequencer.wrap(QueueChanged(), Key(engine="e"), 0.0)
        self.bus._take(Run(STEM, False, [encode(envelope)]))

    def snapshot(self, *, last: bool = True, failed: bool = False, parts: int = 1) -> None:
        made = self.sequencer.wrap_snapshot(QueueSnapshot(), Key(engine="e"), 0.0)
        messages = [] if failed else [encode(made)] * parts
        self.bus._take(SnapshotFor([self.reader.number], STEM, messages, last, failed))

    def heard(self) -> list[tuple[str, int]]:
        return [(e.kind, e.seq) for e in self.reader._take()]

    def want(self, reader: NngSubscription) -> None:
        self.bus.snapshots(reader, [STEM])


def test_a_snapshot_is_asked_for_once_while_one_is_on_its_way_and_again_after() -> None:
    stage = Stage()
    stage.want(stage.reader)
    assert stage.fetches() == 1
    stage.want(stage.reader)
    stage.want(stage.reader)
    assert stage.fetches() == 0
    stage.snapshot()
    assert stage.fetches() == 1, "it may not include what made the reader want another"
    stage.snapshot()
    assert stage.fetches() == 0
    stage.want(stage.reader)
    assert stage.fetches() == 1


def test_a_loss_while_the_first_snapshot_is_on_its_way_brings_another() -> None:
    stage = Stage(STEM)
    stage.bus._take(Lost([STEM]))
    stage.reader._take()
    assert stage.fetches() == 0
    stage.snapshot()
    assert stage.fetches() == 1


def test_what_a_first_snapshot_will_include_is_not_given_before_it() -> None:
    stage = Stage(STEM)
    stage.change()
    assert stage.heard() == []
    stage.snapshot()
    stage.change()
    assert stage.heard() == [("queue_snapshot", 1), ("queue_changed", 2)]


def test_a_snapshot_nobody_asked_for_is_taken() -> None:
    stage = Stage()
    stage.snapshot()
    assert stage.heard() == [("queue_snapshot", 0)]


def test_a_snapshot_comes_whole_or_not_at_all() -> None:
    stage = Stage(STEM)
    stage.snapshot(last=False)
    assert stage.heard() == []
    stage.snapshot(last=True)
    assert len(stage.heard()) == 2
    stage.snapshot(last=False)
    stage.snapshot(failed=True)
    assert stage.heard() == []


def test_one_that_failed_is_asked_for_again_a_few_times() -> None:
    stage = Stage(STEM)
    asked = 0
    for _ in range(10):
        stage.snapshot(failed=True)
        asked += stage.fetches()
    assert asked == 2
    stage.snapshot()
    stage.snapshot(failed=True)
    assert stage.fetches() == 1


def test_a_new_hub_that_provides_nothing_withholds_nothing() -> None:
    stage = Stage(STEM)
    stage.snapshot(last=False)
    stage.bus._take(Subscribed(stage.reader.number, []))
    stage.change()
    assert stage.heard() == [("queue_changed", 1)]
    stage.snapshot()
    assert len(stage.heard()) == 1, "what the old hub had sent of it is gone"


def test_a_subscription_that_is_not_complete_is_ended_unless_it_is_of_state() -> None:
    stage = Stage()
    state = stage.bus.subscribe(["state.>"], name="state")
    stage.bus._readers.enter(state)
    for reader in (stage.reader, state):
        stage.bus._take(Subscribed(reader.number, [], complete=False))
        assert reader.joined.is_set()
    assert isinstance(stage.reader._error, LaggedError)
    assert state._error is None
    assert stage.bus.statistics().lagged == 1
