"""Execution Outcomes, from engine to harness (paper, Table 1): what was really done."""

from typing import Literal

from msgspec import field

from hear.messages.envelope import Count, Message, Seconds

RequestStatus = Literal["accepted", "completed", "rejected", "failed"]
OperationStatus = Literal["accepted", "completed", "rejected", "unsupported", "failed"]


class RequestOutcome(Message, frozen=True, kw_only=True, tag="request_outcome"):
    """How an inference request fared.

    ``reused_tokens`` counts, per tier, the prompt tokens that were not computed again.
    ``queue_s`` runs from arrival to the first schedule, ``prefill_s`` from there to the first
    output token, ``decode_s`` from there to the last.
    """

    status: RequestStatus
    reason: str = ""
    mode: str = ""
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    reused_tokens: dict[str, int] = field(default_factory=dict)
    queue_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    preemptions: Count = 0


class OperationOutcome(Message, frozen=True, kw_only=True, tag="operation_outcome"):
    """How a control fared. ``reason`` is a code (docs/protocol.md), ``detail`` is for people."""

    status: OperationStatus
    control: str = ""
    reason: str = ""
    detail: str = ""
    fallback: str | None = None


Outcome = RequestOutcome | OperationOutcome
