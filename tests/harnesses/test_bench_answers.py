"""Answers are compared token for token, and by their text where no tokens are told."""

import pytest

from hear.harnesses.eval.bench.answers import differences, num_told
from hear.interfaces import InferenceResult
from hear.messages import RequestOutcome
from hear.messages.outcome import RequestStatus


def answered(*ids: int, text: str = "", status: RequestStatus = "completed") -> InferenceResult:
    return InferenceResult(RequestOutcome(status=status), 0, 0, 0, 0, text=text, token_ids=ids)


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (answered(1, 2, 3), answered(1, 2, 3), []),
        (answered(1, 2, 3), answered(1, 9, 3), ["r from token 2 on"]),
        (answered(1, 2, 3), answered(1, 2), ["r from token 3 on"]),
        (answered(text="a"), answered(text="a"), []),
        (answered(text="a"), answered(text="b"), ["r in its text"]),
        (answered(1, text="a"), answered(text="a"), []),
        (answered(1), answered(status="failed"), []),
        (answered(), answered(), []),
    ],
)
def test_a_difference_is_told_with_its_place(
    one: InferenceResult, other: InferenceResult, told: list[str]
) -> None:
    assert differences({"r": one}, {"r": other}) == told


def test_what_was_not_asked_in_both_is_not_compared() -> None:
    assert differences({"r": answered(1)}, {"s": answered(2)}) == []


def test_only_answers_with_words_count() -> None:
    assert num_told({"a": answered(1), "b": answered(text="x"), "c": answered()}) == 2
