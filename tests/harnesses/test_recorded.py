"""What-if replay: a recording is served again as it was, and under other policies."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hear.app import cli
from hear.blocks import pack
from hear.delivery import Sequencer
from hear.errors import ConfigError
from hear.harnesses.eval.replay.runner import replay
from hear.harnesses.eval.report.results import RunResult
from hear.harnesses.eval.workloads import agentic, mooncake, recorded, scbench
from hear.harnesses.eval.workloads.workload import Workload
from hear.messages import (
    BlocksStored,
    ContextPaused,
    Envelope,
    Key,
    Message,
    RequestDescribed,
    RequestOutcome,
    ResidencyChanged,
)
from hear.recording import Header, Recorder

ENGINE = "h100-qwen3-8b"


def record(workload: Workload, path: Path, policy: str = "fcfs", loop: str = "closed") -> RunResult:
    recorder = Recorder(Header(clock="virtual"))
    with path.open("wb") as file:
        file.write(recorder.begin())
        return replay(
            workload,
            engine=ENGINE,
            policy=policy,
            seed=1,
            loop="open" if loop == "open" else "closed",
            tap=lambda envelopes, time_s: file.write(recorder.hear(envelopes, time_s)),
        )


def again(path: Path, policy: str = "fcfs", loop: str = "closed") -> RunResult:
    loop_ = "open" if loop == "open" else "closed"
    workload = recorded.load(path, loop=loop_).workload  # type: ignore[arg-type]
    return replay(workload, engine=ENGINE, policy=policy, seed=1, loop=loop_)  # type: ignore[arg-type]


@pytest.mark.parametrize(("loop", "nearness"), [("closed", 0.06), ("open", 0.001)])
def test_served_again_under_the_same_policy_it_goes_as_it_went(
    loop: str, nearness: float, tmp_path: Path
) -> None:
    # The trace has many arrivals at one moment, in whose steps the two differ; in the closed loop
    # that moves the turns that follow.
    path = tmp_path / "fcfs.hear"
    first = record(mooncake.load(window=(0, 120)).sample(80, 1), path, loop=loop).row
    second = again(path, loop=loop).row
    assert first.ttft_p50_s > 2  # there is a queue, so there is something to get wrong
    assert second.turns == first.turns
    assert second.ttft_p50_s == pytest.approx(first.ttft_p50_s, rel=nearness)
    assert second.ttft_p95_s == pytest.approx(first.ttft_p95_s, rel=nearness)
    assert second.reuse_all_pct == pytest.approx(first.reuse_all_pct, abs=0.5)


def test_a_loop_with_think_times_goes_as_it_went_to_the_token(tmp_path: Path) -> None:
    path = tmp_path / "scbench.hear"
    workload = scbench.generate("fitted", sessions=8, seed=1)
    first = record(workload, path)
    second = again(path)
    loaded = recorded.load(path).workload
    assert [len(s.turns) for s in loaded.sessions] == [
        len(s.turns) for s in sorted(workload.sessions, key=lambda s: s.start_s)
    ]
    assert second.row.ttft_p50_s == pytest.approx(first.row.ttft_p50_s, rel=1e-3)
    assert second.row.reuse_pct == pytest.approx(first.row.reuse_pct, abs=0.1)
    by_id = {session.id: session for session in workload.sessions}
    outputs = 0
    for session in loaded.sessions:
        for turn, original in zip(session.turns, by_id[session.id].turns, strict=True):
            assert turn.prompt_tokens == original.prompt_tokens
            assert turn.output_tokens == original.output_tokens
            assert list(turn.prompt_hashes) == list(original.prompt_hashes)
            output = list(turn.output_hashes)
            assert output == list(original.output_hashes)[: len(output)]
            outputs += len(output)
        for turn, original in list(zip(session.turns, by_id[session.id].turns, strict=True))[1:]:
            assert turn.think_s == pytest.approx(original.think_s)
            assert turn.at_s is None
    assert outputs > 0  # what was generated, and is part of the next prompt


def test_under_another_policy_it_goes_as_the_workload_itself_would(tmp_path: Path) -> None:
    path = tmp_path / "fcfs.hear"
    workload = scbench.generate("fitted", sessions=14, seed=2)
    record(workload, path)
    policy = "cache-aware+guard:20"
    expected = replay(workload, engine=ENGINE, policy=policy, seed=1).row
    got = again(path, policy).row
    assert got.ttft_p50_s == pytest.approx(expected.ttft_p50_s, rel=0.05)
    assert got.reuse_pct == pytest.approx(expected.reuse_pct, abs=2)


def test_pauses_are_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "agents.hear"
    workload = agentic.load(None, seed=1, max_tokens=24_000, rate=1.0).sample(5, 1)
    record(workload, path)
    loaded = recorded.load(path).workload
    assert {t.pause for s in loaded.sessions for t in s.turns} == {
        t.pause for s in workload.sessions for t in s.turns
    } | {"person"}
    assert len({t.pause for s in loaded.sessions for t in s.turns}) > 1


# -- what cannot be used -------------------------------------------------------------------------


class Tape:
    """A recording that is put together message by message."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said = Sequencer("e")
        self.heard: list[Envelope] = []

    def say(self, message: Message, time_s: float, **key: str) -> None:
        self.heard.append(self.said.wrap(message, Key(engine="e", **key), time_s))  # type: ignore[arg-type]

    def request(
        self,
        name: str,
        at_s: float,
        *,
        context: str = "c",
        blocks: Sequence[int] = (1, 2),
        until_s: float = 0.0,
        **described: int,
    ) -> None:
        fields = {"prompt_tokens": 32, "block_size": 16} | described
        described_ = RequestDescribed(prefix_hashes=pack(blocks), **fields)  # type: ignore[arg-type]
        self.say(described_, at_s, request=name, context=context, workflow="w")
        self.say(RequestOutcome(status="accepted"), at_s, request=name, context=context)
        end = RequestOutcome(status="completed", output_tokens=16, prompt_tokens=32)
        self.say(end, until_s or at_s + 1, request=name, context=context)

    def load(self, **options: object) -> recorded.Recorded:
        recorder = Recorder(Header())
        heard = sorted(self.heard, key=lambda envelope: envelope.time_s)
        self.path.write_bytes(recorder.begin() + recorder.hear(heard, 1.0))
        return recorded.load(self.path, **options)  # type: ignore[arg-type]


