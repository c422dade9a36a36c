"""Messages to bytes and back: msgspec's msgpack, with the body left raw until it is asked for.

Owns the table of kinds. A kind that is not in it, or a field that is newer than this code, never
raises: the envelope can still be read, and its bytes are carried on as they came.
"""

from typing import Final, NamedTuple, get_args

import msgspec

from hear.errors import LocalProtocolError, RemoteProtocolError
from hear.messages import Category, Control, Envelope, Message
from hear.messages import control as _control
from hear.messages.intent import Intent
from hear.messages.outcome import Outcome
from hear.messages.state import State


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
# RecursionError: a newer field may hold anything, so also a million arrays one inside the other.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
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
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"not an envelope ({len(frame)} bytes): {error}") from error


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
    except _UNREADABLE as error:
        raise RemoteProtocolError(
            f"message {envelope.id!r:.80} from {envelope.source!r:.80}: not a readable "
            f"{envelope.kind}: {error}"
        ) from error
