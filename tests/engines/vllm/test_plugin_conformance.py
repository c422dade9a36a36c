"""The plug-in inside real vLLM, under the rules that every engine is put through."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from hear.engines.testing import RULES, EngineUnderTest, check_rule
from hear.engines.vllm.launch import tier_config
from hear.seams import InferenceRequest, InferenceResult
from tests.engines.vllm.engine import BLOCK_SIZE, EngineCoreThread, fresh, start_core
from tests.engines.vllm.real import NEEDS_VLLM
from tests.engines.vllm.requests import make_request, of_tenant

pytestmark = NEEDS_VLLM

MIB = 1 << 20


SETUPS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"scheduler_cls": "hear.engines.vllm.scheduler.HearAsyncScheduler"},
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
                quiet_s=0.1,
                patience_s=10.0,
            )

    await check_rule(rule, factory)
    assert core.failure is None
