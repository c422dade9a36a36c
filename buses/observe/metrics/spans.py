"""Envelopes to spans, after the fact: one for each request and each operation that has ended.

Pure: a ``SpanData`` is plain data, and ``hear.buses.observe.metrics.exporting`` sends it. The ids
of a request's trace follow from the request's id, so that whoever knows it can join the trace
(docs/metrics.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from hear.buses.observe.metrics.operations import Move
from hear.messages import Envelope, RequestOutcome

Value = str | int | float | bool
_LAST_S = 9e9
_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class SpanData:
    """A span that is over. Ids are unsigned, of 128 and 64 bits; times are Unix seconds."""

    name: str
    trace_id: int
    span_id: int
    start_s: float
    end_s: float
    parent_id: int | None = None
    failed: str | None = None
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[tuple[str, float], ...] = ()


def ids_of(what: str, tenant: str, id: str) -> tuple[int, int]:
    """Trace id and span id: the first 16 and the next 8 bytes of a SHA-256, big-endian.

    It is taken over ``what`` (request or operation), tenant and id, joined by newlines.
    """
    digest = sha256(f"{what}\n{tenant}\n{id}".encode()).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])


def request_spans(envelope: Envelope, outcome: RequestOutcome) -> list[SpanData]:
    """The spans of a request that has ended, its own first; none if its times are no times."""
    key = envelope.key
    phases = (
        ("queue", outcome.queue_s),
        ("prefill", outcome.prefill_s),
        ("decode", outcome.decode_s),
    )
    start_s = envelope.time_s - sum(seconds for _, seconds in phases)
    if -_ROUNDING_S < start_s < 0:  # it came as the clock began
        start_s = 0.0
    if key.request is None or not _are_times(start_s, envelope.time_s):
        return []
    trace_id, span_id = ids_of("request", envelope.tenant, key.request)
    engine = key.engine or envelope.source
    attributes: dict[str, Value | None] = {
        "hear.tenant": envelope.tenant,
        "hear.request": key.request,
        "hear.engine": engine,
        "hear.context": key.context,
        "hear.context_version": key.context_version,
        "hear.workflow": key.workflow,
        "hear.status": outcome.status,
        "hear.reason": outcome.reason or None,
        "hear.mode": outcome.mode or None,
        "hear.prompt_tokens": outcome.prompt_tokens,
        "hear.output_tokens": outcome.output_tokens,
        "hear.preemptions": outcome.preemptions,
    }
    for tier, tokens in list(outcome.reused_tokens.items())[:8]:
        attributes[f"hear.reused_tokens.{tier:.50}"] = tokens
    spans = [
        SpanData(
            name="request",
            trace_id=trace_id,
            span_id=span_id,
            start_s=start_s,
            end_s=envelope.time_s,
            failed=None if outcome.status == "completed" else outcome.reason or outcome.status,
            attributes=_known(attributes),
        )
    ]
    begin = start_s
    for name, seconds in phases:
        if seconds > 0:
            spans.append(
                SpanData(
                    name=name,
                    trace_id=trace_id,
                    span_id=ids_of(f"request {name}", envelope.tenant, key.request)[1],
                    parent_id=span_id,
                    start_s=begin,
                    end_s=begin + seconds,
                    attributes={"hear.engine": engine},
                )
            )
        begin += seconds
    return spans


def operation_span(move: Move) -> SpanData | None:
    """The span of an operation that has ended; None if its control was not heard.

    It stands in the trace of the request that its key names, below the request's own span, and in a
    trace of its own if it is about a context or an engine.
    """
    operation, outcome = move.operation, move.outcome
    if operation is None or not move.ended or not _are_times(operation.asked_s, move.time_s):
        return None
    key = operation.key
    trace_id, span_id = ids_of("operation", operation.tenant, operation.id)
    parent_id = None
    if key.request is not None:
        trace_id, parent_id = ids_of("request", operation.tenant, key.request)
    attributes: dict[str, Value | None] = {
        "hear.tenant": operation.tenant,
        "hear.operation": operation.id,
        "hear.policy": operation.policy,
        "hear.control": operation.control,
        "hear.force": operation.force or None,
        "hear.asked_because": operation.why or None,
        "hear.request": key.request,
        "hear.context": key.context,
        "hear.engine": key.engine,
        "hear.status": outcome.status,
        "hear.reason": outcome.reason or None,
        "hear.detail": outcome.detail or None,
        "hear.fallback": outcome.fallback,
    }
    # Clocks of two machines differ a little, and no span may end before it begins.
    end_s = max(move.time_s, operation.asked_s)
    accepted_s = operation.accepted_s
    return SpanData(
        name=operation.control,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        start_s=operation.asked_s,
        end_s=end_s,
        failed=None if outcome.status == "completed" else outcome.reason or outcome.status,
        attributes=_known(attributes),
        events=()
        if accepted_s is None
        else (("accepted", min(max(accepted_s, operation.asked_s), end_s)),),
    )


def _known(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {
        name: value[:1_000] if isinstance(value, str) else _as_int64(value)
        for name, value in attributes.items()
        if value is not None
    }


def _as_int64(value: int | float) -> int | float | str:
    # An attribute is a signed integer of 64 bits; a larger one is said in digits.
    return value if -(2**63) <= value < 2**63 else str(value)


def _are_times(*times: float) -> bool:
    # A NaN is none either. In nanoseconds the last one just fits into 64 bits.
    return all(0 <= time_s <= _LAST_S for time_s in times)
