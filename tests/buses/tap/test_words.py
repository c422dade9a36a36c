"""What each kind says in words."""

from typing import Any

import pytest

from hear.blocks import pack
from hear.buses.observe.tap.reading import read
from hear.buses.observe.tap.words import CONTROL_WORDS, WORDS, kv_share
from hear.codec import KINDS
from hear.messages import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Message,
    OperationOutcome,
    OperationStatus,
    Prioritise,
    QueueChanged,
    RequestOutcome,
    ResidencyChanged,
    TierPressure,
    WaitingRequest,
)
from tests.buses.tap.builders import Voice, foreign
from tests.hear.golden_examples import EXAMPLES

# Of each kind the example of the golden bytes, in which every field is set.
SAID = {
    "request_described": "describes r1 of context c1 v4: turn 3, role coder, stage plan, "
    "20,480 tokens, 2 blocks of 16, at most 1024 out, about 200 out, after r0, for e0, "
    "not ready yet",
    "request_readiness_changed": "r1 is ready",
    "context_opened": "opens context c1 v4 for role coder",
    "context_versioned": "context c1 v4 is the newest: 21,504 tokens, 2 blocks",
    "context_forked": "forks context c1 v4 from c0 v2",
    "context_paused": "context c1 v4 pauses for the tool search about 4.5 s",
    "context_resumed": "context c1 v4 goes on",
    "context_closed": "closes context c1 v4",
    "reuse_expected": "expects context c1 v4 again within 400 s, probability 0.25, "
    "predicted by session-aware",
    "workflow_described": "describes workflow w1: roles planner, coder, steps code after plan",
    "prioritise": "asks e0: prioritise r1 at -40, required, else preference, within -34 s (hot) "
    "op source-2-76",
    "bound_wait": "asks e0: bound the wait of r1 to 40 s, required, else preference, "
    "within -34 s (guard) op source-2-76",
    "retain": "asks e0: retain r1 for 400 s at score 0.75, 2 blocks, required, else preference, "
    "within -34 s (returns) op source-2-76",
    "release": "asks e0: release r1, required, else preference, within -34 s (closed) "
    "op source-2-76",
    "prepare": "asks e0: prepare r1 on cpu, 2 blocks, computing what is missing, required, "
    "else disk, within -34 s (soon) op source-2-76",
    "place": "asks e0: place r1 on cpu, 2 blocks, required, else disk, within -34 s (paused) "
    "op source-2-76",
    "hold": "asks e0: hold r1 for 5 s at most, required, else x, within -34 s (gate) "
    "op source-2-76",
    "admit": "asks e0: admit r1, required, else x, within -34 s (gate) op source-2-76",
    "route": "asks e0: route r1 to e1 or e2, required, else e3, within -34 s (held there) "
    "op source-2-76",
    "configure": "asks e0: run r1 in mode snapkv or quest, required, else dense, within -34 s "
    "(role) op source-2-76",
    "cancel": "asks e0: cancel operation policy-1-7, required, else x, within -34 s (moot) "
    "op source-2-76",
    "withdraw": "asks e0: withdraw all that this sender asked for, required, else x, within -34 s "
    "(leaves) op source-2-76",
    "residency_changed": "stores 2 blocks on gpu, removes 2 blocks from cpu, clears disk",
    "residency_snapshot": "holds 2 blocks on gpu (part 2 of 3)",
    "residency_partial": "holds 2 blocks on gpu, and cannot tell what else (part 2 of 3)",
    "queue_changed": "queue 1 waiting 2 running (+1 -1): waits r1 at -40 protected held, "
    "starts r0, ends r9",
    "queue_snapshot": "queue 1 waiting 1 running, all told: waits r1 at -40 protected held, "
    "runs r0",
    "pressure_reported": "gpu 99% full (600 used, 80 cached of 690), 1 waiting 2 running, "
    "3 preemptions, 1,024 tokens restored, 0.5 s of transfers ahead",
    "capabilities_reported": "serves Qwen3-8B, controls prioritise retain, "
    "at submission prioritise, modes dense, "
    "gpu 690 blocks, blocks of 16 tokens, at http://gpu-7:8000/v1",
    "costs_reported": "costs, calibrated: prefill 42,000 tokens/s, decode step 12.5 ms, "
    "147,456 bytes of KV a token, loads 25.0 GB/s",
    "request_outcome": "completed r1 of context c1 v4: mode dense, 20,480 tokens in 150 out, "
    "reused 16,384 gpu 2,048 cpu, queue 1.50 s, prefill 0.25 s, decode 3.00 s, 1 preemption",
    "operation_outcome": "failed retain r1: yielded (service needed the room), "
    "by the fallback preference op source-2-76",
}


