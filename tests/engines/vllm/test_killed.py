"""Real vLLM whose engine is killed: what was open fails, and the next epoch begins empty."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from hear.app.clock import SharedClock, new_epoch
from hear.app.connection import connected
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engine_view import EngineViews
from hear.harnesses.eval.bench import servers
from hear.harnesses.openai.client import connect
from hear.interfaces import Bus, InferenceRequest
from hear.messages import BoundWait, Control, Envelope, Key, OperationOutcome, Retain

from .real import NEEDS_VLLM

pytestmark = NEEDS_VLLM

OPTIONS = (
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "2048", "--block-size", "32"),
    *("--num-gpu-blocks-override", "100"),
)
PROMPT = tuple(range(20, 420))


class Reader:
    """One subscriber: what it believes, and what it has heard of operations."""

    def __init__(self) -> None:
        self.views = EngineViews()
        self.ends: dict[str, OperationOutcome] = {}
        self._engine_events = trio.Event()

    async def run(self, bus: Bus, task_status: trio.TaskStatus[None]) -> None:
        async with bus.subscribe(["state.>", "outcome.>"], name="reader") as subscription:
            task_status.started()
            while True:
                for envelope in await subscription.receive():
                    if self._take_in(envelope):
                        subscription.request_snapshot(envelope)
                self._engine_events.set()
                self._engine_events = trio.Event()

    def _take_in(self, envelope: Envelope) -> bool:
        message = open_body(envelope)
        if isinstance(message, OperationOutcome):
            self.ends[envelope.key.operation or ""] = message
        elif envelope.category == "state" and message is not None:
            return self.views.apply(envelope, message)
        return False

    async def until(self, condition: object) -> None:
        assert callable(condition)
        with trio.fail_after(120):
            while not condition():
                await self._engine_events.wait()


def engine_core_of(server: int) -> int:
    """The process of the engine core among the children of a server."""
    for line in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        pid = int(line)
        if "EngineCor" in Path(f"/proc/{pid}/comm").read_text():
            return pid
        try:
            return engine_core_of(pid)
        except LookupError:
            continue
    raise LookupError(f"{server} has no engine core")


@asynccontextmanager
async def served(model: str, url: str, folder: Path) -> AsyncIterator[tuple[servers.Server, str]]:
    port = servers.free_port()
    command = servers.vllm("vllm0", model, OPTIONS, bus=url, ranks="", port=port)
    async with servers.running(command, folder) as server:

        async def reached() -> None:
            async with connect(f"http://127.0.0.1:{port}"):
                pass

        await server.until(reached, "starting")
        yield server, f"http://127.0.0.1:{port}"


async def check(folder: Path) -> None:
    model, url = str(folder / "model"), f"ipc://{folder}/bus"
    servers.carry_out(servers.hear("vllm", "make-model", model, "--layers", "2"))
    reader, sender = Reader(), Sequencer("tester", new_epoch())

    def send(
        bus: Bus, control: Control, *, context: str | None = None, request: str | None = None
    ) -> str:
        operation = sender.next_id()
        full = Key(engine="vllm0", operation=operation, context=context, request=request)
        bus.publish(sender.wrap(control, full, trio.current_time()))
        return operation

    def is_open(*operations: str) -> bool:
        return all(
            operation in reader.ends and reader.ends[operation].status == "accepted"
            for operation in operations
        )

    async with servers.running(servers.hub(url), folder):
        await trio.sleep(1)
        async with connected(url, name="tester") as bus, trio.open_nursery() as nursery:
            await nursery.start(reader.run, bus)
            async with served(model, url, folder) as (server, endpoint):
                async with connect(endpoint) as client:
                    request = InferenceRequest(
                        id="r",
                        prompt_tokens=len(PROMPT),
                        output_tokens=4,
                        prompt_hashes=(),
                        context="c",
                        prompt=PROMPT,
                    )
                    await client.generate(request)
                await reader.until(lambda: "vllm0" in reader.views)
                view = reader.views["vllm0"]
                before = view.epoch
                lease = send(bus, Retain(lease_s=600.0), context="c")
                guard = send(bus, BoundWait(max_wait_s=1.0), request="one that never comes")
                await reader.until(lambda: is_open(lease, guard))
                await reader.until(lambda: view.residency_known and view.residency.num_blocks() > 0)
                os.kill(engine_core_of(server.process.pid), signal.SIGKILL)
                with trio.fail_after(60):
                    await server.process.wait()
            async with served(model, url, folder):
                await reader.until(lambda: view.epoch > before)
                await reader.until(lambda: not is_open(lease) and not is_open(guard))
                for operation in (lease, guard):
                    end = reader.ends[operation]
                    assert (end.status, end.reason) == ("failed", "engine_restarted")
                await reader.until(lambda: view.residency_known)
                assert view.residency.num_blocks() == 0
                assert view.queue_known
                assert not view.running
            nursery.cancel_scope.cancel()


def test_an_engine_that_is_killed_begins_anew_and_everybody_knows(tmp_path: Path) -> None:
    trio.run(check, tmp_path, clock=SharedClock())
