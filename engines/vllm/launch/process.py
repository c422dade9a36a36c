"""vLLM's server as a process: in place of this one, or as a child that ends when it has to.

In place of this one, signals, exit codes and Ctrl-C are vLLM's own. Under a supervisor that allows
little time to end, vLLM and the processes that it has started are a group, and end together.
"""

import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from hear.app import output
from hear.errors import ConfigError

END_WITHIN_S: Final = 1.0
"""What vLLM may take to end under a supervisor, which waits for little longer itself."""

_PR_SET_PDEATHSIG: Final = 1
_ROUNDS: Final = 5


class PortInUseError(ConfigError):
    """The port that vLLM would listen on is taken. Later it may be free."""


def check_port(host: str, port: int) -> None:
    """See that vLLM could listen there.

    Raises:
        PortInUseError: somebody else does.
        ConfigError: there is no such host, or it is not this machine.
    """
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        at = f"{host or '*'}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"--port {port}: {at} is in use; give another") from error
        raise ConfigError(f"--host, --port: cannot listen on {at}: {error.strerror}") from error


def become(command: tuple[str, ...], added: Mapping[str, str]) -> NoReturn:
    """Go on as another program."""
    output.flush()
    os.execve(command[0], command, {**os.environ, **added})


def run_under_supervisor(command: tuple[str, ...], added: Mapping[str, str]) -> int:
    """Run a program until it ends, SIGTERM or SIGINT comes, or standard input does; its exit code.

    Whatever it has started is ended with it.
    """
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    child = subprocess.Popen(
        command,
        env={**os.environ, **added},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )

    def watch_input() -> None:
        while os.read(0, 4096):
            pass
        ending.set()

    def watch_child() -> None:
        child.wait()
        ending.set()

    for watch in (watch_input, watch_child):
        threading.Thread(target=watch, daemon=True).start()
    while not ending.wait(60):  # in turns, since a signal is only handled between two of them
        pass
    if child.returncode is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(END_WITHIN_S)
    _end_group(child.pid)
    code = child.wait()
    return 128 - code if code < 0 else code


def _end_group(group: int) -> None:
    """Kill all of a group but Python's trackers of resources.

    They end by themselves when all whom they serve have ended, and then free the shared memory that
    those left behind; vLLM's is hundreds of MiB.
    """
    if sys.platform != "linux":
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        return
    for _ in range(_ROUNDS):  # one that is killed may just have started another
        found = [pid for pid in _members(group) if not _is_tracker(pid)]
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    members = []
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, OSError):
            pid = int(entry.name)
            state, _, of_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                members.append(pid)
    return members


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _end_with_parent() -> None:
    """Have this process told to end if its parent is killed and cannot say so."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