def said(message: Message, **key: Any) -> str:
    return read(Voice("x").say(message, **key)).words


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_is_said_in_words(kind: str) -> None:
    assert read(EXAMPLES[kind][1]).words == SAID[kind]


def test_every_kind_has_a_renderer_of_its_own() -> None:
    assert {*WORDS, *CONTROL_WORDS} == {kind.type for kind in KINDS.values()}


def test_a_preference_with_a_reason_is_short() -> None:
    control = Prioritise(priority=-24, reason="24 blocks to reuse")
    assert said(control, request="r17", engine="engine0", operation="cache-aware-1-3") == (
        "asks engine0: prioritise r17 at -24 (24 blocks to reuse) op cache-aware-1-3"
    )


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("rejected", "rejected prioritise r17: outranked by guard op p-1-3"),
        ("unsupported", "does not support prioritise r17: outranked by guard op p-1-3"),
    ],
)
def test_an_outcome_names_who_prevailed(status: OperationStatus, words: str) -> None:
    outcome = OperationOutcome(
        status=status, control="prioritise", reason="outranked", detail="guard"
    )
    assert said(outcome, request="r17", engine="e0", operation="p-1-3") == words


def test_changes_of_residency_are_summed_by_verb_and_tier() -> None:
    changes = ResidencyChanged(
        changes=(
            BlocksStored(tier="gpu", prefix_hashes=pack([1, 2])),
            BlocksRemoved(tier="cpu", prefix_hashes=pack([9])),
            BlocksStored(tier="gpu", parent=2, prefix_hashes=pack([3])),
            BlocksCleared(),
        )
    )
    assert said(changes) == "stores 3 blocks on gpu, removes 1 block from cpu, clears every tier"


def test_a_long_list_gives_four_names_and_how_many_more() -> None:
    waiting = tuple(WaitingRequest(request=f"r{n}", since_s=0.0) for n in range(30))
    message = QueueChanged(waiting=waiting, num_waiting=30)
    assert said(message) == "queue 30 waiting 0 running (+30): waits r0, r1, r2, r3 and 26 more"


def test_a_request_that_was_only_accepted_has_no_times() -> None:
    outcome = RequestOutcome(status="accepted", prompt_tokens=10)
    assert said(outcome, request="r1") == "accepted r1: 10 tokens in 0 out"


def test_an_unknown_kind_is_shown_with_its_size_and_raw_fields() -> None:
    body = {"kind": "foo", "speed": 3, "name": "x" * 9}
    words = read(foreign("foo", body)).words
    assert words == "unknown kind 'foo' from x, 32 bytes: speed=3 name='xxxxxxxxx'"


def test_an_unknown_kind_that_is_no_messagepack_is_shown_as_such() -> None:
    words = read(foreign("foo", b"\xc1")).words
    assert words == "unknown kind 'foo' from x, 1 bytes, not readable as MessagePack"


@pytest.mark.parametrize("body", [{"blob": b"x" * 3000}, {"blob": b"x" * 1_000_000}, ["x" * 900]])
def test_an_unknown_kind_of_any_size_stays_short(body: object) -> None:
    assert len(read(foreign("foo", body)).words) < 500


def test_raw_fields_nested_without_end_are_no_danger() -> None:
    assert "unknown kind 'foo'" in read(foreign("foo", b"\x91" * 4000 + b"\xc0")).words


def test_an_unreadable_body_is_shown_with_the_reason() -> None:
    reading = read(foreign("queue_changed", {"kind": "queue_changed", "waiting": 3}))
    assert reading.message is None
    assert reading.words == (
        "unreadable 'queue_changed' from x, 29 bytes: Expected `array`, got `int` - at `$.waiting`"
    )


def test_the_share_of_an_empty_tier_is_none() -> None:
    assert kv_share(TierPressure(tier="gpu", num_blocks=0, used=3)) == 0.0
    assert kv_share(TierPressure(tier="gpu", num_blocks=4, used=3, cached=3)) == 1.0
