"""What is subscribed to, and what passes: alone, combined, and never less than asked for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.buses.observe.tap.filters import CATEGORIES, Filter, Wanted
from hear.errors import ConfigError
from hear.messages import (
    ContextOpened,
    Envelope,
    Message,
    OperationOutcome,
    PressureReported,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    Retain,
    ReuseExpected,
    RunningRequest,
    WaitingRequest,
)
from hear.subjects import Pattern, subject
from tests.buses.tap.builders import Voice, foreign

Said = tuple[Message, Envelope]


def talk() -> list[Said]:
    """A little of everything, between two engines, two policies, two contexts."""
    said: list[Said] = []

    def say(voice: Voice, message: Message, **key: Any) -> None:
        said.append((message, voice.say(message, **key)))

    harness, e0, e1 = Voice("harness"), Voice("e0"), Voice("e1")
    hot, guard = Voice("hot"), Voice("guard:40")
    for n, engine in ((1, e0), (2, e1)):
        name, request, context = f"e{n - 1}", f"r{n}", f"c{n}"
        say(harness, ContextOpened(), context=context, workflow="w")
        say(harness, RequestDescribed(), request=request, context=context, engine=name)
        say(
            engine, RequestOutcome(status="accepted"), request=request, context=context, engine=name
        )
        waiting = WaitingRequest(request=request, context=context, since_s=0.0)
        say(engine, QueueChanged(waiting=(waiting,)), engine=name)
        for policy, by in ((hot, "hot"), (guard, "guard:40")):
            operation = f"{by}-1-{n}"
            about: dict[str, Any] = {"request": request, "engine": name, "operation": operation}
            say(policy, Prioritise(priority=-n), **about)
            say(engine, OperationOutcome(status="completed", control="prioritise"), **about)
        say(engine, QueueChanged(started=(request,)), engine=name)
        say(engine, PressureReported(), engine=name)
        say(hot, Retain(lease_s=9), context=context, engine=name, operation=f"own-{n}")
        say(
            engine,
            OperationOutcome(status="accepted"),
            context=context,
            engine=name,
            operation=f"own-{n}",
        )
        say(hot, ReuseExpected(basis="known"), context=context)
    return said


TALK = talk()


def chosen(wanted: Wanted) -> list[Said]:
    """What a tap with these options shows of the talk, as the bus and the filter choose."""
    made = Filter(wanted)
    patterns = [Pattern(text) for text in made.patterns]
    return [
        (message, envelope)
        for message, envelope in TALK
        if any(p.matches(subject(envelope)) for p in patterns)
        and made.passes(envelope)
        and made.mentions(message)
    ]


def kinds(said: list[Said]) -> list[tuple[str, str]]:
    return [(envelope.source, envelope.kind) for _, envelope in said]


def test_without_options_everything_is_wanted() -> None:
    assert Filter(Wanted()).patterns == (">",)
    assert chosen(Wanted()) == TALK


def test_a_request_brings_controls_outcomes_and_its_changes_of_the_queue() -> None:
    assert kinds(chosen(Wanted(requests=("r1",)))) == [
        ("harness", "request_described"),
        ("e0", "request_outcome"),
        ("e0", "queue_changed"),
        ("hot", "prioritise"),
        ("e0", "operation_outcome"),
        ("guard:40", "prioritise"),
        ("e0", "operation_outcome"),
        ("e0", "queue_changed"),
    ]


def test_a_context_brings_its_requests_and_their_changes_of_the_queue() -> None:
    shown = chosen(Wanted(contexts=("c2",)))
    assert all(e.key.context in ("c2", None) for _, e in shown)
    assert kinds(shown).count(("e1", "queue_changed")) == 2
    assert ("hot", "retain") in kinds(shown)


def test_a_policy_brings_what_it_published_and_the_outcomes_of_its_operations() -> None:
    shown = chosen(Wanted(policies=("hot",)))
    assert kinds(shown) == [
        ("hot", "prioritise"),
        ("e0", "operation_outcome"),
        ("hot", "retain"),
        ("e0", "operation_outcome"),
        ("hot", "reuse_expected"),
        ("hot", "prioritise"),
        ("e1", "operation_outcome"),
        ("hot", "retain"),
        ("e1", "operation_outcome"),
        ("hot", "reuse_expected"),
    ]


def test_an_outcome_that_overtakes_its_control_is_known_by_its_operation() -> None:
    made = Filter(Wanted(policies=("guard:40",)))
    outcome = OperationOutcome(status="accepted")
    engine = Voice("e0")
    assert made.passes(engine.say(outcome, engine="e0", operation="guard:40-1-7"))
    assert not made.passes(engine.say(outcome, engine="e0", operation="guard:40-x-1-7"))
    assert not made.passes(engine.say(outcome, engine="e0", operation="guard-1-7"))


def test_an_engine_brings_what_it_says_what_it_is_asked_and_what_is_meant_for_it() -> None:
    shown = chosen(Wanted(engines=("e1",)))
    assert all(e.key.engine == "e1" for _, e in shown)
    assert {e.category for _, e in shown} == {"intent", "control", "state", "outcome"}
    assert len(shown) == sum(e.key.engine == "e1" for _, e in TALK)


def test_different_options_must_all_hold_and_equal_ones_either() -> None:
    both = chosen(Wanted(requests=("r1", "r2"), categories=("control",), policies=("hot",)))
    assert kinds(both) == [("hot", "prioritise")] * 2
    narrow = chosen(Wanted(requests=("r1", "r2"), engines=("e1",), categories=("state",)))
    assert kinds(narrow) == [("e1", "queue_changed")] * 2


def test_a_request_and_a_context_must_both_be_mentioned() -> None:
    assert chosen(Wanted(requests=("r1",), contexts=("c2",))) == []
    assert chosen(Wanted(requests=("r1",), contexts=("c1",))) != []


def test_a_snapshot_of_the_queue_mentions_who_runs() -> None:
    made = Filter(Wanted(requests=("r1",)))
    assert made.mentions(QueueSnapshot(running=(RunningRequest(request="r1"),)))
    assert not made.mentions(QueueSnapshot(running=(RunningRequest(request="r2"),)))


@pytest.mark.parametrize(
    ("wanted", "patterns"),
    [
        (Wanted(subjects=("state.*.e0.>",)), {"state.*.e0.>"}),
        (Wanted(subjects=("state.*.e0.queue.-", ">")), {"state.*.e0.queue.-", ">"}),
        (Wanted(categories=("control",)), {"control.>"}),
        (Wanted(engines=("e.0",)), {"intent.>", "control.*.e%2e0.>", "state.*.e%2e0.>",
                                    "outcome.*.e%2e0.>"}),
        (Wanted(requests=("r1",)), {"intent.*.*.*.r1", "control.*.*.*.r1", "outcome.*.*.*.r1",
                                    "state.*.*.queue.>"}),
        (Wanted(policies=("p",)), {"intent.>", "control.>", "outcome.*.*.operation_outcome.>"}),
        (Wanted(policies=("p",), engines=("e",), categories=("outcome",)),
         {"outcome.*.e.operation_outcome.>"}),
        (Wanted(subjects=("*.acme.>",), categories=("state",), engines=("e",)),
         {"state.acme.e.>"}),
    ],
)  # fmt: skip
def test_only_what_is_needed_is_subscribed_to(wanted: Wanted, patterns: set[str]) -> None:
    assert set(Filter(wanted).patterns) == patterns


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(categories=("state",), policies=("p",)),
        Wanted(categories=("state",), subjects=("control.>",)),
        Wanted(engines=("e0",), categories=("state",), subjects=("*.*.e1.>",)),
    ],
)
def test_options_that_leave_nothing_are_refused(wanted: Wanted) -> None:
    with pytest.raises(ConfigError, match="no message can match"):
        Filter(wanted)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("state.default.e0.queue", "4 tokens, and a subject has 5.*end it with"),
        ("a b", "token 'a b'"),
        ("a.b.c.d.e.f", "expected at most 5"),
        ("", "token ''"),
    ],
)
def test_a_pattern_that_can_match_no_subject_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Filter(Wanted(subjects=(pattern,)))


def test_numbers_are_watched_only_where_the_whole_stream_comes_by() -> None:
    queue = Voice("e0").say(QueueChanged(), engine="e0")
    described = Voice("h").say(RequestDescribed(), request="r1", workflow="w")
    assert Filter(Wanted()).covers(queue)
    by_request = Filter(Wanted(requests=("r1",)))
    assert by_request.covers(queue)
    assert not by_request.covers(described)
    assert not Filter(Wanted(subjects=("state.*.e0.queue.-",))).covers(queue)


def test_what_is_of_no_known_category_passes_if_nothing_says_otherwise() -> None:
    assert Filter(Wanted()).passes(foreign("chat", {}, category="gossip"))
    assert not Filter(Wanted(categories=("state",))).passes(foreign("chat", {}, category="gossip"))


choices = st.builds(
    Wanted,
    subjects=st.sampled_from([(), ("control.>", "state.*.e0.>"), ("*.default.e1.>",), (">",)]),
    requests=st.sampled_from([(), ("r1",), ("r1", "r2")]),
    contexts=st.sampled_from([(), ("c1",), ("c2",)]),
    engines=st.sampled_from([(), ("e0",), ("e0", "e1")]),
    policies=st.sampled_from([(), ("hot",), ("guard:40", "hot")]),
    categories=st.sampled_from([(), *((c,) for c in CATEGORIES), ("state", "outcome")]),
)


@given(choices)
def test_a_narrow_subscription_shows_what_filtering_everything_would(wanted: Wanted) -> None:
    try:
        shown = chosen(wanted)
    except ConfigError:
        shown = []
    subjects = [Pattern(text) for text in wanted.subjects or (">",)]
    everything = Filter(Wanted(**{f: getattr(wanted, f) for f in (
        "requests", "contexts", "engines", "policies")}))  # fmt: skip
    expected = [
        (message, envelope)
        for message, envelope in TALK
        if everything.passes(envelope)
        and everything.mentions(message)
        and (not wanted.categories or envelope.category in wanted.categories)
        and any(pattern.matches(subject(envelope)) for pattern in subjects)
    ]
    if wanted.policies or wanted.contexts:  # what was learned from other messages is not there
        assert [said for said in shown if said not in expected] == []
    else:
        assert shown == expected
