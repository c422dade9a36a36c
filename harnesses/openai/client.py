"""An ``InferenceClient`` for any server that speaks OpenAI's protocol over HTTP.

Whatever goes wrong with a request is its outcome, ``failed``, and never an exception: the harness
that sent it goes on. Every wait has a bound, and a caller that is cancelled hangs up, which makes
the server give the request up. Knows nothing of the bus.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import trio

from hear.codec import UNREADABLE
from hear.errors import ConfigError, EngineError, LocalProtocolError, RemoteProtocolError
from hear.harnesses.openai import dialect
from hear.harnesses.openai.events import EventReader
from hear.harnesses.openai.http import (
    Address,
    Answer,
    BrokenExchangeError,
    UnreachableError,
    exchange,
)
from hear.interfaces import InferenceRequest, InferenceResult
from hear.messages import RequestOutcome

MODELS_S: Final = 10.0
"""How long a server may take to tell of its models."""

REQUEST_S: Final = 600.0
"""How long a request may take from its sending to its last token, the queue included."""

CACHED: Final = "cached"
"""The tier under which reused tokens are counted: a server does not tell them apart."""

_MAX_ERROR_BYTES: Final = 64 << 10
_MAX_MODELS_BYTES: Final = 4 << 20
_SHOWN: Final = 8  # models that an error lists


@asynccontextmanager
async def connect(
    endpoint: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    limit_s: float = REQUEST_S,
) -> AsyncIterator["OpenAIClient"]:
    """Reach the server at ``endpoint``, ``http://HOST[:PORT][/PREFIX]`` with or without ``/v1``.

    Args:
        model: which of its models to ask for; None is the first that it tells of.
        api_key: sent as ``Authorization: Bearer``.
        limit_s: the bound on each request.

    Raises:
        ConfigError: this is no such address, or the server has no such model.
        EngineError: nobody answers there, or not as a server of OpenAI's protocol does.
    """
    address = Address.parse(endpoint)
    address = address._replace(prefix=address.prefix.removesuffix("/v1") + "/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    chosen = await _choose(address, headers, model)
    vllm = chosen.owned_by == "vllm"
    yield OpenAIClient(address, headers, model=chosen.id, vllm=vllm, limit_s=limit_s)


async def _choose(address: Address, headers: dict[str, str], model: str | None) -> dialect.Model:
    try:
        with trio.fail_after(MODELS_S):
            async with exchange(address, "GET", "/models", headers=headers) as answer:
                data = await answer.read(_MAX_MODELS_BYTES)
    except trio.TooSlowError as error:
        raise EngineError(f"{address}/models: no answer within {MODELS_S:g} s") from error
    except BrokenExchangeError as error:
        raise EngineError(f"{address}/models: {error}") from error
    if answer.status != 200:
        raise EngineError(f"{address}/models: answers {answer.status}: {dialect.failure(data)}")
    try:
        models = msgspec.json.decode(data, type=dialect.Models).data
    except UNREADABLE as error:
        raise EngineError(
            f"{address}/models: answers not as a server of OpenAI's protocol does: {error}"
        ) from error
    for row in models:
        if model is None or row.id == model:
            return row
    known = ", ".join(f"{row.id!r:.80}" for row in models[:_SHOWN]) or "none"
    raise ConfigError(f"{address}: model {model!r} is not served there, expected one of: {known}")


SERVICE_UNAVAILABLE: Final = 503


class OpenAIClient:
    """The data path to one model of one server. Made by ``connect``.

    ``vllm`` tells whether the server is one of vLLM, which is told HEAR's names of each request.
    """

    def __init__(
        self, address: Address, headers: dict[str, str], *, model: str, vllm: bool, limit_s: float
    ) -> None:
        self.model = model
        self.vllm = vllm
        self._address = address
        self._headers = headers
        self._limit_s = limit_s

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        """Send a request and wait for its last token, or for what keeps it from coming.

        The server tells the time in its queue only with ``--enable-per-request-metrics``; else
        ``started_s`` is the time of the first token.

        Raises:
            EngineError: the request has no prompt that such a server takes.
        """
        try:
            route, body = dialect.body(request, self.model, vllm=self.vllm)
        except LocalProtocolError as error:
            raise EngineError(str(error)) from error
        told = _Told(trio.current_time())
        with trio.move_on_after(self._limit_s) as limit:
            try:
                await self._ask(route, body, told)
            except UnreachableError as error:
                told.failure, told.unserved = f"unreachable: {error}", True
            except (BrokenExchangeError, RemoteProtocolError) as error:
                told.failure = f"broken_stream: {error}"
                told.unserved = not told.has_begun and isinstance(error, BrokenExchangeError)
        if limit.cancelled_caught:
            told.failure = f"timed_out: no last token within {self._limit_s:g} s"
        return told.result(request)

    async def _ask(self, route: str, body: bytes, told: "_Told") -> None:
        kinds = {"content-type": "application/json", "accept": "text/event-stream"}
        async with exchange(
            self._address, "POST", f"/{route}", headers={**self._headers, **kinds}, body=body
        ) as answer:
            told.has_begun = True
            if answer.status != 200:
                # A server that is not ready, or too busy, has not served it.
                told.unserved = answer.status == SERVICE_UNAVAILABLE
                said = dialect.failure(await answer.read(_MAX_ERROR_BYTES))
                cause = "server_error" if answer.status >= 500 else "refused"
                told.failure = f"{cause}: {answer.status}: {said}"
            elif not answer.kind.startswith("text/event-stream"):
                told.failure = f"broken_stream: got {answer.kind or 'no type'}, expected a stream"
            else:
                await _follow(answer, told)


class _Told:
    """What has come of one request, and when."""

    def __init__(self, sent_s: float) -> None:
        self.sent_s = sent_s
        self.first_token_s: float | None = None
        self.answer = dialect.Answer()
        self.failure = ""
        self.has_begun = False
        self.unserved = False

    def result(self, request: InferenceRequest) -> InferenceResult:
        now = trio.current_time()
        answer = self.answer
        first = now if self.first_token_s is None else self.first_token_s
        started = first if answer.queue_s is None else min(self.sent_s + answer.queue_s, first)
        outcome = RequestOutcome(
            status="failed" if self.failure else "completed",
            reason=self.failure,
            prompt_tokens=answer.usage.prompt_tokens if answer.usage else request.prompt_tokens,
            output_tokens=answer.output_tokens,
            reused_tokens={CACHED: answer.cached_tokens} if answer.cached_tokens else {},
            queue_s=answer.queue_s or 0.0,
            prefill_s=first - started,
            decode_s=now - first,
        )
        return InferenceResult(
            outcome,
            sent_s=self.sent_s,
            started_s=started,
            first_token_s=first,
            finished_s=now,
            text="".join(answer.text),
            token_ids=tuple(answer.token_ids),
            unserved=self.unserved,
        )


async def _follow(answer: Answer, told: _Told) -> None:
    reader = EventReader()
    while (piece := await answer.next()) is not None:
        for data in reader.feed(piece):
            if data == dialect.DONE:
                _conclude(told)
                return
            if told.answer.take(data) and told.first_token_s is None:
                told.first_token_s = trio.current_time()
    if told.answer.finish_reason is None:
        told.failure = f"broken_stream: it ended after {told.answer.output_tokens} tokens"
    else:
        _conclude(told)


def _conclude(told: _Told) -> None:
    """See that an answer that has come to its end is one."""
    reason = told.answer.finish_reason
    if reason is None:
        told.failure = "broken_stream: it ended without a finish_reason"
    elif reason in ("abort", "error"):
        told.failure = f"{reason}: the server gave the request up"
