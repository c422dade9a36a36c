"""The story of a request, beside what its client saw in a run of the simulated engine."""

import random
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hear.blocks import pack
from hear.buses.observe.why.facts import Passed, Story
from hear.buses.observe.why.story import find_story
from hear.buses.observe.why.telling import sentences
from hear.buses.observe.why.timeline import timeline
from hear.codec import encode_body, open_body
from hear.delivery import Sequencer
from hear.errors import ConfigError
from hear.harnesses.eval.replay.runner import replay
from hear.harnesses.eval.report.results import TurnRecord
from hear.harnesses.eval.workloads import mooncake
from hear.messages import (
    Envelope,
    Hold,
    Key,
    Message,
    OperationOutcome,
    Prioritise,
    QueueChanged,
    RequestDescribed,
    RequestOutcome,
    RequestReadinessChanged,
    Route,
    WaitingRequest,
)
from hear.recording import Header, Heard, Note, Noted, Record, Recorder, Recording

POLICY = "cache-aware+guard:4+session-aware"


class Run(NamedTuple):
    """A replay: what was recorded, and what the clients saw."""

    records: list[Record]
    turns: dict[str, TurnRecord]

    def story(self, request: str) -> Story:
        return find_story(lambda naming: self.records, request, clock="virtual")


@pytest.fixture(scope="module")
def run() -> Run:
    """A minute and a half of the trace, at a load that makes a queue."""
    recorder = Recorder(Header(clock="virtual"))
    written = [recorder.begin()]
    result = replay(
        mooncake.load(window=(0, 90)),
        engine="h100-qwen3-8b",
        policy=POLICY,
        seed=1,
        tap=lambda envelopes, time_s: written.append(recorder.hear(envelopes, time_s)),
    )
    assert recorder.gaps == 0
    return Run(list(Recording(written)), {turn.request: turn for turn in result.turns})


def some(run: Run) -> Iterable[TurnRecord]:
    return list(run.turns.values())[::6]


def test_a_description_that_does_not_fit_its_engine_is_said_so_and_its_reuse_unknown(
    run: Run,
) -> None:
    """As of a harness that hashes in another way: no block of it is ever found."""
    turn = next(turn for turn in some(run) if turn.prompt_tokens > 2_000)

    def other(record: Record) -> Record:
        if not isinstance(record, Heard) or record.envelope.kind != "request_described":
            return record
        described = open_body(record.envelope)
        assert isinstance(described, RequestDescribed)
        changed = msgspec.structs.replace(described, hash_scheme="theirs-64", block_size=16)
        envelope = msgspec.structs.replace(record.envelope, body=encode_body(changed))
        return record._replace(envelope=envelope)

    records = [other(record) for record in run.records]
    story = find_story(lambda naming: records, turn.request, clock="virtual")
    told = " ".join(sentences(story))
    assert story.blocks is None
    assert "block size: its harness uses 16, engine0 512" in told
    assert "hash scheme: its harness uses theirs-64, engine0 hear-blake2b-64" in told
    assert "hash scheme" not in " ".join(sentences(run.story(turn.request)))


# -- against what the clients saw ----------------------------------------------------------------


def test_who_went_before_is_who_started_while_it_waited(run: Run) -> None:
    num_passed = 0
    for turn in some(run):
        story = run.story(turn.request)
        told = {other.request for other in story.passed}
        seen = {
            other.request
            for other in run.turns.values()
            if turn.sent_s <= other.started_s < turn.started_s and other is not turn
        }
        assert seen <= told
        # What started before, was preempted and started again went before it as well.
        assert all(run.turns[request].preemptions for request in told - seen)
        num_passed += len(told)
    assert num_passed > 300


def test_the_ground_is_one_that_the_order_of_arrival_allows(run: Run) -> None:
    grounds = set()
    for turn in some(run):
        story = run.story(turn.request)
        for other in story.passed:
            grounds.add((other.ground, other.by))
            earlier = run.turns[other.request].sent_s <= turn.sent_s
            assert other.ground in (("earlier", "protected") if earlier else ("priority",))
            if other.ground == "priority":
                assert re.fullmatch(r"\d+ blocks to reuse", other.why)
            if other.ground == "protected":
                assert other.why == "wait at most 4 s"
                assert other.started_s - run.turns[other.request].sent_s >= 4
    assert grounds == {("earlier", ""), ("priority", "cache-aware"), ("protected", "guard:4")}


