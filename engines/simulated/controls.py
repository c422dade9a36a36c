"""What each control does to the simulated engine.

One method a kind of control; each says at once how it went, or that the effect is under way.
``SimulatedEngine`` owns the state; this module changes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hear.blocks import unpack_prompt
from hear.engines.leases import Lease, LeaseBook
from hear.engines.simulated.kv_cache import KvCache
from hear.engines.simulated.placement import Placement
from hear.engines.simulated.profile import Scheduler as Limits
from hear.engines.simulated.reporting import MODES
from hear.engines.simulated.request import SimRequest
from hear.engines.simulated.scheduler import Scheduler
from hear.engines.simulated.tenants import Tenants, blocks_of
from hear.errors import EngineError, RemoteProtocolError
from hear.messages import (
    Admit,
    BoundWait,
    Cancel,
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
    Withdraw,
)
from hear.operation import Operation, Ref
from hear.seams import InferenceRequest, OperationEnded, Verdict

DONE = Verdict("completed")


@dataclass(slots=True)
class ServedContext:
    """The blocks that a context was last served with, and when that was."""

    blocks: Sequence[int]
    idle_since: float


class Controls:
    """Applies controls to the parts of one engine."""

    def __init__(
        self,
        *,
        name: str,
        limits: Limits,
        scheduler: Scheduler,
        cache: KvCache,
        leases: LeaseBook[Ref],
        requests: dict[Ref, SimRequest],
        contexts: dict[Ref, ServedContext],
        tenants: Tenants,
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
        self._tenants = tenants
        self.placement = Placement(
            scheduler=scheduler,
            cache=cache,
            requests=requests,
            submit=submit,
            block_size=block_size,
            end=self._end,
        )
        self._fallbacks: dict[Ref, str] = {}
        self.ended: list[tuple[str, OperationEnded]] = []  # by tenant
        self._handlers: dict[type[Control], Callable[[Operation, float], Verdict]] = {
            Prioritise: self._prioritise,
            BoundWait: self._bound_wait,
            Retain: self._retain,
            Release: self._release,
            Prepare: self._bring,
            Place: self._bring,
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
        if isinstance(operation.control, Cancel | Withdraw):
            return DONE  # what it ends was reverted before
        try:
            verdict = self._handlers[type(operation.control)](operation, now)
        except RemoteProtocolError as error:
            return Verdict("rejected", "malformed", str(error))
        if verdict.status == "accepted" and verdict.fallback is not None:
            self._fallbacks[operation.ref] = verdict.fallback
        return verdict

    # -- order, waiting, admission ------------------------------------------------------------

    def _request(self, operation: Operation) -> SimRequest | None:
        return self._requests.get(operation.request_ref)

    def _waiting(self, operation: Operation) -> SimRequest | Verdict:
        request = self._request(operation)
        if request is None:
            return Verdict("failed", "request_gone")
        if request not in self._scheduler.waiting:
            return Verdict("rejected", "already_running")
        return request

    def _moved(self, request: SimRequest) -> None:
        self._scheduler.moved[request.ref] = request

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
        required = control.force == "requirement"
        self._scheduler.waiting.bound(request, control.max_wait_s, required=required)
        request.guard = operation.ref
        self._moved(request)
        return Verdict("accepted", standing=True)

    def _hold(self, operation: Operation, now: float) -> Verdict:
        control, request = operation.control, self._waiting(operation)
        assert isinstance(control, Hold)
        if isinstance(request, Verdict):
            return request
        required = control.force == "requirement"
        if request.protected and (request.bound_required or not required):
            return Verdict("rejected", "outranked", "the request has waited out its bound")
        self._scheduler.waiting.hold(request, now + control.hold_s, required=required)
        self._moved(request)
        return DONE

    def _admit(self, operation: Operation, now: float) -> Verdict:
        request = self._request(operation)
        if request is None:
            return Verdict("failed", "request_gone")
        if request.held_until is not None:
            self._scheduler.waiting.admit(request)
            self._moved(request)
        return DONE

    # -- retention ----------------------------------------------------------------------------

    def _blocks_of(self, operation: Operation) -> Sequence[int] | None:
        """The blocks that a control is about: those it names, or what its context was served.

        Raises:
            RemoteProtocolError: what it names cannot be the blocks of one prompt.
            EngineError: this engine cannot tell one more tenant apart.
        """
        control = operation.control
        assert isinstance(control, Retain | Prepare | Place)
        if control.prefix_hashes:
            hashes = unpack_prompt(control.prefix_hashes)
            owner = self._tenants.number(operation.tenant)
            if owner is None:
                raise EngineError("this engine cannot tell one more tenant apart")
            return blocks_of(owner, hashes)
        served = self._contexts.get(operation.context_ref)
        return None if served is None else served.blocks

    def _retain(self, operation: Operation, now: float) -> Verdict:
        control = operation.control
        assert isinstance(control, Retain)
        context = operation.context_ref
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
            return Verdict("rejected", "unknown_context", context[1])
        served = self._contexts.get(context)
        if (former := self._leases.get(context)) is not None:  # of a worker that is gone
            self.end_lease(former, "completed", "renewed")
        lease = Lease(
            operation.ref,
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
        context = operation.context_ref
        served = self._contexts.get(context)
        lease = self._leases.get(context)
        if lease is not None:  # the one who asked for it is told by arbitration, or here
            self.end_lease(lease, "completed", "released")
        elif served is None:
            return Verdict("rejected", "unknown_context", context[1])
        if served is not None:
            self._cache.rerank(served.blocks)
        return DONE

    def end_lease(self, lease: Lease[Ref], status: str, reason: str, detail: str = "") -> None:
        """A lease is over, and its blocks go back in line."""
        self._cache.rerank(self._leases.drop(lease))
        self._end(lease.operation, status, reason, detail)

    # -- placement ----------------------------------------------------------------------------

    def _bring(self, operation: Operation, now: float) -> Verdict:
        blocks = self._blocks_of(operation)
        if blocks is None:
            return Verdict("rejected", "unknown_context", operation.key.context or "")
        return self.placement.begin(operation, blocks, now)

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
                request = self._request(operation)
                if request is not None:
                    request.mode = mode
                return Verdict("completed", fallback=None if mode in control.modes else mode)
        return Verdict("rejected", "unknown_mode", f"this engine has {', '.join(MODES)}")

    # -- ends ---------------------------------------------------------------------------------

    def revert(self, operation: Operation, now: float) -> None:
        """End what an operation still effects, without saying so."""
        control, ref = operation.control, operation.ref
        request = self._request(operation)
        self._fallbacks.pop(ref, None)
        if isinstance(control, Retain):
            lease = self._leases.get(operation.context_ref)
            if lease is not None and lease.operation == ref:
                self._cache.rerank(self._leases.drop(lease))
        elif isinstance(control, Prepare | Place):
            self.placement.cancel(ref, now)
        elif request is not None:
            if isinstance(control, Prioritise):
                request.priority = 0
            elif isinstance(control, BoundWait):
                self._scheduler.waiting.bound(request, None)
                request.guard = None
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

    def lost(self, block: int) -> None:
        """A block has left its last tier; the leases on it have yielded."""
        for lease in self._leases.of_block(block):
            self.end_lease(lease, "failed", "yielded", "service needed the room")

    def _end(self, operation: Ref, status: str, reason: str, detail: str = "") -> None:
        outcome = OperationOutcome(
            status="completed" if status == "completed" else "failed",
            reason=reason,
            detail=detail,
            fallback=self._fallbacks.pop(operation, None),
        )
        tenant, id = operation
        self.ended.append((tenant, OperationEnded(id, outcome)))
