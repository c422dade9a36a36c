"""Processes that are kept running."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import structlog
import trio

from hear.app.supervisor import Part, Supervisor
from hear.errors import ConfigError

SLEEPER = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(60)"
)
ENDS_WITH_PARENT = "import sys; sys.stdin.read()"


@dataclass
class Watched:
    """A supervisor, and the processes that it has started."""

    supervisor: Supervisor
    pids: list[int] = field(default_factory=list)
    news: trio.Event = field(default_factory=trio.Event)

    async def until(self, count: int) -> None:
        with trio.fail_after(20):
            while len(self.pids) < count:
                await self.news.wait()

    def started(self, part: Part, pid: int) -> None:
        self.pids.append(pid)
        self.news.set()
        self.news = trio.Event()


@asynccontextmanager
async def watched(*parts: Part) -> AsyncIterator[Watched]:
    made = Watched(Supervisor(on_start=lambda part, pid: made.started(part, pid)))
    with structlog.testing.capture_logs():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.supervisor.run, parts)
            yield made
            nursery.cancel_scope.cancel()


def part(code: str, name: str = "part") -> Part:
    return Part(name, (sys.executable, "-c", code))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_what_is_killed_is_started_again() -> None:
    async with watched(part(SLEEPER)) as w:
        await w.until(1)
        os.kill(w.pids[0], signal.SIGKILL)
        await w.until(2)
        assert w.supervisor.restarts == {"part": 1}
        assert w.supervisor.running == {"part": w.pids[1]}
    assert not any(map(is_alive, w.pids))


async def test_one_that_ends_at_once_is_tried_with_growing_pauses() -> None:
    async with watched(part("raise SystemExit(3)")) as w:
        times = []
        for count in range(1, 5):
            await w.until(count)
            times.append(trio.current_time())
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[1] > pauses[0] * 1.2
    assert pauses[2] > pauses[1] * 1.2


async def test_one_that_was_given_what_it_cannot_use_is_not_tried_again() -> None:
    with trio.fail_after(20):
        with pytest.raises(ExceptionGroup) as raised:
            async with watched(part("raise SystemExit(2)", "odd"), part(SLEEPER)) as w:
                await trio.sleep_forever()
    (error,) = raised.value.exceptions
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, ConfigError)
    assert "'odd' cannot be started" in str(error)
    assert len(w.pids) == 2
    assert not any(map(is_alive, w.pids))


async def test_others_go_on_when_one_ends() -> None:
    async with watched(part(SLEEPER, "steady"), part("raise SystemExit(3)", "brittle")) as w:
        await w.until(4)
        assert w.supervisor.restarts.keys() == {"brittle"}
        assert "steady" in w.supervisor.running


async def test_one_that_will_not_end_is_killed_in_time() -> None:
    async with watched(part(STUBBORN)) as w:
        await w.until(1)
        await trio.sleep(0.3)  # for it to refuse the signal
        begun = trio.current_time()
    assert trio.current_time() - begun < 3.0
    assert not is_alive(w.pids[0])


async def test_parts_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys, trio
from hear.app.supervisor import Part, Supervisor
part = Part("child", (sys.executable, "-c", {ENDS_WITH_PARENT!r}))
supervisor = Supervisor(on_start=lambda part, pid: print(pid, flush=True))
trio.run(supervisor.run, [part])
"""
    parent = subprocess.Popen(  # noqa: ASYNC220 - it is quick
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    with trio.fail_after(5):
        while is_alive(child):  # noqa: ASYNC110 - another's child
            await trio.sleep(0.02)
