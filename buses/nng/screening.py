"""What may pass: runs that are well formed, and that the key of their sender grants.

Owns the rules. What is turned away is counted, and its sender told once.
"""

from collections.abc import Callable
from typing import Final

from hear.buses.mailbox import STEM_TOKENS
from hear.buses.nng.frames import (
    FIELD_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_SMALL_MESSAGE_BYTES,
    MAX_STEM,
    Denied,
    Run,
)
from hear.buses.nng.peers import Peer
from hear.buses.nng.remembered import remember
from hear.codec import check_unambiguous, decode
from hear.errors import LocalProtocolError, RemoteProtocolError
from hear.subjects import Pattern, stem_of

CATEGORIES: Final = ("intent", "control", "state", "outcome")
_MAX_DENIALS: Final = 64
_BYTES_A_UNIT: Final = 20  # since each byte of a message may be an element
_TAKEN_APART: Final = 2


class Screening:
    """Lets through what may pass."""

    def __init__(self, told: Callable[[Peer, str], None]) -> None:
        """``told`` is called with each peer that is told that something was refused, and why."""
        self._told = told
        self._categories: dict[str, str] = {}
        self.refused = 0
        self._spent = 0

    def spent(self) -> int:
        """Units that looking into messages took since this was asked last, about."""
        spent, self._spent = self._spent, 0
        return spent

    def category(self, stem: str) -> str:
        """The category of a stem.

        Raises:
            RemoteProtocolError: it is no stem of a subject.
        """
        category = self._categories.get(stem)
        return self._parse(stem) if category is None else category

    def run(self, peer: Peer, run: Run) -> Run:
        """The messages of a run that may pass.

        Raises:
            RemoteProtocolError: it is not a run that any peer may send.
        """
        stem = run.stem
        if run.reliable is (self.category(stem) == "state"):
            raise RemoteProtocolError(f"a run on {stem[:80]!r} in the wrong class")
        if not self.may_publish(peer, stem):
            return Run(stem, run.reliable, [])
        messages = self.messages(peer, stem, run.messages)
        return run if messages is run.messages else Run(stem, run.reliable, messages)

    def messages(self, peer: Peer, stem: str, messages: list[bytes]) -> list[bytes]:
        """The messages of one stem that may pass; the stem itself is granted."""
        if sum(map(len, messages)) + FIELD_BYTES * len(messages) > MAX_MESSAGE_BYTES:
            # Many small ones are cut too, since they travel on as one and have to fit in a frame.
            if len(messages) > 1:
                raise RemoteProtocolError(
                    f"a run on {stem[:80]!r} of more than {MAX_MESSAGE_BYTES} bytes"
                )
            if len(messages[0]) > MAX_MESSAGE_BYTES:
                self._deny_large(peer, stem, MAX_MESSAGE_BYTES)
                return []
        if peer.grants.checks_sources:
            return [m for m in messages if self._is_own(peer, stem, m)]
        return messages

    def may_publish(self, peer: Peer, stem: str) -> bool:
        """Whether a peer may publish on a stem; it is told if not."""
        may = peer.grants.may_publish(stem)
        if not may:
            self.deny(peer, f"the key does not grant to publish on {stem[:256]}")
        return may

    def deny(self, peer: Peer, reason: str) -> None:
        """Count what was turned away, and tell its sender, once for each reason."""
        self.refused += 1
        if reason not in peer.denials and len(peer.denials) < _MAX_DENIALS:
            peer.denials.add(reason)
            peer.backlog.put(Denied(reason))
            self._told(peer, reason)

    def _deny_large(self, peer: Peer, stem: str, max_bytes: int) -> None:
        self.deny(peer, f"a message on {stem[:256]} is larger than {max_bytes} bytes")

    def _is_own(self, peer: Peer, stem: str, message: bytes) -> bool:
        """Whether a message belongs to its run, and speaks under a name that is granted."""
        if len(message) > MAX_SMALL_MESSAGE_BYTES and self.category(stem) != "state":
            self._deny_large(peer, stem, MAX_SMALL_MESSAGE_BYTES)
            return False
        try:
            envelope = decode(message)
            taken_apart = check_unambiguous(message)
            self._spent += len(message) // _BYTES_A_UNIT + _TAKEN_APART * taken_apart
        except RemoteProtocolError as error:
            self._spent += len(message)  # more it can't have been
            self.deny(peer, f"a message on {stem[:256]} cannot be passed on: {error!s:.200}")
            return False
        if stem_of(envelope) != stem:
            self.deny(
                peer, f"a message of {stem_of(envelope)[:256]} was sent as one of {stem[:256]}"
            )
            return False
        if not peer.grants.may_be(envelope.source):
            self.deny(peer, f"the key does not grant to speak as {envelope.source[:256]!r}")
            return False
        return True

    def _parse(self, stem: str) -> str:
        category, *more = stem.split(".", STEM_TOKENS)
        if (
            category not in CATEGORIES
            or len(more) != STEM_TOKENS - 1
            or len(stem) > MAX_STEM
            or not {"*", ">"}.isdisjoint(more)
        ):
            raise RemoteProtocolError(f"{stem[:80]!r} is no stem of a subject")
        try:
            Pattern(stem)
        except LocalProtocolError as error:
            raise RemoteProtocolError(f"{stem[:80]!r} is no stem of a subject") from error
        return remember(self._categories, stem, stem, category)
