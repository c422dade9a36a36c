"""How one request stands in vLLM, as far as HEAR has to know beside vLLM itself.

The scheduler lock guards it (``bridge``). Times are ``time.monotonic`` seconds of this process.
"""

from typing import Any, Final, Literal

from hear.messages import Key
from hear.operation import Ref

State = Literal["waiting", "running", "ended"]

PROTECTED: Final = -(1 << 62)
"""vLLM's priority of a protected request: before all others in the queue, last to be preempted."""

BACKGROUND: Final = 1 << 62
"""vLLM's priority of a prefill of the engine's own, behind all that anybody waits for."""


class Standing:
    """One request. ``request`` is vLLM's own object; ``priority`` is what HEAR or its client asked.

    ``prepare`` is the operation that a prefill of the engine's own serves; such a request is
    nobody's, and is told to nobody. Until ``awaits_s`` it waits to be answered by HEAR's thread.
    """

    __slots__ = (
        "awaits_s",
        "bound_required",
        "bound_s",
        "first_token_s",
        "guard",
        "held_until",
        "hold_required",
        "key",
        "prepare",
        "priority",
        "protected",
        "request",
        "reused",
        "since_s",
        "started_s",
        "state",
        "tenant",
    )

    def __init__(self, request: Any, key: Key, tenant: str, since_s: float) -> None:
        self.request = request
        self.key = key
        self.tenant = tenant
        self.since_s = since_s
        self.state: State = "waiting"
        self.priority: int = request.priority
        self.protected = False
        self.bound_s: float | None = None
        self.bound_required = False
        self.guard: Ref | None = None
        self.held_until: float | None = None
        self.hold_required = False
        self.awaits_s: float | None = None
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.reused: dict[str, int] = {}
        self.prepare: Ref | None = None

    @property
    def context_ref(self) -> Ref | None:
        """Its context, if it named one."""
        return None if self.key.context is None else (self.tenant, self.key.context)

    @property
    def in_line(self) -> bool:
        """Whether it may be scheduled when its turn comes."""
        return self.held_until is None and self.awaits_s is None

    def settle_priority(self) -> None:
        """Let vLLM's own priority say what this stands for."""
        self.request.priority = PROTECTED if self.protected else self.priority
