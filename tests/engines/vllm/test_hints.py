"""Cache controls as vLLM's KV hints and back."""

import warnings
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

pytest.importorskip("vllm", reason="vllm is not installed")

with warnings.catch_warnings():  # those of vLLM, torch and what they use are not ours
    warnings.simplefilter("ignore")
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from hear.blocks import pack
from hear.engines.vllm.hints import Hint, Hints, from_envelope, to_envelope
from hear.errors import HearError, LocalProtocolError, RemoteProtocolError
from hear.messages import Control, Key, Place, Prepare, Prioritise, Release, Retain
from tests.hear.strategies import of_type

CONTROLS = st.one_of(
    [of_type(inspect.type_info(kind)) for kind in (Retain, Release, Prepare, Place)]
)
KEYS = of_type(inspect.type_info(Key))
RETAIN = Hint(
    Retain(
        score=0.5,
        lease_s=30.0,
        prefix_hashes=pack([7, 2**64 - 1]),
        reason="its tool returns soon",
        fallback=("preference",),
    ),
    Key(operation="session-aware-1-7", context="c1", context_version=3),
)
GOLDEN_JSON = (
    b'{"protocol_version":"0.1","message_id":"m1","actions":['
    b'{"action_id":"session-aware-1-7","action_type":"hear.retain","action_version":"1.0",'
    b'"payload":{"context":"c1","context_version":3,"fallback":["preference"],'
    b'"reason":"its tool returns soon","score":0.5,"ttl_seconds":30.0,'
    b'"block_hashes":["7","18446744073709551615"]}},'
    b'{"action_id":"o2","action_type":"hear.release","action_version":"1.0",'
    b'"payload":{"context":"c2"}},'
    b'{"action_id":"o3","action_type":"hear.prepare","action_version":"1.0",'
    b'"payload":{"context":"c3","compute":true}},'
    b'{"action_id":"o4","action_type":"hear.place","action_version":"1.0",'
    b'"payload":{"context":"c4","tier":"cpu"}}]}'
)
GOLDEN = [
    RETAIN,
    Hint(Release(), Key(operation="o2", context="c2")),
    Hint(Prepare(compute=True), Key(operation="o3", context="c3")),
    Hint(Place(tier="cpu"), Key(operation="o4", context="c4")),
]


def retain_action(**changes: Any) -> dict[str, Any]:
    """An envelope's only action, changed."""
    payload = {"context": "c", "ttl_seconds": 1.0} | changes.pop("payload", {})
    action = {
        "action_id": "o1",
        "action_type": "hear.retain",
        "action_version": "1.0",
        "payload": payload,
    }
    return action | changes


