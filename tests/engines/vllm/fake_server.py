"""A stand-in for a vLLM server: the same routes, the same frames, and faults on demand.

It serves one request at a time by priority, keeps blocks of 16 tokens in order of last use, and
publishes what it stores and gives up. It is for what a real server does not do when it is told to:
losing events, beginning anew, speaking nonsense.
"""

import json
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

import msgspec
import trio
import zmq

from hear.engines.vllm.hashing import prefix_hashes

BLOCK: Final = 16
SCHEME: Final = "vllm-sha256_cbor-64"
TOPIC: Final = b"kv@fake"
_END: Final = (-1).to_bytes(8, "big", signed=True)
_STEP_S: Final = 0.002


class FakePublisher:
    """KV events as vLLM publishes them. ``drop`` is how many of the next are not sent live."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._live = context.socket(zmq.PUB)
        self._replay = context.socket(zmq.ROUTER)
        self.events = f"tcp://127.0.0.1:{self._live.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self._replay.bind_to_random_port('tcp://127.0.0.1')}"
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=1_000)
        self.seq = 0
        self.time_s = 1_000.0
        self.drop = 0
        self.mute = False
        self.with_topic = True
        self.asked = 0

    def publish(self, *events: object) -> None:
        """Send one batch."""
        self.time_s += 1.0
        self.send(self.seq, msgspec.msgpack.encode([self.time_s, list(events), 0]))

    def send(self, seq: int, payload: bytes) -> None:
        """Send any payload under a number."""
        self.seq = seq + 1
        self.buffer.append((seq, payload))
        if self.drop:
            self.drop -= 1
        else:
            self._live.send_multipart((TOPIC, seq.to_bytes(8, "big"), payload))

    def send_raw(self, *frames: bytes) -> None:
        """Send what no vLLM would."""
        self._live.send_multipart(frames)

    def forget(self) -> None:
        """Begin anew."""
        self.buffer.clear()
        self.seq = 0

    async def answer(self) -> None:
        """KeyedOutcome who asks again."""
        while True:
            with trio.move_on_after(0.05):
                await trio.lowlevel.wait_readable(int(self._replay.get(zmq.FD)))
            while int(self._replay.get(zmq.EVENTS)) & zmq.POLLIN:
                client, _, first = self._replay.recv_multipart(zmq.NOBLOCK)
                self.asked += 1
                if self.mute:
                    continue
                topic = (TOPIC,) if self.with_topic else ()
                for seq, payload in list(self.buffer):
                    if seq >= int.from_bytes(first, "big"):
                        number = seq.to_bytes(8, "big")
                        self._replay.send_multipart((client, b"", *topic, number, payload))
                self._replay.send_multipart((client, b"", *((b"",) if topic else ()), _END, b""))


class FakeVllm:
    """The server. ``priority`` and ``pages`` may be changed; ``crash`` begins it anew."""

    def __init__(self, publisher: FakePublisher, *, num_blocks: int = 32) -> None:
        self.kv = publisher
        self.url = ""
        self.num_blocks = num_blocks
        self.priority = True
        self.answers: dict[str, tuple[int, object]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.away = False
        self.refused = 0
        self._runs = count(1)
        self._numbers = count()
        self._connections: set[trio.CancelScope] = set()
        self._start()

    def _start(self) -> None:
        self.begun_s = float(next(self._runs))
        self.blocks: dict[int, None] = {}
        self.counters = {"prompt": 0, "output": 0, "cached": 0}
        self._queue: list[tuple[int, int, trio.Event]] = []
        self._busy = False

    def crash(self) -> None:
        """Lose everything, and begin anew."""
        for scope in list(self._connections):
            scope.cancel()
        self.kv.forget()
        self._start()

    def page(self) -> str:
        """What /metrics says."""
        config = (
            f'block_size="{BLOCK}",num_gpu_blocks="{self.num_blocks + 1}",engine="0",'
            'enable_prefix_caching="True",prefix_caching_hash_algo="sha256_cbor"'
        )
        labels = '{engine="0",model_name="fake"}'
        values = {
            "vllm:num_requests_running": int(self._busy),
            "vllm:num_requests_waiting": len(self._queue),
            "vllm:kv_cache_usage_perc": 0.0,
            "vllm:num_preemptions_total": 0,
            "vllm:prompt_tokens_total": self.counters["prompt"],
            "vllm:generation_tokens_total": self.counters["output"],
            "vllm:prompt_tokens_cached_total": self.counters["cached"],
        }
        lines = [f"{name}{labels} {float(value)}" for name, value in values.items()]
        lines += [f"vllm:cache_config_info{{{config}}} 1.0"]
        lines += [f"process_start_time_seconds {self.begun_s}"]
        return "\n".join(lines) + "\n"

    def _route(self, path: str) -> tuple[int, object]:
        if path in self.answers:
            return self.answers[path]
        routes: dict[str, object] = {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": "fake", "max_model_len": 512}]},
            "/metrics": self.page(),
        }
        if self.priority:
            policy = {"scheduler_config": {"policy": "priority"}}
            routes["/server_info?config_format=json"] = {"vllm_config": policy}
        return (200, routes[path]) if path in routes else (404, {"error": "no such route"})

    async def converse(self, stream: trio.SocketStream) -> None:
        """Serve one connection, which is of one request."""
        if self.away:
            self.refused += 1
            return
        with trio.CancelScope() as scope:
            self._connections.add(scope)
            try:
                await self._converse(stream)
            except* (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            finally:
                self._connections.discard(scope)

    async def _converse(self, stream: trio.SocketStream) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += (chunk := await stream.receive_some(65_536))
            if not chunk:
                return
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        method, path, _ = lines[0].split(" ")
        length = next((int(x[15:]) for x in lines if x.lower().startswith("content-length:")), 0)
        while len(body) < length:
            body += await stream.receive_some(65_536)
        if method == "GET":
            status, said = self._route(path)
            await _send(stream, status, said if isinstance(said, str) else json.dumps(said))
            return
        asked = json.loads(body)
        self.bodies.append(asked)
        if len(asked["prompt"]) + asked["max_tokens"] > 512:
            said = {"error": {"message": "This model's maximum context length is 512 tokens."}}
            await _send(stream, 400, json.dumps(said))
            return
        await stream.send_all(_head(200))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_gone, stream, nursery.cancel_scope)
            await self._generate(stream, asked)
            nursery.cancel_scope.cancel()

    async def _generate(self, stream: trio.SocketStream, asked: dict[str, Any]) -> None:
        turn = trio.Event()
        entry = (asked.get("priority", 0), next(self._numbers), turn)
        heappush(self._queue, entry)
        self._next()
        try:
            await turn.wait()
            await self._run(stream, asked)
        finally:
            if turn.is_set():
                self._busy = False
            elif entry in self._queue:
                self._queue.remove(entry)
                self._queue.sort()
            self._next()

    def _next(self) -> None:
        if self._queue and not self._busy:
            self._busy = True
            heappop(self._queue)[2].set()

    async def _run(self, stream: trio.SocketStream, asked: dict[str, Any]) -> None:
        prompt: list[int] = asked["prompt"]
        salt: str | None = asked.get("cache_salt")
        hashes = prefix_hashes(prompt, BLOCK, cache_salt=salt)
        reused = 0
        while reused < len(hashes) and hashes[reused] in self.blocks:
            reused += 1
        cached = min(reused * BLOCK, len(prompt) - 1) // BLOCK * BLOCK
        await trio.sleep(_STEP_S)
        self._store(prompt, hashes, reused, salt)
        for index in range(asked["max_tokens"]):
            token = (sum(prompt) + index) % 997
            choice = {"index": 0, "text": "x", "token_ids": [token]}
            await stream.send_all(_event({"choices": [choice]}))
            await trio.sleep(_STEP_S)
        self.counters["prompt"] += len(prompt)
        self.counters["output"] += asked["max_tokens"]
        self.counters["cached"] += cached
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": asked["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await stream.send_all(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")

    def _store(
        self, prompt: Sequence[int], hashes: Sequence[int], reused: int, salt: str | None
    ) -> None:
        for block in reversed(hashes):  # the end of a prompt goes before its beginning
            self.blocks.pop(block, None)
            self.blocks[block] = None
        gone = []
        while len(self.blocks) > self.num_blocks:
            gone.append(next(iter(self.blocks)))
            del self.blocks[gone[-1]]
        events: list[object] = [removed(block) for block in gone]
        if hashes[reused:]:
            parent = hashes[reused - 1] if reused else None
            tokens = prompt[reused * BLOCK : len(hashes) * BLOCK]
            keys: list[object] = [None] * len(hashes[reused:])
            keys[0] = [salt] if salt and not reused else None
            new = stored(hashes[reused:], parent=parent, tokens=tokens, extra_keys=keys)
            events.append(new)
        if events:
            self.kv.publish(*events)


def stored(
    hashes: Sequence[int | bytes],
    *,
    parent: int | bytes | None = None,
    tokens: Sequence[int] = (),
    **more: object,
) -> dict[str, object]:
    """The event of blocks that were stored."""
    event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }
    return event | more


def removed(*hashes: int | bytes, **more: object) -> dict[str, object]:
    """The event of blocks that were given up."""
    event = {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0}
    return event | more


def batch(seq: int, *events: object, time_s: float | None = None) -> list[bytes]:
    """The frames of a batch of events."""
    time_s = 100.0 + seq if time_s is None else time_s
    return [b"kv", seq.to_bytes(8, "big"), msgspec.msgpack.encode([time_s, list(events), 0])]


CLEARED: Final = {"type": "AllBlocksCleared"}


def _head(status: int) -> bytes:
    return f"HTTP/1.1 {status} said\r\nConnection: close\r\n\r\n".encode()


def _event(said: object) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


async def _send(stream: trio.SocketStream, status: int, said: str) -> None:
    await stream.send_all(_head(status) + said.encode())


async def _until_gone(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    while await stream.receive_some(4_096):
        pass
    scope.cancel()


@asynccontextmanager
async def fake_vllm(*, num_blocks: int = 32) -> AsyncIterator[FakeVllm]:
    """Run one, on ports of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        async with trio.open_nursery() as nursery:
            server = FakeVllm(FakePublisher(context), num_blocks=num_blocks)
            nursery.start_soon(server.kv.answer)
            listeners = await nursery.start(_listen, server)
            server.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
            yield server
            nursery.cancel_scope.cancel()
    finally:
        context.destroy(linger=0)


async def _listen(
    server: FakeVllm,
    *,
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    await trio.serve_tcp(server.converse, 0, host="127.0.0.1", task_status=task_status)
