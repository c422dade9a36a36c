"""Following a bus without an end: history first, then what comes, again after being cut off.

A tap is a subscriber like any other. What it misses is told by number; where it joins late, that
is not a loss.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast

import trio

from hear.delivery import Arrival, GapDetector
from hear.errors import LaggedError
from hear.interfaces import Bus, RememberingBus, Subscription
from hear.messages import Envelope
from hear.subjects import stem_of

CAPACITY = 65_536
_CHUNK = 512
_MAX_CHANNELS = 65_536


class Numbers:
    """What a reader missed, by the numbers of the messages. Bounded, however long it runs."""

    def __init__(self) -> None:
        self._detector = GapDetector()
        self._heard: set[tuple[str, str]] = set()
        self.gaps = 0
        self.missed = 0

    def observe(self, envelope: Envelope) -> tuple[Arrival, int]:
        """How a message stands to those before it, and how many are missing between."""
        channel = envelope.source, stem_of(envelope)
        first = channel not in self._heard
        if first:
            if len(self._heard) >= _MAX_CHANNELS:  # each workflow brings its own
                self._detector, self._heard = GapDetector(), set()
            self._heard.add(channel)
        before = self._detector.missed
        arrival = self._detector.observe(envelope)
        if arrival is not Arrival.GAP:
            return arrival, 0
        if first:  # the tap came late
            return Arrival.NEXT, 0
        missed = self._detector.missed - before
        self.gaps += 1
        self.missed += missed
        return arrival, missed


class Receiver(Protocol):
    """Who is given what comes."""

    def take(self, envelopes: Sequence[Envelope]) -> Iterable[Envelope]:
        """Take messages in order; returns those of whose streams a snapshot is needed."""
        ...

    def cut_off(self, error: LaggedError) -> None:
        """The subscription was closed and is being made again."""
        ...


class Follower:
    """One place on a bus that is taken again whenever it is lost by lagging."""

    def __init__(
        self, bus: Bus, patterns: Iterable[str], *, name: str, capacity: int = CAPACITY
    ) -> None:
        self._bus = bus
        self._patterns = tuple(patterns)
        self._name = name
        self._capacity = capacity
        self._messages: Subscription | None = None
        self._dropped = 0
        self.times_cut_off = 0

    @property
    def dropped(self) -> int:
        """State messages that this reader was too slow for."""
        now = 0 if self._messages is None else self._messages.statistics().dropped
        return self._dropped + now

    async def run(
        self,
        receiver: Receiver,
        *,
        history: bool = False,
        on_live: Callable[[], None] = lambda: None,
    ) -> None:
        """Give the receiver what the bus remembers, if asked, and what comes, until cancelled.

        ``on_live`` is called once the receiver has what is remembered, and is subscribed.

        Raises:
            BusError: the bus is closed, is lost, or did not tell its history in time.
        """
        seen: frozenset[str] | None = None if history else frozenset()
        while True:
            try:
                async with self._subscribe() as messages:
                    self._messages = messages
                    try:
                        if seen is None:  # asked for after subscribing, so that nothing is missed
                            seen = await self._give_past(receiver)
                        on_live()
                        while True:
                            batch = await messages.receive()
                            await give(receiver, [e for e in batch if e.id not in seen], messages)
                    finally:
                        self._messages = None
                        self._dropped += messages.statistics().dropped
            except LaggedError as error:
                self.times_cut_off += 1
                receiver.cut_off(error)

    def _subscribe(self) -> Subscription:
        return self._bus.subscribe(self._patterns, name=self._name, capacity=self._capacity)

    async def _give_past(self, receiver: Receiver) -> frozenset[str]:
        remembering = as_remembering(self._bus)
        past = () if remembering is None else await remembering.history(self._patterns)
        await give(receiver, past)
        return frozenset(envelope.id for envelope in past)


async def give(
    receiver: Receiver, batch: Sequence[Envelope], messages: Subscription | None = None
) -> None:
    """Give a batch in pieces, so that a signal or a time limit is heard within a long one."""
    for start in range(0, len(batch), _CHUNK):
        if start:
            await trio.lowlevel.checkpoint()
        for envelope in receiver.take(batch[start : start + _CHUNK]):
            if messages is not None:
                messages.request_snapshot(envelope)


def as_remembering(bus: Bus) -> RememberingBus | None:
    """The bus, if it is one that can be asked for what has happened."""
    return cast(RememberingBus, bus) if hasattr(bus, "history") else None
