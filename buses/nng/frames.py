"""What travels between a client and the hub: frames, and the items in them.

Owns the bytes of the link. HEAR's messages are carried as the bytes that they are on the wire, in
*runs*: messages that follow each other on one stem. So the hub routes a run by its stem, and opens
no message. It must not know what becomes of an item.

The form is an array with a tag, and append-only: a field is added at the end, with a default.

A frame is small, since what a stranger can make a hub hold is a frame for each connection. An item
that is larger travels in *pieces*, one a frame (``split``, ``join``).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from hear.codec import UNREADABLE
from hear.errors import LocalProtocolError, RemoteProtocolError

LINK_VERSION: Final = 2
"""Version of the link, which is not that of the messages on it (docs/bus.md)."""

MAX_MESSAGE_BYTES: Final = 8 << 20
"""Largest message of HEAR that a bus carries."""

MAX_SMALL_MESSAGE_BYTES: Final = 1 << 20
"""Largest message of intent, control or outcome at a hub with keys. It looks at each byte of them,
and only engines, whose state may be larger, have as much to say."""

MAX_FRAME_BYTES: Final = 128 << 10
"""Largest frame, sealed; whoever sends a larger one is cut off."""

MAX_ITEM_BYTES: Final = MAX_MESSAGE_BYTES + (1 << 20)
"""Largest item, in pieces."""

MAX_STEM: Final = 4_096
"""Longest stem of a subject, in letters."""

FRAME_FILL_BYTES: Final = 64 << 10
"""A frame takes in what waits until it holds so much; an item that is larger travels in pieces."""

MAX_NAME: Final = 256
"""Longest name of a peer or a subscription, in letters."""

MAX_PATTERNS: Final = 256
"""Most patterns of one subscription or question."""

MAX_PATTERN_BYTES: Final = 32 << 10
"""Most bytes of all patterns of one subscription or question."""

MAX_WILL_BYTES: Final = 1 << 20
"""Most bytes of a will."""

MAX_WILL_RUNS: Final = 1_024
"""Most runs of a will, and most messages of them."""

MAX_ROWS: Final = 256
"""Most subscriptions that one report of a client tells of."""

NONCE_BYTES: Final = 32
"""Length of the numbers that each end makes for one proof."""


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Base of all that is on the link."""


# -- items, which are kept until the other end has taken them over ---------------------------------


class Run(_Part, frozen=True, tag="r"):
    """Messages that follow each other on one stem: their bytes, oldest first."""

    stem: str
    reliable: bool
    messages: list[bytes]


class Lost(_Part, frozen=True, tag="l"):
    """Something of these streams of state was dropped before it could be sent."""

    stems: list[str]


class Subscribe(_Part, frozen=True, tag="s"):
    """Client: send what the patterns match. ``resumed``: it was subscribed at an earlier hub."""

    subscription: int
    name: str
    patterns: list[str]
    resumed: bool = False


class Subscribed(_Part, frozen=True, tag="sd"):
    """Hub: from here on it comes; snapshots of ``streams`` first, and ``complete`` if none of what
    was said since the earlier hub is missing. Or it is ``refused``, with a reason."""

    subscription: int
    streams: list[str]
    complete: bool = True
    refused: str = ""


class Unsubscribe(_Part, frozen=True, tag="u"):
    """Client: that is enough."""

    subscription: int


class Provide(_Part, frozen=True, tag="p"):
    """Client: I answer for the snapshots of a stream. ``resumed``: I did so at an earlier hub, and
    what I said there may be lost."""

    stem: str
    resumed: bool = False


class Unprovide(_Part, frozen=True, tag="up"):
    """Client: I answer for the snapshots of a stream no more."""

    stem: str


class Fetch(_Part, frozen=True, tag="f"):
    """Client: send a snapshot of a stream to one of my subscriptions."""

    subscription: int
    stem: str


class Wanted(_Part, frozen=True, tag="w"):
    """Hub: a snapshot is wanted of a stream that you provide."""

    stem: str
    ticket: int


