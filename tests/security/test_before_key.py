"""What a stranger can do to the hub: connect, be heard for a moment, and be closed.

Before, six connections with frames of 18 MB took the hub to 3.9 GB, 60 half-sent frames held 1.1 GB
for as long as they liked, idle connections ate all descriptors at 1,024, and 306,200 refused hellos
over one connection wrote 100 MB of log in 8 s. First without sockets; then a hub in a process of
its own, and bare sockets.
"""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pynng
import pytest
import structlog
import trio
from hypothesis import given
from hypothesis import strategies as st

from hear.buses.nng import server
from hear.buses.nng.access import Handshake, KeyFile, load_key, new_nonce
from hear.buses.nng.client import connect
from hear.buses.nng.frames import (
    LINK_VERSION,
    MAX_FRAME_BYTES,
    Challenge,
    Frame,
    Goodbye,
    Hello,
    Refused,
    Run,
    Stranger,
    Wire,
    decode,
    encode,
)
from hear.buses.nng.hub import MAX_INBOX_FRAMES, HubEvent
from hear.buses.nng.joining import (
    JOIN_S,
    MAX_STRANGERS,
    MAX_UNKNOWN_BYTES,
    MAX_UNKNOWN_FRAMES,
    REFUSED_S,
)
from hear.buses.nng.seal import Seals, is_sealed
from hear.codec import encode as encode_envelope
from hear.delivery import Sequencer
from hear.messages import Key, RequestDescribed
from hear.subjects import stem_of
from tests.buses.nng_peers import SECRETS, Net, Peer, envelope, run_of, tenants
from tests.buses.test_nng import ROOT, free_port, write_keys

HELLO = Hello(LINK_VERSION, "x", "x-1", 0, key="acme")
OLD = Hello(1, "x", "x-1", 0)


def pass_time(net: Net, seconds: float) -> None:
    """Let time pass; nobody says anything."""
    net.now += seconds
    net.hub.tick(net.now)
    net.settle()


def opened(net: Net) -> Peer:
    """A connection over which nothing has come yet."""
    peer = net.connect()
    net.hub.opened(peer.connection, net.now)
    net.settle()
    return peer


def say_on(peer: Peer, data: bytes, times: int) -> None:
    """Send a frame without a seal as often as the connection lasts."""
    peer.seals = None
    for _ in range(times):
        if not peer.closed:
            peer.say(data)


def works(net: Net, reader: Peer, member: Peer) -> None:
    """Check that those who have joined go on."""
    heard = len(reader.messages)
    member.put(run_of(envelope("acme", "acme")))
    assert len(reader.messages) == heard + 1


@pytest.fixture
def net() -> Net:
    return Net(keyring=tenants())


@pytest.fixture
def pair(net: Net) -> tuple[Peer, Peer]:
    """Two that have joined: one hears what the other says."""
    reader, member = net.joined("reader", "ops"), net.joined("member", "acme")
    reader.subscribe("outcome.>")
    return reader, member


# -- time and numbers -------------------------------------------------------------------------


def test_a_connection_that_does_not_join_is_closed_whatever_it_says(
    net: Net, pair: tuple[Peer, Peer]
) -> None:
    silent, challenged, confused = (opened(net) for _ in range(3))
    for _ in range(9):
        challenged.say(HELLO)
        confused.say(Frame(1, 0))
        pass_time(net, JOIN_S / 10)
        for peer in pair:
            peer.acknowledge()
    assert not any(peer.closed for peer in (silent, challenged, confused))
    pass_time(net, JOIN_S / 9)
    assert silent.closed
    assert challenged.closed
    assert confused.closed
    assert [e.name for e in net.hub.events].count("connection.did_not_join") == 3
    works(net, *pair)


def test_one_who_joins_in_time_stays(net: Net) -> None:
    peer = opened(net)
    pass_time(net, JOIN_S - 0.1)
    peer.join("late", "acme", SECRETS["acme"])
    for _ in range(5):
        pass_time(net, 1.0)
        peer.acknowledge()
    assert not peer.closed
    assert net.hub.peers == ["late"]


def test_the_oldest_stranger_goes_when_too_many_are_there(
    net: Net, pair: tuple[Peer, Peer]
) -> None:
    strangers = [opened(net) for _ in range(3 * MAX_STRANGERS)]
    there = [peer for peer in strangers if not peer.closed]
    assert there == strangers[-MAX_STRANGERS:]
    assert len(net.hub._joining._strangers) == MAX_STRANGERS
    assert len(net.hub._joining._connections) == MAX_STRANGERS + 2
    works(net, *pair)
    honest = opened(net)
    honest.join("honest", "acme", SECRETS["acme"])
    assert "honest" in net.hub.peers


