"""From turns to a row of the table."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.harnesses.eval.report.metrics import make_row, percentile, reuse_pct
from hear.harnesses.eval.report.results import Row, TurnRecord

FIXED: dict[str, Any] = {
    "workload": "w",
    "engine": "e",
    "load": 100.0,
    "policy": "fcfs",
    "seed": 1,
    "guard_violations": 0,
    "operations": {},
    "operations_open": 0,
}


def turn(
    session: str,
    number: int,
    sent_s: float,
    first_token_s: float,
    finished_s: float,
    *,
    prompt_tokens: int = 100,
    reused: dict[str, int] | None = None,
    status: str = "completed",
) -> TurnRecord:
    return TurnRecord(
        request=f"{session}/{number}",
        session=session,
        turn=number,
        sent_s=sent_s,
        started_s=sent_s,
        first_token_s=first_token_s,
        finished_s=finished_s,
        prompt_tokens=prompt_tokens,
        reused_tokens=reused or {},
        status=status,
    )


def row(*turns: TurnRecord) -> Row:
    return make_row(turns, **FIXED)


TURNS = (
    turn("a", 1, 10, 11, 15),
    turn("a", 2, 20, 23, 30, reused={"gpu": 50, "cpu": 25}),
    turn("b", 1, 12, 14, 70, reused={"gpu": 100}, prompt_tokens=300),
)


def test_times_are_measured_from_when_a_turn_was_sent() -> None:
    got = row(*TURNS)
    assert got.turns == 3
    assert (got.ttft_p50_s, got.ttft_max_s) == (2, 3)
    assert got.ttft_p95_s == pytest.approx(2.9)


def test_a_session_waits_as_long_as_its_turns_together() -> None:
    assert row(*TURNS).session_s == ((15 - 10 + 30 - 20) + (70 - 12)) / 2
    assert row(*TURNS).session_p50_s == ((15 - 10 + 30 - 20) + (70 - 12)) / 2


def test_a_batch_runs_from_the_first_arrival_to_the_last_token() -> None:
    got = row(*TURNS)
    assert got.batch_s == 60
    assert got.turns_per_min == 3


def test_reuse_is_of_follow_up_turns_and_of_all() -> None:
    got = row(*TURNS)
    assert got.reuse_pct == 75
    assert got.reuse_all_pct == 35


def test_rejected_turns_are_counted_and_change_nothing_else() -> None:
    rejected = turn("a", 3, 1, 1, 1, status="rejected")
    got, plain = row(*TURNS, rejected), row(*TURNS)
    assert got.rejected == 1
    assert (got.turns, got.batch_s, got.session_s) == (plain.turns, plain.batch_s, plain.session_s)
    assert got.reuse_all_pct == plain.reuse_all_pct


def test_a_run_that_served_nothing_has_a_row_of_zeros() -> None:
    got = row(turn("a", 1, 5, 5, 5, status="rejected"))
    assert (got.turns, got.ttft_max_s, got.batch_s, got.turns_per_min, got.reuse_pct) == (0,) * 5
    assert got.rejected == 1
    assert row().session_s == 0


def test_reuse_without_prompts_is_none() -> None:
    assert reuse_pct([]) == 0


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, 0), ([7], 95, 7), ([1, 2], 50, 1.5), ([0, 1, 2, 3, 4], 95, 3.8), ([1, 9], 100, 9)],
)
def test_percentiles_are_interpolated(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100), st.floats(0, 100))
def test_percentiles_grow_and_stay_within_the_values(
    values: list[float], one: float, other: float
) -> None:
    values.sort()
    low, high = sorted((one, other))
    assert values[0] <= percentile(values, low) <= percentile(values, high) + 1e-6
    assert percentile(values, high) <= values[-1] + 1e-6


def test_an_engine_that_served_nothing_is_noted() -> None:
    served = msgspec.structs.replace(turn("a", 1, 10, 11, 15), engine="a")
    got = make_row([served], engine_names=["a", "b"], **FIXED)
    assert got.turns_by_engine == {"a": 1, "b": 0}
    assert got.notes == ("b served no turn",)
