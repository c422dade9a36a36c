"""``hear bench`` as a command: processes of its own, its files, and its one line of complaint."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from hear.app import cli
from hear.app.clock import SharedClock
from hear.app.connection import connected
from hear.errors import EngineError
from hear.harnesses.eval.bench import command, servers
from hear.harnesses.eval.replay.live import find_engines

HEAR = (sys.executable, "-m", "hear.app.cli")
SMALL = ["--sessions", "3", "--turns", "2", "--context", "300:600", "--rate", "50", "--think", "0"]
SIMULATED = ["bench", "--engine", "simulated:rtx-pro-6000-qwen3-8b", *SMALL]


def test_arms_are_served_by_processes_of_their_own_and_all_is_written(tmp_path: Path) -> None:
    rows, page, kept = tmp_path / "o.json", tmp_path / "o.html", tmp_path / "w.json"
    files = ["--json", rows, "--report", page, "--save-workload", kept, "--logs", tmp_path / "logs"]
    arms = ["--policy", "fcfs,cache-aware+guard:4", "--repeat", "2"]
    done = subprocess.run(
        [*HEAR, *SIMULATED, *arms, *map(str, files)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(rows.read_text())
    assert [(row["policy"], row["seed"], row["turns"]) for row in written["rows"]] == [
        ("fcfs", 1, 6),
        ("fcfs", 2, 6),
        ("cache-aware+guard:4", 1, 6),
        ("cache-aware+guard:4", 2, 6),
    ]
    assert written["problems"] == []
    assert {pair["rounds"] for pair in written["paired"]} == {2}
    assert "scbench-small" in page.read_text()
    assert len(json.loads(kept.read_text())) == 2
    assert "scbench-small on rtx-pro-6000-qwen3-8b" in done.stdout
    assert "Medians over rounds" in done.stdout
    assert "every operation ended in exactly one outcome" in done.stdout
    told = [line.split(": ")[0] for line in done.stderr.splitlines() if line.startswith("round")]
    assert told == [
        "round 1 of 2, fcfs",
        "round 1 of 2, cache-aware+guard:4",
        "round 2 of 2, cache-aware+guard:4",
        "round 2 of 2, fcfs",
    ]
    assert (tmp_path / "logs" / "1-0" / "engine0.log").exists()


async def _bench_a_running_engine(folder: Path, rows: Path) -> tuple[int, str, str]:
    """Serve two arms on an engine that runs already; and try one that is not on its bus."""
    url = f"ipc://{folder}/bus"
    engine = servers.simulated("mine", "rtx-pro-6000-qwen3-8b", 32, url, "cache-aware=1")

    async def told() -> str:
        async with connected(url, name="probe") as bus:
            engines = await find_engines(bus, within_s=0.2)
            if "mine" not in engines:
                raise EngineError("not yet")
            return engines["mine"].endpoint

    with trio.fail_after(100):
        async with (
            servers.running(servers.hub(url), folder),
            servers.running(engine, folder) as server,
        ):
            endpoint = await server.until(told, "starting", 30)
            arms = ["--policy", "fcfs,cache-aware", "--json", str(rows), "--bus", url]
            command = [*HEAR, "bench", *SMALL, *arms, "--engine-url"]
            run = partial(trio.run_process, capture_stdout=True, capture_stderr=True, check=False)
            done = await run([*command, endpoint])
            other = await run([*command, "sim+tcp://127.0.0.1:9"])
    return done.returncode, done.stderr.decode(), other.stderr.decode()


def test_arms_follow_each_other_on_an_engine_that_runs_already(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    main = partial(_bench_a_running_engine, tmp_path, rows)
    code, said, of_other = trio.run(main, clock=SharedClock())
    assert code == 0, said
    written = json.loads(rows.read_text())
    assert [(row["policy"], row["engine"]) for row in written["rows"]] == [
        ("fcfs", "Qwen3-8B"),
        ("cache-aware", "Qwen3-8B"),
    ]
    # Both arms found the cache as good as empty: the first turns of neither reuse anything.
    first, second = written["rows"]
    assert second["reuse_all_pct"] == pytest.approx(first["reuse_all_pct"], abs=5)
    assert of_other.startswith("hear: --engine-url sim+tcp://127.0.0.1:9: on ipc://")
    assert "'mine' at 'sim+tcp://127.0.0.1:" in of_other
    assert of_other.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "sglang"], "expected vllm, or simulated: and a profile"),
        (["--engine", "simulated"], "expected vllm, or simulated: and a profile"),
        (["--engine", "simulated:none.toml"], "none.toml"),
        (["--engine", "simulated:h100-qwen3-8b", "--model", "m"], "no model or options of vLLM"),
        (["--policy", "fcfs,fcfs"], "fcfs is named twice"),
        (["--policy", "cash-aware"], "did you mean 'cache-aware'?"),
        (["--engine", "simulated:h100-qwen3-8b", "--policy", "stock"], "stock is vLLM without"),
        (["--seed", "-1"], "--seed -1"),
        (["--repeat", "0"], "expected a whole number of at least 1"),
        (["--context", "9"], "expected MIN:MAX"),
        (["--context", "9:8"], "got 9:8 tokens"),
        (["--rate", "0"], "rate: got 0"),
        (["--rate", "nan"], "rate: got nan"),
        (["--think", "-1"], "think time"),
        (["--workload", "none.json"], "none.json: cannot be read"),
        (["--trace", "none.jsonl"], "none.jsonl: cannot be read"),
        (["--trace", "none.jsonl", "--workload", "x"], "--trace: got --workload as well"),
        (["--load", "50"], "--load: is of a --trace, and there is none"),
        (["--json", "/no/folder/o.json"], "/no/folder/o.json: cannot be written"),
        (["--engine-url", "http://h:1", "--model", "m"], "runs already"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("hear: ")
    assert said.count("\n") == 1


def test_what_keeps_the_first_arm_from_starting_is_told_once_and_no_other_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that is not there: the server ends, whether vLLM is installed or not."""
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    arguments = ["--model", str(tmp_path / "none"), "--policy", "fcfs,cache-aware"]
    assert cli.main(["bench", *arguments, "--logs", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "hear: round 1 of 1, fcfs: engine0: ended with code" in said
    assert "cache-aware" not in said
    assert "Traceback" not in said


def test_without_vllm_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert cli.main(["bench"]) == 2
    assert "vLLM is not installed: " in capsys.readouterr().err
