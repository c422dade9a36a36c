"""A cluster of processes in real time, of which a part is killed every minute.

    python -m benchmarks.kills --minutes 60

``hear up`` runs the hub, two engines, Cache-Aware and Guard-40. Agents send requests through a
pool, about two a second. Each minute one part is killed with SIGKILL, each in its turn: an engine,
a policy, the other engine, the hub. Told are the requests that failed, how long each part took to
be there again, and the memory of each kind of part at the beginning and at the end.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final

import trio

from hear.app.clock import SharedClock
from hear.app.connection import connected
from hear.blocks import chain_all
from hear.errors import BusError, EngineError
from hear.harnesses.eval.replay.live import reached
from hear.harnesses.pool.reaching import client_of
from hear.interfaces import InferenceRequest

HEAR: Final = (sys.executable, "-m", "hear.app.cli")
PARTS: Final = ("run engine engine0", "run policy cache-aware", "run engine engine1", "run bus")
CLUSTER: Final = """
bus = "{bus}"
[[engine]]
endpoint = "sim+unix://{folder}/e0"
[[engine]]
endpoint = "sim+unix://{folder}/e1"
[[policy]]
policy = "cache-aware"
[[policy]]
policy = "guard:40"
"""
BACK_WITHIN_S: Final = 20.0


def processes(url: str) -> dict[str, int]:
    """The parts of a cluster by their commands, and their process ids."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, UnicodeDecodeError):
                continue
            part = re.search(r"run (bus|engine \S+|policy \S+)", command)
            if part is not None and url in command:
                found[part[0]] = int(folder.name)
    return found


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(r"VmRSS:\s+(\d+)", status)
    return int(found[1]) / 1024 if found else 0.0


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A running ``hear up``; yields the address of its bus."""
    url = f"ipc://{folder}/bus"
    (folder / "cluster.toml").write_text(CLUSTER.format(bus=url, folder=folder))
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen([*HEAR, "up", "cluster.toml"], cwd=folder, stderr=log, stdout=log)
        try:
            deadline = time.monotonic() + 30
            ready = [folder / "e0", folder / "e1"]
            while not all(path.exists() for path in ready) and time.monotonic() < deadline:
                time.sleep(0.2)
            yield url
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(20)


class Agents:
    """Sends requests, and counts what becomes of them."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    async def run(self, url: str, folder: Path, end_s: float) -> None:
        """Send until a time, on whatever of the bus is there."""
        reaches = {
            f"engine{n}": client_of(f"engine{n}", f"sim+unix://{folder}/e{n}") for n in (0, 1)
        }
        draw, number = Random(1), 0
        while trio.current_time() < end_s:
            try:
                async with (
                    connected(url, name=f"agents-{number}") as bus,
                    reached(bus, reaches) as pool,
                    trio.open_nursery() as nursery,
                ):
                    while trio.current_time() < end_s:
                        number += 1
                        nursery.start_soon(self._ask, pool, number)
                        await trio.sleep(draw.expovariate(2.0))
            except* (BusError, OSError):
                await trio.sleep(0.5)

    async def _ask(self, pool: object, number: int) -> None:
        blocks = 4 + number % 8
        asked = InferenceRequest(
            id=f"r{number}",
            prompt_tokens=blocks * 512,
            output_tokens=20,
            prompt_hashes=chain_all(f"{number % 50}/{n}".encode() for n in range(blocks)),
            context=f"c{number % 50}",
        )
        try:
            result = await pool.generate(asked, on_routed=lambda engine: None)  # type: ignore[attr-defined]
        except EngineError as error:
            self.outcomes[f"failed: {error}"[:60]] += 1
        else:
            self.outcomes[result.outcome.status] += 1


async def kill(url: str, minutes: int, agents: Agents, folder: Path) -> list[str]:
    """Kill a part each minute; returns what did not hold."""
    problems: list[str] = []
    await trio.sleep(5)
    first = {part: memory_mb(pid) for part, pid in processes(url).items()}
    end_s = trio.current_time() + 60 * minutes
    async with trio.open_nursery() as nursery:
        nursery.start_soon(agents.run, url, folder, end_s)
        for minute in range(minutes):
            await trio.sleep(60)
            part = PARTS[minute % len(PARTS)]
            before = processes(url).get(part)
            if before is None:
                problems.append(f"minute {minute + 1}: {part} is not there")
                continue
            os.kill(before, signal.SIGKILL)
            killed_s = trio.current_time()
            with trio.move_on_after(BACK_WITHIN_S) as waiting:
                while processes(url).get(part) in (None, before):  # noqa: ASYNC110 - in /proc
                    await trio.sleep(0.05)
            if waiting.cancelled_caught:
                problems.append(f"minute {minute + 1}: {part} was not back in {BACK_WITHIN_S:g} s")
            took_s = trio.current_time() - killed_s
            print(
                f"minute {minute + 1:3}: {part} was back after {took_s:.1f} s; "
                f"{dict(agents.outcomes)}",
                flush=True,
            )
        nursery.cancel_scope.cancel()
    await trio.sleep(5)
    last = {part: memory_mb(pid) for part, pid in processes(url).items()}
    for part in sorted(first):
        now_mb = last.get(part, 0)
        print(f"{part}: {first[part]:.0f} MB at the beginning, {now_mb:.0f} MB at the end")
    failed = agents.outcomes.total() - agents.outcomes["completed"]
    if failed:
        problems.append(f"{failed} of {agents.outcomes.total()} requests failed")
    return problems


def main() -> int:
    """Run it, and say what did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=int, default=60)
    namespace = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hear-kills-") as name:
        folder = Path(name)
        folder.chmod(0o700)
        with cluster(folder) as url:
            problems = trio.run(kill, url, namespace.minutes, Agents(), folder, clock=SharedClock())
    for problem in problems:
        print(f"does not hold: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