def test_what_was_reused_is_what_was_there_as_it_started(run: Run) -> None:
    reused = 0
    for turn in some(run):
        story = run.story(turn.request)
        assert story.reused_tokens == turn.reused_tokens
        if story.blocks is None:  # shorter than a block
            continue
        tokens = sum(turn.reused_tokens.values())
        assert story.blocks.at_start == tokens // 512
        assert story.blocks.most >= story.blocks.at_start
        reused += tokens
    assert reused > 0


def test_times_and_bounds_are_those_of_its_client(run: Run) -> None:
    protected = 0
    for turn in some(run):
        story = run.story(turn.request)
        assert story.arrivals == ((turn.sent_s, "engine0"),)
        assert story.started_s == turn.started_s
        assert story.ended_s == turn.finished_s
        assert story.queue_s == pytest.approx(turn.started_s - turn.sent_s)
        assert story.prefill_s == pytest.approx(turn.first_token_s - turn.started_s)
        assert story.decode_s == pytest.approx(turn.finished_s - turn.first_token_s)
        assert story.preemptions == turn.preemptions
        assert story.unknown == ()
        if story.bound is None:  # it was served before the guard could ask
            [asked] = [asked for asked in story.asked if asked.control == "bound_wait"]
            assert asked.answers[-1].reason in ("already_running", "request_gone")
            continue
        assert (story.bound.source, story.bound.max_wait_s) == ("guard:4", 4.0)
        if story.bound.protected_s is not None:
            assert story.bound.due_s == pytest.approx(turn.sent_s + 4)
            assert story.bound.protected_s >= turn.sent_s + 4
            protected += 1
    assert protected > 0


def test_every_control_on_it_is_told_with_its_reason_and_its_end(run: Run) -> None:
    for turn in some(run):
        story = run.story(turn.request)
        controls = {
            r.envelope.key.operation
            for r in run.records
            if isinstance(r, Heard)
            and r.envelope.category == "control"
            and r.envelope.key.request == turn.request
        }
        mine = [asked for asked in story.asked if asked.about == "request"]
        assert {asked.operation for asked in mine} == controls
        for asked in mine:
            assert asked.reason
            assert asked.answers[-1].status in ("completed", "rejected", "failed")
        assert {a.control for a in story.asked if a.about == "context"} <= {"retain"}


def test_the_first_sentence_tells_the_main_reason(run: Run) -> None:
    longest = max(run.turns.values(), key=lambda turn: turn.started_s - turn.sent_s)
    story = run.story(longest.request)
    first = sentences(story)[0]
    waited = longest.started_s - longest.sent_s
    total = longest.finished_s - longest.sent_s
    assert first.startswith(
        f"{longest.request} waited {waited:.1f} s of {total:.1f} s in the queue"
    )
    counts = [int(n) for n in re.findall(r"(\d+) (?:came|was|were)", first)]
    assert sum(counts) == len(story.passed)
    assert f"{len(story.passed)} requests went before it" in first
    times = [line.at_s for line in timeline(story)]
    assert times == sorted(times)
    assert len(timeline(story, each=True)) > len(story.passed)


def test_every_story_can_be_told(run: Run) -> None:
    for turn in some(run):
        story = run.story(turn.request)
        assert all(text.endswith(".") and "None" not in text for text in sentences(story))
        assert timeline(story)


def test_evictions_are_of_its_own_blocks_and_have_takers_that_were_served_then(run: Run) -> None:
    found = 0
    for turn in some(run):
        story = run.story(turn.request)
        if story.blocks is None:
            continue
        for gone in story.blocks.evicted:
            assert gone.lost <= gone.blocks
            assert gone.time_s <= gone.until_s <= turn.started_s
            assert turn.request not in gone.takers
            for taker in gone.takers:
                other = run.turns[taker]
                assert other.started_s <= gone.until_s
                assert other.finished_s >= gone.time_s
                found += 1
    assert found > 0


# -- what cannot be known ------------------------------------------------------------------------


def test_a_recording_that_began_later_says_what_is_missing(run: Run) -> None:
    turn = max(run.turns.values(), key=lambda turn: turn.started_s - turn.sent_s)
    late = [r for r in run.records if r.time_s > turn.sent_s + 1.0]
    story = find_story(lambda naming: late, turn.request)
    told = " ".join(sentences(story))
    assert "it was not described, or before the first message that was heard" in told
    assert "when it came to its engine, and so what went before it" in told
    assert story.queue_s == pytest.approx(turn.started_s - turn.sent_s)


