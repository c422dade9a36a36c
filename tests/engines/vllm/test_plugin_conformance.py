"""The plug-in inside real vLLM, under the rules that every engine is put through."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from hear.buses.memory import MemoryBus
from hear.codec import open_body
from hear.engines.testing import RULES, EngineUnderTest, check_rule
from hear.engines.vllm.launch.server_command import tier_config
from hear.engines.worker.loop import EngineWorker
from hear.interfaces import InferenceRequest, InferenceResult
from hear.messages import Key, OperationOutcome, Retain
from tests.engines.vllm.engine import BLOCK_SIZE, EngineCoreThread, fresh, start_core
from tests.engines.vllm.real import NEEDS_VLLM
from tests.engines.vllm.requests import make_request, of_tenant

pytestmark = NEEDS_VLLM

MIB = 1 << 20


SETUPS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"scheduler_cls": "hear.engines.vllm.plugin.scheduler.HearAsyncScheduler"},
    "cpu-tier": {"kv_transfer_config": tier_config(64 * MIB)},
}


@pytest.fixture(scope="module", params=SETUPS)
def core(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineCoreThread]:
    thread = start_core(tmp_path_factory.mktemp("model"), **SETUPS[request.param])
    yield thread
    thread.close()


def answer(request: InferenceRequest, result: InferenceResult) -> object:
    return tuple(result.token_ids)


@pytest.mark.parametrize("rule", sorted(RULES))
async def test_the_plug_in_keeps(rule: str, core: EngineCoreThread) -> None:
    @asynccontextmanager
    async def factory() -> AsyncIterator[EngineUnderTest]:
        with fresh(core) as (backend, client):
            backend.listen()
            yield EngineUnderTest(
                name="vllm0",
                backend=backend,
                client=client,
                make_request=partial(make_request, BLOCK_SIZE),
                long_output_tokens=600,
                output_of=answer,
                of_tenant=partial(of_tenant, BLOCK_SIZE),
                quiet_s=0.2,
                patience_s=30.0,
            )

    await check_rule(rule, factory)
    assert core.failure is None


async def test_hints_that_ride_on_a_request_are_controls(core: EngineCoreThread) -> None:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    from hear.engines.vllm.hints import Hint, to_envelope

    lease = Hint(Retain(lease_s=60.0), Key(operation="lease", context="c"))
    nobodys = Hint(Retain(lease_s=60.0), Key(operation="nobodys", context="unknown"))
    too_long = Hint(Retain(lease_s=1e9), Key(operation="too-long", context="d"))
    upstream = KvHintAction("a", "kv.retain", "1.0", {"directives": [{"priority": 9}]})
    wrong = KvHintAction("a", "kv.retain", "1.0", {"directives": [{"priority": 900}]})
    outcomes: dict[str, list[tuple[str, str]]] = {}
    with fresh(core) as (backend, client), capture_logs() as logs, trio.fail_after(60):
        backend.listen()
        async with (
            MemoryBus() as bus,
            bus.subscribe(["outcome.>"], name="tap") as tap,
            trio.open_nursery() as nursery,
        ):
            await nursery.start(EngineWorker(bus, backend, name="vllm0").run)
            await trio.testing.wait_all_tasks_blocked()  # it listens to its engine
            for id, hints in {
                "r1": to_envelope("m1", [lease, nobodys, too_long]),
                "r2": KvHintsEnvelope("9.9", "m2", []),
                "r3": KvHintsEnvelope("0.1", "m3", 3),
                "r4": KvHintsEnvelope("0.1", "m4", [upstream, wrong]),
            }.items():
                request = make_request(BLOCK_SIZE, id, context="c", num_blocks=2, output_tokens=1)
                served = await client.generate(request, kv_hints=hints)
                assert served.outcome.status == "completed"
            while sum(map(len, outcomes.values())) < 5:
                for envelope in await tap.receive():
                    told = open_body(envelope)
                    if isinstance(told, OperationOutcome):
                        heard = outcomes.setdefault(envelope.key.operation or "", [])
                        heard.append((told.status, told.reason))
            assert outcomes == {
                "lease": [("accepted", ""), ("completed", "renewed")],  # by that of r4
                "nobodys": [("rejected", "unknown_context")],
                "too-long": [("rejected", "lease_too_long")],
                "r4/m4/0.0": [("accepted", "")],
            }
            nursery.cancel_scope.cancel()
    malformed = [line["error"] for line in logs if line["event"] == "hints.malformed"]
    assert [error[:14] for error in malformed] == [
        "kv_hints 'm2':",
        "kv_hints: Expe",
        "kv_hints 'm4':",
    ]
    assert core.failure is None
