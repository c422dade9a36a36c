"""What a reader knows of the workflows."""

from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.delivery import Sequencer
from hear.harness_view import CLOSED_S, SILENT_S, UNTAKEN_S, ContextView, HarnessView
from hear.messages import (
    Actions,
    ContextClosed,
    ContextForked,
    ContextOpened,
    ContextPaused,
    ContextResumed,
    ContextVersioned,
    Envelope,
    Key,
    Message,
    OperationOutcome,
    Prioritise,
    RequestDescribed,
    RequestOutcome,
    RequestReadinessChanged,
    ReuseExpected,
    WorkflowDescribed,
)
from tests.hear.builders import envelope

_ids = count()


class Reader:
    """A view, and short ways to let it hear something."""

    def __init__(self, **limits: int) -> None:
        self.view = HarnessView(**limits)

    def hear(
        self,
        message: Message,
        *,
        request: str | None = None,
        context: str | None = None,
        version: int | None = None,
        workflow: str | None = "w",
        time_s: float = 0.0,
    ) -> Envelope:
        key = Key(request=request, context=context, context_version=version, workflow=workflow)
        sent = envelope(message, key, time_s=time_s, id=f"m{next(_ids)}")
        self.view.apply(sent, message)
        return sent

    def context(self, name: str = "c") -> ContextView:
        return self.view.contexts[name]

    def ready(self) -> list[str]:
        return [request.id for request in self.view.ready_requests()]


@pytest.fixture
def reader() -> Reader:
    return Reader()


COMPLETED = RequestOutcome(status="completed")


def test_a_request_is_known_from_its_description_to_its_end(reader: Reader) -> None:
    description = RequestDescribed(role="coder", turn=1)
    reader.hear(description, request="r", context="c", time_s=3.0)
    request = reader.view.requests["r"]
    assert (request.description, request.described_s, request.ready) == (description, 3.0, True)
    assert not request.accepted
    reader.hear(RequestOutcome(status="accepted"), request="r")
    assert reader.view.requests["r"].accepted
    reader.hear(COMPLETED, request="r", context="c")
    assert not reader.view.requests


@pytest.mark.parametrize("status", ["failed", "rejected"])
def test_a_request_that_did_not_complete_is_over_and_no_turn(reader: Reader, status: str) -> None:
    reader.hear(RequestDescribed(), request="r", context="c")
    outcome = msgspec.convert({"kind": "request_outcome", "status": status}, RequestOutcome)
    reader.hear(outcome, request="r", context="c")
    assert not reader.view.requests
    assert reader.context().turns == 0


def test_a_request_is_ready_when_said_so_and_all_that_it_depends_on_has_completed(
    reader: Reader,
) -> None:
    reader.hear(RequestDescribed(), request="a")
    reader.hear(RequestDescribed(depends_on=("a", "b")), request="c")
    reader.hear(RequestDescribed(ready=False), request="b")
    assert reader.ready() == ["a"]
    reader.hear(COMPLETED, request="a")
    reader.hear(RequestReadinessChanged(ready=True), request="b")
    assert reader.ready() == ["b"]
    reader.hear(RequestOutcome(status="failed"), request="b")
    assert reader.ready() == []  # c waits for what will not come
    reader.hear(RequestDescribed(), request="b")  # and is tried again
    reader.hear(COMPLETED, request="b")
    assert reader.ready() == ["c"]
    reader.hear(RequestReadinessChanged(ready=False), request="c")
    assert reader.ready() == []


def test_readiness_of_a_request_that_was_not_described_says_nothing(reader: Reader) -> None:
    reader.hear(RequestReadinessChanged(ready=True), request="r")
    reader.hear(RequestOutcome(status="accepted"), request="r")
    assert not reader.view.requests


def test_an_outcome_may_overtake_the_description_of_its_request(reader: Reader) -> None:
    """Engine and harness speak on different channels, between which there is no order."""
    reader.hear(COMPLETED, request="r", context="c", time_s=5.0)
    reader.hear(RequestDescribed(), request="r", context="c", time_s=4.0)
    assert not reader.view.requests
    assert (reader.context().turns, reader.context().gaps_s) == (1, [])


