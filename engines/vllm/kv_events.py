"""vLLM's KV events, as its publisher sends them: the form of frames, batches and events. No I/O.

A publisher sends *batches*, numbered from 0 since its server began. What order they come in, and
whether any are missing, is ``kv_follower``'s affair; what they add up to, that of ``holdings``.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from hear.codec import UNREADABLE
from hear.engines.vllm.hashing import SCHEMES, low64, prefix_hashes
from hear.engines.vllm.holdings import CPU, GPU, Cleared, Event, Removed, Stored, salts_among
from hear.errors import RemoteProtocolError
from hear.messages.envelope import Time

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
_SEQ_BYTES: Final = 8
_MAX_REASONS: Final = 64
_MEDIA: Final = {None: GPU, "GPU": GPU, "CPU": CPU, "STORAGE": "disk"}
"""Tiers by vLLM's medium, which its first versions did not name."""

# Fields stand in the order in which vLLM's array form has them; the map form has their names. What
# is not needed for each event stays raw: the tokens are most of it.
_Hash = bytes | int


class _Stored(msgspec.Struct, tag="BlockStored", tag_field="type", gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = msgspec.Raw(b"\xc0")
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", gc=False):
    pass


class _StoredArray(_Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: Time
    events: list[msgspec.Raw]


_batches = msgspec.msgpack.Decoder(_Batch)
_maps = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_arrays = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_tokens = msgspec.msgpack.Decoder(list[int])
_keys = msgspec.msgpack.Decoder(list[list[Any] | None] | None)


class Batch(NamedTuple):
    """One batch: its number, the server's time, and the events that are of use.

    ``first`` is a first block of some prompt in it, by which a hash scheme can be told.
    """

    seq: int
    time_s: float
    events: list[Event]
    first: "FirstBlock | None" = None


class FirstBlock(NamedTuple):
    """The first block of a prompt: HEAR's hash of it, its tokens, and the salt of the prompt."""

    block_hash: int
    token_ids: list[int]
    salt: str | None

    def scheme(self) -> str:
        """The scheme by which the server hashed it; empty if none of those known here."""
        size = len(self.token_ids)
        for name in SCHEMES:
            made = prefix_hashes(self.token_ids, size, scheme=name, cache_salt=self.salt)
            if made[0] == self.block_hash:
                return name
        return ""


def _name_of(event: msgspec.Raw) -> str:
    """The type of an event that is none of those known here.

    Raises:
        RemoteProtocolError: it is of no type, or of a known one that cannot be read.
    """
    try:
        decoded = msgspec.msgpack.decode(event)
    except (*UNREADABLE, ValueError) as error:
        raise RemoteProtocolError(f"a KV event that cannot be read: {error}") from error
    name = None
    if isinstance(decoded, dict):
        name = decoded.get("type")
    elif isinstance(decoded, list) and decoded:
        name = decoded[0]
    if not isinstance(name, str) or name in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        raise RemoteProtocolError(f"a KV event that cannot be read: {name!r:.80}")
    return name


def _is_map(raw: msgspec.Raw) -> bool:
    head = memoryview(raw)[0]
    return 0x80 <= head <= 0x8F or head in (0xDE, 0xDF)


def number_of(frames: Sequence[bytes]) -> int | None:
    """The number of a message; None if it has none, so that it is not vLLM's."""
    if len(frames) < 2 or len(frames[-2]) != _SEQ_BYTES:
        return None
    return int.from_bytes(frames[-2], "big")


class EventReader:
    """Reads frames. ``left_out`` counts events that HEAR cannot use, by what stands against it."""

    def __init__(self, block_size: int) -> None:
        """``block_size`` is the engine's, in tokens; a block of another size is a part of one."""
        self._block_size = block_size
        self.left_out: Counter[str] = Counter()

    def read(self, frames: Sequence[bytes]) -> Batch | None:
        """Read one message, live or replayed; None is the end of a replay.

        Number and payload are the last two frames: versions differ in what stands before them.

        Raises:
            RemoteProtocolError: it is none of vLLM's, or cannot be read.
        """
        if (seq := number_of(frames)) is None:
            sizes = [len(frame) for frame in frames]
            raise RemoteProtocolError(
                f"KV events: frames of {sizes} bytes, expected number and payload as the last two"
            )
        number, payload = frames[-2:]
        if number == END_OF_REPLAY:
            return None
        try:
            batch = _batches.decode(payload)
        except UNREADABLE as error:
            raise RemoteProtocolError(f"a batch of KV events: {error}") from error
        events: list[Event] = []
        first = None
        for raw in batch.events:
            read = self._event(raw)
            if read is not None:
                events.append(read[0])
                first = first or read[1]
        return Batch(seq, batch.ts, events, first)

    def _event(self, raw: msgspec.Raw) -> tuple[Event, FirstBlock | None] | None:
        event: _Stored | _Removed | _Cleared
        try:
            event = (_maps if _is_map(raw) else _arrays).decode(raw)
        except UNREADABLE:
            self._leave_out(f"type {_name_of(raw):.40}")
            return None
        if isinstance(event, _Cleared):
            # Each pool of blocks says it of itself, and the first tier's alone says it at all.
            return Cleared(GPU), None
        if (why := self._useless(event)) is not None:
            self._leave_out(why)
            return None
        tier = "remote" if event.locality == "REMOTE" else _MEDIA[event.medium]
        hashes = [low64(block) for block in event.block_hashes]
        if isinstance(event, _Removed):
            return Removed(tier, hashes), None
        if event.parent_block_hash is not None:
            return Stored(tier, hashes, low64(event.parent_block_hash)), None
        keys = _keys_of(event)
        return Stored(tier, hashes, None, salts_among(keys)), self._first(event, hashes, keys)

    def _leave_out(self, why: str) -> None:
        known = why in self.left_out or len(self.left_out) < _MAX_REASONS
        self.left_out[why if known else "other"] += 1

    def _useless(self, event: _Stored | _Removed) -> str | None:
        if event.group_idx:
            return "group"  # layers of another kind; those of the first tell what is reused
        if event.medium not in _MEDIA:
            return f"medium {event.medium:.40}"
        if isinstance(event, _Stored):
            if event.lora_id is not None or event.lora_name is not None:
                return "lora"
            if event.block_size != self._block_size:
                return "partial"
        return None

    def _first(
        self, event: _Stored, hashes: Sequence[int], keys: Sequence[Any]
    ) -> FirstBlock | None:
        salt = None
        if keys and keys[0]:
            if len(keys[0]) > 1 or not isinstance(keys[0][0], str):
                return None  # it is hashed with a picture
            salt = keys[0][0]
        try:
            tokens = _tokens.decode(event.token_ids)[: self._block_size]
        except UNREADABLE:
            return None
        whole = len(tokens) == self._block_size and all(0 <= t < 1 << 32 for t in tokens)
        return FirstBlock(hashes[0], tokens, salt) if hashes and whole else None


def _keys_of(event: _Stored) -> list[Any]:
    """The extra keys of an event's blocks; none where they are not as they should be."""
    try:
        return _keys.decode(event.extra_keys) or []
    except UNREADABLE:
        return []
