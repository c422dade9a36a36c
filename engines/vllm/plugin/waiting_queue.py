"""vLLM's waiting queue in HEAR's order: the protected first, then by priority, then as they came.

Stands in for the queues that vLLM makes (``vllm.v1.core.sched.request_queue``), of which it has
one for requests that hold blocks already and one for all others. Without controls the order is
that of vLLM's own priority queue. A held request is in no line: vLLM must neither schedule it nor
count it as work, or it would spin on it. To move a request costs O(log n); vLLM's costs O(n).
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue

_SPARE = 1024

Order = tuple[int, float, str]


class WaitingQueue(RequestQueue):
    """A heap with lazy removal: an entry counts only while it is its request's latest."""

    def __init__(self) -> None:
        self._entries: dict[Any, tuple[Order, int, Any]] = {}
        self._heap: list[tuple[Order, int, Any]] = []
        self._held: dict[Any, None] = {}
        self._stamp = 0

    def add_request(self, request: Any) -> None:
        """Add a request, or put it where its priority now says."""
        self._held.pop(request, None)
        self._stamp += 1
        order = (request.priority, request.arrival_time, request.request_id)
        entry = self._entries[request] = (order, self._stamp, request)
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SPARE:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def pop_request(self) -> Any:
        """Take the next request out."""
        request = self.peek_request()
        heappop(self._heap)
        del self._entries[request]
        return request

    def peek_request(self) -> Any:
        """The next request.

        Raises:
            IndexError: there is none in line.
        """
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry[2]) is entry:
                return entry[2]
            heappop(self._heap)
        raise IndexError("peek from an empty queue")

    def prepend_request(self, request: Any) -> None:
        """As ``add_request``: in an order there is no front to put something at."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """As ``add_request``, of each."""
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Any) -> None:
        """Take a request out.

        Raises:
            ValueError: it is not here.
        """
        if self._entries.pop(request, None) is None and self._held.pop(request, 0) == 0:
            raise ValueError(f"request {request.request_id} is not in the queue")

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Take out those that are here."""
        for request in requests:
            self._entries.pop(request, None)
            self._held.pop(request, None)

    @property
    def num_held(self) -> int:
        """How many are held."""
        return len(self._held)

    def hold(self, request: Any) -> bool:
        """Take a request out of line, but keep it; whether it was here."""
        if self._entries.pop(request, None) is not None:
            self._held[request] = None
        return request in self._held

    def holds(self, request: Any) -> bool:
        """Whether a request is here, in line or held."""
        return request in self._entries or request in self._held

    def admit(self, request: Any) -> None:
        """Put a request that is held here back in line."""
        if request in self._held:
            self.add_request(request)

    def admit_all(self) -> None:
        """Put all that are held here back in line."""
        for request in list(self._held):
            self.add_request(request)

    def __bool__(self) -> bool:
        """Whether somebody is in line."""
        return bool(self._entries)

    def __len__(self) -> int:
        """How many are in line."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Any]:
        """Those in line, in order."""
        return (request for _, _, request in sorted(self._entries.values()))
