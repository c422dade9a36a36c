"""Who has connected and not joined yet, and what becomes of a hello.

A stranger is anybody who reaches the address, so little is kept for each, few are kept, and none
for long: a connection has ``JOIN_S`` to join, may send ``MAX_UNKNOWN_FRAMES`` until then, and is
closed once it was refused. If more than ``MAX_STRANGERS`` are there, the one that came first goes:
a handshake takes milliseconds, so who means to join has joined by then.

States of a connection: unknown (``opened``), challenged (a nonce is kept), refused (closed a moment
later, so that the reason arrives), joined (a peer's), and unknown again when that peer is gone. It
changes no peer and sends nothing.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Final

from hear.buses.nng.access import EVERYTHING, Grants, Handshake, Keyring, new_nonce
from hear.buses.nng.frames import LINK_VERSION, MAX_NAME, NONCE_BYTES, Challenge, Hello, Refused
from hear.buses.nng.peers import Peer, Peers

JOIN_S: Final = 5.0
"""Time that a connection has to join."""

MAX_STRANGERS: Final = 128
"""Most connections that have not joined."""

MAX_UNKNOWN_BYTES: Final = 4_096
"""Longest hello."""

MAX_UNKNOWN_FRAMES: Final = 128
"""Most frames over a connection that has not joined. A client that was connected anew without
noticing sends what it has on its way before it says hello again."""

REFUSED_S: Final = 0.2
"""A connection is closed so long after a refusal was sent over it."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Take it in as new, in place of ``replaced``, which is gone for the reason ``event``.

    ``secret`` and ``handshake`` are what was proved, if there are keys."""

    grants: Grants
    replaced: Peer | None = None
    event: str = ""
    handshake: Handshake | None = None
    secret: bytes = b""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with a peer that is here: from where it was, or from the start if it has not heard
    that it was taken in."""

    peer: Peer
    from_start: bool
    handshake: Handshake | None = None
    secret: bytes = b""


@dataclass(slots=True)
class _Connection:
    certificate: str | None
    close_s: float = inf
    nonce: bytes = field(default_factory=new_nonce)
    num_frames: int = 0
    refused: bool = False


class Joining:
    """The door of the hub."""

    def __init__(self, keyring: Keyring | None) -> None:
        self._keyring = keyring
        self._connections: dict[int, _Connection] = {}
        self._strangers: dict[int, _Connection] = {}  # of these, who has not joined; oldest first

    def opened(self, connection: int, certificate: str | None, now: float) -> list[int]:
        """A connection is there; ``certificate`` is the name in that of its other end, if TLS has
        asked for one. Returns the connections that have to go for it."""
        if connection not in self._connections:
            made = _Connection(certificate, now + JOIN_S)
            self._connections[connection] = self._strangers[connection] = made
        too_many = len(self._strangers) - MAX_STRANGERS
        return list(self._strangers)[:too_many] if too_many > 0 else []

    def joined(self, connection: int) -> None:
        """A connection is a peer's from here on."""
        self._strangers.pop(connection, None)

    def parted(self, connection: int, now: float) -> None:
        """A connection is nobody's any more: it has to join again."""
        there = self._connections.get(connection)
        if there is not None:
            there.close_s, there.num_frames = now + JOIN_S, 0
            self._strangers[connection] = there

    def closed(self, connection: int) -> None:
        """A connection is gone."""
        self._connections.pop(connection, None)
        self._strangers.pop(connection, None)

    def due(self, now: float) -> list[int]:
        """The connections whose time is over."""
        return [c for c, stranger in self._strangers.items() if now >= stranger.close_s]

    def next_due(self) -> float:
        """When ``due`` has to be asked next."""
        return min((stranger.close_s for stranger in self._strangers.values()), default=inf)

    def hears(self, connection: int) -> bool:
        """Whether to look at another frame of a connection that has not joined."""
        stranger = self._strangers.get(connection)
        return stranger is None or not stranger.refused

    def has_said_enough(self, connection: int) -> bool:
        """Count a frame; whether there were too many for one that means to join."""
        stranger = self._strangers.get(connection)
        if stranger is None:
            return False
        stranger.num_frames += 1
        return stranger.num_frames > MAX_UNKNOWN_FRAMES

    def refused(self, connection: int, now: float) -> None:
        """A refusal was sent over a connection."""
        there = self._connections.get(connection)
        if there is not None:
            there.refused = True
            there.close_s = min(there.close_s, now + REFUSED_S)
            self._strangers[connection] = there

    def decide(
        self, connection: int, hello: Hello, peers: Peers, now: float
    ) -> Challenge | Refused | Admit | Resume:
        """What becomes of a hello."""
        if hello.version != LINK_VERSION:
            return Refused(
                f"speaks version {hello.version} of the link, this hub speaks {LINK_VERSION}"
            )
        for what, text in (("name", hello.name), ("session", hello.session)):
            if not 0 < len(text) <= MAX_NAME:
                return Refused(f"{what} {text[:40]!r}: expected 1 to {MAX_NAME} letters")
        grants, secret, handshake = EVERYTHING, b"", None
        if self._keyring is not None:
            # One nonce until it is answered: a hello that was said twice is challenged twice, and
            # the first answer counts. No other does, so nobody can say it again for its sender. An
            # answer to another nonce is stale, and proves and refutes nothing.
            there = self._connections[connection]
            nonce = there.nonce
            if not hello.proof or hello.answers != nonce:
                return Challenge(nonce)
            there.nonce = new_nonce()
            handshake = Handshake(hello.nonce, nonce, hello.key, hello.session, hello.name)
            found = self._keyring.check(handshake, hello.proof, hello.hub, hello.received)
            if found is None or len(hello.nonce) != NONCE_BYTES:
                return Refused(f"key {hello.key[:MAX_NAME]!r} is not valid here")
            grants, secret = found
            certificate = there.certificate
            if certificate is not None and certificate != hello.key:
                return Refused(
                    f"key {hello.key[:MAX_NAME]!r} came with a certificate of "
                    f"{certificate[:MAX_NAME]!r}, expected one with the key's name as its "
                    "common name"
                )
        peer = peers.by_session(grants, hello.session)
        if peer is not None:
            if peer.name != hello.name:
                return Refused("the session is another's")
            if hello.hub == peer.stay and peer.link.can_resume(hello.received):
                return Resume(peer, False, handshake, secret)
            if hello.hub != peer.stay and peer.link.number == peer.link.received == 0:
                return Resume(peer, True, handshake, secret)
            return Admit(grants, peer, "peer.astray", handshake, secret)
        holder = peers.by_name(grants, hello.name)
        if holder is None:
            if peers.count(grants) >= grants.max_peers:
                return Refused(
                    f"{grants.max_peers} peers with this key are here already", final=False
                )
            return Admit(grants, handshake=handshake, secret=secret)
        if holder.connection is not None and not holder.link.lost(now):
            return Refused(f"the name {hello.name!r} is in use on this bus", final=False)
        return Admit(grants, holder, "peer.replaced", handshake, secret)
