"""The client's side of the bus, without I/O: joining the hub, staying, and coming back.

A member keeps what the hub would have to be told again: its subscriptions, the streams that it
provides, its will, and the reliable messages that are not settled. So it survives a broken
connection, where the link goes on, and a hub that was started anew, where all of it is said again.
What it keeps is bounded: with too much of it unsettled no more is sent, and waits to be sent until
that is too much as well.

With a key it takes nothing from a hub that has not shown that it holds the key too: it answers a
challenge, the welcome has to prove the secret over both numbers, and from then on each frame is
sealed. A hub that welcomes without a challenge, as one without keys does, is refused.

It must not know what a message means, nor who reads it. It is told what came and when, and says
what to send.
"""

import hmac
from collections import deque
from typing import Final, Literal

from hear.buses.nng.access import Handshake, KeyFile, new_nonce
from hear.buses.nng.backlog import Backlog, Bounds
from hear.buses.nng.frames import (
    FRAME_FILL_BYTES,
    LINK_VERSION,
    Challenge,
    Frame,
    Goodbye,
    Hello,
    Item,
    Lost,
    Provide,
    Question,
    Refused,
    Run,
    Stranger,
    Subscribe,
    Unprovide,
    Unsubscribe,
    Welcome,
    Will,
    decode,
    encode,
    size_of,
)
from hear.buses.nng.link import HUB_WINDOW, MEMBER_WINDOW, Link
from hear.buses.nng.seal import Seals, is_sealed
from hear.errors import BusError, RemoteProtocolError

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
        self._link = self._new_link(now)
        self._backlog = Backlog(self._bounds)
        self._stay = ""  # what the hub called it, when this member last began
        self._connected = False
        self._hello_s = now
        self._output: list[bytes] = []
        self._subscriptions: dict[int, Subscribe] = {}
        self._provided: dict[str, None] = {}
        self._question: Question | None = None
        self._handshake: Handshake | None = None  # the challenge that was answered last
        self._nonce = new_nonce() if key else b""
        self._seals: Seals | None = None
        self._will: list[Run] = []
        self._unsettled: deque[tuple[int, list[Run], int, int]] = deque()
        self._unsettled_messages = 0
        self._unsettled_bytes = 0

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
        self._subscriptions[number] = item

    def subscribed(self, number: int) -> None:
        """The hub has noted a subscription: from here on it may have missed something."""
        item = self._subscriptions.get(number)
        if item is not None and not item.resumed:
            self._subscriptions[number] = Subscribe(number, item.name, item.patterns, resumed=True)

    def unsubscribe(self, number: int) -> None:
        """Ask for no more."""
        if self._subscriptions.pop(number, None) is not None:
            self._backlog.put(Unsubscribe(number))

    def provide(self, stem: str) -> None:
        """Answer for the snapshots of a stream from now on."""
        if stem not in self._provided:
            self._provided[stem] = None
            self._backlog.put(Provide(stem))

    def unprovide(self, stem: str) -> None:
        """Answer for them no more."""
        if stem in self._provided:
            del self._provided[stem]
            self._backlog.put(Unprovide(stem))

    def set_will(self, runs: list[Run]) -> None:
        """Leave word what to publish if this process is lost."""
        self._will = runs
        self._put_will()

    def ask(self, question: Question) -> None:
        """Ask the hub something; a hub that takes its place is asked again. A hub answers one
        question at a time, and an earlier one not any more."""
        self._question = question
        self._backlog.put(question)

    def forget(self, question: int) -> None:
        """The question is answered, or the answer no longer wanted."""
        if self._question is not None and self._question.number == question:
            self._question = None

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
        sealed = is_sealed(data)
        if sealed:
            opened = self._seals.open(data) if self._seals is not None else None
            if opened is None:
                self.unreadable += 1
                return []
            data = opened
        try:
            wire = decode(data)
            if isinstance(wire, Frame):
                return self._frame(wire, now) if self._connected and self._trusts(sealed) else []
        except RemoteProtocolError:
            self.unreadable += 1
            return []
        if isinstance(wire, Welcome):
            self._welcome(wire, now)
        elif isinstance(wire, Challenge):
            self._answer(wire, now)
        elif isinstance(wire, Refused):
            self._refused(wire)
        elif isinstance(wire, Stranger):
            self._connected = False
        elif isinstance(wire, Goodbye) and self._trusts(sealed):
            self._connected = False
            self._hello_s = now + HELLO_S
            if self.phase == "leaving":
                self.phase = "left"
        return []

    def _trusts(self, sealed: bool) -> bool:
        """Whether this is from the hub: with a key, only what is sealed."""
        return sealed or self._key is None

    def _refused(self, refused: Refused) -> None:
        # Whoever is on the way can say so too. A member that has joined goes on asking, so that
        # nothing but the connection is lost by it.
        self.refusal = refused.reason
        if refused.final and (self.phase == "joining" or self._key is None):
            self.phase = "refused"

    def reconnected(self, now: float) -> None:
        """The connection is another one."""
        self._connected = False
        self._handshake = None
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
        if not self._connected:
            if now >= self._hello_s:
                self._hello_s = now + HELLO_S
                output.append(encode(self._hello()))
            return output
        if self.phase == "leaving":  # the hub has to know who leaves, so it is joined before
            if now >= self._hello_s:
                self._hello_s = now + HELLO_S
                output.append(self._seal(encode(Goodbye())))
            return output
        link = self._link
        while self._backlog and link.can_send and self._may_send_more():
            load = self._backlog.take()
            output.append(self._seal(link.send(load.items, now)))
            if load.runs:
                messages = sum(len(run.messages) for run in load.runs)
                size_bytes = sum(sum(map(len, run.messages)) for run in load.runs)
                self._unsettled.append((link.number, load.runs, messages, size_bytes))
                self._unsettled_messages += messages
                self._unsettled_bytes += size_bytes
        output.extend(map(self._seal, link.due(now)))
        acknowledgement = link.acknowledgement(now)
        if acknowledgement is not None:
            output.append(self._seal(acknowledgement))
        return output

    def _seal(self, data: bytes) -> bytes:
        return data if self._seals is None else self._seals.seal(data)

    def next_due(self) -> float:
        """When ``poll`` has to be called next, if nothing happens before."""
        if self._connected and self.phase != "leaving":
            return self._link.next_due()
        return self._hello_s

    @property
    def connected(self) -> bool:
        """Whether the hub knows it, as far as it has heard."""
        return self._connected

    @property
    def num_unsettled(self) -> int:
        """Reliable messages that were sent, and have not reached all whom they are for."""
        return self._unsettled_messages

    @property
    def stay(self) -> str:
        """Names this stay at this hub; another hub, or another stay, has another."""
        return self._stay

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

    @staticmethod
    def _new_link(now: float) -> Link:
        return Link(window=MEMBER_WINDOW, owe_most=HUB_WINDOW - 1, now=now)

    def _may_send_more(self) -> bool:
        # Twice what the hub keeps for a reader, so that it cuts one off that takes nothing first.
        return (
            self._unsettled_messages <= 2 * self._bounds.reliable_messages
            and self._unsettled_bytes <= 2 * self._bounds.reliable_bytes
        )

    def _frame(self, frame: Frame, now: float) -> list[Item]:
        while self._unsettled and self._unsettled[0][0] <= frame.settled:
            _, _, messages, size_bytes = self._unsettled.popleft()
            self._unsettled_messages -= messages
            self._unsettled_bytes -= size_bytes
        return self._link.receive(frame, now)[0]

    def _hello(self, proof: bytes = b"", answers: bytes = b"") -> Hello:
        return Hello(
            version=LINK_VERSION,
            name=self.name,
            session=self._session,
            received=self._link.received,
            hub=self._stay,
            key=self._key.name if self._key else "",
            proof=proof,
            answers=answers,
            nonce=self._nonce,
        )

    def _answer(self, challenge: Challenge, now: float) -> None:
        if self._connected:
            return  # it answers a hello that was said twice
        if self._key is None:
            if self.phase == "joining":
                self.phase = "refused"
            self.refusal = "the hub asks for a key, and none was given"
            return
        answered = self._handshake
        if answered is None or answered.hub_nonce != challenge.nonce:
            # A number for each handshake, so that no welcome of an earlier one fits.
            self._nonce = new_nonce()
            answered = self._handshake = Handshake(
                client_nonce=self._nonce,
                hub_nonce=challenge.nonce,
                key=self._key.name,
                session=self._session,
                name=self.name,
            )
        proof = answered.prove_client(
            bytes.fromhex(self._key.secret), self._stay, self._link.received
        )
        self._output.append(encode(self._hello(proof, challenge.nonce)))
        self._hello_s = now + 10 * HELLO_S  # the answer must not be taken for another attempt

    def _welcome(self, welcome: Welcome, now: float) -> None:
        if self._connected:
            return
        if self._key is not None and not self._is_proven(welcome, self._key):
            # Tried again all the same: it may have been somebody else's word, said in between.
            self.refusal = (
                f"who answers does not prove that it holds the key {self._key.name!r}: it is not "
                "the hub, or a hub without keys or with another secret"
            )
            return
        if welcome.resumed and not (
            welcome.hub == self._stay and self._link.can_resume(welcome.received)
        ):
            self._stay += "?"  # which the hub has not said, so it takes this member in anew
            self._hello_s = now
            return
        self._connected = True
        self._hello_s = now
        if self.phase == "joining":
            self.phase = "joined"
        if welcome.resumed:
            self._output.extend(map(self._seal, self._link.resume(welcome.received, now)))
        else:
            self._begin_anew(welcome.hub, now)

    def _is_proven(self, welcome: Welcome, key: KeyFile) -> bool:
        """Whether a welcome is from who holds the key; from then on frames are sealed."""
        handshake = self._handshake
        if handshake is None:
            return False
        secret = bytes.fromhex(key.secret)
        expected = handshake.prove_hub(secret, welcome.hub, welcome.resumed, welcome.received)
        if not hmac.compare_digest(expected, welcome.proof):
            return False
        self._seals = Seals(*handshake.seals(secret))
        self._handshake = None  # good for one welcome, which nobody can say again later
        return True

    def _begin_anew(self, stay: str, now: float) -> None:
        """Tell a hub that knows nothing of this member all that it has to know."""
        first_time = not self._stay
        self._stay = stay
        self._link = self._new_link(now)
        if first_time:
            return
        waiting, self._backlog = self._backlog, Backlog(self._bounds)
        for stem in self._provided:
            self._backlog.put(Provide(stem, resumed=True))
        if self._will:
            self._put_will()
        for subscription in self._subscriptions.values():
            self._backlog.put(subscription)
        if self._question is not None:
            self._backlog.put(self._question)
        unsettled, self._unsettled = self._unsettled, deque()
        self._unsettled_messages = self._unsettled_bytes = 0
        for _, runs, *_ in unsettled:
            for run in runs:
                self._put_run(run)
        for left in waiting.drain():
            # All but messages was said to the hub that is gone, and has been said again above.
            if isinstance(left, Run):
                self._put_run(left)
            elif isinstance(left, Lost):
                for stem in left.stems:
                    self._backlog.put_lost(stem)
        self._backlog.dropped += waiting.dropped

    def _put_run(self, run: Run) -> None:
        size_bytes = sum(map(len, run.messages))
        if run.reliable:
            self._backlog.put(run, size_bytes, len(run.messages), anyway=True)
        else:
            self._backlog.put_state(run, size_bytes)

    def _put_will(self) -> None:
        """Leave the will, in as many parts as frames want."""
        part: list[Run] = []
        size_bytes = 0
        more = False
        for run in self._will:
            run_bytes = size_of(run)
            if part and size_bytes + run_bytes > FRAME_FILL_BYTES // 2:
                self._backlog.put(Will(part, more), size_bytes)
                part, size_bytes, more = [], 0, True
            part.append(run)
            size_bytes += run_bytes
        self._backlog.put(Will(part, more), size_bytes)
