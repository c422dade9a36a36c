"""The Mooncake loader: sessions, window, lengths and hashes, and every bad line it may meet."""

import gzip
import hashlib
import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hear.errors import ConfigError
from hear.harnesses.eval.workloads import mooncake
from hear.harnesses.eval.workloads.lines import read_lines, shipped
from hear.harnesses.eval.workloads.sessions import rebuild
from hear.harnesses.eval.workloads.traces.mooncake import Row, read
from hear.harnesses.eval.workloads.workload import Workload

ALL = read([shipped(mooncake.SHIPPED)]).requests
ALL_ROWS = [row for _, row in read_lines(shipped(mooncake.SHIPPED), Row)]
ROWS = [row for row in ALL_ROWS if (row.timestamp or 0) < 900_000]


def line(
    at_ms: float, ids: list[int], tokens: int | None = None, output: int = 100, **more: Any
) -> dict[str, Any]:
    """One request; without ``tokens`` all of its blocks are full."""
    length = 512 * len(ids) if tokens is None else tokens
    return {"timestamp": at_ms, "input_length": length, "output_length": output} | {
        "hash_ids": ids,
        **more,
    }


def trace(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def load(tmp_path: Path, *lines: dict[str, Any], **options: Any) -> Workload:
    return mooncake.load(trace(tmp_path, *lines), **options)


def tokens(workload: Workload) -> list[list[int]]:
    return [[turn.prompt_tokens for turn in each.turns] for each in workload.sessions]


def test_the_first_900_s_of_the_shipped_trace_are_what_loads_by_default() -> None:
    workload = mooncake.load()
    arrivals = [turn.at_s or 0.0 for each in workload.sessions for turn in each.turns]
    assert workload.name == "mooncake"
    assert workload.block_size == 512
    assert (len(workload.sessions), workload.num_turns) == (1972, 2568)
    assert 0 <= min(arrivals) < max(arrivals) < 900
    assert workload == mooncake.load(window=(0, 900))


def test_the_shipped_trace_is_the_published_one() -> None:
    with shipped(mooncake.SHIPPED).open("rb") as packed:
        content = gzip.GzipFile(fileobj=packed).read()
    digest = hashlib.sha256(content).hexdigest()
    notice = (shipped("NOTICE")).read_text(encoding="utf-8")
    assert digest in notice
    assert len(ALL_ROWS) == 12_031


def test_sessions_that_are_told_are_those_that_are_reconstructed_if_they_are_not(
    tmp_path: Path,
) -> None:
    numbers = rebuild(ALL, 512).sessions[: len(ROWS)]
    turns: Counter[int] = Counter()
    told = []
    for row, session in zip(ROWS, numbers, strict=True):
        turns[session] += 1
        told.append(structs.asdict(row) | {"session": session, "turn": turns[session]})
    loaded, shipped_one = mooncake.load(trace(tmp_path, *told)), mooncake.load()
    assert loaded.sessions == shipped_one.sessions
    assert loaded.remarks == ("sessions as the trace tells them",)


# -- layers -----------------------------------------------------------------------------------

LAYERS = [mooncake.load(layer=layer) for layer in range(4)]


def test_layers_are_further_windows_and_share_no_session() -> None:
    assert [layer.num_turns for layer in LAYERS] == [2568, 2500, 2655, 2505]
    ids = [each.id for layer in LAYERS for each in layer.sessions]
    assert len(ids) == len(set(ids)) == 8051
    for layer in LAYERS:
        assert all(0 <= (turn.at_s or 0) < 900 for each in layer.sessions for turn in each.turns)


def test_layers_share_only_what_the_trace_shares_between_sessions() -> None:
    """Those are few blocks: a layer holds no part of a session that another one holds."""
    blocks = [
        {hashed for each in layer.sessions for turn in each.turns for hashed in turn.prompt_hashes}
        for layer in LAYERS
    ]
    for one, other in combinations(blocks, 2):
        assert len(one & other) < 0.03 * len(one)


def test_a_layer_holds_the_sessions_that_begin_in_its_window(tmp_path: Path) -> None:
    lines = [
        line(0, [0, 1, 2]),
        line(10_000, [0, 1, 2, 3]),  # goes on, and so is in neither layer
        line(12_000, [0, 7, 8]),
        line(19_000, [0, 7, 8, 9]),
        line(20_000, [0, 7, 8, 9, 10]),
    ]
    (first,) = load(tmp_path, *lines, window=(0, 10)).sessions
    (second,) = load(tmp_path, *lines, window=(0, 10), layer=1).sessions
    assert [turn.at_s for turn in first.turns] == [0.0]
    assert [turn.at_s for turn in second.turns] == [2.0, 9.0]


@pytest.mark.parametrize(("window", "layer"), [((0.0, 900.0), 4), (None, 4), ((0.0, 3000.0), 2)])
def test_there_are_no_layers_beyond_the_trace(
    window: tuple[float, float] | None, layer: int
) -> None:
    with pytest.raises(ConfigError, match=f"ends after 3537 s, expected at most {100 * layer}%"):
        mooncake.load(window=window, layer=layer)


def test_without_a_window_there_is_nothing_to_lay_over_a_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected at most 100% of its window, the whole of it"):
        load(tmp_path, line(0, [0, 1]), line(5_000, [0, 2]), layer=1)


@pytest.mark.parametrize(
    ("case", "second", "sessions"),
    [
        ("a longer prompt over the same blocks follows", line(1, [0, 1, 2, 3]), 1),
        ("at the same time it does not", line(0, [0, 1, 2, 3]), 2),
        ("over other blocks it does not", line(1, [0, 7, 8, 9]), 2),
        ("a prompt no longer does not", line(1, [0, 1, 2]), 2),
    ],
)
def test_a_request_follows_an_earlier_one_whose_blocks_it_extends(
    tmp_path: Path, case: str, second: dict[str, Any], sessions: int
) -> None:
    assert len(load(tmp_path, line(0, [0, 1, 2]), second).sessions) == sessions, case


def test_one_full_block_is_too_little_to_be_followed(tmp_path: Path) -> None:
    first = line(0, [0, 1], tokens=800)
    assert len(load(tmp_path, first, line(1, [0, 2, 3])).sessions) == 2


def test_the_deepest_and_then_the_latest_is_followed_and_only_once(tmp_path: Path) -> None:
    workload = load(
        tmp_path,
        line(0, [0, 1, 2]),
        line(1, [0, 1, 2, 3]),
        line(2, [0, 1, 2, 3, 9], tokens=2200),  # no deeper than the one before it, and later
        line(3, [0, 1, 2, 3, 4, 5]),
    )
    assert tokens(workload) == [[1536, 2048, 2200, 3072]]


def test_what_two_sessions_could_have_continued_continues_neither(tmp_path: Path) -> None:
    workload = load(
        tmp_path,
        line(0, [0, 1, 2]),
        line(1, [0, 1, 4], tokens=1100),
        line(1, [0, 1, 5], tokens=1200),
        line(3, [0, 1, 2, 6]),  # only the first had 2
        line(4, [0, 1, 7], tokens=1400),  # 1 is in the prompts of all
    )
    assert tokens(workload) == [[1536, 2048], [1100], [1200], [1400]]


def test_sessions_are_told_rebuilt_or_none(tmp_path: Path) -> None:
    lines = [
        line(0, [0, 1, 2], session=0, turn=1),
        line(1, [0, 1, 2, 3], session=1, turn=1),
        line(2, [0, 7, 8], session=0, turn=2),
    ]
    assert tokens(load(tmp_path, *lines)) == [[1536, 1536], [2048]]
    assert tokens(load(tmp_path, *lines, sessions="told")) == [[1536, 1536], [2048]]
    assert tokens(load(tmp_path, *lines, sessions="rebuilt")) == [[1536, 2048], [1536]]
    assert tokens(load(tmp_path, *lines, sessions="none")) == [[1536], [2048], [1536]]
    with pytest.raises(ConfigError, match="--sessions told: got no session fields"):
        load(tmp_path, line(0, [0, 1]), sessions="told")


def test_whole_sessions_are_those_that_begin_in_the_window_with_all_their_turns(
    tmp_path: Path,
) -> None:
    lines = [
        line(0, [0, 7, 8]),
        line(5_000, [0, 1, 2]),
        line(12_000, [0, 7, 8, 9]),
        line(13_000, [0, 1, 2, 3]),
        line(30_000, [0, 1, 2, 3, 4]),
    ]
    part = load(tmp_path, *lines, window=(5, 20))
    whole = load(tmp_path, *lines, window=(5, 20), whole_sessions=True)
    assert tokens(part) == [[1536, 2048], [2048]]
    assert tokens(whole) == [[1536, 2048, 2560]]
    assert [turn.at_s for turn in whole.sessions[0].turns] == [0.0, 8.0, 25.0]


def test_what_is_too_long_is_counted(tmp_path: Path) -> None:
    workload = load(
        tmp_path,
        line(0, [0, 1, 2]),
        line(1, [0, 1, 2, 3, 4]),
        line(2, [0, 7, 8, 9]),
        max_tokens=1_700,
    )
    [left_out] = workload.left_out
    assert (left_out.turns, left_out.sessions) == (2, 1)
    assert (left_out.prompt_tokens, left_out.of_prompt_tokens) == (2560 + 2048, 4608 + 1536)
    assert left_out.why == "of more than 1,700 tokens each"
    assert workload.sample(100, 1).left_out == workload.left_out
    assert load(tmp_path, line(0, [0, 1])).left_out == ()


def test_equal_ids_give_equal_hashes_and_equal_hashes_mean_equal_prefixes() -> None:
    of_id: dict[int, int] = {}
    of_hash: dict[int, tuple[int, ...]] = {}
    turns = [turn for each in mooncake.load(max_tokens=10**9).sessions for turn in each.turns]
    numbers = rebuild(ALL, 512).sessions[: len(ROWS)]
    in_order = sorted(range(len(ROWS)), key=numbers.__getitem__)  # stable within a session
    rows = [ROWS[index] for index in in_order]
    for turn, row in zip(turns, rows, strict=True):
        assert len(turn.prompt_hashes) == row.input_length // 512
        for end, hashed in enumerate(turn.prompt_hashes, 1):
            assert of_id.setdefault(row.hash_ids[end - 1], hashed) == hashed
            assert of_hash.setdefault(hashed, row.hash_ids[:end]) == row.hash_ids[:end]
    assert len(of_id) == len(of_hash)


def test_a_partial_last_block_has_no_hash_and_an_output_is_at_least_one_token(
    tmp_path: Path,
) -> None:
    (one,) = load(tmp_path, line(0, [0, 1, 2], tokens=1025, output=0)).sessions
    assert (len(one.turns[0].prompt_hashes), one.turns[0].output_tokens) == (2, 1)


def test_one_id_under_two_prefixes_is_two_blocks(tmp_path: Path) -> None:
    one, other = load(tmp_path, line(0, [1, 9]), line(1, [2, 9])).sessions
    assert not set(one.turns[0].prompt_hashes) & set(other.turns[0].prompt_hashes)


def test_the_window_keeps_what_arrives_in_it_and_counts_from_its_start(tmp_path: Path) -> None:
    workload = load(
        tmp_path,
        line(0, [0, 1, 2]),
        line(10_000, [0, 1, 2, 3]),
        line(15_500, [0, 1, 2, 3, 4]),
        line(20_000, [0, 1, 2, 3, 4, 5]),
        window=(10, 20),
    )
    assert [[turn.at_s for turn in each.turns] for each in workload.sessions] == [[0.0, 5.5]]
    assert workload.sessions[0].start_s == 0.0


def test_long_turns_are_left_out_and_the_rest_of_their_session_stays(tmp_path: Path) -> None:
    lines = [line(at, list(range(2 + at))) for at in range(3)]
    assert tokens(load(tmp_path, *lines, line(3, [9, 8], output=1), max_tokens=1536)) == [
        [1024],
        [1024],
    ]
    told = [each | {"session": 0, "turn": turn} for turn, each in enumerate(lines, 1)]
    told[1] |= {"output_length": 9_000}
    assert tokens(load(tmp_path, *told, max_tokens=2148)) == [[1024, 2048]]


GOOD = line(5, [0, 1])
TOLD = {"session": 0, "turn": 1}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(4, [0, 1])], ":2: timestamp: got 4 after 5, expected times that never run back"),
        ([line(6, [0, 1], tokens=1025)], ":2: hash_ids: got 2 ids, expected 3, one for each 512"),
        ([line(6, [0], tokens=-5)], ":2: input_length: got -5, expected `int` >= 1"),
        ([line(6, [], tokens=0)], ":2: input_length: got 0, expected `int` >= 1"),
        ([line(6, [0], output=-1)], ":2: output_length: got -1, expected `int` >= 0"),
        ([line(-6, [0])], ":2: timestamp: got -6, expected `float` >= 0"),
        ([line(6, [0, -1])], r":2: hash_ids\[1\]: got -1, expected `int` >= 0"),
        ([GOOD | {"timestamp": "now"}], ":2: timestamp: got 'now', expected `float . null`"),
        ([GOOD | {"hash_ids": 3}], ":2: hash_ids: got 3, expected `array`"),
        ([{"timestamp": 6}], ":2: got no `input_length`, expected this field"),
        ([GOOD | {"session": 3}], ":2: got session without turn, expected both or neither"),
        ([GOOD | {"turn": 3}], ":2: got turn without session, expected both or neither"),
        ([GOOD | TOLD], ":2: got a session and none on the line before, expected sessions on"),
        ([GOOD | {"session": 0, "turn": 0}], ":2: turn: got 0, expected `int` >= 1"),
    ],
)
def test_a_bad_line_is_told_with_file_line_what_came_and_what_was_expected(
    tmp_path: Path, lines: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"trace\.jsonl" + message) as caught:
        load(tmp_path, GOOD, *lines)
    assert "\n" not in str(caught.value)


