"""Items that travel in pieces, since a frame is small: by chance, and as an attack.

Pieces are made tiny here, so that nearly all items travel in several. Before, a frame could have
9 MiB, and so could what a stranger had the hub hold for each connection.
"""

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

import hear.buses.nng.backlog as backlog_module
import hear.buses.nng.frames as frames
from hear.buses.nng.access import Grant, KeyFile, Keyring
from hear.buses.nng.backlog import Backlog
from hear.buses.nng.frames import (
    MAX_ITEM_BYTES,
    Frame,
    Item,
    Piece,
    Run,
    Snapshot,
    SnapshotFor,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Will,
    decode,
    encode_item,
    join,
    split,
)
from hear.buses.nng.hub import ASSEMBLE_S, MAX_ASSEMBLY_BYTES
from hear.buses.nng.link import FIRST_RETRY_S, Link
from hear.codec import encode as encode_envelope
from hear.delivery import Sequencer
from hear.errors import RemoteProtocolError
from hear.messages import Key, OperationOutcome
from tests.buses.nng_peers import Net, Peer, envelope, run_of, tenants
from tests.buses.nng_world import World
from tests.buses.test_nng_faults import NAMES, SMALL, Faults

SECRET = "ab" * 32
STEM = "outcome.acme.e.operation_outcome"


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Have items of more than some messages travel in pieces."""
    patch.setattr(frames, "_PIECE_BYTES", 90)
    patch.setattr(frames, "_WHOLE_BYTES", 330)
    patch.setattr(backlog_module, "FRAME_FILL_BYTES", 300)


# -- items and pieces -------------------------------------------------------------------------

messages = st.lists(st.binary(max_size=700), max_size=4)
all_items: st.SearchStrategy[Item] = st.one_of(
    st.builds(Run, st.just(STEM), st.booleans(), messages),
    st.builds(Snapshot, st.just(STEM), st.integers(0, 9), messages, st.booleans()),
    st.builds(
        SnapshotFor, st.lists(st.integers(0, 2**40), max_size=90), st.just(STEM), messages,
        st.booleans(), st.booleans(),
    ),
    st.builds(Subscribed, st.integers(0, 9), st.lists(st.text(max_size=90), max_size=9)),
    st.builds(Unsubscribe, st.integers(0, 2**60)),
)  # fmt: skip


@given(item=all_items)
def test_what_was_divided_is_put_together_again_as_it_was(item: Item) -> None:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        parts = list(split(item))
        assert frames.size_of(item) >= len(encode_item(item)), (
            "it never takes more than was counted"
        )
        if len(parts) == 1:
            assert parts == [item]
            return
        data = b"".join(part.data for part in parts if isinstance(part, Piece))
        assert all(isinstance(part, Piece) and part.size_bytes == len(data) for part in parts)
        assert join(data, from_hub=True) == item


@given(
    data=st.binary(max_size=200), prefix=st.sampled_from([b"", b"\x94\xa1r\xa1x\xc3", b"\x95\xa1n"])
)
def test_bytes_that_pieces_make_up_are_an_item_or_a_documented_error(
    data: bytes, prefix: bytes
) -> None:
    for from_hub in (True, False):
        try:
            item = join(prefix + data, from_hub=from_hub)
        except RemoteProtocolError:
            continue
        assert from_hub or (isinstance(item, Run | Snapshot) and len(item.messages) == 1)


ONE = Run(STEM, True, [b"x" * 500])
REFUSED: dict[str, Item] = {
    "several messages": Run(STEM, True, [b"x"] * 200),
    "no message": Run(STEM * 99, True, []),
    "a snapshot of several": Snapshot(STEM, 1, [b"x"] * 200, True),
    "a subscription": Subscribe(1, "r" * 500, [">"]),
    "a will": Will([ONE]),
    "pieces": Piece(1_000, b"x" * 500),
}


@pytest.mark.parametrize("item", REFUSED.values(), ids=REFUSED)
def test_a_client_sends_in_pieces_one_message_and_nothing_else(item: Item) -> None:
    """Many small parts would take many times as much memory as the bytes that came."""
    with pytest.raises(RemoteProtocolError):
        join(encode_item(item), from_hub=False)
    assert join(encode_item(ONE), from_hub=False) == ONE


# -- the link ---------------------------------------------------------------------------------

acts = st.lists(
    st.tuples(
        st.booleans(),
        st.lists(st.integers(0, 900), max_size=4),
        st.sampled_from(["keep", "keep", "lose", "twice", "swap", "break"]),
    ),
    max_size=40,
)


@settings(max_examples=100)
@given(acts=acts)
def test_any_loss_repetition_disorder_and_break_gives_each_item_once_in_order(
    acts: list[tuple[bool, list[int], str]],
) -> None:
    """Both ends say items of any size, most in pieces. Frames are lost, come twice and overtake
    each other, and connections break in the middle of an item."""
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        ends = [Link(window=3, now=0.0), Link(window=3, now=0.0)]
        waiting = [Backlog(), Backlog()]
        ways: list[deque[bytes]] = [deque(), deque()]
        said: list[list[bytes]] = [[], []]
        got: list[list[bytes]] = [[], []]
        now = 0.0

        def receive() -> None:
            for way, end, heard in ((ways[0], ends[1], got[1]), (ways[1], ends[0], got[0])):
                while way:
                    wire = decode(way.popleft())
                    assert isinstance(wire, Frame)
                    for item in end.receive(wire, now)[0]:
                        assert isinstance(item, Run)
                        heard.extend(item.messages)

        def send(act: str, second: bool) -> None:
            for number, (end, way) in enumerate(zip(ends, ways, strict=True)):
                out = end.due(now)
                while waiting[number] and end.can_send:
                    out.append(end.send(waiting[number].take(300).items, now))
                if (acknowledgement := end.acknowledgement(now)) is not None:
                    out.append(acknowledgement)
                if number == second:
                    if act == "lose":
                        out = out[1:]
                    elif act == "twice":
                        out += out
                    elif act == "swap":
                        out.reverse()
                way.extend(out)

        for second, sizes, act in acts:
            now += 0.2
            for size in sizes:
                message = b"%d:" % len(said[second]) + b"x" * size
                said[second].append(message)
                waiting[second].add(STEM, True, message)
            if act == "break":
                for way in ways:
                    way.clear()
                ways[0].extend(ends[0].resume(ends[1].received, now))
                ways[1].extend(ends[1].resume(ends[0].received, now))
            send(act, second)
            receive()
        for _ in range(400):
            now += FIRST_RETRY_S
            send("keep", False)
            receive()
        assert got[1] == said[0]
        assert got[0] == said[1]
        for end in ends:
            assert end.num_unacknowledged == end.assembly_bytes == 0


def test_pieces_that_do_not_belong_together_are_refused_and_the_link_stays_as_it_was() -> None:
    piece = Piece(100, b"x" * 60)
    for wrong in (
        [Unsubscribe(1)],
        [Piece(100, b"x" * 41)],
        [Piece(101, b"x" * 10)],
        [Piece(100, b"")],
        [Piece(100, b"x"), Piece(100, b"x")],
    ):
        link = Link(window=3, now=0.0)
        assert link.receive(Frame(1, 0, 0, [piece]), 0.0) == ([], 0)
        with pytest.raises(RemoteProtocolError):
            link.receive(Frame(2, 0, 0, list(wrong)), 0.0)
        assert link.received == 1
    for first in (Piece(60, b"x" * 60), Piece(MAX_ITEM_BYTES + 1, b"x"), Piece(-1, b"x")):
        link = Link(window=3, now=0.0)
        with pytest.raises(RemoteProtocolError):
            link.receive(Frame(1, 0, 0, [first]), 0.0)
        assert link.assembly_bytes == link.received == 0


# -- the hub ----------------------------------------------------------------------------------

MIB = 1 << 20


def large_message(size_bytes: int) -> bytes:
    detail = OperationOutcome(status="completed", detail="x" * size_bytes)
    made = Sequencer("acme", tenant="acme").wrap(detail, Key(engine="e"), 0.0)
    return encode_envelope(made)


def begin(peer: Peer, size_bytes: int) -> None:
    """Send the first piece of an item, and no other."""
    peer._number += 1
    peer.say(Frame(peer._number, peer._received, 0, [Piece(size_bytes, b"x" * 1_000)]))


def assembled(net: Net) -> int:
    return sum(peer.link.assembly_bytes for peer in net.hub._peers)


def test_items_on_their_way_are_bounded_for_each_key_and_the_next_waits_for_room() -> None:
    """And no connection, frame or message is lost by the waiting."""
    net = Net(keyring=tenants())
    reader = net.joined("reader", "ops")
    reader.subscribe("outcome.>")
    peers = [net.joined(f"a{n}", "acme") for n in range(10)]
    for peer in peers:
        begin(peer, 8 * MIB)
    assert 3 * 8 * MIB <= assembled(net) <= MAX_ASSEMBLY_BYTES
    honest = net.joined("honest", "acme")
    message = large_message(MIB - 500)
    honest.put(Run(STEM, True, [message]))
    assert reader.messages == [], "there is no room"
    net.now += ASSEMBLE_S / 2
    for peer in [*peers, honest, reader]:
        peer.acknowledge()
    other = net.joined("other", "umbra")
    large = OperationOutcome(status="completed", detail="y" * (MIB - 1_000))
    made = Sequencer("umbra", tenant="umbra").wrap(large, Key(engine="e"), 0.0)
    other.put(run_of(made))
    assert len(reader.messages) == 1, "that of another key has its own"
    for _ in range(30):  # those who began and did not go on are given up
        net.now += 1.0
        for peer in [*peers, honest, reader]:
            if net.hub._peers.at(peer.connection) is not None:
                peer.acknowledge()
        net.hub.tick(net.now)
        net.settle()
    assert [e.name for e in net.hub.events].count("peer.stuck") == 4
    honest._number = 0
    honest.put(Run(STEM, True, [message]))
    assert reader.messages[1:] == [message]


def test_a_message_in_pieces_arrives_through_the_hub_as_it_was() -> None:
    net = Net(keyring=tenants())
    reader, sender = net.joined("reader", "ops"), net.joined("sender", "acme")
    reader.subscribe("outcome.>")
    for size in (100_000, 115_000, MIB - 500):
        message = large_message(size)
        sender.put(Run(STEM, True, [message]))
        sender.put(run_of(envelope("acme", "acme")))
        assert reader.messages[-2] == message
    assert assembled(net) == 0


def test_what_is_begun_and_not_ended_goes_with_its_peer() -> None:
    net = Net(keyring=tenants())
    peer = net.joined("a", "acme")
    begin(peer, 8 * MIB)
    assert assembled(net) == 8 * MIB
    net.hub.closed(peer.connection, net.now)
    net.closed.add(peer.connection)
    net.pass_time(30.0)
    assert assembled(net) == 0
    assert net.hub.peers == []


def test_a_piece_of_nonsense_ends_the_connection_and_nothing_else() -> None:
    nonsense: tuple[list[Item], ...] = (
        [Piece(20, b"x" * 10), Piece(20, b"y" * 10)],
        [Piece(MAX_ITEM_BYTES + 1, b"x")],
        [Piece(20, b"x"), Unsubscribe(1)],
    )
    for pieces in nonsense:
        net = Net(keyring=tenants())
        reader = net.joined("reader", "ops")
        reader.subscribe("outcome.>")
        bad, good = net.joined("bad", "acme"), net.joined("good", "acme")
        for piece in pieces:
            bad.put(piece)
        assert bad.closed
        good.put(run_of(envelope("acme", "acme")))
        assert len(reader.messages) == 1


# -- everything that connections, processes and the hub may do, in pieces ---------------------


def make_tiny(patch: pytest.MonkeyPatch) -> None:
    """Have every message travel in pieces, and most else, also from clients."""
    patch.setattr(frames, "_PIECE_BYTES", 60)
    patch.setattr(frames, "_WHOLE_BYTES", 100)
    patch.setattr(backlog_module, "FRAME_FILL_BYTES", 90)
    patch.setattr(frames, "_is_one_message", lambda data: True)


class FaultsInPieces(Faults):
    """The same as ``test_nng_faults`` does, where nearly all travels in pieces, and sealed."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        make_tiny(self._patch)

    @initialize(small=st.booleans(), parts=st.integers(1, 3))
    def begin(self, small: bool, parts: int) -> None:
        bounds = SMALL if small else None
        self.world = World(
            hub_bounds=bounds,
            member_bounds=bounds,
            snapshot_parts=parts,
            keyring=Keyring(
                (
                    Grant(
                        name="all", secret=SECRET, publish=(">",), subscribe=(">",), sources=("*",)
                    ),
                )
            ),
            keys=dict.fromkeys(NAMES, KeyFile(name="all", secret=SECRET)),
        )
        for name in NAMES:
            self.world.start(name)
        self.world.run(1.0)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self._patch.undo()


