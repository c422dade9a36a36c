"""Attached servers, real ones and stand-ins, for the rules of conformance."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio

from hear.engines.testing import EngineUnderTest
from hear.engines.vllm.attach.backend import AttachedEngine, attached
from hear.engines.vllm.attach.kv_sockets import KvSockets, connect
from hear.interfaces import InferenceRequest, InferenceResult
from hear.operation import Ref
from tests.engines.vllm.requests import make_request, of_tenant


class SettledClient:
    """Sends requests, and tells of their end when what they stored is known to the backend.

    A server publishes its events beside its answers, so one may be here before the other. It looks
    for a question before each batch that it publishes, so when two questions in a row find nothing
    new, all that was to be published at the first of them has been.
    """

    def __init__(self, engine: AttachedEngine, kv: KvSockets) -> None:
        self._engine = engine
        self._kv = kv
        self.outputs: dict[Ref, list[int]] = {}

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        """Send a request."""
        done = await self._engine.complete(request)
        self.outputs[request.tenant, request.id] = done.token_ids
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
            sends=True,
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
            of_tenant=partial(of_tenant, block_size),
            long_output_tokens=long_output_tokens,
            output_of=lambda request, result: client.outputs[request.tenant, request.id],
            quiet_s=0.3,
            patience_s=patience_s,
            crash=crash,
        )
