"""A member, frame by frame: joining, keeping what has to be said again, leaving."""

import pytest

from hear.buses.nng.access import Handshake, KeyFile
from hear.buses.nng.backlog import Bounds
from hear.buses.nng.frames import (
    LINK_VERSION,
    Challenge,
    Fetch,
    Frame,
    Goodbye,
    Hello,
    Item,
    Provide,
    Question,
    Refused,
    Run,
    Snapshot,
    Stranger,
    Subscribe,
    Unsubscribe,
    Welcome,
    Will,
    Wire,
    decode,
    encode,
)
from hear.buses.nng.link import MEMBER_WINDOW
from hear.buses.nng.member import HELLO_S, Member
from hear.buses.nng.seal import Seals
from hear.errors import BusError

RELIABLE = "outcome.default.e.operation_outcome"
STATE = "state.default.e.queue"
KEY = KeyFile(name="k", secret="ab" * 32)


def said(member: Member, now: float = 0.0) -> list[Wire]:
    return [decode(data) for data in member.poll(now)]


def items(wires: list[Wire]) -> list[Item]:
    return [item for wire in wires if isinstance(wire, Frame) for item in wire.items]


def hear(member: Member, wire: Wire, now: float = 0.0) -> list[Item]:
    return member.receive(encode(wire), now)


def joined(**more: object) -> Member:
    member = Member("m", session="s", now=0.0, **more)  # type: ignore[arg-type]
    hear(member, Welcome(LINK_VERSION, "hub/1", False, 0))
    return member


def proven(member: Member, stay: str = "hub/1", nonce: bytes = b"n" * 32) -> Seals:
    """Have a member with a key join a hub that holds it; returns the seals of that hub."""
    hear(member, Challenge(nonce))
    (hello,) = (wire for wire in said(member) if isinstance(wire, Hello) and wire.proof)
    handshake = Handshake(hello.nonce, nonce, hello.key, hello.session, hello.name)
    secret = bytes.fromhex(KEY.secret)
    assert hello.proof == handshake.prove_client(secret, hello.hub, hello.received)
    proof = handshake.prove_hub(secret, stay, False, 0)
    hear(member, Welcome(LINK_VERSION, stay, False, 0, proof))
    to_hub, to_client = handshake.seals(secret)
    return Seals(to_client, to_hub)


def test_it_says_hello_until_it_is_welcomed() -> None:
    member = Member("m", session="s", now=0.0)
    assert said(member) == [Hello(LINK_VERSION, "m", "s", 0)]
    assert said(member, HELLO_S / 2) == []
    assert len(said(member, HELLO_S)) == 1
    hear(member, Welcome(LINK_VERSION, "hub/1", False, 0), HELLO_S)
    assert member.phase == "joined"
    assert not any(isinstance(wire, Hello) for wire in said(member, 2 * HELLO_S))


def test_what_was_said_before_it_joined_is_said_then() -> None:
    member = Member("m", session="s", now=0.0)
    member.subscribe(1, "r", [">"])
    member.publish(RELIABLE, True, b"1")
    assert items(said(member)) == []
    hear(member, Welcome(LINK_VERSION, "hub/1", False, 0))
    assert items(said(member)) == [Subscribe(1, "r", [">"]), Run(RELIABLE, True, [b"1"])]


def test_a_challenge_is_answered_if_there_is_a_key() -> None:
    member = Member("m", session="s", now=0.0, key=KEY)
    said(member)
    hear(member, Challenge(b"n" * 32))
    (hello,) = said(member)
    assert isinstance(hello, Hello)
    assert hello.proof
    assert hello.answers == b"n" * 32
    assert said(member, HELLO_S) == [], "the hub is given time"
    keyless = Member("m", session="s", now=0.0)
    hear(keyless, Challenge(b"n" * 32))
    assert keyless.phase == "refused"
    assert "asks for a key" in keyless.refusal


