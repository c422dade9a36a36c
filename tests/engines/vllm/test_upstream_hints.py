"""The hints that vLLM's repository defines, read as leases and written from them."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.blocks import pack, unpack
from hear.engines.vllm import upstream_hints
from hear.engines.vllm.upstream_hints import Asked, Ride
from hear.errors import LocalProtocolError
from hear.messages import Control, Key, Place, Release, Retain

BLOCKS = [11, 22, 33, 44]
KNOWN = Ride(Key(request="r1", context="c1", context_version=7), BLOCKS, 16, max_lease_s=600.0)
STRANGER = Ride(Key(request="r1"), BLOCKS, 16, max_lease_s=600.0)
CLAIM = {
    "target": "request_cached",
    "location": "local_g1",
    "claim_id": "router/session-1",
    "revision": 1,
    "value": 10,
    "ttl_seconds": 60,
}


def retain(*directives: object, **payload: Any) -> Any:
    whole = {"directives": list(directives)} | payload
    return SimpleNamespace(action_type="kv.retain", action_version="1.0", payload=whole)


def claim(**changes: object) -> Any:
    return SimpleNamespace(
        action_type="vllm.set_priority", action_version="1.0", payload=CLAIM | changes
    )


def leases(controls: list[Asked]) -> list[tuple[str | None, float, float, list[int]]]:
    """Of each lease its context, its score, its seconds and the blocks that it names."""
    made = []
    for key, control in controls:
        assert isinstance(control, Retain)
        blocks = list(unpack(control.prefix_hashes))
        made.append((key.context, control.score, control.lease_s, blocks))
    return made


def test_a_directive_over_the_whole_request_is_a_lease_on_its_context() -> None:
    read = upstream_hints.read(retain({"start": 0, "priority": 50, "duration": 30}), KNOWN)
    assert read == [
        (Key(request="r1", context="c1", context_version=7), Retain(score=0.5, lease_s=30.0))
    ]


def test_ranges_along_the_prompt_are_leases_of_their_own() -> None:
    action = retain(
        {"start": 0, "end": 40, "priority": 100},
        {"start": 40, "priority": 20, "duration": 9.5},
        {"covers_output": True, "priority": 5},
        scope="tool-loop",
    )
    assert leases(upstream_hints.read(action, KNOWN)) == [
        ("c1[:32]", 1.0, 600.0, [11, 22]),  # forty tokens fill two blocks of sixteen
        ("c1", 0.2, 9.5, []),
        ("c1", 0.05, 600.0, []),
    ]


def test_a_request_that_names_no_context_has_its_prompt_leased_under_the_scope() -> None:
    action = retain({"priority": 1}, scope="tool-loop")
    assert leases(upstream_hints.read(action, STRANGER)) == [("tool-loop", 0.01, 600.0, BLOCKS)]
    assert leases(upstream_hints.read(retain({"priority": 1}), STRANGER))[0][0] == "r1"


def test_what_protects_no_full_block_asks_for_nothing() -> None:
    for directive in ({"end": 15, "priority": 9}, {"priority": 9, "duration": 0}):
        assert upstream_hints.read(retain(directive), KNOWN) == []
    assert upstream_hints.read(retain({"priority": 9}), STRANGER._replace(blocks=[])) == []
    assert upstream_hints.read(retain(), KNOWN) == []


def test_priority_zero_from_the_first_token_on_releases_the_context() -> None:
    [(key, control)] = upstream_hints.read(retain({"priority": 0}), KNOWN)
    assert (key.context, control) == ("c1", Release())
    tail = retain({"end": 32, "priority": 3}, {"start": 32, "priority": 0})
    assert leases(upstream_hints.read(tail, KNOWN)) == [("c1[:32]", 0.03, 600.0, [11, 22])]


def test_a_claim_is_a_lease_and_its_clearing_a_lease_of_no_time() -> None:
    assert leases(upstream_hints.read(claim(), KNOWN)) == [("c1", 0.1, 60.0, [])]
    assert leases(upstream_hints.read(claim(value=10**9), STRANGER)) == [
        ("router/session-1", 1.0, 60.0, BLOCKS)
    ]
    cleared = claim(value=None, ttl_seconds=None, revision=2)
    assert leases(upstream_hints.read(cleared, KNOWN)) == [("c1", 1.0, 0.0, [])]


def test_versions_of_one_major_are_read_and_no_others() -> None:
    known = [("kv.retain", "1.0"), ("kv.retain", "1.7"), ("vllm.set_priority", "1.0")]
    others = [("kv.retain", "hear-1"), ("kv.retain", "2.0"), ("kv.fetch", "1.0"), ("", "")]
    for name, version in known:
        assert upstream_hints.reads(SimpleNamespace(action_type=name, action_version=version))
    for name, version in others:
        assert not upstream_hints.reads(SimpleNamespace(action_type=name, action_version=version))


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (retain(directives=3), r"Expected `array`, got `int` - at `\$.directives`"),
        (retain({"priority": 101}), r"<= 100.*directives\[0\].priority"),
        (retain({"priority": True}), "got `bool`"),
        (retain({"priority": 1, "start": -1}), ">= 0"),
        (retain({"priority": 1, "start": 5, "end": 5}), "end is 5, expected more than start, 5"),
        (retain({"priority": 1, "duration": 1e9}), "2592000"),
        (retain({"priority": 1, "duration": float("nan")}), "2592000|>= 0"),
        (retain({"priority": 1, "covers_output": True, "start": 0}), "cannot be combined"),
        (retain({"priority": 1, "weight": 2}), "unknown field `weight`"),
        (retain({"priority": 1}, {"start": 4, "priority": 2}), "priority 2 follows 1"),
        (retain({"covers_output": True, "priority": 2}, {"priority": 1}), "priority 2 follows 1"),
        (retain(*[{"priority": 1}] * 129), "length <= 128"),
        (retain(scope=3), "scope"),
        (claim(target="everything"), "Invalid enum value 'everything'"),
        (claim(claim_id=""), "length >= 1"),
        (claim(ttl_seconds=None), "come together"),
        (claim(value=None), "come together"),
        (claim(ttl_seconds=-1), "> 0|>= 0"),
        (claim(pin=True), "unknown field `pin`"),
    ],
)
def test_a_payload_that_upstream_would_refuse_is_refused(action: Any, words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        upstream_hints.read(action, KNOWN)


def test_what_is_written_is_upstreams_form() -> None:
    key = Key(operation="o1", context="c1")
    assert upstream_hints.write(Retain(score=0.5, lease_s=30.0), key, None) == {
        "scope": "c1",
        "directives": [{"start": 0, "priority": 50, "duration": 30.0}],
    }
    named = Retain(score=0.001, lease_s=1e9, prefix_hashes=pack([1, 2, 3]))
    assert upstream_hints.write(named, key, 16)["directives"] == [
        {"start": 0, "priority": 1, "duration": 2592000.0, "end": 48}
    ]
    assert upstream_hints.write(Release(), key, None)["directives"] == [{"start": 0, "priority": 0}]


@pytest.mark.parametrize(
    ("control", "words"),
    [
        (Place(tier="cpu"), "Place has no form in kv.retain"),
        (Retain(lease_s=1.0, force="requirement"), "is a preference, got a requirement"),
        (Retain(lease_s=1.0, prefix_hashes=pack([1])), "no block size"),
    ],
)
def test_what_upstream_cannot_say_is_one_clear_line(control: Control, words: str) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        upstream_hints.write(control, Key(operation="o1", context="c1"), None)


@given(
    st.floats(0.01, 1.0), st.floats(0.0, 600.0), st.lists(st.sampled_from([1, 2, 3]), max_size=4)
)
def test_a_lease_that_was_written_is_read_as_a_lease_as_strong_and_as_long(
    score: float, lease_s: float, picked: list[int]
) -> None:
    hashes = BLOCKS[: len(picked)]
    control = Retain(score=score, lease_s=lease_s, prefix_hashes=pack(hashes))
    payload = upstream_hints.write(control, Key(operation="o", context="c1"), 16)
    read = leases(upstream_hints.read(retain(**payload), KNOWN))
    if not lease_s:
        assert read == []
        return
    [(_, strength, seconds, blocks)] = read
    assert abs(strength - score) <= 0.01
    assert (seconds, blocks) == (lease_s, hashes)
