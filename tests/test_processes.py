"""A cluster of real processes, as ``hear up`` and ``hear run`` start it."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import trio

from hear.app.clock import SharedClock, new_epoch
from hear.app.cluster import Cluster
from hear.buses.nng.client import NngBus, connect
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engines.simulated import serving
from hear.harnesses.eval.replay.live import reached
from hear.harnesses.pool.reaching import client_of
from hear.interfaces import InferenceRequest, InferenceResult
from hear.messages import (
    CapabilitiesReported,
    Envelope,
    Key,
    Message,
    OperationOutcome,
    RequestDescribed,
    Withdraw,
)

HEAR = (sys.executable, "-m", "hear.app.cli")

CLUSTER = """
bus = "{bus}"
state = "state"
[[engine]]
endpoint = "sim+unix://{folder}/e0"
[[engine]]
endpoint = "sim+unix://{folder}/e1"
[[policy]]
policy = "cache-aware"
"""

POLICY = """
from hear import Ask, Key
from hear.messages import Retain, RequestDescribed

class Keeper:
    name = "keeper"
    observes = ("intent.>",)

    def decide(self, h, s):
        for key, message in h.changes:
            if isinstance(message, RequestDescribed):
                yield Ask(Retain(lease_s=1000, reason="kept"), Key(context="c", engine="engine0"))
