"""One arm in virtual time: the loop of a bench on a simulated engine in this process."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
import trio

from hear.app.cluster import running
from hear.blocks import hash_tokens
from hear.buses.memory import MemoryBus
from hear.errors import EngineError
from hear.harnesses.eval.bench import arm
from hear.harnesses.eval.bench.arm import ArmResult, serve
from hear.harnesses.eval.bench.places import STOCK, Place
from hear.harnesses.eval.bench.script import Script, Shape, generate
from hear.interfaces import InferenceRequest, InferenceResult
from hear.messages import RequestOutcome

PROFILE = "rtx-pro-6000-qwen3-8b"
SCRIPT = generate(3, Shape(sessions=8, turns=3, context_tokens=(9000, 30_000), rate=0.5))

CROWDED = generate(
    3, Shape(sessions=24, turns=3, context_tokens=(30_000, 45_000), question_tokens=200)
)
"""More contexts than the cache holds."""


class Answering:
    """An engine's client that answers with tokens that depend on the prompt alone."""

    def __init__(self, engine: Callable[..., object]) -> None:
        self._generate = engine
        self.requests: list[InferenceRequest] = []

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        self.requests.append(request)
        result: InferenceResult = await self._generate(request)  # type: ignore[misc]
        return replace(result, token_ids=tuple(request.prompt)[-3:])  # type: ignore[arg-type]


@asynccontextmanager
async def place(salt: str = "") -> AsyncIterator[tuple[Place, Answering]]:
    async with running(
        engine="simulated", profile=PROFILE, block_size=512, policy="fcfs"
    ) as cluster:
        client = Answering(cluster.engine.generate)
        hashed = partial(hash_tokens, block_size=512, tenant_salt=salt)
        made = Place(cluster.bus, "engine0", client, 512, hashed, "small", salt)
        yield made, client


async def served(
    policy: str, salt: str = "", script: Script = SCRIPT
) -> tuple[ArmResult, Answering]:
    async with place(salt) as (where, client):
        return await serve(where, script, policy), client


async def test_an_arm_serves_every_turn_and_keeps_every_promise(
    autojump_clock: trio.abc.Clock,
) -> None:
    result, _ = await served("cache-aware+guard:4+session-aware")
    row = result.run.row
    assert result.run.problems == ()
    assert result.unserved == ""
    assert (row.workload, row.engine, row.seed) == ("scbench-small", "small", 3)
    assert (row.turns, row.rejected, row.operations_open) == (24, 0, 0)
    assert row.operations["completed"] > 0
    assert set(result.run.cost.controls) == {"cache-aware", "guard:4", "session-aware"}
    assert all(result.run.cost.controls.values())


async def test_policies_gain_what_they_gain_in_a_replay(autojump_clock: trio.abc.Clock) -> None:
    base, _ = await served("fcfs", script=CROWDED)
    ours, _ = await served("cache-aware", script=CROWDED)
    assert ours.run.row.ttft_p50_s < 0.7 * base.run.row.ttft_p50_s
    assert base.run.row.operations == {}


async def test_requests_carry_their_tokens_and_are_named_by_the_same_hashes(
    autojump_clock: trio.abc.Clock,
) -> None:
    result, client = await served("fcfs")
    sent = [request for request in client.requests if not request.id.startswith("warm-up")]
    assert len(sent) == 24
    for request in sent:
        assert len(request.prompt) == request.prompt_tokens
        assert list(request.prompt_hashes) == hash_tokens(request.prompt, 512)  # type: ignore[arg-type]
    assert set(result.answers) == {request.id for request in sent}
    assert all(len(answer.token_ids) == 3 for answer in result.answers.values())


async def test_a_salt_goes_with_every_request(autojump_clock: trio.abc.Clock) -> None:
    result, client = await served("cache-aware", salt="round-2")
    assert {request.cache_salt for request in client.requests} == {"round-2"}
    assert result.run.row.reuse_pct > 0


async def test_waiting_and_reuse_are_as_the_engine_told_them(
    autojump_clock: trio.abc.Clock,
) -> None:
    result, _ = await served("cache-aware")
    waited = [turn for turn in result.run.turns if turn.started_s > turn.sent_s]
    assert waited
    assert {tier for turn in result.run.turns for tier in turn.reused_tokens} <= {"gpu", "cpu"}
    for turn in result.run.turns:
        assert turn.sent_s <= turn.started_s <= turn.first_token_s <= turn.finished_s


class Failing(Answering):
    """Fails each second turn."""

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        result = await super().generate(request)
        if request.id.endswith("/2"):
            lost = RequestOutcome(status="failed", reason="broken_stream: it ended")
            result = replace(result, outcome=lost)
        return result


async def test_what_was_not_served_is_told_with_the_reason(autojump_clock: trio.abc.Clock) -> None:
    async with place() as (where, client):
        result = await serve(replace(where, client=Failing(client.generate)), SCRIPT, "fcfs")
    assert result.unserved == "8 requests were not served, the first by broken_stream: it ended"


class Miscounting(Answering):
    """Tells of other reuse than the engine's."""

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        result = await super().generate(request)
        outcome = RequestOutcome(status="completed", output_tokens=1, reused_tokens={"cached": 7})
        return replace(result, outcome=outcome)


async def test_reuse_that_client_and_engine_tell_differently_is_a_problem(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with place() as (where, client):
        result = await serve(replace(where, client=Miscounting(client.generate)), SCRIPT, "fcfs")
    assert "reused other tokens than their outcomes tell" in str(result.run.problems)


async def test_the_stock_arm_needs_no_engine_on_the_bus(autojump_clock: trio.abc.Clock) -> None:
    async with place() as (where, client):
        result = await serve(replace(where, bus=MemoryBus(), client=client), SCRIPT, STOCK)
    assert result.run.row.policy == STOCK
    assert result.run.row.turns == 24
    assert result.run.problems == ()


async def test_requests_that_nobody_tells_of_on_the_bus_are_a_problem(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with place() as (where, client):
        result = await serve(replace(where, bus=MemoryBus(), client=client), SCRIPT, "fcfs")
    assert result.run.problems == ("24 requests had no outcome on the bus",)


async def test_an_engine_that_answers_no_policy_is_an_error(autojump_clock: trio.abc.Clock) -> None:
    async with place() as (where, client):
        deaf = replace(where, bus=MemoryBus(), client=client)
        with pytest.RaisesGroup(EngineError, flatten_subgroups=True):
            await serve(deaf, SCRIPT, "cache-aware")


async def test_an_engine_that_cannot_serve_the_first_request_is_an_error(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm, "WARM_UP", 1)

    class Refusing(Answering):
        async def generate(self, request: InferenceRequest) -> InferenceResult:
            result = await super().generate(request)
            return replace(result, outcome=RequestOutcome(status="failed", reason="refused: 400"))

    async with place() as (where, client):
        refusing = replace(where, client=Refusing(client.generate))
        with pytest.raises(EngineError, match="the first request: refused: 400"):
            await serve(refusing, SCRIPT, "fcfs")