def run_of(view: HarnessView, epoch: int, source: str = "harness", at: float = 0.0) -> None:
    """One run of a harness that counts its requests from 1."""
    harness, engine = Sequencer(source, epoch), Sequencer("e0", 7)
    for number in (1, 2):
        key = Key(request=f"r{number}", context="c", context_version=number, engine="e0")
        for sequencer, message in (
            (harness, RequestDescribed(prompt_tokens=10)),
            (engine, RequestOutcome(status="completed")),
        ):
            view.apply(sequencer.wrap(message, key, at + number), message)


def test_a_harness_that_starts_again_and_counts_from_1_is_heard(reader: Reader) -> None:
    run_of(reader.view, epoch=1)
    harness, key = Sequencer("harness", 2), Key(request="r1", context="c", context_version=1)
    described = RequestDescribed(prompt_tokens=20)
    reader.view.apply(harness.wrap(described, key, 1.0), described)
    assert reader.view.requests["r1"].description is described
    assert (reader.context().turns, reader.context().gaps_s) == (0, [])


def test_another_harness_may_use_the_same_names_later(reader: Reader) -> None:
    run_of(reader.view, epoch=1)
    harness, key = Sequencer("another", 1), Key(request="r1", context="d")
    described = RequestDescribed(prompt_tokens=20)
    reader.view.apply(harness.wrap(described, key, 50.0), described)
    assert reader.ready() == ["r1"]


def test_what_a_pool_says_late_of_a_request_that_has_completed_begins_no_new_one(
    reader: Reader,
) -> None:
    run_of(reader.view, epoch=1)
    late = RequestDescribed(prompt_tokens=10)
    for source, epoch in (("pool", 99), ("harness", 1)):
        key = Key(request="r1", context="c", context_version=1, engine="e0")
        reader.view.apply(Sequencer(source, epoch).wrap(late, key, 1.0), late)
    assert reader.ready() == []


def test_a_request_that_never_ended_and_is_described_in_a_new_epoch_is_another(
    reader: Reader,
) -> None:
    described, key = RequestDescribed(prompt_tokens=10), Key(request="r1", context="c")
    lives = []
    for epoch in (1, 1, 2):
        again = Sequencer("harness", epoch).wrap(described, key, 1.0)
        reader.view.apply(msgspec.structs.replace(again, id=f"m{next(_ids)}"), described)
        lives.append(reader.view.requests["r1"].life)
    assert lives == [0, 0, 1]


def test_a_context_counts_its_turns_and_the_pauses_between_them(reader: Reader) -> None:
    for turn, (asked_s, done_s) in enumerate([(0.0, 2.0), (7.0, 9.0), (10.0, 11.0)]):
        reader.hear(RequestDescribed(), request=f"r{turn}", context="c", time_s=asked_s)
        reader.hear(COMPLETED, request=f"r{turn}", context="c", time_s=done_s)
    context = reader.context()
    assert (context.turns, context.gaps_s, context.last_completed_s) == (3, [5.0, 1.0], 11.0)


@given(st.data())
def test_what_is_delivered_twice_counts_once(data: st.DataObject) -> None:
    once, twice = Reader(), Reader()
    sent: list[tuple[Envelope, Message]] = []
    for turn in range(4):
        described, time_s = RequestDescribed(turn=turn), 10.0 * turn
        for message in (described, COMPLETED):
            heard = once.hear(message, request=f"r{turn}", context="c", time_s=time_s)
            sent.append((heard, message))
    for place, each in enumerate(sent):
        twice.view.apply(*each)
        twice.view.apply(*sent[data.draw(st.integers(0, place))])
    assert twice.view.contexts == once.view.contexts
    assert twice.view.requests == once.view.requests
    assert twice.view.changes == once.view.changes


def test_a_context_has_a_version_that_only_grows(reader: Reader) -> None:
    reader.hear(ContextOpened(role="coder"), context="c", version=1)
    reader.hear(ContextVersioned(tokens=10), context="c", version=3)
    reader.hear(ContextVersioned(tokens=5), context="c", version=2)
    assert (reader.context().role, reader.context().version) == ("coder", 3)


def test_a_fork_knows_its_parent(reader: Reader) -> None:
    reader.hear(ContextForked(parent="c", parent_version=3), context="d")
    assert reader.context("d").parent == "c"