def test_those_who_have_joined_are_no_strangers_however_many_come(net: Net) -> None:
    members = [net.joined(f"m{n}", "acme") for n in range(MAX_STRANGERS + 20)]
    for _ in range(2 * MAX_STRANGERS):
        opened(net)
    assert not any(member.closed for member in members)


@pytest.mark.parametrize(
    "data",
    [encode(HELLO), encode(Frame(1, 0)), encode(Goodbye()), b"\xc1" + bytes(100), bytes(9_000)],
    ids=["hellos", "frames", "goodbyes", "seals", "zeros"],
)
def test_so_much_is_heard_of_a_stranger_and_answered_and_no_more(
    data: bytes, net: Net, pair: tuple[Peer, Peer]
) -> None:
    stranger = opened(net)
    say_on(stranger, data, 10 * MAX_UNKNOWN_FRAMES)
    assert stranger.closed
    assert len(stranger.frames) <= MAX_UNKNOWN_FRAMES
    assert sum(len(encode(frame)) for frame in stranger.frames) < 100 * MAX_UNKNOWN_FRAMES
    works(net, *pair)


def test_a_refused_connection_is_heard_no_more_and_closed(net: Net) -> None:
    """Before, each of a thousand hellos was refused, answered and written to the log."""
    stranger = opened(net)
    for _ in range(1_000):
        stranger.say(OLD)
    assert len(stranger.frames) == 1
    assert isinstance(stranger.frames[0], Refused)
    assert len([e for e in net.hub.events if e.name == "peer.refused"]) == 1
    assert not stranger.closed, "the reason is on its way"
    pass_time(net, REFUSED_S)
    assert stranger.closed


def test_hellos_over_a_connection_that_has_joined_wait_for_their_turn(net: Net) -> None:
    """So they cost their key its share of the hub's time, and no more."""
    peer = net.joined("me", "acme")
    said = len(peer.frames)
    for _ in range(1_000):
        net.hub.receive(peer.connection, encode(HELLO), net.now)
    assert net.hub.output == [], "nothing is answered at once"
    net.settle()
    assert len(peer.frames) - said <= MAX_INBOX_FRAMES


def test_a_stranger_says_nothing_that_is_long(net: Net) -> None:
    stranger = opened(net)
    stranger.say(Hello(LINK_VERSION, "x" * MAX_UNKNOWN_BYTES, "x-1", 0, key="acme"))
    assert stranger.frames == [Stranger("hub")]
    for name, session in (("", "s"), ("n", ""), ("n" * 257, "s"), ("n", "s" * 257)):
        other = opened(net)
        other.say(Hello(LINK_VERSION, name, session, 0, key="acme"))
        (answer,) = other.frames
        assert isinstance(answer, Refused)
        assert len(answer.reason) < 200
    assert all(len(str(event.facts)) < 1_000 for event in net.hub.events)


def test_nothing_of_strangers_is_left(net: Net) -> None:
    said: list[Wire | bytes] = [HELLO, OLD, Frame(1, 0), b"x", Goodbye(), Challenge(b"x")]
    for number in range(500):
        peer = opened(net)
        peer.say(said[number % 6])
        if number % 7 == 0 and not peer.closed:
            net.hub.closed(peer.connection, net.now)
    pass_time(net, JOIN_S)
    assert not net.hub._joining._connections
    assert not net.hub._joining._strangers
    assert not net.hub._closing
    assert not net.hub._parted
    assert net.hub.peers == []
    assert not net.hub.busy


@given(
    said=st.lists(
        st.tuples(
            st.integers(0, 5),
            st.one_of(
                st.binary(max_size=40),
                st.sampled_from(
                    [
                        encode(HELLO),
                        encode(OLD),
                        encode(Goodbye()),
                        encode(Challenge(b"x")),
                        encode(Frame(1, 0, 0, [run_of(envelope("acme", "acme"))])),
                        b"\xc1" + bytes(24),
                        b"\xc1" + bytes(80),
                        bytes(MAX_FRAME_BYTES + 1),
                    ]
                ),
            ),
            st.sampled_from([0.0, 0.0, 0.3, 6.0]),
        ),
        max_size=60,
    )
)
def test_whatever_strangers_say_those_who_have_joined_go_on(
    said: list[tuple[int, bytes, float]],
) -> None:
    net = Net(keyring=tenants())
    reader, member = net.joined("reader", "ops"), net.joined("member", "acme")
    reader.subscribe("outcome.>")
    slots: dict[int, Peer] = {}
    for slot, data, seconds in said:
        if slot not in slots or slots[slot].closed:
            slots[slot] = opened(net)
        slots[slot].say(data)
        while seconds > 0.0:
            pass_time(net, min(seconds, 1.0))
            seconds -= 1.0
            reader.acknowledge()
            member.acknowledge()
    works(net, reader, member)
    pass_time(net, 1.0)
    assert net.hub.peers == ["reader", "member"]
    assert net.hub.statistics().published["outcome"] == 1


