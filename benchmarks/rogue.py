"""Someone who speaks the link by hand over real sockets, and keeps none of its rules.

For ``benchmarks.attacks``: each function is one attack, run in a process of its own until it is
ended. Those of ``STRANGERS`` need no key; those of ``HOLDERS`` join with the key of one tenant.
"""

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any, Final

import pynng

from hear.buses.nng.access import Handshake, KeyFile, new_nonce
from hear.buses.nng.frames import (
    LINK_VERSION,
    Challenge,
    Fetch,
    Frame,
    Goodbye,
    Hello,
    Item,
    Piece,
    Provide,
    Question,
    Run,
    Standing,
    Subscribe,
    Unsubscribe,
    Welcome,
    Will,
    decode,
    encode,
    split,
)
from hear.buses.nng.link import Link
from hear.buses.nng.seal import Seals
from hear.codec import encode as encode_envelope
from hear.delivery import Sequencer
from hear.messages import Key, PressureReported, Prioritise
from hear.subjects import stem_of

SP_HELLO: Final = b"\0SP\0\0\x11\0\0"  # what begins a connection of nng's pair1
_WAIT_MS: Final = 2_000
_WINDOW: Final = 24


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a bus."""
    host, _, port = url.partition("://")[2].rpartition(":")
    return host, int(port)


def raw(url: str, *, greet: bool) -> socket.socket | None:
    """A bare connection, which has said that it speaks nng or nothing at all."""
    try:
        made = socket.create_connection(address_of(url), timeout=2.0)
        if greet:
            made.sendall(SP_HELLO)
    except OSError:
        return None
    return made


class Rogue:
    """One connection, joined with a key or not."""

    def __init__(self, url: str, key: KeyFile | None = None, name: str = "") -> None:
        self._socket = pynng.Pair1(
            recv_timeout=_WAIT_MS, send_timeout=_WAIT_MS, recv_buffer_size=64, send_buffer_size=64
        )
        self._socket.dial(url, block=True)
        self._seals: Seals | None = None
        self.hello = Hello(
            LINK_VERSION, name or f"rogue-{os.urandom(6).hex()}", os.urandom(9).hex(), 0
        )
        self._link = Link(window=1 << 20, now=time.monotonic())
        if key is not None:
            self.join(key)

    def join(self, key: KeyFile) -> None:
        """Join as a client does."""
        hello, secret, nonce = self.hello, bytes.fromhex(key.secret), new_nonce()
        self.say(hello)
        challenge = decode(self._socket.recv())
        assert isinstance(challenge, Challenge), challenge
        handshake = Handshake(nonce, challenge.nonce, key.name, hello.session, hello.name)
        self.hello = Hello(
            *(LINK_VERSION, hello.name, hello.session, 0, "", key.name),
            proof=handshake.prove_client(secret, "", 0),
            answers=challenge.nonce,
            nonce=nonce,
        )
        self.say(self.hello)
        welcome = decode(self._socket.recv())
        assert isinstance(welcome, Welcome), welcome
        self._seals = Seals(*handshake.seals(secret))

    def say(self, wire: Any) -> bool:
        """Send a frame, or bytes as they are; returns False if it could not be sent in time."""
        data = wire if isinstance(wire, bytes) else encode(wire)
        if self._seals is not None and not isinstance(wire, Hello):
            data = self._seals.seal(data)
        try:
            self._socket.send(data)
        except pynng.NNGException:
            return False
        return True

    def put(self, *items: Item) -> bool:
        """Send items; waits a little if much of what it said has not been taken over, since what
        comes out of turn is not looked at."""
        until = time.monotonic() + _WAIT_MS / 1e3
        while self._link.num_unacknowledged > _WINDOW and time.monotonic() < until:
            self.drain()
            time.sleep(0.001)
        return self.say(self._link.send(list(items), time.monotonic()))

    def drain(self) -> None:
        """Read what has come, say so, and say again what was lost."""
        now = time.monotonic()
        while True:
            try:
                data = self._socket.recv(block=False)
            except pynng.NNGException:
                break
            opened = data if self._seals is None else self._seals.open(data)
            wire = decode(opened) if opened else None
            if isinstance(wire, Frame):
                self._link.receive(wire, now)
        for data in self._link.due(now):
            self.say(data)
        acknowledgement = self._link.acknowledgement(now)
        if acknowledgement is not None:
            self.say(acknowledgement)

    def close(self) -> None:
        """Go without a word."""
        self._socket.close()


def _messages(tenant: str, *, state: bool = False) -> Iterator[Run]:
    """Runs of one small message each."""
    sequencer = Sequencer(tenant, tenant=tenant)
    for number in count():
        message = PressureReported() if state else Prioritise(priority=number)
        key = Key(engine="nowhere", request=None if state else f"r{number}")
        made = sequencer.wrap(message, key, time.time())
        yield Run(stem_of(made), not state, [encode_envelope(made)])


# -- strangers -------------------------------------------------------------------------------------


def large_frames(url: str, key: KeyFile) -> None:
    """Six connections send frames of 18 MB, again and again."""
    frame = (18 << 20).to_bytes(8, "big") + b"\x95" + bytes(18 << 20)
    while True:
        for made in [raw(url, greet=True) for _ in range(6)]:
            if made is not None:
                with suppress(OSError):
                    made.sendall(frame)
                made.close()


def half_sent_frames(url: str, key: KeyFile) -> None:
    """Sixty connections send all of a frame but its last byte, and wait."""
    size = 128 << 10
    held: list[socket.socket] = []
    while True:
        for _ in range(60):
            made = raw(url, greet=True)
            if made is not None:
                try:
                    made.sendall(size.to_bytes(8, "big") + bytes(size - 1))
                    held.append(made)
                except OSError:
                    made.close()
        time.sleep(1.0)
        del held[:-1_000]


def idle_connections(url: str, key: KeyFile) -> None:
    """As many connections as there are descriptors, half of which speak nng."""
    held: list[socket.socket] = []
    while True:
        made = raw(url, greet=len(held) % 2 == 0)
        if made is None or len(held) > 3_000:
            time.sleep(0.5)
            held = held[500:]
        else:
            held.append(made)


def refused_hellos(url: str, key: KeyFile) -> None:
    """Hellos of an old version over one connection after the other, as fast as they go out."""
    hello = encode(Hello(1, "x" * 200, "s", 0))
    while True:
        rogue = Rogue(url)
        for _ in range(5_000):
            if not rogue.say(hello):
                break
        rogue.close()


def garbage(url: str, key: KeyFile) -> None:
    """Connections that send what is no frame, and go."""
    while True:
        made = raw(url, greet=True)
        if made is not None:
            junk = random.randbytes(200)
            with suppress(OSError):
                made.sendall(len(junk).to_bytes(8, "big") + junk)
            made.close()


def unproven_hellos(url: str, key: KeyFile) -> None:
    """Hellos that ask for challenges, and answer them wrong."""
    while True:
        rogue = Rogue(url)
        hello = rogue.hello
        for _ in range(120):
            rogue.say(
                Hello(
                    *(LINK_VERSION, hello.name, hello.session, 0, "", key.name),
                    proof=b"p" * 32,
                    answers=b"a" * 32,
                    nonce=b"n" * 32,
                )
            )
        rogue.close()


# -- holders of a key ------------------------------------------------------------------------------


def questions(url: str, key: KeyFile) -> None:
    """Frames full of questions, of both kinds, from 16 peers."""
    rogues = [Rogue(url, key) for _ in range(16)]
    numbers = count(1)
    while True:
        for rogue in rogues:
            about = random.choice(("history", "statistics"))
            rogue.put(*(Question(next(numbers), about, [">"] * 8) for _ in range(2_000)))
            rogue.drain()


def subscriptions(url: str, key: KeyFile) -> None:
    """Thousands of subscriptions of 255 patterns, then messages on ever new stems."""
    numbers = count(1)
    rogues = [Rogue(url, key) for _ in range(8)]
    while True:
        for rogue in rogues:
            for _ in range(20):
                number = next(numbers)
                patterns = [f"control.acme.e{number}-{n}.*.>" for n in range(255)]
                rogue.put(Subscribe(number, "s", patterns))
            sequencer = Sequencer("acme", tenant="acme")
            made = [
                sequencer.wrap(
                    Prioritise(priority=1), Key(engine=f"x{next(numbers)}", request="r"), 0.0
                )
                for _ in range(40)
            ]
            rogue.put(*(Run(stem_of(m), True, [encode_envelope(m)]) for m in made))
            rogue.put(*(Unsubscribe(n) for n in range(next(numbers))[-200:]))
            rogue.drain()


def large_patterns(url: str, key: KeyFile) -> None:
    """Patterns, names, rows and wills as long as frames let them be, from 64 peers."""
    numbers = count(1)
    rogues = [Rogue(url, key) for _ in range(64)]
    messages = _messages("acme")
    while True:
        for rogue in rogues:
            number = next(numbers)
            rogue.put(Subscribe(number, "n" * 250, [f"control.acme.{'x' * 30_000}{number}.>"]))
            rogue.put(Standing([("r" * 250, 1, 2, 3)] * 250))
            rogue.put(Will([next(messages) for _ in range(200)], True))
            rogue.put(*(Provide(f"control.acme.{'y' * 3_000}{next(numbers)}.t") for _ in range(20)))
            rogue.drain()


def pieces(url: str, key: KeyFile) -> None:
    """Items of 9 MB of which the last piece never comes, from 64 peers."""
    rogues = [Rogue(url, key) for _ in range(64)]
    while True:
        for place, rogue in enumerate(rogues):
            for _ in range(95):
                if not rogue.put(Piece(9 << 20, bytes(96 << 10))):
                    rogue.close()
                    rogues[place] = Rogue(url, key)
                    break
        time.sleep(0.01)


def flood(url: str, key: KeyFile) -> None:
    """Small messages as fast as they go out, to 32 readers that take nothing over."""
    for _ in range(32):
        Rogue(url, key).put(Subscribe(1, "s", ["control.acme.>", "intent.acme.>"]))
    senders = [Rogue(url, key) for _ in range(4)]
    messages = _messages("acme")
    while True:
        for rogue in senders:
            rogue.put(*(next(messages) for _ in range(200)))
            rogue.drain()


def unread(url: str, key: KeyFile) -> None:
    """Messages of 8 MB, in pieces, for 200 peers that take nothing over."""
    for _ in range(200):
        Rogue(url, key).put(Subscribe(1, "s", ["control.acme.>"]))
    senders = [Rogue(url, key) for _ in range(4)]
    made = Sequencer("acme", tenant="acme").wrap(
        Prioritise(priority=1, reason="x" * (8_000_000)), Key(engine="nowhere", request="r"), 0.0
    )
    parts = list(split(Run(stem_of(made), True, [encode_envelope(made)])))
    while True:
        for rogue in senders:
            for part in parts:
                rogue.put(part)
            rogue.drain()


def coming_and_going(url: str, key: KeyFile) -> None:
    """Peers that join, subscribe, leave a will, and are lost or leave."""
    messages = _messages("acme")
    for number in count():
        rogue = Rogue(url, key)
        rogue.put(Subscribe(1, "s", [">"]), Will([next(messages) for _ in range(100)]))
        if number % 2:
            rogue.say(Goodbye())
        rogue.close()


def hellos(url: str, key: KeyFile) -> None:
    """Hellos over connections that have joined, each of which asks for what was missed."""
    rogues = [Rogue(url, key) for _ in range(32)]
    for rogue in rogues:
        rogue.put(Subscribe(1, "s", [">"]))
    while True:
        for place, rogue in enumerate(rogues):
            if not all(rogue.say(rogue.hello) for _ in range(10)):
                rogue.close()
                rogues[place] = Rogue(url, key)


def snapshots(url: str, key: KeyFile) -> None:
    """Streams without number are provided, fetched, and never sent."""
    numbers = count(1)
    rogues = [Rogue(url, key) for _ in range(8)]
    for rogue in rogues:
        rogue.put(Subscribe(1, "s", ["control.acme.>"]))
    while True:
        for rogue in rogues:
            stems = [f"control.acme.e{next(numbers)}.t" for _ in range(300)]
            rogue.put(*(Provide(stem, resumed=True) for stem in stems))
            rogue.put(*(Fetch(1, stem) for stem in stems))
            rogue.drain()


def heavy_messages(url: str, key: KeyFile) -> None:
    """Messages that are no more than a great number of elements, and some that name a key twice."""
    rogues = [Rogue(url, key) for _ in range(8)]
    good = next(_messages("acme"))
    nested = b"\xdc" + (60_000).to_bytes(2, "big") + b"\x90" * 60_000
    body = good.messages[0]
    twice = bytes([body[0] + 1]) + body[1:] + b"\xa6source" + b"\xa4acme"
    many = bytes([body[0] + 1]) + body[1:] + b"\xa1x" + nested
    while True:
        for rogue in rogues:
            rogue.put(Run(good.stem, True, [many]))
            rogue.put(Run(good.stem, True, [twice] * 100))
            rogue.drain()


Attack = Callable[[str, KeyFile], None]

STRANGERS: Final[tuple[Attack, ...]] = (
    large_frames,
    half_sent_frames,
    idle_connections,
    refused_hellos,
    garbage,
    unproven_hellos,
)

HOLDERS: Final[tuple[Attack, ...]] = (
    questions,
    subscriptions,
    large_patterns,
    pieces,
    flood,
    unread,
    coming_and_going,
    hellos,
    snapshots,
    heavy_messages,
)
