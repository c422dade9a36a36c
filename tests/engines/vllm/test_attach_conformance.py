"""An attached server keeps the rules that every engine has to keep: a stand-in, and a real vLLM."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import structlog
import trio

from hear.engines.testing import RULES, EngineUnderTest, check_rule
from tests.engines.vllm.attached_setup import under_test
from tests.engines.vllm.fake_server import BLOCK, fake_vllm
from tests.engines.vllm.real import NEEDS_VLLM
from tests.engines.vllm.real_server import BLOCK as REAL_BLOCK
from tests.engines.vllm.real_server import RunningServer, running_server

WITHIN_S = 120.0
_BY_CRASH = {id for id, rule in RULES.items() if rule.crashes}


@asynccontextmanager
async def stand_in() -> AsyncIterator[EngineUnderTest]:
    async with (
        fake_vllm() as server,
        under_test(
            server.url,
            server.kv.events,
            server.kv.replay,
            block_size=BLOCK,
            long_output_tokens=300,
            crash=server.crash,
            patience_s=20.0,
        ) as engine,
    ):
        yield engine


@pytest.mark.parametrize("id", RULES)
async def test_an_attached_stand_in_keeps_the_rule(id: str) -> None:
    with structlog.testing.capture_logs(), trio.fail_after(WITHIN_S):
        result = await check_rule(id, stand_in)
    assert result == ("unsupported" if RULES[id].needs else "kept")


class TestOnARealServer:
    """One for all rules."""

    pytestmark = NEEDS_VLLM

    @pytest.fixture(scope="class")
    def server(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
        with running_server(tmp_path_factory.mktemp("vllm")) as running:
            yield running

    @pytest.mark.parametrize("id", RULES)
    async def test_an_attached_vllm_keeps_the_rule(self, id: str, server: RunningServer) -> None:
        @asynccontextmanager
        async def real() -> AsyncIterator[EngineUnderTest]:
            server.reset()
            async with under_test(
                server.url,
                server.kv_events,
                server.kv_replay,
                block_size=REAL_BLOCK,
                long_output_tokens=700,
            ) as engine:
                yield engine

        with structlog.testing.capture_logs(), trio.fail_after(WITHIN_S):
            result = await check_rule(id, real)
        if RULES[id].needs:
            assert result == "unsupported"
        else:
            assert result == ("cannot be checked" if id in _BY_CRASH else "kept")
