"""Real vLLM in the process of the tests: one engine core with a thread of its own.

Loading takes seconds, so one core serves a whole module; each test gets a new scheduler, with
nothing in its queues and caches, which is all of an engine that HEAR sees.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import trio

from hear.engines.vllm.identity import extra_args_of
from hear.engines.vllm.launch.model import make_model
from hear.interfaces import InferenceRequest, InferenceResult
from hear.messages import Key, RequestOutcome
from tests.engines.vllm.real import ENVIRONMENT

BLOCK_SIZE = 32


def start_core(folder: Path, **options: Any) -> "EngineCoreThread":
    """Load a small model into an engine core with HEAR's scheduler in it."""
    os.environ.update(ENVIRONMENT)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    make_model(folder)
    given: dict[str, Any] = {
        "model": str(folder),
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 2048,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 65,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 2048,
        "prefix_caching_hash_algo": "sha256_cbor",
        "scheduler_cls": "hear.engines.vllm.plugin.scheduler.HearScheduler",
        "additional_config": {"hear": {"name": "vllm0", "bus": "memory"}},
        **options,
    }
    config = EngineArgs(**given).create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    return EngineCoreThread(core)


class EngineCoreThread:
    """Runs an engine core as vLLM's own process does: sleeps on its input, steps while it can."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self._input: queue.Queue[Callable[[], None]] = queue.Queue()
        self._outputs: dict[str, Callable[[Any], None]] = {}
        self._ended = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._renew()
        self._thread.start()

    @property
    def scheduler(self) -> Any:
        """The scheduler of now."""
        return self.core.scheduler

    def close(self) -> None:
        """End the thread, and unload the model."""
        with suppress(RuntimeError):
            self.call(lambda: setattr(self, "_ended", True))
            self._thread.join(10)
        self.core.shutdown()

    def call(self, function: Callable[[], Any]) -> Any:
        """Have something done on the engine's thread, between steps; waits for it."""
        done: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

        def run() -> None:
            try:
                done.put((function(), None))
            except BaseException as error:
                done.put((None, error))

        self._input.put(run)
        for _ in range(600):
            if self.failure is not None:
                raise RuntimeError("the engine's thread has failed") from self.failure
            with suppress(queue.Empty):
                result, error = done.get(timeout=0.1)
                break
        else:
            raise TimeoutError("the engine's thread does not come round")
        if error is not None:
            raise error
        return result

    def post(self, function: Callable[[], None]) -> None:
        """Have something done on the engine's thread; waits for nothing."""
        self._input.put(function)

    def renew(self) -> None:
        """Put a new scheduler in the place of the old one, which must have no requests left."""
        self.call(self._renew)

    def _renew(self) -> None:
        core, old = self.core, self.core.scheduler
        for request in list(old.requests.values()):
            self._abort(request.request_id)
        while old.has_requests():
            core.step_fn()
        old.shutdown()
        core.scheduler = type(old)(
            vllm_config=core.vllm_config,
            kv_cache_config=old.kv_cache_config,
            structured_output_manager=core.structured_output_manager,
            include_finished_set=False,
            log_stats=False,
            block_size=old.block_size,
            hash_block_size=old.hash_block_size,
        )
        core.scheduler.hear.bridge.wake_engine = lambda: self._input.put(lambda: None)
        self._outputs.clear()

    def _abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.core.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def add(self, request: Any, receive: Callable[[Any], None]) -> None:
        """Hand a request to the engine; ``receive`` gets its outputs on the engine's thread."""

        def add() -> None:
            self._outputs[request.request_id] = receive
            made, wave = self.core.preprocess_add_request(request)
            self.core.add_request(made, wave)

        self.post(add)

    def abort(self, request_id: str) -> None:
        """Its client has gone."""

        def abort() -> None:
            self._outputs.pop(request_id, None)
            self._abort(request_id)

        self.post(abort)

    def _loop(self) -> None:
        try:
            while not self._ended:
                has_work = self.core.scheduler.has_requests()
                try:
                    while True:
                        self._input.get(block=not has_work)()
                        has_work = True
                except queue.Empty:
                    pass
                outputs, executed = self.core.step_fn()
                self.core.post_step(executed)
                for batch in (outputs or {}).values():
                    for output in batch.outputs:
                        receive = self._outputs.get(output.request_id)
                        if receive is not None:
                            receive(output)
        except BaseException as error:
            self.failure = error
            raise


class CoreClient:
    """The data path to an engine core: an ``InferenceClient``."""

    def __init__(self, thread: EngineCoreThread) -> None:
        self._thread = thread
        self._number = 0

    async def generate(self, request: InferenceRequest, *, kv_hints: Any = None) -> InferenceResult:
        """Serve one request; its prompt is the ids of its tokens. ``kv_hints`` ride on it."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._number += 1
        internal = f"{request.id}-{self._number}"
        key = Key(
            request=request.id, context=request.context, context_version=request.context_version
        )
        params = SamplingParams(
            max_tokens=request.output_tokens,
            temperature=0.0,
            ignore_eos=True,
            extra_args=extra_args_of(key, request.tenant),
        )
        made = EngineCoreRequest(
            request_id=internal,
            prompt_token_ids=list(request.prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            kv_hints=kv_hints,
        )
        token = trio.lowlevel.current_trio_token()
        engine_events, receiving = trio.open_memory_channel[Any](100_000)
        sent_s = trio.current_time()
        first_s: float | None = None
        tokens: list[int] = []
        reused: dict[str, int] = {}

        def receive(output: Any) -> None:
            with suppress(trio.RunFinishedError):  # the client has gone, and all of its test
                token.run_sync_soon(engine_events.send_nowait, output)

        self._thread.add(made, receive)
        finish = None
        try:
            while finish is None:
                output = await receiving.receive()
                if output.new_token_ids and first_s is None:
                    first_s = trio.current_time()
                tokens += output.new_token_ids
                if output.prefill_stats is not None:
                    stats = output.prefill_stats
                    both = (stats.num_local_cached_tokens, stats.num_external_cached_tokens)
                    reused = dict(zip(("gpu", "cpu"), both, strict=True))
                finish = output.finish_reason
        except trio.Cancelled:
            self._thread.abort(internal)
            raise
        now = trio.current_time()
        outcome = RequestOutcome(
            status="completed" if str(finish) in ("length", "stop") else "failed",
            reason="" if str(finish) in ("length", "stop") else str(finish),
            mode="dense",
            prompt_tokens=request.prompt_tokens,
            output_tokens=len(tokens),
            reused_tokens={tier: number for tier, number in reused.items() if number},
        )
        first_s = first_s or now
        return InferenceResult(outcome, sent_s, first_s, first_s, now, token_ids=tokens)


@contextmanager
def fresh(thread: EngineCoreThread) -> Iterator[tuple[Any, "CoreClient"]]:
    """A new engine on the thread, as a backend and its client."""
    thread.renew()
    yield thread.scheduler.hear_host.backend, CoreClient(thread)
