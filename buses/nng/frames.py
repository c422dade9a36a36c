"""What travels between a client and the hub: frames, and the items in them.

Owns the bytes of the link. HEAR's messages are carried as the bytes that they are on the wire, in
*runs*: messages that follow each other on one stem. So the hub routes a run by its stem, and opens
no message. It must not know what becomes of an item.

The form is an array with a tag, and append-only: a field is added at the end, with a default.
"""

from typing import Final

import msgspec

from hear.errors import LocalProtocolError, RemoteProtocolError

LINK_VERSION: Final = 1
"""Version of the link, which is not that of the messages on it (docs/bus.md)."""

MAX_MESSAGE_BYTES: Final = 8 << 20
"""Largest message of HEAR that a bus carries."""

MAX_FRAME_BYTES: Final = MAX_MESSAGE_BYTES + (1 << 20)
"""Largest frame; whoever sends a larger one is cut off."""

MAX_STEM: Final = 4_096
"""Longest stem of a subject, in letters."""

FRAME_FILL_BYTES: Final = 256 << 10
"""A frame takes in what waits until it holds so much; only a single message may be larger."""


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


class Will(_Part, frozen=True, tag="wl"):
    """Client: publish these runs in my name if I am lost. Replaces what was said before."""

    runs: list[Run]


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
    | Unsubscribe
    | Provide
    | Fetch
    | Wanted
    | Snapshot
    | SnapshotFor
    | CutOff
    | Denied
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
    nonce that it ``answers``.
    """

    version: int
    name: str
    session: str
    received: int
    hub: str = ""
    key: str = ""
    proof: bytes = b""
    answers: bytes = b""


class Challenge(_Part, frozen=True, tag="C"):
    """Hub: show that you hold the key."""

    nonce: bytes


class Welcome(_Part, frozen=True, tag="W"):
    """Hub: go on from ``received`` if ``resumed``, and else begin anew. ``hub`` names this stay
    at this hub, and no other."""

    version: int
    hub: str
    resumed: bool
    received: int


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


def encode(frame: Wire) -> bytes:
    """Frame to bytes.

    Raises:
        LocalProtocolError: a text in it has no form on the wire.
    """
    try:
        return _encoder.encode(frame)
    except (TypeError, OverflowError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise LocalProtocolError(f"frame cannot be encoded: {error}: {frame!r:.200}") from error


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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise RemoteProtocolError(f"not a frame ({len(data)} bytes): {error}") from error
