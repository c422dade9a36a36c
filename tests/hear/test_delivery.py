from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.delivery import Arrival, GapDetector, Sequencer
from hear.errors import LocalProtocolError
from hear.messages import (
    DEFAULT_TENANT,
    CapabilitiesReported,
    ContextOpened,
    Control,
    Envelope,
    Key,
    Message,
    OperationOutcome,
    OperationStatus,
    PressureReported,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
)
from hear.operation import Operation
from hear.sender_operations import SPARE_TIMERS, SenderOperations
from tests.hear.builders import envelope

E0 = Key(engine="e0")

# -- Sequencer ------------------------------------------------------------------------------------


def test_each_channel_is_numbered_from_one_without_holes() -> None:
    source = Sequencer("e0")
    said: list[tuple[Message, Key]] = [
        (QueueChanged(), E0),
        (PressureReported(), E0),
        (QueueChanged(), E0),
        (QueueChanged(), Key(engine="e1")),
        (ContextOpened(), Key(workflow="w")),
        (PressureReported(), E0),
    ]
    numbers = [source.wrap(message, key, 0.0).seq for message, key in said]
    assert numbers == [1, 1, 2, 1, 1, 2]


def test_a_snapshot_has_the_number_of_the_last_change_that_it_includes() -> None:
    source = Sequencer("e0")
    assert source.wrap_snapshot(QueueSnapshot(), E0, 0.0).seq == 0
    source.wrap(QueueChanged(), E0, 0.0)
    assert source.wrap_snapshot(QueueSnapshot(), E0, 0.0).seq == 1
    assert source.wrap(QueueChanged(), E0, 0.0).seq == 2


def test_a_restart_begins_a_new_epoch_and_all_numbers_anew() -> None:
    source = Sequencer("e0", epoch=4, tenant="acme")
    old = source.wrap(QueueChanged(), E0, 1.5)
    source.restart()
    new = source.wrap(QueueChanged(), E0, 2.5)
    assert (old.epoch, old.seq, old.time_s, old.tenant) == (4, 1, 1.5, "acme")
    assert (new.epoch, new.seq, new.time_s, new.tenant) == (5, 1, 2.5, "acme")
    assert old.id != new.id


def test_no_two_ids_of_a_source_are_equal_whatever_they_are_for() -> None:
    source = Sequencer("e0")
    ids = [source.next_id(), source.wrap(QueueChanged(), E0, 0.0).id, source.next_id()]
    source.restart()
    ids += [source.next_id(), source.wrap_snapshot(QueueSnapshot(), E0, 0.0).id]
    assert len(set(ids)) == len(ids)


def test_what_is_no_message_is_not_numbered() -> None:
    source = Sequencer("e0")
    with pytest.raises(LocalProtocolError):
        source.wrap(Control(), E0, 0.0)
    assert source.next_id() == "e0-1-1"


# -- GapDetector ----------------------------------------------------------------------------------


def changed(seq: int, epoch: int = 1, source: str = "e0") -> Envelope:
    return envelope(QueueChanged(), Key(engine=source), seq=seq, epoch=epoch, source=source)


def snapshot(seq: int, epoch: int = 1) -> Envelope:
    return envelope(QueueSnapshot(), E0, seq=seq, epoch=epoch, source="e0")


N, S, OLD, G = Arrival.NEXT, Arrival.SNAPSHOT, Arrival.STALE, Arrival.GAP


