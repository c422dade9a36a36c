"""What is said to a server of OpenAI's protocol, and how its answers are read. Does no I/O.

A vLLM server is told more: HEAR's names of a request ride in ``vllm_xargs``, and the answer has to
have just as many tokens as were asked for, which are told by their ids. Other servers may refuse
fields that they do not know, so they get none.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from hear.codec import UNREADABLE
from hear.errors import LocalProtocolError, RemoteProtocolError
from hear.interfaces import InferenceRequest
from hear.messages.envelope import Count, Seconds

COMPLETIONS: Final = "completions"
CHAT: Final = "chat/completions"
DONE: Final = b"[DONE]"
_SHOWN: Final = 300
"""Characters of a server's words that are passed on."""


class Model(Struct, frozen=True):
    """One row of ``/v1/models``."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class Models(Struct, frozen=True):
    """The answer of ``/v1/models``."""

    data: tuple[Model, ...]


class _Delta(Struct, frozen=True):
    content: str | None = None


class _Choice(Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: Sequence[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(Struct, frozen=True):
    cached_tokens: Count | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Metrics(Struct, frozen=True):
    queue_time_ms: Seconds | None = None


class _Chunk(Struct, frozen=True):
    choices: Sequence[_Choice] = ()
    usage: _Usage | None = None
    metrics: _Metrics | None = None
    error: Any = None


class _Failure(Struct, frozen=True):
    error: Any = None
    message: str = ""
    detail: Any = None


_chunks = msgspec.json.Decoder(_Chunk)
_failures = msgspec.json.Decoder(_Failure)


class Answer(Struct):
    """What has been heard of one answer so far. ``queue_s`` is None where the server is silent."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    pieces: int = 0
    finish_reason: str | None = None
    usage: _Usage | None = None
    queue_s: float | None = None

    @property
    def output_tokens(self) -> int:
        """How many tokens it has, as the server counts them or, if it does not, as they came."""
        if self.usage is not None:
            return self.usage.completion_tokens
        return len(self.token_ids) or self.pieces

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt were not computed again; 0 where the server is silent."""
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return details.cached_tokens or 0 if details is not None else 0

    def take(self, data: bytes) -> bool:
        """Take in the data of one event; returns whether it brought something of the answer.

        Raises:
            RemoteProtocolError: it cannot be read, or tells of an error.
        """
        try:
            chunk = _chunks.decode(data)
        except UNREADABLE as error:
            raise RemoteProtocolError(
                f"an event that cannot be read: {_short(data.decode(errors='replace'))} ({error})"
            ) from error
        if chunk.error is not None:
            raise RemoteProtocolError(f"the server says: {_message(chunk.error)}")
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.metrics is not None and chunk.metrics.queue_time_ms is not None:
            self.queue_s = chunk.metrics.queue_time_ms / 1e3
        brought = False
        for choice in chunk.choices:
            text = choice.text or (choice.delta.content if choice.delta is not None else None)
            if text:
                self.text.append(text)
            self.token_ids += choice.token_ids or ()
            if text or choice.token_ids:
                self.pieces += 1
                brought = True
            self.finish_reason = choice.finish_reason or self.finish_reason
        return brought


def body(request: InferenceRequest, model: str, *, vllm: bool) -> tuple[str, bytes]:
    """The route below ``/v1/`` that a request is sent to, and what is sent.

    Raises:
        LocalProtocolError: the request has no prompt, or two.
    """
    if bool(len(request.prompt)) is bool(len(request.messages)):
        came = "both" if len(request.prompt) else "neither"
        raise LocalProtocolError(
            f"request {request.id!r}: a server of OpenAI's protocol takes a prompt (text or ids of "
            f"tokens) or the messages of a chat: got {came}, expected one of them"
        )
    said: dict[str, Any] = {
        "model": model,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.messages:
        route, said["messages"] = CHAT, request.messages
    else:
        route = COMPLETIONS
        said["prompt"] = request.prompt if isinstance(request.prompt, str) else [*request.prompt]
    if vllm:
        said |= {"ignore_eos": True, "return_token_ids": True, "vllm_xargs": names_of(request)}
        if request.priority:  # a server that serves in order of arrival refuses any
            said["priority"] = request.priority
        if request.cache_salt:
            said["cache_salt"] = request.cache_salt
    return route, msgspec.json.encode(said)


def names_of(request: InferenceRequest) -> dict[str, str | int]:
    """HEAR's names of a request, as its engine reads them off it."""
    names: dict[str, str | int] = {"hear_request": request.id, "hear_tenant": request.tenant}
    if request.context is not None:
        names["hear_context"] = request.context
    if request.context_version is not None:
        names["hear_version"] = request.context_version
    return names


def failure(data: bytes) -> str:
    """What a server says in the body of an error."""
    try:
        said = _failures.decode(data)
    except UNREADABLE:
        return _short(data.decode(errors="replace")) or "and nothing more"
    return _message(said.error or said.message or said.detail or "nothing more")


def _message(error: Any) -> str:
    return _short(str(error.get("message", error) if isinstance(error, dict) else error))


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."