def test_a_gap_in_the_cache_or_the_queue_is_told(run: Run) -> None:
    turn = max(run.turns.values(), key=lambda turn: turn.started_s - turn.sent_s)
    lost = {
        kind: next(
            r
            for r in run.records
            if isinstance(r, Heard) and r.envelope.kind == kind and r.time_s > turn.sent_s
        )
        for kind in ("residency_changed", "queue_changed")
    }
    for kind, words in (("residency_changed", "of the cache"), ("queue_changed", "of the queue")):
        kept = [r for r in run.records if r is not lost[kind]]
        story = find_story(lambda naming, kept=kept: kept, turn.request)  # type: ignore[misc]
        assert any(f"some changes {words} were not heard, at +" in u for u in story.unknown)
    assert story.blocks is not None


def test_being_cut_off_is_told_where_it_matters(run: Run) -> None:
    turn = next(iter(run.turns.values()))
    during = Noted(turn.sent_s, Note(what="cut_off", text="too slow"))
    after = Noted(turn.finished_s + 50, Note(what="cut_off", text="too slow"))
    assert find_story(lambda n: [during, *run.records], turn.request).unknown
    assert not find_story(lambda n: [after, *run.records], turn.request).unknown


def test_one_that_is_not_known_is_an_error_that_names_the_nearest(run: Run) -> None:
    known = next(iter(run.turns))
    with pytest.raises(ConfigError, match=rf"of {len(run.turns)} the nearest are .*{known}"):
        run.story(known[:-1])
    with pytest.raises(ConfigError, match="the last ones are mooncake"):
        run.story("§")
    with pytest.raises(ConfigError, match="nothing was heard of any request"):
        find_story(lambda naming: [], "r")


# -- what the simulated engine and the paper's policies do not do --------------------------------


