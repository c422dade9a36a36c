"""Seals: what travels over a connection that was joined with a key comes from who holds the key.

Each end seals what it sends with a key of its own, which both derive from the secret and from the
two numbers of this handshake (``access.Handshake``). So what somebody on the way changes, adds,
repeats, or carries over from another connection, is found and dropped. Nothing is hidden by it.

A sealed frame is one byte that begins no frame, a count, a tag over count and frame, and the frame.
Frames may be lost on the way, so counts may skip, and only grow.
"""

import hmac
from hashlib import blake2b
from typing import Final

_MARK: Final = b"\xc1"  # msgpack never uses it
_COUNT_BYTES: Final = 8
_TAG_BYTES: Final = 16
_HEAD_BYTES: Final = 1 + _COUNT_BYTES + _TAG_BYTES


class Seals:
    """One end's two keys, and how far it has counted."""

    def __init__(self, own_key: bytes, other_key: bytes) -> None:
        self._own_key, self._other_key = own_key, other_key
        self._sent = 0
        self._received = 0

    def seal(self, data: bytes) -> bytes:
        """Seal a frame. The same frame sent again is sealed anew."""
        self._sent += 1
        count = self._sent.to_bytes(_COUNT_BYTES, "big")
        return b"".join((_MARK, count, _tag(self._own_key, count, data), data))

    def open(self, data: bytes) -> bytes | None:
        """The frame, if the other end has sealed it and it has not come before."""
        if data[:1] != _MARK or len(data) < _HEAD_BYTES:
            return None
        count = data[1 : 1 + _COUNT_BYTES]
        frame = data[_HEAD_BYTES:]
        tag = data[1 + _COUNT_BYTES : _HEAD_BYTES]
        if not hmac.compare_digest(tag, _tag(self._other_key, count, frame)):
            return None
        number = int.from_bytes(count, "big")
        if number <= self._received:
            return None
        self._received = number
        return frame


def is_sealed(data: bytes) -> bool:
    """Whether this is a sealed frame, by whomever."""
    return data[:1] == _MARK


def _tag(key: bytes, count: bytes, frame: bytes) -> bytes:
    digest = blake2b(count, key=key, digest_size=_TAG_BYTES)
    digest.update(frame)
    return digest.digest()
