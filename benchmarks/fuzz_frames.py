"""What the fuzzer sends over the link of the nng bus: to the hub, and to a member.

Frames are made from good ones, whole, damaged, or with a field of another type, and come over
several connections in any order; beside them two good peers go on, and have to be served.
"""

from collections.abc import Iterator
from random import Random
from typing import Any, Final
from zlib import crc32

import msgspec

from benchmarks.fuzz_inputs import damaged, junk, message, noise
from hear.buses.nng import frames
from hear.buses.nng.backlog import Bounds
from hear.buses.nng.frames import (
    Answer,
    Challenge,
    CutOff,
    Denied,
    Fetch,
    Frame,
    Goodbye,
    Hello,
    Item,
    Lost,
    Provide,
    Question,
    Refused,
    Run,
    Snapshot,
    SnapshotFor,
    Standing,
    Stranger,
    Subscribe,
    Subscribed,
    Unprovide,
    Unsubscribe,
    Wanted,
    Welcome,
    Will,
    Wire,
)
from hear.buses.nng.hub import Hub
from hear.buses.nng.member import Member

_STATE: Final = "state.default.e0.queue"
_OUTCOME: Final = "outcome.default.e0.operation_outcome"
_RUN: Final = Run(_OUTCOME, True, [b"x"])
_ITEMS: Final[tuple[Item, ...]] = (
    _RUN,
    Run(_STATE, False, [b"y", b"z"]),
    Run("no stem", True, [b"x"]),
    Run(_STATE, True, [b"x"]),
    Lost([_STATE]),
    Subscribe(1, "r", [">"]),
    Subscribe(2, "r", ["state.>", "*.*.e0.>"], True),
    Subscribe(3, "r", ["no pattern ?"]),
    Subscribed(1, [_STATE]),
    Unsubscribe(1),
    Provide(_STATE),
    Provide(_STATE, True),
    Unprovide(_STATE),
    Fetch(1, _STATE),
    Wanted(_STATE, 1),
    Snapshot(_STATE, 1, [b"x"], True),
    Snapshot(_STATE, 2, [], False),
    SnapshotFor([1], _STATE, [b"x"], True),
    CutOff("why"),
    Denied("why"),
    Will([_RUN]),
    Question(1, "history", [">"]),
    Question(2, "statistics"),
    Question(3, "what"),
    Answer(1, [b"x"], True),
    Standing([("r", 1, 2, 3)], 1),
)
_MAX_WAITING: Final = 4_096


def _wire(rng: Random) -> Wire:
    dice = rng.random()
    if dice < 0.75:
        number = int(rng.random() * 6) if rng.random() < 0.9 else rng.choice((-1, 2**62, 2**63 - 1))
        items = [rng.choice(_ITEMS) for _ in range(int(rng.random() ** 2 * 6))]
        return Frame(number, int(rng.random() * 6), int(rng.random() * 6), items)
    name, session = rng.choice(("a", "b", "", "x" * 300)), rng.choice(("s", "t", ""))
    return rng.choice(
        (
            Hello(1, name, session, int(rng.random() * 4)),
            Hello(2, name, session, 0),
            Challenge(b"nonce"),
            Welcome(1, "hub/1", rng.random() < 0.5, int(rng.random() * 4)),
            Refused("why", final=False),
            Stranger("hub"),
            Goodbye(),
        )
    )


def frame(rng: Random) -> bytes:
    """One frame, good or bad, after a byte that says over which connection it comes."""
    dice = rng.random()
    good = frames.encode(_wire(rng))
    if dice < 0.5:
        data = good
    elif dice < 0.75:
        data = damaged(rng, (good,))
    elif dice < 0.9:
        data = _with_junk(rng, good)
    else:
        data = message(rng) if dice < 0.95 else noise(rng)
    return bytes((int(rng.random() * 4),)) + data


def _with_junk(rng: Random, good: bytes) -> bytes:
    """The frame with something else in one place."""
    fields: list[Any] = msgspec.msgpack.decode(good)
    place = int(rng.random() * len(fields))
    inner = fields[place]
    if isinstance(inner, list) and inner and rng.random() < 0.7:
        item = inner[int(rng.random() * len(inner))]
        if isinstance(item, list) and item:
            item[int(rng.random() * len(item))] = junk(rng)
    else:
        fields[place] = junk(rng)
    try:
        return msgspec.msgpack.encode(fields)
    except (OverflowError, UnicodeEncodeError):
        return good


class Links:
    """A hub and a member that are sent hostile frames, and good peers beside them."""

    def __init__(self) -> None:
        bounds = Bounds(100, 100_000, 100, 100_000)
        self._hub = Hub(id="hub", now=0.0, bounds=bounds, history_bytes=100_000)
        self._member = Member("m", session="m", now=0.0, bounds=bounds)
        self._now = 0.0
        self._sent = 0
        self._good = {
            100: Member("good", session="g", now=0.0),
            101: Member("ear", session="e", now=0.0),
        }
        self._heard = 0
        self._good[101].subscribe(1, "ear", ["outcome.good.>"])
        self._settle()

    def __call__(self, data: bytes) -> None:
        """Take one input. Raises what a receiver raises, and AssertionError if others suffer."""
        self._now += 0.01
        connection, wire = (data[0] if data else 0), data[1:]
        self._hub.receive(connection, wire, self._now)
        self._member.receive(wire, self._now)
        for _ in self._member.poll(self._now):
            pass
        if crc32(data) % 50 == 0:
            self._check_others()
        self._hub.turn(self._now)
        self._hub.tick(self._now)
        for closed in self._hub.to_close:
            self._hub.closed(closed, self._now)
        self._hub.to_close.clear()
        self._settle()
        self._hub.events.clear()

    def _check_others(self) -> None:
        self._sent += 1
        self._good[100].publish("outcome.good.e0.operation_outcome", True, b"%d" % self._sent)
        self._settle()
        if self._heard != self._sent:
            raise AssertionError(f"of {self._sent} good messages {self._heard} were heard")

    def _settle(self) -> None:
        """Let the good peers and the hub say what they have to say to each other."""
        for _ in range(8):
            for connection, member in self._good.items():
                for data in member.poll(self._now):
                    self._hub.receive(connection, data, self._now)
            self._hub.turn(self._now)
            output, self._hub.output = self._hub.output, []
            if len(output) > _MAX_WAITING:
                raise AssertionError(f"{len(output)} frames at once from the hub")
            quiet = True
            for connection, data in output:
                if connection in self._good:
                    quiet = False
                    for item in self._good[connection].receive(data, self._now):
                        self._heard += sum(map(len, self._messages(item)))
            if quiet:
                return

    @staticmethod
    def _messages(item: Item) -> Iterator[list[bytes]]:
        if isinstance(item, Run) and item.stem.startswith("outcome.good."):
            yield item.messages