@pytest.mark.parametrize(
    "message", [ContextResumed(), ContextVersioned(), RequestDescribed()], ids=lambda m: type(m)
)
def test_a_pause_lasts_until_the_context_goes_on(reader: Reader, message: Message) -> None:
    pause = ContextPaused(cause="tool", tool="search", expected_pause_s=4.0)
    reader.hear(pause, context="c", time_s=2.0)
    assert (reader.context().pause, reader.context().paused_s) == (pause, 2.0)
    reader.hear(message, context="c", request="r" if type(message) is RequestDescribed else None)
    assert (reader.context().pause, reader.context().paused_s) == (None, None)


def test_the_last_word_on_reuse_counts(reader: Reader) -> None:
    for probability in (0.5, 0.25):
        reuse = ReuseExpected(basis="predicted", probability=probability)
        reader.hear(reuse, context="c")
    assert reader.context().reuse == reuse


def test_a_closed_context_is_forgotten(reader: Reader) -> None:
    reader.hear(ContextOpened(), context="c")
    reader.hear(ContextClosed(), context="c")
    reader.hear(ContextClosed(), context="never opened")
    assert not reader.view.contexts


def test_workflows_are_kept_by_name(reader: Reader) -> None:
    described = WorkflowDescribed(roles=("coder",), steps=(Actions(name="code", role="coder"),))
    reader.hear(described, workflow="w")
    reader.hear(described, workflow=None)
    assert dict(reader.view.workflows) == {"w": described}


def test_what_changed_is_listed_with_its_key(reader: Reader) -> None:
    described, opened = RequestDescribed(), ContextOpened()
    keys = [reader.hear(described, request="r").key, reader.hear(opened, context="c").key]
    assert reader.view.changes == list(zip(keys, [described, opened], strict=True))


@pytest.mark.parametrize("message", [OperationOutcome(status="completed"), Prioritise(priority=1)])
def test_what_is_neither_intent_nor_a_requests_outcome_is_ignored(
    reader: Reader, message: Message
) -> None:
    reader.hear(message, context="c", request="r")
    assert not reader.view.contexts
    assert not reader.view.changes


@pytest.mark.parametrize("message", [RequestDescribed(), ContextOpened(), COMPLETED])
def test_what_names_neither_request_nor_context_changes_nothing(
    reader: Reader, message: Message
) -> None:
    reader.hear(message)
    assert not reader.view.requests
    assert not reader.view.contexts


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    reader = Reader(max_requests=3, max_contexts=3)
    for number in range(10):
        name = str(number)
        reader.hear(RequestDescribed(), request=name, context=name)
        reader.hear(WorkflowDescribed(), workflow=name)
    view = reader.view
    assert list(view.requests) == list(view.contexts) == list(view.workflows) == ["7", "8", "9"]


def test_a_request_that_is_described_again_keeps_its_age_and_adds_no_pause() -> None:
    """As when a pool has found the engine that it goes to."""
    reader = Reader()
    reader.hear(RequestDescribed(), request="c/1", context="c", time_s=1.0)
    reader.hear(RequestOutcome(status="completed"), request="c/1", context="c", time_s=5.0)
    reader.hear(RequestDescribed(), request="c/2", context="c", time_s=8.0)
    reader.hear(RequestOutcome(status="accepted"), request="c/2", context="c", time_s=8.0)
    reader.hear(RequestDescribed(prompt_tokens=7), request="c/2", context="c", time_s=9.0)
    assert reader.context().gaps_s == [3.0]
    request = reader.view.requests["c/2"]
    assert (request.described_s, request.accepted) == (8.0, True)
    assert request.description.prompt_tokens == 7


def test_a_request_that_no_engine_takes_is_given_up_and_listed(reader: Reader) -> None:
    """As where it went to an engine that HEAR sees from outside, which tells no outcome."""
    key = reader.hear(RequestDescribed(), request="r", context="c").key
    reader.view.clear_changes()
    reader.view.advance(UNTAKEN_S)
    assert (list(reader.view.requests), reader.view.forgotten) == (["r"], [])
    reader.view.advance(UNTAKEN_S + 61)
    assert not reader.view.requests
    assert (reader.view.forgotten, reader.view.num_forgotten) == ([key], 1)
    reader.view.clear_changes()
    assert (reader.view.forgotten, reader.view.num_forgotten) == ([], 1)


