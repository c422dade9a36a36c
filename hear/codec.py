"""Messages to bytes and back: msgspec's msgpack, with the body left raw until it is asked for.

Owns the table of kinds. A kind that is not in it, or a field that is newer than this code, never
raises: the envelope can still be read, and its bytes are carried on as they came.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple, get_args

import msgspec

from hear.errors import LocalProtocolError, RemoteProtocolError
from hear.messages import Category, Control, Envelope, Message
from hear.messages import control as _control
from hear.messages.intent import Intent
from hear.messages.outcome import Outcome
from hear.messages.state import State

# RecursionError: a newer field may hold anything, so also a million arrays one inside the other.
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What a decoder of msgspec raises on bytes that it cannot read, whoever sent or wrote them."""


class Kind(NamedTuple):
    """What is known of one kind of message."""

    name: str
    category: Category
    topic: str
    type: type[Message]
    decoder: msgspec.msgpack.Decoder[Message]


def topic_of(category: str, name: str) -> str:
    """The topic of a kind, known or not: a rule, so that every version routes it alike."""
    # The messages of one stream of state keep their order among each other, so they share a
    # channel; of all else each kind stands alone.
    return name.rsplit("_", 1)[0] if category == "state" else name


def _kinds() -> dict[str, Kind]:
    families: dict[Category, tuple[type[Message], ...]] = {
        "intent": get_args(Intent),
        "control": tuple(t for t in _control.AXES if issubclass(t, Control)),
        "state": get_args(State),
        "outcome": get_args(Outcome),
    }
    kinds = {}
    for category, types in families.items():
        for type_ in types:
            name = str(type_.__struct_config__.tag)
            kinds[name] = Kind(
                name, category, topic_of(category, name), type_, msgspec.msgpack.Decoder(type_)
            )
    return kinds


KINDS: Final[dict[str, Kind]] = _kinds()
"""Every kind of message that this version knows, by name."""

_BY_TYPE: Final[dict[type[Message], Kind]] = {kind.type: kind for kind in KINDS.values()}
_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


def kind_of(message: Message) -> Kind:
    """The table row of a message.

    Raises:
        LocalProtocolError: the type is not a message of the protocol.
    """
    try:
        return _BY_TYPE[type(message)]
    except KeyError:
        raise LocalProtocolError(
            f"{type(message).__name__} is not a message of the protocol; expected one of "
            f"{', '.join(KINDS)}"
        ) from None


def encode_body(message: Message) -> msgspec.Raw:
    """Encode a message as the body of an envelope.

    Raises:
        LocalProtocolError: a value in it has no form on the wire.
    """
    return msgspec.Raw(_encode(message, "body"))


def encode(envelope: Envelope) -> bytes:
    """Encode a whole envelope for the wire.

    Raises:
        LocalProtocolError: a value in it has no form on the wire.
    """
    return _encode(envelope, "envelope")


def _encode(value: Message | Envelope, what: str) -> bytes:
    try:
        return _encoder.encode(value)
    except (TypeError, OverflowError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise LocalProtocolError(f"{what} cannot be encoded: {error}: {value!r:.200}") from error


def decode(frame: bytes | memoryview) -> Envelope:
    """Read an envelope; its body stays raw.

    Raises:
        RemoteProtocolError: the bytes are not an envelope.
    """
    try:
        return _envelope_decoder.decode(frame)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"not an envelope ({len(frame)} bytes): {error}") from error


_CANONICAL_BYTES: Final = 64 << 10
_MAX_ELEMENTS: Final = 65_536
_MAX_DEPTH: Final = 64
_MAX_DEPTH_OF_LARGE: Final = 8
_plain_decoder = msgspec.msgpack.Decoder()
_array_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_map_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def check_unambiguous(frame: bytes) -> int:
    """See that no map in a message, however deep, has a key twice: readers that take the first and
    readers that take the last would read two different messages.

    Returns how many maps and arrays had to be taken apart for that.

    Raises:
        RemoteProtocolError: one has, or the message cannot be read, or it has an unusual encoding
            or more than 64 KiB, and then more than 65,536 elements, or more than 64 maps and
            arrays one inside the other, and 8 if it is so large.
    """
    try:
        # Whatever has no key twice, and is encoded as msgspec does it, comes out as it went in.
        small = len(frame) <= _CANONICAL_BYTES
        if small and _encoder.encode(_plain_decoder.decode(frame)) == frame:
            return 0
        return _check_maps(frame, _MAX_DEPTH if small else _MAX_DEPTH_OF_LARGE)
    except (*UNREADABLE, TypeError, OverflowError, IndexError) as error:
        raise RemoteProtocolError(f"not an envelope ({len(frame)} bytes): {error}") from error


def _check_maps(frame: bytes, max_depth: int) -> int:
    """The same for any encoding, one level after the other, without making objects of it all.

    Each level is looked through once more for each that it is in, so there may not be many.
    """
    left = _MAX_ELEMENTS
    done = 0
    to_do = [(memoryview(frame), 1)]
    while to_do:
        done += 1
        data, depth = to_do.pop()
        kind, length = _head(data)
        left -= length
        if depth > max_depth:
            raise RemoteProtocolError(
                f"a message of {len(frame)} bytes with more than {max_depth} maps and arrays one "
                "inside the other"
            )
        if left < 0:
            raise RemoteProtocolError(
                f"a message of {len(frame)} bytes with more than {_MAX_ELEMENTS} elements"
            )
        values: Iterable[msgspec.Raw]
        if kind == "map":
            found = _map_decoder.decode(data)
            if len(found) != length:
                raise RemoteProtocolError("a map in a message has a key twice")
            values = found.values()
        else:
            values = _array_decoder.decode(data)
        to_do += [
            (data, depth + 1)
            for data in [memoryview(raw) for raw in values]
            if data[0] in _CONTAINERS and len(data) > 1
        ]
    return done


_CONTAINERS: Final = frozenset((*range(0x80, 0xA0), *range(0xDC, 0xE0)))


def _head(data: memoryview) -> tuple[str, int]:
    """Whether a container is a map or an array, and how many entries it says that it has."""
    first = data[0]
    if 0x80 <= first < 0xA0:
        return "map" if first < 0x90 else "array", first & 0x0F
    if first not in _CONTAINERS:
        raise RemoteProtocolError("not an envelope: neither a map nor an array")
    size = 4 if first & 1 else 2
    return "map" if first >= 0xDE else "array", int.from_bytes(data[1 : 1 + size], "big")


def open_body(envelope: Envelope) -> Message | None:
    """Decode the body of an envelope; None if its kind is not known here.

    Raises:
        RemoteProtocolError: the kind is known and the body is not of that kind.
    """
    kind = KINDS.get(envelope.kind)
    if kind is None:
        return None
    try:
        return kind.decoder.decode(envelope.body)
    except UNREADABLE as error:
        raise RemoteProtocolError(
            f"message {envelope.id!r:.80} from {envelope.source!r:.80}: not a readable "
            f"{envelope.kind}: {error}"
        ) from error
