"""Attached servers, real ones and stand-ins, for the rules of conformance."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from hashlib import blake2b

import trio

from hear.engines.testing import EngineUnderTest
from hear.engines.vllm.attach import AttachedEngine, attached
from hear.engines.vllm.hashing import prefix_hashes
from hear.engines.vllm.kv_sockets import KvSockets, connect
from hear.seams import InferenceRequest, InferenceResult

_VOCABULARY = 256  # of the generated model


def tokens_of(context: str, number: int) -> list[int]:
    """The first tokens of a context's history."""
    tokens = []
    for index in range(number):
        digest = blake2b(f"{context}/{index}".encode(), digest_size=4).digest()
        tokens.append(16 + int.from_bytes(digest, "little") % (_VOCABULARY - 16))
    return tokens


def make_request(
    block_size: int, id: str, *, context: str, num_blocks: int, output_tokens: int
) -> InferenceRequest:
    """As ``hear.engines.testing.MakeRequest`` wants it."""
    prompt = tokens_of(context, num_blocks * block_size + 1)
    return InferenceRequest(
        id=id,
        prompt_tokens=len(prompt),
        output_tokens=output_tokens,
        prompt_hashes=prefix_hashes(prompt, block_size),
        context=context,
    )


def prompt_of(request: InferenceRequest) -> list[int]:
    """The prompt of such a request."""
    return tokens_of(request.context or "", request.prompt_tokens)


class SettledClient:
    """Sends requests, and tells of their end when what they stored is known to the backend.

    A server publishes its events beside its answers, so one may be here before the other. It looks
    for a question before each batch that it publishes, so when two questions in a row find nothing
    new, all that was to be published at the first of them has been.
    """

    def __init__(self, engine: AttachedEngine, kv: KvSockets) -> None:
        self._engine = engine
        self._kv = kv
        self.outputs: dict[str, list[int]] = {}

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        """Send a request."""
        done = await self._engine.complete(request)
        self.outputs[request.id] = done.token_ids
        if done.result.outcome.status == "completed":
            with trio.fail_after(30.0):
                await self._settle()
        return done.result

    async def _settle(self) -> None:
        found_nothing = 0
        while found_nothing < 2:
            asked = self._engine.follower.next_seq or 0
            answer = await self._kv.replay(asked, 5.0)
            assert answer is not None, "the server does not replay its events"
            found_nothing = 0 if answer else found_nothing + 1
            expected = asked + len(answer)
            # Nobody tells of each batch, so this looks again.
            while (self._engine.follower.next_seq or 0) < expected:  # noqa: ASYNC110
                await trio.sleep(0.005)


@asynccontextmanager
async def under_test(
    url: str,
    kv_events: str,
    kv_replay: str,
    *,
    block_size: int,
    long_output_tokens: int,
    crash: Callable[[], None] | None = None,
    patience_s: float = 60.0,
) -> AsyncIterator[EngineUnderTest]:
    """A server that is empty, attached, for the rules of conformance."""
    async with (
        attached(
            url,
            kv_events=kv_events,
            kv_replay=kv_replay,
            prompt_of=prompt_of,
            hash_seed="0",
            poll_s=0.1,
        ) as engine,
        connect(kv_events, kv_replay) as kv,
    ):
        client = SettledClient(engine, kv)
        yield EngineUnderTest(
            name="attached",
            backend=engine,
            client=client,
            make_request=partial(make_request, block_size),
            long_output_tokens=long_output_tokens,
            output_of=lambda request, result: client.outputs[request.id],
            quiet_s=0.3,
            patience_s=patience_s,
            crash=crash,
        )
