"""The client of OpenAI's protocol, against a real HTTP server that behaves well and badly."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from hear.app import plugins
from hear.errors import ConfigError, EngineError
from hear.harnesses.openai.client import OpenAIClient, connect
from hear.interfaces import InferenceRequest, InferenceResult

from .http_server import Behaviour, Server, answer, begin, end, say, say_raw, serving, token, usage

PROMPT = InferenceRequest("r1", 5, 3, (), prompt=(5, 6, 7, 8, 9))


def events(*said: Any, ended: bool = True) -> Behaviour:
    """Answer with these events, and then end the stream in order or hang up."""

    async def behaviour(stream: trio.SocketStream) -> None:
        await begin(stream)
        for event in said:
            await say(stream, event)
        await (end(stream) if ended else stream.aclose())

    return behaviour


GOOD = events(
    token("a", 10), token("b", 11), token("c", 12, finish="length"), usage(5, 3, 4), b"[DONE]"
)


@asynccontextmanager
async def client_of(
    behaviour: Behaviour | None, **options: Any
) -> AsyncIterator[tuple[Server, OpenAIClient]]:
    with trio.fail_after(20):
        async with serving(behaviour) as server, connect(server.url, **options) as client:
            yield server, client


async def result_of(behaviour: Behaviour, **options: Any) -> InferenceResult:
    async with client_of(behaviour, **options) as (_, client):
        return await client.generate(PROMPT)


# -- what is asked for ------------------------------------------------------------------------


async def test_a_vllm_server_is_told_hears_names_and_asked_for_just_as_many_tokens() -> None:
    request = InferenceRequest(
        "s/2", 5, 3, (1,), context="s", context_version=2, tenant="t", prompt=(5, 6, 7)
    )
    async with client_of(GOOD) as (server, client):
        await client.generate(request)
    path, headers, said = server.heard[-1]
    assert path == "/v1/completions"
    assert headers["content-type"] == "application/json"
    assert said == {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
        "vllm_xargs": {
            "hear_request": "s/2",
            "hear_context": "s",
            "hear_version": 2,
            "hear_tenant": "t",
        },
    }


async def test_priority_and_salt_are_sent_only_if_the_request_has_them() -> None:
    request = InferenceRequest("r", 1, 1, (), prompt="hello", priority=-3, cache_salt="round 2")
    async with client_of(GOOD) as (server, client):
        await client.generate(request)
    assert server.said["priority"] == -3
    assert server.said["cache_salt"] == "round 2"
    assert server.said["prompt"] == "hello"


async def test_a_chat_goes_to_its_own_route() -> None:
    messages = ({"role": "user", "content": "hello"},)
    chunk = {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]}
    async with client_of(events(chunk, b"[DONE]")) as (server, client):
        result = await client.generate(InferenceRequest("r", 1, 1, (), messages=messages))
    assert server.heard[-1][0] == "/v1/chat/completions"
    assert server.said["messages"] == [{"role": "user", "content": "hello"}]
    assert (result.outcome.status, result.text) == ("completed", "yes")


async def test_a_server_that_is_not_vllm_gets_standard_fields_alone() -> None:
    async with serving(GOOD) as server:
        server.models = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        async with connect(server.url) as client:
            await client.generate(PROMPT)
    standard = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert set(server.said) == standard


async def test_a_key_is_sent_with_every_request() -> None:
    async with client_of(GOOD, api_key="secret") as (server, client):
        await client.generate(PROMPT)
    assert {headers.get("authorization") for _, headers, _ in server.heard} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("request_", "came"),
    [
        (InferenceRequest("r", 1, 1, (1,)), "neither"),
        (InferenceRequest("r", 1, 1, (), prompt="a", messages=({"role": "user"},)), "both"),
    ],
)
async def test_a_request_without_a_prompt_is_an_error_of_its_sender(
    request_: InferenceRequest, came: str
) -> None:
    async with client_of(GOOD) as (_, client):
        with pytest.raises(EngineError, match=f"got {came}, expected one of them"):
            await client.generate(request_)


# -- what is learned --------------------------------------------------------------------------


async def test_a_good_answer_is_told_with_its_tokens_its_reuse_and_its_times() -> None:
    result = await result_of(GOOD)
    assert result.outcome.status == "completed"
    assert result.text == "abc"
    assert result.token_ids == (10, 11, 12)
    assert result.outcome.reused_tokens == {"cached": 4}
    assert (result.outcome.prompt_tokens, result.outcome.output_tokens) == (5, 3)
    assert result.sent_s <= result.started_s <= result.first_token_s <= result.finished_s


async def test_the_first_token_is_timed_when_it_comes_and_not_with_the_last() -> None:
    first_sent, second_asked = trio.Event(), trio.Event()

    async def behaviour(stream: trio.SocketStream) -> None:
        await begin(stream)
        await say(stream, token("a", 10))
        first_sent.set()
        await second_asked.wait()
        await say(stream, token("b", 11, finish="length"))
        await say(stream, b"[DONE]")
        await end(stream)

    between = 0.0
    results: list[InferenceResult] = []
    async with client_of(behaviour) as (_, client), trio.open_nursery() as nursery:

        async def ask() -> None:
            results.append(await client.generate(PROMPT))

        nursery.start_soon(ask)
        await first_sent.wait()
        await trio.sleep(0.05)  # real: for the first to be read before the second is sent
        between = trio.current_time()
        second_asked.set()
    assert results[0].first_token_s < between < results[0].finished_s


async def test_the_time_in_the_queue_is_told_if_the_server_tells_it() -> None:
    told = {"choices": [], "metrics": {"queue_time_ms": 0.001}}
    result = await result_of(events(token("a", 1, finish="stop"), told, b"[DONE]"))
    assert result.started_s == pytest.approx(result.sent_s + 1e-6, abs=1e-7)
    assert result.outcome.queue_s == pytest.approx(1e-6)


async def test_a_stream_that_ends_in_order_without_done_is_whole_if_it_gave_a_reason() -> None:
    result = await result_of(events(token("a", 1, finish="length")))
    assert result.outcome.status == "completed"
    assert result.outcome.output_tokens == 1


async def test_many_requests_are_answered_at_once_and_after_them_another() -> None:
    async with client_of(GOOD) as (server, client):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(client.generate, PROMPT)
        result = await client.generate(PROMPT)
    assert result.outcome.status == "completed"
    assert sum(path == "/v1/completions" for path, _, _ in server.heard) == 21


# -- what goes wrong --------------------------------------------------------------------------


def refusing(status: int, body: str) -> Behaviour:
    async def behaviour(stream: trio.SocketStream) -> None:
        await answer(stream, status, body)

    return behaviour


async def hang_up(stream: trio.SocketStream) -> None:
    await stream.aclose()


async def no_http(stream: trio.SocketStream) -> None:
    await stream.send_all(b"220 mail.example.org\r\n\r\n")
    await stream.aclose()


async def a_page(stream: trio.SocketStream) -> None:
    await answer(stream, 200, "<html>welcome</html>", "text/html")


async def an_endless_event(stream: trio.SocketStream) -> None:
    await begin(stream)
    while True:
        await say_raw(stream, b"x" * 65536)


ERROR = json.dumps({"error": {"message": "max_tokens is too\nlarge", "code": 400}})
BAD: list[tuple[Behaviour, str]] = [
    (refusing(400, ERROR), "refused: 400: max_tokens is too large"),
    (refusing(401, '{"error": "Unauthorized"}'), "refused: 401: Unauthorized"),
    (refusing(404, '{"detail": "Not Found"}'), "refused: 404: Not Found"),
    (refusing(307, ""), "refused: 307: and nothing more"),
    (refusing(500, "<html>" + "x" * 1000), "server_error: 500: <html>xxx"),
    (refusing(503, "{}"), "server_error: 503: nothing more"),
    (hang_up, "broken_stream: "),
    (no_http, "broken_stream: "),
    (a_page, "broken_stream: got text/html, expected a stream"),
    (an_endless_event, "broken_stream: an event of more than"),
    (events(token("a", 1), ended=False), "broken_stream: "),
    (events(token("a", 1)), "broken_stream: it ended after 1 tokens"),
    (events(), "broken_stream: it ended after 0 tokens"),
    (events(token("a", 1), b"[DONE]"), "broken_stream: it ended without a finish_reason"),
    (events(b"{"), "broken_stream: an event that cannot be read: {"),
    (events(b"\xff\xfe"), "broken_stream: an event that cannot be read"),
    (events({"choices": [{"token_ids": "x"}]}), "broken_stream: an event that cannot be read"),
    (events({"error": {"message": "EngineCore died"}}), "server says: EngineCore died"),
    (events(token("", finish="abort"), b"[DONE]"), "abort: the server gave the request up"),
]


@pytest.mark.parametrize(("behaviour", "reason"), BAD)
async def test_what_goes_wrong_is_an_outcome_that_says_what(
    behaviour: Behaviour, reason: str
) -> None:
    result = await result_of(behaviour)
    assert result.outcome.status == "failed"
    assert reason in result.outcome.reason
    assert "\n" not in result.outcome.reason
    assert result.sent_s <= result.first_token_s <= result.finished_s


async def test_a_failed_request_leaves_the_next_one_unharmed() -> None:
    async with client_of(hang_up) as (server, client):
        assert (await client.generate(PROMPT)).outcome.status == "failed"
        server.behaviour = GOOD
        assert (await client.generate(PROMPT)).outcome.status == "completed"


async def test_an_answer_that_does_not_come_is_waited_for_no_longer_than_the_limit() -> None:
    async def behaviour(stream: trio.SocketStream) -> None:
        await begin(stream)
        await say(stream, token("a", 1))
        await trio.sleep_forever()

    async with client_of(behaviour, limit_s=0.2) as (server, client):
        result = await client.generate(PROMPT)
    assert result.outcome.reason == "timed_out: no last token within 0.2 s"
    assert result.outcome.output_tokens == 1
    assert server.asked.is_set()


async def test_a_server_that_has_gone_is_unreachable_and_serves_again_when_it_is_back() -> None:
    async with client_of(GOOD) as (_, client):
        address = client._address
        client._address = address._replace(port=9)  # nobody listens there
        result = await client.generate(PROMPT)
        assert result.outcome.status == "failed"
        assert result.outcome.reason.startswith("unreachable: ")
        client._address = address
        assert (await client.generate(PROMPT)).outcome.status == "completed"


async def test_leaving_the_scope_hangs_up_on_the_server() -> None:
    async def behaviour(stream: trio.SocketStream) -> None:
        await begin(stream)
        await say(stream, token("a", 1))
        await stream.receive_some(1)
        raise EOFError

    async with client_of(behaviour) as (server, client), trio.open_nursery() as nursery:
        nursery.start_soon(client.generate, PROMPT)
        await server.asked.wait()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True), trio.fail_after(5):
            await server.gone.wait()


# -- reaching it ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint",
    ["", "localhost:8000", "ftp://h:1", "http://", "http://h:99999", "http://h:1/?q=1", "http://["],
)
async def test_what_is_no_address_is_said_so(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        async with connect(endpoint):
            pass


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_address_may_name_the_version_or_not(suffix: str) -> None:
    async with serving(GOOD) as server, connect(server.url + suffix) as client:
        await client.generate(PROMPT)
    assert [path for path, _, _ in server.heard] == ["/v1/models", "/v1/completions"]


def _with(server: Server, **changes: Any) -> None:
    for name, value in changes.items():
        setattr(server, name, value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models_status": 401, "models": {"error": "Unauthorized"}}, "answers 401: Unauthorized"),
        ({"models": "welcome"}, "answers not as a server of OpenAI's protocol does"),
    ],
)
async def test_what_does_not_answer_as_such_a_server_is_one_clear_error(
    changes: dict[str, Any], words: str
) -> None:
    async with serving(GOOD) as server:
        _with(server, **changes)
        with pytest.raises(EngineError, match=words):
            async with connect(server.url):
                pass


async def test_nobody_there_is_one_clear_error() -> None:
    with pytest.raises(EngineError, match="no connection: "):
        async with connect("http://127.0.0.1:9"):
            pass


async def test_a_model_is_chosen_by_name_and_an_unknown_one_names_the_known() -> None:
    async with serving(GOOD) as server:
        server.models = {"data": [{"id": "base"}, {"id": "lora"}]}
        async with connect(server.url, model="lora") as client:
            await client.generate(PROMPT)
        assert server.said["model"] == "lora"
        with pytest.raises(ConfigError, match="expected one of: 'base', 'lora'"):
            async with connect(server.url, model="other"):
                pass


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_it_is_found_by_the_scheme_of_an_engines_endpoint(scheme: str) -> None:
    found: Callable[[str], object] = plugins.load_received("clients", scheme, "engine")
    assert callable(found)