@pytest.mark.parametrize(
    ("heard", "arrivals", "missed"),
    [
        ([changed(1), changed(2), changed(3)], [N, N, N], 0),
        ([changed(1), changed(1)], [N, OLD], 0),
        ([changed(1), changed(4), changed(5)], [N, G, N], 2),
        ([changed(7), changed(8)], [G, N], 6),
        ([changed(1), changed(3), changed(2)], [N, G, OLD], 1),
        ([snapshot(0), changed(1)], [S, N], 0),
        ([snapshot(9), changed(9), changed(10)], [S, OLD, N], 0),
        ([changed(1), changed(2), snapshot(1)], [N, N, OLD], 0),
        ([changed(1), snapshot(1), snapshot(1), changed(2)], [N, S, S, N], 0),
        ([changed(3), snapshot(5), changed(6)], [G, S, N], 2),
        ([changed(2), changed(1, epoch=2), changed(3)], [G, N, OLD], 1),
        ([changed(1), changed(3, epoch=2), changed(4, epoch=2)], [N, G, N], 2),
        ([changed(5), snapshot(0, epoch=2), snapshot(9)], [G, S, OLD], 4),
        ([changed(1), changed(1, source="e1"), changed(2)], [N, N, N], 0),
    ],
)
def test_a_message_is_classified_by_what_came_before_it_on_its_channel(
    heard: list[Envelope], arrivals: list[Arrival], missed: int
) -> None:
    detector = GapDetector()
    assert [detector.observe(each) for each in heard] == arrivals
    assert (detector.gaps, detector.missed) == (arrivals.count(G), missed)


def test_a_channel_without_numbers_has_no_gaps_and_no_duplicates() -> None:
    detector = GapDetector()
    said = envelope(ContextOpened(), E0, seq=0)
    assert [detector.observe(said), detector.observe(said)] == [N, N]
    assert (detector.gaps, detector.missed) == (0, 0)


def test_a_report_that_stands_for_itself_leaves_no_gap() -> None:
    """Capabilities, costs and pressure: each says all that there is, so nothing is missed."""
    detector = GapDetector()
    for message in (CapabilitiesReported(), PressureReported()):
        for seq, arrival in ((4, S), (9, S), (8, OLD)):
            assert detector.observe(envelope(message, E0, seq=seq)) == arrival
    assert detector.gaps == 0


@dataclass
class _Source:
    """Says numbers; what a reader should believe at any point is their list in this epoch."""

    sequencer: Sequencer
    truth: dict[tuple[int, int], list[int]]
    said: list[int]

    def change(self, number: int) -> Envelope:
        self.said = [*self.said, number]
        sent = self.sequencer.wrap(QueueChanged(num_waiting=number), E0, 0.0)
        self.truth[sent.epoch, sent.seq] = self.said
        return sent

    def snapshot(self) -> Envelope:
        sent = self.sequencer.wrap_snapshot(QueueSnapshot(), E0, 0.0)
        self.truth[sent.epoch, sent.seq] = self.said
        return sent

    def restart(self) -> None:
        self.sequencer.restart()
        self.said = []


@given(
    st.lists(st.sampled_from(["change"] * 8 + ["snapshot", "snapshot", "restart"]), max_size=30),
    st.data(),
)
def test_a_reader_that_heeds_the_detector_never_believes_what_is_not_so(
    actions: list[str], data: st.DataObject
) -> None:
    """Over a link that loses, duplicates and reorders, with restarts and late readers."""
    source = _Source(Sequencer("e0"), {}, [])
    link: list[Envelope] = []
    numbers: dict[str, int] = {}
    for place, action in enumerate(actions):
        if action == "restart":
            source.restart()
        elif action == "snapshot":
            link.append(source.snapshot())
        else:
            link.append(source.change(place))
            numbers[link[-1].id] = place
    for _ in range(data.draw(st.integers(0, 8))):
        if not link:
            break
        place = data.draw(st.integers(0, len(link) - 1))
        fault = data.draw(st.sampled_from(["lose", "twice", "swap"]))
        if fault == "lose":
            del link[place]
        elif fault == "twice":
            link.insert(data.draw(st.integers(0, len(link))), link[place])
        else:
            link.insert(data.draw(st.integers(0, len(link) - 1)), link.pop(place))

    detector = GapDetector()
    believed: list[int] | None = None
    for sent in link:
        match detector.observe(sent):
            case Arrival.NEXT:
                if sent.seq == 1:
                    believed = []
                if believed is not None:
                    believed = [*believed, numbers[sent.id]]
            case Arrival.SNAPSHOT:
                believed = source.truth[sent.epoch, sent.seq]
            case Arrival.GAP:
                believed = None
            case Arrival.STALE:
                continue
        if believed is not None:
            assert believed == source.truth[sent.epoch, sent.seq]


