"""What each control does to the simulated engine.

One method a kind of control; each says at once how it went, or that the effect is under way.
``SimulatedEngine`` owns the state; this module changes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hear.blocks import unpack
from hear.engines.simulated.kv_cache import CPU, GPU, KvCache
from hear.engines.simulated.leases import Lease, LeaseBook
from hear.engines.simulated.profile import Scheduler as Limits
from hear.engines.simulated.request import BACKGROUND_PRIORITY, SimRequest
from hear.engines.simulated.scheduler import Scheduler
from hear.messages import (
    Admit,
    BoundWait,
    Configure,
    Control,
    Hold,
    OperationOutcome,
    Place,
    Prepare,
    Prioritise,
    Release,
    Retain,
    Route,
)
from hear.operation import Operation
from hear.seams import InferenceRequest, OperationEnded, Verdict

MODES = ("dense",)
DONE = Verdict("completed")


@dataclass(slots=True)
class ServedContext:
    """The blocks that a context was last served with, and when that was."""

    blocks: Sequence[int]
    idle_since: float


@dataclass(slots=True)
class _Copying:
    """A copy to the CPU that an operation waits for; ``demote`` then frees the GPU."""

    missing: set[int]
    blocks: Sequence[int] = field(default_factory=tuple)
    demote: bool = False


class Controls:
    """Applies controls to the parts of one engine."""

    def __init__(
        self,
        *,
        name: str,
        limits: Limits,
        scheduler: Scheduler,
        cache: KvCache,
        leases: LeaseBook,
        requests: dict[str, SimRequest],
        contexts: dict[str, ServedContext],
        submit: Callable[[InferenceRequest], SimRequest],
        block_size: int,
    ) -> None:
        self._name = name
        self._limits = limits
        self._scheduler = scheduler
        self._cache = cache
        self._leases = leases
        self._requests = requests
        self._contexts = contexts
        self._submit = submit
        self._block_size = block_size
        self._copying: dict[str, _Copying] = {}
        self._preparing: dict[str, SimRequest] = {}
        self._fallbacks: dict[str, str] = {}
        self.ended: list[OperationEnded] = []
        self._handlers: dict[type[Control], Callable[[Operation, float], Verdict]] = {
            Prioritise: self._prioritise,
            BoundWait: self._bound_wait,
            Retain: self._retain,
            Release: self._release,
            Prepare: self._prepare,
            Place: self._place,
            Hold: self._hold,
            Admit: self._admit,
            Route: self._route,
            Configure: self._configure,
        }

    def supported(self) -> tuple[str, ...]:
        """The kinds of control that this engine carries out."""
        kinds = [str(kind.__struct_config__.tag) for kind in self._handlers]
        if self._limits.order == "fcfs":
            kinds.remove("prioritise")
        return tuple(kinds)

    def apply(self, operation: Operation, now: float) -> Verdict:
        """Carry out a control, or begin to."""
        verdict = self._handlers[type(operation.control)](operation, now)
        if verdict.status == "accepted" and verdict.fallback is not None:
            self._fallbacks[operation.id] = verdict.fallback
        return verdict

    # -- order, waiting, admission ------------------------------------------------------------

    def _waiting(self, operation: Operation) -> SimRequest | Verdict:
        request = self._requests.get(operation.key.request or "")
        if request is None:
            return Verdict("failed", "request_gone")
        if request not in self._scheduler.waiting:
            return Verdict("rejected", "already_running")
        return request

    def _moved(self, request: SimRequest) -> None:
        self._scheduler.moved[request.id] = request

    def _prioritise(self, operation: Operation, now: float) -> Verdict:
        control, request = operation.control, self._waiting(operation)
        assert isinstance(control, Prioritise)
        if isinstance(request, Verdict):
            return request
        request.priority = control.priority
        self._scheduler.waiting.add(request)
        self._moved(request)
        return DONE

    def _bound_wait(self, operation: Operation, now: float) -> Verdict:
        control, request = operation.control, self._waiting(operation)
        assert isinstance(control, BoundWait)
        if isinstance(request, Verdict):
            return request
        self._scheduler.waiting.bound(request, control.max_wait_s)
        request.guard = operation.id
        self._moved(request)
        return Verdict("accepted", standing=True)

    def _hold(self, operation: Operation, now: float) -> Verdict:
        control, request = operation.control, self._waiting(operation)
        assert isinstance(control, Hold)
        if isinstance(request, Verdict):
            return request
        if request.protected:
            return Verdict("rejected", "outranked", "the request has waited out its bound")
        self._scheduler.waiting.hold(request, now + control.hold_s)
        self._moved(request)
        return DONE

    def _admit(self, operation: Operation, now: float) -> Verdict:
        request = self._requests.get(operation.key.request or "")
        if request is None:
            return Verdict("failed", "request_gone")
        if request.held_until is not None:
            self._scheduler.waiting.admit(request)
            self._moved(request)
        return DONE

    # -- retention ----------------------------------------------------------------------------

    def _blocks_of(self, operation: Operation) -> Sequence[int] | None:
        """The blocks that a control is about: those it names, or what its context was served."""
        control = operation.control
        assert isinstance(control, Retain | Prepare | Place)
        if control.prefix_hashes:
            return unpack(control.prefix_hashes)
        served = self._contexts.get(operation.key.context or "")
        return None if served is None else served.blocks

    def _retain(self, operation: Operation, now: float) -> Verdict:
        control, context = operation.control, operation.key.context
        assert isinstance(control, Retain)
        assert context is not None
        if control.lease_s > self._limits.max_lease_s:
            most = self._limits.max_lease_s
            return Verdict("rejected", "lease_too_long", f"{control.lease_s} s, at most {most} s")
        fallback = None
        if control.force == "requirement":
            # Leases yield to service, so a requirement to keep could only be promised falsely.
            if "preference" not in control.fallback:
                return Verdict("rejected", "cannot_promise", "leases yield under pressure")
            fallback = "preference"
        blocks = self._blocks_of(operation)
        if blocks is None:
            return Verdict("rejected", "unknown_context", context)
        served = self._contexts.get(context)
        lease = Lease(
            operation.id,
            context,
            control.score,
            now + control.lease_s,
            blocks,
            now if served is None else served.idle_since,
        )
        self._leases.put(lease)
        self._cache.rerank(blocks)
        return Verdict("accepted", standing=True, fallback=fallback)

    def _release(self, operation: Operation, now: float) -> Verdict:
        context = operation.key.context
        served = self._contexts.get(context or "")
        lease = self._leases.get(context)
        if lease is not None:  # the one who asked for it is told by arbitration, or here
            self.end_lease(lease, "completed", "released")
        elif served is None:
            return Verdict("rejected", "unknown_context", context or "")
        if served is not None:
            self._cache.rerank(reversed(served.blocks))
        return DONE

    def end_lease(self, lease: Lease, status: str, reason: str, detail: str = "") -> None:
        """A lease is over, and its blocks go back in line."""
        self._cache.rerank(self._leases.drop(lease))
        self._end(lease.operation, status, reason, detail)

    # -- placement ----------------------------------------------------------------------------

    def _tier(self, control: Prepare | Place) -> tuple[str, str | None] | None:
        """The tier to use, and the fallback's name if it is not the one that was asked for."""
        have = [GPU, CPU] if self._cache.num_cpu_blocks else [GPU]
        if control.tier in have:
            return control.tier, None
        return next(((tier, tier) for tier in control.fallback if tier in have), None)

    def _prepare(self, operation: Operation, now: float) -> Verdict:
        control = operation.control
        assert isinstance(control, Prepare)
        return self._bring(operation, control, compute=control.compute, demote=False, now=now)

    def _place(self, operation: Operation, now: float) -> Verdict:
        control = operation.control
        assert isinstance(control, Place)
        return self._bring(operation, control, compute=False, demote=True, now=now)

    def _bring(
        self,
        operation: Operation,
        control: Prepare | Place,
        *,
        compute: bool,
        demote: bool,
        now: float,
    ) -> Verdict:
        chosen = self._tier(control)
        if chosen is None:
            return Verdict("rejected", "unknown_tier", control.tier)
        tier, fallback = chosen
        blocks = self._blocks_of(operation)
        if blocks is None:
            return Verdict("rejected", "unknown_context", operation.key.context or "")
        cache = self._cache
        lost = sum(1 for b in blocks if not (cache.on_gpu(b) or cache.on_cpu(b)))
        if lost and not compute:
            return Verdict("rejected", "not_resident", f"{lost} of {len(blocks)} blocks")
        if len(blocks) > (cache.num_gpu_blocks if tier == GPU else cache.num_cpu_blocks):
            return Verdict("rejected", "no_room", f"{len(blocks)} blocks")
        if tier == GPU or lost:
            if not all(cache.on_gpu(b) for b in blocks):
                self._prefill(operation, blocks)
                return Verdict("accepted", fallback=fallback)
            return Verdict("completed", fallback=fallback)
        missing = {b for b in blocks if not cache.on_cpu(b)}
        if demote and any(cache.in_use(b) for b in blocks):
            return Verdict("rejected", "in_use", "a request runs on these blocks")
        if missing and not demote and not cache.inclusive:
            return Verdict("rejected", "exclusive_tier", "it holds no copies of what the GPU holds")
        for block in reversed(blocks):
            if demote and not cache.inclusive and cache.on_gpu(block):
                cache.demote(block, now)
            elif block in missing:
                cache.store(block, now)
        job = _Copying(missing, blocks, demote)
        if missing:
            self._copying[operation.id] = job
            return Verdict("accepted", fallback=fallback)
        self._copied(job, now)
        return Verdict("completed", fallback=fallback)

    def _prefill(self, operation: Operation, blocks: Sequence[int]) -> None:
        request = self._submit(
            InferenceRequest(
                id=f"prepare:{operation.id}",
                prompt_tokens=len(blocks) * self._block_size,
                output_tokens=0,
                prompt_hashes=blocks,
            )
        )
        request.prepare = operation.id
        request.priority = BACKGROUND_PRIORITY
        self._scheduler.waiting.add(request)
        self._preparing[operation.id] = request

    def _copied(self, job: _Copying, now: float) -> None:
        if job.demote:
            for block in reversed(job.blocks):
                if self._cache.on_gpu(block) and not self._cache.in_use(block):
                    self._cache.drop_gpu(block, now)

    # -- configuration ------------------------------------------------------------------------

    def _route(self, operation: Operation, now: float) -> Verdict:
        control = operation.control
        assert isinstance(control, Route)
        if self._name in control.targets:
            return DONE
        if self._name in control.fallback:
            return Verdict("completed", fallback=self._name)
        return Verdict("rejected", "not_this_engine", f"this is {self._name}")

    def _configure(self, operation: Operation, now: float) -> Verdict:
        control = operation.control
        assert isinstance(control, Configure)
        for mode in (*control.modes, *control.fallback):
            if mode in MODES:
                request = self._requests.get(operation.key.request or "")
                if request is not None:
                    request.mode = mode
                return Verdict("completed", fallback=None if mode in control.modes else mode)
        return Verdict("rejected", "unknown_mode", f"this engine has {', '.join(MODES)}")

    # -- ends ---------------------------------------------------------------------------------

    def revert(self, operation: Operation, now: float) -> None:
        """End what an operation still effects, without saying so."""
        control = operation.control
        request = self._requests.get(operation.key.request or "")
        self._fallbacks.pop(operation.id, None)
        if isinstance(control, Retain):
            lease = self._leases.get(operation.key.context)
            if lease is not None and lease.operation == operation.id:
                self._cache.rerank(self._leases.drop(lease))
        elif isinstance(control, Prepare | Place):
            self._copying.pop(operation.id, None)
            prefill = self._preparing.pop(operation.id, None)
            if prefill is not None:
                self._scheduler.leave(prefill, now)
                self._requests.pop(prefill.id, None)
        elif request is not None:
            if isinstance(control, Prioritise):
                request.priority = 0
            elif isinstance(control, BoundWait):
                self._scheduler.waiting.bound(request, None)
            elif isinstance(control, Hold):
                self._scheduler.waiting.admit(request)
            elif isinstance(control, Configure):
                request.mode = MODES[0]
            if request in self._scheduler.waiting:
                self._scheduler.waiting.add(request)
                self._moved(request)

    def started(self, request: SimRequest) -> None:
        """A request has left the queue: its bound on waiting was kept."""
        if request.guard is not None:
            self._end(request.guard, "completed", "protected" if request.protected else "")
            request.guard = None

    def prepared(self, request: SimRequest) -> None:
        """A prefill of Prepare or Place is done."""
        assert request.prepare is not None
        if self._preparing.pop(request.prepare, None) is not None:
            self._end(request.prepare, "completed")

    def arrived_on_cpu(self, blocks: Sequence[int], now: float) -> None:
        """Copies have arrived on the CPU."""
        for operation, job in list(self._copying.items()):
            job.missing.difference_update(blocks)
            if not job.missing:
                del self._copying[operation]
                self._copied(job, now)
                self._end(operation, "completed")

    def lost(self, block: int) -> None:
        """A block has left its last tier; the leases on it have yielded."""
        for lease in self._leases.of_block(block):
            self.end_lease(lease, "failed", "yielded", "service needed the room")

    def _end(self, operation: str, status: str, reason: str = "", detail: str = "") -> None:
        outcome = OperationOutcome(
            status="completed" if status == "completed" else "failed",
            reason=reason,
            detail=detail,
            fallback=self._fallbacks.pop(operation, None),
        )
        self.ended.append(OperationEnded(operation, outcome))
