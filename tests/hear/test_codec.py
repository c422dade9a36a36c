from contextlib import suppress
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear import codec
from hear.errors import LocalProtocolError, RemoteProtocolError
from hear.messages import (
    AXES,
    Actions,
    Category,
    ContextOpened,
    Control,
    Envelope,
    Key,
    Message,
    Prioritise,
    ResidencyChanged,
)
from hear.messages.envelope import MAX_S
from tests.hear.builders import envelope
from tests.hear.strategies import keys, messages, names


@given(messages, keys, names, st.integers(0, 2**63), st.floats(-MAX_S, MAX_S))
def test_every_message_comes_back_as_it_was(
    message: Message, key: Key, source: str, seq: int, time_s: float
) -> None:
    sent = envelope(message, key, source=source, seq=seq, time_s=time_s)
    heard = codec.decode(codec.encode(sent))
    assert heard == sent
    assert codec.open_body(heard) == message
    assert codec.encode(heard) == codec.encode(sent)


def test_every_kind_is_of_one_category_and_every_control_has_an_axis() -> None:
    assert {kind.category for kind in codec.KINDS.values()} == set(get_args(Category))
    controls = {kind.type for kind in codec.KINDS.values() if issubclass(kind.type, Control)}
    assert controls == set(AXES)
    assert all(kind.category == "control" for kind in codec.KINDS.values() if kind.type in controls)


def test_kinds_of_one_stream_of_state_share_a_topic_and_no_others_do() -> None:
    topics = {name: kind.topic for name, kind in codec.KINDS.items()}
    assert topics["residency_changed"] == topics["residency_snapshot"] == "residency"
    assert topics["queue_changed"] == topics["queue_snapshot"] == "queue"
    assert topics["pressure_reported"] == "pressure"
    others = [n for n, kind in codec.KINDS.items() if kind.category != "state"]
    assert [topics[name] for name in others] == others


def test_defaults_are_not_sent() -> None:
    assert msgspec.msgpack.decode(codec.encode_body(ContextOpened())) == {"kind": "context_opened"}


def test_a_body_is_not_read_before_it_is_asked_for() -> None:
    sent = msgspec.structs.replace(
        envelope(ContextOpened()), body=msgspec.Raw(msgspec.msgpack.encode("no body at all"))
    )
    heard = codec.decode(codec.encode(sent))
    assert heard.kind == "context_opened"
    with pytest.raises(RemoteProtocolError, match=f"{sent.id!r} from 'policy'.*context_opened"):
        codec.open_body(heard)


def test_a_body_of_another_kind_than_its_envelope_says_is_not_readable() -> None:
    lying = msgspec.structs.replace(envelope(ContextOpened()), kind="context_closed")
    with pytest.raises(RemoteProtocolError, match="context_closed"):
        codec.open_body(lying)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("bound_wait", {"max_wait_s": -1.0}),
        ("bound_wait", {"max_wait_s": float("nan")}),
        ("bound_wait", {}),
        ("retain", {"lease_s": 1.0, "score": 0.0}),
        ("retain", {"lease_s": 1.0, "score": 1.5}),
        ("prioritise", {"priority": 0.5}),
        ("prioritise", {"priority": 1, "force": "wish"}),
        ("reuse_expected", {"basis": "known", "probability": 2.0}),
        ("request_described", {"prompt_tokens": -1}),
    ],
)
def test_a_value_out_of_range_is_the_peers_error(kind: str, body: dict[str, object]) -> None:
    raw = msgspec.Raw(msgspec.msgpack.encode({"kind": kind, **body}))
    sent = msgspec.structs.replace(envelope(ContextOpened()), kind=kind, body=raw)
    with pytest.raises(RemoteProtocolError, match=kind):
        codec.open_body(sent)


def test_an_unknown_kind_is_carried_unread() -> None:
    body = msgspec.Raw(msgspec.msgpack.encode({"kind": "tomorrow", "what": [1, 2]}))
    sent = msgspec.structs.replace(envelope(ContextOpened()), kind="tomorrow", body=body)
    heard = codec.decode(codec.encode(sent))
    assert codec.open_body(heard) is None
    assert bytes(heard.body) == bytes(body)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_envelope_are_the_peers_error(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{len(frame)} bytes"):
        codec.decode(frame)


@given(messages, st.data())
def test_a_damaged_frame_is_read_or_refused_and_nothing_else(
    message: Message, data: st.DataObject
) -> None:
    frame = bytearray(codec.encode(envelope(message)))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with suppress(RemoteProtocolError):
        codec.open_body(codec.decode(bytes(frame)))


def test_a_newer_field_nested_without_end_is_the_peers_error() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(RemoteProtocolError):
        codec.decode(b"\x81\xa1x" + deep)
    body = msgspec.Raw(b"\x82\xa4kind\xaecontext_opened\xa1x" + deep)
    with pytest.raises(RemoteProtocolError):
        codec.open_body(msgspec.structs.replace(envelope(ContextOpened()), body=body))


@pytest.mark.parametrize("message", [Prioritise(priority=2**64), ContextOpened(role="\ud800")])
def test_a_value_without_a_form_on_the_wire_is_the_callers_error(message: Message) -> None:
    with pytest.raises(LocalProtocolError, match=type(message).__name__):
        codec.encode_body(message)


def test_an_envelope_without_a_form_on_the_wire_is_the_callers_error() -> None:
    with pytest.raises(LocalProtocolError, match="envelope"):
        codec.encode(envelope(ContextOpened(), seq=2**64))


@pytest.mark.parametrize("message", [Actions(name="part of a message"), Control(), Message()])
def test_what_is_only_part_of_a_message_is_not_one(message: Message) -> None:
    with pytest.raises(LocalProtocolError, match="not a message of the protocol"):
        codec.kind_of(message)


def test_messages_do_not_change() -> None:
    for message in (ResidencyChanged(changes=()), Key(), envelope(ContextOpened())):
        assert isinstance(message, Message | Key | Envelope)
        field = message.__struct_fields__[0]
        with pytest.raises(AttributeError, match="immutable"):
            setattr(message, field, None)
