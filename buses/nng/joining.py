"""What becomes of a hello: a challenge, a refusal, a place among the peers, or one's old place.

Owns the challenges that are open, and decides. It changes no peer and sends nothing.
"""

from dataclasses import dataclass
from typing import Final

from hear.buses.nng.access import EVERYTHING, Grants, Keyring, new_nonce
from hear.buses.nng.frames import LINK_VERSION, Challenge, Hello, Refused
from hear.buses.nng.peers import Peer, Peers

MAX_NAME: Final = 256
"""Longest name of a peer or a subscription, in letters."""

MAX_PEERS: Final = 1_024
"""Most peers of one key."""

_MAX_CHALLENGES: Final = 4_096


@dataclass(frozen=True, slots=True)
class Admit:
    """Take it in as new, in place of ``replaced``, which is gone for the reason ``event``."""

    grants: Grants
    replaced: Peer | None = None
    event: str = ""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with a peer that is here: from where it was, or from the start if it has not heard
    that it was taken in."""

    peer: Peer
    from_start: bool


class Joining:
    """The door of the hub."""

    def __init__(self, keyring: Keyring | None) -> None:
        self._keyring = keyring
        self._nonces: dict[int, bytes] = {}  # by connection, oldest first

    def closed(self, connection: int) -> None:
        """A connection is gone."""
        self._nonces.pop(connection, None)

    def decide(
        self, connection: int, hello: Hello, peers: Peers, now: float
    ) -> Challenge | Refused | Admit | Resume:
        """What becomes of a hello."""
        if hello.version != LINK_VERSION:
            return Refused(
                f"speaks version {hello.version} of the link, this hub speaks {LINK_VERSION}"
            )
        if not 0 < len(hello.name) <= MAX_NAME or not 0 < len(hello.session) <= MAX_NAME:
            return Refused(f"name {hello.name[:40]!r}: expected 1 to {MAX_NAME} letters")
        grants = EVERYTHING
        if self._keyring is not None:
            # One nonce for one connection: a hello that was said twice is challenged twice, and
            # both answers count. An answer to another is stale, and proves and refutes nothing.
            nonce = self._nonce(connection)
            if not hello.proof or hello.answers != nonce:
                return Challenge(nonce)
            found = self._keyring.check(hello.key, nonce, hello.session, hello.name, hello.proof)
            if found is None:
                return Refused(f"key {hello.key!r} is not valid here")
            grants = found
        peer = peers.by_session(hello.session)
        if peer is not None:
            if peer.name != hello.name or peer.grants is not grants:
                return Refused("the session is another's")
            if hello.hub == peer.stay and peer.link.can_resume(hello.received):
                return Resume(peer, from_start=False)
            if hello.hub != peer.stay and peer.link.number == peer.link.received == 0:
                return Resume(peer, from_start=True)
            return Admit(grants, peer, "peer.astray")
        holder = peers.by_name(grants, hello.name)
        if holder is None:
            if peers.count(grants) >= MAX_PEERS:
                return Refused(f"{MAX_PEERS} peers with this key are here already", final=False)
            return Admit(grants)
        if holder.connection is not None and not holder.link.lost(now):
            return Refused(f"the name {hello.name!r} is in use on this bus", final=False)
        return Admit(grants, holder, "peer.replaced")

    def _nonce(self, connection: int) -> bytes:
        nonce = self._nonces.get(connection)
        if nonce is None:
            if len(self._nonces) >= _MAX_CHALLENGES:
                del self._nonces[next(iter(self._nonces))]
            nonce = self._nonces[connection] = new_nonce()
        return nonce
