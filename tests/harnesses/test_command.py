"""``hear replay``: its output, its one line of complaint, and Ctrl-C."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hear.app import cli
from hear.harnesses.eval.replay import command
from hear.harnesses.eval.replay.plan import Run, execute
from hear.harnesses.eval.replay.processes import Finished

FIELDS = [
    "workload",
    "engine",
    "load",
    "policy",
    "seed",
    "turns",
    "ttft_p50_s",
    "ttft_p95_s",
    "ttft_max_s",
    "session_s",
    "session_p50_s",
    "batch_s",
    "turns_per_min",
    "reuse_pct",
    "reuse_all_pct",
    "rejected",
    "guard_violations",
    "operations",
    "operations_open",
    "policy_failures",
    "engines",
    "sessions",
    "left_out",
    "remarks",
    "turns_by_engine",
    "notes",
]
SMALL = ["replay", "mooncake", "--window", "0:60", "--load", "5"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Carry out the runs here: starting a process takes a second."""

    def run_all(
        runs: list[Run], jobs: int, progress: Callable[[int, int], None]
    ) -> Iterator[Finished]:
        for place, run in enumerate(runs):
            yield Finished(place, execute(run, lambda done: None), "")

    monkeypatch.setattr(command, "run_all", run_all)


# -- several engines ----------------------------------------------------------------------------


@pytest.mark.usefixtures("in_process")
def test_several_engines_are_named_in_the_table_in_the_rows_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "rows.json", tmp_path / "page.html"
    arguments = ["--engines", "3", "--policy", "round-robin,cache-aware-routing+guard:40"]
    assert cli.main([*SMALL, *arguments, "--json", str(out), "--report", str(page)]) == 0
    rows = json.loads(out.read_text())
    assert [(row["policy"], row["engines"], row["engine"]) for row in rows] == [
        ("round-robin", 3, "h100-qwen3-8b"),
        ("cache-aware-routing+guard:40", 3, "h100-qwen3-8b"),
    ]
    printed = capsys.readouterr().out
    assert "mooncake on 3 x h100-qwen3-8b" in printed
    assert "times better than round-robin" in printed
    html = page.read_text()
    assert "<b>mooncake</b> on 3 x h100-qwen3-8b" in html
    assert all(f"engine{number}" in html for number in range(3))


# -- what comes out -----------------------------------------------------------------------------


@pytest.mark.usefixtures("in_process")
def test_rows_have_exactly_their_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "rows.json", tmp_path / "page.html"
    arguments = ["--policy", "fcfs,cache-aware+guard:40", "--load", "5,10", "--seed", "1,2"]
    assert cli.main([*SMALL, *arguments, "--json", str(out), "--report", str(page)]) == 0
    rows = json.loads(out.read_text())
    assert [list(row) for row in rows] == [FIELDS] * 8
    assert [(row["load"], row["policy"], row["seed"]) for row in rows][:3] == [
        (5, "fcfs", 1),
        (5, "fcfs", 2),
        (5, "cache-aware+guard:40", 1),
    ]
    assert all(row["operations_open"] == row["guard_violations"] == 0 for row in rows)
    assert all(row["engines"] == 1 for row in rows)
    assert all(row["workload"] == "mooncake" and row["engine"] == "h100-qwen3-8b" for row in rows)
    assert page.read_text().startswith("<!doctype html>")
    printed = capsys.readouterr()
    assert "cache-aware + guard:40" in printed.out
    assert "every operation ended in exactly one outcome" in printed.out
    assert printed.err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "rows.json"]


