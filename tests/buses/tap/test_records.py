"""Lines of JSON: their fields, which are a promise, and what becomes of hashes."""

import json
from typing import Any

import msgspec
import pytest

from hear.blocks import pack
from hear.buses.observe.tap.reading import read
from hear.buses.observe.tap.records import Records
from hear.codec import KINDS
from hear.delivery import Arrival
from hear.messages import BlocksStored, Envelope, ResidencyChanged
from tests.buses.tap.builders import Voice, foreign
from tests.hear.golden_examples import EXAMPLES

FIELDS = [
    "type",
    "time_s",
    "subject",
    "id",
    "source",
    "epoch",
    "seq",
    "tenant",
    "category",
    "kind",
    "key",
    "arrival",
    "size_bytes",
    "known",
    "problem",
    "words",
    "body",
]


def record(envelope: Envelope, *, all_hashes: bool = False) -> dict[str, Any]:
    line = Records(all_hashes=all_hashes).message(read(envelope, Arrival.NEXT))
    assert "\n" not in line
    loaded: dict[str, Any] = json.loads(line)
    return loaded


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_the_same_fields_and_its_whole_body(kind: str) -> None:
    message, envelope = EXAMPLES[kind]
    made = record(envelope)
    assert list(made) == FIELDS
    assert list(made["key"]) == [
        "request",
        "context",
        "context_version",
        "engine",
        "operation",
        "workflow",
    ]
    assert made["arrival"] == "next"
    assert set(made["body"]) == {"kind", *msgspec.structs.asdict(message)}


def test_hashes_are_a_count_and_the_first_few_or_all() -> None:
    stored = BlocksStored(tier="gpu", parent=2**63, prefix_hashes=pack(range(1, 6)))
    envelope = Voice("e").say(ResidencyChanged(changes=(stored,)), engine="e")
    few = record(envelope)["body"]["changes"][0]
    assert few["prefix_hashes"] == {
        "count": 5,
        "hex": ["0000000000000001", "0000000000000002", "0000000000000003"],
    }
    assert few["parent"] == "8000000000000000"
    every = record(envelope, all_hashes=True)["body"]["changes"][0]
    assert len(every["prefix_hashes"]["hex"]) == every["prefix_hashes"]["count"] == 5


def test_an_unknown_kind_carries_its_raw_fields() -> None:
    made = record(foreign("foo", {"kind": "foo", "n": 3, "blob": b"\x01\xff", "many": [1, {2: 3}]}))
    assert made["known"] is False
    assert made["body"] == {"kind": "foo", "n": 3, "blob": "01ff", "many": [1, {"2": 3}]}


def test_an_unreadable_body_is_null_with_the_problem() -> None:
    made = record(foreign("queue_changed", b"\xc1"))
    assert made["known"] is True
    assert made["body"] is None
    assert made["problem"]


def test_a_kind_that_nests_without_end_is_cut() -> None:
    assert record(foreign("foo", b"\x91" * 200 + b"\xc0"))["body"] is not None
    assert record(foreign("foo", b"\x91" * 100_000 + b"\xc0"))["body"] is None


def test_gaps_and_notices_are_records_of_their_own() -> None:
    assert json.loads(Records().gap(1.5, "e", "state.default.e.queue", 3)) == {
        "type": "gap",
        "time_s": 1.5,
        "source": "e",
        "stem": "state.default.e.queue",
        "missed": 3,
    }
    assert json.loads(Records().notice(2.0, "x"))["type"] == "notice"