class Snapshot(_Part, frozen=True, tag="n"):
    """Client to hub: one part of the snapshot that ``ticket`` asked for."""

    stem: str
    ticket: int
    messages: list[bytes]
    last: bool


class SnapshotFor(_Part, frozen=True, tag="nf"):
    """Hub to client: the same, for these subscriptions. Without a message: there is none.
    ``failed``: it ends before it is whole."""

    subscriptions: list[int]
    stem: str
    messages: list[bytes]
    last: bool
    failed: bool = False


class CutOff(_Part, frozen=True, tag="c"):
    """Hub: you have left too many reliable messages untaken; some are gone."""

    reason: str


class Denied(_Part, frozen=True, tag="d"):
    """Hub: your key does not grant this; it was dropped."""

    reason: str


class Piece(_Part, frozen=True, tag="pc"):
    """Part of the bytes of an item that has ``size_bytes`` in all. Pieces follow each other."""

    size_bytes: int
    data: bytes


class Will(_Part, frozen=True, tag="wl"):
    """Client: publish these runs in my name if I am lost. Replaces what was said before, or with
    ``more`` is added to it."""

    runs: list[Run]
    more: bool = False


class Question(_Part, frozen=True, tag="q"):
    """Client: ``history`` (of patterns) or ``statistics``."""

    number: int
    about: str
    patterns: list[str] = []


class Answer(_Part, frozen=True, tag="a"):
    """Hub: a part of the answer to a question, as messages or as bytes that it defines."""

    number: int
    parts: list[bytes]
    last: bool


class Standing(_Part, frozen=True, tag="st"):
    """Client: how its subscriptions fare: name, queued, received, dropped."""

    rows: list[tuple[str, int, int, int]]
    lagged: int = 0


Item = (
    Run
    | Lost
    | Subscribe
    | Subscribed
    | Unprovide
    | Unsubscribe
    | Provide
    | Fetch
    | Wanted
    | Snapshot
    | SnapshotFor
    | CutOff
    | Denied
    | Piece
    | Will
    | Question
    | Answer
    | Standing
)


# -- frames ----------------------------------------------------------------------------------------


class Hello(_Part, frozen=True, tag="H"):
    """Client: who I am. ``hub``: what the last welcome said that I have heard, and ``received``:
    how far I have taken over what came since then.

    With keys, it is answered by a challenge first, and comes again with the ``proof`` and the
    nonce that it ``answers``. ``nonce`` is the client's own, which the welcome has to prove.
    """

    version: int
    name: str
    session: str
    received: int
    hub: str = ""
    key: str = ""
    proof: bytes = b""
    answers: bytes = b""
    nonce: bytes = b""


class Challenge(_Part, frozen=True, tag="C"):
    """Hub: show that you hold the key."""

    nonce: bytes


class Welcome(_Part, frozen=True, tag="W"):
    """Hub: go on from ``received`` if ``resumed``, and else begin anew. ``hub`` names this stay
    at this hub, and no other. ``proof`` shows that the hub holds the key as well."""

    version: int
    hub: str
    resumed: bool
    received: int
    proof: bytes = b""


class Refused(_Part, frozen=True, tag="R"):
    """Hub: you can't join. ``final``: and trying again will not help."""

    reason: str
    final: bool = True


class Stranger(_Part, frozen=True, tag="X"):
    """Hub: I don't know this connection; say hello."""

    hub: str


class Goodbye(_Part, frozen=True, tag="B"):
    """Client: I leave, of my own will. Hub: so you have left; or, unasked, I stop."""


class Frame(_Part, frozen=True, tag="F"):
    """Items, in order. ``number`` counts frames with items from 1; one without has 0.

    ``ack`` is the last number taken over from the other end, and ``settled`` the last whose
    reliable messages have reached all whom they are for.
    """

    number: int
    ack: int
    settled: int = 0
    items: list[Item] = []


Wire = Hello | Challenge | Welcome | Refused | Stranger | Goodbye | Frame

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Wire)
_item_decoder = msgspec.msgpack.Decoder(Item)
_array_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_UNREADABLE = (*UNREADABLE, MemoryError)