# -- operations of a sender ----------------------------------------------------------------------


def control(id: str | None = "p-1-1", engine: str = "e0") -> Envelope:
    key = Key(engine=engine, request="r", operation=id)
    return envelope(Prioritise(priority=1), key, source="p")


def submit(
    sender_operations: SenderOperations, sent: Envelope, now: float = 0.0, give_up_s: float = 60.0
) -> Operation:
    return sender_operations.submit(sent, Prioritise(priority=1), now, give_up_s)


def outcome(status: OperationStatus) -> OperationOutcome:
    return OperationOutcome(status=status)


def test_a_control_is_sent_again_with_growing_pauses_until_it_is_given_up() -> None:
    sender_operations, sent = SenderOperations(first_retry_s=1.0, max_retry_s=8.0), control()
    op = submit(sender_operations, sent, give_up_s=30.0)
    times = []
    while (due := sender_operations.next_due()) is not None:
        again, lost = sender_operations.due(due)
        times.append(due)
        assert (again, lost) == (([sent], []) if due < 30.0 else ([], [op]))
    assert times == [1.0, 3.0, 7.0, 15.0, 23.0, 30.0]
    assert (op.phase, len(sender_operations)) == ("failed", 0)


def test_a_control_that_nobody_answers_is_sent_again_for_a_day_at_the_longest_pause() -> None:
    sender_operations, sent = SenderOperations(first_retry_s=1.0, max_retry_s=16.0), control()
    op = submit(sender_operations, sent, give_up_s=86_400.0)
    times = [0.0]
    while (due := sender_operations.next_due()) is not None:
        _, lost = sender_operations.due(due)
        times.append(due)
        assert lost == ([op] if due == 86_400.0 else [])
    assert len(times) > 5_000
    assert {b - a for a, b in pairwise(times[5:-1])} == {16.0}


def test_asking_again_for_hours_leaves_no_timers_behind() -> None:
    sender_operations, sent = SenderOperations(), control()
    submit(sender_operations, sent, give_up_s=86_400.0)
    for second in range(10_000):
        assert sender_operations.ask_again(float(second)) == [sent]
    assert len(sender_operations._timers) <= SPARE_TIMERS + 2


def test_what_nobody_answers_is_given_up_long_before_what_was_accepted() -> None:
    sender_operations, first, second = SenderOperations(), control("p-1-1"), control("p-1-2")
    gone = sender_operations.submit(first, Prioritise(priority=1), 0.0, 86_400.0, answer_by_s=120.0)
    held = sender_operations.submit(
        second, Prioritise(priority=1), 0.0, 86_400.0, answer_by_s=120.0
    )
    sender_operations.hear(second.key, outcome("accepted"))
    lost = [
        operation for at in range(0, 200, 10) for operation in sender_operations.due(float(at))[1]
    ]
    assert lost == [gone]
    assert (gone.phase, held.phase, len(sender_operations)) == ("failed", "accepted", 1)
    assert sender_operations.due(86_400.0)[1] == [held]


def test_nothing_is_sent_before_it_is_due() -> None:
    sender_operations = SenderOperations(first_retry_s=1.0)
    submit(sender_operations, control())
    assert sender_operations.due(0.999) == ([], [])
    assert sender_operations.next_due() == 1.0


def test_what_was_accepted_is_not_sent_again_but_still_given_up() -> None:
    sender_operations, sent = SenderOperations(), control()
    op = submit(sender_operations, sent)
    assert sender_operations.hear(sent.key, outcome("accepted")) is op
    assert (op.phase, sender_operations.next_due()) == ("accepted", 60.0)
    assert sender_operations.due(60.0) == ([], [op])
    assert op.phase == "failed"


