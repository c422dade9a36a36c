"""A request inside the simulated engine."""

from collections.abc import Sequence

from hear.blocks import chain
from hear.engines.simulated.tenants import blocks_of, hash_of
from hear.interfaces import InferenceRequest
from hear.messages import RunningRequest, WaitingRequest
from hear.operation import Ref

BACKGROUND_PRIORITY = 2**31
"""Of the engine's own prefills (Prepare): after all that anybody waits for."""


class SimRequest:
    """State of one request. ``blocks`` are the names of its GPU blocks in order (``KvCache``).

    ``ref`` is what no other request in the engine has, and ``hashes`` and ``output_hashes`` are the
    blocks of its tenant, who has the number ``owner``. ``computed`` counts the tokens whose KV is
    there, ``produced`` the output tokens so far.
    """

    __slots__ = (
        "arrival_s",
        "blocks",
        "bound_required",
        "computed",
        "context",
        "context_version",
        "first_token_s",
        "guard",
        "hashes",
        "held_until",
        "hold_required",
        "id",
        "max_wait_s",
        "mode",
        "next_full",
        "num_named",
        "only_load",
        "output_hashes",
        "output_tokens",
        "owner",
        "preemptions",
        "prepare",
        "priority",
        "produced",
        "prompt_tokens",
        "protected",
        "ref",
        "reused",
        "room",
        "seq",
        "stamp",
        "started_s",
        "state",
        "tenant",
    )

    def __init__(
        self, request: InferenceRequest, arrival_s: float, seq: int, mode: str, owner: int = 0
    ) -> None:
        self.id = request.id
        self.tenant = request.tenant
        self.ref: Ref = (request.tenant, request.id)
        self.owner = owner
        self.context = request.context
        self.context_version = request.context_version
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.hashes = blocks_of(owner, request.prompt_hashes)
        self.output_hashes = list(blocks_of(owner, request.output_hashes))
        self.arrival_s = arrival_s
        self.seq = seq
        self.mode = mode
        self.state = "waiting"  # waiting, loading, running, ended
        self.priority = 0
        self.max_wait_s: float | None = None
        self.bound_required = False
        self.protected = False
        self.guard: Ref | None = None  # the operation that bounds its wait, while it waits
        self.held_until: float | None = None
        self.hold_required = False
        self.stamp = 0
        self.computed = 0
        self.produced = 0
        self.blocks: list[int | None] = []
        self.num_named = 0
        # While running: tokens that its blocks have room for, and the count that fills the next.
        self.room = self.next_full = 0
        self.preemptions = 0
        self.reused: dict[str, int] = {}
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.prepare: Ref | None = None  # the operation that this prefill serves, if any
        self.only_load = False  # such a prefill, if it may load blocks and not compute any

    @property
    def of_context(self) -> Ref | None:
        """Its context, as no other tenant's."""
        return None if self.context is None else (self.tenant, self.context)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return self.prompt_tokens + self.produced

    @property
    def order(self) -> tuple[int, int, float, int]:
        """Place in the queue: the protected in waiting order, then priority, then arrival."""
        if self.protected:
            return 0, 0, self.arrival_s, self.seq
        return 1, self.priority, self.arrival_s, self.seq

    def hash_at(self, index: int) -> int:
        """The hash of a full block, of the prompt or of what was produced after it."""
        in_prompt = len(self.hashes)
        if index < in_prompt:
            return self.hashes[index]
        while len(self.output_hashes) <= index - in_prompt:
            # What this request writes is its own: no other prompt is known to continue so.
            number = in_prompt + len(self.output_hashes)
            parent = hash_of(self.hash_at(number - 1)) if number else None
            written = chain(parent, f"{self.id}:{number}".encode())
            self.output_hashes.extend(blocks_of(self.owner, [written]))
        return self.output_hashes[index - in_prompt]

    def full_blocks(self, limit: int) -> Sequence[int]:
        """The hashes of the first ``limit`` full blocks, or of as many as there are."""
        if not self.produced:
            return self.hashes[:limit]
        # It was preempted: what it wrote before can be reused like any prompt.
        return [self.hash_at(index) for index in range(limit)]

    def as_waiting(self) -> WaitingRequest:
        """How the queue reports it."""
        return WaitingRequest(
            request=self.id,
            context=self.context,
            since_s=self.arrival_s,
            priority=self.priority,
            protected=self.protected,
            held=self.held_until is not None,
            prompt_tokens=self.prompt_tokens,
        )

    def as_running(self) -> RunningRequest:
        """How the batch reports it."""
        return RunningRequest(
            request=self.id,
            context=self.context,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.produced,
        )
