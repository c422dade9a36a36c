"""Hub and client prove the key to each other, and what then travels is theirs.

Before, a client took any welcome, so whoever answered first was its hub; what it said after could
be read, changed and said again by whoever stood between. First without sockets: false hubs, and
somebody on the way who may do everything with frames. ``test_certificates`` has the sockets.
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.buses.nng.access import Grant, Handshake, Keyring, new_nonce
from hear.buses.nng.frames import (
    LINK_VERSION,
    Challenge,
    Frame,
    Goodbye,
    Hello,
    Refused,
    Stranger,
    Welcome,
    Wire,
    decode,
    encode,
)
from hear.buses.nng.hub import Hub
from hear.buses.nng.link import SILENCE_S
from hear.buses.nng.member import Member
from hear.buses.nng.seal import Seals, is_sealed
from tests.buses.nng_peers import SECRETS, Net, Peer, envelope, run_of, tenants
from tests.security.link import Way, key_of

ACME = bytes.fromhex(SECRETS["acme"])
UMBRA = bytes.fromhex(SECRETS["umbra"])
SECRET = run_of(envelope("acme", "acme"))


# -- false hubs -------------------------------------------------------------------------------


def victim() -> Member:
    """A member with acme's key that has something to say."""
    member = Member("me", session="me-1", now=0.0, key=key_of("acme"))
    member.publish(SECRET.stem, True, SECRET.messages[0])
    return member


def answer(member: Member, nonce: bytes, now: float = 0.0) -> Handshake:
    """Challenge a member; returns what it answers to."""
    member.receive(encode(Challenge(nonce)), now)
    hellos = [wire for data in member.poll(now) if isinstance(wire := decode(data), Hello)]
    proof = hellos[-1]
    assert proof.answers == nonce
    return Handshake(proof.nonce, nonce, "acme", "me-1", "me")


def tells_nothing(member: Member) -> None:
    """Check that a member does nothing but go on asking to join."""
    assert member.phase == "joining"
    assert not member.connected
    for now in (0.0, 0.5, 2.0, 10.0):
        assert all(isinstance(decode(data), Hello) for data in member.poll(now))
    assert member.num_waiting == 1


def test_a_welcome_without_a_challenge_is_none() -> None:
    """Before, it was enough to answer the first hello with a welcome."""
    member = victim()
    member.poll(0.0)
    for proof in (b"", new_nonce()):
        member.receive(encode(Welcome(LINK_VERSION, "hub/1", False, 0, proof)), 0.0)
    assert "does not prove that it holds the key 'acme'" in member.refusal
    tells_nothing(member)


