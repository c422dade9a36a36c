import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.app import plugins
from hear.errors import LocalProtocolError
from hear.messages import (
    Cancel,
    ContextOpened,
    Envelope,
    Key,
    Message,
    OperationOutcome,
    PressureReported,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    ResidencySnapshot,
    Retain,
)
from hear.subjects import Matcher, Pattern, channel, impossible, narrowed, stem, subject, token
from tests.hear.builders import envelope
from tests.hear.strategies import keys, messages, names

_KEY = Key(request="r1", context="c1", engine="e0", operation="p-1-1", workflow="w1")


@pytest.mark.parametrize(
    ("message", "key", "expected"),
    [
        (RequestDescribed(), _KEY, "intent.default.w1.request_described.r1"),
        (ContextOpened(), Key(context="c1", workflow="w1"), "intent.default.w1.context_opened.c1"),
        (Prioritise(priority=1), _KEY, "control.default.e0.prioritise.r1"),
        (Retain(lease_s=1.0), Key(context="c1", engine="e0"), "control.default.e0.retain.c1"),
        (Cancel(target="x"), Key(engine="e0", operation="p-1"), "control.default.e0.cancel.p-1"),
        (QueueChanged(), Key(engine="e0"), "state.default.e0.queue.-"),
        (QueueSnapshot(), Key(engine="e0"), "state.default.e0.queue.-"),
        (ResidencySnapshot(), Key(engine="e0"), "state.default.e0.residency.-"),
        (PressureReported(), Key(engine="e0"), "state.default.e0.pressure.-"),
        (OperationOutcome(status="failed"), _KEY, "outcome.default.e0.operation_outcome.r1"),
        (RequestDescribed(), Key(), "intent.default.-.request_described.-"),
        (
            RequestDescribed(),
            Key(workflow="a.b>*%"),
            "intent.default.a%2eb%3e%2a%25.request_described.-",
        ),
    ],
)
def test_each_message_has_its_subject(message: Message, key: Key, expected: str) -> None:
    assert subject(envelope(message, key)) == expected


@given(names, names)
def test_a_token_is_safe_and_tells_different_names_apart(one: str, other: str) -> None:
    Pattern(token(one))
    assert not set(token(one)) & set(".*> ")
    assert (token(one) == token(other)) == (one == other)


def test_no_name_is_a_dash_and_a_dash_is_not_no_name() -> None:
    assert token(None) == token("") == "-"
    assert token("-") == "%2d"


@given(messages, keys)
def test_every_subject_has_five_tokens_and_begins_with_its_stem(message: Message, key: Key) -> None:
    sent = envelope(message, key)
    tokens = subject(sent).split(".")
    assert len(tokens) == 5
    assert tokens[:4] == stem(sent.category, sent.tenant, key, sent.kind).split(".")
    assert channel(sent) == (sent.source, sent.epoch, ".".join(tokens[:4]))


def test_an_unknown_kind_of_state_belongs_to_the_stream_that_its_name_begins_with() -> None:
    """An older peer routes what a newer one says, and sees the gap that it cannot read over."""
    assert stem("state", "t", Key(engine="e"), "residency_compacted") == "state.t.e.residency"
    assert stem("control", "t", Key(engine="e"), "re_do") == "control.t.e.re_do"


_tokens = st.sampled_from(["state", "a", "b", "-", "e%2e0"])
_subjects = st.lists(_tokens, min_size=1, max_size=5)


@st.composite
def _patterns(draw: st.DrawFn) -> list[str]:
    tokens = draw(st.lists(st.one_of(_tokens, st.just("*")), max_size=4))
    last = draw(st.one_of(_tokens, st.sampled_from(["*", ">"])))
    return [*tokens, last]


def naive_match(pattern: list[str], subject: list[str]) -> bool:
    if not pattern or not subject:
        return not pattern and not subject
    if pattern == [">"]:
        return True
    return pattern[0] in ("*", subject[0]) and naive_match(pattern[1:], subject[1:])


@given(_patterns(), st.lists(_subjects, min_size=1, max_size=20))
def test_a_pattern_matches_as_defined(pattern: list[str], subjects: list[list[str]]) -> None:
    parsed = Pattern(".".join(pattern))
    for tokens in subjects:
        assert parsed.matches(".".join(tokens)) == naive_match(pattern, tokens)