"""


@dataclass
class Running:
    """A cluster, and a place on its bus."""

    url: str
    folder: Path
    up: trio.Process
    bus: NngBus

    async def until(self, what: str, holds: Callable[[list[Envelope]], object]) -> list[Envelope]:
        """Wait until something holds of all that the hub remembers."""
        with trio.move_on_after(30):
            while not holds(  # noqa: ASYNC110 - what the hub remembers has no event
                heard := list(await self.bus.history([">"]))
            ):
                await trio.sleep(0.1)
            return heard
        raise AssertionError(f"waited in vain for {what}")

    def describe(self, request: str) -> None:
        harness = Sequencer("harness", new_epoch())
        key = Key(request=request, context="c", engine="engine0", workflow="w")
        self.bus.publish(harness.wrap(RequestDescribed(), key, trio.current_time()))


def said(heard: list[Envelope], kind: str, **key: str) -> list[tuple[Envelope, Message | None]]:
    return [
        (e, open_body(e))
        for e in heard
        if e.kind == kind and all(getattr(e.key, name) == value for name, value in key.items())
    ]


def ends(heard: list[Envelope], control: str) -> list[str]:
    """How the operations of a kind of control have ended, in order."""
    return [
        f"{m.status}: {m.reason}"
        for _, m in said(heard, "operation_outcome")
        if isinstance(m, OperationOutcome) and m.control == control and m.status != "accepted"
    ]


def anew_at_both(count: int, heard: list[Envelope]) -> bool:
    """Whether the policy has begun anew ``count`` times, at both engines."""
    begun = [m for e, m in said(heard, "withdraw") if isinstance(m, Withdraw)]
    return sum(m.reason == "keeper begins anew" for m in begun) == 2 * count


def has_leases(count: int, heard: list[Envelope]) -> bool:
    return len(said(heard, "retain")) == count


def has_ended_leases(count: int, heard: list[Envelope]) -> bool:
    return len(ends(heard, "retain")) == count


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Running]:
    url = f"ipc://{folder}/bus"
    config = folder / "cluster.toml"
    config.write_text(CLUSTER.format(bus=url, folder=folder), encoding="utf-8")
    (folder / "mine.py").write_text(POLICY, encoding="utf-8")
    up = await trio.lowlevel.open_process([*HEAR, "up", str(config)], cwd=folder)
    try:
        with trio.fail_after(30):
            while not (folder / "bus").exists():  # noqa: ASYNC110 - another's file
                await trio.sleep(0.05)
        async with connect(url, name="test") as bus:
            running = Running(url, folder, up, bus)
            await running.until(
                "both engines",
                lambda heard: (
                    {e.source for e in heard if e.kind == "capabilities_reported"}
                    >= {"engine0", "engine1"}
                ),
            )
            yield running
    finally:
        up.terminate()
        with trio.fail_after(10):
            assert await up.wait() == 128 + signal.SIGTERM


def run_on_shared_clock(test: Callable[[Path], object]) -> Callable[[Path], None]:
    """Processes compare times, so that a test among them needs their clock."""

    def wrapped(tmp_path: Path) -> None:
        trio.run(test, tmp_path, clock=SharedClock())  # type: ignore[arg-type]

    wrapped.__name__ = test.__name__
    return wrapped


def alive(pattern: str) -> list[int]:
    done = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


@run_on_shared_clock
async def test_engines_tell_where_they_take_requests_and_serve_them_and_say_so(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as c:
        heard = list(await c.bus.history(["state.*.engine1.capabilities.>"]))
        message = open_body(heard[-1])
        assert isinstance(message, CapabilitiesReported)
        assert message.endpoint == f"sim+unix://{tmp_path}/e1"
        async with serving.connect(message.endpoint) as client:
            result = await client.generate(InferenceRequest("r", 600, 4, [1], context="c"))
        assert result.outcome.status == "completed"
        heard = await c.until(
            "the outcome", lambda heard: len(said(heard, "request_outcome", request="r")) == 2
        )
        statuses = [m.status for _, m in said(heard, "request_outcome")]  # type: ignore[union-attr]
        assert statuses == ["accepted", "completed"]
    assert alive(f"--bus={c.url}") == []


@run_on_shared_clock
async def test_a_policy_joins_and_its_controls_end_as_it_leaves_or_is_killed(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as c:
        async with serving.connect(f"sim+unix://{tmp_path}/e0") as client:
            await client.generate(InferenceRequest("r", 600, 4, [1], context="c"))
        command = [*HEAR, "run", "policy", "mine:Keeper", "--bus", c.url]
        for count, how in ((1, signal.SIGTERM), (2, signal.SIGKILL)):
            policy = await trio.lowlevel.open_process(command, cwd=tmp_path, stderr=None)
            await c.until("keeper", partial(anew_at_both, count))
            c.describe(f"r{count}")
            await c.until("the lease", partial(has_leases, count))
            policy.send_signal(how)
            assert await policy.wait() in (128 + how, -how)
            heard = await c.until("its end", partial(has_ended_leases, count))
            assert ends(heard, "retain")[-1] == "failed: withdrawn"


@run_on_shared_clock
async def test_parts_that_are_killed_come_back_and_the_others_find_them(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        before = {e.epoch for e in await c.bus.history([">"]) if e.source == "engine0"}
        for part in ("run bus", "run engine engine0"):
            (pid,) = alive(f"{part} .*--bus={c.url}")
            os.kill(pid, signal.SIGKILL)
        heard = await c.until(
            "a new engine0",
            lambda heard: {e.epoch for e in heard if e.source == "engine0"} - before,
        )
        assert max(e.epoch for e in heard if e.source == "engine0") > max(before, default=0)
        async with serving.connect(f"sim+unix://{tmp_path}/e0") as client:
            await client.generate(InferenceRequest("after", 600, 4, [1], context="c"))
        await c.until("its outcome", lambda heard: said(heard, "request_outcome", request="after"))


@run_on_shared_clock
async def test_an_engine_that_is_killed_costs_no_request_of_its_pool(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        reaches = {
            f"engine{number}": client_of(f"engine{number}", f"sim+unix://{tmp_path}/e{number}")
            for number in (0, 1)
        }
        results: list[InferenceResult] = []

        async def ask(pool: Cluster, number: int) -> None:
            asked = InferenceRequest(f"r{number}", 8_000, 40, [])
            results.append(await pool.generate(asked, on_routed=lambda engine: None))

        with trio.fail_after(60):
            async with reached(c.bus, reaches) as pool, trio.open_nursery() as nursery:
                for number in range(40):
                    nursery.start_soon(ask, pool, number)
                    await trio.sleep(0.02)
                    if number == 20:
                        (pid,) = alive(f"run engine engine0 .*--bus={c.url}")
                        os.kill(pid, signal.SIGKILL)
        assert [result.outcome.status for result in results] == ["completed"] * 40


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["up", "none.toml"], "none.toml: cannot be read"),
        (["run", "policy", "cache-awre"], "did you mean 'cache-aware'"),
        (["run", "policy", "cache-aware+guard:40"], "expected one for each process"),
        (["run", "engine", "e", "--bus", "smoke://x"], "expected an address"),
        (["run", "engine", "e", "--ranks", "x"], "expected POLICY=NUMBER"),
        (["run", "engine", "../e"], "name '../e': expected"),
        (["run", "engine", "e", "--endpoint", "foo"], "endpoint 'foo': expected"),
        (["run", "policy", "cache-aware", "--name", "a b"], "name 'a b': expected"),
        (["run", "engine", "e", "--kind", "vlm"], "no engine named 'vlm'"),
        (["run", "engine", "e", "--block-size", "0"], "--block-size 0"),
        (["run", "engine", "e", "--operation-log", "{tmp}"], "operation log {tmp}: cannot be used"),
        (
            ["run", "bus", "--without-keys", "--bus", "tcp://nowhere.invalid:1"],
            "cannot be listened on",
        ),
        (["run", "bus", "--bus", "tcp://127.0.0.1:x"], "tcp://127.0.0.1:x"),
        (["run", "bus", "--keys", "{tmp}/none"], "cannot be read"),
        (["run", "dance"], "invalid choice: 'dance'"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_code_2(
    arguments: list[str], why: str, tmp_path: Path
) -> None:
    words = [word.format(tmp=tmp_path) for word in arguments]
    done = subprocess.run(
        [*HEAR, *words], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("hear: ")]
    assert done.returncode == 2
    assert len(lines) == 1
    assert why.format(tmp=tmp_path) in lines[0]
    assert "Traceback" not in done.stderr


def test_nobody_on_the_bus_is_one_line_and_may_be_tried_again(tmp_path: Path) -> None:
    command = [*HEAR, "run", "policy", "cache-aware", "--bus", f"ipc://{tmp_path}/nobody"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 75
    assert "nobody answers" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_in_use_is_one_line(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/bus"
    first = subprocess.Popen([*HEAR, "run", "bus", "--bus", url], stderr=subprocess.PIPE)
    try:
        assert first.stderr is not None
        assert b"hub.listening" in first.stderr.readline()
        done = subprocess.run(
            [*HEAR, "run", "bus", "--bus", url], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr == f"hear: bus {url!r}: the address is in use\n"
        (tmp_path / "c.toml").write_text(f'bus = "{url}"', encoding="utf-8")
        done = subprocess.run(
            [*HEAR, "up", str(tmp_path / "c.toml")],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 2
        assert f"hear: bus {url!r}: the address is in use\n" in done.stderr
        assert "hear: part 'bus' cannot be started, for the reason above\n" in done.stderr
    finally:
        first.terminate()
        first.wait()
        assert first.stderr is not None
        first.stderr.close()