TestFaultsInPieces = FaultsInPieces.TestCase
TestFaultsInPieces.settings = settings(
    settings.get_profile(settings.get_current_profile_name()),
    stateful_step_count=30,
    max_examples=25,
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    make_tiny(monkeypatch)
    world = World()
    yield world
    world.calm()
    world.check()


def long_outcomes(world: World, name: str, count: int) -> None:
    """Have a process say outcomes, each of many pieces."""
    process = world.processes[name]
    for _ in range(count):
        number = process.outcomes + 1
        process._say(
            OperationOutcome(status="completed", detail="x" * 4_000),
            Key(engine=name, operation=str(number)),
        )
        process.outcomes = number


@pytest.mark.parametrize("ticks", range(1, 14, 3))
@pytest.mark.parametrize("what", ["hub", "connection", "hub_end", "sender_frozen", "frames"])
def test_an_item_of_which_half_was_sent_arrives_once_whatever_happens_then(
    world: World, ticks: int, what: str
) -> None:
    """The hub dies, or a connection breaks, when some pieces of an item have come and others not,
    on the way to the hub or from it."""
    sender, reader = world.start("sender"), world.start("reader")
    world.run(5.0)
    listener = reader.listen(["outcome.>"])
    world.run(1.0)
    long_outcomes(world, "sender", 3)
    for process in (sender, reader):
        assert process.connection is not None
        process.connection.lose_to_hub = ticks
        process.connection.lose_to_process = ticks
    world.tick()
    long_outcomes(world, "sender", 2)
    world.run(0.1 * ticks)
    if what == "hub":
        world.kill_hub()
        world.run(0.5)
        world.start_hub()
    elif what == "connection":
        for process in (sender, reader):
            world.break_connection(process, hub_notices=True)
    elif what == "hub_end":
        for process in (sender, reader):
            world.cut_at_hub(process)
    elif what == "sender_frozen":
        sender.frozen_until_s = world.now + 6.0
    else:
        for process in (sender, reader):
            if process.connection is not None:
                process.connection.lose_to_hub = process.connection.lose_to_process = 5
    world.run(20.0)
    heard = [int(e.key.operation or 0) for e in listener.heard if e.key.engine == "sender"]
    assert list(dict.fromkeys(heard)) == [1, 2, 3, 4, 5]
    assert listener.ended is None