@pytest.fixture
def tape(tmp_path: Path) -> Tape:
    return Tape(tmp_path / "tape.hear")


def test_what_cannot_be_used_is_counted_and_said_why(tape: Tape) -> None:
    tape.request("fine", 1_000_000.0)
    tape.request("no hashes", 1.0, blocks=())
    tape.request("too many hashes", 1.0, blocks=(1, 2, 3))
    tape.request("other blocks", 1.0, block_size=32, blocks=(1,))
    tape.say(RequestOutcome(status="completed", output_tokens=1), 2.0, request="not described")
    tape.say(RequestOutcome(status="rejected"), 2.0, request="turned down")
    tape.say(RequestDescribed(prompt_tokens=5), 2.0, request="for ever", workflow="w")
    loaded = tape.load()
    assert [s.id for s in loaded.workload.sessions] == ["c"]
    [remark] = loaded.remarks
    assert remark.startswith("6 of 7 requests are left out: ")
    for why in ("1 without block hashes", "1 not described", "1 rejected", "1 without an outcome"):
        assert why in remark
    assert loaded.as_served.startswith("as recorded, 1 requests: TTFT P50 0.0 s")


def test_turns_follow_the_end_of_the_one_before_by_the_pause_that_there_was(tape: Tape) -> None:
    tape.request("a", 100.0, until_s=103.0)
    tape.say(ContextPaused(cause="tool"), 103.0, context="c", workflow="w")
    tape.request("b", 110.0, until_s=120.0)
    tape.request("overlaps", 115.0, until_s=121.0)
    tape.request("alone", 101.0, context="d")
    loaded = tape.load()
    first, second = loaded.workload.sessions
    assert [(t.at_s, t.think_s, t.pause) for t in first.turns] == [
        (0.0, 0.0, "person"),
        (None, 7.0, "tool"),
        (None, 0.0, "person"),
    ]
    assert (second.id, second.start_s, second.turns[0].at_s) == ("d", 1.0, 1.0)
    assert loaded.remarks == ("1 came before the turn before them had ended, and now follow it",)
    open_loop = tape.load(loop="open")
    assert [t.at_s for t in open_loop.workload.sessions[0].turns] == [0.0, 10.0, 15.0]
    assert open_loop.remarks == ()


