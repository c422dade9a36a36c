"""What may pass: runs that are well formed, and that the key of their sender grants.

Owns the rules. What is turned away is counted, and its sender told once.
"""

from collections.abc import Callable
from typing import Final

from hear.buses.nng.frames import MAX_MESSAGE_BYTES, Denied, Run
from hear.buses.nng.peers import Peer
from hear.codec import decode
from hear.errors import RemoteProtocolError
from hear.subjects import stem_of

CATEGORIES: Final = ("intent", "control", "state", "outcome")
_MAX_DENIALS: Final = 64


class Screening:
    """Lets through what may pass."""

    def __init__(self, told: Callable[[Peer, str], None]) -> None:
        """``told`` is called with each peer that is told that something was refused, and why."""
        self._told = told
        self.refused = 0

    def run(self, peer: Peer, run: Run) -> Run:
        """The messages of a run that may pass.

        Raises:
            RemoteProtocolError: it is not a run that any peer may send.
        """
        stem = run.stem
        category = stem.partition(".")[0]
        if category not in CATEGORIES or stem.count(".") != 3:
            raise RemoteProtocolError(f"a run on {stem[:80]!r}, which is no stem of a subject")
        if run.reliable is (category == "state"):
            raise RemoteProtocolError(f"a run on {stem[:80]!r} in the wrong class")
        if not self.may_publish(peer, stem):
            return Run(stem, run.reliable, [])
        messages = run.messages
        if any(len(message) > MAX_MESSAGE_BYTES for message in messages):
            self.deny(peer, f"a message on {stem} is larger than {MAX_MESSAGE_BYTES} bytes")
            messages = [m for m in messages if len(m) <= MAX_MESSAGE_BYTES]
        if peer.grants.checks_sources:
            messages = [m for m in messages if self._is_own(peer, stem, m)]
        return run if messages is run.messages else Run(stem, run.reliable, messages)

    def may_publish(self, peer: Peer, stem: str) -> bool:
        """Whether a peer may publish on a stem; it is told if not."""
        may = peer.grants.may_publish(stem)
        if not may:
            self.deny(peer, f"the key does not grant to publish on {stem}")
        return may

    def deny(self, peer: Peer, reason: str) -> None:
        """Count what was turned away, and tell its sender, once for each reason."""
        self.refused += 1
        if reason not in peer.denials and len(peer.denials) < _MAX_DENIALS:
            peer.denials.add(reason)
            peer.backlog.put(Denied(reason))
            self._told(peer, reason)

    def _is_own(self, peer: Peer, stem: str, message: bytes) -> bool:
        """Whether a message belongs to its run, and speaks under a name that is granted."""
        envelope = decode(message)
        if stem_of(envelope) != stem:
            self.deny(peer, f"a message of {stem_of(envelope)} was sent as one of {stem}")
            return False
        if not peer.grants.may_be(envelope.source):
            self.deny(peer, f"the key does not grant to speak as {envelope.source!r}")
            return False
        return True
