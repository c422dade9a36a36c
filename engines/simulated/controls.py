"""What each control does to the simulated engine, one method a kind.

``SimulatedEngine`` owns the state; this module changes it.
"""

from collections.abc import Callable, Sequence

from hear.engines.kv.leases import LeaseBook
from hear.engines.kv.retention import Retention
from hear.engines.simulated.contexts import Contexts
from hear.engines.simulated.kv_cache import KvCache
from hear.engines.simulated.placement import Placement
from hear.engines.simulated.profile import Scheduler as Limits
from hear.engines.simulated.reporting import MODES
from hear.engines.simulated.request import SimRequest
from hear.engines.simulated.scheduler import Scheduler
from hear.engines.simulated.tenants import Tenants, blocks_of
from hear.engines.worker.control_table import ControlTable
from hear.errors import EngineError
from hear.interfaces import ApplyResult, InferenceRequest
from hear.messages import (
    Admit,
    BoundWait,
    Configure,
    Hold,
    Place,
    Prepare,
    Prioritise,
    Release,
    Retain,
    Route,
)
from hear.operation import Operation, Ref

DONE = ApplyResult("completed")


class Controls(ControlTable):
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
        contexts: Contexts,
        tenants: Tenants,
        submit: Callable[[InferenceRequest], SimRequest],
        block_size: int,
    ) -> None:
        super().__init__(name)
        self._scheduler = scheduler
        self._requests = requests
        self._tenants = tenants
        self.placement = Placement(
            scheduler=scheduler,
            cache=cache,
            requests=requests,
            submit=submit,
            block_size=block_size,
            end=self._end,
        )
        self.retention = Retention(
            leases=leases,
            contexts=contexts,
            named=self._named,
            rerank=cache.rerank,
            unrank=cache.unrank,
            in_use=cache.in_use,
            max_lease_s=limits.max_lease_s,
            end=self._end,
        )
        self._handlers = {
            Prioritise: self._prioritise,
            BoundWait: self._bound_wait,
            Retain: self.retention.retain,
            Release: self.retention.release,
            Prepare: self._bring,
            Place: self._bring,
            Hold: self._hold,
            Admit: self._admit,
            Route: self._route,
            Configure: self._configure,
        }
        if limits.order == "fcfs":
            del self._handlers[Prioritise]

    # -- order, waiting, admission ------------------------------------------------------------

    def _request(self, operation: Operation) -> SimRequest | None:
        return self._requests.get(operation.request_ref)

    def _waiting(self, operation: Operation) -> SimRequest | ApplyResult:
        request = self._request(operation)
        if request is None:
            return ApplyResult("failed", "request_gone")
        if request not in self._scheduler.waiting:
            return ApplyResult("rejected", "already_running")
        return request

    def _moved(self, request: SimRequest) -> None:
        self._scheduler.moved[request.ref] = request

    def _prioritise(self, operation: Operation, now: float) -> ApplyResult:
        control, request = operation.control, self._waiting(operation)
        assert isinstance(control, Prioritise)
        if isinstance(request, ApplyResult):
            return request
        request.priority = control.priority
        self._scheduler.waiting.add(request)
        self._moved(request)
        return DONE

    def _bound_wait(self, operation: Operation, now: float) -> ApplyResult:
        control, request = operation.control, self._request(operation)
        assert isinstance(control, BoundWait)
        if request is None:
            return ApplyResult("failed", "request_gone")
        required = control.force == "requirement"
        self._scheduler.waiting.bound(request, control.max_wait_s, required=required)
        if request not in self._scheduler.waiting:
            return DONE  # it waits no more, and is bounded should it be preempted
        request.guard = operation.ref
        self._moved(request)
        return ApplyResult("accepted", standing=True)

    def _hold(self, operation: Operation, now: float) -> ApplyResult:
        control, request = operation.control, self._waiting(operation)
        assert isinstance(control, Hold)
        if isinstance(request, ApplyResult):
            return request
        required = control.force == "requirement"
        if request.protected and (request.bound_required or not required):
            return ApplyResult("rejected", "outranked", "the request has waited out its bound")
        self._scheduler.waiting.hold(request, now + control.hold_s, required=required)
        self._moved(request)
        return DONE

    def _admit(self, operation: Operation, now: float) -> ApplyResult:
        request = self._request(operation)
        if request is None:
            return ApplyResult("failed", "request_gone")
        if request.held_until is not None:
            self._scheduler.waiting.admit(request)
            self._moved(request)
        return DONE

    # -- residency ----------------------------------------------------------------------------

    def _named(self, tenant: str, hashes: Sequence[int]) -> Sequence[int]:
        owner = self._tenants.number(tenant)
        if owner is None:
            raise EngineError("this engine cannot tell one more tenant apart")
        return blocks_of(owner, hashes)

    def _bring(self, operation: Operation, now: float) -> ApplyResult:
        blocks = self.retention.blocks_of(operation)
        if blocks is None:
            return ApplyResult("rejected", "unknown_context", operation.key.context or "")
        return self.placement.begin(operation, blocks, now)

    # -- configuration ------------------------------------------------------------------------

    def _configure(self, operation: Operation, now: float) -> ApplyResult:
        control = operation.control
        assert isinstance(control, Configure)
        for mode in (*control.modes, *control.fallback):
            if mode in MODES:
                request = self._request(operation)
                if request is not None:
                    request.mode = mode
                return ApplyResult("completed", fallback=None if mode in control.modes else mode)
        return ApplyResult("rejected", "unknown_mode", f"this engine has {', '.join(MODES)}")

    # -- ends ---------------------------------------------------------------------------------

    def revert(self, operation: Operation, now: float) -> None:
        """End what an operation still effects, without saying so."""
        control, ref = operation.control, operation.ref
        request = self._request(operation)
        self._fallbacks.pop(ref, None)
        if isinstance(control, Retain | Release):
            self.retention.revert(operation)
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
