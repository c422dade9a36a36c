from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.arbitration import Arbiter, ClaimKey, claim_key_of
from hear.messages import Axis, Force, Key, Prioritise
from hear.operation import Operation
from tests.hear.builders import operation

PLACE: ClaimKey = ("order", "r")


def ask(source: str, force: Force = "preference", id: str = "op") -> Operation:
    return operation(id, source=source, control=Prioritise(priority=1, force=force))


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("order", ("order", "r")),
        ("wait", ("wait", "r")),
        ("admission", ("admission", "r")),
        ("route", ("route", "r")),
        ("mode", ("mode", "r")),
        ("retention", ("retention", "c")),
        ("placement", ("placement", "c")),
        ("none", None),
    ],
)
def test_blocks_are_claimed_by_context_and_all_else_by_request(
    axis: Axis, expected: ClaimKey | None
) -> None:
    assert claim_key_of(axis, Key(request="r", context="c", engine="e")) == expected


def test_nothing_is_claimed_without_a_request_or_context() -> None:
    assert claim_key_of("order", Key(context="c")) is None
    assert claim_key_of("retention", Key(request="r")) is None


@pytest.mark.parametrize(
    ("held_by", "asked_by", "wins"),
    [
        (ask("low", "requirement"), ask("high", "preference"), False),
        (ask("low", "preference"), ask("low2", "requirement"), True),
        (ask("high", "preference"), ask("low", "requirement"), True),
        (ask("high"), ask("low"), False),
        (ask("low"), ask("high"), True),
        (ask("low"), ask("low2"), True),
        (ask("low", "requirement"), ask("high", "requirement"), True),
        (ask("high", "requirement"), ask("low", "requirement"), False),
        (ask("low", "requirement"), ask("low", "preference"), False),
        (ask("low", "requirement"), ask("low", "requirement"), True),
        (ask("low", "preference"), ask("low", "preference"), True),
    ],
    ids=lambda value: f"{value.source}-{value.control.force}" if hasattr(value, "source") else "",
)
def test_requirement_before_preference_then_rank_then_the_later(
    held_by: Operation, asked_by: Operation, wins: bool
) -> None:
    arbiter = Arbiter({"low": 1, "low2": 1, "high": 2})
    arbiter.claim(PLACE, held_by)
    result = arbiter.claim(PLACE, asked_by)
    assert result == (wins, held_by if wins else None)
    assert arbiter.holder(PLACE) is (asked_by if wins else held_by)


def test_claims_on_other_axes_and_keys_do_not_meet() -> None:
    arbiter = Arbiter()
    claim_keys: list[ClaimKey] = [
        ("order", "r"),
        ("order", "r2"),
        ("wait", "r"),
        ("retention", "r"),
    ]
    for claim_key in claim_keys:
        assert arbiter.claim(claim_key, ask("p", id=str(claim_key))) == (True, None)
    assert len(arbiter) == 4


def test_a_dropped_claim_stands_in_nobodys_way() -> None:
    arbiter, first = Arbiter(), ask("a", "requirement")
    arbiter.claim(PLACE, first)
    arbiter.drop(PLACE, ask("a", "requirement"))  # another operation, so not the holder
    assert arbiter.holder(PLACE) is first
    arbiter.drop(PLACE, first)
    assert arbiter.claim(PLACE, ask("b")) == (True, None)
    arbiter.drop(PLACE)
    assert len(arbiter) == 0


def test_the_claims_of_one_policy_are_found() -> None:
    arbiter = Arbiter()
    mine, other = ask("mine"), ask("other")
    arbiter.claim(("order", "r1"), mine)
    arbiter.claim(("order", "r2"), other)
    assert arbiter.of_source("mine") == [(("order", "r1"), mine)]


def test_the_ranks_cannot_be_changed_from_outside() -> None:
    ranks = {"a": 1}
    arbiter = Arbiter(ranks)
    ranks["b"] = 2
    arbiter.claim(PLACE, ask("a"))
    assert not arbiter.claim(PLACE, ask("b")).wins


_forces: tuple[Force, ...] = get_args(Force)
_asks = st.builds(ask, st.sampled_from("abc"), st.sampled_from(_forces))


@given(st.lists(_asks, max_size=12), st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)))
def test_no_preference_overrides_a_requirement(
    asks: list[Operation], ranks: dict[str, int]
) -> None:
    arbiter = Arbiter(ranks)
    required = False
    for each in asks:
        arbiter.claim(PLACE, each)
        required = required or each.control.force == "requirement"
        holder = arbiter.holder(PLACE)
        assert holder is not None
        assert (holder.control.force == "requirement") == required
