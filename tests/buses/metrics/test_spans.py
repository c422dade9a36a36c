"""Envelopes become spans whose ids others can work out."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.buses.observe.metrics.exporting import readable
from hear.buses.observe.metrics.operations import Operations
from hear.buses.observe.metrics.spans import SpanData, ids_of, operation_span, request_spans
from hear.messages import Key, OperationOutcome, Prioritise, RequestOutcome, Retain
from tests.hear.builders import envelope

KEY = Key(request="r1", context="c1", context_version=2, engine="e0", workflow="w")
DONE = RequestOutcome(
    status="completed",
    mode="dense",
    prompt_tokens=100,
    output_tokens=20,
    reused_tokens={"gpu": 64, "cpu": 16},
    queue_s=3.0,
    prefill_s=0.5,
    decode_s=1.5,
    preemptions=1,
)


def test_a_request_is_one_span_with_its_phases_below_it() -> None:
    whole, queue, prefill, decode = request_spans(envelope(DONE, KEY, time_s=105.0), DONE)
    assert (whole.name, whole.start_s, whole.end_s) == ("request", 100.0, 105.0)
    assert [(s.name, s.start_s, s.end_s) for s in (queue, prefill, decode)] == [
        ("queue", 100.0, 103.0),
        ("prefill", 103.0, 103.5),
        ("decode", 103.5, 105.0),
    ]
    assert {s.trace_id for s in (queue, prefill, decode)} == {whole.trace_id}
    assert {s.parent_id for s in (queue, prefill, decode)} == {whole.span_id}
    assert len({s.span_id for s in (whole, queue, prefill, decode)}) == 4
    assert whole.parent_id is None
    assert whole.failed is None
    assert whole.attributes == {
        "hear.tenant": "default",
        "hear.request": "r1",
        "hear.engine": "e0",
        "hear.context": "c1",
        "hear.context_version": 2,
        "hear.workflow": "w",
        "hear.status": "completed",
        "hear.mode": "dense",
        "hear.prompt_tokens": 100,
        "hear.output_tokens": 20,
        "hear.preemptions": 1,
        "hear.reused_tokens.gpu": 64,
        "hear.reused_tokens.cpu": 16,
    }


def test_the_ids_are_what_the_documentation_says() -> None:
    assert request_spans(envelope(DONE, KEY), DONE) == []  # it would begin before 1970
    [whole, *_] = request_spans(envelope(DONE, KEY, time_s=1e9), DONE)
    digest = sha256(b"request\ndefault\nr1").hexdigest()
    assert f"{whole.trace_id:032x}" == digest[:32]
    assert f"{whole.span_id:016x}" == digest[32:48]
    assert ids_of("request", "acme", "r1") != ids_of("request", "default", "r1")


def test_a_request_that_was_not_served_is_one_failed_span() -> None:
    refused = RequestOutcome(status="rejected", reason="too_long")
    [whole] = request_spans(envelope(refused, KEY, time_s=5.0), refused)
    assert whole.failed == "too_long"
    assert whole.start_s == whole.end_s == 5.0


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), -1.0, 1e12])
def test_times_that_are_none_give_no_span(time_s: float) -> None:
    assert request_spans(envelope(DONE, KEY, time_s=time_s), DONE) == []
    assert operation_of(Key(request="r1", operation="op"), asked_s=time_s) is None
    assert operation_of(Key(request="r1", operation="op"), ended_s=time_s) is None


def operation_of(key: Key, asked_s: float = 10.0, ended_s: float = 12.0) -> SpanData | None:
    """The span of an operation that was accepted half a second after it was asked for."""
    operations = Operations()
    control = Retain(lease_s=5, reason="returns") if key.context else Prioritise(priority=1)
    operations.hear_control(envelope(control, key, time_s=asked_s), control, 0.0)
    for status, when in (("accepted", asked_s + 0.5), ("failed", ended_s)):
        outcome = OperationOutcome(
            status=status,  # type: ignore[arg-type]
            reason="" if status == "accepted" else "yielded",
        )
        move = operations.hear_outcome(envelope(outcome, key, time_s=when), outcome)
    assert move is not None
    return operation_span(move)


def test_an_operation_on_a_request_stands_in_its_trace_below_it() -> None:
    span = operation_of(Key(request="r1", engine="e0", operation="op"))
    assert span is not None
    assert (span.trace_id, span.parent_id) == ids_of("request", "default", "r1")
    assert span.span_id == ids_of("operation", "default", "op")[1]
    assert (span.name, span.start_s, span.end_s) == ("prioritise", 10.0, 12.0)
    assert span.events == (("accepted", 10.5),)
    assert span.failed == "yielded"
    assert span.attributes["hear.policy"] == "policy"
    assert span.attributes["hear.control"] == "prioritise"
    assert span.attributes["hear.reason"] == "yielded"


def test_an_operation_on_a_context_has_a_trace_of_its_own() -> None:
    span = operation_of(Key(context="c1", engine="e0", operation="op"))
    assert span is not None
    assert (span.trace_id, span.span_id) == ids_of("operation", "default", "op")
    assert span.parent_id is None
    assert span.attributes["hear.asked_because"] == "returns"


def test_no_span_ends_before_it_begins_and_no_event_lies_outside() -> None:
    span = operation_of(Key(request="r1", operation="op"), ended_s=9.0)  # another clock
    assert span is not None
    assert span.start_s == span.end_s == span.events[0][1] == 10.0


def test_the_form_that_is_exported_says_the_same() -> None:
    span = operation_of(Key(request="r1", engine="e0", operation="op"))
    assert span is not None
    made = readable(span)
    assert made.context is not None
    assert made.parent is not None
    assert (made.context.trace_id, made.context.span_id) == (span.trace_id, span.span_id)
    assert made.parent.span_id == span.parent_id
    assert (made.start_time, made.end_time) == (10 * 10**9, 12 * 10**9)
    assert not made.status.is_ok
    assert made.events[0].timestamp == 10_500_000_000
    assert made.attributes == span.attributes


@given(st.text(), st.text(), st.integers(0, 2**64 - 1))
def test_any_name_and_number_can_be_exported(request: str, tier: str, tokens: int) -> None:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    outcome = RequestOutcome(
        status="completed", reused_tokens={tier: tokens}, prompt_tokens=tokens, queue_s=1.0
    )
    spans = request_spans(envelope(outcome, Key(request=request), time_s=9.0), outcome)
    assert len(spans) == 2
    encode_spans([readable(span) for span in spans]).SerializeToString()
