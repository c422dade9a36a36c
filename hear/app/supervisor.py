"""Keeps processes running: starts them, starts them again after a pause, and ends them in time.

A *part* is one process of a cluster. One that ends by itself is started again, after a pause that
grows while it keeps ending soon. It is given a pipe as its standard input, so that it ends when its
supervisor is killed.
"""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog
import trio

from hear.errors import ConfigError

_log = structlog.get_logger("hear.app.supervisor")

FIRST_PAUSE_S: Final = 0.2
MAX_PAUSE_S: Final = 10.0
STEADY_S: Final = 30.0
"""A part that has run for so long has overcome what ended it before."""

CANNOT_START: Final = 2
"""Exit code of a part that was given what it cannot use. Starting it again would not help."""

TRY_AGAIN: Final = 75
"""Exit code of a part that lacks something which may yet come (EX_TEMPFAIL)."""

END_WITHIN_S: Final = 1.7
"""Time that a part is given to end before it is killed."""


@dataclass(frozen=True, slots=True)
class Part:
    """A process of a cluster: its name, and the command line that starts it."""

    name: str
    command: tuple[str, ...]


class Supervisor:
    """Runs parts until cancelled."""

    def __init__(
        self,
        *,
        on_start: Callable[[Part, int], None] = lambda part, pid: None,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        """``on_start`` is told each process that was started."""
        self._max_pause_s = max_pause_s
        self.restarts: dict[str, int] = {}
        self._on_start = on_start
        self._running: dict[str, int] = {}

    @property
    def running(self) -> dict[str, int]:
        """Process ids of the parts that run now, by name."""
        return dict(self._running)

    async def run(self, parts: Sequence[Part]) -> None:
        """Keep all parts running until cancelled; then end them."""
        async with trio.open_nursery() as nursery:
            for part in parts:
                nursery.start_soon(self.keep, part)

    async def keep(self, part: Part) -> None:
        """Keep one part running until cancelled; then end it.

        Raises:
            ConfigError: it says that it was given what it cannot use.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            begun = trio.current_time()
            code = await self._run_once(part)
            lived_s = trio.current_time() - begun
            if code == CANNOT_START:
                raise ConfigError(f"part {part.name!r} cannot be started, for the reason above")
            pause_s = FIRST_PAUSE_S if lived_s >= STEADY_S else pause_s
            _log.warning(
                "part.ended",
                part=part.name,
                how=_how(code),
                after_s=round(lived_s, 1),
                again_in_s=pause_s,
            )
            self.restarts[part.name] = self.restarts.get(part.name, 0) + 1
            await trio.sleep(pause_s)
            pause_s = min(pause_s * 2, self._max_pause_s)

    async def _run_once(self, part: Part) -> int:
        ours, theirs = _pipe()
        try:
            process = await trio.lowlevel.open_process(
                list(part.command), stdin=theirs, start_new_session=True
            )
        finally:
            os.close(theirs)
        self._running[part.name] = process.pid
        self._on_start(part, process.pid)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                await _end(process)
            os.close(ours)
            del self._running[part.name]


def _pipe() -> tuple[int, int]:
    """An end for us, which no other process inherits, and one for the process to be started."""
    reading, writing = os.pipe()
    return writing, reading


async def _end(process: trio.Process) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with trio.move_on_after(END_WITHIN_S, shield=True):
        await process.wait()
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


def _how(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
