"""The agentic loader: both forms of prompts, sub-agents, gaps, and every bad line it may meet."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hear.errors import ConfigError
from hear.harnesses.eval.workloads import agentic
from hear.harnesses.eval.workloads.lines import shipped
from hear.harnesses.eval.workloads.workload import Session, Turn, Workload

SAMPLE = agentic.load()


def request(
    t: float, ids: list[int] | None, tokens: int | None = None, out: int = 10, **more: Any
) -> dict[str, Any]:
    """One request that took 1 s; without ``tokens`` its prompt ends with its last block."""
    length = 64 * len(ids or ()) if tokens is None else tokens
    blocks = {} if ids is None else {"hash_ids": ids}
    return {"t": t, "type": "n", "in": length, "out": out, "api_time": 1.0, **blocks, **more}


def compact(t: float, tokens: int, keep: int, *runs: tuple[int, int]) -> dict[str, Any]:
    return request(t, None, tokens, keep=keep, runs=list(runs))


def sub_agent(t: float, name: str, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    entry = {"t": t, "type": "subagent", "agent_id": name, "subagent_type": "Explore"}
    return {**entry, "duration_ms": 5000, "requests": list(requests), **more}


def recording(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "r", "block_size": 64, "requests": list(requests), **more}


def load(tmp_path: Path, *lines: dict[str, Any], **options: Any) -> Workload:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return agentic.load(path, **{"block_size": 64, **options})


def turns(tmp_path: Path, *requests: dict[str, Any], **options: Any) -> tuple[Turn, ...]:
    return load(tmp_path, recording(*requests), **options).sessions[0].turns


def family(workload: Workload) -> dict[str, Session]:
    return {session.id: session for session in workload.sessions}


def test_the_shipped_sample_loads_by_default_and_each_request_fits() -> None:
    tops = [session for session in SAMPLE.sessions if session.parent is None]
    assert (SAMPLE.name, SAMPLE.block_size) == ("agentic", 512)
    assert (len(tops), len(SAMPLE.sessions), SAMPLE.num_turns) == (32, 54, 1497)
    for session in SAMPLE.sessions:
        for turn in session.turns:
            assert turn.prompt_tokens + turn.output_tokens <= 131_072
            assert len(turn.prompt_hashes) == turn.prompt_tokens // 512
            assert 0 <= turn.think_s <= 60


def test_the_shipped_sample_has_the_recorded_sub_agents() -> None:
    sessions = family(SAMPLE)
    main = sessions["trace_0291"]
    one, two = sessions["trace_0291/agent_001"], sessions["trace_0291/agent_002"]
    assert (main.role, one.role, one.parent) == ("main", "Explore", "trace_0291")
    # After the request at 1085 s, which took 15.64 s; the second one, at 1180.553 s, is capped.
    assert (one.after_turns, two.after_turns) == (16, 16)
    assert one.start_s == pytest.approx(1148.013 - 1085 - 15.64)
    assert two.start_s == 60.0
    # The turn at 1209 s came after the first one's end, at 1148.013 + 46.656 s.
    assert main.turns[16].waits_for == (one.id,)
    assert main.turns[16].think_s == pytest.approx(1209 - 1148.013 - 46.656)
    assert main.turns[17].waits_for == (two.id,)


def test_both_forms_of_prompts_give_the_same_turns(tmp_path: Path) -> None:
    original = [
        request(0, [1, 2, 3], tokens=200),
        sub_agent(2, "a", request(0, [50, 51]), request(1, [50, 51, 60])),
        request(10, [1, 2, 9, 10, 4], tokens=330),
        request(20, [1, 2]),
    ]
    packed = [
        compact(0, 200, 0, (1, 3)),
        sub_agent(2, "a", compact(0, 128, 0, (50, 2)), compact(1, 192, 2, (60, 1))),
        compact(10, 330, 2, (9, 2), (4, 1)),
        compact(20, 128, 2),
    ]
    assert load(tmp_path, recording(*original)) == load(tmp_path, recording(*packed))


def test_prompts_share_hashes_as_far_as_their_ids_agree_from_the_start(tmp_path: Path) -> None:
    one, two, three = turns(
        tmp_path, request(0, [1, 2, 3, 4]), request(9, [1, 2, 9, 4]), request(19, [1, 2, 9])
    )
    assert two.prompt_hashes[:2] == one.prompt_hashes[:2]
    assert not set(two.prompt_hashes[2:]) & set(one.prompt_hashes)  # id 4 has another parent
    assert three.prompt_hashes == two.prompt_hashes[:3]


def test_a_larger_block_is_full_only_if_all_of_its_parts_are(tmp_path: Path) -> None:
    requests = [
        compact(0, 64 * 7 + 5, 0, (1, 7)),
        compact(9, 64 * 9, 7, (8, 2)),
        compact(19, 64 * 9, 5, (90, 4)),
    ]
    one, two, three = turns(tmp_path, *requests, block_size=256)
    assert [len(turn.prompt_hashes) for turn in (one, two, three)] == [1, 2, 2]
    assert one.prompt_hashes[0] == two.prompt_hashes[0] == three.prompt_hashes[0]
    assert two.prompt_hashes[1] != three.prompt_hashes[1]


def test_grouped_blocks_agree_just_where_all_their_parts_do() -> None:
    fine = family(agentic.load(block_size=64))
    for session in SAMPLE.sessions[:12]:
        its = fine[session.id].turns
        for (a, b), (fine_a, fine_b) in zip(pairwise(session.turns), pairwise(its), strict=True):
            shared = _common(fine_a.prompt_hashes, fine_b.prompt_hashes)
            assert _common(a.prompt_hashes, b.prompt_hashes) == shared // 8


def _common(one: Any, other: Any) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_sessions_share_no_block_but_sub_agents_of_one_share_theirs(tmp_path: Path) -> None:
    agents = [sub_agent(2, name, request(0, [50, 51])) for name in ("a", "b")]
    lines = [recording(request(0, [1, 2]), *agents, id=name) for name in ("r", "s")]
    sessions = family(load(tmp_path, *lines))
    hashes = {name: each.turns[0].prompt_hashes for name, each in sessions.items()}
    assert hashes["r/a"] == hashes["r/b"]
    assert not set(hashes["r"]) & set(hashes["s"])
    assert not set(hashes["r/a"]) & set(hashes["s/a"])


def test_think_time_is_the_recorded_one_or_the_gap_and_never_too_long(tmp_path: Path) -> None:
    thinks = [
        turn.think_s
        for turn in turns(
            tmp_path,
            request(0, [1], think_time=3.0),  # none before the first
            request(10, [1], think_time=8.0),
            request(20, [1]),  # not recorded: what is left of the gap
            request(20.5, [1]),  # began before the other had ended
            request(25, [1], think_time=200.0),  # reaches back over more than one request
            request(900, [1], think_time=874.0),
        )
    ]
    assert thinks == [0.0, 8.0, 9.0, 0.0, 4.5, 60.0]
    capped = turns(tmp_path, request(0, [1]), request(10, [1]), max_think_s=2.0)
    assert capped[1].think_s == 2.0


def test_a_pause_is_for_a_tool_if_the_turn_before_stopped_to_use_one(tmp_path: Path) -> None:
    pauses = [
        turn.pause
        for turn in turns(
            tmp_path,
            request(0, [1], stop="tool_use"),
            request(5, [1], stop="end_turn"),
            request(10, [1], stop=""),
            request(15, [1]),
        )
    ]
    assert pauses == ["person", "tool", "person", "person"]


def test_a_turn_waits_for_the_sub_agents_that_had_ended_once_each(tmp_path: Path) -> None:
    sessions = family(
        load(
            tmp_path,
            recording(
                request(0, [1]),
                sub_agent(2, "quick", request(0, [50]), duration_ms=4000),
                sub_agent(3, "slow", request(0, [50]), duration_ms=15_000),
                sub_agent(4, "untold", request(0, [50]), request(2, [50]), duration_ms=None),
                sub_agent(5, "never", request(0, [50]), duration_ms=900_000),
                request(10, [1], think_time=9.0),
                request(17, [1], think_time=6.0),
                request(30, [1], think_time=12.0),
            ),
        )
    )
    main = sessions["r"]
    assert [turn.waits_for for turn in main.turns] == [
        (),
        ("r/quick", "r/untold"),
        (),
        ("r/slow",),
    ]
    # 10 - (4 + 2 + 1) s; then the recorded gap; then 30 - max(3 + 15, 17 + 1) s.
    assert [turn.think_s for turn in main.turns] == [0.0, 3.0, 6.0, 12.0]
    starts = [sessions[f"r/{name}"].start_s for name in ("quick", "slow", "untold", "never")]
    assert starts == [1.0, 2.0, 3.0, 4.0]
    assert {each.after_turns for each in sessions.values() if each.parent} == {1}


def test_a_sub_agent_before_the_first_request_starts_with_its_session(tmp_path: Path) -> None:
    agent = sub_agent(2, "a", request(0, [50]))
    main, sub = load(tmp_path, recording(agent, request(10, [1]))).sessions
    assert (sub.after_turns, sub.start_s) == (0, 2.0)
    assert (main.turns[0].waits_for, main.turns[0].think_s) == (("r/a",), 3.0)


def test_long_turns_are_left_out_and_what_they_waited_for_is_not_forgotten(tmp_path: Path) -> None:
    long = list(range(100, 120))
    main, sub = load(
        tmp_path,
        recording(
            request(0, [1]),
            sub_agent(2, "a", request(0, [50]), request(1, long)),
            sub_agent(2, "all-long", request(0, long)),
            request(10, long),
            request(20, [1, 2], think_time=9.0),
        ),
        max_tokens=1000,
    ).sessions
    assert [turn.prompt_tokens for turn in main.turns] == [64, 128]
    assert main.turns[1].waits_for == ("r/a",)
    assert main.turns[1].think_s == 9.0
    assert len(sub.turns) == 1


def test_a_session_of_which_nothing_is_left_takes_its_sub_agents_along(tmp_path: Path) -> None:
    gone = recording(request(0, list(range(20))), sub_agent(2, "a", request(0, [50])), id="gone")
    kept = recording(request(0, [1]))
    assert set(family(load(tmp_path, gone, kept, max_tokens=1000))) == {"r"}


def test_an_output_is_at_least_one_token(tmp_path: Path) -> None:
    assert turns(tmp_path, request(0, [1], out=0))[0].output_tokens == 1


def test_starts_are_drawn_from_the_seed_at_the_rate_and_all_else_is_recorded() -> None:
    assert agentic.load(seed=0) == SAMPLE
    other = agentic.load(seed=1, rate=0.014)
    assert [each.turns for each in other.sessions] == [each.turns for each in SAMPLE.sessions]
    starts, others = (
        [each.start_s for each in workload.sessions if each.parent is None]
        for workload in (SAMPLE, other)
    )
    assert starts == sorted(starts)
    assert starts != others
    again = [each.start_s for each in agentic.load(rate=0.014).sessions if each.parent is None]
    assert again == pytest.approx([start / 2 for start in starts])


ONE = request(5, [1, 2])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([request(4, [1])], r"r: requests\[1\]: t: got 4 after 5, expected times that never"),
        ([sub_agent(4, "a")], r"r: requests\[1\]: t: got 4 after 5, expected times that never"),
        (
            [sub_agent(6, "a", request(3, [1]), request(2, [1]))],
            r"r: requests\[1\]: requests\[1\]: t: got 2 after 3, expected times that never",
        ),
        ([request(6, [1], tokens=128)], r"r: requests\[1\]: got 1 block ids, expected 2, one fo"),
        ([compact(6, 192, 3)], r"r: requests\[1\]: keep: got 3, expected at most the 2 ids of"),
        ([compact(6, 192, 2, (7, 2))], r"r: requests\[1\]: got 4 block ids, expected 3, one fo"),
        ([request(6, None, 64)], r"r: requests\[1\]: got no prompt blocks, expected hash_ids"),
        ([request(6, None, 64, keep=1)], r"r: requests\[1\]: got no prompt blocks, expected"),
        ([request(6, [1], keep=1)], r"r: requests\[1\]: got hash_ids and keep or runs, expected"),
        (
            [sub_agent(6, "a"), sub_agent(7, "a")],
            r"r: requests\[2\]: agent_id: got 'a' again, expected one for each sub-agent",
        ),
        ([request(-6, [1])], r"requests\[1\]\.t: got -6, expected `float` >= 0"),
        ([request(6, [1], tokens=-1)], r"requests\[1\]\.in: got -1, expected `int` >= 1"),
        ([request(6, [1], out=-1)], r"requests\[1\]\.out: got -1, expected `int` >= 0"),
        ([request(6, [1], api_time=-1)], r"requests\[1\]\.api_time: got -1, expected `float` >="),
        ([request(6, [1], think_time=-1)], r"requests\[1\]\.think_time: got -1, expected `float"),
        ([request(6, [-1])], r"requests\[1\]\.hash_ids\[0\]: got -1, expected `int` >= 0"),
        ([compact(6, 64, 0, (1, -1))], r"requests\[1\]\.runs\[0\]\[1\]: got -1, expected `int`"),
        ([request(6, [1]) | {"out": "x"}], r"requests\[1\]\.out: got 'x', expected `int`"),
        ([request(6, [1], type="q")], r"requests\[1\]\.type: got 'q', expected one of the known"),
        ([{"type": "n", "t": 6}], r"requests\[1\]: got no `in`, expected this field"),
        (
            [sub_agent(6, "a", sub_agent(0, "b"))],
            r"requests\[1\]\.requests\[0\]\.type: got 'subagent', expected one of the known",
        ),
    ],
)
def test_a_bad_line_is_told_with_file_line_what_came_and_what_was_expected(
    tmp_path: Path, entries: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"trace\.jsonl:2: {message}") as caught:
        load(tmp_path, recording(ONE, id="good"), recording(ONE, *entries))
    assert "\n" not in str(caught.value)


def test_a_session_that_is_there_twice_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: r: got a session that .*:1 has"):
        load(tmp_path, recording(ONE), recording(ONE))


def test_a_block_size_that_does_not_hold_whole_source_blocks_is_told(tmp_path: Path) -> None:
    for size in (0, 100):
        with pytest.raises(ConfigError, match=f"r: block_size: got {size}, expected a multiple"):
            load(tmp_path, recording(ONE), block_size=size)


def test_an_empty_trace_a_missing_one_and_one_that_leaves_nothing_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace\.jsonl: got no session at all"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read: No such file"):
        agentic.load(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="none of the 1 sessions has a turn of at most 9 tokens"):
        load(tmp_path, recording(ONE), max_tokens=9)


def test_a_truncated_trace_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(shipped(agentic.SHIPPED).read_bytes()[:30_000])
    with pytest.raises(ConfigError, match=r"cut\.jsonl\.gz:\d+: got gzip data that is cut short"):
        agentic.load(path)


def test_impossible_parameters_are_told() -> None:
    with pytest.raises(ConfigError, match="max_think_s: got -1, expected at least 0"):
        agentic.load(max_think_s=-1)
    with pytest.raises(ConfigError, match="rate: got 0 sessions a second, expected above 0"):
        agentic.load(rate=0)
