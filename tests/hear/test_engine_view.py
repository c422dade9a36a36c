"""What a reader believes of the engines, and that it never takes for known what it is not."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.blocks import pack
from hear.delivery import Sequencer
from hear.engine_view import ASK_AGAIN_S, SILENT_S, EngineViews
from hear.errors import RemoteProtocolError
from hear.messages import (
    BlocksRemoved,
    BlocksStored,
    CapabilitiesReported,
    CostsReported,
    Envelope,
    Key,
    Message,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    ResidencyChanged,
    ResidencyPartial,
    ResidencySnapshot,
    RunningRequest,
    WaitingRequest,
)
from tests.hear.builders import envelope

E0 = Key(engine="e0")


def say(
    message: Message,
    seq: int,
    *,
    epoch: int = 1,
    time_s: float = 0.0,
    engine: str = "e0",
) -> tuple[Envelope, Message]:
    key = Key(engine=engine)
    return envelope(message, key, source=engine, epoch=epoch, seq=seq, time_s=time_s), message


def stored(*hashes: int, parent: int | None = None) -> ResidencyChanged:
    chain = BlocksStored(tier="gpu", parent=parent, prefix_hashes=pack(hashes))
    return ResidencyChanged(changes=(chain,))


def all_of(*hashes: int, part: int = 0, parts: int = 1) -> ResidencySnapshot:
    chains = (BlocksStored(tier="gpu", prefix_hashes=pack(hashes)),)
    return ResidencySnapshot(chains=chains, part=part, parts=parts)


def waiting(*requests: str) -> tuple[WaitingRequest, ...]:
    return tuple(WaitingRequest(request=request, since_s=0.0) for request in requests)


@pytest.fixture
def views() -> EngineViews:
    return EngineViews()


# -- engines and their reports ----------------------------------------------------------------


def test_engines_are_known_by_the_name_in_the_key_or_by_their_source(views: EngineViews) -> None:
    views.apply(*say(PressureReported(), 1))
    nameless = envelope(PressureReported(), Key(), source="e1")
    views.apply(nameless, PressureReported())
    assert (list(views), len(views)) == (["e0", "e1"], 2)
    assert views["e1"].name == "e1"
    assert "e2" not in views


def test_reports_are_kept_with_the_time_that_they_are_of(views: EngineViews) -> None:
    capabilities, costs = (
        CapabilitiesReported(model="m"),
        CostsReported(
            basis="estimated", prefill_tokens_per_s=1.0, decode_step_s=1.0, kv_bytes_per_token=1.0
        ),
    )
    pressure = PressureReported(num_waiting=3)
    for message in (capabilities, costs, pressure):
        views.apply(*say(message, 1, time_s=10.0))
    view = views["e0"]
    assert (view.capabilities, view.costs, view.pressure) == (capabilities, costs, pressure)
    assert view.age_s("pressure", 12.5) == 2.5
    assert view.age_s("residency", 12.5) is None


def test_what_changed_is_listed_until_it_is_taken(views: EngineViews) -> None:
    first, second = PressureReported(num_waiting=1), PressureReported(num_waiting=2)
    views.apply(*say(first, 1))
    views.apply(*say(second, 2))
    views.apply(*say(first, 1))  # again, and late
    assert views.changes == [(views["e0"], first), (views["e0"], second)]


# -- the queue --------------------------------------------------------------------------------


def test_the_queue_follows_its_changes(views: EngineViews) -> None:
    views.apply(*say(QueueChanged(waiting=waiting("a", "b", "c")), 1))
    views.apply(*say(QueueChanged(started=("b",), ended=("c",)), 2))
    view = views["e0"]
    assert view.queue_known
    assert (list(view.waiting), list(view.running)) == (["a"], ["b"])
    views.apply(*say(QueueChanged(waiting=waiting("b")), 3))  # it was preempted
    assert (list(view.waiting), list(view.running)) == (["a", "b"], [])
    views.apply(*say(QueueChanged(started=("a",)), 4))
    views.apply(*say(QueueChanged(ended=("a", "b", "x")), 5))
    assert (list(view.waiting), list(view.running)) == ([], [])


def test_a_queue_with_a_gap_is_not_known_until_a_snapshot(views: EngineViews) -> None:
    assert not views.apply(*say(QueueChanged(waiting=waiting("a")), 1))
    assert views.apply(*say(QueueChanged(waiting=waiting("c")), 3))
    assert not views["e0"].queue_known
    snapshot = QueueSnapshot(
        waiting=waiting("b", "c"), running=(RunningRequest(request="a", prompt_tokens=1),)
    )
    assert not views.apply(*say(snapshot, 3))
    view = views["e0"]
    assert view.queue_known
    assert (list(view.waiting), list(view.running)) == (["b", "c"], ["a"])
    assert views.gaps == 1


# -- residency --------------------------------------------------------------------------------


def test_residency_follows_its_changes_from_the_first(views: EngineViews) -> None:
    views.apply(*say(stored(1, 2), 1))
    views.apply(*say(stored(3, parent=2), 2))
    assert views["e0"].residency_known
    assert views["e0"].residency.match([1, 2, 3, 4]) == 3


def test_other_reports_do_not_make_residency_known(views: EngineViews) -> None:
    """Not known is not the same as empty, however little was said yet."""
    views.apply(*say(CapabilitiesReported(), 1))
    assert not views["e0"].residency_known
    assert not views["e0"].queue_known


def test_after_a_gap_residency_is_unknown_and_not_as_before(views: EngineViews) -> None:
    views.apply(*say(stored(1, 2), 1))
    assert views.apply(*say(stored(3, parent=2), 3))
    view = views["e0"]
    assert not views["e0"].residency_known
    assert view.residency.match([1, 2, 3]) == 0
    assert not views.apply(*say(stored(4, parent=3), 4))
    assert view.residency.match([1, 2, 3]) == 0
    assert not views.apply(*say(all_of(1, 2, 3, 4), 4))
    assert view.residency_known
    assert view.residency.match([1, 2, 3, 4]) == 4


def test_a_snapshot_that_does_not_come_is_asked_for_again(views: EngineViews) -> None:
    assert views.apply(*say(stored(1), 5, time_s=0.0))
    assert not views.apply(*say(stored(2), 6, time_s=ASK_AGAIN_S / 2))
    assert views.apply(*say(stored(3), 7, time_s=ASK_AGAIN_S))
    assert not views.apply(*say(stored(4), 8, time_s=ASK_AGAIN_S * 1.5))
    assert views.apply(*say(QueueChanged(), 5))
    assert views.apply(*say(QueueChanged(), 6, time_s=ASK_AGAIN_S))


def test_a_snapshot_in_parts_is_known_when_all_are_there(views: EngineViews) -> None:
    for part in range(3):
        assert not views.apply(*say(all_of(part, part=part, parts=3), 8))
        assert views["e0"].residency_known == (part == 2)
    assert views["e0"].residency.num_blocks() == 3


@pytest.mark.parametrize("parts", [(1, 2), (0, 2), (2,)])
def test_a_snapshot_of_which_a_part_is_lost_is_asked_for_again(
    views: EngineViews, parts: Iterable[int]
) -> None:
    needed = [views.apply(*say(all_of(part, part=part, parts=3), 8)) for part in parts]
    assert needed.count(True) == 1  # and not for each part of it
    assert not views["e0"].residency_known
    assert views["e0"].residency.num_blocks() == 0


def test_parts_of_two_snapshots_make_none(views: EngineViews) -> None:
    views.apply(*say(all_of(1, part=0, parts=2), 8))
    assert views.apply(*say(all_of(2, part=1, parts=2), 9))
    assert not views["e0"].residency_known


def test_a_snapshot_delivered_twice_is_the_same_snapshot(views: EngineViews) -> None:
    said = [say(all_of(part, part=part, parts=2), 8) for part in range(2)]
    for each in (*said, *said, said[1], said[0]):
        assert not views.apply(*each)
    assert views["e0"].residency_known
    assert views["e0"].residency.num_blocks() == 2


@pytest.mark.parametrize("snapshot", [False, True])
def test_residency_that_cannot_be_read_raises_and_is_unknown(
    views: EngineViews, snapshot: bool
) -> None:
    views.apply(*say(stored(1), 1))
    bad = BlocksStored(tier="gpu", prefix_hashes=b"\0" * 9)
    good = BlocksStored(tier="gpu", prefix_hashes=pack([2]))
    message = (
        ResidencySnapshot(chains=(good, bad)) if snapshot else ResidencyChanged(changes=(good, bad))
    )
    with pytest.raises(RemoteProtocolError):
        views.apply(*say(message, 2))
    assert not views["e0"].residency_known
    assert views["e0"].residency.num_blocks() == 0


def test_a_watched_prompt_is_watched_through_gaps_and_restarts(views: EngineViews) -> None:
    views.apply(*say(stored(1, 2), 1))
    residency = views["e0"].residency
    residency.watch("r", [1, 2, 3])
    views.apply(*say(stored(9), 5))
    assert (residency.count("r"), residency.take_changed()) == (0, ["r"])
    views.apply(*say(stored(1, 2, 3), 1, epoch=2))
    assert (residency.count("r"), residency.take_changed()) == (3, ["r"])


# -- restarts ---------------------------------------------------------------------------------


def test_nothing_of_an_old_epoch_holds_in_a_new_one(views: EngineViews) -> None:
    views.apply(*say(stored(1, 2), 1))
    views.apply(*say(QueueChanged(waiting=waiting("a")), 1))
    views.apply(*say(PressureReported(), 1, epoch=2))
    view = views["e0"]
    assert (view.epoch, view.residency_known, view.queue_known) == (2, False, False)
    assert (view.residency.match([1, 2]), list(view.waiting)) == (0, [])
    assert not views.apply(*say(stored(1), 1, epoch=2))
    assert view.residency_known


def test_what_comes_late_from_an_old_epoch_is_ignored(views: EngineViews) -> None:
    views.apply(*say(PressureReported(), 1, epoch=2))
    before = list(views.changes)
    assert not views.apply(*say(stored(1), 1, epoch=1))
    assert not views["e0"].residency_known
    assert views.changes == before


# -- what an engine cannot tell ---------------------------------------------------------------


def part_of(*hashes: int, part: int = 0, parts: int = 1) -> ResidencyPartial:
    return ResidencyPartial(chains=all_of(*hashes).chains, part=part, parts=parts)


def test_a_partial_listing_is_neither_all_nor_as_before(views: EngineViews) -> None:
    views.apply(*say(stored(1, 2), 1))
    assert not views.apply(*say(part_of(3), 2))
    view = views["e0"]
    assert (view.residency_known, view.residency_partial, view.residency_listed) == (
        False,
        True,
        True,
    )
    assert not view.residency.holds("gpu", 1)
    assert view.residency.holds("gpu", 3)


def test_changes_are_applied_to_what_is_listed_and_no_snapshot_is_asked_for(
    views: EngineViews,
) -> None:
    views.apply(*say(part_of(3), 1))
    gone = ResidencyChanged(changes=(BlocksRemoved(tier="gpu", prefix_hashes=pack([3, 9])),))
    assert not views.apply(*say(gone, 2, time_s=10.0))
    assert not views.apply(*say(stored(4), 3, time_s=20.0))
    view = views["e0"]
    assert view.residency.num_blocks() == 1
    assert view.residency.holds("gpu", 4)
    assert not view.residency_known


def test_a_gap_ends_a_partial_listing_too(views: EngineViews) -> None:
    views.apply(*say(part_of(3), 1))
    assert views.apply(*say(stored(4), 3))
    assert not views["e0"].residency_listed
    assert not views.apply(*say(part_of(5), 3))  # said again for who missed something
    assert views["e0"].residency_partial


def test_a_snapshot_ends_a_partial_listing(views: EngineViews) -> None:
    views.apply(*say(part_of(3), 1))
    views.apply(*say(all_of(4), 1))
    assert (views["e0"].residency_known, views["e0"].residency_partial) == (True, False)


def test_parts_of_a_listing_and_of_a_snapshot_do_not_mix(views: EngineViews) -> None:
    views.apply(*say(part_of(1, part=0, parts=2), 4))
    assert not views["e0"].residency_listed
    assert views.apply(*say(all_of(2, part=1, parts=2), 4))
    assert not views["e0"].residency_listed
    views.apply(*say(part_of(1, part=0, parts=2), 4))
    views.apply(*say(part_of(2, part=1, parts=2), 4))
    assert views["e0"].residency_partial
    assert views["e0"].residency.num_blocks() == 2


def test_a_new_epoch_ends_a_partial_listing(views: EngineViews) -> None:
    views.apply(*say(part_of(3), 1))
    views.apply(*say(PressureReported(), 1, epoch=2))
    assert not views["e0"].residency_listed


# -- any loss, any order ----------------------------------------------------------------------


class _Engine:
    """Stores and removes blocks, and remembers what it held at each number of each epoch."""

    def __init__(self) -> None:
        self.sequencer = Sequencer("e0")
        self.held: set[int] = set()
        self.truth: dict[tuple[int, int], set[int]] = {(1, 0): set()}

    def change(self, block: int, now: float) -> tuple[Envelope, Message]:
        packed = pack([block])
        message = ResidencyChanged(
            changes=(
                BlocksRemoved(tier="gpu", prefix_hashes=packed)
                if block in self.held
                else BlocksStored(tier="gpu", prefix_hashes=packed),
            )
        )
        self.held = self.held ^ {block}
        sent = self.sequencer.wrap(message, E0, now)
        self.truth[sent.epoch, sent.seq] = self.held
        return sent, message

    def snapshot(self, now: float) -> list[tuple[Envelope, Message]]:
        parts = [all_of(block) for block in sorted(self.held)] or [ResidencySnapshot()]
        messages = [
            ResidencySnapshot(chains=each.chains, part=part, parts=len(parts))
            for part, each in enumerate(parts)
        ]
        return [(self.sequencer.wrap_snapshot(each, E0, now), each) for each in messages]

    def restart(self) -> None:
        self.sequencer.restart()
        self.held = set()
        self.truth[self.sequencer.epoch, 0] = self.held


@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 4, 5] * 2 + [None]), min_size=1, max_size=40),
    st.sampled_from([0, 10, 40]),
    st.data(),
)
def test_what_is_known_is_so_whatever_the_link_does_and_becomes_known_again(
    blocks: list[int | None], faults: int, data: st.DataObject
) -> None:
    views, engine, link = EngineViews(), _Engine(), list[tuple[Envelope, Message]]()
    newest, now = (0, 0), 0.0
    percent = st.integers(0, 99)

    def hear(place: int) -> bool:
        nonlocal newest
        sent, message = link.pop(place)
        needed = views.apply(sent, message)
        newest = max(newest, (sent.epoch, sent.seq))
        view = views["e0"]
        if view.residency_known:
            held = {block for block in range(6) if view.residency.holds("gpu", block)}
            assert held == engine.truth[newest]
        return needed

    for block in blocks:
        now += 0.3
        if block is None:
            engine.restart()
        else:
            link.append(engine.change(block, now))
        while link:
            fault = data.draw(percent) if faults else 99
            if fault < faults / 3:
                link.pop(0)
            elif fault < 2 * faults / 3:
                link.append(link[0])
            elif fault < faults:
                break
            elif hear(data.draw(st.integers(0, len(link) - 1)) if faults else 0):
                link += engine.snapshot(now)
    for _ in range(2):  # the faults are over, and the engine goes on
        now += 2 * ASK_AGAIN_S
        link.append(engine.change(0, now))
        while link:
            if hear(0):
                link += engine.snapshot(now)
    assert views["e0"].residency_known


# -- what is given up -------------------------------------------------------------------------


def test_a_silent_engine_is_not_believed_and_asked_anew_when_it_speaks(views: EngineViews) -> None:
    views.apply(*say(CapabilitiesReported(targets=("e1",)), 1))
    views.apply(*say(QueueChanged(waiting=waiting("a"), started=("b",)), 1))
    views.apply(*say(stored(1, 2), 1))
    view = views["e0"]
    views.advance(SILENT_S)
    assert (view.queue_known, view.residency_known, views.forgotten) == (True, True, [])
    views.advance(SILENT_S + 61)
    assert (view.queue_known, view.residency_known) == (False, False)
    assert (len(view.waiting), len(view.running), view.residency.num_blocks()) == (0, 0, 0)
    assert (views.forgotten, views.num_forgotten) == (["e0"], 1)
    assert view.targets == ("e1",)  # a pool may say nothing for days, and serve
    views.advance(3 * SILENT_S)
    assert views.num_forgotten == 1  # it has nothing more to lose
    assert views.apply(*say(stored(3, parent=2), 2, time_s=5.0))
    assert views.apply(*say(QueueChanged(), 2, time_s=5.0))
    views.apply(*say(all_of(1, 2, 3), 2, time_s=6.0))
    assert view.residency.num_blocks() == 3


def test_of_too_many_blocks_those_of_the_engine_that_was_silent_longest_go() -> None:
    views = EngineViews(max_blocks=10)
    for number, engine in enumerate(("e0", "e1", "e2")):
        first = 100 * number
        views.apply(*say(stored(*range(first, first + 4)), 1, engine=engine))
    held = {name: view.residency.num_blocks() for name, view in views.items()}
    assert held == {"e0": 0, "e1": 4, "e2": 4}
    assert (views.forgotten, views["e0"].residency_known) == (["e0"], False)
    views.apply(*say(QueueChanged(), 1, engine="e1"))
    views.apply(*say(stored(*range(300, 303)), 2, engine="e2"))
    assert views.forgotten == ["e0", "e1"]  # e2 has spoken since
    assert [view.residency.num_blocks() for view in views.values()] == [0, 0, 7]


def test_an_engine_that_is_given_up_altogether_is_listed() -> None:
    views = EngineViews(max_engines=2, max_blocks=10)
    for engine in ("e0", "e1", "e2"):
        views.apply(*say(stored(1, 2, 3), 1, engine=engine))
    assert (list(views), views.forgotten) == (["e1", "e2"], ["e0"])
    views.apply(*say(stored(4, 5, 6, 7), 2, engine="e2"))  # the blocks of e0 do not count any more
    assert views.forgotten == ["e0"]
    views.forget("e1")
    assert list(views) == ["e2"]