@pytest.mark.parametrize("status", ["completed", "rejected", "unsupported", "failed"])
def test_a_terminal_outcome_ends_an_operation_though_acceptance_was_not_heard(
    status: OperationStatus,
) -> None:
    sender_operations, sent = SenderOperations(), control()
    op = submit(sender_operations, sent)
    assert sender_operations.hear(sent.key, outcome(status)) is op
    assert (op.phase, len(sender_operations), sender_operations.next_due()) == (status, 0, None)


def test_what_is_heard_again_or_after_the_end_moves_nothing() -> None:
    sender_operations, sent = SenderOperations(), control()
    op = submit(sender_operations, sent)
    sender_operations.hear(sent.key, outcome("accepted"))
    assert sender_operations.hear(sent.key, outcome("accepted")) is None
    sender_operations.hear(sent.key, outcome("completed"))
    for late in ("accepted", "completed", "failed", "rejected"):
        assert sender_operations.hear(sent.key, outcome(late)) is None
    assert op.phase == "completed"


@pytest.mark.parametrize("status", ["rejected", "unsupported"])
def test_a_refusal_after_acceptance_is_a_failure(status: OperationStatus) -> None:
    """An engine that has forgotten what it accepted, since it restarted, may refuse a duplicate."""
    sender_operations, sent = SenderOperations(), control()
    op = submit(sender_operations, sent)
    sender_operations.hear(sent.key, outcome("accepted"))
    assert sender_operations.hear(sent.key, outcome(status)) is op
    assert (op.phase, len(sender_operations)) == ("failed", 0)


def test_outcomes_of_other_senders_operations_are_ignored() -> None:
    sender_operations = SenderOperations()
    submit(sender_operations, control())
    assert sender_operations.hear(Key(operation="q-1-1"), outcome("completed")) is None
    assert sender_operations.hear(Key(), outcome("completed")) is None
    assert len(sender_operations) == 1


def test_a_newer_epoch_of_an_engine_has_what_is_open_there_and_nowhere_else_said_again() -> None:
    sender_operations, sent = SenderOperations(), control("p-1-1")
    here, there = submit(sender_operations, sent), submit(sender_operations, control("p-1-2", "e1"))
    assert sender_operations.hear_epoch("e0", 3, 0.5) == []
    assert sender_operations.hear_epoch("e0", 3, 0.5) == []
    assert sender_operations.hear_epoch("e0", 2, 0.5) == []
    assert sender_operations.epoch_of("e0") == 3
    assert sender_operations.hear_epoch("e0", 4, 0.5) == [sent]
    assert (here.phase, there.phase) == ("submitted", "submitted")


def test_what_was_accepted_is_said_again_until_an_answer_comes_if_asked_to() -> None:
    sender_operations, sent = SenderOperations(), control()
    submit(sender_operations, sent)
    sender_operations.hear(sent.key, outcome("accepted"))
    quiet = sender_operations.next_due()
    assert sender_operations.ask_again(10.0, "e1") == []
    assert sender_operations.ask_again(10.0) == [sent]
    assert sender_operations.next_due() == 11.0
    assert sender_operations.due(11.0) == ([sent], [])
    sender_operations.hear(sent.key, outcome("accepted"))
    assert sender_operations.next_due() == quiet
    assert sender_operations.ask_again(12.0, "e0") == [sent]


@pytest.mark.parametrize("id", [None, "p-1-1"])
def test_a_control_needs_an_operation_that_is_not_open(id: str | None) -> None:
    sender_operations = SenderOperations()
    op = submit(sender_operations, control())
    with pytest.raises(LocalProtocolError, match="expected a new id"):
        submit(sender_operations, control(id))
    assert sender_operations.open_operations == [op]
    assert sender_operations.next_due() == 1.0


def test_ids_are_unlike_those_that_the_same_source_gives_other_tenants() -> None:
    ids = [Sequencer("e", 1, tenant).next_id() for tenant in (DEFAULT_TENANT, "acme", "umbra")]
    assert ids == ["e-1-1", "acme/e-1-1", "umbra/e-1-1"]
