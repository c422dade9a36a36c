"""Whether what a harness describes fits an engine."""

import pytest

from hear.blocks import pack
from hear.compatibility import differences, in_words, serves
from hear.messages import CapabilitiesReported, RequestDescribed

ENGINE = CapabilitiesReported(model="m", block_size=16, hash_scheme="s")


@pytest.mark.parametrize(
    ("described", "differing"),
    [
        ({}, []),
        ({"block_size": 16, "hash_scheme": "s", "model": "m"}, []),
        ({"block_size": 32}, ["block size"]),
        ({"hash_scheme": "t"}, ["hash scheme"]),
        ({"model": "n"}, ["model"]),
        (
            {"block_size": 32, "hash_scheme": "t", "model": "n"},
            ["model", "block size", "hash scheme"],
        ),
    ],
)
def test_what_both_tell_and_tell_differently_differs(
    described: dict[str, object], differing: list[str]
) -> None:
    message = RequestDescribed(prompt_tokens=99, prefix_hashes=pack([1]), **described)  # type: ignore[arg-type]
    assert [found.what for found in differences(message, ENGINE)] == differing
    assert differences(message, None) == ()
    assert differences(message, CapabilitiesReported()) == ()


def test_without_hashes_only_the_model_matters() -> None:
    message = RequestDescribed(prompt_tokens=99, block_size=32, hash_scheme="t", model="n")
    assert [found.what for found in differences(message, ENGINE)] == ["model"]


def test_an_engine_that_tells_no_model_may_serve_any() -> None:
    assert serves("n", CapabilitiesReported())
    assert serves("n", None)
    assert serves("", ENGINE)
    assert not serves("n", ENGINE)


def test_the_words_name_both_sides() -> None:
    message = RequestDescribed(prompt_tokens=99, block_size=32, prefix_hashes=pack([1]))
    assert in_words(differences(message, ENGINE), "agent", "e0") == (
        "block size: agent uses 32, e0 16"
    )
