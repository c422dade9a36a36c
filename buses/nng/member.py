"""The client's side of the bus, without I/O: joining the hub, staying, and coming back.

A member keeps what the hub would have to be told again: its subscriptions, the streams that it
provides, its will, and the reliable messages that are not settled. So it survives a broken
connection, where the link goes on, and a hub that was started anew, where all of it is said again.

It must not know what a message means, nor who reads it. It is told what came and when, and says
what to send.
"""

from collections import deque
from typing import Final, Literal

from hear.buses.nng.access import KeyFile, prove
from hear.buses.nng.backlog import Backlog, Bounds
from hear.buses.nng.frames import (
    LINK_VERSION,
    Challenge,
    Frame,
    Goodbye,
    Hello,
    Item,
    Lost,
    Provide,
    Refused,
    Run,
    Stranger,
    Subscribe,
    Unsubscribe,
    Welcome,
    Will,
    decode,
    encode,
)
from hear.buses.nng.link import Link
from hear.errors import BusError, RemoteProtocolError

MEMBER_WINDOW: Final = 16
"""Frames on their way to the hub. A client's own socket has a queue for more than these."""

HELLO_S: Final = 0.1
"""Time between two attempts to join."""

Phase = Literal["joining", "joined", "refused", "leaving", "left"]


