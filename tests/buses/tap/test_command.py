"""``hear tap`` and ``hear status`` as commands: arguments, and a real bus between processes."""

import builtins
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hear.app import cli
from tests.buses.tap.cluster import in_another_process

WITHIN_S = 30.0
END_S = 6.0
"""On an idle machine it takes less than 1 s; here others may want the same processors."""


def one_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says as it refuses: one line, and code 2."""
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    [line] = said.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--count", "0"], "'0': expected a whole number of 1 or more"),
        (["--count", "x"], "'x': expected a whole number of 1 or more"),
        (["--for", "-1"], "'-1': expected seconds, 0 or more"),
        (["--for", "nan"], "'nan': expected seconds, 0 or more"),
        (["--category", "stat"], "invalid choice: 'stat'"),
        (["--subject", "state.default"], "2 tokens, and a subject has 5"),
        (["--category", "state", "--policy", "p"], "no message can match all of these options"),
        (["--bodies"], "--bodies: expected together with --json"),
        (["--screen", "--json"], "--screen: expected without --json"),
        (["--screen", "--request", "r"], "--screen: expected without --request"),
        (["--bus", "nope://x"], "bus 'nope://x': expected an address that begins with one of"),
    ],
)
def test_bad_arguments_are_one_clear_line(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in one_line(capsys, "tap", *arguments)


def test_a_screen_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no terminal" in one_line(capsys, "tap", "--screen")


def test_without_textual_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_textual(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "textual":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "hear.buses.observe.tap.screen", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_textual)
    assert "pip install 'hear-protocol[screen]'" in one_line(capsys, "tap", "--screen")


@pytest.mark.parametrize("command", ["tap", "status"])
def test_a_bus_that_nobody_serves_is_one_line(command: str, tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/bus"
    done = subprocess.run(hear(command, url), capture_output=True, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stdout) == (2, "")
    # Before it gives up, the bus warns of its own that the hub is silent.
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"hear: {url}: bus cannot be joined")


# -- on a bus between processes ---------------------------------------------------------------


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    url = f"ipc://{tmp_path_factory.mktemp('run')}/bus"
    with in_another_process(url):
        yield url


def hear(command: str, bus: str, *arguments: str) -> list[str]:
    """The command line of the command."""
    return [sys.executable, "-m", "hear.app.cli", command, "--bus", bus, *arguments]


def printed(command: str, bus: str, *arguments: str) -> list[str]:
    """The lines that a command prints that ends well and says nothing else."""
    done = subprocess.run(
        hear(command, bus, *arguments), capture_output=True, text=True, timeout=WITHIN_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_messages_are_lines_on_a_pipe_without_colour(bus: str) -> None:
    lines = printed("tap", bus, "--count", "30")
    assert len(lines) == 30
    assert not any("\x1b" in line for line in lines)
    assert {line[13:21].strip() for line in lines} <= {"intent", "control", "state", "outcome"}


def test_json_can_be_read_line_by_line_and_filtered(bus: str) -> None:
    lines = printed("tap", bus, "--json", "--policy", "guard:40", "--count", "6")
    records = [json.loads(line) for line in lines]
    for record in records:
        assert record["type"] == "message"
        assert record["source"] == "guard:40" or record["kind"] == "operation_outcome"
        assert record["key"]["operation"].startswith("guard:40-")
    assert {record["category"] for record in records} == {"control", "outcome"}


def test_the_history_of_a_request_tells_its_whole_life(bus: str) -> None:
    lines = printed("tap", bus, "--request", "r0.1", "--history", "--count", "5")
    assert "describes r0.1 of context c0 v1" in lines[0]
    assert all("r0.1" in line for line in lines if " state " not in line)


def test_a_pipe_that_closes_ends_it_quietly(bus: str) -> None:
    process = subprocess.Popen(
        hear("tap", bus), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(WITHIN_S) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_at_once(bus: str, number: int, code: int) -> None:
    process = subprocess.Popen(hear("tap", bus), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(WITHIN_S) == code
        assert time.monotonic() - began < END_S


def test_status_shows_the_cluster(bus: str) -> None:
    lines = printed("status", bus)
    assert lines[0].split() == ["engine", "engine0"]
    assert any(line.startswith("KV gpu") for line in lines)
    assert any(line.startswith("guard:40 ") and "bound_wait" in line for line in lines)
    assert any(line.startswith("cluster/engine0 ") for line in lines)
    assert "all participants" in lines[-1]


def test_status_as_json_says_the_same(bus: str) -> None:
    [line] = printed("status", bus, "--json")
    status = json.loads(line)
    assert [engine["name"] for engine in status["engines"]] == ["engine0"]
    assert status["engines"][0]["missing"] == []
    assert {policy["name"] for policy in status["policies"]} == {"cache-aware", "guard:40"}
    assert status["central"] is True


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
        )
        os.close(slave)
        self._shown = b""

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while text.encode() not in self._shown:
            assert time.monotonic() < deadline, self._shown[-2000:]
            self._read(0.1)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self) -> int:
        """Wait for its end, reading what it still says; a full terminal would hold it up."""
        deadline = time.monotonic() + WITHIN_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self._read(0.02)
        os.close(self._master)
        return self.process.returncode

    def _read(self, within_s: float) -> None:
        ready, _, _ = select.select([self._master], [], [], within_s)
        if ready:
            with suppress(OSError):  # the other end may have gone
                self._shown += os.read(self._master, 1 << 16)


def test_on_a_terminal_lines_have_colour(bus: str) -> None:
    terminal = Terminal(hear("tap", bus, "--count", "3"))
    terminal.wait_for("\x1b[36mstate")
    assert terminal.end() == 0


@pytest.mark.parametrize("ending", ["q", "\x03", signal.SIGTERM])
def test_the_screen_shows_the_cluster_and_ends_in_time(bus: str, ending: str | int) -> None:
    terminal = Terminal(hear("tap", bus, "--screen"))
    terminal.wait_for("engine0")
    terminal.wait_for("guard:40")
    began = time.monotonic()
    if isinstance(ending, str):
        terminal.press(ending)
        code = 0
    else:
        terminal.process.send_signal(ending)
        code = 128 + ending
    assert terminal.end() == code
    assert time.monotonic() - began < END_S
