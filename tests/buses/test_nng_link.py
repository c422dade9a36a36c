"""One end of a link: numbers, acknowledgements and timers."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from hear.buses.nng.frames import Frame, Item, Unsubscribe, decode
from hear.buses.nng.link import (
    ACKNOWLEDGE_S,
    FIRST_RETRY_S,
    HEARTBEAT_S,
    MAX_RETRY_S,
    SILENCE_S,
    STUCK_S,
    Link,
)


def frame(data: bytes) -> Frame:
    wire = decode(data)
    assert isinstance(wire, Frame)
    return wire


def items(*numbers: int) -> list[Item]:
    return [Unsubscribe(number) for number in numbers]


def test_items_arrive_once_in_order_and_are_acknowledged() -> None:
    one, other = Link(window=3, now=0.0), Link(window=3, now=0.0)
    for number in (1, 2):
        got, _ = other.receive(frame(one.send(items(number), 0.0)), 0.0)
        assert got == items(number)
    assert one.num_unacknowledged == 2
    acknowledgement = other.acknowledgement(0.0)
    assert acknowledgement is not None
    assert other.acknowledgement(0.0) is None, "once is enough"
    assert one.receive(frame(acknowledgement), 0.0) == ([], 2)
    assert one.num_unacknowledged == 0


def test_an_acknowledgement_waits_a_moment_for_a_frame_that_carries_it() -> None:
    one, other = Link(window=8, now=0.0), Link(window=8, now=0.0, owe_most=3)
    other.receive(frame(one.send(items(1), 0.0)), 0.0)
    assert other.acknowledgement(ACKNOWLEDGE_S / 2) is None
    assert other.next_due() == ACKNOWLEDGE_S
    assert other.acknowledgement(ACKNOWLEDGE_S) is not None
    other.receive(frame(one.send(items(2), 1.0)), 1.0)
    assert frame(other.send(items(1), 1.0)).ack == 2
    assert other.acknowledgement(2.0) is None, "a frame has carried it"
    for number in (3, 4):
        other.receive(frame(one.send(items(number), 2.0)), 2.0)
        assert other.acknowledgement(2.0) is None
    other.receive(frame(one.send(items(5), 2.0)), 2.0)
    assert other.acknowledgement(2.0) is not None, "so many are owed that it does not wait"


def test_what_comes_twice_or_too_early_is_not_taken_over_and_is_acknowledged_as_before() -> None:
    one, other = Link(window=3, now=0.0), Link(window=3, now=0.0)
    first, second = one.send(items(1), 0.0), one.send(items(2), 0.0)
    assert other.receive(frame(second), 0.0)[0] == []
    assert other.received == 0
    assert other.receive(frame(first), 0.0)[0] == items(1)
    assert other.receive(frame(first), 0.0)[0] == []
    acknowledgement = other.acknowledgement(0.0)
    assert acknowledgement is not None
    assert frame(acknowledgement).ack == 1


def test_no_more_than_a_window_is_on_its_way() -> None:
    link = Link(window=2, now=0.0)
    link.send(items(1), 0.0)
    could = [link.can_send]
    link.send(items(2), 0.0)
    could.append(link.can_send)
    link.receive(Frame(0, 1), 0.0)
    assert [*could, link.can_send] == [True, False, True]


def test_what_is_not_acknowledged_is_sent_again_with_growing_pauses() -> None:
    link = Link(window=2, now=0.0)
    data = link.send(items(1), 0.0)
    assert link.due(FIRST_RETRY_S - 0.01) == []
    now, pauses = 0.0, []
    for _ in range(6):
        before = now
        while data not in link.due(now):
            now += 0.05
        pauses.append(round(now - before, 1))
        now += 0.05
    assert pauses[0] == FIRST_RETRY_S
    assert pauses[-1] == MAX_RETRY_S
    link.receive(Frame(0, 1), now)
    assert data not in link.due(now + 60.0)


def test_an_end_with_nothing_to_say_gives_a_sign_of_life() -> None:
    link = Link(window=2, now=0.0)
    assert link.due(HEARTBEAT_S - 0.01) == []
    (data,) = link.due(HEARTBEAT_S)
    assert frame(data).number == 0
    assert link.due(HEARTBEAT_S) == []
    assert link.next_due() == 2 * HEARTBEAT_S


def test_silence_and_standstill_are_noticed() -> None:
    link = Link(window=2, now=0.0)
    assert not link.lost(SILENCE_S - 0.01)
    assert link.lost(SILENCE_S)
    link.send(items(1), 10.0)
    for second in range(10, 80):
        link.receive(Frame(0, 0), float(second))  # it lives, and takes nothing over
    assert not link.lost(79.0)
    assert not link.stuck(10.0 + STUCK_S - 0.01)
    assert link.stuck(10.0 + STUCK_S)
    link.receive(Frame(0, 1), 80.0)
    assert not link.stuck(1_000.0), "nothing is owed"


def test_a_resumed_link_sends_what_was_not_taken_over_and_nothing_else() -> None:
    link = Link(window=5, now=0.0)
    sent = [link.send(items(number), 0.0) for number in range(4)]
    link.receive(Frame(0, 1), 0.0)
    assert [link.can_resume(received) for received in range(6)] == [
        False, True, True, True, True, False,
    ]  # fmt: skip
    assert not link.can_resume(-1)
    assert link.resume(3, 5.0) == sent[3:]
    assert link.heard_s == 5.0


def test_an_acknowledgement_of_what_was_never_sent_is_none_of_it() -> None:
    link = Link(window=2, now=0.0)
    link.send(items(1), 0.0)
    assert link.receive(Frame(0, 99), 0.0)[1] == 1
    assert link.receive(Frame(0, -5), 0.0)[1] == -5
    assert link.num_unacknowledged == 0


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["keep", "lose", "twice", "break"]))))
def test_any_loss_repetition_and_break_gives_every_item_once_in_order(
    acts: list[tuple[bool, str]],
) -> None:
    ends = (Link(window=3, now=0.0), Link(window=3, now=0.0))
    ways: tuple[deque[bytes], deque[bytes]] = (deque(), deque())  # from each end
    got: tuple[list[Item], list[Item]] = ([], [])
    said = [0, 0]
    now = 0.0

    def deliver() -> None:
        for way, end, heard in ((ways[0], ends[1], got[1]), (ways[1], ends[0], got[0])):
            while way:
                heard.extend(end.receive(frame(way.popleft()), now)[0])

    for second, act in acts:
        now += 0.2
        end, way = ends[second], ways[second]
        if end.can_send:
            said[second] += 1
            data = end.send(items(said[second]), now)
            way.extend({"lose": [], "twice": [data, data]}.get(act, [data]))
        if act == "break":
            for each in ways:
                each.clear()
            ways[0].extend(ends[0].resume(ends[1].received, now))
            ways[1].extend(ends[1].resume(ends[0].received, now))
        deliver()
        for one, its in zip(ends, ways, strict=True):
            its.extend(one.due(now))
            if (acknowledgement := one.acknowledgement(now)) is not None and act != "lose":
                its.append(acknowledgement)
    for _ in range(100):
        now += 0.5
        deliver()
        for one, its in zip(ends, ways, strict=True):
            its.extend(one.due(now))
            if (acknowledgement := one.acknowledgement(now)) is not None:
                its.append(acknowledgement)
    assert got[1] == items(*range(1, said[0] + 1))
    assert got[0] == items(*range(1, said[1] + 1))
    assert ends[0].num_unacknowledged == ends[1].num_unacknowledged == 0
