"""State and Capabilities, from engine to harness (paper, Table 1).

What is said here was observed; it reserves nothing and promises nothing (section 3.3).
"""

from typing import Literal

from msgspec import Struct

from hear.messages.envelope import Count, Message, Number, Seconds, Time


class BlocksStored(Message, frozen=True, kw_only=True, tag="stored"):
    """A tier now holds a chain of blocks: ``prefix_hashes[0]`` follows ``parent``, and so on.

    ``parent`` is None where the chain starts at the first block of a prompt.
    """

    tier: str
    parent: int | None = None
    prefix_hashes: bytes


class BlocksRemoved(Message, frozen=True, kw_only=True, tag="removed"):
    """A tier no longer holds these blocks, in any order."""

    tier: str
    prefix_hashes: bytes


class BlocksCleared(Message, frozen=True, kw_only=True, tag="cleared"):
    """A tier, or with None every tier, holds nothing any more."""

    tier: str | None = None


BlockChange = BlocksStored | BlocksRemoved | BlocksCleared


class ResidencyChanged(Message, frozen=True, kw_only=True, tag="residency_changed"):
    """Changes of residency in the order in which they happened."""

    changes: tuple[BlockChange, ...]


class ResidencySnapshot(Message, frozen=True, kw_only=True, tag="residency_snapshot"):
    """All that is resident, as chains, in ``parts`` messages numbered by ``part`` from 0."""

    chains: tuple[BlocksStored, ...] = ()
    part: Count = 0
    parts: Count = 1


class ResidencyPartial(Message, frozen=True, kw_only=True, tag="residency_partial"):
    """Blocks that are resident, where the engine cannot tell what else is. Parts as in a snapshot.

    An engine that is watched from outside says it when it has lost sight of its cache.
    """

    chains: tuple[BlocksStored, ...] = ()
    part: Count = 0
    parts: Count = 1


class WaitingRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request in the queue. Smaller ``priority`` goes first; the protected go before all."""

    request: str
    context: str | None = None
    since_s: Time
    priority: int = 0
    protected: bool = False
    held: bool = False
    prompt_tokens: Count = 0


class RunningRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request in the batch."""

    request: str
    context: str | None = None
    prompt_tokens: Count = 0
    output_tokens: Count = 0


class QueueChanged(Message, frozen=True, kw_only=True, tag="queue_changed"):
    """What moved since the last report: who waits (new, or at another place), who runs, who left.

    The totals are of the whole queue, in requests and prompt tokens.
    """

    waiting: tuple[WaitingRequest, ...] = ()
    started: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    num_waiting: Count = 0
    num_running: Count = 0
    waiting_tokens: Count = 0
    running_tokens: Count = 0


class QueueSnapshot(Message, frozen=True, kw_only=True, tag="queue_snapshot"):
    """The whole queue, in the order in which the engine would take it, and the batch."""

    waiting: tuple[WaitingRequest, ...] = ()
    running: tuple[RunningRequest, ...] = ()


class TierPressure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tier, in blocks: ``allocatable`` are free or hold what may be evicted."""

    tier: str
    num_blocks: Count
    used: Count = 0
    cached: Count = 0
    allocatable: Count = 0


class PressureReported(Message, frozen=True, kw_only=True, tag="pressure_reported"):
    """How full the engine is. Restored tokens are counted since the engine's epoch began."""

    tiers: tuple[TierPressure, ...] = ()
    num_waiting: Count = 0
    num_running: Count = 0
    restored_tokens: Count = 0
    preemptions: Count = 0
    load_backlog_s: Seconds = 0.0


class Tier(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tier of the engine's cache: gpu, cpu, disk or remote."""

    name: str
    num_blocks: Count


class CapabilitiesReported(Message, frozen=True, kw_only=True, tag="capabilities_reported"):
    """What the engine can do: controls by kind, modes, tiers, hash scheme and limits.

    ``at_submission`` are the kinds that act on a request only if they come before it, and of which
    none is in ``controls``.
    ``endpoint`` is the address to which inference requests are sent, on their own path.
    A *pool* serves nothing itself: it sends each request on to one of ``targets``.
    """

    controls: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    tiers: tuple[Tier, ...] = ()
    block_size: Count = 0
    hash_scheme: str = ""
    max_num_seqs: Count = 0
    max_num_batched_tokens: Count = 0
    max_model_len: Count = 0
    max_lease_s: Seconds = 0.0
    retention_decay_s: Seconds | None = None
    model: str = ""
    endpoint: str = ""
    targets: tuple[str, ...] = ()
    at_submission: tuple[str, ...] = ()


class CostsReported(Message, frozen=True, kw_only=True, tag="costs_reported"):
    """What work costs on this engine: measured on it (calibrated) or derived (estimated)."""

    basis: Literal["calibrated", "estimated"]
    prefill_tokens_per_s: Number
    decode_step_s: Time
    kv_bytes_per_token: Number
    load_bytes_per_s: Number = 0.0


State = (
    ResidencyChanged
    | ResidencySnapshot
    | ResidencyPartial
    | QueueChanged
    | QueueSnapshot
    | PressureReported
    | CapabilitiesReported
    | CostsReported
)
