"""What waits for a link: order, bounds, and that what is lost is told."""

from hypothesis import given
from hypothesis import strategies as st

from hear.buses.nng.backlog import Backlog, Bounds, Receipt
from hear.buses.nng.frames import (
    FRAME_FILL_BYTES,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_STEM,
    Frame,
    Item,
    Lost,
    Run,
    Subscribed,
    Unsubscribe,
    encode,
)

STATE = "state.default.e.queue"
OTHER = "state.default.e.pressure"
RELIABLE = "outcome.default.e.operation_outcome"


def take_all(backlog: Backlog) -> list[Item]:
    items: list[Item] = []
    while backlog:
        items += backlog.take()[0]
    return items


def test_messages_of_one_stem_that_follow_each_other_are_one_run() -> None:
    backlog = Backlog()
    for message in (b"1", b"2"):
        backlog.add(STATE, False, message)
    backlog.add(RELIABLE, True, b"3")
    backlog.add(STATE, False, b"4")
    assert len(backlog) == 4
    assert take_all(backlog) == [
        Run(STATE, False, [b"1", b"2"]),
        Run(RELIABLE, True, [b"3"]),
        Run(STATE, False, [b"4"]),
    ]
    assert len(backlog) == 0


def test_runs_that_wait_for_several_links_are_joined_without_being_changed() -> None:
    backlog = Backlog()
    runs = [Run(STATE, False, [b"1"]), Run(STATE, False, [b"2"])]
    for run in runs:
        backlog.put_state(run, 1)
    assert backlog.take()[0] == [Run(STATE, False, [b"1", b"2"])]
    assert runs == [Run(STATE, False, [b"1"]), Run(STATE, False, [b"2"])]


def test_too_much_state_drops_the_oldest_and_tells_of_which_stream() -> None:
    backlog = Backlog(Bounds(state_messages=2))
    for message in (b"1", b"2", b"3"):
        backlog.put_state(Run(STATE, False, [message]), 1)
        backlog.put_state(Run(OTHER, False, [message]), 1)
    assert backlog.dropped == 4
    *kept, lost = sorted(take_all(backlog), key=lambda item: isinstance(item, Lost))
    assert kept == [Run(STATE, False, [b"3"]), Run(OTHER, False, [b"3"])]
    assert lost == Lost([STATE, OTHER])


def test_too_many_bytes_of_state_drop_the_oldest_too() -> None:
    backlog = Backlog(Bounds(state_bytes=1_100))
    for _ in range(10):
        backlog.put_state(Run(STATE, False, [b"x" * 300]), 300)
    assert backlog._state_bytes <= 1_100
    assert backlog.dropped == 9 - (1_100 // (300 + 64 + 160 + len(STATE)) - 1)


def test_one_reliable_message_too_many_is_refused_and_nothing_is_added() -> None:
    by_count = Backlog(Bounds(reliable_messages=2))
    assert by_count.add(RELIABLE, True, b"1")
    assert by_count.put(Run(RELIABLE, True, [b"2"]), 1, 1)
    assert not by_count.add(RELIABLE, True, b"3")
    assert not by_count.put(Run(RELIABLE, True, [b"3"]), 1, 1)
    assert by_count.put(Run(RELIABLE, True, [b"3"]), 1, 1, anyway=True), "it was taken before"
    assert by_count.put(Unsubscribe(1)), "what is no message is counted apart"
    by_bytes = Backlog(Bounds(reliable_bytes=600))
    assert by_bytes.add(RELIABLE, True, b"x" * 300)
    assert not by_bytes.add(RELIABLE, True, b"x" * 300)
    assert len(by_bytes) == 1


def test_what_is_owed_takes_no_room_from_reliable_messages() -> None:
    backlog = Backlog(Bounds(reliable_bytes=600, owed_bytes=1_000))
    for _ in range(20):
        backlog.put(Unsubscribe(1), 100)
    overdrawn = backlog.is_overdrawn
    assert backlog.add(RELIABLE, True, b"x" * 300)
    take_all(backlog)
    assert (overdrawn, backlog.is_overdrawn) == (True, False)
    assert backlog.owed_items == backlog.owed_bytes == 0


def test_receipts_count_who_has_still_to_take_a_message_over() -> None:
    one, other, receipt = Backlog(), Backlog(), Receipt(7)
    for backlog in (one, other):
        backlog.put(Run(RELIABLE, True, [b"1"]), 1, 1, receipt)
    assert receipt.open == 2
    assert one.take()[1] == [receipt]
    assert other.drop_reliable() == [receipt]
    assert not other


def test_a_loss_is_told_after_the_reader_that_it_concerns_has_joined() -> None:
    backlog = Backlog()
    backlog.put_lost(STATE)
    backlog.put_subscribed(Subscribed(1, []))
    backlog.put_lost(STATE)
    backlog.put_lost(OTHER)
    assert take_all(backlog) == [Lost([STATE]), Subscribed(1, []), Lost([STATE, OTHER])]


def test_losses_of_any_number_of_streams_take_bounded_memory_and_fit_in_frames() -> None:
    backlog = Backlog()
    for number in range(70_000):
        backlog.put_lost(f"state.default.{number}.queue")
    told = 0
    while backlog:
        items = backlog.take().items
        told += sum(len(item.stems) for item in items if isinstance(item, Lost))
    assert told == 4_096
    assert backlog._num_lost == 0


def test_a_frame_with_the_longest_of_everything_can_be_sent() -> None:
    backlog = Backlog()
    for number in range(300):
        backlog.put_lost(f"state.{number:x<{MAX_STEM - 20}}.e.queue")
    for _ in range(3):
        backlog.add(STATE, False, b"x" * MAX_MESSAGE_BYTES)
        backlog.add(RELIABLE, True, b"x" * MAX_MESSAGE_BYTES)
        for _ in range(100):
            backlog.add(RELIABLE, True, b"x" * 5_000)
    while backlog:
        assert len(encode(Frame(1, 0, 0, backlog.take()[0]))) <= MAX_FRAME_BYTES


_puts = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([STATE, OTHER, RELIABLE]), st.integers(0, 300)),
        st.tuples(st.just("run"), st.sampled_from([STATE, RELIABLE]), st.integers(1, 9)),
        st.tuples(st.just("take"), st.just(""), st.integers(1, 1_000)),
        st.tuples(st.just("item"), st.just(""), st.integers(0, 100)),
        st.tuples(st.just("drop"), st.just(""), st.just(0)),
    )
)