@pytest.mark.parametrize("is_accepted", [True, False])
def test_a_request_that_waits_for_others_or_at_an_engine_is_kept_longer(
    reader: Reader, is_accepted: bool
) -> None:
    reader.hear(RequestDescribed(ready=is_accepted), request="r")
    if is_accepted:
        reader.hear(RequestOutcome(status="accepted"), request="r")
    reader.view.advance(SILENT_S)
    assert list(reader.view.requests) == ["r"]
    reader.view.advance(SILENT_S + 61)
    assert not reader.view.requests


@pytest.mark.parametrize(
    "message", [RequestDescribed(), RequestReadinessChanged(ready=True)], ids=lambda m: type(m)
)
def test_a_word_on_a_request_keeps_it(reader: Reader, message: Message) -> None:
    reader.hear(RequestDescribed(), request="r")
    reader.view.advance(UNTAKEN_S / 2)
    reader.hear(message, request="r")
    reader.view.advance(UNTAKEN_S + 61)
    assert list(reader.view.requests) == ["r"]


def test_a_request_of_a_closed_context_that_no_engine_has_taken_goes_soon(reader: Reader) -> None:
    for name in ("taken", "untaken"):
        reader.hear(RequestDescribed(), request=name, context="c")
    reader.hear(RequestOutcome(status="accepted"), request="taken", context="c")
    reader.hear(ContextClosed(), context="c")
    reader.view.advance(CLOSED_S)
    assert list(reader.view.requests) == ["untaken", "taken"]
    reader.view.advance(2 * CLOSED_S + 1)
    assert list(reader.view.requests) == ["taken"]


def test_an_outcome_after_the_end_of_its_context_does_not_open_it_again(reader: Reader) -> None:
    reader.hear(RequestDescribed(), request="r", context="c")
    reader.hear(ContextClosed(), context="c")
    assert reader.view.is_closed("c")
    reader.hear(COMPLETED, request="r", context="c")
    reader.hear(ReuseExpected(basis="predicted"), context="c")
    assert not reader.view.contexts
    reader.hear(RequestDescribed(), request="r2", context="c")  # its harness goes on with it
    assert list(reader.view.contexts) == ["c"]
    assert not reader.view.is_closed("c")


def test_contexts_and_workflows_of_which_nothing_is_heard_are_given_up(reader: Reader) -> None:
    for name in ("silent", "spoken of"):
        reader.hear(WorkflowDescribed(), workflow=name)
        reader.hear(ContextOpened(), context=name, workflow=name)
    reader.view.advance(SILENT_S)
    reader.hear(ContextPaused(), context="spoken of", workflow="spoken of")
    reader.view.advance(SILENT_S + 61)
    assert list(reader.view.contexts) == list(reader.view.workflows) == ["spoken of"]


def test_time_is_that_of_the_reader_and_not_what_a_message_says(reader: Reader) -> None:
    reader.hear(RequestDescribed(), request="r", time_s=-1e12)
    reader.view.advance(UNTAKEN_S)
    assert list(reader.view.requests) == ["r"]
    reader.hear(RequestDescribed(), request="r", time_s=1e12)
    reader.view.advance(2 * UNTAKEN_S + 61)
    assert not reader.view.requests


def test_prompts_are_bounded_in_bytes() -> None:
    reader = Reader(max_bytes=100_000)
    for number in range(10):
        reader.hear(RequestDescribed(prefix_hashes=bytes(40_000)), request=f"r{number}")
    assert list(reader.view.requests) == ["r8", "r9"]
    assert [key.request for key in reader.view.forgotten] == [f"r{n}" for n in range(8)]


def test_pauses_and_graphs_are_bounded_in_bytes() -> None:
    reader = Reader(max_bytes=400_000)
    for context in range(10):
        for turn in range(1_000):
            name = f"{context}/{turn}"
            reader.hear(RequestDescribed(), request=name, context=f"c{context}", time_s=2.0 * turn)
            reader.hear(COMPLETED, request=name, context=f"c{context}", time_s=2.0 * turn + 1)
        steps = tuple(Actions(name=f"{number:010}") for number in range(1_000))
        reader.hear(WorkflowDescribed(steps=steps), workflow=f"w{context}")
    assert list(reader.view.contexts) == ["c8", "c9"]
    assert 0 < reader.view.workflows.size_bytes <= 100_000