def test_a_refusal_that_is_not_final_is_tried_again() -> None:
    member = Member("m", session="s", now=0.0)
    said(member)
    hear(member, Refused("in use", final=False))
    assert (member.phase, member.refusal) == ("joining", "in use")
    assert len(said(member, HELLO_S)) == 1
    hear(member, Refused("no", final=True))
    assert member.phase == "refused"
    assert said(member, 10.0) == []


def test_garbage_from_the_hub_is_counted_and_skipped() -> None:
    member = joined()
    assert member.receive(b"junk", 0.0) == []
    assert member.unreadable == 1
    assert member.phase == "joined"


def test_too_many_messages_for_a_hub_that_is_away_are_refused() -> None:
    member = Member("m", session="s", now=0.0, bounds=Bounds(reliable_messages=2))
    for _ in range(2):
        member.publish(RELIABLE, True, b"1")
    with pytest.raises(BusError, match=r"2 messages wait for the hub already, the limit is 2"):
        member.publish(RELIABLE, True, b"1")
    for _ in range(10_000):
        member.publish(STATE, False, b"1")
    assert member.dropped > 0


def test_what_is_unsettled_is_bounded_in_messages_and_bytes() -> None:
    for bounds, size in (
        (Bounds(reliable_messages=10), 1),
        (Bounds(reliable_bytes=300_000), 100_000),
    ):
        member = joined(bounds=bounds)
        for number in range(1, 200):
            try:
                member.publish(RELIABLE, True, b"x" * size)
            except BusError:
                break
            for wire in said(member, number / 1_000):
                if isinstance(wire, Frame) and wire.number:
                    hear(member, Frame(0, wire.number), number / 1_000)  # taken over, not settled
        assert number < 199
        assert member.num_unsettled <= 2 * bounds.reliable_messages + 1
        before = member.num_unsettled
        hear(member, Frame(0, 0, settled=5), 1.0)
        assert member.num_unsettled < before
        assert items(said(member, 1.0)), "and it goes on"


def test_a_new_hub_is_told_all_again_and_nothing_that_was_for_the_old_one() -> None:
    member = joined()
    member.subscribe(1, "one", [">"])
    member.subscribe(2, "two", [">"])
    member.provide(STATE)
    member.provide("state.default.gone.queue")
    member.unprovide("state.default.gone.queue")
    member.set_will([Run(RELIABLE, True, [b"will"])])
    member.publish(RELIABLE, True, b"sent")
    (frame,) = said(member)
    assert isinstance(frame, Frame)
    hear(member, Frame(0, frame.number))  # taken over, not settled
    member.subscribed(1)
    member.put(Fetch(1, STATE))
    member.put(Question(9, "history"))
    member.put(Snapshot(STATE, 1, [b"x"], True))
    member.unsubscribe(2)
    member.publish(STATE, False, b"state")
    member.publish(RELIABLE, True, b"unsent")
    hear(member, Stranger("hub2"))
    (hello,) = said(member, HELLO_S)
    assert isinstance(hello, Hello)
    assert hello.hub == "hub/1"
    hear(member, Welcome(LINK_VERSION, "hub2/1", False, 0), HELLO_S)
    wires = said(member, HELLO_S)
    assert [wire.number for wire in wires if isinstance(wire, Frame)] == [1]
    assert items(wires) == [
        Provide(STATE, resumed=True),
        Will([Run(RELIABLE, True, [b"will"])]),
        Subscribe(1, "one", [">"], resumed=True),
        Run(RELIABLE, True, [b"sent"]),
        Run(STATE, False, [b"state"]),
        Run(RELIABLE, True, [b"unsent"]),
    ]


def test_a_question_that_is_not_answered_is_asked_again_at_a_new_hub() -> None:
    member = joined()
    said(member)
    given_up, open_one = Question(1, "history", [">"]), Question(2, "statistics", [])
    member.ask(given_up)
    member.ask(open_one)
    assert items(said(member)) == [given_up, open_one], "the hub answers the last one"
    before = member.stay
    hear(member, Stranger("hub2"))
    hear(member, Welcome(LINK_VERSION, "hub2/1", False, 0))
    assert items(said(member)) == [open_one]
    assert member.stay != before


