"""What the story of one request is made of: data alone, as ``hear why --json`` gives it.

Times are those of the envelopes, in seconds on the clock of the bus; None where nobody told.
"""

from typing import Literal

from msgspec import Struct, field

from hear.messages import DEFAULT_TENANT

Ground = Literal["earlier", "priority", "protected", "put_back", "held", "untold"]
"""Why another request went first: it came earlier; a policy gave it priority; its bound on waiting
had run out; a policy had put this request back; a policy held this request; or nobody told."""


class Answer(Struct, frozen=True, kw_only=True):
    """What an engine, or a pool of them, said of a control."""

    time_s: float
    by: str
    status: str
    reason: str = ""
    detail: str = ""
    fallback: str | None = None


class Asked(Struct, frozen=True, kw_only=True):
    """A control that concerned the request or its context, and its answers in order."""

    time_s: float
    source: str
    control: str
    operation: str | None
    about: Literal["request", "context"]
    force: str = ""
    reason: str = ""
    fields: dict[str, int | float | str | tuple[str, ...]] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()


class Passed(Struct, frozen=True, kw_only=True):
    """A request that left the queue while this one waited in it.

    ``by`` is the policy behind ``ground``, if it is one, and ``why`` the reason that it gave.
    """

    request: str
    arrived_s: float | None
    started_s: float
    ground: Ground
    by: str = ""
    why: str = ""
    prompt_tokens: int = 0


class Place(Struct, frozen=True, kw_only=True):
    """How the queue reported the request itself."""

    time_s: float
    priority: int = 0
    protected: bool = False
    held: bool = False


class Bound(Struct, frozen=True, kw_only=True):
    """A bound on its wait that its engine took on; ``protected_s`` is when it came to bear."""

    source: str
    max_wait_s: float
    due_s: float | None = None
    protected_s: float | None = None


class Crowd(Struct, frozen=True, kw_only=True):
    """The engine as the request came; ``gpu_used`` is a share of its GPU blocks."""

    running: int = 0
    waiting: int = 0
    gpu_used: float | None = None


class Evicted(Struct, frozen=True, kw_only=True):
    """Blocks of its prompt that a tier gave up before it was served.

    ``lost`` of them no tier held any more. ``takers`` are the requests that the room went to, as
    far as it can be told: those that started in the same report, or computed what was stored.
    """

    time_s: float
    until_s: float
    tier: str
    blocks: int
    lost: int
    takers: tuple[str, ...] = ()


class Blocks(Struct, frozen=True, kw_only=True):
    """Its prompt in the cache of its engine, in blocks from the start of the prompt.

    ``most`` is the longest reusable prefix that was there before it was served, last so at
    ``most_s``.
    """

    blocks: int
    block_size: int
    most: int = 0
    most_s: float | None = None
    at_arrival: int | None = None
    at_start: int | None = None
    evicted: tuple[Evicted, ...] = ()


class Story(Struct, frozen=True, kw_only=True):
    """All that is known of one request. ``unknown`` says in words what cannot be.

    ``origin_s`` is the first time at which it was described or came; a telling counts from there.
    """

    request: str
    tenant: str = DEFAULT_TENANT
    context: str | None = None
    context_version: int | None = None
    workflow: str | None = None
    turn: int = 0
    role: str | None = None
    engine: str | None = None
    clock: str = "unix"
    origin_s: float = 0.0
    last_heard_s: float = 0.0
    described_s: tuple[float, ...] = ()
    ready: tuple[tuple[float, bool], ...] = ()
    depends_on: dict[str, float | None] = field(default_factory=dict)
    arrivals: tuple[tuple[float, str], ...] = ()
    started_s: float | None = None
    ended_s: float | None = None
    status: str = ""
    reason: str = ""
    mode: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    reused_tokens: dict[str, int] = field(default_factory=dict)
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    preemptions: int = 0
    crowd: Crowd | None = None
    places: tuple[Place, ...] = ()
    passed: tuple[Passed, ...] = ()
    bound: Bound | None = None
    asked: tuple[Asked, ...] = ()
    blocks: Blocks | None = None
    unknown: tuple[str, ...] = ()
