"""The data path of a simulated engine between processes."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from hear.engines.simulated.backend import create
from hear.engines.simulated.serving import SimulatedClient, connect, serve
from hear.errors import ConfigError, EngineError
from hear.interfaces import InferenceRequest, Report


def request(id: str, prompt_tokens: int = 1024, output_tokens: int = 8) -> InferenceRequest:
    return InferenceRequest(
        id=id,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_hashes=list(range(1, prompt_tokens // 512 + 1)),
        context="c",
        context_version=3,
    )


@asynccontextmanager
async def served(endpoint: str) -> AsyncIterator[tuple[SimulatedClient, list[Report], str]]:
    reports: list[Report] = []
    engine = create("h100-qwen3-8b", block_size=512, name="engine0")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run, reports.append)
        told: str = await nursery.start(serve, engine, endpoint)
        async with connect(told) as client:
            yield client, reports, told
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("scheme", ["sim+unix", "sim+tcp"])
async def test_requests_come_back_as_they_would_in_one_process(scheme: str, tmp_path: Path) -> None:
    endpoint = f"sim+unix://{tmp_path}/e" if scheme == "sim+unix" else "sim+tcp://127.0.0.1:0"
    with trio.fail_after(20):
        async with served(endpoint) as (client, reports, told):
            assert not told.endswith(":0")
            results = {}

            async def call(id: str) -> None:
                results[id] = await client.generate(request(id))

            async with trio.open_nursery() as nursery:
                for number in range(5):
                    nursery.start_soon(call, f"r{number}")
            assert {r.outcome.status for r in results.values()} == {"completed"}
            assert results["r0"].outcome.output_tokens == 8
            assert any(key.context_version == 3 for report in reports for key in report.arrived)


async def test_a_request_comes_as_one_of_its_tenant(tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with served(f"sim+unix://{tmp_path}/e") as (client, reports, _):
            await client.generate(replace(request("r"), tenant="acme"))
            assert {report.tenant for report in reports} == {"acme"}


async def test_a_request_that_can_never_fit_is_refused_and_one_named_twice_is_an_error(
    tmp_path: Path,
) -> None:
    with trio.fail_after(20):
        async with served(f"sim+unix://{tmp_path}/e") as (client, _, told):
            refused = await client.generate(request("huge", 10_000_000))
            assert refused.outcome.status == "rejected"
            assert refused.outcome.reason.startswith("too_long")
            async with connect(told) as second, trio.open_nursery() as nursery:
                nursery.start_soon(client.generate, request("r", 20_000, 200))
                await trio.sleep(0.05)
                with pytest.raises(EngineError, match="being served already"):
                    await second.generate(request("r"))
                nursery.cancel_scope.cancel()


async def test_a_client_that_hangs_up_takes_its_requests_with_it(tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with served(f"sim+unix://{tmp_path}/e") as (client, reports, told):
            async with connect(told) as second, trio.open_nursery() as nursery:
                nursery.start_soon(second.generate, request("gone", 20_000, 100_000 // 8))
                while not any(  # noqa: ASYNC110 - an engine has no event for it
                    key.request == "gone" for r in reports for key in r.arrived
                ):
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
            while not any(  # noqa: ASYNC110 - an engine has no event for it
                key.request == "gone" and outcome.reason == "client_gone"
                for report in reports
                for key, outcome in report.requests
            ):
                await trio.sleep(0.01)
            assert (await client.generate(request("after"))).outcome.status == "completed"


async def test_an_engine_that_goes_is_an_error_for_those_who_wait(tmp_path: Path) -> None:
    engine = create("h100-qwen3-8b", block_size=512, name="engine0")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            told: str = await nursery.start(serve, engine, f"sim+unix://{tmp_path}/e")
            async with connect(told) as client:

                async def wait() -> None:
                    with pytest.raises(EngineError, match="hung up"):
                        await client.generate(request("r"))

                async with trio.open_nursery() as waiters:
                    waiters.start_soon(wait)
                    await trio.sleep(0.05)
                    nursery.cancel_scope.cancel()
                    with trio.CancelScope(shield=True):
                        await trio.lowlevel.checkpoint()
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    "endpoint", ["http://x", "sim+unix://", "sim+tcp://x", "sim+tcp://:1", "sim+tcp://h:99999", ""]
)
async def test_what_is_no_address_is_one_error(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        async with connect(endpoint):
            pass


async def test_nobody_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nobody listens"):
        async with connect(f"sim+unix://{tmp_path}/none"):
            pass


async def test_an_address_in_use_is_one_error_and_a_socket_left_by_the_dead_is_none(
    tmp_path: Path,
) -> None:
    engine = create("h100-qwen3-8b", block_size=512, name="engine0")
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "e"))
    left.close()
    async with trio.open_nursery() as nursery:
        told: str = await nursery.start(serve, engine, f"sim+unix://{tmp_path}/e")
        with pytest.raises(ConfigError, match="cannot be listened on"):
            await serve(engine, told)
        nursery.cancel_scope.cancel()


async def test_garbage_ends_its_own_connection_alone(tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with served(f"sim+unix://{tmp_path}/e") as (client, _, _told):
            for junk in (b"\xff" * 64, b"\0\0\0\2ab", b"GET / HTTP/1.1\r\n\r\n"):
                stream = await trio.open_unix_socket(str(tmp_path / "e"))
                await stream.send_all(junk)
                assert await stream.receive_some() == b""
                await stream.aclose()
            assert (await client.generate(request("after"))).outcome.status == "completed"
