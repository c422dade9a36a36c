"""A real HTTP server on a port of this machine that behaves as each test says."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

Behaviour = Callable[[trio.SocketStream], Awaitable[None]]

MODELS = {"data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": 4096}]}


@dataclass
class Server:
    """What it has heard, and where it listens. ``gone`` is set when a client hangs up on it."""

    url: str = ""
    behaviour: Behaviour | None = None
    models: Any = field(default_factory=lambda: MODELS)
    models_status: int = 200
    heard: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    asked: trio.Event = field(default_factory=trio.Event)
    gone: trio.Event = field(default_factory=trio.Event)

    @property
    def said(self) -> Any:
        """The body of the last request."""
        return self.heard[-1][2]


@asynccontextmanager
async def serving(behaviour: Behaviour | None = None) -> AsyncIterator[Server]:
    """Listen on a free port; a POST is answered as ``behaviour`` does."""
    server = Server(behaviour=behaviour)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(
            partial(trio.serve_tcp, partial(_converse, server), 0, host="127.0.0.1")
        )
        server.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        yield server
        nursery.cancel_scope.cancel()


async def _converse(server: Server, stream: trio.SocketStream) -> None:
    buffer = bytearray()
    try:
        while True:
            while b"\r\n\r\n" not in buffer:
                buffer += await _some(stream)
            head, _, rest = bytes(buffer).partition(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
            length = int(headers.get("content-length", 0))
            buffer[:] = rest
            while len(buffer) < length:
                buffer += await _some(stream)
            body = json.loads(buffer[:length]) if length else None
            del buffer[:length]
            method, path, _ = first.split(" ")
            server.heard.append((path, headers, body))
            if method == "GET":
                await answer(stream, server.models_status, json.dumps(server.models))
            else:
                server.asked.set()
                assert server.behaviour is not None
                await server.behaviour(stream)
    except (EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
        server.gone.set()


async def _some(stream: trio.SocketStream) -> bytes:
    if not (chunk := await stream.receive_some(65536)):
        raise EOFError
    return chunk


async def answer(
    stream: trio.SocketStream, status: int, body: str, kind: str = "application/json"
) -> None:
    """Send a whole answer."""
    data = body.encode()
    await stream.send_all(
        f"HTTP/1.1 {status} Words\r\ncontent-type: {kind}\r\n"
        f"content-length: {len(data)}\r\n\r\n".encode()
        + data
    )


async def begin(stream: trio.SocketStream) -> None:
    """Begin a stream of events, in chunks."""
    await stream.send_all(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )


async def say(stream: trio.SocketStream, event: Any) -> None:
    """Send one event."""
    data = event if isinstance(event, bytes) else json.dumps(event).encode()
    await say_raw(stream, b"data: " + data + b"\n\n")


async def say_raw(stream: trio.SocketStream, data: bytes) -> None:
    """Send bytes of a stream of events."""
    await stream.send_all(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def end(stream: trio.SocketStream) -> None:
    """End a stream of events in order."""
    await stream.send_all(b"0\r\n\r\n")


def token(text: str, *ids: int, finish: str | None = None) -> dict[str, Any]:
    """A piece of a completion, as vLLM sends it."""
    return {"choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}]}


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """The last event of a completion."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [], "usage": {**counts, **details}, "metrics": {"queue_time_ms": 0.0}}
