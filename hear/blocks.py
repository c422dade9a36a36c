"""Prefix block hashes: how a prompt is named by the KV blocks that it needs.

A *prefix block hash* stands for one full block of tokens and for all the blocks before it, so
equal hashes mean equal prefixes. HEAR handles them as unsigned 64-bit integers and carries a
run of them packed, 8 bytes each, little-endian, because a tap or a filter that never looks
inside then pays nothing for a long prompt.

This module knows nothing of messages, tiers or engines.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from hear.errors import RemoteProtocolError

HASH_BYTES = 8
HASH_SCHEME = "hear-blake2b-64"
"""The name of the scheme by which ``chain`` hashes (docs/protocol.md, section 2)."""
_LITTLE = sys.byteorder == "little"


def pack(hashes: Iterable[int]) -> bytes:
    """Pack block hashes (each 0 <= h < 2**64) into ``8 * len`` bytes for the wire."""
    packed = array("Q", hashes)
    if not _LITTLE:
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> Sequence[int]:
    """View packed block hashes as a read-only sequence of integers, without copying them.

    Raises:
        RemoteProtocolError: the length is not a multiple of 8 bytes.
    """
    if len(packed) % HASH_BYTES:
        raise RemoteProtocolError(
            f"packed block hashes: got {len(packed)} bytes, expected a multiple of {HASH_BYTES}"
        )
    if _LITTLE:
        return memoryview(packed).cast("Q")
    hashes = array("Q", packed)
    hashes.byteswap()
    return hashes


def unpack_prompt(packed: bytes) -> Sequence[int]:
    """As ``unpack``, of what has to be the blocks of one prompt.

    Raises:
        RemoteProtocolError: the length is wrong, or a block is named twice.
    """
    hashes = unpack(packed)
    if len(set(hashes)) < len(hashes):
        raise RemoteProtocolError("prefix_hashes names a block twice")
    return hashes


def chain(parent: int | None, content: bytes, salt: bytes = b"") -> int:
    """Hash one block from its parent's hash (None for the first block) and its content.

    ``salt`` (at most 64 bytes) keeps the hashes of one tenant apart from those of another.
    """
    digest = blake2b(digest_size=HASH_BYTES, key=salt)
    if parent is not None:
        digest.update(parent.to_bytes(HASH_BYTES, "little"))
    digest.update(content)
    return int.from_bytes(digest.digest(), "little")


def chain_all(contents: Iterable[bytes], salt: bytes = b"") -> list[int]:
    """Hash a whole prompt, block after block."""
    hashes: list[int] = []
    parent: int | None = None
    for content in contents:
        parent = chain(parent, content, salt)
        hashes.append(parent)
    return hashes


def hash_tokens(token_ids: Sequence[int], block_size: int, *, tenant_salt: str = "") -> list[int]:
    """Hash the full blocks of a prompt, by the ids of its tokens (scheme hear-blake2b-64)."""
    packed = array("I", token_ids)
    if not _LITTLE:
        packed.byteswap()
    data = packed.tobytes()
    size = block_size * packed.itemsize
    contents = (data[at : at + size] for at in range(0, len(data) - size + 1, size))
    return chain_all(contents, tenant_salt.encode())