def encode(frame: Wire) -> bytes:
    """Frame to bytes.

    Raises:
        LocalProtocolError: a text in it has no form on the wire.
    """
    return _encode("frame", frame)


def _encode(what: str, part: _Part) -> bytes:
    try:
        return _encoder.encode(part)
    except (TypeError, OverflowError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise LocalProtocolError(f"{what} cannot be encoded: {error}: {part!r:.200}") from error


def decode(data: bytes | memoryview) -> Wire:
    """Bytes to frame.

    Raises:
        RemoteProtocolError: these are not the bytes of a frame, or there are too many of them.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise RemoteProtocolError(
            f"a frame of {len(data)} bytes, expected at most {MAX_FRAME_BYTES}"
        )
    try:
        return _decoder.decode(data)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"not a frame ({len(data)} bytes): {error}") from error


# -- large items -----------------------------------------------------------------------------------

_PIECE_BYTES: Final = 96 << 10
_WHOLE_BYTES: Final = 112 << 10  # an item up to here fits in a frame of its own
FIELD_BYTES: Final = 5
"""What the form adds to a text or some bytes, at most."""

_ITEM_BYTES: Final = 32  # and to an item


def size_of(item: Item) -> int:
    """How many bytes an item has on the wire, at most."""
    if isinstance(item, Run | Snapshot | SnapshotFor):
        more = 9 * len(item.subscriptions) if isinstance(item, SnapshotFor) else 0
        messages = sum(map(len, item.messages)) + FIELD_BYTES * len(item.messages)
        return _ITEM_BYTES + len(item.stem) + messages + more
    return len(encode_item(item))


def encode_item(item: Item) -> bytes:
    """Item to bytes.

    Raises:
        LocalProtocolError: a text in it has no form on the wire.
    """
    return _encode("item", item)


def split(item: Item) -> Iterator[Item]:
    """An item as it travels: by itself, or as the pieces of its bytes if it fits in no frame."""
    if size_of(item) <= _WHOLE_BYTES:
        yield item
        return
    data = encode_item(item)
    for start in range(0, len(data), _PIECE_BYTES):
        yield Piece(len(data), data[start : start + _PIECE_BYTES])


class Splitter:
    """Splits items, and keeps the pieces of the last ones, since many readers get the same item: it
    is encoded once, and its pieces are in memory once."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Item, tuple[Item, ...]]] = deque(maxlen=2)

    def split(self, item: Item) -> Iterable[Item]:
        """The same as ``split``."""
        if size_of(item) <= _WHOLE_BYTES:
            return (item,)
        for known, pieces in self._kept:
            if known is item:
                return pieces
        pieces = tuple(split(item))
        self._kept.append((item, pieces))
        return pieces


def join(data: bytes, *, from_hub: bool) -> Item:
    """The item that pieces make up.

    Only the hub, which is trusted, may send anything so. A client may send one large message: many
    small parts would take many times as much memory as the bytes that came.

    Raises:
        RemoteProtocolError: they make up none, or one that has no need to travel in pieces.
    """
    try:
        if not from_hub and not _is_one_message(data):
            raise RemoteProtocolError("an item in pieces that is not one message")
        return _item_decoder.decode(data)
    except (*_UNREADABLE, IndexError, ValueError) as error:
        raise RemoteProtocolError(f"not an item ({len(data)} bytes): {error}") from error


def _is_one_message(data: bytes) -> bool:
    if _length(data) > 8:
        return False
    tag, _, _, messages, *_ = _array_decoder.decode(data)
    return bytes(tag) in (b"\xa1r", b"\xa1n") and _length(bytes(messages)) == 1


def _length(array: bytes) -> int:
    """How many elements an array says that it has; -1 if it is none."""
    if array[0] & 0xF0 == 0x90:
        return array[0] & 0x0F
    size = {0xDC: 2, 0xDD: 4}.get(array[0])
    return -1 if size is None else int.from_bytes(array[1 : 1 + size], "big")
