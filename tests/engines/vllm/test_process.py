"""How a server runs as a process, with small programs in the place of vLLM."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hear.engines.vllm.launch.process import PortInUseError, check_port
from hear.errors import ConfigError

BOUND_S = 20
# Starts a child that, as its parent does, hears nothing of SIGTERM, and tells both numbers.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""
SHARING = """
import signal, time
from multiprocessing import resource_tracker, shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = shared_memory.SharedMemory(create=True, size=4096)
print(resource_tracker._resource_tracker._pid, memory._name.lstrip("/"), flush=True)
time.sleep(60)
"""
GENTLE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def supervised(program: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a program as ``hear vllm serve --with-parent`` runs vLLM."""
    code = (
        "import sys; from hear.engines.vllm.launch.process import run_under_supervisor; "
        "sys.exit(run_under_supervisor((sys.executable, '-c', sys.argv[1]), {'ADDED': '1'}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def ended(pid: int) -> bool:
    """Whether a process runs no more, though nobody may have asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import os, sys; sys.exit(3 if os.environ['ADDED'] == '1' else 4)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_the_exit_code_is_that_of_the_program(program: str, code: int) -> None:
    with supervised(program) as process:
        assert process.wait(BOUND_S) == code


def test_a_signal_is_passed_on_and_waited_for() -> None:
    with supervised(GENTLE) as process:
        assert first_line(process) == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 7


def test_it_ends_with_its_standard_input() -> None:
    with supervised(GENTLE) as process:
        assert first_line(process) == "ready\n"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(BOUND_S) == 7


def test_what_does_not_end_in_time_is_killed_with_all_that_it_started() -> None:
    with supervised(STUBBORN) as process:
        pids = [int(word) for word in first_line(process).split()]
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 128 + signal.SIGKILL
        assert all(ended(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux the two can be told apart")
def test_shared_memory_of_what_was_killed_is_freed() -> None:
    with supervised(SHARING) as process:
        pid, name = first_line(process).split()
        tracker = os.pidfd_open(int(pid))
        assert Path("/dev/shm", name).exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 128 + signal.SIGKILL
        assert select.select([tracker], [], [], BOUND_S)[0], "the tracker still runs"
        assert not Path("/dev/shm", name).exists()
        os.close(tracker)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_killed_parent_takes_the_program_with_it() -> None:
    with supervised(GENTLE.replace('"ready"', "__import__('os').getpid()")) as process:
        pid = int(first_line(process))
        watched = os.pidfd_open(pid)
        process.kill()
        process.wait(BOUND_S)
        assert select.select([watched], [], [], BOUND_S)[0], "it still runs"
        os.close(watched)


def test_a_free_port_is_no_trouble_and_a_taken_one_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"--port {port}: 127.0.0.1:{port} is in use"):
            check_port("127.0.0.1", port)
        with pytest.raises(PortInUseError, match="in use"):
            check_port("", port)
    check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:8000"):
        check_port("192.0.2.1", 8000)
