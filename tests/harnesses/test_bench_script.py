"""A workload by its tokens: drawn from a seed, kept in a file, and named as engines name blocks."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.blocks import hash_tokens
from hear.errors import ConfigError
from hear.harnesses.eval.bench.script import Script, Shape, generate, load, of_workload, save
from hear.harnesses.eval.workloads.workload import Session, Turn, Workload

SMALL = Shape(sessions=3, turns=2, context_tokens=(20, 40), question_tokens=4, output_tokens=3)


def _hashes(token_ids: Any) -> list[int]:
    return hash_tokens(token_ids, 8)


@given(st.integers(0, 2**62), st.integers(1, 4), st.integers(1, 4))
def test_a_session_is_one_stream_and_each_prompt_a_beginning_of_it(
    seed: int, sessions: int, turns: int
) -> None:
    shape = msgspec.structs.replace(SMALL, sessions=sessions, turns=turns)
    script = generate(seed, shape)
    assert script.num_turns == sessions * turns
    assert script.max_tokens <= shape.max_tokens
    for session in script.sessions:
        lengths = [turn.prompt_tokens for turn in session.turns]
        assert 24 <= lengths[0] <= 44
        assert [b - a for a, b in pairwise(lengths)] == [7] * (turns - 1)
        assert len(session.token_ids) == lengths[-1] + 3
        assert all(16 <= token < 500 for token in session.token_ids)
        assert session.turns[0].think_s == 0


def test_equal_seeds_give_equal_scripts_and_others_other_tokens() -> None:
    assert generate(7) == generate(7)
    assert generate(7).sessions[0].token_ids != generate(8).sessions[0].token_ids


def test_more_sessions_begin_with_the_same_ones() -> None:
    more = generate(1, msgspec.structs.replace(SMALL, sessions=5))
    assert more.sessions[:3] == generate(1, SMALL).sessions


def test_prompts_are_named_as_the_engine_names_their_full_blocks() -> None:
    workload = generate(1, SMALL).workload(8, _hashes)
    for session in workload.sessions:
        for turn in session.turns:
            assert len(turn.prompt_token_ids) == turn.prompt_tokens
            assert list(turn.prompt_hashes) == hash_tokens(turn.prompt_token_ids, 8)


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    scripts = (generate(1, SMALL), generate(2, SMALL))
    save(scripts, tmp_path / "w.json")
    assert load(tmp_path / "w.json") == scripts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context_tokens": (9, 8)}, "got 9:8 tokens"),
        ({"context_tokens": (0, 8)}, "got 0:8 tokens"),
        ({"turns": 0}, "turns: got 0"),
        ({"sessions": 0}, "sessions: got 0"),
        ({"output_tokens": 0}, "output tokens: got 0"),
        ({"rate": 0.0}, "rate: got 0"),
        ({"think_mean_s": -1.0}, "think time: got mean -1"),
    ],
)
def test_an_impossible_shape_is_said_so(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(1, msgspec.structs.replace(Shape(), **changes))


def _spoilt(**changes: Any) -> str:
    script = json.loads(msgspec.json.encode(generate(1, SMALL)))
    script["sessions"][0] |= changes
    return json.dumps([script])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no workload"),
        ("[]", "expected at least one"),
        ('[{"name": "x", "seed": 1, "sessions": []}]', "no session"),
        (_spoilt(token_ids=[1, 2]), "expected 1 to the 2 of its session"),
        (_spoilt(token_ids=[-1]), "holds no workload of hear bench"),
        (_spoilt(turns=[]), "has no turn"),
        (_spoilt(id="scbench-small-001"), "is there twice"),
    ],
)
def test_a_file_that_holds_no_scripts_is_said_so(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(path)


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.json")


def test_a_script_is_small_enough_to_keep() -> None:
    assert len(msgspec.json.encode(generate(1))) < 500_000
    assert isinstance(generate(1), Script)


def test_a_trace_becomes_a_script_whose_prompts_have_in_common_what_they_have_in_truth(
    tmp_path: Path,
) -> None:
    def turn(blocks: tuple[int, ...], tokens: int, **more: Any) -> Turn:
        return Turn(prompt_tokens=tokens, output_tokens=3, prompt_hashes=blocks, **more)

    workload = Workload(
        name="trace",
        block_size=16,
        sessions=(
            Session(id="a", turns=(turn((1, 2), 40, at_s=0.5), turn((1, 2, 3), 50, think_s=2.0))),
            Session(id="b", turns=(turn((1, 9), 33, after=(("a", 1),)),), parent="a"),
        ),
        remarks=("said",),
    )
    script = of_workload(workload, seed=7)
    save([script], tmp_path / "w.json")
    assert load(tmp_path / "w.json") == (script,)
    made = script.workload(8, _hashes)
    assert made.remarks == ("said",)
    (first, second), (other,) = (session.turns for session in made.sessions)
    assert [len(t.prompt_token_ids) for t in (first, second, other)] == [40, 50, 33]
    assert second.prompt_token_ids[:32] == first.prompt_token_ids[:32]
    assert second.prompt_token_ids[32:40] != first.prompt_token_ids[32:]
    assert other.prompt_token_ids[:16] == first.prompt_token_ids[:16]
    assert other.prompt_token_ids[16:32] != first.prompt_token_ids[16:32]
    assert len(second.prompt_hashes) == 6
    assert (first.at_s, second.think_s, other.after) == (0.5, 2.0, (("a", 1),))
    assert made.sessions[1].parent == "a"
    assert len(script.longest_prompt) == 50


def test_a_trace_of_too_many_tokens_is_no_script() -> None:
    turns = (Turn(prompt_tokens=15_000_000, output_tokens=1, prompt_hashes=()),) * 2
    workload = Workload(name="t", block_size=16, sessions=(Session(id="a", turns=turns),))
    with pytest.raises(ConfigError, match="got prompts of 30,000,000 tokens in all, expected at"):
        of_workload(workload, seed=1)