@given(st.lists(_patterns(), max_size=3), st.lists(_subjects, max_size=30))
def test_several_patterns_match_what_any_of_them_does(
    patterns: list[list[str]], subjects: list[list[str]]
) -> None:
    matcher = Matcher([".".join(pattern) for pattern in patterns])
    for tokens in subjects + subjects:  # the second time from memory
        expected = any(naive_match(pattern, tokens) for pattern in patterns)
        assert matcher.matches(".".join(tokens)) == expected


def test_a_matcher_remembers_a_bounded_number_of_stems() -> None:
    matcher = Matcher(["intent.>"])
    for number in range(70_000):
        assert matcher.matches(f"intent.t.w{number}.context_opened.-")
    assert len(matcher._stems) <= 65_536


@pytest.mark.parametrize(
    "text", ["", ".", "a..b", "a.>.b", ">.a", "a b", "a.b*", "a.>>", "**", "a.b.c.d.e.f", "é"]
)
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(LocalProtocolError, match="subject pattern"):
        Pattern(text)


@given(messages, keys)
def test_access_can_be_granted_by_prefix(message: Message, key: Key) -> None:
    """Whatever a message says, its subject stays under its category and tenant."""
    sent: Envelope = envelope(message, key)
    assert Pattern(f"{sent.category}.{token(sent.tenant)}.>").matches(subject(sent))


@given(
    st.lists(st.sampled_from(["state", "a", "*"]), min_size=1, max_size=5),
    st.booleans(),
    st.lists(st.sampled_from(["state", "a", "b"]), min_size=4, max_size=4),
)
def test_a_stem_is_covered_if_a_subject_of_it_with_some_key_matches(
    tokens: list[str], tail: bool, stem_tokens: list[str]
) -> None:
    pattern = Pattern(".".join([*tokens[:4], ">"] if tail else tokens))
    scope = ".".join(stem_tokens)
    subjects = [f"{scope}.{key}" for key in ("state", "a", "b")]
    assert pattern.covers(scope) is any(pattern.matches(each) for each in subjects)
    assert pattern.names_key is (not tail and len(tokens) == 5 and tokens[-1] != "*")


@pytest.mark.parametrize(
    ("pattern", "own"),
    [
        (">", "*.a%2eb.>"),
        ("intent.>", "intent.a%2eb.>"),
        ("intent.*.>", "intent.a%2eb.>"),
        ("intent.*.*.request_described.>", "intent.a%2eb.*.request_described.>"),
        ("*.*.e0.queue.*", "*.a%2eb.e0.queue.*"),
        ("state.a%2eb.>", "state.a%2eb.>"),
        ("state.other.>", None),
    ],
)
def test_a_pattern_is_narrowed_to_one_tenant(pattern: str, own: str | None) -> None:
    assert narrowed(pattern, "a.b") == own


@given(_patterns(), st.lists(st.lists(_tokens, min_size=5, max_size=5), max_size=20))
def test_a_narrowed_pattern_matches_what_is_of_the_tenant_and_matched_before(
    pattern: list[str], subjects: list[list[str]]
) -> None:
    text = ".".join(pattern)
    own = narrowed(text, "a")
    for tokens in subjects:
        both = tokens[1] == "a" and Pattern(text).matches(".".join(tokens))
        assert both == (own is not None and Pattern(own).matches(".".join(tokens)))


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("state.*.*.residancy.>", "'residancy' is none of capabilities, costs, pressure, queue"),
        ("intent.*.*.request_descibed.>", "'request_descibed' is none of context_closed"),
        ("intend.>", "'intend' is none of intent, control, state, outcome"),
        ("*.*.*.nothing.*", "'nothing' is none of"),
        ("intent.*.*.queue.>", "'queue' is none of"),
    ],
)
def test_a_pattern_that_can_match_nothing_is_told_with_what_there_is(
    pattern: str, why: str
) -> None:
    assert impossible(pattern).startswith(why)


def test_the_patterns_of_the_shipped_policies_can_match_something() -> None:
    for name in plugins.names("policies"):
        made = plugins.load_installed("parts", "policy-spec")(name).make()
        assert [impossible(p) for policy in made for p in policy.observes if impossible(p)] == []
    for pattern in (">", "*.*.>", "state.>", "outcome.acme.e0.request_outcome.r"):
        assert impossible(pattern) == ""
