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


@dataclass(frozen=True, slots=True)
class Admit:
    """Take it in as new, in place of ``replaced``, which is gone for the reason ``event``."""

    grants: Grants
    replaced: Peer | None = None
    event: str = ""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with a peer that was here before."""

    peer: Peer


class Joining:
    """The door of the hub."""

    def __init__(self, keyring: Keyring | None) -> None:
        self._keyring = keyring
        self._nonces: dict[int, bytes] = {}

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
        if not hello.name or len(hello.name) > MAX_NAME or not hello.session:
            return Refused(f"name {hello.name[:40]!r}: expected 1 to {MAX_NAME} letters")
        grants = EVERYTHING
        if self._keyring is not None:
            nonce = self._nonces.pop(connection, None)
            if nonce is None or not hello.proof:
                self._nonces[connection] = nonce = new_nonce()
                return Challenge(nonce)
            found = self._keyring.check(hello.key, nonce, hello.session, hello.name, hello.proof)
            if found is None:
                return Refused(f"key {hello.key!r} is not valid here")
            grants = found
        peer = peers.by_session(hello.session)
        if peer is not None:
            if peer.name != hello.name or peer.grants is not grants:
                return Refused("the session is another's")
            if peer.link.number >= hello.received:
                return Resume(peer)
            return Admit(grants, peer, "peer.astray")  # it speaks of what was never sent
        holder = peers.by_name(hello.name)
        if holder is None:
            return Admit(grants)
        if holder.connection is not None and not holder.link.lost(now):
            return Refused(f"the name {hello.name!r} is in use on this bus", final=False)
        return Admit(grants, holder, "peer.replaced")
