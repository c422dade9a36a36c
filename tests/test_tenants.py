"""Two tenants with keys of their own share one engine over the bus between processes."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from hear.blocks import unpack
from hear.buses.nng.client import NngBus, connect
from hear.buses.nng.server import hub
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engines.simulated.backend import SimulatedEngine
from hear.engines.worker.loop import EngineWorker
from hear.interfaces import InferenceRequest
from hear.messages import (
    Cancel,
    Control,
    Envelope,
    Key,
    OperationOutcome,
    Prepare,
    QueueChanged,
    QueueSnapshot,
    RequestOutcome,
    ResidencyChanged,
    ResidencySnapshot,
    Retain,
)
from tests.buses.test_nng import write_keys
from tests.engines.builders import BLOCK, hashes_of, profile


@dataclass
class Tenant:
    """A tenant on the bus, and everything that it has heard there."""

    name: str
    bus: NngBus
    sequencer: Sequencer
    heard: list[Envelope] = field(default_factory=list)

    async def listen(self, task_status: trio.TaskStatus[None]) -> None:
        async with self.bus.subscribe([">"], name="all") as messages:
            task_status.started()
            while True:
                self.heard += await messages.receive()

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():  # noqa: ASYNC110 - bounded by whoever waits
            await trio.sleep(0.01)

    def send(self, control: Control, *, tenant: str = "", id: str = "", **key: str) -> str:
        sequencer = Sequencer(f"{self.name}-x", tenant=tenant) if tenant else self.sequencer
        operation = id or sequencer.next_id()
        full = Key(engine="engine0", operation=operation, **key)  # type: ignore[arg-type]
        self.bus.publish(sequencer.wrap(control, full, trio.current_time()))
        return operation

    def answers(self, operation: str) -> list[tuple[str, str]]:
        bodies = [open_body(e) for e in self.heard if e.key.operation == operation]
        return [(b.status, b.reason) for b in bodies if isinstance(b, OperationOutcome)]

    def has_completed(self, request: str) -> bool:
        bodies = [open_body(e) for e in self.heard if e.key.request == request]
        return any(isinstance(b, RequestOutcome) and b.status == "completed" for b in bodies)


def requests_in(heard: Sequence[Envelope]) -> set[str]:
    """All requests that messages name, in their keys and bodies."""
    found = {e.key.request for e in heard if e.key.request is not None}
    for envelope in heard:
        match open_body(envelope):
            case QueueChanged() as change:
                found |= {w.request for w in change.waiting} | {*change.started, *change.ended}
            case QueueSnapshot() as queue:
                found |= {w.request for w in queue.waiting} | {r.request for r in queue.running}
    return found


def hashes_in(heard: Sequence[Envelope]) -> set[int]:
    """All block hashes that an engine has told of."""
    found: set[int] = set()
    for envelope in heard:
        match open_body(envelope):
            case ResidencyChanged(changes=changes):
                for change in changes:
                    found |= set(unpack(getattr(change, "prefix_hashes", b"")))
            case ResidencySnapshot(chains=chains):
                for chain in chains:
                    found |= set(unpack(chain.prefix_hashes))
    return found


def request(id: str, tenant: str, context: str, num_blocks: int = 3) -> InferenceRequest:
    return InferenceRequest(
        id=id,
        prompt_tokens=num_blocks * BLOCK + 1,
        output_tokens=2,
        prompt_hashes=hashes_of(context, num_blocks),
        context=context,
        tenant=tenant,
    )


@asynccontextmanager
async def shared(folder: Path) -> AsyncIterator[tuple[SimulatedEngine, Tenant, Tenant]]:
    """One engine on a bus with the keyring of docs/security.md, and two tenants."""
    keys, url = write_keys(folder), f"ipc://{folder}/bus"
    engine = SimulatedEngine(profile(gpu=32, cpu=32), block_size=BLOCK, name="engine0")
    with trio.fail_after(30):
        async with (
            hub(url, keys=keys["keyring"]),
            connect(url, name="engine0", key=keys["workers"]) as bus,
            connect(url, name="acme", key=keys["acme"]) as acme,
            connect(url, name="umbra", key=keys["umbra"]) as umbra,
            trio.open_nursery() as nursery,
        ):
            first = Tenant("acme", acme, Sequencer("acme", tenant="acme"))
            second = Tenant("umbra", umbra, Sequencer("umbra", tenant="umbra"))
            await nursery.start(first.listen)
            await nursery.start(second.listen)
            worker = EngineWorker(bus, engine, name="engine0", tenants=("acme",))
            await nursery.start(worker.run)
            yield engine, first, second
            nursery.cancel_scope.cancel()


async def test_each_tenant_hears_its_own_requests_and_hashes_alone(tmp_path: Path) -> None:
    async with shared(tmp_path) as (engine, acme, umbra):
        await acme.until(lambda: {"capabilities_reported"} <= {e.kind for e in acme.heard})
        assert umbra.heard == []  # nobody said that there would be one, and it did nothing yet
        for tenant in ("acme", "umbra"):
            await engine.generate(request("same", tenant, context="shared"))
            await engine.generate(request(f"of {tenant}", tenant, context=tenant))
        for own in (acme, umbra):
            await own.until(lambda own=own: own.has_completed(f"of {own.name}"))  # type: ignore[misc]
            assert {e.tenant for e in own.heard} == {own.name}
            assert requests_in(own.heard) == {"same", f"of {own.name}"}
            prompts = {*hashes_of("shared", 3), *hashes_of(own.name, 3)}
            assert hashes_in(own.heard) == prompts
            kinds = {e.kind for e in own.heard}
            assert {"capabilities_reported", "costs_reported", "pressure_reported"} <= kinds
        # The second to come with the same prompt found nothing of the first one's.
        [outcome] = [
            body
            for e in umbra.heard
            if isinstance(body := open_body(e), RequestOutcome)
            and (e.key.request, body.status) == ("same", "completed")
        ]
        assert not any(outcome.reused_tokens.values())


async def test_a_tenant_cannot_touch_what_is_anothers(tmp_path: Path) -> None:
    async with shared(tmp_path) as (engine, acme, umbra):
        await engine.generate(request("r", "acme", context="c"))
        lease = acme.send(Retain(lease_s=600), id="lease", context="c")
        await acme.until(lambda: acme.answers(lease) == [("accepted", "")])
        blocks = list(engine.residency("acme"))
        asked = {
            umbra.send(Cancel(target="lease")): "unknown_operation",
            umbra.send(Retain(lease_s=1), context="c"): "unknown_context",
            umbra.send(Prepare(prefix_hashes=blocks[0].prefix_hashes), context="c"): "not_resident",
        }
        for operation, reason in asked.items():
            await umbra.until(lambda operation=operation: umbra.answers(operation))  # type: ignore[misc]
            assert umbra.answers(operation) == [("rejected", reason)]
        # What is said as another does not get past the hub.
        umbra.send(Cancel(target="lease"), tenant="acme", id="forged")
        await umbra.until(lambda: umbra.bus.denied == 1)
        again = acme.send(Retain(lease_s=0), context="nothing")
        await acme.until(lambda: acme.answers(again))
        assert acme.answers("forged") == []
        assert acme.answers(lease) == [("accepted", "")]
        assert list(engine.residency("acme")) == blocks
        assert not any(e.key.operation in asked for e in acme.heard)
