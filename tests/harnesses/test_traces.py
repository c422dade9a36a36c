"""Traces that people have: each format, what is made of it, and what each reader refuses."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from hear.errors import ConfigError
from hear.harnesses.eval.replay import play_command
from hear.harnesses.eval.replay.plan import Source
from hear.harnesses.eval.replay.runner import replay
from hear.harnesses.eval.workloads.traces import formats
from hear.harnesses.eval.workloads.traces.trace import Budget, Trace
from hear.harnesses.eval.workloads.workload import Session, Turn, Workload
from hear.messages import CapabilitiesReported


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def load(path: Path, **options: Any) -> Workload:
    return Source(name="trace", trace=str(path), **options).load(seed=1)


def row(ids: list[int], tokens: int | None = None, **more: Any) -> dict[str, Any]:
    length = 512 * len(ids) if tokens is None else tokens
    return {"input_length": length, "output_length": 9, "hash_ids": ids, **more}


def prompts(workload: Workload) -> dict[str, list[int]]:
    return {each.id: [turn.prompt_tokens for turn in each.turns] for each in workload.sessions}


def turns(workload: Workload, session: str) -> tuple[Turn, ...]:
    return next(each.turns for each in workload.sessions if each.id == session)


# -- Mooncake and what others added to it -----------------------------------------------------


def test_told_sessions_are_those_of_the_trace(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl",
        row([1, 2, 3, 4], session_id="a", timestamp=1000),
        row([1, 2, 3, 4], session_id="b", timestamp=1000),
        row([1, 2, 3, 4, 5, 6], session_id="a", timestamp=5000),
        row([1, 2, 3, 4, 7, 8], session_id="b", timestamp=5000),
    )
    workload = load(path)
    assert prompts(workload) == {"a": [2048, 3072], "b": [2048, 3072]}
    assert [turn.at_s for turn in turns(workload, "a")] == [1.0, 5.0]
    assert workload.remarks == ("sessions as the trace tells them",)
    assert prompts(load(path, session_rule="none")).keys() == {
        f"mooncake-{n:05d}" for n in range(4)
    }


def test_a_turn_with_a_delay_follows_the_one_before_it(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl",
        row([1, 2], session_id="a", timestamp=1000),
        row([1, 2, 3], session_id="a", delay=250),
        row([1, 2, 3, 4], session_id="a", delay_ms=500, timestamp=9000),
    )
    first, second, third = turns(load(path), "a")
    assert (first.at_s, second.at_s, third.at_s) == (1.0, None, None)
    assert (second.think_s, third.think_s) == (0.25, 0.5)
    assert prompts(load(path, window=(0.0, 2.0))) == {"a": [1024, 1536]}  # delays alone: at 1.25 s


def test_prompts_that_are_told_as_what_a_turn_adds_are_made_whole(tmp_path: Path) -> None:
    """AIPerf's sessions: the second prompt begins with the first and the answer to it."""
    lines = [
        row([0, 1, 2], 1500, session_id="a", timestamp=0, output_length=100),
        row([900], 400, session_id="a", delay=10, output_length=50),
        row([0, 1, 9], 1500, session_id="b", timestamp=0),
        row([950, 951], 600, session_id="b", delay=10),
    ]
    workload = load(written(tmp_path / "t.jsonl", *lines))
    assert prompts(workload) == {"a": [1500, 2000], "b": [1500, 2109]}
    first, second = turns(workload, "a")
    other, _ = turns(workload, "b")
    assert len(first.prompt_hashes) == 2
    assert second.prompt_hashes[:3] == (*first.prompt_hashes, *first.output_hashes)
    assert first.prompt_hashes == other.prompt_hashes
    assert any("what a turn adds" in remark for remark in workload.remarks)