WRONG: dict[str, Callable[[Handshake], bytes]] = {
    "empty": lambda _: b"",
    "the client's own": lambda told: told.prove_client(ACME, "", 0),
    "with another secret": lambda told: told.prove_hub(UMBRA, "hub/1", False, 0),
    "of another stay": lambda told: told.prove_hub(ACME, "hub/2", False, 0),
    "of a resumption": lambda told: told.prove_hub(ACME, "hub/1", True, 0),
    "of another count": lambda told: told.prove_hub(ACME, "hub/1", False, 1),
    "of another session": lambda told: told._replace(session="me-2").prove_hub(
        ACME, "hub/1", False, 0
    ),
    "of another name": lambda told: told._replace(name="you").prove_hub(ACME, "hub/1", False, 0),
    "of another key": lambda told: told._replace(key="umbra").prove_hub(ACME, "hub/1", False, 0),
    "cut short": lambda told: told.prove_hub(ACME, "hub/1", False, 0)[:-1],
    "a seal's key": lambda told: told.seals(ACME)[1],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_welcome_with_a_wrong_proof_is_none(wrong: Callable[[Handshake], bytes]) -> None:
    member = victim()
    told = answer(member, new_nonce())
    member.receive(encode(Welcome(LINK_VERSION, "hub/1", False, 0, wrong(told))), 0.0)
    tells_nothing(member)


def test_a_welcome_that_is_proven_is_one() -> None:
    member = victim()
    told = answer(member, new_nonce())
    proof = told.prove_hub(ACME, "hub/1", False, 0)
    member.receive(encode(Welcome(LINK_VERSION, "hub/1", False, 0, proof)), 0.0)
    assert member.connected
    sent = member.poll(0.0)
    assert sent
    assert all(map(is_sealed, sent)), "and nothing leaves without a seal"


def test_a_recorded_handshake_is_worth_nothing_though_the_hubs_number_is_the_same() -> None:
    """Who recorded challenge and welcome says both again. The client's number is another."""
    first = victim()
    nonce = new_nonce()
    told = answer(first, nonce)
    proven = told.prove_hub(ACME, "hub/1", False, 0)
    recorded = encode(Welcome(LINK_VERSION, "hub/1", False, 0, proven))
    first.receive(recorded, 0.0)
    assert first.connected
    first.reconnected(1.0)
    again = victim()  # of the same session as well
    for member in (first, again):
        assert answer(member, nonce, 1.0).client_nonce != told.client_nonce
        member.receive(recorded, 1.0)
        assert not member.connected


def test_a_hub_without_keys_is_no_hub_for_who_has_one() -> None:
    hub = Hub(id="hub", now=-10.0)
    member = victim()
    for data in member.poll(0.0):
        hub.receive(1, data, 0.0)
    (welcome,) = [data for _, data in hub.output]
    assert isinstance(decode(welcome), Welcome)
    member.receive(welcome, 0.0)
    assert "a hub without keys or with another secret" in member.refusal
    tells_nothing(member)


def test_a_hub_with_another_secret_refuses_and_is_refused() -> None:
    other = Keyring((Grant(name="acme", secret=SECRETS["umbra"], publish=(">",)),))
    way = Way(keyring=other)
    way.publish()
    way.settle()
    assert way.member.phase == "refused"
    assert way.member.refusal == "key 'acme' is not valid here"
    assert way.hub.peers == []
    assert way.sealed == []


def test_a_client_without_a_key_joins_no_hub_that_asks_for_one() -> None:
    member = Member("me", session="me-1", now=0.0)
    member.receive(encode(Challenge(new_nonce())), 0.0)
    assert member.phase == "refused"
    assert member.refusal == "the hub asks for a key, and none was given"


def test_a_challenge_makes_a_member_sign_nothing_but_its_own_hello() -> None:
    """Whatever number it is given, the answer fits no other session, name, key or purpose."""
    member = victim()
    told = answer(member, b"to client" * 4)
    others = {told.prove_hub(ACME, "", False, 0), *told.seals(ACME)}
    member.receive(encode(Challenge(told.hub_nonce)), 0.0)
    (again,) = [w for d in member.poll(0.0) if isinstance(w := decode(d), Hello) and w.proof]
    assert again.proof == told.prove_client(ACME, "", 0)
    assert again.proof not in others


# -- false clients ----------------------------------------------------------------------------


def test_an_older_link_is_refused_in_words() -> None:
    """Version 1 proved the client alone, and sealed nothing."""
    for keyring in (None, tenants()):
        net = Net(keyring=keyring)
        old = net.connect()
        old.say(Hello(1, "me", "me-1", 0, key="acme", proof=b"x" * 32, answers=b"y" * 32))
        assert old.frames == [
            Refused(f"speaks version 1 of the link, this hub speaks {LINK_VERSION}")
        ]
        net.now += 0.3
        net.hub.tick(net.now)
        net.settle()
        assert old.closed


def test_a_hello_without_a_number_of_its_own_is_refused() -> None:
    """Else the hub alone would choose what the proofs are over."""
    for nonce in (b"", b"short", b"x" * 33):
        net = Net(keyring=tenants())
        peer = net.connect()
        peer.say(Hello(LINK_VERSION, "me", "me-1", 0, key="acme"))
        (challenge,) = peer.frames
        assert isinstance(challenge, Challenge)
        told = Handshake(nonce, challenge.nonce, "acme", "me-1", "me")
        peer.say(proving(told, ACME))
        assert peer.frames[-1] == Refused("key 'acme' is not valid here")
        assert net.hub.peers == []


def proving(told: Handshake, secret: bytes) -> Hello:
    """The hello that proves to hold a key."""
    return Hello(
        LINK_VERSION,
        told.name,
        told.session,
        0,
        key=told.key,
        proof=told.prove_client(secret, "", 0),
        answers=told.hub_nonce,
        nonce=told.client_nonce,
    )


@pytest.mark.parametrize("name", ["", "umbra", "hub.hear", "acme2", "ACME"])
def test_a_key_is_good_with_the_certificate_of_its_name_alone(name: str) -> None:
    way = Way(certificate=name)
    way.settle()
    assert way.member.phase == "refused"
    assert way.member.refusal == (
        f"key 'acme' came with a certificate of {name!r}, expected one with the key's name as its "
        "common name"
    )
    assert way.hub.peers == []


def test_a_key_with_the_certificate_of_its_name_joins() -> None:
    way = Way(certificate="acme").joined()
    way.goes_on()
    way.break_connection()
    way.goes_on()


def test_a_connection_that_is_to_be_closed_has_no_other_certificate_for_that() -> None:
    """Between the decision and the end of a connection, all was forgotten of it, also whose
    certificate it came with, and any key was good."""
    for way_to_end in (b"junk", b"\x95\xa1F"):
        net = Net(keyring=tenants())
        peer = net.connect()
        net.hub.opened(peer.connection, net.now, "acme")
        net.hub.receive(peer.connection, way_to_end, net.now)
        assert net.hub.to_close == [peer.connection]
        hello = Hello(LINK_VERSION, "me", "me-1", 0, key="umbra")
        net.hub.receive(peer.connection, encode(hello), net.now)
        assert net.hub.output == []
        assert net.hub.to_close == [peer.connection]


def test_another_handshake_over_a_connection_takes_no_session_of_another_key() -> None:
    net = Net(keyring=tenants())
    acme = net.joined("me", "acme")
    other = net.connect()
    answer = other.join("me", "umbra", SECRETS["umbra"], session=session_of(acme))
    assert isinstance(answer, Welcome)
    assert not answer.resumed, "sessions of two keys have nothing to do with each other"
    assert net.hub.peers == ["me", "me"]
    acme.put(SECRET)
    assert sum(net.hub.statistics().published.values()) == 1


def session_of(peer: Peer) -> str:
    return f"me-{peer.connection}"


def test_who_joins_again_over_its_connection_is_who_it_is_now() -> None:
    """A second handshake displaces what was there, with its seals and its will."""
    net = Net(keyring=tenants())
    peer = net.joined("me", "acme")
    before = peer.seals
    peer.put(SECRET)
    peer._number = peer._received = 0
    assert isinstance(peer.join("you", "umbra", SECRETS["umbra"]), Welcome)
    assert net.hub.peers == ["you"]
    peer.put(run_of(envelope("umbra", "umbra")))
    assert sum(net.hub.statistics().published.values()) == 2
    after, peer.seals = peer.seals, before
    peer._number = 0
    peer.put(SECRET)
    assert sum(net.hub.statistics().published.values()) == 2, "the old seals are worth nothing"
    peer.seals = after


# -- somebody on the way ----------------------------------------------------------------------


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


CHANGES: dict[str, Callable[[bytes], list[bytes]]] = {
    "the mark": lambda data: [flipped(data, 0)],
    "the count": lambda data: [flipped(data, 8)],
    "the tag": lambda data: [flipped(data, 20)],
    "the frame": lambda data: [flipped(data, len(data) - 1)],
    "its end": lambda data: [data[:-1]],
    "all but its head": lambda data: [data[:25]],
    "half of its head": lambda data: [data[:12]],
    "all of it": lambda data: [],
    "more at its end": lambda data: [data + b"\xc0"],
    "no seal": lambda data: [data[25:]],
    "a seal of its own": lambda data: [Seals(b"k" * 32, b"k" * 32).seal(data[25:])],
}


def sealed_only(change: Callable[[bytes], list[bytes]]) -> Callable[[bytes], list[bytes]]:
    return lambda data: change(data) if is_sealed(data) else [data]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("inwards", [True, False])
def test_a_frame_that_was_changed_is_dropped_and_comes_again(
    change: Callable[[bytes], list[bytes]], inwards: bool
) -> None:
    """Before, it was taken for what it said."""
    way = Way().joined()
    passed = way.passed
    if inwards:
        way.to_hub = sealed_only(change)
    else:
        way.to_member = sealed_only(change)
    way.publish()
    way.settle()
    assert way.heard == []
    assert way.passed == passed + (not inwards)
    way.to_hub = way.to_member = lambda data: [data]
    way.run(SILENCE_S + 2.0)
    assert way.passed == passed + 1
    assert len(way.heard) == 1
    way.goes_on()
    assert "will.done" not in way.events


def test_what_was_said_cannot_be_said_again() -> None:
    way = Way().joined()
    for _ in range(3):
        way.publish()
        way.settle()
    passed, heard = way.passed, len(way.heard)
    for data in way.sealed:
        way.hub.receive(way.connection, data, way.now)
    for data in [data for data in way.answered if is_sealed(data)]:
        way.items += way.member.receive(data, way.now)
    way.settle()
    assert (way.passed, len(way.heard)) == (passed, heard)
    way.goes_on()


def test_what_one_end_said_is_not_taken_from_the_other() -> None:
    """A frame that is sent back to its sender is none of the other end's."""
    way = Way().joined()
    way.publish()
    way.settle()
    passed, heard = way.passed, len(way.heard)
    for data in way.sealed:
        way.items += way.member.receive(data, way.now)
    for data in [data for data in way.answered if is_sealed(data)]:
        way.hub.receive(way.connection, data, way.now)
    way.settle()
    assert (way.passed, len(way.heard)) == (passed, heard)
    way.goes_on()


def test_frames_that_overtake_each_other_are_taken_once_and_in_order() -> None:
    way = Way().joined()
    held = way.hold_to_hub()
    for _ in range(4):
        way.publish()
        way.settle()
    way.to_hub = lambda data: [data]
    for data in reversed(held):
        way.hub.receive(way.connection, data, way.now)
    way.settle()
    way.run(3.0)
    assert way.passed == len(way.heard) == 4
    way.goes_on()


def test_the_handshake_cannot_be_said_again_over_its_connection() -> None:
    """Before, the hub took the second hello for another life of the process: it did the will of one
    that lived, and took all that had been said since once more, since seals began anew as well."""
    way = Way().joined()
    way.publish()
    way.settle()
    passed = way.passed
    replayed = way.said(Hello) + way.sealed
    for _ in range(3):
        for data in replayed:
            way.hub.receive(way.connection, data, way.now)
        way.carry_to_member()
    assert way.passed == passed
    assert not {"will.done", "peer.astray", "peer.replaced"} & set(way.events)
    way.goes_on()


def test_a_welcome_cannot_be_said_again_to_who_was_made_to_ask_for_one() -> None:
    """Before, whoever said *stranger* and then the recorded welcome had the client count from the
    beginning, while the hub did not: what it said then was lost, and taken for settled."""
    way = Way().joined()
    for _ in range(5):
        way.publish()
        way.settle()
    challenge, welcome = way.said(Challenge)[0], way.said(Welcome)[0]
    stay, number = way.member.stay, way.member._link.number

    def cut(data: bytes) -> list[bytes]:
        return []

    way.to_hub = way.to_member = cut
    for _ in range(3):
        way.member.receive(encode(Stranger("hub")), way.now)
        way.settle()
        for data in (welcome, challenge, welcome):
            way.member.receive(data, way.now)
            way.settle()
    assert (way.member.stay, way.member._link.number) == (stay, number)
    assert not way.member.connected
    way.to_hub = way.to_member = lambda data: [data]
    way.run(SILENCE_S + 2.0)
    assert way.member.stay == stay, "it went on where it was"
    way.goes_on()


def test_seals_of_a_handshake_are_worth_nothing_after_another() -> None:
    way = Way().joined()
    held = way.hold_to_hub()
    way.publish()
    way.settle()
    way.to_hub = lambda data: [data]
    before = way.proof
    way.break_connection()
    way.settle()
    after = way.proof
    assert way.events.count("peer.resumed") == 1
    assert before.nonce != after.nonce
    assert before.answers != after.answers
    passed, refused = way.passed, way.hub.refused
    for data in held:
        way.hub.receive(way.connection, data, way.now)
    way.settle()
    assert way.passed == passed
    assert way.hub.refused == refused + len(held)
    way.goes_on()


def test_a_member_that_the_hub_forgot_joins_anew_over_the_same_connection_at_once() -> None:
    """Before, it held on to the count of the seals that it had, and took nothing from the hub,
    which began to count anew, until it gave up the connection."""
    way = Way().joined()
    way.member.set_will([])
    for _ in range(20):
        way.publish()
        way.settle()
    way.run(2.0)
    (peer,) = way.hub._peers
    way.hub._forget(peer, "peer.stuck", way.now)
    way.goes_on()
    assert way.connection == 1
    assert way.member.unreadable == 0
    assert way.events.count("peer.joined") == 2


INJECTED: dict[str, Wire] = {
    "goodbye": Goodbye(),
    "a message": Frame(1, 99, 99, [SECRET]),
    "an acknowledgement": Frame(0, 99, 99),
    "a refusal": Refused("go away"),
    "a refusal for now": Refused("go away", final=False),
    "a stranger": Stranger("hub"),
    "a welcome": Welcome(LINK_VERSION, "hub/1", False, 0),
    "a challenge": Challenge(b"n" * 32),
    "a hello": Hello(LINK_VERSION, "me", "me-1", 0, key="acme"),
    "a hello with a proof": Hello(
        LINK_VERSION, "me", "me-1", 0, "hub/1", "acme", b"p" * 32, b"a" * 32, b"n" * 32
    ),
    "an old hello": Hello(1, "me", "me-1", 0, key="acme"),
    "a hello of another": Hello(LINK_VERSION, "you", "you-1", 0, key="umbra"),
}


@pytest.mark.parametrize("wire", INJECTED.values(), ids=INJECTED)
@pytest.mark.parametrize("inwards", [True, False])
def test_what_is_put_in_on_the_way_does_nothing_that_lasts(wire: Wire, inwards: bool) -> None:
    """Before, a goodbye ended a peer, a refusal a client, and a message was one. Now the worst that
    can be done so is a handshake more, or another connection, as by breaking one."""
    way = Way().joined()
    way.publish()
    way.settle()
    for _ in range(2):
        if inwards:
            way.hub.receive(way.connection, encode(wire), way.now)
        else:
            way.items += way.member.receive(encode(wire), way.now)
        way.settle()
    way.run(1.0)
    assert way.passed == len(way.heard) == 1
    assert way.member.phase == "joined"
    way.goes_on()
    assert not {"will.done", "peer.left", "peer.lost", "peer.astray"} & set(way.events)
    assert way.hub.peers == ["me"]


def has_left(way: Way) -> bool:
    return way.member.phase == "left"


def test_leaving_is_heard_under_a_seal_alone() -> None:
    way = Way().joined()
    way.member.leave(way.now)
    way.member.receive(encode(Goodbye()), way.now)
    assert not has_left(way), "who does not hold the key says nothing of it"
    way.settle()
    assert has_left(way)
    assert way.hub.peers == []
    assert "will.done" not in way.events


def test_a_goodbye_counts_though_its_connection_was_gone_before_it_was_looked_at() -> None:
    """A peer that has said goodbye closes its connection, and a busy hub hears of that first.
    Before, the goodbye was dropped then, and the will of one that had left was done."""
    way = Way().joined()
    way.member.leave(way.now)
    for data in way.member.poll(way.now):
        way.hub.receive(way.connection, data, way.now)
    way.hub.closed(way.connection, way.now)
    while way.hub.busy:
        way.hub.turn(way.now)
    assert way.hub.peers == []
    way.hub.tick(way.now + 100.0)
    assert "will.done" not in way.events
    assert way.events.count("peer.left") == 1


@given(
    plan=st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from(["drop", "twice", "flip", "swap", "earlier", "back", "unseal"]),
            st.integers(0, 1_000),
        ),
        max_size=40,
    )
)
def test_whatever_is_done_on_the_way_honest_traffic_arrives_once(
    plan: list[tuple[bool, str, int]],
) -> None:
    """Frames are dropped, repeated, changed, swapped, said again much later, sent back to who sent
    them, and stripped of their seals, both ways and through as many handshakes as that takes."""
    way = Way().joined()
    steps = iter(plan)
    seen: list[bytes] = []
    late: list[bytes] = []

    def tamper(inwards: bool) -> Callable[[bytes], list[bytes]]:
        def change(data: bytes) -> list[bytes]:
            seen.append(data)
            step = next(steps, None)
            if step is None or step[0] is not inwards:
                return [data]
            _, what, number = step
            if what == "drop":
                return []
            if what == "swap":
                late.append(data)
                return []
            other = seen[number % len(seen)]
            return {
                "twice": [data, data],
                "flip": [flipped(data, number % len(data))],
                "earlier": [other, data, *late],
                "back": [data, other],
                "unseal": [data[25:] if is_sealed(data) else data],
            }[what]

        return change

    way.to_hub, way.to_member = tamper(True), tamper(False)
    for _ in range(10):
        way.publish()
        way.run(0.2)
    way.to_hub = way.to_member = lambda data: [data]
    way.run(30.0)
    assert way.member.phase == "joined"
    assert way.passed == len(way.heard) == len(set(way.heard)) == 10
    way.goes_on()
