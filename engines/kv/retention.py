"""Retain and Release: leases on the blocks of contexts, from their beginning to their end.

What is leased is given up last, by rank (``leases.py``); it is given up all the same when service
needs the room, and the lease then ends as yielded. The engine has the blocks, and the clock.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from hear.blocks import unpack_prompt
from hear.engines.kv.leases import Lease, LeaseBook
from hear.interfaces import ApplyResult
from hear.messages import Place, Prepare, Release, Retain
from hear.operation import Operation, Ref


class Served(Protocol):
    """What an engine remembers of a context."""

    @property
    def blocks(self) -> Sequence[int]:
        """What it was last served with."""

    @property
    def idle_since(self) -> float:
        """When that was."""


class Contexts(Protocol):
    """The contexts that an engine remembers."""

    def get(self, name: Ref, /) -> Served | None:
        """One of them."""

    def shared(self, name: Ref, blocks: Sequence[int], /) -> int:
        """How many of these blocks, from the first on, another that is not released has, too."""

    def release(self, name: Ref, /) -> None:
        """Let it keep no blocks for others until it is served again."""


class Retention:
    """The leases of one engine."""

    def __init__(
        self,
        *,
        leases: LeaseBook[Ref],
        contexts: Contexts,
        named: Callable[[str, Sequence[int]], Sequence[int]],
        rerank: Callable[[Iterable[int]], None],
        unrank: Callable[[Iterable[int]], None],
        in_use: Callable[[int], bool],
        max_lease_s: float,
        end: Callable[[Ref, str, str, str], None],
    ) -> None:
        """Make it, with no lease.

        Args:
            named: the engine's blocks that a tenant names by these hashes.
            rerank: puts blocks where ``leases`` now ranks them, those without a rank first of all.
            unrank: the same, but those that lost a rank count as just used, the last the most.
            in_use: whether a request holds a block on the first tier.
            end: tells of an operation's end: its status, a reason and a detail.
        """
        self._leases = leases
        self._contexts = contexts
        self._named = named
        self._rerank = rerank
        self._unrank = unrank
        self._in_use = in_use
        # Contexts to be released when their blocks have come free, and by which operation.
        self._releasing: dict[Ref, Ref] = {}
        self._max_lease_s = max_lease_s
        self._end = end
        self._serving: Counter[Ref] = Counter()  # requests of each context that are here

    def blocks_of(self, operation: Operation) -> Sequence[int] | None:
        """The blocks that a control is about: those it names, or what its context was served.

        Raises:
            RemoteProtocolError: what it names cannot be the blocks of one prompt.
        """
        control = operation.control
        assert isinstance(control, Retain | Prepare | Place)
        if control.prefix_hashes:
            return self._named(operation.tenant, unpack_prompt(control.prefix_hashes))
        served = self._contexts.get(operation.context_ref)
        return None if served is None else served.blocks

    def retain(self, operation: Operation, now: float) -> ApplyResult:
        """Lease the blocks of a context."""
        control, name = operation.control, operation.context_ref
        assert isinstance(control, Retain)
        if control.lease_s > self._max_lease_s:
            detail = f"{control.lease_s} s, at most {self._max_lease_s} s"
            return ApplyResult("rejected", "lease_too_long", detail)
        fallback = None
        if control.force == "requirement":
            # Leases yield to service, so a requirement to keep could only be promised falsely.
            if "preference" not in control.fallback:
                return ApplyResult("rejected", "cannot_promise", "leases yield under pressure")
            fallback = "preference"
        blocks = self.blocks_of(operation)
        if blocks is None:
            return ApplyResult("rejected", "unknown_context", name[1])
        served = self._contexts.get(name)
        if (former := self._leases.get(name)) is not None:  # of a worker that is gone
            self._drop(former, "completed", "renewed")
        if not blocks and not self._serving[name]:
            return ApplyResult("completed", "no_blocks", fallback=fallback)
        idle_since = now if served is None else served.idle_since
        self._leases.put(
            Lease(operation.ref, name, control.score, now + control.lease_s, blocks, idle_since)
        )
        self._rerank(blocks)
        return ApplyResult("accepted", standing=True, fallback=fallback)

    def release(self, operation: Operation, now: float) -> ApplyResult:
        """End the leases of a context, and let its blocks go first, once no request uses them.

        A request of the context that waits, or was preempted, is going to use them. Blocks that
        other contexts begin with, too, stay where recent use has put them.
        """
        assert isinstance(operation.control, Release)
        name = operation.context_ref
        served, lease = self._contexts.get(name), self._leases.get(name)
        if lease is not None:  # the one who asked for it is told by arbitration, or here
            self._drop(lease, "completed", "released")
        elif served is None:
            return ApplyResult("rejected", "unknown_context", name[1])
        if served is not None and not self._let_go(name):
            self._releasing[name] = operation.ref
            return ApplyResult("accepted")
        return ApplyResult("completed")

    def revert(self, operation: Operation) -> None:
        """End a lease, or what is to be released, without saying so."""
        if self._releasing.get(operation.context_ref) == operation.ref:
            del self._releasing[operation.context_ref]
        lease = self._leases.get(operation.context_ref)
        if lease is not None and lease.operation == operation.ref:
            self._give_up(lease)

    # -- what follows -------------------------------------------------------------------------

    def arrived(self, name: Ref) -> None:
        """A request of a context has come: what it is served with is not known yet."""
        self._serving[name] += 1

    def left(self, name: Ref) -> None:
        """A request of a context has ended, in whatever way: a lease on no blocks ends with it."""
        self._serving[name] -= 1
        if self._serving[name] > 0:
            return
        del self._serving[name]
        lease = self._leases.get(name)
        if lease is not None and not lease.blocks:
            self._drop(lease, "completed", "no_blocks")

    def served(self, name: Ref, blocks: Sequence[int], now: float) -> None:
        """A request of a context has completed: a lease on it follows."""
        lease = self._leases.get(name)
        if lease is not None:
            self._rerank(self._leases.move(lease, blocks, now))

    def lost(self, block: int) -> None:
        """A block has left its last tier; the leases on it have yielded."""
        for lease in self._leases.of_block(block):
            self._drop(lease, "failed", "yielded", "service needed the room")

    def look(self) -> None:
        """Release what no request uses any more; to be called as requests end."""
        for name, operation in list(self._releasing.items()):
            if self._let_go(name):
                del self._releasing[name]
                self._end(operation, "completed", "", "")

    def tick(self, now: float) -> None:
        """End what has expired."""
        for lease in list(self._leases.expired(now)):
            self._drop(lease, "completed", "expired")

    def next_timer(self) -> float | None:
        """When ``tick`` has to be called next."""
        return self._leases.next_expiry()

    def _let_go(self, name: Ref) -> bool:
        """Let the blocks of a context go first; returns False, and does nothing, if it is served.

        Requests of other contexts may use its blocks as well.
        """
        if self._serving[name]:
            return False
        served = self._contexts.get(name)
        if served is None:
            return True  # so much else was served since that it is forgotten
        own = served.blocks[self._contexts.shared(name, served.blocks) :]
        if any(self._in_use(block) for block in reversed(own)):
            return False
        self._contexts.release(name)
        self._rerank(own)
        return True

    def _drop(self, lease: Lease[Ref], status: str, reason: str, detail: str = "") -> None:
        self._give_up(lease)
        self._end(lease.operation, status, reason, detail)

    def _give_up(self, lease: Lease[Ref]) -> None:
        blocks = self._leases.drop(lease)
        shared = self._contexts.shared(lease.context, blocks)
        self._unrank(blocks[:shared][::-1])
        self._rerank(blocks[shared:])
