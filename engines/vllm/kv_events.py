"""vLLM's KV events: what its publisher sends, as changes of residency, and whether any are missing.

A publisher sends *batches*, numbered from 0 since its server began, and keeps the last of them to
be asked for again. ``EventReader`` owns the form of frames and events, ``KvFollower`` the order and
what the engine holds by all that was heard. Neither does I/O: who drives them hands in frames, and
asks the replay endpoint where ``wants`` says so. Neither knows sockets, HTTP or the bus.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from hear.blocks import pack
from hear.engines.residents import Residents
from hear.engines.vllm.hashing import SCHEMES, low64, prefix_hashes
from hear.errors import EngineError, RemoteProtocolError
from hear.messages import BlockChange, BlocksCleared, BlocksRemoved, BlocksStored

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
_SEQ_BYTES: Final = 8
_MAX_REASONS: Final = 64
_MEDIA: Final = {None: "gpu", "GPU": "gpu", "CPU": "cpu", "STORAGE": "disk"}
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
    ts: float
    events: list[msgspec.Raw]


_batches = msgspec.msgpack.Decoder(_Batch)
_maps = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_arrays = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_tokens = msgspec.msgpack.Decoder(list[int])
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Batch(NamedTuple):
    """One batch of events: its number, the server's time, and what it says of residency.

    ``first`` is a first block of some prompt in it, by which a hash scheme can be told.
    """

    seq: int
    time_s: float
    changes: list[BlockChange]
    first: "FirstBlock | None" = None


class FirstBlock(NamedTuple):
    """The first block of a prompt: HEAR's hash of it, and its tokens."""

    block_hash: int
    token_ids: list[int]

    def scheme(self) -> str:
        """The scheme by which the server hashed it; empty if none of those known here."""
        for name in SCHEMES:
            if prefix_hashes(self.token_ids, len(self.token_ids), scheme=name)[0] == (
                self.block_hash
            ):
                return name
        return ""


def _name_of(event: msgspec.Raw) -> str:
    """The type of an event that is none of those known here.

    Raises:
        RemoteProtocolError: it is of no type, or of a known one that cannot be read.
    """
    try:
        decoded = msgspec.msgpack.decode(event)
    except (*_UNREADABLE, ValueError) as error:
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
        except _UNREADABLE as error:
            raise RemoteProtocolError(f"a batch of KV events: {error}") from error
        changes: list[BlockChange] = []
        first = None
        for event in batch.events:
            read = self._event(event)
            if read is None:
                continue
            changes.append(read[0])
            first = first or read[1]
        return Batch(seq, batch.ts, changes, first)

    def _event(self, raw: msgspec.Raw) -> tuple[BlockChange, FirstBlock | None] | None:
        event: _Stored | _Removed | _Cleared
        try:
            event = (_maps if _is_map(raw) else _arrays).decode(raw)
        except _UNREADABLE:
            self._leave_out(f"type {_name_of(raw):.40}")
            return None
        if isinstance(event, _Cleared):
            # Each pool of blocks says it of itself, and the first tier's alone says it at all.
            return BlocksCleared(tier="gpu"), None
        if (why := self._useless(event)) is not None:
            self._leave_out(why)
            return None
        tier = "remote" if event.locality == "REMOTE" else _MEDIA[event.medium]
        hashes = [low64(block) for block in event.block_hashes]
        if isinstance(event, _Removed):
            return BlocksRemoved(tier=tier, prefix_hashes=pack(hashes)), None
        parent = event.parent_block_hash
        stored = BlocksStored(
            tier=tier,
            parent=None if parent is None else low64(parent),
            prefix_hashes=pack(hashes),
        )
        return stored, self._first(event, hashes) if parent is None else None

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

    def _first(self, event: _Stored, hashes: Sequence[int]) -> FirstBlock | None:
        try:
            extra = msgspec.msgpack.decode(event.extra_keys)
            if not hashes or (extra and extra[0]):
                return None  # a salt, or a picture: it is hashed with more than its tokens
            tokens = _tokens.decode(event.token_ids)[: self._block_size]
        except (*_UNREADABLE, TypeError, KeyError):
            return None
        return FirstBlock(hashes[0], tokens) if len(tokens) == self._block_size else None


@dataclass(slots=True)
class Heard:
    """What was made of some messages: changes of residency, in order.

    ``anew``: it was lost sight of what the engine holds, or found again, so that changes alone do
    not tell what it is now.
    """

    changes: list[BlockChange] = field(default_factory=list)
    anew: bool = False


