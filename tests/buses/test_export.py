"""``hear export``: the trace event format's rules, and that all that was recorded is in it."""

import json
import os
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hear.app import cli
from hear.buses.observe.trace_events import TraceEvents
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.harnesses.eval.replay.runner import replay
from hear.harnesses.eval.report.results import TurnRecord
from hear.harnesses.eval.workloads import mooncake
from hear.messages import Envelope, Key, OperationOutcome, Prioritise, RequestOutcome
from hear.recording import Header, Heard, Record, Recorder, Recording

PHASES = set("MbeXCstfi")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[TurnRecord]]:
    path = tmp_path_factory.mktemp("recorded") / "run.hear"
    recorder = Recorder(Header(clock="virtual", bus="memory://replay"))
    with path.open("wb") as file:
        file.write(recorder.begin())
        result = replay(
            mooncake.load(window=(0, 60)).sample(40, 1),
            engine="h100-qwen3-8b",
            policy="cache-aware+guard:1+session-aware",
            seed=1,
            tap=lambda envelopes, time_s: file.write(recorder.hear(envelopes, time_s)),
        )
    return path, list(result.turns)


@pytest.fixture(scope="module")
def trace(recorded: tuple[Path, list[TurnRecord]]) -> dict[str, Any]:
    out = recorded[0].with_name("trace.json")
    assert cli.main(["export", str(recorded[0]), "--to", str(out)]) == 0
    loaded: dict[str, Any] = json.loads(out.read_bytes())
    return loaded


def test_it_keeps_the_rules_of_the_format(trace: dict[str, Any]) -> None:
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[int, int]] = set()
    processes: set[int] = set()
    open_slices: dict[tuple[int, str, str], list[str]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in PHASES
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        place = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert event["args"]["name"]
            processes |= {event["pid"]} if event["name"] == "process_name" else set()
            named |= {place} if event["name"] == "thread_name" else set()
            continue
        assert event["pid"] in processes  # named before its first event
        assert place in named
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        if event["ph"] in "be":
            assert event["cat"] == "request"
            stack = open_slices[event["pid"], event["cat"], event["id"]]
            if event["ph"] == "b":
                stack.append(event["name"])
            else:
                assert event["name"] in stack
                stack.remove(event["name"])
        elif event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] in "gpt"
        elif event["ph"] in "stf":
            assert event["id"]
            assert event["cat"]
    assert not any(open_slices.values())


def test_slices_of_one_track_never_overlap_in_part(trace: dict[str, Any]) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) == 4  # three policies, and the outcomes of one engine
    for spans in tracks.values():
        spans.sort()
        for (begin, end), (later, later_end) in pairwise(spans):
            assert later >= end or (later, later_end) == (begin, end)