class Member:
    """One process's membership of a bus."""

    def __init__(
        self,
        name: str,
        *,
        session: str,
        now: float,
        key: KeyFile | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        """``session`` tells this process from all that ever used the name."""
        self.name = name
        self.phase: Phase = "joining"
        self.refusal = ""
        """Why the hub did not take it in, the last time that it did not."""
        self.unreadable = 0
        """Frames from the hub that could not be read."""
        self._session = session
        self._key = key
        self._bounds = bounds or Bounds()
        self._link = Link(window=MEMBER_WINDOW, now=now)
        self._backlog = Backlog(self._bounds)
        self._hub = ""
        self._connected = False
        self._hello_s = now
        self._output: list[bytes] = []
        self._subscriptions: dict[int, Subscribe] = {}
        self._provided: dict[str, None] = {}
        self._will: list[Run] = []
        self._unsettled: deque[tuple[int, list[Run]]] = deque()
        self._unsettled_messages = 0

    # -- what the bus says --------------------------------------------------------------------

    def publish(self, stem: str, reliable: bool, message: bytes) -> None:
        """Send one message.

        Raises:
            BusError: the hub has been away for so long that no more can be kept for it.
        """
        if not self._backlog.add(stem, reliable, message):
            raise BusError(
                f"{len(self._backlog)} messages wait for the hub already, the limit is "
                f"{self._bounds.reliable_messages} reliable ones or "
                f"{self._bounds.reliable_bytes} bytes of them"
            )

    def subscribe(self, number: int, name: str, patterns: list[str]) -> None:
        """Ask for what the patterns match."""
        item = Subscribe(number, name, patterns)
        self._backlog.put(item)
        self._subscriptions[number] = Subscribe(number, name, patterns, resumed=True)

    def unsubscribe(self, number: int) -> None:
        """Ask for no more."""
        if self._subscriptions.pop(number, None) is not None:
            self._backlog.put(Unsubscribe(number))

    def provide(self, stem: str) -> None:
        """Answer for the snapshots of a stream from now on."""
        if stem not in self._provided:
            self._provided[stem] = None
            self._backlog.put(Provide(stem))

    def set_will(self, runs: list[Run]) -> None:
        """Leave word what to publish if this process is lost."""
        self._will = runs
        self._backlog.put(Will(runs))

    def put(self, item: Item, size_bytes: int = 0) -> None:
        """Send anything else."""
        self._backlog.put(item, size_bytes)

    def leave(self, now: float) -> None:
        """Say goodbye; ``phase`` is ``left`` once the hub has heard it."""
        if self.phase == "joined":
            self.phase = "leaving"
            self._hello_s = now
        else:
            self.phase = "left"

    # -- what the driver tells ----------------------------------------------------------------

    def receive(self, data: bytes, now: float) -> list[Item]:
        """Take in what came; returns the items that are for the bus."""
        try:
            wire = decode(data)
        except RemoteProtocolError:
            self.unreadable += 1
            return []
        if isinstance(wire, Frame):
            return self._frame(wire, now) if self._connected else []
        if isinstance(wire, Welcome):
            self._welcome(wire, now)
        elif isinstance(wire, Challenge):
            self._answer(wire, now)
        elif isinstance(wire, Refused):
            self.refusal = wire.reason
            if wire.final:
                self.phase = "refused"
        elif isinstance(wire, Stranger):
            self._connected = False
        elif isinstance(wire, Goodbye):
            self._connected = False
            if self.phase == "leaving":
                self.phase = "left"
        return []

    def reconnected(self, now: float) -> None:
        """The connection is another one."""
        self._connected = False
        self._hello_s = now
        self._link.heard_s = now

    def lost(self, now: float) -> bool:
        """Whether the hub has been silent for so long that another connection should be tried."""
        return self._link.lost(now)

    def poll(self, now: float) -> list[bytes]:
        """What to send now."""
        output, self._output = self._output, []
        if self.phase in ("refused", "left"):
            return output
        if self.phase == "leaving":
            if now >= self._hello_s:
                self._hello_s = now + HELLO_S
                output.append(encode(Goodbye()))
            return output
        if not self._connected:
            if now >= self._hello_s:
                self._hello_s = now + HELLO_S
                output.append(encode(self._hello()))
            return output
        link = self._link
        while self._backlog and link.can_send and self._may_send_more():
            items, _ = self._backlog.take()
            output.append(link.send(items, now))
            kept = [item for item in items if isinstance(item, Run) and item.reliable]
            if kept:
                self._unsettled.append((link.number, kept))
                self._unsettled_messages += sum(len(run.messages) for run in kept)
        output.extend(link.due(now))
        acknowledgement = link.acknowledgement(now)
        if acknowledgement is not None:
            output.append(acknowledgement)
        return output

    def next_due(self) -> float:
        """When ``poll`` has to be called next, if nothing happens before."""
        return self._link.next_due() if self._connected else self._hello_s

    @property
    def idle(self) -> bool:
        """Whether the hub has taken over everything."""
        return not self._backlog and not self._link.num_unacknowledged

    @property
    def dropped(self) -> int:
        """Messages of state that gave way before they were sent."""
        return self._backlog.dropped

    @property
    def num_waiting(self) -> int:
        """Messages that wait to be sent."""
        return len(self._backlog)

    # -- pieces -------------------------------------------------------------------------------

    def _may_send_more(self) -> bool:
        return self._unsettled_messages <= 2 * self._bounds.reliable_messages

    def _frame(self, frame: Frame, now: float) -> list[Item]:
        while self._unsettled and self._unsettled[0][0] <= frame.settled:
            runs = self._unsettled.popleft()[1]
            self._unsettled_messages -= sum(len(run.messages) for run in runs)
        return self._link.receive(frame, now)[0]

    def _hello(self, proof: bytes = b"") -> Hello:
        return Hello(
            version=LINK_VERSION,
            name=self.name,
            session=self._session,
            received=self._link.received,
            hub=self._hub,
            key=self._key.name if self._key else "",
            proof=proof,
        )

    def _answer(self, challenge: Challenge, now: float) -> None:
        if self._key is None:
            self.phase = "refused"
            self.refusal = "the hub asks for a key, and none was given"
            return
        secret = bytes.fromhex(self._key.secret)
        proof = prove(secret, challenge.nonce, self._session, self.name)
        self._output.append(encode(self._hello(proof)))
        self._hello_s = now + 10 * HELLO_S  # the answer must not be taken for another attempt

    def _welcome(self, welcome: Welcome, now: float) -> None:
        if self._connected:
            return  # it answers a hello that was said twice
        self._connected = True
        if self.phase == "joining":
            self.phase = "joined"
        if welcome.resumed:
            self._output.extend(self._link.resume(welcome.received, now))
        else:
            self._begin_anew(welcome.hub, now)

    def _begin_anew(self, hub: str, now: float) -> None:
        """Tell a hub that knows nothing of this member all that it has to know."""
        first_time = not self._hub
        self._hub = hub
        self._link = Link(window=MEMBER_WINDOW, now=now)
        if first_time:
            return
        waiting, self._backlog = self._backlog, Backlog(self._bounds)
        for stem in self._provided:
            self._backlog.put(Provide(stem, resumed=True))
        if self._will:
            self._backlog.put(Will(self._will))
        for item in self._subscriptions.values():
            self._backlog.put(item)
        unsettled, self._unsettled = self._unsettled, deque()
        self._unsettled_messages = 0
        for _, runs in unsettled:
            for run in runs:
                self._put_run(run)
        while waiting:
            # What is no message was said to the hub that is gone, and has been said again above.
            for left in waiting.take()[0]:
                if isinstance(left, Run):
                    self._put_run(left)
                elif isinstance(left, Lost):
                    self._backlog.put_lost(left.stems)
        self._backlog.dropped += waiting.dropped

    def _put_run(self, run: Run) -> None:
        size_bytes = sum(map(len, run.messages))
        if run.reliable:
            self._backlog.put(run, size_bytes, len(run.messages))
        else:
            self._backlog.put_state(run, size_bytes)
