"""The bytes of each message, kept as files, so that no change of the wire format goes unseen.

Changing golden bytes is a change of the protocol's version, not a repair of a test: peers that are
out there send and expect the old ones. A new kind gets a new file; a new field gets a new value in
``golden_examples`` and new bytes (a field with a default is no change for older peers). To write
the files anew: ``python -m tests.hear.regenerate_golden``.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hear import codec
from hear.messages import SCHEMA_VERSION, Envelope, Message
from tests.hear.golden_examples import EXAMPLES

GOLDEN = Path(__file__).parent / "golden"


def golden(kind: str) -> bytes:
    return (GOLDEN / f"{kind}.msgpack").read_bytes()


def test_each_kind_has_golden_bytes_and_an_example_and_there_are_no_others() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{kind}.msgpack" for kind in codec.KINDS}
    assert set(EXAMPLES) == set(codec.KINDS)


def test_the_version_is_the_one_that_the_bytes_were_made_for() -> None:
    assert SCHEMA_VERSION == 1


def _unset(struct: msgspec.Struct, where: str) -> list[str]:
    """The fields, here and further in, that an example leaves at their default."""
    unset = []
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if value == field.default or value in ((), {}):
            unset.append(f"{where}.{field.name}")
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, msgspec.Struct):
                unset += _unset(inner, f"{where}.{field.name}")
    return unset


def test_the_examples_set_every_field() -> None:
    unset = [
        each
        for kind, (message, envelope) in EXAMPLES.items()
        for each in _unset(message, kind) + _unset(envelope, "envelope")
    ]
    # The version has its default by right, and a completed request has no reason.
    assert set(unset) == {"envelope.version", "request_outcome.reason"}


@pytest.mark.parametrize("kind", codec.KINDS)
def test_the_example_is_encoded_as_exactly_the_golden_bytes(kind: str) -> None:
    assert codec.encode(EXAMPLES[kind][1]) == golden(kind)


@pytest.mark.parametrize("kind", codec.KINDS)
def test_the_golden_bytes_are_decoded_as_the_example(kind: str) -> None:
    envelope = codec.decode(golden(kind))
    assert (codec.open_body(envelope), envelope) == EXAMPLES[kind]


def _with_newer_fields(value: Any) -> Any:
    """Add a field that nobody knows to a map and to all maps within, as a newer sender would."""
    if isinstance(value, dict):
        grown = {name: _with_newer_fields(inner) for name, inner in value.items()}
        # What a request reused is a map by tier: there a new name is a tier and no field.
        return grown if set(grown) <= {"gpu", "cpu"} else grown | {"newer": {"deep": [1, None]}}
    if isinstance(value, list):
        return [_with_newer_fields(inner) for inner in value]
    return value


@pytest.mark.parametrize("kind", codec.KINDS)
def test_newer_fields_are_carried_and_otherwise_ignored(kind: str) -> None:
    newer = _with_newer_fields(msgspec.msgpack.decode(golden(kind))) | {"version": 2}
    envelope = codec.decode(msgspec.msgpack.encode(newer))
    message, known = EXAMPLES[kind]
    assert codec.open_body(envelope) == message
    assert envelope.version == 2
    as_known = msgspec.structs.replace(envelope, version=1, body=known.body)
    assert as_known == known
    carried: dict[str, object] = msgspec.msgpack.decode(codec.encode(envelope))
    assert carried["body"] == newer["body"]


@pytest.mark.parametrize("kind", codec.KINDS)
def test_an_unknown_kind_in_a_known_envelope_is_carried(kind: str) -> None:
    older: dict[str, Any] = msgspec.msgpack.decode(golden(kind))
    older["kind"] = older["body"]["kind"] = "tomorrow"
    frame = msgspec.msgpack.encode(older)
    envelope = codec.decode(frame)
    assert codec.open_body(envelope) is None
    assert msgspec.msgpack.decode(codec.encode(envelope)) == older


def test_what_may_be_left_out_may_be_missing() -> None:
    def barest(example: tuple[Message, Envelope]) -> tuple[dict[str, Any], Message]:
        message, _ = example
        required = {f.name: getattr(message, f.name) for f in _required(message)}
        return msgspec.to_builtins(required, builtin_types=(bytes,)), type(message)(**required)

    for kind, example in EXAMPLES.items():
        body, message = barest(example)
        raw = msgspec.Raw(msgspec.msgpack.encode({"kind": kind, **body}))
        assert codec.open_body(msgspec.structs.replace(example[1], body=raw)) == message


def _required(message: Message) -> list[msgspec.structs.FieldInfo]:
    return [f for f in msgspec.structs.fields(message) if f.required]
