"""Real vLLM over HTTP: the client of OpenAI's protocol, and a small bench from end to end."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from hear.harnesses.eval.bench import servers
from hear.harnesses.openai.client import OpenAIClient, connect
from hear.harnesses.openai.http import Address, exchange
from hear.interfaces import InferenceRequest, InferenceResult

from .real import NEEDS_VLLM

pytestmark = NEEDS_VLLM

OPTIONS = (
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "2048", "--block-size", "32"),
    *("--max-num-seqs", "1", "--enable-prompt-tokens-details", "--enable-per-request-metrics"),
    *("--scheduling-policy", "priority"),
)
PROMPT = tuple(range(20, 420))


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, OpenAIClient]]:
    model = str(folder / "model")
    servers.carry_out(servers.hear("vllm", "make-model", model, "--layers", "2"))
    port = servers.free_port()
    url = f"http://127.0.0.1:{port}"
    command = servers.stock_vllm("stock", model, OPTIONS, port=port)
    async with servers.running(command, folder) as server:

        async def reached() -> None:
            async with connect(url):
                pass

        await server.until(reached, "starting")
        async with connect(url) as client:
            yield url, client


def request(name: str, **more: object) -> InferenceRequest:
    fields: dict[str, object] = {
        "id": name,
        "prompt_tokens": len(PROMPT),
        "output_tokens": 8,
        "prompt_hashes": (),
        "context": "c",
        "context_version": 1,
        "prompt": PROMPT,
    }
    return InferenceRequest(**{**fields, **more})  # type: ignore[arg-type]


async def metric(url: str, name: str) -> float:
    async with exchange(Address.parse(url), "GET", "/metrics") as answer:
        page = (await answer.read(4 << 20)).decode()
    rows = [line for line in page.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(row.rpartition(" ")[2]) for row in rows)


async def until(url: str, name: str, value: float) -> None:
    with trio.fail_after(60):
        while await metric(url, name) != value:  # noqa: ASYNC110 - the server has no event for it
            await trio.sleep(0.1)


async def test_the_client_on_a_real_server(tmp_path: Path) -> None:
    with trio.fail_after(280):
        async with served(tmp_path) as (url, client):
            assert client.vllm
            first = await client.generate(request("r/1"))
            again = await client.generate(request("r/2"))
            salted = await client.generate(request("r/3", cache_salt="mine"))
            _check_answers(first, again, salted)
            await _check_refusals(client)
            await _check_hanging_up(url, client)
            await _check_order(url, client)


def _check_answers(first: InferenceResult, again: InferenceResult, salted: InferenceResult) -> None:
    """The same prompt has the same answer, and only the one that may reuse it does."""
    for result in (first, again, salted):
        assert result.outcome.status == "completed"
        assert (result.outcome.prompt_tokens, result.outcome.output_tokens) == (400, 8)
        assert len(result.token_ids) == 8
        assert result.token_ids == first.token_ids
        assert result.sent_s <= result.started_s <= result.first_token_s <= result.finished_s
    assert first.outcome.reused_tokens == {}
    assert again.outcome.reused_tokens == {"cached": 384}
    assert salted.outcome.reused_tokens == {}


async def _check_refusals(client: OpenAIClient) -> None:
    """What vLLM refuses is a failed outcome in its own words."""
    long = await client.generate(request("long", prompt=PROMPT * 6))
    assert long.outcome.status == "failed"
    assert long.outcome.reason.startswith("refused: 400: ")
    assert "maximum context length" in long.outcome.reason
    chat = request("chat", prompt=(), messages=({"role": "user", "content": "hello"},))
    assert (await client.generate(chat)).outcome.status == "completed"


async def _check_hanging_up(url: str, client: OpenAIClient) -> None:
    """A caller that leaves takes the request out of the engine."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.generate, request("gone", output_tokens=1500))
        await until(url, "vllm:num_requests_running", 1)
        nursery.cancel_scope.cancel()
    await until(url, "vllm:num_requests_running", 0)


async def _check_order(url: str, client: OpenAIClient) -> None:
    """A priority that is sent with a request counts."""
    started_s: dict[str, float] = {}

    async def ask(name: str, priority: int, output_tokens: int) -> None:
        made = request(name, priority=priority, output_tokens=output_tokens)
        # By what the server says of it: answers may reach a client that is busy in another order.
        started_s[name] = (await client.generate(made)).started_s

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "first", 0, 1500)
        await until(url, "vllm:num_requests_running", 1)
        nursery.start_soon(ask, "late", 5, 2)
        await until(url, "vllm:num_requests_waiting", 1)
        nursery.start_soon(ask, "early", -5, 200)
    assert sorted(started_s, key=started_s.__getitem__) == ["first", "early", "late"]


def test_a_small_bench_keeps_every_promise_and_changes_no_answer(tmp_path: Path) -> None:
    shape = ["--sessions", "3", "--turns", "2", "--context", "200:400", "--rate", "20"]
    arms = ["--policy", "stock,fcfs,cache-aware+guard:4+session-aware", "--think", "0.1"]
    scale = ["--", "--num-gpu-blocks-override", "64"]
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "hear.app.cli", "bench", *shape, *arms, "--json", str(rows)]
    run = partial(subprocess.run, capture_output=True, text=True, timeout=580)
    done = run([*command, "--logs", str(tmp_path), *scale])
    assert done.returncode == 0, done.stderr + done.stdout
    written = json.loads(rows.read_text())
    assert written["problems"] == []
    assert written["answers_compared"] == 2 * 6
    assert [row["turns"] for row in written["rows"]] == [6, 6, 6]
    together = written["rows"][-1]
    assert together["operations"]["completed"] > 0
    assert together["operations_open"] == together["guard_violations"] == 0
