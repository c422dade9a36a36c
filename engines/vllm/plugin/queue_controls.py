"""Controls on the waiting queue of vLLM: order, bounds on waiting, holds.

A request that has waited out its bound is *protected*: it goes before all that are not, in waiting
order, and is the last to be preempted. A held one is in no line; a bound ends a hold too, unless
the hold was required and the bound only preferred. The scheduler lock guards all of it
(``bridge``).
"""

import time
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from hear.engines.vllm.plugin.standing import Standing
from hear.engines.vllm.plugin.waiting_queue import WaitingQueue
from hear.interfaces import ApplyResult
from hear.messages import Admit, BoundWait, Hold, Prioritise
from hear.operation import Operation, Ref

DONE = ApplyResult("completed")
ANSWER_WITHIN_S = 0.05
"""How long a request with early controls waits for them; service goes on without them then."""

_SPARE = 1024

Find = Callable[[Operation], Standing | None]
"""The request that an operation is about, if the engine has it."""


class QueueControls:
    """Moves requests in the queues that a scheduler takes its requests from."""

    def __init__(
        self,
        queues: Iterable[WaitingQueue],
        find: Find,
        moved: Callable[[Standing], None],
        end: Callable[[Ref, str, str, str], None],
    ) -> None:
        """``moved`` is told of each request that moved, ``end`` of operations that end."""
        self._queues = tuple(queues)
        self._find = find
        self._moved = moved
        self._end = end
        self._timers: list[tuple[float, int, Standing]] = []
        self._num_timers = 0

    # -- controls -----------------------------------------------------------------------------

    def prioritise(self, operation: Operation, now: float) -> ApplyResult:
        """Put a waiting request at a priority."""
        control, standing = operation.control, self._waiting(operation)
        assert isinstance(control, Prioritise)
        if isinstance(standing, ApplyResult):
            return standing
        standing.priority = control.priority
        self._settle(standing)
        return DONE

    def bound_wait(self, operation: Operation, now: float) -> ApplyResult:
        """Bound a request's wait, now or, if it runs, from when it is preempted."""
        control, standing = operation.control, self._find(operation)
        assert isinstance(control, BoundWait)
        if standing is None:
            return ApplyResult("failed", "request_gone")
        standing.bound_s = control.max_wait_s
        standing.bound_required = control.force == "requirement"
        standing.protected = False
        if standing.state != "waiting":
            standing.settle_priority()
            return DONE
        standing.guard = operation.ref
        self._arm(standing.since_s + control.max_wait_s, standing)
        self._settle(standing)
        self.tick(now)
        return ApplyResult("accepted", standing=True)

    def hold(self, operation: Operation, now: float) -> ApplyResult:
        """Keep a waiting request from being scheduled."""
        control, standing = operation.control, self._waiting(operation)
        assert isinstance(control, Hold)
        if isinstance(standing, ApplyResult):
            return standing
        required = control.force == "requirement"
        if standing.protected and (standing.bound_required or not required):
            return ApplyResult("rejected", "outranked", "the request has waited out its bound")
        if not self._take_out(standing):
            return ApplyResult("rejected", "not_held", "vLLM has it in hand at this moment")
        standing.held_until = now + control.hold_s
        standing.hold_required = required
        self._arm(standing.held_until, standing)
        self._moved(standing)
        return DONE

    def admit(self, operation: Operation, now: float) -> ApplyResult:
        """End a hold."""
        assert isinstance(operation.control, Admit)
        standing = self._find(operation)
        if standing is None:
            return ApplyResult("failed", "request_gone")
        if standing.held_until is not None:
            self._release(standing)
        return DONE

    def revert(self, operation: Operation) -> None:
        """End what an operation still does to the queue."""
        control, standing = operation.control, self._find(operation)
        if standing is None:
            return
        if isinstance(control, Prioritise):
            standing.priority = 0
        elif isinstance(control, BoundWait):
            standing.bound_s = standing.guard = None
            standing.protected = False
        elif isinstance(control, Hold) and standing.held_until is not None:
            self._release(standing)
        if standing.state == "waiting":
            self._settle(standing)

    def await_answer(self, standing: Standing) -> None:
        """Controls were kept for this request: it must not start before they have been applied."""
        if self._take_out(standing):
            standing.awaits_s = time.monotonic() + ANSWER_WITHIN_S
            self._arm(standing.awaits_s, standing)

    def answered(self, standing: Standing) -> None:
        """HEAR's thread has heard of a request, and said what there was to say."""
        if standing.awaits_s is not None:
            standing.awaits_s = None
            self._put_back(standing)

    # -- what follows -------------------------------------------------------------------------

    def started(self, standing: Standing) -> None:
        """A request has left the queue: its bound on waiting was kept."""
        standing.held_until = None
        if standing.guard is not None:
            self._end(standing.guard, "completed", "protected" if standing.protected else "", "")
            standing.guard = None

    def preempted(self, standing: Standing) -> None:
        """A request is back in the queue: its bound, if any, counts on from its arrival."""
        if standing.bound_s is not None and not standing.protected:
            self._arm(standing.since_s + standing.bound_s, standing)

    def next_timer(self) -> float | None:
        """When ``tick`` has to be called next."""
        return self._timers[0][0] if self._timers else None

    def tick(self, now: float) -> None:
        """Protect those that have waited out their bound, end holds."""
        while self._timers and self._timers[0][0] <= now:
            standing = heappop(self._timers)[2]
            if standing.state != "waiting":
                continue
            if standing.awaits_s is not None and standing.awaits_s <= now:
                self.answered(standing)
            if standing.held_until is not None and standing.held_until <= now:
                self._release(standing)
            bound = standing.bound_s
            if bound is None or standing.protected or standing.since_s + bound > now:
                continue
            standing.protected = True
            if standing.held_until is not None and (
                standing.bound_required or not standing.hold_required
            ):
                self._release(standing)
            self._settle(standing)

    # -- pieces -------------------------------------------------------------------------------

    def _waiting(self, operation: Operation) -> Standing | ApplyResult:
        standing = self._find(operation)
        if standing is None:
            return ApplyResult("failed", "request_gone")
        if standing.state != "waiting":
            return ApplyResult("rejected", "already_running")
        return standing

    def _settle(self, standing: Standing) -> None:
        """Let the queue hold a request where it now stands."""
        standing.settle_priority()
        if standing.in_line:
            for queue in self._queues:
                if queue.holds(standing.request):
                    queue.add_request(standing.request)
        self._moved(standing)

    def _release(self, standing: Standing) -> None:
        standing.held_until = None
        self._put_back(standing)
        self._moved(standing)

    def _take_out(self, standing: Standing) -> bool:
        return any([queue.hold(standing.request) for queue in self._queues])

    def _put_back(self, standing: Standing) -> None:
        if standing.in_line:
            for queue in self._queues:
                queue.admit(standing.request)

    def _arm(self, when: float, standing: Standing) -> None:
        self._num_timers += 1
        heappush(self._timers, (when, self._num_timers, standing))
        if len(self._timers) > _SPARE and len(self._timers) > 4 * self._num_waiting():
            self._timers = sorted(t for t in self._timers if t[2].state == "waiting")

    def _num_waiting(self) -> int:
        return sum(len(queue) + queue.num_held for queue in self._queues)