# -- the log ----------------------------------------------------------------------------------


def test_the_log_has_a_few_lines_a_second_of_each_kind_and_says_what_it_left_out() -> None:
    log = server._Log()
    with structlog.testing.capture_logs() as lines:
        for step in range(30_000):
            log.write(HubEvent("peer.refused", {"reason": f"x{step}"}), step / 10_000)
            if step % 10_000 == 0:
                log.write(HubEvent("peer.joined", {}), step / 10_000)
    refused = [line for line in lines if line["event"] == "peer.refused"]
    assert len(refused) == 30
    assert len(lines) - len(refused) == 3, "others are written"
    assert sum(line.get("left_out", 0) for line in refused) == 2 * 9_990


def test_the_same_refusal_is_written_once_in_ten_seconds() -> None:
    log = server._Log()
    with structlog.testing.capture_logs() as lines:
        for tenth in range(250):  # as of a client that tries a name in use ten times a second
            log.write(HubEvent("peer.refused", {"peer": "a", "reason": "in use"}), tenth / 10)
    assert len(lines) == 3
    assert [line.get("left_out", 0) for line in lines] == [0, 99, 99]
    assert len(log._last_s) == 1


# -- a hub in a process of its own ------------------------------------------------------------

SP = b"\x00SP\x00\x00\x11\x00\x00"  # the first word of nng's pair1, for any of its transports


class RunningHub:
    """``hear run bus`` with the keyring of docs/security.md."""

    def __init__(self, folder: Path) -> None:
        self.keys = write_keys(folder)
        self.port = free_port()
        self.url = f"tcp://127.0.0.1:{self.port}"
        self._log = folder / "log"
        arguments = ["run", "bus", "--bus", self.url, "--keys", str(self.keys["keyring"])]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hear.app.cli", *arguments], cwd=ROOT, stdout=log, stderr=log
            )
        until = time.monotonic() + 20.0
        while "hub.listening" not in self.log:
            assert time.monotonic() < until
            time.sleep(0.02)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def raw(self) -> socket.socket:
        """A bare connection."""
        made = socket.create_connection(("127.0.0.1", self.port), timeout=10.0)
        made.sendall(SP)
        return made

    async def serves(self, name: str) -> None:
        """Check that one with a key joins and hears what it says."""
        key = self.keys["operator"]
        with trio.fail_after(10):
            async with (
                connect(self.url, name=name, key=key) as bus,
                bus.subscribe([f"intent.*.{name}.>"], name="r") as reader,
            ):
                bus.publish(Sequencer(name).wrap(RequestDescribed(), Key(workflow=name), 0.0))
                assert [e.source for e in await reader.receive()] == [name]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningHub]:
    made = RunningHub(tmp_path)
    yield made
    made.end()


def frame_of(data: bytes, announced: int | None = None) -> bytes:
    """A message as nng has it on TCP: its length, the hops of pair1, and its bytes."""
    length = len(data) + 4 if announced is None else announced
    return struct.pack(">Q", length) + b"\x00\x00\x00\x01" + data


def ends(connection: socket.socket, within_s: float) -> bool:
    """Whether the other end closes a connection."""
    until = time.monotonic() + within_s
    try:
        while (left_s := until - time.monotonic()) > 0:
            connection.settimeout(left_s)
            if not connection.recv(65_536):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it looks into /proc")
async def test_strangers_take_neither_memory_nor_descriptors_nor_time_nor_log(
    running: RunningHub,
) -> None:
    """All at once, since each of them lasts: frames that are too large, frames half sent, and
    connections that say nothing, are closed at once or after ``JOIN_S``."""
    await running.serves("before")
    memory, descriptors = running.resident_bytes, running.num_descriptors
    with contextlib.ExitStack() as stack, trio.fail_after(40):
        began = time.monotonic()
        silent = [stack.enter_context(running.raw()) for _ in range(40)]
        half_sent = [stack.enter_context(running.raw()) for _ in range(60)]
        for connection in half_sent:
            connection.sendall(frame_of(bytes(100_000), announced=MAX_FRAME_BYTES))
        for announced in (MAX_FRAME_BYTES + 5, 18 << 20, 1 << 62):
            large = stack.enter_context(running.raw())
            with contextlib.suppress(OSError):
                large.sendall(frame_of(bytes(MAX_FRAME_BYTES), announced=announced))
            assert await trio.to_thread.run_sync(ends, large, 2.0), "at once"
        refused = stack.enter_context(running.raw())
        with contextlib.suppress(OSError):
            for _ in range(20):
                refused.sendall(frame_of(encode(OLD)) * 500)
        assert await trio.to_thread.run_sync(ends, refused, 2.0), "at once"
        await running.serves("meanwhile")
        assert running.resident_bytes - memory < 64 << 20, "60 frames of 128 KiB, and what is ours"
        for connection in (*silent, *half_sent):
            left_s = began + JOIN_S + 2.0 - time.monotonic()
            assert await trio.to_thread.run_sync(ends, connection, max(left_s, 0.1))
        assert time.monotonic() - began > JOIN_S - 1.0, "an honest one had the time to join"
    await running.serves("after")
    assert running.num_descriptors <= descriptors + 5
    assert len(running.log.splitlines()) < 150
    assert len(running.log) < 30_000