def test_what_was_settled_is_not_said_again() -> None:
    member = joined()
    member.publish(RELIABLE, True, b"1")
    said(member)
    hear(member, Frame(0, 1, settled=1))
    hear(member, Stranger("x"))
    hear(member, Welcome(LINK_VERSION, "hub2/1", False, 0))
    assert items(said(member)) == []


def test_a_welcome_that_makes_no_sense_is_answered_by_joining_anew() -> None:
    for welcome in (
        Welcome(LINK_VERSION, "hub/1", True, 77),
        Welcome(LINK_VERSION, "other/1", True, 0),
    ):
        member = joined()
        hear(member, Stranger("hub"))
        hear(member, welcome)
        assert not member.connected
        (hello,) = said(member, HELLO_S)
        assert isinstance(hello, Hello)
        assert hello.hub != welcome.hub
        hear(member, Welcome(LINK_VERSION, "hub/2", False, 0), HELLO_S)
        assert member.connected


def test_a_second_welcome_and_challenge_change_nothing() -> None:
    member = Member("m", session="s", now=0.0, key=KEY)
    proven(member)
    member.publish(RELIABLE, True, b"1")
    assert len(member.poll(0.0)) == 1
    hear(member, Welcome(LINK_VERSION, "hub/2", False, 0))
    hear(member, Challenge(b"n" * 32))
    assert member.poll(0.0) == []
    assert member.stay == "hub/1"


def test_frames_of_a_stay_that_is_over_are_not_taken() -> None:
    member = joined()
    hear(member, Stranger("hub"))
    assert hear(member, Frame(1, 0, 0, [Run(STATE, False, [b"old"])])) == []
    hear(member, Welcome(LINK_VERSION, "hub2/1", False, 0))
    assert len(hear(member, Frame(1, 0, 0, [Run(STATE, False, [b"new"])]))) == 1


def test_leaving_is_said_until_it_is_heard_and_joined_for_if_need_be() -> None:
    member = joined()
    member.leave(1.0)
    assert said(member, 1.0) == [Goodbye()]
    hear(member, Stranger("hub"), 1.0)
    (hello,) = said(member, 1.0 + HELLO_S)
    assert isinstance(hello, Hello)
    hear(member, Welcome(LINK_VERSION, "hub/1", True, 0), 1.0 + HELLO_S)
    assert Goodbye() in said(member, 1.0 + HELLO_S)
    assert Goodbye() in said(member, 1.0 + 3 * HELLO_S)
    hear(member, Goodbye(), 1.5)
    assert member.phase == "left"
    assert said(member, 2.0) == []


def test_leaving_before_joining_says_nothing() -> None:
    member = Member("m", session="s", now=0.0)
    member.leave(0.0)
    assert member.phase == "left"


def test_a_hub_that_stops_is_asked_again_later() -> None:
    member = joined()
    hear(member, Goodbye(), 1.0)
    assert member.phase == "joined"
    assert said(member, 1.0) == []
    assert isinstance(said(member, 1.0 + HELLO_S)[0], Hello)


def test_a_window_of_frames_is_on_its_way() -> None:
    member = joined()
    sent = 0
    for number in range(100):
        member.publish(RELIABLE, True, b"1")
        sent += len(items(said(member, number / 1_000)))
    assert sent == MEMBER_WINDOW
    hear(member, Frame(0, 1), 0.2)
    (more,) = [wire for wire in said(member, 0.2) if isinstance(wire, Frame) and wire.items]
    assert more.items == [Run(RELIABLE, True, [b"1"] * 84)], "they travel together"


def test_unsubscribing_twice_says_so_once() -> None:
    member = joined()
    member.subscribe(1, "r", [">"])
    member.unsubscribe(1)
    member.unsubscribe(1)
    assert items(said(member)) == [Subscribe(1, "r", [">"]), Unsubscribe(1)]
