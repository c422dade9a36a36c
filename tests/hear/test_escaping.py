"""What may be shown: every character by its category, and what becomes of the others."""

import json
import sys
import unicodedata
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.escaping import (
    MAX_LINE,
    MAX_PART,
    MAX_WORD,
    cell,
    legible,
    one_line,
    printable,
    shortened,
    to_json,
)

ANYTHING = st.text(st.characters(exclude_categories=()))


def test_every_character_is_judged_by_its_category() -> None:
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        category = unicodedata.category(character)
        shown = printable(character)
        if category[0] == "C" or category in ("Zl", "Zp"):
            assert shown != character
        if shown != character:
            assert shown.isascii()
            assert shown.isprintable()
            assert shown[0] == "\\"
        elif category in ("Lu", "Ll", "Nd", "Sm", "Ps"):
            assert shown == character


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("an ordinary id-1/2:3", "an ordinary id-1/2:3"),
        ("größer 上下文 █", "größer 上下文 █"),
        ("\x1b]0;t\x07", "\\x1b]0;t\\x07"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("a\u202eb", "a\\u202eb"),
        ("a\ud800b", "a\\ud800b"),
        ("\U000e0041", "\\U000e0041"),
        ("r\ufe0f\u3164", "r\\ufe0f\\u3164"),
        ("C:\\x1b", "C:\\x1b"),
    ],
)
def test_what_is_not_safe_is_named(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(f"{text}\n", lines=True) == f"{printable(text)}\n" or "\n" in text


def test_newlines_of_our_own_may_stay() -> None:
    assert printable("a\n\x1b\nb", lines=True) == "a\n\\x1b\nb"


@given(ANYTHING)
def test_what_has_passed_passes_again_unchanged(text: str) -> None:
    for function in (printable, one_line, cell):
        once = function(text)
        assert once.isprintable()
        assert function(once) == once
        once.encode()


@given(ANYTHING, st.integers(4, 50))
def test_what_is_cut_says_so(text: str, limit: int) -> None:
    cut = shortened(text, limit)
    assert len(cut) <= limit
    assert cut == text or (cut.endswith("...") and text.startswith(cut[:-3]))


def test_long_words_and_lines_are_cut_and_what_follows_them_is_not() -> None:
    assert one_line(f"request {'a' * 10_000} ends") == f"request {'a' * MAX_WORD}... ends"
    assert len(one_line("a b " * 10_000)) == MAX_LINE
    assert len(cell("\x1b" * 100, 60)) == 60


class Fact(msgspec.Struct):
    name: str
    of: tuple[str, ...] = ()
    more: dict[str, Any] = {}
    at_s: float = 0.0


def test_facts_are_made_legible_whatever_they_are_in() -> None:
    fact = Fact("a\x1b", ("b\n", "c" * 1_000), {"d\r": ["e\x07", 1, None]}, 2.5)
    assert legible(fact) == Fact(
        "a\\x1b",
        ("b\\n", "c" * (MAX_PART - 3) + "..."),
        {"d\\r": ["e\\x07", 1, None]},
        2.5,
    )


@given(st.dictionaries(ANYTHING, st.lists(ANYTHING, max_size=2), max_size=2))
@pytest.mark.parametrize("pretty", [False, True])
def test_json_holds_the_same_in_characters_that_are_safe(pretty: bool, value: Any) -> None:
    text = to_json(value, pretty=pretty)
    assert json.loads(text) == value
    assert text.replace("\n", "").isprintable()
    text.encode()


def test_ordinary_json_is_msgspecs_own() -> None:
    value = {"a": ["größer", 1.5, None], "b": {}}
    assert to_json(value) == msgspec.json.encode(value).decode()
    assert to_json(value, pretty=True) == msgspec.json.format(msgspec.json.encode(value)).decode()