class Stage:
    """Puts a story together message by message."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.engine = Sequencer("e")
        self.policy = Sequencer("p")
        self.harness = Sequencer("h")

    def say(self, sequencer: Sequencer, message: Message, time_s: float, **key: str) -> None:
        self.records.append(Heard(time_s, sequencer.wrap(message, Key(**key), time_s)))  # type: ignore[arg-type]

    def queue(self, time_s: float, *waiting: WaitingRequest, started: Sequence[str] = ()) -> None:
        change = QueueChanged(waiting=waiting, started=tuple(started))
        self.say(self.engine, change, time_s, engine="e")

    def accepted(self, request: str, time_s: float) -> None:
        self.say(
            self.engine, RequestOutcome(status="accepted"), time_s, request=request, engine="e"
        )

    def story(self, request: str = "me") -> Story:
        return find_story(lambda naming: self.records, request)


def waiting(request: str, since_s: float, **more: int | bool) -> WaitingRequest:
    return WaitingRequest(request=request, since_s=since_s, **more)  # type: ignore[arg-type]


def test_a_hold_is_told_as_the_reason_and_by_whom() -> None:
    stage = Stage()
    stage.say(stage.harness, RequestDescribed(prompt_tokens=9), 0.0, request="me", workflow="w")
    stage.accepted("me", 0.0)
    hold = Hold(hold_s=9, reason="too many at once")
    stage.say(stage.policy, hold, 0.0, request="me", engine="e", operation="o")
    stage.queue(0.1, waiting("me", 0.0, held=True), waiting("other", 0.1))
    stage.queue(0.2, started=["other"])
    end = RequestOutcome(status="completed", mode="dense", queue_s=9.0, decode_s=1, output_tokens=2)
    stage.queue(9.0, started=["me"])
    stage.say(stage.engine, end, 10.0, request="me", engine="e")
    assert stage.story().passed == (
        Passed(
            request="other",
            arrived_s=0.1,
            started_s=0.2,
            ground="held",
            by="p",
            why="too many at once",
        ),
    )
    assert sentences(stage.story())[0] == (
        "me waited 9.00 s of 10.0 s in the queue of e: 1 request went before it: "
        "1 went while p held it (too many at once)."
    )


def test_one_that_was_put_back_and_a_refused_control_are_told_apart() -> None:
    stage = Stage()
    stage.accepted("me", 0.0)
    back = Prioritise(priority=5, reason="a long one")
    stage.say(stage.policy, back, 0.0, request="me", engine="e", operation="o1")
    stage.say(stage.engine, OperationOutcome(status="completed"), 0.0, operation="o1", engine="e")
    ahead = Prioritise(priority=-5, reason="refused")
    stage.say(stage.policy, ahead, 0.1, request="other", engine="e", operation="o2")
    refused = OperationOutcome(status="rejected", reason="outranked")
    stage.say(stage.engine, refused, 0.1, operation="o2", engine="e", request="other")
    stage.queue(0.2, waiting("me", 0.0, priority=5), waiting("other", 0.1), waiting("third", 0.2))
    stage.queue(0.3, started=["other"])
    stage.queue(0.4, waiting("me", 0.0, priority=0))
    [passed] = stage.story().passed
    assert (passed.ground, passed.by, passed.why) == ("put_back", "p", "a long one")
    assert "me waits in the queue of e, for 0.40 s so far" in sentences(stage.story())[0]


def test_an_order_that_no_rule_explains_is_said_to_be_untold() -> None:
    stage = Stage()
    stage.accepted("me", 0.0)
    stage.queue(0.2, waiting("me", 0.0), waiting("other", 0.1))
    stage.queue(0.3, started=["other"])
    assert [p.ground for p in stage.story().passed] == ["untold"]
    assert "for a reason that was not told" in sentences(stage.story())[0]


def test_one_that_has_not_come_waits_for_what_it_depends_on_or_for_its_harness() -> None:
    stage = Stage()
    described = RequestDescribed(ready=False, depends_on=("first",))
    stage.say(stage.harness, described, 1.0, request="me", workflow="w", engine="e")
    assert sentences(stage.story())[0] == "me has not come to an engine: it waits for first."
    done = RequestOutcome(status="completed")
    stage.say(stage.engine, done, 2.0, request="first", engine="e")
    assert "it was not said to be ready" in sentences(stage.story())[0]
    ready = RequestReadinessChanged(ready=True)
    stage.say(stage.harness, ready, 3.0, request="me", workflow="w")
    assert "its harness has not sent it" in sentences(stage.story())[0]
    assert [line.what for line in timeline(stage.story())] == [
        "described, not ready",
        "completed, on which it depends",
        "said to be, ready",
    ]


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        ("rejected", "too_long: 9 tokens, this engine holds 8", "was rejected by e: it is longer"),
        ("failed", "engine_restarted", "failed on e: the engine restarted"),
        ("failed", "of_the_future", "failed on e: of_the_future."),
    ],
)
def test_a_refusal_and_a_failure_are_told_in_words(status: str, reason: str, words: str) -> None:
    stage = Stage()
    outcome = RequestOutcome(status=status, reason=reason)  # type: ignore[arg-type]
    stage.say(stage.engine, outcome, 1.0, request="me", engine="e")
    assert words in sentences(stage.story())[0]


def test_hashes_that_cannot_be_read_and_bodies_that_are_none_end_nothing() -> None:
    stage = Stage()
    odd = RequestDescribed(prompt_tokens=1024, block_size=512, prefix_hashes=pack([1, 2]) + b"odd")
    stage.say(stage.harness, odd, 0.0, request="me", workflow="w", engine="e")
    stage.accepted("me", 0.0)
    good = stage.records[-1]
    assert isinstance(good, Heard)
    fields = {name: getattr(good.envelope, name) for name in good.envelope.__struct_fields__}
    for kind in ("queue_changed", "request_outcome", "prioritise", "of_the_future"):
        category = "state" if kind == "queue_changed" else "outcome"
        broken = Envelope(**fields | {"kind": kind, "category": category, "id": kind, "seq": 0})
        stage.records.append(Heard(0.5, broken))
    assert open_body(good.envelope) is not None
    assert stage.story().blocks is not None


def test_a_restart_of_its_engine_is_told() -> None:
    stage = Stage()
    described = RequestDescribed(prompt_tokens=512, block_size=512, prefix_hashes=pack([1]))
    stage.say(stage.harness, described, 0.0, request="me", workflow="w")
    stage.accepted("me", 0.0)
    stage.queue(0.0, waiting("me", 0.0), waiting("other", 0.0))
    stage.queue(0.5, started=["other", "me"])
    stage.say(
        stage.engine,
        RequestOutcome(status="failed", reason="engine_restarted"),
        1.0,
        request="me",
        engine="e",
    )
    stage.engine.restart()
    stage.queue(1.0)
    stage.accepted("me", 2.0)
    stage.queue(2.0, waiting("me", 2.0))
    stage.queue(3.0, started=["me"])
    end = RequestOutcome(status="completed", mode="dense", queue_s=1.0)
    stage.say(stage.engine, end, 4.0, request="me", engine="e")
    story = stage.story()
    assert story.status == "completed"
    assert (story.started_s, story.passed, len(story.places)) == (3.0, (), 1)
    assert "It came 2 times; this is about the last." in sentences(story)


def test_a_restart_while_it_waits_is_told() -> None:
    stage = Stage()
    stage.accepted("me", 0.0)
    stage.queue(0.0, waiting("me", 0.0))
    stage.engine.restart()
    stage.queue(1.0)
    assert any(
        u == "e restarted, and forgot all it held, at +1.000 s" for u in stage.story().unknown
    )


def test_messages_that_come_twice_are_told_once(run: Run) -> None:
    turn = max(run.turns.values(), key=lambda turn: turn.started_s - turn.sent_s)
    twice = [record for record in run.records for _ in range(2)]
    assert find_story(lambda naming: twice, turn.request, clock="virtual") == run.story(
        turn.request
    )


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_lost_doubled_or_out_of_order_a_story_is_told(
    run: Run, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(run.records) - 100))
    records = run.records[begin : begin + data.draw(st.integers(50, 2500))]
    keep = data.draw(st.sampled_from([0.3, 0.9, 1.0]))
    draw = random.Random(data.draw(st.integers(0, 1000)))
    records = [r for r in records if draw.random() < keep for _ in range(draw.choice([1, 1, 2]))]
    if data.draw(st.booleans()):
        draw.shuffle(records)
    ids = [r.envelope.key.request for r in records if isinstance(r, Heard)]
    request = draw.choice([name for name in ids if name is not None] or ["none"])
    try:
        story = find_story(lambda naming: records, request)
    except ConfigError:
        assert request == "none"
        return
    assert all(text.endswith(".") for text in sentences(story))
    assert msgspec.json.encode([*timeline(story), *timeline(story, each=True), story])


def test_a_route_is_told_with_who_chose_and_who_carried_it_out() -> None:
    stage = Stage()
    route = Route(targets=("e", "f"), reason="9 blocks there")
    stage.say(stage.policy, route, 0.0, request="me", engine="pool", operation="o")
    done = OperationOutcome(status="completed", control="route")
    stage.say(Sequencer("pool"), done, 0.1, request="me", engine="pool", operation="o")
    stage.accepted("me", 0.2)
    assert "p routed it to e, f (9 blocks there)." in sentences(stage.story())
    assert [(line.who, line.what) for line in timeline(stage.story())][:2] == [
        ("p", "asked for preference route (targets e, f): 9 blocks there"),
        ("pool", "completed p's route"),
    ]


def test_requests_of_two_tenants_with_one_id_are_two_stories() -> None:
    stage = Stage()
    acme = Sequencer("e", tenant="acme")
    for engine, start_s in ((stage.engine, 1.0), (acme, 5.0)):
        accepted = RequestOutcome(status="accepted")
        stage.say(engine, accepted, 0.0, request="me", engine="e")
        stage.say(engine, QueueChanged(waiting=(waiting("me", 0.0),)), 0.1, engine="e")
        other = f"before {start_s:g}"
        stage.say(engine, QueueChanged(started=(other,)), 0.5, engine="e")
        stage.say(engine, QueueChanged(started=("me",)), start_s, engine="e")
    with pytest.raises(ConfigError, match=r"of that id: 'acme', 'default'; choose"):
        stage.story()
    for tenant, start_s in (("default", 1.0), ("acme", 5.0)):
        story = find_story(lambda naming: stage.records, "me", tenant=tenant)
        assert (story.tenant, story.started_s) == (tenant, start_s)
        assert [passed.request for passed in story.passed] == [f"before {start_s:g}"]
    with pytest.raises(ConfigError, match="of tenant 'umbra'"):
        find_story(lambda naming: stage.records, "me", tenant="umbra")