def test_an_output_is_named_only_as_far_as_it_was_stored_in_time(tape: Tape) -> None:
    tape.request("a", 0.0, blocks=(1, 2), until_s=1.0)
    tape.request("b", 9.0, blocks=(1, 2, 3), prompt_tokens=48)
    [session] = tape.load().workload.sessions
    assert session.turns[0].output_hashes == ()
    late = ResidencyChanged(changes=(BlocksStored(tier="gpu", parent=2, prefix_hashes=pack([3])),))
    tape.say(late, 9.5)
    assert tape.load().workload.sessions[0].turns[0].output_hashes == ()
    tape.say(late, 1.0)
    assert tape.load().workload.sessions[0].turns[0].output_hashes == (3,)


def test_longer_ones_are_left_out_on_demand(tape: Tape) -> None:
    tape.request("a", 0.0)
    tape.request("b", 3.0, prompt_tokens=40)
    assert tape.load(max_tokens=50).workload.num_turns == 1
    with pytest.raises(ConfigError, match=r"no request that can be served again.*of more than 9"):
        tape.load(max_tokens=9)


def test_a_recording_that_was_cut_off_is_served_as_far_as_it_goes(tape: Tape) -> None:
    tape.request("a", 0.0)
    tape.request("b", 3.0)
    tape.load()
    tape.path.write_bytes(tape.path.read_bytes()[:-5])
    loaded = recorded.load(tape.path)
    assert loaded.workload.num_turns == 1
    assert any("cut off while it was written" in remark for remark in loaded.remarks)


# -- the command ---------------------------------------------------------------------------------


def test_a_replay_can_be_recorded_explained_and_served_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["replay", "mooncake", "--window", "0:60", "--load", "10", "--policy"]
    assert cli.main([*small, "cache-aware", "--record", "out.hear", "--json", "a.json"]) == 0
    assert cli.main([*small, "cache-aware", "--json", "b.json"]) == 0
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()  # as if nobody recorded
    recording = Path("out.hear").read_bytes()
    assert cli.main([*small, "cache-aware", "--record", "out.hear"]) == 0
    assert Path("out.hear").read_bytes() == recording
    capsys.readouterr()
    arguments = ["replay", "out.hear", "--policy", "fcfs,guard:40", "--json", "c.json"]
    assert cli.main(arguments) == 0
    rows = json.loads(Path("c.json").read_text())
    assert [(r["workload"], r["engine"], r["policy"]) for r in rows] == [
        ("out", "h100-qwen3-8b", "fcfs"),
        ("out", "h100-qwen3-8b", "guard:40"),
    ]
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "as recorded, " in error
    assert "the nearest to engine0 (1.00 times its GPU cache and 1.00 times its prefill" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json", "c.json", "out.hear"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["none.hear"], "none.hear: cannot be read: No such file"),
        (["folder.hear"], "folder.hear: cannot be read: Is a directory"),
        (["foreign.hear"], "foreign.hear: is no recording"),
        (["foreign.heard"], "foreign.heard: cannot be read: No such file"),
        (["foreign"], "invalid choice: 'foreign'"),
        (["mooncake", "--policy", "fcfs,guard:1", "--record", "x"], "expected one policy"),
        (["mooncake", "--policy", "fcfs", "--record", "no/x.hear"], "no/x.hear: cannot be written"),
        (["scbench", "--sessions", "2", "--policy", "fcfs", "--record", "."], "is a folder"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.hear").mkdir()
    Path("foreign.hear").write_text("something else")
    assert cli.main(["replay", *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_of_several_tenants_one_has_to_be_chosen(tape: Tape) -> None:
    tape.request("mine", 1.0)
    tape.said = Sequencer("e", tenant="acme")
    for number in range(2):
        tape.request("theirs", 2.0 + 2 * number, context=f"c{number}")
    with pytest.raises(
        ConfigError, match=r"of 2 tenants: 'acme', 'default'; choose one with --tenant"
    ):
        tape.load()
    loaded = tape.load(tenant="default")
    assert [s.id for s in loaded.workload.sessions] == ["c"]
    assert "it is without 1 requests of other tenants" in loaded.remarks
    assert tape.load(tenant="acme").workload.num_turns == 1
    with pytest.raises(ConfigError, match="holds no request"):
        tape.load(tenant="umbra")
