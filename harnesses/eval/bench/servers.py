"""Engines as processes: their command lines, waiting until they serve, ending them in time.

Nothing of an engine is imported here. A server's own words go to a file, and the last of them into
the error if it ends before its time.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import trio

from hear.errors import BusError, ConfigError, EngineError

START_S: Final = 300.0
"""How long a server may take until it serves."""

STOP_S: Final = 10.0
"""How long it may take to end when it is asked to, before it is killed."""

CANCELLED_S: Final = 1.25
"""The same where the caller is cancelled: ``hear vllm serve`` takes a second to end vLLM."""

LOOK_EVERY_S: Final = 0.2

_T = TypeVar("_T")

_MODULE: Final = (sys.executable, "-P", "-m")
"""With ``-m`` alone, a module in the folder where one stands would hide an installed one."""

CPU_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, the least; how many blocks are used of it is an option
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What vLLM needs to serve a generated model where there is no GPU; what is set already stands."""


class Command(NamedTuple):
    """How a server is started: its command line, and what is added to the environment."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}


def hear(*arguments: str) -> tuple[str, ...]:
    """The command line of a ``hear`` command in this environment."""
    return (*_MODULE, "hear.app.cli", *arguments)


def hub(url: str) -> Command:
    """The hub of a bus."""
    return Command("bus", hear("run", "bus", "--bus", url, "--with-parent"))


def simulated(name: str, profile: str, block_size: int, bus: str, ranks: str) -> Command:
    """A simulated engine, which serves in real time."""
    arguments = [name, "--bus", bus, "--profile", profile, "--block-size", str(block_size)]
    arguments += ["--endpoint", "sim+tcp://127.0.0.1:0", "--ranks", ranks, "--with-parent"]
    return Command(name, hear("run", "engine", *arguments))


def vllm(
    name: str, model: str, options: Sequence[str], *, port: int, bus: str, ranks: str
) -> Command:
    """vLLM with HEAR in it."""
    own = ["--bus", bus, "--name", name, "--with-parent", *(["--ranks", ranks] if ranks else [])]
    listening = ["--host", "127.0.0.1", "--port", str(port)]
    return Command(name, hear("vllm", "serve", model, *own, *listening, *options), CPU_ENVIRONMENT)


def stock_vllm(name: str, model: str, options: Sequence[str], *, port: int) -> Command:
    """vLLM as it comes, with the same options."""
    server = (*_MODULE, "vllm.entrypoints.openai.api_server")
    listening = ("--host", "127.0.0.1", "--port", str(port))
    return Command(name, (*server, "--model", model, *listening, *options), CPU_ENVIRONMENT)


def carry_out(arguments: Sequence[str]) -> None:
    """Run a command to its end.

    Raises:
        ConfigError: it fails, with the last that it says, or takes too long.
    """
    try:
        done = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=START_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{shlex.join(arguments)}: took longer than {START_S:g} s") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().split("\n")[-1]
        raise ConfigError(said.removeprefix("hear: ") or f"{shlex.join(arguments)}: failed")


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Server:
    """A process that was started. Made by ``running``."""

    def __init__(self, command: Command, process: trio.Process, log: Path) -> None:
        self.name = command.name
        self.process = process
        self.log = log

    async def until(
        self, attempt: Callable[[], Awaitable[_T]], what: str, within_s: float = START_S
    ) -> _T:
        """Try until it succeeds; as long as it raises an error of a bus or an engine, try again.

        Raises:
            EngineError: the server ended before, or time is up.
        """
        last: Exception | None = None
        with trio.move_on_after(within_s):
            while True:
                if (code := self.process.poll()) is not None:
                    raise EngineError(f"{self.name}: ended with code {code}: {self._last_words()}")
                try:
                    return await attempt()
                except (BusError, EngineError) as error:
                    last = error
                await trio.sleep(LOOK_EVERY_S)
        raise EngineError(
            f"{self.name}: {what} took longer than {within_s:g} s: {last or self._last_words()}"
        )

    def _last_words(self) -> str:
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as error:
            return f"{self.log}: {error.strerror}"
        told = [line.strip() for line in lines if line.strip()]
        errors = [line for line in told if "rror" in line]
        return f"{(errors or told or ['it said nothing'])[-1]} ({self.log})"


@asynccontextmanager
async def running(command: Command, logs: Path) -> AsyncIterator[Server]:
    """Start a process with all that it may start in turn; leaving the context ends them.

    Raises:
        EngineError: it cannot be started.
    """
    log = logs / f"{command.name}.log"
    reading, writing = os.pipe()  # an end of input tells parts of HEAR that this process has gone
    try:
        with log.open("wb") as file:
            process = await trio.lowlevel.open_process(
                list(command.arguments),
                stdin=reading,
                stdout=file,
                stderr=file,
                env={**command.environment, **os.environ},
                start_new_session=True,
            )
    except OSError as error:
        os.close(writing)
        raise EngineError(f"{command.arguments[0]}: cannot be started: {error}") from error
    finally:
        os.close(reading)
    try:
        yield Server(command, process, log)
    finally:
        os.close(writing)
        await _end(process)


async def _end(process: trio.Process) -> None:
    """End a process and its children, in order if there is time."""
    cancelled = trio.current_effective_deadline() == -float("inf")
    with trio.CancelScope(shield=True):
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with trio.move_on_after(CANCELLED_S if cancelled else STOP_S):
            await process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
