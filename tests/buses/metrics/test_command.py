"""``hear metrics`` as it is called."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

from hear.app.cli import main
from hear.buses.memory import MemoryBus
from hear.buses.observe.metrics import command
from hear.buses.observe.metrics.tap import serve
from hear.interfaces import Bus

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def _memory(url: str, **options: Any) -> AsyncIterator[MemoryBus]:
    async with MemoryBus() as bus:
        yield bus


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "connected", _memory)


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--listen", "nonsense"], "--listen 'nonsense': expected HOST:PORT"),
        (["--listen", "203.0.113.7:1"], "--listen 203.0.113.7:1: cannot listen there"),
        (["--listen", "127.0.0.1:0", "--otlp", "here"], "--otlp 'here': expected http://"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_code_2(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["metrics", "--bus", "memory://", *arguments]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"hear: {says}")


@pytest.mark.usefixtures("joined")
def test_it_serves_until_a_signal_comes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The timer that ends a process which is late must not end this one.
    monkeypatch.setattr("hear.app.connection.END_WITHIN_S", 3_600.0)
    monkeypatch.setattr("hear.buses.observe.metrics.tap.serve", _scraped_once)
    assert main(["metrics", "--bus", "memory://x", "--listen", "127.0.0.1:0"]) == 130
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("metrics of memory://x at http://127.0.0.1:")
    assert b"hear_metrics_lagged_total 0.0" in PAGES[0]
    assert b"_created" not in PAGES[0]
    assert time.monotonic() - ENDED_S[0] < 1.5


PAGES: list[bytes] = []
ENDED_S: list[float] = []


async def _scraped_once(bus: Bus, *, task_status: trio.TaskStatus[str], **options: Any) -> None:
    """Serve, and let Ctrl-C come once the page was read."""
    async with trio.open_nursery() as nursery:
        url = await nursery.start(partial(serve, bus, **options))

        def scrape() -> bytes:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return bytes(answer.read())

        PAGES.append(await trio.to_thread.run_sync(scrape))
        task_status.started(url)
        await trio.lowlevel.checkpoint()
        ENDED_S.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)


def test_a_bus_that_is_none_is_one_line_and_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--bus", "nowhere"]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert "bus 'nowhere'" in line


def test_without_the_extra_one_line_says_what_to_install() -> None:
    for missing in ("prometheus_client", "opentelemetry"):
        code = (
            "import sys\n"
            f"sys.modules[{missing!r}] = None\n"
            "from hear.app.cli import main\n"
            "sys.exit(main(['metrics']))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert missing in line
        assert "pip install 'hear-protocol[metrics]'" in line