def test_the_same_seed_gives_the_same_bytes_however_many_run_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*SMALL, "--policy", "fcfs,cache-aware+guard:1+session-aware"]
    for name, jobs in (("1", "1"), ("22", "2")):
        monkeypatch.setenv("PYTHONHASHSEED", str(len(name)))  # sets are ordered by it
        assert cli.main([*arguments, "--jobs", jobs, "--json", str(tmp_path / name)]) == 0
    assert (tmp_path / "1").read_bytes() == (tmp_path / "22").read_bytes()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "arguments",
    [
        ["scbench", "--sessions", "3", "--task", "many_shot", "--rate", "2"],
        ["mooncake", "--window", "0:30", "--load", "10", "--loop", "open", "--max-tokens", "9000"],
        ["agentic", "--load", "3", "--rate", "1", "--max-tokens", "24000"],
    ],
)
def test_every_workload_can_be_replayed(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert cli.main(["replay", *arguments, "--policy", "guard:40", "--json", str(out)]) == 0
    [row] = json.loads(out.read_text())
    assert row["turns"] > 0
    assert row["workload"].startswith(arguments[0])


@pytest.mark.usefixtures("in_process")
def test_a_policy_that_fails_is_in_its_row_and_in_the_exit_code(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    policy = "fcfs,tests.harnesses.gone_wrong:Guards+session-aware"
    assert cli.main([*SMALL, "--policy", policy, "--json", str(out)]) == 1
    fine, failed = json.loads(out.read_text())
    assert fine["policy_failures"] == []
    assert failed["policy_failures"] == ["goes-wrong raised ValueError: on purpose"]
    assert failed["turns"] == fine["turns"]
    assert failed["operations_open"] == 0


def test_a_run_that_dies_is_one_line_and_the_others_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    policy = "tests.harnesses.gone_wrong:Dies,fcfs"
    assert cli.main([*SMALL, "--policy", policy, "--json", str(out)]) == 1
    assert [row["policy"] for row in json.loads(out.read_text())] == ["fcfs"]
    assert capsys.readouterr().err == (
        "hear: tests.harnesses.gone_wrong:Dies at 5%, seed 1: its process died with exit code 7\n"
    )


@pytest.mark.usefixtures("in_process")
def test_output_can_go_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    thread = threading.Thread(target=lambda: read.append(pipe.read_text()))
    thread.start()
    assert cli.main([*SMALL, "--policy", "fcfs", "--json", str(pipe)]) == 0
    thread.join()
    assert len(json.loads(read[0])) == 1
    assert pipe.is_fifo()


@pytest.mark.usefixtures("in_process")
def test_output_that_cannot_be_written_after_all_is_one_line_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(command, "write_whole", write)
    assert cli.main([*SMALL, "--policy", "fcfs", "--json", str(tmp_path / "rows.json")]) == 1
    printed = capsys.readouterr()
    assert "fcfs" in printed.out
    assert printed.err == (
        f"hear: {tmp_path / 'rows.json'}: cannot be written: No space left on device\n"
    )


# -- what is refused ----------------------------------------------------------------------------


def refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that is printed; nothing is written."""
    out = tmp_path / "out"
    out.mkdir()
    outputs = ["--json", str(out / "rows.json"), "--report", str(out / "page.html")]
    if not {"--json", "--report"}.isdisjoint(arguments) or len(arguments) < 2:
        outputs = []
    assert cli.main([*arguments, *outputs]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("hear: ")
    assert printed.err.endswith("\n")
    assert printed.err.count("\n") == 1
    assert list(out.iterdir()) == []
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["replay"], "the following arguments are required: WORKLOAD"),
        (["reply", "mooncake"], "invalid choice: 'reply'"),
        (["replay", "moncake"], "invalid choice: 'moncake'"),
        (["replay", "mooncake", "--polcy", "fcfs"], "unrecognized arguments: --polcy fcfs"),
        (["replay", "mooncake", "--policy"], "argument --policy: expected one argument"),
        (["replay", "mooncake", "--policy", "cache-awre"], "did you mean 'cache-aware'?"),
        (["replay", "mooncake", "--policy", "fcfs,gard:40"], "did you mean 'guard'?"),
        (["replay", "mooncake", "--policy", "guard:-1"], "W is -1.0 s, expected a positive"),
        (["replay", "mooncake", "--policy", "guard:abc"], "'abc', expected a number"),
        (["replay", "mooncake", "--policy", "cache-aware:5"], "hot share 5.0, expected"),
        (["replay", "mooncake", "--policy", "fcfs,"], "an empty name"),
        (["replay", "mooncake", "--policy", "no.such:Policy"], "no.such:Policy cannot be loaded"),
        (["replay", "mooncake", "--load", "0"], "--load '0': expected percents above 0"),
        (["replay", "mooncake", "--load", "50,10001"], "--load '10001'"),
        (["replay", "mooncake", "--load", "401"], "ends after 3537 s, expected at most 400%"),
        (["replay", "scbench", "--load", "101"], "expected at most 100% of scbench; more --sess"),
        (["replay", "agentic", "--load", "101"], "expected at most 100% of agentic"),
        (["replay", "mooncake", "--engines", "0"], "--engines: got '0', expected a whole number"),
        (["replay", "mooncake", "--engines", "257"], "--engines: got '257', expected at most 256"),
        (["replay", "mooncake", "--load", "half"], "--load 'half'"),
        (["replay", "mooncake", "--load", "nan"], "--load 'nan'"),
        (["replay", "mooncake", "--load", "0.001"], "is none of them"),
        (["replay", "mooncake", "--seed", "1.5"], "--seed '1.5': expected whole numbers"),
        (["replay", "mooncake", "--seed", ""], "--seed ''"),
        (["replay", "mooncake", "--window", "900"], "--window '900': expected START:SECONDS"),
        (["replay", "mooncake", "--window", "a:b"], "--window 'a:b'"),
        (["replay", "mooncake", "--window", "0:0"], "--window '0:0'"),
        (["replay", "mooncake", "--window=-1:5"], "--window '-1:5'"),
        (["replay", "mooncake", "--window", "90000:5"], "in which no request arrives"),
        (["replay", "mooncake", "--loop", "ajar"], "invalid choice: 'ajar'"),
        (["replay", "mooncake", "--jobs", "0"], "--jobs: got '0', expected a whole number"),
        (["replay", "mooncake", "--max-tokens", "x"], "--max-tokens: got 'x'"),
        (["replay", "mooncake", "--max-tokens", "1"], "max_tokens: got 1"),
        (["replay", "mooncake", "--engine", "h100-qwen3-8"], "did you mean 'h100-qwen3-8b'?"),
        (["replay", "mooncake", "--engine", "no/such.toml"], "no/such.toml: cannot be read"),
        (["replay", "mooncake", "--trace", "no/such.jsonl"], "no/such.jsonl: cannot be read"),
        (["replay", "agentic", "--rate", "0"], "--rate: got '0', expected a positive number"),
        (["replay", "agentic", "--rate", "inf"], "--rate: got 'inf'"),
        (["replay", "agentic", "--window", "0:9"], "unrecognized arguments"),
        (["replay", "scbench", "--task", "needle"], "invalid choice: 'needle'"),
        (["replay", "scbench", "--sessions", "-3"], "--sessions: got '-3'"),
        (["replay", "scbench", "--max-tokens", "10"], "max_tokens: got 10"),
        (["replay", "mooncake", "--json", "no/such/rows.json"], "no/such/rows.json: cannot be"),
        (["replay", "mooncake", "--report", "no/such/page"], "no/such/page: cannot be written"),
        (["replay", "mooncake", "--json", "/"], "/: is a folder"),
        (["replay", "mooncake", "--json", f"{__file__}/rows"], "/rows: cannot be written"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_writes_nothing(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(arguments, tmp_path, capsys)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name = "e"\n[model]\nnum_heds = 32\n', ":3: unknown key 'num_heds': did you mean"),
        ('name = "e"\n[tiers]\ngpu_kv_gib = -1\n', "engine.toml:"),
        ("name = \n", "engine.toml: not TOML: "),
        ('name = "e"\n', "engine.toml: "),
    ],
)
def test_an_engine_file_that_cannot_be_used_is_one_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.toml"
    path.write_text(text)
    assert says in refused(["replay", "mooncake", "--engine", str(path)], tmp_path, capsys)


GOOD = '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0]}\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + "{\n", "trace:2: got {, expected one JSON object"),
        (GOOD + GOOD.replace("9", '"nine"'), "trace:2: input_length: got 'nine', expected"),
        (GOOD.replace("[0]", "[0, 1]"), "trace:1: hash_ids: got 2 ids, expected 1"),
        (GOOD.replace('"hash_ids"', '"hashes"'), "trace:1: got no `hash_ids`"),
        ("", "got no request at all"),
        ("\x1f\x8bnot gzip", "trace:"),
    ],
)
def test_a_trace_with_a_bad_line_is_one_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(text.encode("latin-1"))
    assert says in refused(["replay", "mooncake", "--trace", str(path)], tmp_path, capsys)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["replay", "--help"], ["replay", "mooncake", "-h"]]
)
def test_help_is_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    assert "usage: hear" in capsys.readouterr().out


# -- Ctrl-C -------------------------------------------------------------------------------------


def test_stopped_between_two_runs_it_prints_and_writes_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_all(
        runs: list[Run], jobs: int, progress: Callable[[int, int], None]
    ) -> Iterator[Finished]:
        yield Finished(1, execute(runs[1], lambda done: None), "")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_all", run_all)
    out = tmp_path / "rows.json"
    policies = "fcfs,session-aware,guard"
    assert cli.main([*SMALL, "--policy", policies, "--json", str(out)]) == 130
    assert [row["policy"] for row in json.loads(out.read_text())] == ["session-aware"]
    printed = capsys.readouterr()
    assert "session-aware" in printed.out
    assert printed.err == "hear: stopped; 1 of 3 runs finished\n"


def test_stopped_before_anything_runs_it_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(namespace: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_plan", stop)
    assert cli.main([*SMALL, "--json", str(tmp_path / "rows.json")]) == 130
    assert capsys.readouterr().err == "hear: stopped\n"
    assert list(tmp_path.iterdir()) == []


def workers(parent: int) -> list[int]:
    """The processes that carry out the runs of a command."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"spawn_main" in (Path(f"/proc/{child}/cmdline").read_bytes())
    ]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def long_replay(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Three runs at once, in a group of their own; two are short and two are long."""
    words = ["--policy", "fcfs", "--load", "1,100", "--seed", "1,2", "--jobs", "3", "--json"]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hear.app.cli",
            "replay",
            "mooncake",
            *words,
            str(tmp_path / "rows.json"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs the tests in the background may have SIGINT ignored, which is inherited.
        preexec_fn=_hear_interrupts,
    )
    with process:
        yield process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


@needs_proc
def test_ctrl_c_prints_what_is_finished_and_leaves_no_process(
    long_replay: subprocess.Popen[str], tmp_path: Path
) -> None:
    started: set[int] = set()

    def one_has_finished() -> bool:
        now = workers(long_replay.pid)
        started.update(now)
        return len(started) > len(now) > 0

    until("one run finishes", one_has_finished)
    begun = time.monotonic()
    os.killpg(long_replay.pid, signal.SIGINT)  # as a terminal does
    out, err = long_replay.communicate(timeout=30)
    assert time.monotonic() - begun < 2
    assert long_replay.returncode == 130
    assert "1% load" in out
    last = err.splitlines()[-1]
    assert last.startswith("hear: stopped; ")
    assert "Traceback" not in err
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["load"] for row in rows] == [1] * len(rows)
    assert last == f"hear: stopped; {len(rows)} of 4 runs finished"
    assert not any(alive(child) for child in started)


@needs_proc
def test_when_it_is_killed_its_processes_end_too(long_replay: subprocess.Popen[str]) -> None:
    until("it runs", lambda: len(workers(long_replay.pid)) > 0)
    children = workers(long_replay.pid)
    long_replay.kill()
    until("they have ended", lambda: not any(alive(child) for child in children))


def test_no_process_of_these_tests_is_left() -> None:
    assert multiprocessing.active_children() == []
