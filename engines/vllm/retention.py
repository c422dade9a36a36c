"""Leases on the blocks of contexts in vLLM: Retain and Release. On the engine's thread.

What is leased is given up last, by rank, in both tiers (``retention_queue.py``, ``tier_order.py``);
it is given up all the same when service needs the room, and the lease then ends as yielded.
"""

import time
from collections.abc import Callable, Iterable

from hear.blocks import unpack_prompt
from hear.engines.leases import Lease, LeaseBook
from hear.engines.vllm.contexts import Contexts
from hear.engines.vllm.standing import Standing
from hear.messages import Release, Retain
from hear.operation import Operation, Ref
from hear.seams import Verdict


class Retention:
    """The leases of one engine."""

    def __init__(
        self,
        *,
        contexts: Contexts,
        leases: LeaseBook[Ref],
        rerank: Callable[[Iterable[int]], None],
        max_lease_s: float,
        end: Callable[[Ref, str, str, str], None],
    ) -> None:
        """``rerank`` puts blocks where ``leases`` now ranks them; ``end`` tells of ends."""
        self._contexts = contexts
        self._leases = leases
        self._rerank = rerank
        self._max_lease_s = max_lease_s
        self._end = end

    def retain(self, operation: Operation) -> Verdict:
        """Lease the blocks of a context."""
        control, name = operation.control, operation.context_ref
        assert isinstance(control, Retain)
        if control.lease_s > self._max_lease_s:
            detail = f"{control.lease_s} s, at most {self._max_lease_s} s"
            return Verdict("rejected", "lease_too_long", detail)
        fallback = None
        if control.force == "requirement":
            # Leases yield to service, so a requirement to keep could only be promised falsely.
            if "preference" not in control.fallback:
                return Verdict("rejected", "cannot_promise", "leases yield under pressure")
            fallback = "preference"
        served = self._contexts.get(name)
        if control.prefix_hashes:
            blocks = unpack_prompt(control.prefix_hashes)
        elif served is None:
            return Verdict("rejected", "unknown_context", name[1])
        else:
            blocks = served.blocks
        now = time.monotonic()
        if (former := self._leases.get(name)) is not None:  # of a worker that is gone
            self._drop(former, "completed", "renewed")
        lease = Lease(
            operation.ref,
            name,
            control.score,
            now + control.lease_s,
            blocks,
            now if served is None else served.idle_since,
        )
        self._leases.put(lease)
        self._rerank(blocks)
        return Verdict("accepted", standing=True, fallback=fallback)

    def release(self, operation: Operation) -> Verdict:
        """End the leases of a context, and let its blocks go first."""
        assert isinstance(operation.control, Release)
        name = operation.context_ref
        served, lease = self._contexts.get(name), self._leases.get(name)
        if lease is not None:  # the one who asked for it is told by arbitration, or here
            self._drop(lease, "completed", "released")
        elif served is None:
            return Verdict("rejected", "unknown_context", name[1])
        if served is not None:
            self._rerank(served.blocks)
        return Verdict("completed")

    def revert(self, operation: Operation) -> None:
        """End a lease without saying so."""
        lease = self._leases.get(operation.context_ref)
        if lease is not None and lease.operation == operation.ref:
            self._rerank(self._leases.drop(lease))

    # -- what follows -------------------------------------------------------------------------

    def arrived(self, standing: Standing) -> None:
        """A request has come: controls may speak of its context from now on."""
        name = standing.tenant, standing.key.context or ""
        if standing.key.context is not None and self._contexts.get(name) is None:
            self._contexts.note(standing, time.monotonic())

    def served(self, standing: Standing) -> None:
        """A request has completed: a lease on its context follows it."""
        now = time.monotonic()
        served = self._contexts.note(standing, now)
        if served is None:
            return
        lease = self._leases.get((standing.tenant, standing.key.context or ""))
        if lease is not None:
            self._rerank(self._leases.move(lease, served.blocks, now))

    def lost(self, block: int) -> None:
        """A block has left its last tier; the leases on it have yielded."""
        for lease in self._leases.of_block(block):
            self._drop(lease, "failed", "yielded", "service needed the room")

    def tick(self, now: float) -> None:
        """End what has expired."""
        for lease in list(self._leases.expired(now)):
            self._drop(lease, "completed", "expired")

    def next_timer(self) -> float | None:
        """When ``tick`` has to be called next."""
        return self._leases.next_expiry()

    def _drop(self, lease: Lease[Ref], status: str, reason: str, detail: str = "") -> None:
        self._rerank(self._leases.drop(lease))
        self._end(lease.operation, status, reason, detail)