class KvFollower:
    """Follows the batches of one server from its first to its last, and keeps what it holds.

    ``known`` tells whether ``residents`` are all that the engine holds; else they are what is known
    of it. ``next_seq`` is the number of the batch that comes next, None before anything was heard;
    ``wants`` the one from which batches are to be asked for again, if any are.
    ``scheme`` is how the server hashes blocks, if that could be told (empty: by none known here).
    """

    def __init__(
        self, block_size: int, *, tiers: Iterable[str] = ("gpu",), served: bool = False
    ) -> None:
        """Follow a server.

        Args:
            tiers: those that the engine has, as far as is known beforehand.
            served: whether it has served requests: if so, that it keeps no batches does not mean
                that there were none.
        """
        self.reader = EventReader(block_size)
        self.residents = Residents()
        self.known = False
        self.wants: int | None = 0
        self.scheme: str | None = None
        self.duplicates = 0
        self.gaps = 0
        self.unclosed = 0
        self._tiers = set(tiers)
        self._served = served
        self.next_seq: int | None = None
        self._last_s = 0.0
        self._waiting: Batch | None = None
        self._keeps_batches = False

    def live(self, frames: Sequence[bytes]) -> Heard:
        """Take over a message of the publisher. ``wants`` may be set afterwards.

        Raises:
            EngineError: the server has begun anew.
        """
        heard = Heard()
        try:
            batch = self.reader.read(frames)
        except RemoteProtocolError:
            self.reader.left_out["unreadable"] += 1
            number = number_of(frames)
            if number is not None and number == self.next_seq:
                self._lose(heard)  # whatever it said; of any other the numbers will tell
                self.next_seq = number + 1
            return heard
        if batch is None:
            return heard
        if self.next_seq is None:
            self._begin(batch.seq, heard)
        assert self.next_seq is not None
        if batch.seq > self.next_seq:
            self.gaps += 1
            self.wants = max(self.next_seq - 1, 0)
            self._waiting = batch
        else:
            self._take(batch, heard)
        return heard

    def check(self) -> None:
        """Ask whether anything was missed since the last batch, and if it is the same server."""
        if self.wants is None:
            self.wants = max((self.next_seq or 0) - 1, 0)

    def replayed(self, messages: Iterable[Sequence[bytes]] | None) -> Heard:
        """Take over what was asked for from ``wants`` on; None if nobody answers.

        Raises:
            EngineError: the server has begun anew.
        """
        heard = Heard()
        first, self.wants = self.wants, None
        waiting, self._waiting = self._waiting, None
        answered = messages is not None
        batches = self._readable(messages or (), heard)
        if self.next_seq is None:
            if batches or (answered and not self._served):  # where there were none, 0 comes next
                self._begin(batches[0].seq if batches else 0, heard)
        elif answered and first is not None and self.next_seq > 0:
            self._recognise(batches)
        self._keeps_batches = self._keeps_batches or bool(batches)
        for batch in batches:
            assert self.next_seq is not None
            if batch.seq >= self.next_seq:
                self._take(batch, heard)
        if waiting is not None:
            self._take(waiting, heard, again=True)
        return heard

    def _readable(self, messages: Iterable[Sequence[bytes]], heard: Heard) -> list[Batch]:
        batches = []
        for frames in messages:
            try:
                batch = self.reader.read(frames)
            except RemoteProtocolError:
                self.reader.left_out["unreadable"] += 1
                continue  # its number will be missed
            if batch is not None:
                batches.append(batch)
        return batches

    def _recognise(self, batches: Sequence[Batch]) -> None:
        """See by the batch that was heard last, and asked for again, that this is its server."""
        assert self.next_seq is not None
        last = self.next_seq - 1
        if not batches:
            other = self._keeps_batches
        else:
            same = next((batch for batch in batches if batch.seq == last), None)
            other = batches[0].seq <= last and (same is None or same.time_s != self._last_s)
        if other:
            raise EngineError(f"the server has begun anew: its batch {last} is not the one heard")

    def _begin(self, seq: int, heard: Heard) -> None:
        self.next_seq = seq
        self.known = seq == 0  # nothing was held before the first
        heard.anew = True

    def _take(self, batch: Batch, heard: Heard, *, again: bool = False) -> None:
        assert self.next_seq is not None
        if batch.seq < self.next_seq:
            if batch.time_s > self._last_s:
                raise EngineError(
                    f"the server has begun anew: batch {batch.seq} came, expected {self.next_seq}"
                )
            self.duplicates += not again
            return
        if batch.seq > self.next_seq:
            self._lose(heard)
        self.next_seq = batch.seq + 1
        self._last_s = batch.time_s
        if batch.first is not None and self.scheme is None:
            self.scheme = batch.first.scheme()
        for change in batch.changes:
            if not isinstance(change, BlocksCleared):
                self._tiers.add(change.tier)
            self.residents.apply(change)
            if isinstance(change, BlocksCleared) and not self.known and self._tiers == {"gpu"}:
                self.known = heard.anew = True
        heard.changes += batch.changes

    def _lose(self, heard: Heard) -> None:
        """Something was missed for good: of what is held it is known only what comes from here."""
        self.unclosed += 1
        self.known = False
        self.residents = Residents()
        heard.anew = True
