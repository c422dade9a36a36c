"""Answers by stem that are remembered, since few stems make up all traffic, and stay bounded."""

from collections.abc import Hashable
from typing import Final, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

_MAX_STEM: Final = 256  # letters; longer ones nobody uses but to fill memory
_MAX_ANSWERS: Final = 16_384


def remember(answers: dict[_K, _V], key: _K, stem: str, answer: _V) -> _V:
    """Note an answer under a key that is about a stem; returns the answer."""
    if len(stem) <= _MAX_STEM:
        if len(answers) >= _MAX_ANSWERS:
            answers.clear()
        answers[key] = answer
    return answer
