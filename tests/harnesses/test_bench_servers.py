"""Servers as processes: waited for, watched, and ended with all that they have started."""

import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from hear.errors import ConfigError, EngineError
from hear.harnesses.eval.bench.servers import Command, carry_out, free_port, running

SLEEPS = "import time; time.sleep(60)"
HAS_A_CHILD = """
import subprocess, sys, pathlib, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""


def python(code: str, *arguments: str) -> Command:
    return Command("server", (sys.executable, "-c", code, *arguments))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def said(folder: Path) -> str:
    if not (text := (folder / "server.log").read_text()):
        raise EngineError("nothing yet")
    return text


async def never() -> None:
    raise EngineError("not yet")


async def test_leaving_ends_the_server_and_what_it_has_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"

    async def child() -> int:
        try:
            return int(file.read_text())
        except (OSError, ValueError) as error:
            raise EngineError("no child yet") from error

    with trio.fail_after(20):
        async with running(python(HAS_A_CHILD, str(file)), tmp_path) as server:
            pid = await server.until(child, "starting", 15)
            assert is_alive(pid)
        assert server.process.returncode is not None
        while is_alive(pid):  # noqa: ASYNC110 - the system has no event for it
            await trio.sleep(0.01)


async def test_a_cancelled_caller_does_not_wait_for_a_server_that_will_not_end(
    tmp_path: Path,
) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    with trio.fail_after(20), trio.CancelScope() as scope:
        async with running(python(f"{deaf}; {SLEEPS}"), tmp_path) as server:
            await server.until(partial(said, tmp_path), "starting")
            begun = trio.current_time()
            scope.cancel()
            await trio.sleep_forever()
    assert trio.current_time() - begun < 5
    assert server.process.returncode == -9


async def test_a_server_that_ends_before_its_time_is_told_with_its_last_words(
    tmp_path: Path,
) -> None:
    code = "import sys; print('loading'); print('ValueError: no such model'); sys.exit(3)"
    with trio.fail_after(20):
        async with running(python(code), tmp_path) as server:
            with pytest.raises(EngineError, match="code 3: ValueError: no such model") as caught:
                await server.until(never, "starting")
    assert str(tmp_path / "server.log") in str(caught.value)


async def test_a_server_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with running(python(SLEEPS), tmp_path) as server:
            with pytest.raises(EngineError, match=r"starting took longer than 0\.3 s: not yet"):
                await server.until(never, "starting", 0.3)


async def test_what_is_not_there_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be started"):
        async with running(Command("server", ("/no/such/program",)), tmp_path):
            pass


async def test_what_is_set_in_the_environment_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEAR_TEST_A", "mine")
    code = f"import os; print(os.environ['HEAR_TEST_A'], os.environ['HEAR_TEST_B']); {SLEEPS}"
    command = Command(
        "server",
        (sys.executable, "-u", "-c", code),
        {"HEAR_TEST_A": "theirs", "HEAR_TEST_B": "theirs"},
    )

    with trio.fail_after(20):
        async with running(command, tmp_path) as server:
            assert await server.until(partial(said, tmp_path), "starting") == "mine theirs\n"


def test_a_free_port_can_be_listened_on() -> None:
    assert 1024 <= free_port() < 65_536


def test_a_command_that_fails_is_told_with_its_last_line() -> None:
    code = "import sys; print('one', file=sys.stderr); sys.exit('hear: no room')"
    with pytest.raises(ConfigError, match=r"^no room$"):
        carry_out([sys.executable, "-c", code])
    carry_out([sys.executable, "-c", "pass"])
