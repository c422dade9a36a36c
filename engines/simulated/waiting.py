"""The waiting queue: who is next, who has waited too long, who is held.

A request that has waited out its bound joins the protected, who go before all others in waiting
order (the paper's Guard). A held request is not in line until its hold ends; a bound ends a hold
too, unless the hold was required and the bound only preferred.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from hear.engines.simulated.request import SimRequest
from hear.operation import Ref

_SPARE = 1024


class WaitingQueue:
    """A heap with lazy removal: a request's entry counts only with its latest stamp.

    Entries that no longer count are thrown out when they come to outnumber the others.
    """

    def __init__(self) -> None:
        self._requests: dict[Ref, SimRequest] = {}
        self._heap: list[tuple[tuple[int, int, float, int], int, SimRequest]] = []
        self._bounds: list[tuple[float, int, SimRequest]] = []
        self._holds: list[tuple[float, int, SimRequest]] = []
        self._totals: dict[str, tuple[int, int]] = {}  # of each tenant that has any waiting

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: SimRequest) -> bool:
        # A bound or a hold may outlast its request, whose id another may have by then.
        return self._requests.get(request.ref) is request

    def __iter__(self) -> Iterator[SimRequest]:
        """All waiting requests, in no particular order."""
        return iter(self._requests.values())

    def totals(self, tenant: str) -> tuple[int, int]:
        """How many requests of a tenant wait, and how many tokens their prompts have."""
        return self._totals.get(tenant, (0, 0))

    def in_order(self) -> list[SimRequest]:
        """All waiting requests as they would be taken, the held ones last."""
        return sorted(self._requests.values(), key=lambda r: (r.held_until is not None, *r.order))

    def add(self, request: SimRequest) -> None:
        """Add a request, or put it where its order now says."""
        if request.ref not in self._requests:
            self._requests[request.ref] = request
            self._count(request.tenant, 1, request.prompt_tokens)
        request.stamp += 1
        if request.held_until is None:
            heappush(self._heap, (request.order, request.stamp, request))
            if len(self._heap) > 2 * len(self._requests) + _SPARE:
                waiting = self._requests.values()
                self._heap = [(r.order, r.stamp, r) for r in waiting if r.held_until is None]
                heapify(self._heap)

    def remove(self, request: SimRequest) -> None:
        """Take a request out."""
        del self._requests[request.ref]
        self._count(request.tenant, -1, -request.prompt_tokens)
        request.stamp += 1

    def _count(self, tenant: str, requests: int, tokens: int) -> None:
        num, num_tokens = self.totals(tenant)
        if num + requests:
            self._totals[tenant] = num + requests, num_tokens + tokens
        else:
            del self._totals[tenant]

    def peek(self) -> SimRequest | None:
        """The request that is next; None if there is none in line."""
        while self._heap:
            _, stamp, request = self._heap[0]
            if stamp == request.stamp:
                return request
            heappop(self._heap)
        return None

    def bound(
        self, request: SimRequest, max_wait_s: float | None, *, required: bool = False
    ) -> None:
        """Set the bound on a request's wait, or lift it. It stands until the request ends."""
        request.max_wait_s = max_wait_s
        request.bound_required = required
        request.protected = False
        if max_wait_s is not None:
            heappush(self._bounds, (request.arrival_s + max_wait_s, request.seq, request))
            if len(self._bounds) > 2 * len(self._requests) + _SPARE:
                self._bounds = [
                    (r.arrival_s + r.max_wait_s, r.seq, r)
                    for r in self._requests.values()
                    if r.max_wait_s is not None and not r.protected
                ]
                heapify(self._bounds)
        if request in self:
            self.add(request)

    def hold(self, request: SimRequest, until: float, *, required: bool = False) -> None:
        """Take a request out of line until a time."""
        request.held_until = until
        request.hold_required = required
        heappush(self._holds, (until, request.seq, request))
        if len(self._holds) > 2 * len(self._requests) + _SPARE:
            waiting = self._requests.values()
            self._holds = [(r.held_until, r.seq, r) for r in waiting if r.held_until is not None]
            heapify(self._holds)
        self.add(request)

    def admit(self, request: SimRequest) -> None:
        """Put a held request back in line."""
        request.held_until = None
        if request in self:
            self.add(request)

    def promote(self, now: float) -> list[SimRequest]:
        """Protect those that have waited out their bound, end holds; returns who was moved."""
        moved = []
        while self._holds and self._holds[0][0] <= now:
            until, _, request = heappop(self._holds)
            if request in self and request.held_until == until:
                self.admit(request)
                moved.append(request)
        while self._bounds and self._bounds[0][0] <= now:
            due, _, request = heappop(self._bounds)
            bound = request.max_wait_s
            if (
                request in self
                and bound is not None
                and request.arrival_s + bound == due
                and not request.protected
            ):
                request.protected = True
                if request.bound_required or not request.hold_required:
                    request.held_until = None
                self.add(request)
                moved.append(request)
        return moved

    def next_release(self) -> float | None:
        """When a hold may end next, by its own time or by a bound; None if nobody is held."""
        if not self._holds:
            return None
        return min(queue[0][0] for queue in (self._holds, self._bounds) if queue)