def join(socket: pynng.Pair1, key: KeyFile, name: str) -> Seals:
    """Join over nng by hand."""
    secret, nonce, session = bytes.fromhex(key.secret), new_nonce(), f"{name}-s"
    socket.send(encode(Hello(LINK_VERSION, name, session, 0, key=key.name)))
    challenge = decode(socket.recv())
    assert isinstance(challenge, Challenge)
    told = Handshake(nonce, challenge.nonce, key.name, session, name)
    hello = Hello(
        LINK_VERSION,
        name,
        session,
        0,
        key=key.name,
        proof=told.prove_client(secret, "", 0),
        answers=challenge.nonce,
        nonce=nonce,
    )
    socket.send(encode(hello))
    socket.recv()
    return Seals(*told.seals(secret))


class Flood:
    """One of those who hold acme's key and say as much as a link may carry, as fast as it does."""

    def __init__(self, running: RunningHub, name: str) -> None:
        self.socket = pynng.Pair1(send_timeout=5_000, recv_timeout=5_000)
        self.socket.dial(running.url, block=True)
        self._seals = join(self.socket, load_key(running.keys["acme"]), name)
        made = Sequencer("acme", tenant="acme").wrap(RequestDescribed(), Key(workflow="w"), 0.0)
        self._run = Run(stem_of(made), True, [encode_envelope(made)] * 400)
        self._number = 0
        self.acknowledged = 0

    def go_on(self) -> None:
        with contextlib.suppress(pynng.TryAgain):
            while True:
                data = self.socket.recv(block=False)
                opened = self._seals.open(data) if is_sealed(data) else None
                wire = decode(opened) if opened is not None else None
                if isinstance(wire, Frame):
                    self.acknowledged = max(self.acknowledged, wire.ack)
        with contextlib.suppress(pynng.TryAgain):
            while self._number < self.acknowledged + 16:
                frame = Frame(self._number + 1, 0, 0, [self._run])
                self.socket.send(self._seals.seal(encode(frame)), block=False)
                self._number += 1


async def test_while_a_key_holder_floods_strangers_are_closed_and_signals_heeded(
    running: RunningHub,
) -> None:
    """Before, a hub that always had something to do closed nobody."""
    flooders = [Flood(running, f"f{n}") for n in range(8)]
    try:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:

                async def flood() -> None:
                    while True:
                        for flooder in flooders:
                            with contextlib.suppress(pynng.NNGException):
                                flooder.go_on()
                        await trio.sleep(0.002)

                nursery.start_soon(flood)
                with running.raw() as stranger:
                    await running.serves("meanwhile")
                    assert await trio.to_thread.run_sync(ends, stranger, JOIN_S + 2.0)
                running.process.send_signal(signal.SIGTERM)
                began = time.monotonic()
                assert await trio.to_thread.run_sync(running.process.wait, 10.0) == 143
                assert time.monotonic() - began < 2.0
                nursery.cancel_scope.cancel()
        assert min(flooder.acknowledged for flooder in flooders) > 10, "it was a flood"
    finally:
        for flooder in flooders:
            flooder.socket.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it looks into /proc")
def test_the_hub_has_more_descriptors_than_a_shell_gives_and_not_without_bound(
    running: RunningHub,
) -> None:
    """Before, it had 1,024 and idle connections ate them; with many more they would eat memory."""
    limits = Path(f"/proc/{running.process.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    soft, hard = line.split()[3:5]
    assert int(soft) == (4_096 if hard == "unlimited" else min(int(hard), 4_096))


class _Full:
    """A wire with room for a few frames at a time."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[tuple[int, bytes]] = []

    def send(self, connection: int, data: bytes) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.sent.append((connection, data))
        return True


def test_what_finds_no_room_on_the_wire_is_sent_first_as_soon_as_there_is_some(net: Net) -> None:
    """Before, a burst of answers to one connection cost all the others half a second."""
    wire, log = _Full(2), server._Log()
    frames = [(number, bytes([number])) for number in range(5)]
    net.hub.output += frames
    assert not server._send(wire, net.hub, log, 0.0)  # type: ignore[arg-type]
    assert net.hub.output == frames[2:]
    wire.room = 10
    assert server._send(wire, net.hub, log, 0.0)  # type: ignore[arg-type]
    assert wire.sent == frames
    assert net.hub.output == []
