"""``hear vllm serve`` as it is typed: whose an option is, and what is said of what cannot be."""

import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import pytest

from hear.app import cli
from hear.app.supervisor import TRY_AGAIN
from hear.engines.vllm import versions
from hear.engines.vllm.launch import serve_command


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM for CPUs, whatever is installed; it is never started."""
    found = versions.Installed("0.32.0", cpu=True, named_vllm=False)
    monkeypatch.setattr(versions, "installed", lambda: found)
    monkeypatch.delenv("HEAR_BUS", raising=False)
    monkeypatch.delenv("HEAR_KEY", raising=False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that this process would have become."""
    commands: list[tuple[str, ...]] = []

    def become(command: tuple[str, ...], added: Mapping[str, str]) -> NoReturn:
        commands.append(command)
        raise SystemExit(0)

    def supervise(command: tuple[str, ...], added: Mapping[str, str]) -> int:
        commands.append(command)
        return 0

    monkeypatch.setattr(serve_command, "become", become)
    monkeypatch.setattr(serve_command, "run_under_supervisor", supervise)
    return commands


@pytest.mark.parametrize(
    "words",
    [
        "MODEL --name big --enforce-eager --bus tcp://127.0.0.1:7777 -tp 2",
        "--name big --bus tcp://127.0.0.1:7777 MODEL --enforce-eager -tp 2",
        "MODEL --enforce-eager --bus=tcp://127.0.0.1:7777 -tp 2 --name=big",
    ],
)
def test_options_of_hear_may_stand_anywhere_and_the_rest_is_vllms(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["vllm", "serve", *words.split(), "--dry-run"]) == 0
    printed = shlex.split(capsys.readouterr().out)
    assert printed[0] == "PYTHONHASHSEED=0"
    start = printed.index("--model")
    assert printed[start : start + 5] == ["--model", "MODEL", "--enforce-eager", "-tp", "2"]
    assert "--name" not in printed
    additional = printed[printed.index("--additional-config") + 1]
    assert '"name": "big", "bus": "tcp://127.0.0.1:7777"' in additional


def test_what_only_begins_like_an_option_of_hear_is_vllms(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["vllm", "serve", "M", "--nam", "x", "--dry-run"]) == 0
    assert "--nam x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "expected a MODEL"),
        ("--name x", "expected a MODEL"),
        ("M --name", "--name: expected one argument"),
        ("M --name a/b", "name 'a/b': expected 1 to 128"),
        ("M --bus nowhere", "expected an address that begins with one of"),
        ("M --ranks guard", "--ranks 'guard': expected POLICY=NUMBER"),
        ("M --tenant a/b --tenant=", "--tenant '': expected a name of 1 to 256 characters"),
        (f"M --tenant {'t' * 257}", "expected a name of 1 to 256 characters"),
        (f"M {' '.join(f'--tenant t{n}' for n in range(300))}", "--tenant: got 300, expected 256"),
        ("M --endpoint nonsense", "--endpoint 'nonsense': expected http://HOST:PORT"),
        ("M --endpoint http://[::", "expected http://HOST:PORT"),
        ("M --cpu-tier-gib 0", "--cpu-tier-gib: got '0', expected GiB above 0 and below"),
        ("M --cpu-tier-gib 1000000", "--cpu-tier-gib: got '1000000', expected GiB"),
        ("M --scheduler-cls a.B", "--scheduler-cls: got 'a.B'"),
        ("./nowhere", "there is no such folder"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_started(
    words: str, why: str, started: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["vllm", "serve", *words.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hear: ")
    assert why in line
    assert not started


def test_a_taken_port_is_one_line_and_under_a_supervisor_it_is_tried_again(
    started: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ["vllm", "serve", "M", "--host", "127.0.0.1", "--port", port]
        assert cli.main(words) == 2
        assert f"127.0.0.1:{port} is in use" in capsys.readouterr().err
        assert cli.main([*words, "--with-parent"]) == TRY_AGAIN
        assert f"127.0.0.1:{port} is in use" in capsys.readouterr().err
    assert not started
    assert cli.main([*words, "--with-parent"]) == 0
    assert len(started) == 1


def test_without_a_bus_it_says_so_and_starts(
    tmp_path: Path, started: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    bus = f"ipc://{tmp_path}/nobody"
    with pytest.raises(SystemExit):
        cli.main(["vllm", "serve", "M", "--bus", bus, "--port", str(_free_port())])
    line = capsys.readouterr().err.splitlines()[-1]  # the bus may have been waited for aloud
    assert line.startswith(f"hear: {bus}: ")
    assert line.endswith("vLLM serves in its own order until HEAR gets through")
    [command] = started
    assert bus in command[-1]


def test_help_is_hears_and_says_where_vllms_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vllm", "serve", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--cpu-tier-gib" in printed
    assert "vllm serve --help=all" in printed


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
        return port