def envelope_of(*actions: object, **changes: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m1", "actions": list(actions)} | changes


def has_a_form(control: Control, key: Key) -> bool:
    return (
        bool(key.operation and key.context) and len(getattr(control, "prefix_hashes", b"")) % 8 == 0
    )


@given(st.lists(st.tuples(CONTROLS, KEYS), max_size=4))
def test_what_was_said_is_what_is_read(said: list[tuple[Any, Key]]) -> None:
    hints = [Hint(control, key) for control, key in said]
    ids = [key.operation for _, key in said]
    if not all(has_a_form(*hint) for hint in hints) or len(set(ids)) < len(ids):
        with pytest.raises(LocalProtocolError):
            to_envelope("m1", hints)
        return
    envelope = to_envelope("m1", hints)
    assert from_envelope(envelope) == Hints(tuple(hints), ())
    # As vLLM carries it between its processes, and as a route would carry it over HTTP.
    for codec in (msgspec.msgpack, msgspec.json):
        decoded = codec.decode(codec.encode(envelope), type=KvHintsEnvelope)
        assert decoded == envelope
        assert from_envelope(codec.decode(codec.encode(envelope))).hints == tuple(hints)


def test_the_form_is_this() -> None:
    envelope = to_envelope("m1", GOLDEN)
    assert msgspec.json.encode(envelope) == GOLDEN_JSON
    assert from_envelope(msgspec.json.decode(GOLDEN_JSON)).hints == tuple(GOLDEN)
    packed = msgspec.msgpack.encode(to_envelope("m1", GOLDEN[1:2]))
    assert packed == (
        b"\x83\xb0protocol_version\xa30.1\xaamessage_id\xa2m1\xa7actions\x91\x84\xa9action_id\xa2o2"
        b"\xabaction_type\xachear.release\xaeaction_version\xa31.0\xa7payload\x81\xa7context\xa2c2"
    )


def test_actions_of_others_are_given_back_as_they_came() -> None:
    fetch = KvHintAction("a1", "kv.fetch", "1.0", {"source": "worker-2"})
    theirs = KvHintAction("a2", "kv.retain", "1.0", {"directives": []})
    own = to_envelope("m1", GOLDEN).actions
    read = from_envelope(KvHintsEnvelope("0.1", "m2", [fetch, *own, theirs]))
    assert read == Hints(tuple(GOLDEN), (fetch, theirs))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, ["kv_hints: Expected `object`, got `null`"]),
        (b"\xff", ["kv_hints: Expected `object`, got `str`"]),
        ([1, 2], ["kv_hints: Expected `object`, got `array`"]),
        ({"message_id": "m1"}, ["missing required field `protocol_version`"]),
        (envelope_of(actions=3), ["Expected `array`, got `int` - at `$.actions`"]),
        (envelope_of(7), ["Expected `object`, got `int` - at `$.actions[0]`"]),
        (envelope_of(retain_action(action_id=3)), ["`$.actions[0].action_id`"]),
        (envelope_of(retain_action(payload={1: 2})), ["`str`"]),
        (envelope_of(protocol_version="9"), ["'m1'", "protocol_version is '9'", "expected '0.1'"]),
        (
            envelope_of(retain_action(), retain_action(action_type="hear.fetch", action_id="o2")),
            ["actions[1] ('o2')", "is 'hear.fetch'", "version 1.0", "hear.retain, hear.release"],
        ),
        (envelope_of(retain_action(action_version="2.0")), ["version '2.0'", "version 1.0"]),
        (
            envelope_of(*(retain_action(action_id=f"o{n}") for n in range(129))),
            ["got 129 actions", "at most 128"],
        ),
        (envelope_of(retain_action(action_id="")), ["actions[0]", "action_id is empty"]),
        (envelope_of(retain_action(), retain_action()), ["'o1' comes twice"]),
        (envelope_of(retain_action(payload={"context": ""})), ["length >= 1", "`$.context`"]),
        (envelope_of(retain_action(payload={"score": 2})), ["`float` <= 1.0", "`$.score`", "2"]),
        (envelope_of(retain_action(payload={"ttl_seconds": -1})), [">= 0.0", "`$.ttl_seconds`"]),
        (envelope_of(retain_action(payload={"ttl_seconds": "1"})), ["`float`, got `str`"]),
        (envelope_of(retain_action(payload={"priority": 3})), ["unknown field `priority`"]),
        (envelope_of(retain_action(payload={"a\nb" * 999: 3})), ["unknown field `a ba b"]),
        (envelope_of(retain_action(payload={"block_hashes": [1]})), ["`$.block_hashes[0]`"]),
        (envelope_of(retain_action(payload={"block_hashes": ["x"]})), ["`$.block_hashes[0]`"]),
        (
            envelope_of(retain_action(payload={"block_hashes": [str(2**64)]})),
            ["18446744073709551616", "expected less than 2**64"],
        ),
        (envelope_of(retain_action(payload={"force": "maybe"})), ["'maybe'", "`$.force`"]),
    ],
)
def test_a_malformed_envelope_is_one_line_that_says_what_came_and_where(
    value: object, words: list[str]
) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        from_envelope(value)
    said = str(caught.value)
    assert all(word in said for word in words), said
    assert "\n" not in said
    assert len(said) < 600


def test_an_envelope_that_python_made_with_wrong_values_is_malformed_too() -> None:
    wrong = KvHintsEnvelope("0.1", "m1", [KvHintAction("o1", "hear.retain", "1.0", None)])
    with pytest.raises(RemoteProtocolError, match=r"Expected `object`, got `null`.*payload"):
        from_envelope(wrong)


def test_endless_nesting_is_malformed() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RemoteProtocolError):
        from_envelope(envelope_of(retain_action(payload={"x": deep})))
    while deep:
        deep = deep.pop()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(
    st.sampled_from(["hear.retain", "hear.release", "hear.prepare", "hear.place"]),
    st.dictionaries(
        st.sampled_from(["context", "ttl_seconds", "block_hashes", "score", "tier", "force", "x"]),
        JUNK,
    ),
)
def test_whatever_a_payload_holds_it_is_read_or_refused(name: str, payload: dict[str, Any]) -> None:
    action = {
        "action_id": "o1",
        "action_type": name,
        "action_version": "1.0",
        "payload": payload,
    }
    try:
        read = from_envelope(envelope_of(action))
    except RemoteProtocolError:
        pass
    else:
        assert from_envelope(to_envelope("m1", read.hints)) == read


@pytest.mark.parametrize(
    ("control", "key", "words"),
    [
        (Prioritise(priority=1), Key(operation="o", context="c"), "Prioritise has no form"),
        (Release(), Key(context="c"), "an operation and a context"),
        (Release(), Key(operation="o"), "an operation and a context"),
        (Retain(lease_s=float("inf")), Key(operation="o", context="c"), "lease_s is inf"),
        (Retain(lease_s=-1.0), Key(operation="o", context="c"), "`float` >= 0.0"),
        (Retain(lease_s=1.0, prefix_hashes=b"123"), Key(operation="o", context="c"), "3 bytes"),
        (Release(reason="\ud800"), Key(operation="o", context="c"), "surrogates"),
    ],
)
def test_what_has_no_form_there_is_one_clear_line(control: Any, key: Key, words: str) -> None:
    with pytest.raises(LocalProtocolError, match=words) as caught:
        to_envelope("m1", [Hint(control, key)])
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, HearError)
