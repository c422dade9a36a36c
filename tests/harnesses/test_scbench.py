"""The SCBench-shaped generator: shapes, draws from one seed, prefixes, and bad parameters."""

from itertools import pairwise
from statistics import mean, stdev
from typing import Any

import pytest

from hear.errors import ConfigError
from hear.harnesses.eval.workloads.scbench import TASKS, generate


def test_the_fitted_workload_has_the_shape_that_it_was_fitted_with() -> None:
    workload = generate()
    assert workload.name == "scbench"
    assert (len(workload.sessions), workload.num_turns) == (40, 220)
    for session in workload.sessions:
        assert len(session.turns) in (5, 6)
        assert 20_200 <= session.turns[0].prompt_tokens <= 45_200
        assert {turn.output_tokens for turn in session.turns} == {150}
        for before, turn in pairwise(session.turns):
            assert turn.prompt_tokens == before.prompt_tokens + 150 + 200


@pytest.mark.parametrize("task", sorted(TASKS))
def test_a_task_has_its_sessions_and_turns_and_fits_the_engine(task: str) -> None:
    shape = TASKS[task]
    workload = generate(task)
    assert len(workload.sessions) == shape.sessions
    assert workload.num_turns == shape.turns
    assert {len(session.turns) for session in workload.sessions} <= {
        shape.turns // shape.sessions,
        -(-shape.turns // shape.sessions),
    }
    for session in workload.sessions:
        last = session.turns[-1]
        assert last.prompt_tokens + last.output_tokens <= 131_072
        limits = [turn.output_tokens for turn in session.turns]
        period = len(shape.output_tokens)
        assert limits[:period] == list(shape.output_tokens)[: len(limits)]


def test_contexts_are_cut_to_the_engine_and_not_left_out() -> None:
    whole = generate(max_tokens=10**9).sessions
    cut = generate(max_tokens=30_000).sessions
    assert len(cut) == len(whole)
    for longer, shorter in zip(whole, cut, strict=True):
        last = shorter.turns[-1]
        assert last.prompt_tokens + last.output_tokens <= 30_000
        if longer.turns[-1].prompt_tokens + 150 <= 30_000:
            assert longer == shorter
        else:
            assert last.prompt_tokens + last.output_tokens == 30_000


def test_a_turn_shares_the_full_blocks_of_the_prompt_and_the_answer_before_it() -> None:
    for session in generate("repoqa_kv", sessions=6).sessions:
        assert any(turn.output_hashes for turn in session.turns)
        for before, turn in pairwise(session.turns):
            held = (*before.prompt_hashes, *before.output_hashes)
            assert len(before.prompt_hashes) == before.prompt_tokens // 512
            assert len(held) == (before.prompt_tokens + before.output_tokens) // 512
            assert turn.prompt_hashes[: len(held)] == held


def test_no_two_sessions_share_a_block_nor_do_seeds_or_tasks() -> None:
    workloads = [generate(seed=0), generate(seed=1), generate("repoqa"), generate("en_qa")]
    hashes = [
        set(session.turns[-1].prompt_hashes)
        for workload in workloads
        for session in workload.sessions
    ]
    assert len(set.union(*hashes)) == sum(map(len, hashes))


def test_all_is_drawn_from_the_seed() -> None:
    assert generate(seed=7) == generate(seed=7)
    assert generate(seed=7) != generate(seed=8)


def test_more_sessions_begin_with_the_same_ones() -> None:
    assert generate(sessions=60).sessions[:20] == generate(sessions=20).sessions


def test_think_times_are_normal_never_below_0_and_only_between_turns() -> None:
    sessions = generate(sessions=400).sessions
    thinks = [turn.think_s for session in sessions for turn in session.turns[1:]]
    assert all(session.turns[0].think_s == 0.0 for session in sessions)
    assert mean(thinks) == pytest.approx(5.0, abs=0.1)
    assert stdev(thinks) == pytest.approx(1.0, abs=0.1)
    wild = [turn.think_s for each in generate(think_sd_s=50).sessions for turn in each.turns]
    assert min(wild) == 0.0


def test_sessions_arrive_at_the_rate() -> None:
    starts = [session.start_s for session in generate(sessions=1000, rate=2.0).sessions]
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(500, rel=0.1)


def test_smaller_blocks_name_the_same_tokens() -> None:
    coarse, fine = generate(block_size=512), generate(block_size=64)
    for one, other in zip(coarse.sessions, fine.sessions, strict=True):
        for turn, same in zip(one.turns, other.turns, strict=True):
            assert turn.prompt_tokens == same.prompt_tokens
            assert len(same.prompt_hashes) == same.prompt_tokens // 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "retr_vk"}, r"SCBench task: got 'retr_vk': did you mean 'retr_kv'\?"),
        ({"sessions": 0}, "sessions: got 0, expected at least 1"),
        ({"rate": 0.0}, "rate: got 0 sessions a second, expected above 0"),
        ({"block_size": 0}, "block_size: got 0, expected at least 1"),
        ({"think_mean_s": -1.0}, "think time: got mean -1 and deviation 1 s, expected both"),
        ({"think_sd_s": float("nan")}, "think time: got mean 5 and deviation nan s"),
        ({"max_tokens": 1750}, r"max_tokens: got 1750, expected more than (1750|2100), what"),
    ],
)
def test_a_parameter_that_cannot_be_used_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        generate(**options)
