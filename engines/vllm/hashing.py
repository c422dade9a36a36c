"""vLLM's prefix block hashes as HEAR's 64-bit ones, computed for a prompt without vLLM.

vLLM hashes a block from the hash of the block before it, its tokens, and what else tells it apart
(here: the salt of a cache that is kept for one tenant, on the first block alone). HEAR's hash is
the low 64 bits of that, which is also what KV events carry where the server runs with
``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES``. The chain begins with a hash of the *seed*, which is
``PYTHONHASHSEED`` of the server, or a word of vLLM's own where that is not set.

A *scheme* names both: ``vllm-<algorithm>-64`` with seed 0, as HEAR launches vLLM, and
``vllm-<algorithm>-64-unseeded`` as it runs by itself from 0.32 on. LoRA adapters, pictures and
prompt embeddings, which vLLM hashes too, are no part of it. This module knows nothing of events
or engines.
"""

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Final

from hear.errors import ConfigError

UNSEEDED: Final = "vllm-none-hash"
"""What vLLM takes for a seed where ``PYTHONHASHSEED`` is not set."""

_MASK: Final = (1 << 64) - 1

# CBOR's major types, RFC 8949, section 3.1.
_UNSIGNED, _BYTES, _TEXT, _ARRAY = 0x00, 0x40, 0x60, 0x80
_NULL: Final = b"\xf6"


def _head(major: int, value: int) -> bytes:
    """A major type with its argument in the fewest bytes, as the canonical form wants it."""
    if value < 24:
        return bytes((major | value,))
    for extra, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << 8 * size:
            return bytes((major | extra,)) + value.to_bytes(size, "big")
    raise ValueError(value)


_SMALL: Final = [_head(_UNSIGNED, value) for value in range(1 << 16)]
"""Most tokens of most vocabularies, made ready: hashing stands before a request is sent."""


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _head(_TEXT, len(encoded)) + encoded


def _cbor_block(parent: bytes, tokens: tuple[int, ...], salt: str | None) -> bytes:
    extra = _NULL
    if salt is not None:
        extra = b"\x81\x82" + _text("cache_salt") + _text(salt)
    body = b"".join([_SMALL[t] if t < 1 << 16 else b"\x1a" + t.to_bytes(4, "big") for t in tokens])
    return sha256(
        b"\x83" + _head(_BYTES, len(parent)) + parent + _head(_ARRAY, len(tokens)) + body + extra
    ).digest()


def _pickle_block(parent: bytes, tokens: tuple[int, ...], salt: str | None) -> bytes:
    extra = None if salt is None else (("cache_salt", salt),)
    return sha256(pickle.dumps((parent, tokens, extra), protocol=5)).digest()


_Block = Callable[[bytes, tuple[int, ...], str | None], bytes]
_ALGORITHMS: Final[dict[str, tuple[Callable[[str], bytes], _Block]]] = {
    "sha256": (lambda seed: sha256(pickle.dumps(seed, protocol=5)).digest(), _pickle_block),
    "sha256_cbor": (lambda seed: sha256(_text(seed)).digest(), _cbor_block),
}
"""By vLLM's name: how the seed is hashed, and how a block is."""

SCHEMES: Final = {
    f"vllm-{algorithm}-64{suffix}": (algorithm, seed)
    for algorithm in _ALGORITHMS
    for suffix, seed in (("", "0"), ("-unseeded", UNSEEDED))
}
"""All schemes that can be computed here, with the algorithm and the seed of each."""


def scheme_of(algorithm: str, seed: str | None = "0") -> str | None:
    """The scheme of a server that hashes so; None if it is none that can be computed elsewhere.

    ``algorithm`` is its ``--prefix-caching-hash-algo``, ``seed`` its ``PYTHONHASHSEED`` (None: not
    set).
    """
    meant = (algorithm, UNSEEDED if seed is None else seed)
    return next((name for name, made_of in SCHEMES.items() if made_of == meant), None)


def low64(block_hash: bytes | int) -> int:
    """HEAR's hash of a block from vLLM's, in either of the forms that KV events carry."""
    if isinstance(block_hash, bytes):
        block_hash = int.from_bytes(block_hash[-8:], "big")
    return block_hash & _MASK


def prefix_hashes(
    token_ids: Sequence[int],
    block_size: int,
    *,
    scheme: str = "vllm-sha256_cbor-64",
    seed: str | None = None,
    cache_salt: str | None = None,
) -> list[int]:
    """Hash the full blocks of a prompt, from its start.

    Args:
        token_ids: the prompt, each 0 <= id < 2**32.
        block_size: tokens in a block of the engine.
        scheme: the engine's ``hash_scheme``.
        seed: the server's ``PYTHONHASHSEED``, if it is another than the scheme says.
        cache_salt: what the request names as ``cache_salt``.

    Raises:
        ConfigError: the scheme is none of ``SCHEMES``, or the block size or a token is impossible.
    """
    if scheme not in SCHEMES:
        raise ConfigError(f"hash scheme {scheme!r}: expected one of {', '.join(SCHEMES)}")
    if block_size < 1:
        raise ConfigError(f"block size {block_size}: expected 1 or more tokens")
    for token in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token < 1 << 32:
            raise ConfigError(f"token {token}: expected 0 <= id < 2**32")
    algorithm, own_seed = SCHEMES[scheme]
    of_seed, of_block = _ALGORITHMS[algorithm]
    parent = of_seed(own_seed if seed is None else seed)
    salt = cache_salt or None
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = of_block(parent, tuple(token_ids[start : start + block_size]), salt)
        salt = None
        hashes.append(low64(parent))
    return hashes


def _scheme(
    name: str, token_ids: Sequence[int], block_size: int, *, tenant_salt: str = ""
) -> list[int]:
    return prefix_hashes(token_ids, block_size, scheme=name, cache_salt=tenant_salt)


# What the entry points of hear.hash_schemes name.
sha256_seeded = partial(_scheme, "vllm-sha256-64")
sha256_unseeded = partial(_scheme, "vllm-sha256-64-unseeded")
sha256_cbor_seeded = partial(_scheme, "vllm-sha256_cbor-64")
sha256_cbor_unseeded = partial(_scheme, "vllm-sha256_cbor-64-unseeded")