def test_sessions_that_stop_or_turns_that_run_backwards_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=":2: got no session and one on the line before"):
        load(tmp_path, GOOD | TOLD, GOOD)
    with pytest.raises(ConfigError, match=":2: turn: got 1, expected more than 1, the turn befo"):
        load(tmp_path, GOOD | TOLD, GOOD | TOLD)


def test_an_empty_trace_and_a_missing_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace\.jsonl: got no request at all"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read: No such file"):
        mooncake.load(tmp_path / "none.jsonl")


def test_a_truncated_trace_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(shipped(mooncake.SHIPPED).read_bytes()[:100_000])
    with pytest.raises(ConfigError, match=r"cut\.jsonl\.gz:\d+: got gzip data that is cut short"):
        mooncake.load(path)


def test_a_window_or_length_that_leaves_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="window: got 3600 to 4500 s, in which no request arr"):
        mooncake.load(window=(3600, 4500))
    with pytest.raises(ConfigError, match="max_tokens: got 99, expected as many as the shortest"):
        load(tmp_path, GOOD, max_tokens=99)


@pytest.mark.parametrize("window", [(5.0, 5.0), (9.0, 1.0), (-1.0, 5.0), (float("nan"), 5.0)])
def test_an_impossible_window_is_told(window: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"window: got .* s, expected 0 <= start < end"):
        mooncake.load(window=window)
