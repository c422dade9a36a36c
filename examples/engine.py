"""An engine of one's own: one request at a time, as they come. It offers no controls."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from hear import InferenceRequest, InferenceResult, Key
from hear.engines.testing import EngineUnderTest, check_engine
from hear.interfaces import ApplyResult, Report
from hear.messages import (
    BlocksStored,
    CapabilitiesReported,
    CostsReported,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestOutcome,
    RunningRequest,
    WaitingRequest,
)
from hear.operation import Operation

TOKENS_PER_S = 1_000.0


class OneAtATime:
    def __init__(self) -> None:
        self._turn = trio.Lock()  # whoever has waited longest gets it
        self._waiting: dict[tuple[str, str], WaitingRequest] = {}
        self._running: dict[tuple[str, str], RunningRequest] = {}
        self._report: Callable[[Report], None] = lambda report: None

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        """The data path: it works whether anybody listens to the reports or not."""
        id, tenant, tokens = request.id, request.tenant, request.prompt_tokens
        key = Key(request=id, context=request.context, context_version=request.context_version)
        sent = started = first = trio.current_time()
        waiting = WaitingRequest(request=id, since_s=sent, prompt_tokens=tokens)
        self._waiting[tenant, id] = waiting
        accepted = [(key, RequestOutcome(status="accepted", prompt_tokens=tokens))]
        queue = QueueChanged(waiting=(waiting,))
        self._report(Report(arrived=[key], requests=accepted, queue=queue, tenant=tenant))
        outcome = RequestOutcome(status="failed", reason="client_gone")
        try:
            async with self._turn:
                started = trio.current_time()
                del self._waiting[tenant, id]
                self._running[tenant, id] = RunningRequest(request=id, prompt_tokens=tokens)
                self._report(Report(queue=QueueChanged(started=(id,)), tenant=tenant))
                await trio.sleep(tokens / TOKENS_PER_S)
                first = trio.current_time()
                await trio.sleep(request.output_tokens / TOKENS_PER_S)
                output = request.output_tokens
                outcome = RequestOutcome(
                    status="completed", prompt_tokens=tokens, output_tokens=output, mode="dense"
                )
        finally:
            self._waiting.pop((tenant, id), None)
            self._running.pop((tenant, id), None)
            queue = QueueChanged(ended=(id,))
            self._report(Report(queue=queue, requests=[(key, outcome)], tenant=tenant))
        return InferenceResult(outcome, sent, started, first, trio.current_time())

    async def run(self, report: Callable[[Report], None]) -> None:
        self._report = report
        await trio.sleep_forever()

    def queue(self, tenant: str = "default") -> QueueSnapshot:
        return QueueSnapshot(
            waiting=tuple(w for (owner, _), w in self._waiting.items() if owner == tenant),
            running=tuple(r for (owner, _), r in self._running.items() if owner == tenant),
        )

    def capabilities(self) -> CapabilitiesReported:
        return CapabilitiesReported(model="nothing", modes=("dense",), max_num_seqs=1)

    def costs(self) -> CostsReported:
        return CostsReported(
            basis="estimated",
            prefill_tokens_per_s=TOKENS_PER_S,
            decode_step_s=1 / TOKENS_PER_S,
            kv_bytes_per_token=0.0,
        )

    def pressure(self) -> PressureReported:
        return PressureReported(num_running=len(self._running), num_waiting=len(self._waiting))

    def residency(self, tenant: str = "default") -> list[BlocksStored]:
        return []

    def residency_known(self) -> bool:
        return True

    def apply(self, operation: Operation) -> ApplyResult:
        return ApplyResult("completed")  # a Cancel or a Withdraw, of which there is nothing to end

    def expect(self, operation: Operation) -> None: ...

    def revert(self, operation: Operation) -> None: ...


# -- through the checks that ship with HEAR, in virtual time --------------------------------------


def make_request(id: str, *, context: str, num_blocks: int, output_tokens: int) -> InferenceRequest:
    return InferenceRequest(id, 16 * num_blocks + 1, output_tokens, [], context=context)


@asynccontextmanager
async def under_test() -> AsyncIterator[EngineUnderTest]:
    engine = OneAtATime()
    yield EngineUnderTest(
        name="one-at-a-time",
        backend=engine,
        client=engine,
        make_request=make_request,
        long_output_tokens=50_000,
        shows=frozenset({"queue"}),
    )


if __name__ == "__main__":
    with capture_logs():  # of engines that lose their bus, say
        results = trio.run(check_engine, under_test, clock=MockClock(autojump_threshold=0))
    print(", ".join(f"{count} rules {how}" for how, count in Counter(results.values()).items()))
