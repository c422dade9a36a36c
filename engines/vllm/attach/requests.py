"""The requests that reach an attached server through HEAR, from here to their last token.

Owns what is known of them from outside: one waits until its first token has come, and runs from
there. It is all of the server's queue that can be told by name, to each tenant its own. It knows no
controls: a priority is a number here.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Literal

import httpx
import msgspec
import trio

from hear.codec import UNREADABLE
from hear.engines.vllm.identity import salt_of
from hear.errors import EngineError
from hear.interfaces import InferenceRequest, InferenceResult
from hear.messages import (
    DEFAULT_TENANT,
    Key,
    QueueChanged,
    QueueSnapshot,
    RequestOutcome,
    RunningRequest,
    WaitingRequest,
)
from hear.messages.envelope import Count
from hear.operation import Ref

CONNECT_S: Final = 10.0
_TOO_LONG: Final = "maximum context length"


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _PromptDetails | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """How a generation went, and the tokens that came out."""

    result: InferenceResult
    token_ids: list[int]


@dataclass(slots=True, eq=False)
class OwnRequest:
    """A request on its way. ``sent`` once the server has taken it."""

    request: InferenceRequest
    number: int
    sent_s: float
    priority: int
    sent: bool = False
    lost: bool = False
    first_token_s: float | None = None
    last_token_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    usage: _Usage = field(default_factory=_Usage)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.request.tenant

    @property
    def ref(self) -> Ref:
        """Its tenant and its id."""
        return self.request.tenant, self.request.id

    @property
    def key(self) -> Key:
        """What messages about it are about."""
        return Key(
            request=self.request.id,
            context=self.request.context,
            context_version=self.request.context_version,
        )


class OwnRequests:
    """Those that are on their way now."""

    def __init__(self) -> None:
        self._requests: dict[Ref, OwnRequest] = {}
        self._numbers = count()

    def get(self, ref: Ref) -> OwnRequest | None:
        """The one of this tenant and id; None if it is not on its way."""
        return self._requests.get(ref)

    def begin(self, request: InferenceRequest) -> OwnRequest:
        """Take note of one that is about to be sent.

        Raises:
            EngineError: its tenant has one of this id on its way.
        """
        own = OwnRequest(request, next(self._numbers), trio.current_time(), request.priority)
        if own.ref in self._requests:
            raise EngineError(f"request {request.id!r}: one of this name is being served")
        self._requests[own.ref] = own
        return own

    def end(self, own: OwnRequest) -> None:
        """It has left. Nothing happens if it had left before."""
        if self._requests.get(own.ref) is own:
            del self._requests[own.ref]

    def lose(self) -> None:
        """The server has gone, and all of them with it."""
        for own in self._requests.values():
            own.lost = True
            own.scope.cancel()
        self._requests.clear()

    def _of(self, tenant: str) -> tuple[list[OwnRequest], list[OwnRequest]]:
        """Those of a tenant that wait, in their order, and those that run."""
        own = [own for own in self._requests.values() if own.tenant == tenant]
        waiting = [one for one in own if one.first_token_s is None]
        waiting.sort(key=lambda one: (one.priority, one.number))
        return waiting, [one for one in own if one.first_token_s is not None]

    def snapshot(self, tenant: str = DEFAULT_TENANT) -> QueueSnapshot:
        """Who of a tenant waits and who runs."""
        waiting, running = self._of(tenant)
        return QueueSnapshot(
            waiting=tuple(map(waiting_request, waiting)),
            running=tuple(
                RunningRequest(
                    request=own.request.id,
                    context=own.request.context,
                    prompt_tokens=own.request.prompt_tokens,
                    output_tokens=len(own.token_ids),
                )
                for own in running
            ),
        )

    def changed(
        self, moved: OwnRequest, where: Literal["waiting", "started", "ended"]
    ) -> QueueChanged:
        """Tell its tenant of one that moved."""
        waiting, running = self._of(moved.tenant)
        id = moved.request.id
        return QueueChanged(
            waiting=(waiting_request(moved),) if where == "waiting" else (),
            started=(id,) if where == "started" else (),
            ended=(id,) if where == "ended" else (),
            num_waiting=len(waiting),
            num_running=len(running),
            waiting_tokens=_prompt_tokens(waiting),
            running_tokens=_prompt_tokens(running) + sum(len(own.token_ids) for own in running),
        )


def _prompt_tokens(requests: Iterable[OwnRequest]) -> int:
    return sum(own.request.prompt_tokens for own in requests)


def waiting_request(own: OwnRequest) -> WaitingRequest:
    """One as it stands in the queue."""
    return WaitingRequest(
        request=own.request.id,
        context=own.request.context,
        since_s=own.sent_s,
        priority=own.priority,
        prompt_tokens=own.request.prompt_tokens,
    )


def body_of(own: OwnRequest, model: str, tell_all: bool) -> object:
    """What is posted to ``/v1/completions``.

    ``tell_all`` asks for events of the blocks that are reused too, for whoever does not know them.
    """
    request = own.request
    body: dict[str, object] = {
        "model": model,
        "prompt": request.prompt if isinstance(request.prompt, str) else [*request.prompt],
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,  # a request of HEAR's says how long its output is
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if own.priority:
        body["priority"] = own.priority
    if salt := salt_of(request.tenant, request.cache_salt):
        body["cache_salt"] = salt
    if tell_all:
        body["vllm_xargs"] = {"kv_cache_report_mode": "full"}
    return body


async def converse(
    own: OwnRequest,
    client: httpx.AsyncClient,
    url: str,
    body: object,
    *,
    on_sent: Callable[[], None],
    on_first: Callable[[], None],
) -> RequestOutcome:
    """Post a request and take in its answer; returns how it ended.

    Raises:
        httpx.HTTPError: the connection broke.
    """
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            said = (await answer.aread()).decode(errors="replace")
            return RequestOutcome(
                status="rejected", reason="too_long" if _TOO_LONG in said else "malformed"
            )
        own.sent = True
        on_sent()
        ended = readable = False
        # To its end in any case: httpx leaves the generators behind a broken-off loop to chance.
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: ") and not ended:
                readable = _take(own, line, on_first)
                ended = not readable
    if not ended:
        raise httpx.RemoteProtocolError("the answer broke off")
    return _completed(own) if readable else RequestOutcome(status="failed", reason="engine_error")


def _take(own: OwnRequest, line: str, on_first: Callable[[], None]) -> bool:
    """Take in one event of the stream; returns False if it tells of an error, or cannot be read."""
    try:
        said = json.loads(line.removeprefix("data: "))
        if "error" in said:
            return False
        if usage := said.get("usage"):
            own.usage = msgspec.convert(usage, _Usage)
        for choice in said.get("choices", ()):
            tokens = choice.get("token_ids") or ()
            own.token_ids.extend(int(token) for token in tokens)
            if tokens or choice.get("text"):
                own.last_token_s = trio.current_time()
                if own.first_token_s is None:
                    own.first_token_s = own.last_token_s
                    on_first()
    except (*UNREADABLE, ValueError, TypeError, AttributeError, OverflowError):
        return False
    return True


def _completed(own: OwnRequest) -> RequestOutcome:
    # Waiting and prefill cannot be told apart from outside: all of it counts as waiting.
    now = trio.current_time()
    first = own.first_token_s if own.first_token_s is not None else now
    last = own.last_token_s or now
    details = own.usage.prompt_tokens_details
    reused = details.cached_tokens or 0 if details is not None else 0
    return RequestOutcome(
        status="completed",
        mode="dense",
        prompt_tokens=own.usage.prompt_tokens or own.request.prompt_tokens,
        output_tokens=own.usage.completion_tokens or len(own.token_ids),
        reused_tokens={"gpu": reused} if reused else {},
        queue_s=first - own.sent_s,
        decode_s=last - first,
    )


def result_of(own: OwnRequest, outcome: RequestOutcome) -> InferenceResult:
    """What its client is told."""
    now = trio.current_time()
    first = own.first_token_s if own.first_token_s is not None else now
    return InferenceResult(
        outcome=outcome,
        sent_s=own.sent_s,
        started_s=first,
        first_token_s=first,
        finished_s=own.last_token_s or now,
    )