@given(_puts)
def test_keeps_order_and_counts_through_any_use(puts: list[tuple[str, str, int]]) -> None:
    backlog = Backlog(Bounds(state_messages=20, state_bytes=3_000, reliable_messages=20))
    expected: dict[str, list[bytes]] = {STATE: [], OTHER: [], RELIABLE: []}
    got: dict[str, list[bytes]] = {STATE: [], OTHER: [], RELIABLE: []}
    lost: set[str] = set()
    number = 0

    def hear(items: list[Item]) -> None:
        for item in items:
            if isinstance(item, Run):
                got[item.stem] += item.messages
            elif isinstance(item, Lost):
                lost.update(item.stems)

    dropped_reliable = False
    for what, stem, amount in puts:
        if what == "take":
            hear(backlog.take(amount)[0])
        elif what == "item":
            backlog.put(Unsubscribe(1), amount)
        elif what == "drop":
            dropped_reliable |= any(e.num_messages for e in backlog._other)
            backlog.drop_reliable()
        else:
            messages = []
            for _ in range(amount if what == "run" else 1):
                number += 1
                messages.append(number.to_bytes(4, "big") + b"x" * (amount if what == "add" else 0))
            size_bytes = sum(map(len, messages))
            if what == "add":
                taken = backlog.add(stem, stem == RELIABLE, messages[0])
            elif stem == RELIABLE:
                taken = backlog.put(Run(stem, True, messages), size_bytes, len(messages))
            else:
                taken = True
                backlog.put_state(Run(stem, False, messages), size_bytes)
            if taken:
                expected[stem] += messages
        assert backlog._state_messages <= 20
        assert backlog._state_bytes <= 3_000
        assert backlog._reliable_messages <= 20
        assert backlog._state_messages == sum(e.num_messages for e in backlog._state)
        assert backlog._reliable_messages == sum(e.num_messages for e in backlog._other)
    hear(take_all(backlog))
    for stem, messages in got.items():
        assert messages == [m for m in expected[stem] if m in set(messages)], "in order, once"
        if stem != RELIABLE and messages != expected[stem]:
            assert stem in lost, "what was dropped is told"
    assert dropped_reliable or got[RELIABLE] == expected[RELIABLE]
    assert backlog._state_bytes == backlog._reliable_bytes == backlog.owed_bytes == 0


def test_a_run_grows_no_larger_than_a_frame_is_filled() -> None:
    backlog = Backlog()
    for _ in range(20):
        backlog.add(STATE, False, b"x" * 20_000)
    while backlog:
        items = backlog.take().items
        assert sum(len(m) for item in items for m in getattr(item, "messages", ())) <= (
            FRAME_FILL_BYTES
        )
