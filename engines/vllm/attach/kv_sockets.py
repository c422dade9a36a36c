"""The sockets of vLLM's KV events, for trio: the publisher's, and the one that is asked again.

The only module that knows ZMQ. A ZMQ descriptor becomes readable only when something changes, and
not as long as there is something, so each wait looks at the socket first and is bounded.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import trio
import zmq

from hear.endpoints import is_host, scheme_of
from hear.engines.vllm.kv_events import END_OF_REPLAY
from hear.errors import ConfigError, EngineError

LOOK_AGAIN_S: Final = 0.25
_CONNECT_S: Final = 5.0
_BURST: Final = 256
_MAX_REPLAYED: Final = 1_000_000
_UNREAD: Final = 100_000  # as many as the publisher keeps for a reader

Frames = list[bytes]


def check_endpoint(endpoint: str) -> None:
    """See that an address can be one of a publisher.

    Raises:
        ConfigError: it cannot.
    """
    scheme = scheme_of(endpoint)
    try:
        parts = urlsplit(endpoint)
        good = scheme == "tcp" and is_host(parts.hostname or "") and parts.port is not None
        good = good and parts.username is None and not (parts.path or parts.query or parts.fragment)
    except ValueError:
        good = False
    if not (good or scheme == "ipc") or "*" in endpoint:
        raise ConfigError(
            f"endpoint {endpoint!r:.200} of KV events: expected tcp://HOST:PORT or ipc://PATH"
        )


async def _see_listener(endpoint: str) -> None:
    """ZMQ connects to nobody without a word, so look for somebody first.

    Raises:
        EngineError: nobody listens there.
    """
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp":
        return
    try:
        with trio.fail_after(_CONNECT_S):
            assert parts.hostname is not None
            assert parts.port is not None
            stream = await trio.open_tcp_stream(parts.hostname, parts.port)
            await stream.aclose()
    except (OSError, trio.TooSlowError) as error:
        why = str(error) or f"no answer within {_CONNECT_S:g} s"
        raise EngineError(f"KV events at {endpoint}: nobody listens there: {why}") from error


class KvSockets:
    """The publisher of one engine. Made by ``connect``."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], events: str, replay: str | None, topic: str
    ) -> None:
        self._context = context
        self._replay_endpoint = replay
        self._events = context.socket(zmq.SUB)
        self._events.set(zmq.RCVHWM, _UNREAD)
        self._events.set(zmq.SUBSCRIBE, topic.encode())
        self._events.connect(events)

    @property
    def can_replay(self) -> bool:
        """Whether there is an endpoint to ask again."""
        return self._replay_endpoint is not None

    async def receive(self, within_s: float) -> list[Frames]:
        """What the publisher has sent; nothing if nothing came within ``within_s`` seconds."""
        with trio.move_on_after(within_s):
            await _readable(self._events)
        return _drain(self._events)

    async def replay(self, first: int, within_s: float) -> list[Frames] | None:
        """The batches from number ``first`` on that the publisher still has.

        None if it does not answer, or pauses for ``within_s`` seconds before the end.
        """
        if self._replay_endpoint is None:
            return None
        # A socket for each question: what comes late of an earlier answer is no part of this one.
        asked = self._context.socket(zmq.DEALER)
        try:
            asked.set(zmq.RCVHWM, 0)
            asked.connect(self._replay_endpoint)
            asked.send_multipart((b"", first.to_bytes(8, "big")))
            answer: list[Frames] = []
            while len(answer) < _MAX_REPLAYED:
                with trio.move_on_after(within_s) as scope:
                    await _readable(asked)
                if scope.cancelled_caught:
                    return None
                for frames in _drain(asked):
                    if len(frames) > 1 and frames[-2] == END_OF_REPLAY:
                        return answer
                    answer.append(frames)
            return None
        finally:
            asked.close(linger=0)


async def _readable(socket: "zmq.Socket[bytes]") -> None:
    await trio.lowlevel.checkpoint()
    while not _has_some(socket):
        with trio.move_on_after(LOOK_AGAIN_S):
            await trio.lowlevel.wait_readable(int(socket.get(zmq.FD)))


def _has_some(socket: "zmq.Socket[bytes]") -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _drain(socket: "zmq.Socket[bytes]") -> list[Frames]:
    messages: list[Frames] = []
    while len(messages) < _BURST and _has_some(socket):
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return messages


@asynccontextmanager
async def connect(events: str, replay: str | None, topic: str = "") -> AsyncIterator[KvSockets]:
    """Follow the publisher at ``events``; ``replay`` is its replay endpoint.

    Raises:
        ConfigError: an address is none.
        EngineError: nobody listens there.
    """
    for endpoint in filter(None, (events, replay)):
        check_endpoint(endpoint)
    for endpoint in filter(None, (events, replay)):
        await _see_listener(endpoint)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield KvSockets(context, events, replay, topic)
    finally:
        context.destroy(linger=0)