@pytest.mark.parametrize("size", [16, 64, 512])
def test_the_size_of_blocks_is_that_which_fits_the_lines(tmp_path: Path, size: int) -> None:
    lengths = [3 * size + 1, 7 * size, size // 2, 40 * size - 1]
    lines = [
        row(list(range(-(-n // size))), n, timestamp=1000 * at) for at, n in enumerate(lengths)
    ]
    assert load(written(tmp_path / "t.jsonl", *lines)).block_size == size


def test_blocks_are_made_larger_if_asked(tmp_path: Path) -> None:
    lines = [
        row(list(range(100)), 1600, timestamp=0),
        row([*range(64), *range(200, 236)], 1600, timestamp=9),
    ]
    path = written(tmp_path / "t.jsonl", *lines)
    one, other = (each.turns[0].prompt_hashes for each in load(path, block_size=512).sessions)
    assert len(one) == 3
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    with pytest.raises(ConfigError, match="block size: got 24, expected a multiple of the trace's"):
        load(path, block_size=24)


def test_blocks_are_made_smaller_if_asked(tmp_path: Path) -> None:
    """What prompts have in common stays so, in whole blocks of the trace."""
    lines = [row([1, 2, 3], 1100, timestamp=0), row([1, 2, 4], 1500, timestamp=1)]
    cut = load(written(tmp_path / "t.jsonl", *lines), block_size=16, session_rule="none")
    one, other = (each.turns[0].prompt_hashes for each in cut.sessions)
    assert (len(one), len(other)) == (1100 // 16, 1500 // 16)
    assert one[:64] == other[:64]
    assert not set(one[64:]) & set(other[64:])


def test_a_trace_is_played_in_blocks_of_the_engines(tmp_path: Path) -> None:
    source = Source(name="trace", trace=str(written(tmp_path / "t.jsonl", TIMED)))

    def fitted(*sizes: int) -> int | None:
        engines = {f"e{n}": CapabilitiesReported(block_size=size) for n, size in enumerate(sizes)}
        return play_command._fitting(source, engines).block_size

    assert (fitted(16, 16), fitted(), fitted(16, 32)) == (16, None, None)


AGENTIC_ROWS = (
    row([1, 2], timestamp=0, session_id="main", request_id="m1"),
    row([1, 5], timestamp=100, session_id="left", request_id="l1", wait_for=["m1"], delay=20),
    row([1, 6], session_id="right", request_id="r1", wait_for=["m1"]),
    row([1, 2, 3], session_id="main", wait_for=["l1", "r1"], delay=100, tool_wait_ms=900),
)


def test_requests_wait_for_those_of_other_sessions(tmp_path: Path) -> None:
    workload = load(written(tmp_path / "t.jsonl", *AGENTIC_ROWS))
    left, join = turns(workload, "left")[0], turns(workload, "main")[1]
    assert (left.at_s, left.after, left.think_s) == (None, (("main", 1),), 0.02)
    assert (join.after, join.think_s, join.pause) == ((("left", 1), ("right", 1)), 1.0, "tool")
    result = replay(workload, engine="h100-qwen3-8b", policy="fcfs")
    at = {(turn.session, turn.turn): turn for turn in result.turns}
    assert at["left", 1].sent_s == pytest.approx(at["main", 1].finished_s + 0.02)
    free_s = max(at["left", 1].finished_s, at["right", 1].finished_s)
    assert at["main", 2].sent_s == pytest.approx(free_s + 1.0)
    assert result.problems == ()


def test_what_waits_for_a_request_that_is_left_out_does_not_wait(tmp_path: Path) -> None:
    lines = [row([9] * 10, 5_120, timestamp=0, request_id="long", session_id="x"), *AGENTIC_ROWS]
    lines[1] = lines[1] | {"wait_for": ["long"]}
    workload = load(written(tmp_path / "t.jsonl", *lines), max_tokens=4_000)
    assert turns(workload, "main")[0].after == ()
    assert workload.num_turns == 4


def test_sessions_that_wait_for_each_other_are_sampled_together(tmp_path: Path) -> None:
    others = [row([100 + n, 200 + n], timestamp=200, session_id=f"s{n}") for n in range(20)]
    workload = load(written(tmp_path / "t.jsonl", *AGENTIC_ROWS, *others))
    for seed in range(6):
        kept = {each.id for each in workload.sample(50, seed).sessions}
        assert len({"main", "left", "right"} & kept) in (0, 3)
    with pytest.raises(ConfigError, match="is none of them"):
        workload.sample(1, 1)


def session(id: str, *after: tuple[str, int]) -> Session:
    turn = Turn(prompt_tokens=9, output_tokens=1, prompt_hashes=(), after=after)
    return Session(id=id, turns=(turn,))


def test_turns_that_would_wait_for_ever_are_refused() -> None:
    with pytest.raises(ConfigError, match="got turns that wait for each other, expected an order"):
        Workload(name="w", block_size=1, sessions=(session("a", ("b", 1)), session("b", ("a", 1))))
    with pytest.raises(ConfigError, match="comes after turn 2 of 'a', expected a turn of this"):
        Workload(name="w", block_size=1, sessions=(session("a"), session("b", ("a", 2))))


# -- Bailian ----------------------------------------------------------------------------------


def chat(id: int, parent: int, at_s: float, ids: list[int]) -> dict[str, Any]:
    lengths = {"input_length": 16 * len(ids) - 3, "output_length": 40}
    told = {"type": "text", "turn": 1, "hash_ids": ids}
    return {"chat_id": id, "parent_chat_id": parent, "timestamp": at_s} | lengths | told


def test_bailians_chats_continue_their_parents(tmp_path: Path) -> None:
    workload = load(
        written(
            tmp_path / "t.jsonl",
            chat(7, -1, 0.5, [1, 2, 3]),
            chat(9, -1, 0.6, [1, 2, 8]),
            chat(12, 7, 4.0, [1, 2, 3, 4]),
            chat(13, 7, 5.0, [1, 2, 3, 5]),  # a second answer to the first chat
            chat(14, 99, 6.0, [6, 7]),  # its parent is not in the file
        )
    )
    assert (workload.name, workload.block_size) == ("bailian", 16)
    assert prompts(workload) == {
        "bailian-00007": [45, 61],
        "bailian-00009": [45],
        "bailian-00013": [61],
        "bailian-00014": [29],
    }
    assert [turn.at_s for turn in turns(workload, "bailian-00007")] == [0.5, 4.0]


# -- Dynamo -----------------------------------------------------------------------------------


def ended(
    session: str | None, start: int, end: int, ids: list[int], parent: str | None = None
) -> dict[str, Any]:
    prompt = {
        "trace_block_size": 64,
        "input_length": 64 * len(ids),
        "input_sequence_hashes": ids,
    }
    record: dict[str, Any] = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": end,
        "request": {"request_received_ms": start, "output_tokens": 5, "replay": prompt},
    }
    if session is not None:
        record["agent_context"] = {"session_id": session, "parent_session_id": parent}
    return record


def tool(session: str, at_ms: int) -> dict[str, Any]:
    record = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end"}
    return record | {"event_time_unix_ms": at_ms, "agent_context": {"session_id": session}}


@pytest.mark.parametrize("wrapped", [False, True])
def test_dynamos_records_become_sessions_with_their_sub_agents(
    tmp_path: Path, wrapped: bool
) -> None:
    big = 2**64 - 1
    records = [
        ended("main", 1_000, 2_000, [1, big]),
        ended("child", 2_100, 3_000, [1, 5], parent="main"),
        tool("child", 3_200),
        ended("child", 3_500, 4_000, [1, 5, 6], parent="main"),
        ended("main", 4_600, 5_000, [1, big, 3]),
        {"schema": "dynamo.request.trace.v1", "event_type": "request_payload"},
        {"event_type": "request_payload"},
        ended(None, 4_700, 4_800, [9]),
    ]
    if wrapped:
        records = [{"timestamp": 1, "event": record} for record in records]
    text = "".join(json.dumps(record) + "\n" for record in records[::-1])  # in order of their ends
    path = tmp_path / "shard.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()))
    workload = load(path)
    assert (workload.name, workload.block_size) == ("dynamo", 64)
    assert prompts(workload) == {"main": [128, 192], "child": [128, 192], "dynamo-00000": [64]}
    begins, goes_on = turns(workload, "child")
    join = turns(workload, "main")[1]
    assert [turn.after for turn in (begins, goes_on, join)] == [(("main", 1),), (), (("child", 2),)]
    assert [turn.think_s for turn in (begins, goes_on, join)] == pytest.approx([0.1, 0.5, 0.6])
    assert [turn.pause for turn in (begins, goes_on, join)] == ["person", "tool", "person"]
    assert turns(workload, "dynamo-00000")[0].at_s == pytest.approx(3.7)


def test_dynamos_shards_are_read_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    written(folder / "b.jsonl", ended("s", 3_000, 4_000, [1, 2]))
    written(folder / "a.jsonl", ended("s", 1_000, 2_000, [1]))
    (folder / "README").write_text("no trace")
    os.mkfifo(folder / "pipe.json")
    assert prompts(load(folder)) == {"s": [64, 128]}


# -- lengths alone ----------------------------------------------------------------------------


def test_azures_csv_has_arrivals_and_lengths(tmp_path: Path) -> None:
    path = written(
        tmp_path / "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\r",
        "2023-11-16 23:59:59.9799600,4808,10\r",
        "2023-11-17 00:00:00.4799600,1100,0\r",
        "2023-11-17 00:00:01+00:00,34,1",
    )
    workload = load(path)
    assert [each.turns[0].at_s for each in workload.sessions] == pytest.approx([0, 0.5, 1.02004])
    assert prompts(workload) == {"azure-00000": [4808], "azure-00001": [1100], "azure-00002": [34]}
    assert workload.sessions[1].turns[0].output_tokens == 1
    blocks = [hashed for each in workload.sessions for hashed in each.turns[0].prompt_hashes]
    assert len(blocks) == len(set(blocks)) == 9 + 2
    assert any("lengths and no blocks" in remark for remark in workload.remarks)


def test_burstgpts_csv_may_tell_sessions_and_its_failures_are_left_out(tmp_path: Path) -> None:
    path = written(
        tmp_path / "burst.csv",
        "\ufeffTimestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,x,ChatGPT,100,20,120,Conversation log",
        "7,,GPT-4,50,0,50,API log",
        "9.5,x,ChatGPT,200,30,230,Conversation log",
        "9.5,,GPT-4,300,30,330,API log",
    )
    workload = load(path)
    assert prompts(workload) == {"x": [100, 200], "burstgpt-00000": [300]}
    assert [turn.at_s for turn in turns(workload, "x")] == [0.0, 4.5]
    assert any("1 requests of it have no prompt or no answer" in r for r in workload.remarks)


# -- text -------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    words = {word: n for n, word in enumerate(("[UNK]", "human", "gpt", "user", "system", "tool"))}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    folder = tmp_path / "model"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


CONVERSATION = {
    "id": "c",
    "conversations": [
        {"from": "human", "value": "one two three"},
        {"from": "gpt", "value": "four five"},
        {"from": "human", "value": "six"},
        {"from": "gpt", "value": "seven"},
    ],
}


@pytest.mark.parametrize("form", ["array", "lines", "indented"])
def test_sharegpts_conversations_are_sessions(tmp_path: Path, tokenizer: Path, form: str) -> None:
    path = tmp_path / "chats.json"
    if form == "lines":
        written(path, CONVERSATION, CONVERSATION)
    else:
        path.write_text(json.dumps([CONVERSATION] * 2, indent=2 if form == "indented" else None))
    workload = load(path, tokenizer=str(tokenizer), rate=0.5)
    assert prompts(workload) == {f"sharegpt-{n:05d}": [4, 9] for n in (0, 1)}
    first, second = turns(workload, "sharegpt-00000")
    assert [turn.output_tokens for turn in (first, second)] == [3, 2]
    assert second.prompt_token_ids[:4] == first.prompt_token_ids
    assert second.think_s > 0
    assert workload.sessions[1].start_s > workload.sessions[0].start_s > 0
    assert len(load(path, tokenizer=str(tokenizer), first=1).sessions) == 1


def test_openais_batches_are_requests_of_their_own(tmp_path: Path, tokenizer: Path) -> None:
    def line(n: int, question: Any, **body: Any) -> dict[str, Any]:
        system = {"role": "system", "content": " ".join(["word"] * 40)}
        messages = [system, {"role": "user", "content": question}]
        request = {"model": "m", "messages": messages, **body}
        return {"custom_id": f"r{n}", "method": "POST", "url": "/v1", "body": request}

    path = written(
        tmp_path / "batch.jsonl",
        line(1, "a b", max_tokens=7),
        line(2, [{"type": "text", "text": "a c"}, {"type": "image_url"}], max_completion_tokens=8),
        line(3, "a d"),
    )
    workload = load(path, tokenizer=str(tokenizer))
    made = [each.turns[0] for each in workload.sessions]
    assert [turn.prompt_tokens for turn in made] == [44, 44, 44]
    assert [turn.output_tokens for turn in made] == [7, 8, 256]
    assert len({turn.prompt_hashes[:2] for turn in made}) == 1  # they share the system's prompt
    assert any("1 answers have no length" in remark for remark in workload.remarks)
    assert any("tells no times" in remark for remark in workload.remarks)


def test_chats_with_sessions_and_delays_follow_one_another(tmp_path: Path, tokenizer: Path) -> None:
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y z"}
    path = written(
        tmp_path / "chats.jsonl",
        {"session_id": "s", "messages": [user], "output_length": 12, "timestamp": 0},
        {"session_id": "s", "messages": [user, answer, user, answer], "delay": 4_500.0},
    )
    first, second = turns(load(path, tokenizer=str(tokenizer)), "s")
    assert (first.output_tokens, second.output_tokens) == (12, 3)
    assert (first.at_s, second.at_s, second.think_s) == (0.0, None, 4.5)


def test_text_without_a_tokenizer_or_with_a_wrong_one_is_told(tmp_path: Path) -> None:
    path = written(tmp_path / "chats.jsonl", CONVERSATION)
    with pytest.raises(ConfigError, match=r"got ShareGPT, which are text, without --tokenizer"):
        load(path)
    with pytest.raises(ConfigError, match=r"--tokenizer .*none: got no file, expected tokenizer"):
        load(path, tokenizer=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="got no tokenizer"):
        load(path, tokenizer=str(path))


# -- Weka -------------------------------------------------------------------------------------


def recording(id: str) -> dict[str, Any]:
    requests = [
        {"t": 0.0, "type": "n", "in": 512, "out": 9, "hash_ids": list(range(8)), "api_time": 1.0}
    ]
    return {"id": id, "block_size": 64, "hash_id_scope": "local", "requests": requests}


def test_wekas_folder_of_documents_is_read_as_its_lines_are(tmp_path: Path) -> None:
    lines = written(tmp_path / "t.jsonl", recording("a"), recording("b"))
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "trace_0001.json").write_text(json.dumps(recording("a"), indent=1))
    (folder / "trace_0002.json").write_text(json.dumps(recording("b")))
    assert load(folder) == load(lines)
    assert prompts(load(folder)) == {"a": [512], "b": [512]}
    with pytest.raises(ConfigError, match="window: expected none, since Weka's agentic sessions"):
        load(folder, window=(0.0, 9.0))


# -- what is refused --------------------------------------------------------------------------

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Request tokens,Response tokens"
TIMED = row([1, 2], timestamp=5)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["a,b", "1,2"], "got a file that begins with a, b, expected a trace of a format that is"),
        ([""], "got no request at all"),
        ([{"prompt": "x"}], "begins with prompt, expected"),
        (["[1, 2]"], "got no request at all, expected"),
        ([row([1, 2])], ":1: got no `timestamp`, `session_id` or `wait_for`, expected one of"),
        ([TIMED | {"wait_for": ["x"]}], ":1: wait_for: got 'x', expected the request_id of a"),
        ([TIMED | {"request_id": "x"}] * 2, ":2: request_id: got 'x' again, expected it once"),
        ([TIMED | {"session_id": "x" * 201}], "session_id: got"),
        ([TIMED | {"output_length": 10**12}], ":1: output_length: got 1000000000000, expected"),
        ([row([1, 2**64], timestamp=5)], ":1: got the id 1.84467e+19, expected at most 64 bits"),
        ([chat(1, -1, 0, [1]), chat(1, -1, 1, [1])], ":2: chat_id: got 1 again, expected it once"),
        ([chat(1, -1, 5, [1]), chat(2, -1, 1, [1])], ":2: timestamp: got 1 after 5"),
        ([chat(1, -1, 5, [1]) | {"input_length": 99}], ":1: hash_ids: got 1 ids, expected 7"),
        ([ended("s", 1, 2, [1]) | {"schema": "v2"}], ":1: schema: got 'v2', expected 'dynamo"),
        ([tool("s", 5)], "got no record of a request_end"),
        ([AZURE, "2023-11-16 18:17:03,1,x"], ":2: GeneratedTokens: got 'x', expected a number of"),
        ([AZURE, "yesterday,1,1"], ":2: TIMESTAMP: got 'yesterday', expected a time"),
        (
            [AZURE, "2023-11-16 18:17:03.5e300,1,1"],
            ":2: TIMESTAMP: got '2023-11-16 18:17:03.5",
        ),
        ([AZURE, "2023-11-16 18:17:03,1"], ":2: got 2 columns, expected 3"),
        ([AZURE], "got no request at all"),
        ([AZURE + ",ContextTokens", "x,1,1,1"], ":1: got 2 columns 'ContextTokens', expected one"),
        ([BURST, "1,1,1", "0,1,1"], ":3: Timestamp: got '0', expected times that never run back"),
        ([BURST, "nan,1,1"], ":2: Timestamp: got 'nan', expected a time"),
        ([BURST, "1,-5,1"], ":2: Request tokens: got '-5', expected a number of tokens"),
        ([BURST, "9" * 70_000], ":2: got a line of more than 65,536 bytes"),
        ([recording("a") | {"id": 3}], ":1: id: got 3, expected `str`"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_one_line(
    tmp_path: Path, lines: list[Any], says: str
) -> None:
    path = written(tmp_path / "trace.any", *lines)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_options_that_a_trace_has_no_use_for_are_told(tmp_path: Path) -> None:
    timed = written(tmp_path / "timed.jsonl", TIMED)
    with pytest.raises(ConfigError, match="rate: expected none, since the trace tells times"):
        load(timed, rate=1.0)
    with pytest.raises(ConfigError, match="--sessions told: got no session fields"):
        load(timed, session_rule="told")
    bare = written(tmp_path / "bare.csv", BURST, "1,5,5")
    with pytest.raises(ConfigError, match="rebuilt: got requests without times or blocks"):
        load(bare, session_rule="rebuilt")
    timeless = written(tmp_path / "timeless.jsonl", row([1, 2], session_id="a"))
    with pytest.raises(ConfigError, match="window: expected none, since the trace tells no times"):
        load(timeless, window=(0.0, 1.0))


def test_a_pipe_and_an_empty_folder_are_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: got no regular file"):
        load(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty: got a folder of 0 files"):
        load(tmp_path / "empty")


def test_what_a_trace_may_take_of_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hear.harnesses.eval.workloads.traces.trace.MAX_IDS", 5)
    budget = Budget()
    budget.take("x:1", [1, 2, 3])
    with pytest.raises(ConfigError, match="x:2: got more than 5 ids in their prompts up to here"):
        budget.take("x:2", [4, 5, 6])
    monkeypatch.setattr("hear.harnesses.eval.workloads.traces.trace.MAX_REQUESTS", 2)
    with pytest.raises(ConfigError, match=r"csv:4: got more than 2 requests up to here"):
        load(written(tmp_path / "many.csv", BURST, *["1,5,5"] * 3))
    assert isinstance(formats.read(tmp_path / "many.csv", first=2), Trace)


def test_a_session_of_growing_prompts_has_a_longest(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        row([0, 1], session_id="a", timestamp=0),
        *(row([9 + n], session_id="a", delay=1, output_length=6_000_000) for n in range(2)),
    ]
    with pytest.raises(ConfigError, match=r":3: got a session of .* tokens up to here, expec"):
        load(written(tmp_path / "t.jsonl", *lines))