def test_flows_lead_from_a_slice_to_a_slice_and_forward(trace: dict[str, Any]) -> None:
    slices = {(e["pid"], e["tid"], e["ts"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    flows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            assert (event["pid"], event["tid"], event["ts"]) in slices
            flows[event["id"]].append(event)
    assert flows
    for events in flows.values():
        assert (events[0]["ph"], events[-1]["ph"]) == ("s", "f")
        assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)


def test_every_request_and_message_is_there(
    trace: dict[str, Any], recorded: tuple[Path, list[TurnRecord]]
) -> None:
    path, turns = recorded
    begun: dict[str, dict[str, float]] = defaultdict(dict)
    ended: dict[str, dict[str, float]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] in "be":
            (begun if event["ph"] == "b" else ended)[event["id"]][event["name"]] = event["ts"]
    assert set(begun) == {turn.request for turn in turns}
    for turn in turns:
        began, end = begun[turn.request], ended[turn.request]
        assert began[turn.request] == pytest.approx(1e6 * turn.sent_s, abs=1)
        assert end[turn.request] == pytest.approx(1e6 * turn.finished_s, abs=1)
        assert began["prefill"] == pytest.approx(1e6 * turn.started_s, abs=1)
        assert end["prefill"] == pytest.approx(1e6 * turn.first_token_s, abs=1)
    kinds = Counter(
        "control" if r.envelope.category == "control" else r.envelope.kind
        for r in Recording([path.read_bytes()])
        if isinstance(r, Heard)
    )
    made = Counter(e.get("cat", e["name"]) for e in trace["traceEvents"] if e["ph"] in "XC")
    assert made["control"] == kinds["control"]
    assert made["outcome"] == kinds["operation_outcome"]
    assert made["queue"] == kinds["queue_changed"] + kinds["queue_snapshot"]
    assert made["KV blocks gpu"] == made["KV blocks cpu"] == kinds["pressure_reported"]


def test_a_request_that_had_not_ended_is_shown_up_to_the_end(tmp_path: Path) -> None:
    said, recorder = Sequencer("e"), Recorder(Header(started_s=100.0))
    path, out = tmp_path / "open.hear", tmp_path / "open.json"
    accepted = RequestOutcome(status="accepted")
    heard: list[Envelope] = [
        said.wrap(accepted, Key(engine="e", request=r), t) for r, t in (("a", 101.0), ("b", 103.0))
    ]
    assert open_body(heard[0]) == accepted
    path.write_bytes(recorder.begin() + recorder.hear(heard, 103.0) + b"cut")
    assert cli.main(["export", str(path), "--to", str(out)]) == 0
    spans = [
        (e["ph"], e["id"], e["ts"])
        for e in json.loads(out.read_bytes())["traceEvents"]
        if e["ph"] in "be"
    ]
    assert spans == [("b", "a", 1e6), ("e", "a", 3e6), ("b", "b", 3e6), ("e", "b", 3e6)]


def test_bad_input_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: tuple[Path, list[TurnRecord]]
) -> None:
    out = tmp_path / "trace.json"
    out.write_text("mine")
    foreign = tmp_path / "foreign.hear"
    foreign.write_text("no recording at all")
    good = str(recorded[0])
    for arguments, complaint in (
        ([str(foreign), "--to", str(out)], "is no recording"),
        ([str(tmp_path / "none.hear"), "--to", str(out)], "No such file"),
        ([good, "--to", str(tmp_path)], "is a folder"),
        ([good, "--to", good], "is the recording"),
        ([good, "--to", str(tmp_path / "no" / "x.json")], "No such file"),
    ):
        assert cli.main(["export", *arguments]) == 2
        error = capsys.readouterr().err
        assert complaint in error
        assert error.count("\n") == 1
    assert out.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["foreign.hear", "trace.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_one_line(
    capsys: pytest.CaptureFixture[str], recorded: tuple[Path, list[TurnRecord]]
) -> None:
    assert cli.main(["export", str(recorded[0]), "--to", "/dev/full"]) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_requests_of_two_tenants_with_one_id_are_two_tracks() -> None:
    end = RequestOutcome(status="completed", queue_s=1.0, decode_s=1.0)
    control = Prioritise(priority=1)
    records: list[Record] = []
    for tenant in ("default", "acme"):
        engine, policy = Sequencer("e", tenant=tenant), Sequencer("p", tenant=tenant)
        key = Key(request="r", engine="e", operation="o")
        records.append(Heard(1.0, policy.wrap(control, key, 1.0)))
        records.append(Heard(2.0, engine.wrap(end, Key(request="r", engine="e"), 2.0)))
        records.append(Heard(3.0, engine.wrap(OperationOutcome(status="completed"), key, 3.0)))
    events = list(TraceEvents(0.0).events(records))
    requests = {(e["pid"], e["id"]) for e in events if e["ph"] == "b"}
    assert {id for _, id in requests} == {"r", "r (acme)"}
    assert len({pid for pid, _ in requests}) == 2
    flows = [(e["ph"], e["id"]) for e in events if e["ph"] in "sf"]
    assert flows == [("s", "o"), ("f", "o"), ("s", "o (acme)"), ("f", "o (acme)")]
    named = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {"policies", "e", "e (acme)"}
