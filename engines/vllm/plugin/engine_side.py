"""HEAR inside vLLM's engine: what its scheduler is asked and tells.

``scheduler.py`` calls this where something happens; it keeps how each request stands, carries out
what HEAR's thread commands, and hands over what happened. It runs under the scheduler lock, on the
engine's thread or, while a step computes, on HEAR's (``bridge``). What is urgent (outcomes,
arrivals, moves of the queue) goes at once, blocks are told in batches.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import structlog
from vllm.distributed.kv_events import KVEventBatch

from hear.engines.vllm.hashing import low64
from hear.engines.vllm.holdings import CPU, GPU
from hear.engines.vllm.identity import key_of, salt_of, tenant_of, unusable
from hear.engines.vllm.plugin.bridge import Bridge, EngineEvents, Gauges, RequestUpdate, StepTimings
from hear.engines.vllm.plugin.controls import Controls
from hear.engines.vllm.plugin.settings import Settings
from hear.engines.vllm.plugin.standing import Standing
from hear.engines.vllm.upstream_hints import Ride
from hear.interfaces import ApplyResult
from hear.messages import Key, RequestOutcome
from hear.operation import Operation, Ref

_log = structlog.get_logger("hear.vllm")

BLOCKS_INTERVAL_S: Final = 0.05
"""How long changes of residency may wait for others, while the engine is busy."""

EXPECTED: Final = 65_536
"""Requests that have not come and for which controls are kept, that are remembered here."""

MODE: Final = "dense"

FAILURES: Final = {
    "FINISHED_ABORTED": "client_gone",
    "FINISHED_ERROR": "engine_error",
    "FINISHED_IGNORED": "too_long",
}
"""Reason codes of requests that vLLM has ended otherwise than by serving them, by its status."""


class Plugin:
    """What HEAR knows and does in one engine. ``scheduler`` is vLLM's."""

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        self.bridge = Bridge()
        self._scheduler = scheduler
        self._preparing: Ref | None = None
        self._expected: OrderedDict[Ref, bool] = OrderedDict()
        self._by_id: dict[str, Standing] = {}
        self._by_name: dict[Ref, Standing] = {}
        self._prefilling: dict[str, Standing] = {}
        self._moved: dict[str, Standing] = {}
        self._engine_events = EngineEvents()
        self._said_unusable: set[str] = set()
        self._urgent = False
        self._told_s = 0.0
        self._timer_told: float | None = None
        self._restored_tokens = 0
        self._preemptions = 0
        self._step_timings = [0, 0.0, 0, 0.0]
        self._step_began_s = 0.0
        self._max_lease_s = settings.max_lease_s
        self.controls = Controls(
            scheduler,
            name=settings.name,
            max_lease_s=settings.max_lease_s,
            retention_decay_s=settings.retention_decay_s,
            find=self._find,
            moved=self._has_moved,
            submit=self._submit,
            sync=self._sync,
        )

    # -- requests -----------------------------------------------------------------------------

    def arriving(self, request: Any) -> None:
        """vLLM is about to take in a new request, whose blocks it must not mix with others'."""
        if self._preparing is not None:
            return
        tenant = tenant_of(_extra_args(request))
        salt = salt_of(tenant, request.cache_salt)
        if salt != request.cache_salt:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()

    def added(self, request: Any) -> None:
        """vLLM has a new request."""
        self.turn()  # what was said before it came holds for it
        prepare = self._preparing
        args = _extra_args(request)
        key, tenant = key_of(args, request.request_id), tenant_of(args)
        for field in unusable(args):
            if field not in self._said_unusable:
                self._said_unusable.add(field)
                _log.warning(
                    "request.field_unusable",
                    field=field,
                    got=f"{args[field]!r:.80}",
                    effect="left out, as if it had not been there; said once of a field",
                )
        assert key.request is not None
        if (tenant, key.request) in self._by_name:
            # One of several samples of a prompt, or a name that its client uses twice.
            key = key_of({**args, "hear_request": None} if args else None, request.request_id)
        standing = Standing(request, key, tenant, time.monotonic())
        standing.prepare = prepare
        self._by_id[request.request_id] = standing
        if prepare is None:
            self._by_name[tenant, key.request or ""] = standing
            self._engine_events.arrived.append((key, tenant))
            accepted = RequestOutcome(status="accepted", prompt_tokens=request.num_prompt_tokens)
            self._engine_events.outcomes.append((key, tenant, accepted))
            self.controls.arrived(standing, standing.since_s)
            if request.kv_hints is not None:
                self._engine_events.hints.append(
                    (tenant, self._ride(request, key), request.kv_hints)
                )
            self.controls.placement.hasher = request._block_hasher
            if self._expected.pop((tenant, key.request or ""), False):
                self.controls.queue.await_answer(standing)
                self._engine_events.awaiting.append((tenant, key.request or ""))
        self._has_moved(standing)

    def preempted(self, request: Any) -> None:
        """vLLM has put a running request back into its queue."""
        standing = self._by_id.get(request.request_id)
        self._preemptions += 1
        if standing is not None:
            standing.state = "waiting"
            self.controls.queue.preempted(standing)
            self._has_moved(standing)

    def freed(self, request: Any) -> None:
        """A request has ended, in whatever way."""
        standing = self._by_id.pop(request.request_id, None)
        self._prefilling.pop(request.request_id, None)
        if standing is None:
            return
        standing.state = "ended"
        if standing.prepare is not None:
            self.controls.placement.prefilled(standing)
            return
        self._by_name.pop((standing.tenant, standing.key.request or ""), None)
        self._has_moved(standing)
        failure = FAILURES.get(request.status.name, "")
        self.controls.left(standing, time.monotonic(), completed=not failure)
        self._engine_events.outcomes.append(
            (standing.key, standing.tenant, self._outcome(standing, failure))
        )
        self._urgent = True

    @staticmethod
    def _outcome(standing: Standing, failure: str) -> RequestOutcome:
        now, request = time.monotonic(), standing.request
        started = now if standing.started_s is None else standing.started_s
        first = now if standing.first_token_s is None else standing.first_token_s
        return RequestOutcome(
            status="failed" if failure else "completed",
            reason=failure,
            mode=MODE,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            reused_tokens={tier: n for tier, n in standing.reused.items() if n},
            queue_s=max(started - standing.since_s, 0.0),
            prefill_s=max(first - started, 0.0),
            decode_s=max(now - first, 0.0),
            preemptions=request.num_preemptions,
        )

    # -- steps --------------------------------------------------------------------------------

    def before_step(self) -> None:
        """vLLM is about to schedule. If it has to preempt, it takes the last that runs."""
        self.turn()
        self.controls.before_step()
        running = self._scheduler.running
        if any([request.priority for request in running]):
            running.sort(key=_importance)
        self._step_began_s = time.monotonic()

    def scheduled(self, output: Any) -> None:
        """vLLM has scheduled a step."""
        if output.total_num_scheduled_tokens:
            self.controls.scheduled()
        for started in output.scheduled_new_reqs:
            self._started(started.req_id)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._started(request_id)
        if self._moved:
            self._tell(time.monotonic())  # now, and not when the step has been computed

    def _started(self, request_id: str) -> None:
        standing = self._by_id.get(request_id)
        if standing is None:
            return
        standing.state = "running"
        if standing.started_s is None:
            standing.started_s = time.monotonic()
            stats = standing.request.prefill_stats
            if stats is not None:
                standing.reused = {
                    GPU: stats.num_local_cached_tokens,
                    CPU: stats.num_external_cached_tokens,
                }
                self._restored_tokens += stats.num_external_cached_tokens
        if standing.first_token_s is None:
            self._prefilling[request_id] = standing
        self.controls.queue.started(standing)
        self._has_moved(standing)

    def stepped(self, output: Any) -> None:
        """The output of a step has been taken in."""
        now = time.monotonic()
        if output.total_num_scheduled_tokens:
            self.controls.stepped()
            self._count_step(output, now - self._step_began_s)
        if self._prefilling:
            for request_id, standing in list(self._prefilling.items()):
                if standing.request.num_output_tokens:
                    standing.first_token_s = now
                    del self._prefilling[request_id]
        self.controls.look()
        self._tell(now)

    def _count_step(self, output: Any, seconds: float) -> None:
        tokens, requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        if tokens == requests:
            self._step_timings[0] += 1
            self._step_timings[1] += seconds
        else:
            self._step_timings[2] += tokens
            self._step_timings[3] += seconds

    def kv_events(self, events: Sequence[Any]) -> None:
        """vLLM's caches have changed."""
        self._engine_events.kv_events.extend(events)
        self.controls.kv_events(events)

    def _sync(self) -> None:
        """Hear of what has just changed; vLLM itself tells only after a step."""
        scheduler = self._scheduler
        events = list(scheduler.kv_cache_manager.take_events() or ())
        if scheduler.connector is not None:
            events += scheduler.connector.take_events()
        if events:
            scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))

    # -- commands, timers, engine events ----------------------------------------------------------

    def turn(self) -> None:
        """Carry out what was commanded and what is due; cheap if there is nothing."""
        if self.bridge.has_commands:
            self._carry_out()
        timer = self.controls.next_timer()
        if timer is not None:
            now = time.monotonic()
            if timer <= now:
                self.controls.tick(now)

    def idle(self) -> None:
        """The engine has nothing to do: whatever has not been told is told now."""
        self.controls.look()
        self._tell(time.monotonic(), at_once=True)

    def _carry_out(self) -> None:
        while (command := self.bridge.next_command()) is not None:
            kind, operation, name = command
            if kind == "expect":
                self._expected[name] = True
                if len(self._expected) > EXPECTED:
                    self._expected.popitem(last=False)
            elif kind == "answered":
                if (standing := self._by_name.get(name)) is not None:
                    self.controls.queue.answered(standing)
            elif kind == "revert":
                assert operation is not None
                self.controls.revert(operation)
            else:
                assert operation is not None
                self._engine_events.results.append((operation.ref, self._apply(operation)))
                self._urgent = True
        self._tell(time.monotonic())

    def _apply(self, operation: Operation) -> ApplyResult:
        try:
            return self.controls.apply(operation, time.monotonic())
        except Exception as error:  # a fault of ours must not take the engine down
            return ApplyResult("failed", "engine_error", f"{type(error).__name__}: {error}")

    def _tell(self, now: float, *, at_once: bool = False) -> None:
        engine_events = self._engine_events
        ended, self.controls.ended = self.controls.ended, []
        engine_events.operations += ended
        timer = self.controls.next_timer()
        if not (self._urgent or self._moved or ended or timer != self._timer_told):
            if not engine_events.kv_events:
                return
            if not at_once and now - self._told_s < BLOCKS_INTERVAL_S:
                return
        moved, self._moved = self._moved, {}
        engine_events.updates = [self._as_update(s) for s in moved.values() if s.prepare is None]
        pool = self._scheduler.kv_cache_manager.block_pool
        engine_events.gauges = Gauges(
            free=pool.get_num_free_blocks(),
            cached=len(pool.cached_block_hash_to_block),
            restored_tokens=self._restored_tokens,
            preemptions=self._preemptions,
        )
        engine_events.step_timings = StepTimings(*self._step_timings)  # type: ignore[arg-type]
        engine_events.timer_s = self._timer_told = timer
        self._engine_events = EngineEvents()
        self._urgent = False
        self._told_s = now
        self.bridge.tell(engine_events)

    # -- pieces -------------------------------------------------------------------------------

    def _find(self, operation: Operation) -> Standing | None:
        return self._by_name.get(operation.request_ref)

    def _has_moved(self, standing: Standing) -> None:
        self._moved[standing.request.request_id] = standing

    def _submit(self, request: Any, operation: Ref) -> None:
        """Hand vLLM a request of the engine's own."""
        self._preparing = operation
        try:
            self._scheduler.add_request(request)
        finally:
            self._preparing = None

    def _ride(self, request: Any, key: Key) -> Ride:
        """What hints need to know of the request that they ride on."""
        return Ride(
            key=key,
            blocks=[low64(block) for block in request.block_hashes],
            block_size=self._scheduler.hash_block_size,
            max_lease_s=self._max_lease_s,
        )

    @staticmethod
    def _as_update(standing: Standing) -> RequestUpdate:
        request = standing.request
        return RequestUpdate(
            key=standing.key,
            tenant=standing.tenant,
            state=standing.state,
            since_s=standing.since_s,
            priority=standing.priority,
            protected=standing.protected,
            held=standing.held_until is not None,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
        )


def _extra_args(request: Any) -> Any:
    """What its client has said of a request beyond what vLLM knows of."""
    params = request.sampling_params
    return params.extra_args if params is not None else None


def _importance(request: Any) -> tuple[int, float]:
    """What vLLM's priority scheduling goes by when it preempts; the greatest is preempted first."""
    return request.priority, request.arrival_time
