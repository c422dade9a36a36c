"""The hub, frame by frame: who may join, say and hear what, and what garbage does."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hear.buses.nng import frames
from hear.buses.nng.backlog import Bounds
from hear.buses.nng.frames import (
    LINK_VERSION,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    Answer,
    Challenge,
    CutOff,
    Denied,
    Fetch,
    Frame,
    Goodbye,
    Hello,
    Lost,
    Provide,
    Question,
    Refused,
    Run,
    Snapshot,
    SnapshotFor,
    Standing,
    Stranger,
    Subscribe,
    Unprovide,
    Unsubscribe,
    Wanted,
    Welcome,
    Will,
    decode,
    encode,
)
from hear.buses.nng.hub import Hub
from hear.buses.nng.joining import MAX_STRANGERS
from hear.codec import decode as decode_envelope
from hear.errors import RemoteProtocolError
from hear.interfaces import BusStatistics
from tests.buses.nng_peers import SECRETS, Net, Peer, envelope, run_of, snapshot, tenants

QUEUE = "state.{}.e.queue"


def serves(net: Net, key: str = "") -> None:
    """Check that the hub goes on serving others."""
    number = len(net.peers)
    one, other = net.joined(f"one-{number}", key), net.joined(f"other-{number}", key)
    other.subscribe(">")
    before = len(other.messages)
    tenant, source = ("default", "e") if not key else (key, key)
    one.put(run_of(envelope(tenant, source)))
    assert len(other.messages) > before, "everybody else is undisturbed"
    for peer in (one, other):
        peer.say(Goodbye())


# -- joining with keys ------------------------------------------------------------------------


def test_whoever_holds_a_key_joins() -> None:
    net = Net(keyring=tenants())
    assert isinstance(net.connect().join("x", "acme", SECRETS["acme"]), Welcome)


@pytest.mark.parametrize(
    ("key", "secret"),
    [("acme", SECRETS["umbra"]), ("nobody", SECRETS["acme"]), ("", SECRETS["acme"])],
)
def test_a_wrong_or_unknown_key_is_refused(key: str, secret: str) -> None:
    net = Net(keyring=tenants())
    peer = net.connect()
    answer = peer.join("x", key, secret)
    assert isinstance(answer, Refused)
    assert answer.final
    assert f"key {key!r} is not valid" in answer.reason
    peer.put(Subscribe(1, "r", [">"]))
    assert peer.frames[-1] == answer, "and is not heard any more"
    net.pass_time(0.5)
    assert peer.closed
    assert net.hub.refused == 1
    serves(net, "umbra")


def test_without_a_proof_there_are_only_challenges() -> None:
    net = Net(keyring=tenants())
    peer = net.connect()
    challenges = [peer.join("x", "acme") for _ in range(3)]
    assert all(isinstance(each, Challenge) for each in challenges)
    assert len({getattr(each, "nonce", b"") for each in challenges}) == 1, "of one connection"
    other = net.connect().join("x", "acme")
    assert other != challenges[0], "and each connection has its own"


def test_a_proof_is_worth_nothing_over_another_connection() -> None:
    net = Net(keyring=tenants())
    said: list[bytes] = []
    receive = net.hub.receive

    def listening(connection: int, data: bytes, now: float) -> None:
        said.append(data)
        receive(connection, data, now)

    net.hub.receive = listening  # type: ignore[method-assign]
    net.joined("x", "acme")
    thief = net.connect()
    for data in said.copy():
        thief.say(data)
    assert not any(isinstance(wire, Welcome) for wire in thief.frames)
    thief.join("x", "acme")
    challenge = thief.frames[-1]
    assert isinstance(challenge, Challenge)
    old = next(w for w in map(decode, said) if isinstance(w, Hello) and w.proof)
    thief.say(msgspec.structs.replace(old, answers=challenge.nonce))
    assert isinstance(thief.frames[-1], Refused)


@pytest.mark.parametrize("change", ["name", "session", "key"])
def test_a_proof_does_not_hold_for_anything_that_was_changed(change: str) -> None:
    net = Net(keyring=tenants())
    peer = net.connect()
    receive = net.hub.receive

    def tampering(connection: int, data: bytes, now: float) -> None:
        wire = decode(data)
        if isinstance(wire, Hello) and wire.proof:
            wire = msgspec.structs.replace(wire, **{change: "umbra"})
        receive(connection, encode(wire), now)

    net.hub.receive = tampering  # type: ignore[method-assign]
    assert isinstance(peer.join("x", "acme", SECRETS["acme"]), Refused)


def test_nobody_takes_over_the_session_of_another_key_nor_keeps_it_out() -> None:
    """Sessions travel in the clear, and who has read one may come first."""
    net = Net(keyring=tenants())
    thief = net.connect()
    assert isinstance(thief.join("worker", "umbra", SECRETS["umbra"], session="s"), Welcome)
    answer = net.connect().join("worker", "acme", SECRETS["acme"], session="s")
    assert isinstance(answer, Welcome)
    assert not answer.resumed
    assert net.hub.peers == ["worker", "worker"]
    other = net.connect().join("another", "acme", SECRETS["acme"], session="s")
    assert isinstance(other, Refused)
    assert "session is another's" in other.reason


def test_a_name_is_taken_among_the_peers_of_one_key_only() -> None:
    net = Net(keyring=tenants())
    net.joined("worker", "acme")
    net.joined("worker", "umbra")
    again = net.connect().join("worker", "acme", SECRETS["acme"])
    assert isinstance(again, Refused)
    assert not again.final


def test_challenges_and_peers_are_bounded() -> None:
    net = Net(keyring=tenants())
    for _ in range(6_000):
        net.connect().join("x", "acme")
    assert len(net.hub._joining._strangers) <= MAX_STRANGERS
    assert len(net.hub._joining._connections) <= MAX_STRANGERS
    open_net = Net()
    answers = [open_net.connect().join(f"p{number}") for number in range(1_030)]
    assert sum(isinstance(answer, Welcome) for answer in answers) == 1_024
    assert isinstance(answers[-1], Refused)
    assert not answers[-1].final


def test_one_connection_is_one_peer() -> None:
    net = Net()
    peer = net.connect()
    for number in range(30):
        assert isinstance(peer.join(f"p{number}"), Welcome)
    assert net.hub.peers == ["p29"]
    net.hub.closed(peer.connection, net.now)
    net.pass_time(30.0)
    assert net.hub.peers == []


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    answer = Net().connect().join(name)
    assert isinstance(answer, Refused)
    assert "1 to 256" in answer.reason


def test_a_newer_link_is_refused_with_both_versions() -> None:
    net = Net()
    peer = net.connect()
    peer.say(Hello(LINK_VERSION + 1, "x", "s", 0))
    answer = peer.frames[-1]
    assert isinstance(answer, Refused)
    assert answer.final
    assert f"version {LINK_VERSION + 1}" in answer.reason
    assert f"speaks {LINK_VERSION}" in answer.reason
    serves(net)


def test_frames_with_more_fields_than_are_known_are_read() -> None:
    data = msgspec.msgpack.encode(
        ["H", 1, "x", "s", 0, "", "", b"", b"", b"", "of a later version"]
    )
    assert isinstance(decode(data), Hello)


# -- what a key grants ------------------------------------------------------------------------


def test_a_tenant_that_hears_everything_hears_what_it_is_granted() -> None:
    net = Net(keyring=tenants())
    acme, umbra, ops = (net.joined(name, name) for name in ("acme", "umbra", "ops"))
    for peer in (acme, umbra, ops):
        peer.subscribe(">")
    acme.put(run_of(envelope("acme", "acme")), run_of(envelope("acme", "acme", state=True)))
    umbra.put(run_of(envelope("umbra", "umbra")))
    assert [decode_envelope(m).tenant for m in acme.messages] == ["acme", "acme"]
    assert [decode_envelope(m).tenant for m in umbra.messages] == ["umbra"]
    assert len(ops.messages) == 3


def test_what_is_not_granted_is_told_once_to_its_sender_and_counted() -> None:
    net = Net(keyring=tenants())
    acme, umbra = net.joined("acme", "acme"), net.joined("umbra", "umbra")
    umbra.subscribe(">")
    for _ in range(5):
        acme.put(run_of(envelope("umbra", "acme")))
    assert umbra.messages == []
    (reason,) = acme.denials
    assert reason == "the key does not grant to publish on outcome.umbra.e.operation_outcome"
    assert net.hub.refused == 5
    assert not acme.closed
    events = [event for event in net.hub.events if event.name == "message.denied"]
    assert [event.facts for event in events] == [{"peer": "acme", "reason": reason}]
    serves(net, "umbra")


def test_denials_are_bounded() -> None:
    net = Net(keyring=tenants())
    acme = net.joined("acme", "acme")
    for number in range(1_000):
        acme.put(run_of(envelope("umbra", "acme", engine=f"e{number}")))
    assert len(acme.denials) == 64
    assert net.hub.refused == 1_000


def test_nobody_speaks_as_another() -> None:
    net = Net(keyring=tenants())
    acme, ops = net.joined("acme", "acme"), net.joined("ops", "ops")
    ops.subscribe(">")
    acme.put(run_of(envelope("acme", "umbra")), run_of(envelope("acme", "acme-2")))
    assert [decode_envelope(m).source for m in ops.messages] == ["acme-2"]
    assert acme.denials == ["the key does not grant to speak as 'umbra'"]


def test_a_message_is_judged_by_what_it_is_and_not_by_its_run() -> None:
    net = Net(keyring=tenants())
    acme, ops = net.joined("acme", "acme"), net.joined("ops", "ops")
    ops.subscribe(">")
    stem = "outcome.acme.e.operation_outcome"
    acme.put(run_of(envelope("umbra", "acme"), stem))
    acme.put(Run(stem, True, [b"junk"]))
    assert ops.messages == []
    other, junk = acme.denials
    assert other == f"a message of outcome.umbra.e.operation_outcome was sent as one of {stem}"
    assert f"a message on {stem} cannot be passed on: not an envelope" in junk


def test_snapshots_go_to_whom_the_stream_is_granted_and_come_from_such() -> None:
    net = Net(keyring=tenants())
    acme, umbra, ops = (net.joined(name, name) for name in ("acme", "umbra", "ops"))
    acme.put(Provide(QUEUE.format("acme")), Provide(QUEUE.format("umbra")))
    assert "publish on state.umbra" in acme.denials[0]
    assert umbra.subscribe(">").streams == []
    umbra.put(Fetch(1, QUEUE.format("acme")))
    assert acme.of(Wanted) == []
    assert umbra.items[-1] == SnapshotFor([1], QUEUE.format("acme"), [], True)
    assert ops.subscribe(">").streams == [QUEUE.format("acme")]
    (wanted,) = acme.of(Wanted)
    stem = QUEUE.format("acme")
    forged = snapshot("umbra", "umbra")
    acme.put(Snapshot(stem, wanted.ticket, [forged, snapshot("acme", "acme")], True))
    assert [decode_envelope(m).tenant for m in ops.messages] == ["acme"]


def test_nobody_answers_for_the_snapshot_that_another_was_asked_for() -> None:
    net = Net()
    a, b, reader = net.joined("a"), net.joined("b"), net.joined("reader")
    a.put(Provide(QUEUE.format("default")))
    reader.subscribe(">")
    (wanted,) = a.of(Wanted)
    b.put(Snapshot(wanted.stem, wanted.ticket, [snapshot()], True))
    assert reader.messages == []
    a.put(Snapshot("state.default.other.queue", wanted.ticket, [snapshot()], True))
    assert reader.messages == []
    a.put(Snapshot(wanted.stem, wanted.ticket, [snapshot()], True))
    assert len(reader.messages) == 1


def test_who_waits_for_a_snapshot_that_its_provider_withdraws_is_told_that_there_is_none() -> None:
    net = Net()
    a, b, reader = net.joined("a"), net.joined("b"), net.joined("reader")
    stem = QUEUE.format("default")
    a.put(Provide(stem))
    reader.subscribe(">")
    b.put(Unprovide(stem), Unprovide("state.default.none.queue"))
    assert not reader.of(SnapshotFor), "it is not b's to withdraw"
    a.put(Unprovide(stem), Unprovide(stem))
    (told,) = reader.of(SnapshotFor)
    assert (told.stem, told.messages, told.failed) == (stem, [], True)
    (wanted,) = a.of(Wanted)
    a.put(Snapshot(stem, wanted.ticket, [snapshot()], True))
    assert reader.messages == []
    assert net.hub._snapshots.provided == []
    late = net.joined("late")
    late.subscribe(">")
    b.put(Provide(stem))
    late.put(Fetch(1, stem))
    (wanted,) = b.of(Wanted)
    b.put(Snapshot(stem, wanted.ticket, [snapshot()], True))
    assert len(late.messages) == 1


def test_who_withdraws_leaves_the_snapshot_that_a_former_provider_has_begun() -> None:
    net = Net()
    a, b, reader = net.joined("a"), net.joined("b"), net.joined("reader")
    stem = QUEUE.format("default")
    a.put(Provide(stem))
    reader.subscribe(">")
    (wanted,) = a.of(Wanted)
    a.put(Snapshot(stem, wanted.ticket, [snapshot()], False))
    b.put(Provide(stem), Unprovide(stem))
    a.put(Snapshot(stem, wanted.ticket, [snapshot()], True))
    assert len(reader.messages) == 2
    assert not any(told.failed for told in reader.of(SnapshotFor))


def test_history_and_statistics_tell_a_tenant_of_itself() -> None:
    net = Net(keyring=tenants())
    acme, umbra, ops = (net.joined(name, name) for name in ("acme", "umbra", "ops"))
    for peer in (acme, umbra, ops):
        peer.subscribe(">")
        peer.put(Standing([("reader-1", 1, 2, 3)]))
    acme.put(run_of(envelope("acme", "acme")))
    umbra.put(run_of(envelope("umbra", "umbra")))

    def ask(peer: Peer, about: str) -> bytes:
        peer.put(Question(5, about, [">"]))
        answers = peer.of(Answer)
        assert answers[-1].last
        peer.items.clear()
        return b"".join(part for answer in answers for part in answer.parts)

    assert decode_envelope(ask(acme, "history")).tenant == "acme"
    with pytest.raises(RemoteProtocolError):
        decode_envelope(ask(ops, "history"))  # two, one after the other
    told = msgspec.msgpack.decode(ask(umbra, "statistics"), type=BusStatistics)
    assert [row.name for row in told.subscriptions] == ["umbra/reader-1"]
    assert told.published["outcome"] == 1
    told = msgspec.msgpack.decode(ask(ops, "statistics"), type=BusStatistics)
    assert len(told.subscriptions) == 3
    assert told.published["outcome"] == 2


def test_a_will_is_granted_as_anything_else() -> None:
    net = Net(keyring=tenants())
    acme, ops = net.joined("acme", "acme"), net.joined("ops", "ops")
    ops.subscribe(">")
    acme.put(Will([run_of(envelope("umbra", "acme")), run_of(envelope("acme", "acme"))]))
    assert len(acme.denials) == 1, "it hears so at once"
    net.hub.closed(acme.connection, net.now)
    del net.peers[acme.connection]
    net.pass_time(25.0)
    assert [decode_envelope(m).tenant for m in ops.messages] == ["acme"]


def test_losses_are_told_of_what_is_granted() -> None:
    net = Net(keyring=tenants())
    acme, umbra, ops = (net.joined(name, name) for name in ("acme", "umbra", "ops"))
    for peer in (umbra, ops):
        peer.subscribe("state.>")
    acme.put(Lost([QUEUE.format("umbra"), QUEUE.format("acme")]))
    assert umbra.of(Lost) == []
    assert ops.of(Lost) == [Lost([QUEUE.format("acme")])]


# -- what nobody may do -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "item",
    [
        Run("state.default.e", False, [b"x"]),
        Run("state.default.e.queue.x", False, [b"x"]),
        Run("nonsense.default.e.queue", True, [b"x"]),
        Run("state.default.*.queue", False, [b"x"]),
        Run("state..e.queue", False, [b"x"]),
        Run("state.default.e.\u2603", False, [b"x"]),
        Run("state.default." + "e" * 5_000 + ".queue", False, [b"x"]),
        Run("state.default.e.queue", True, [b"x"]),
        Run("outcome.default.e.operation_outcome", False, [b"x"]),
        Run("state.default.e.queue", False, [b"x" * (MAX_MESSAGE_BYTES // 2 + 1)] * 2),
        Provide("state.default.>"),
        Provide(""),
        Lost([">"]),
        Will([Run("", True, [])]),
        CutOff("x"),
        Denied("x"),
        Wanted("state.default.e.queue", 1),
        SnapshotFor([1], "state.default.e.queue", [], True),
    ],
    ids=repr,
)
def test_what_no_peer_may_say_ends_the_connection_and_nothing_else(item: frames.Item) -> None:
    net = Net()
    reader, rogue = net.joined("reader"), net.joined("rogue")
    reader.subscribe(">")
    rogue.put(item)
    assert rogue.closed
    assert reader.messages == []
    assert net.hub.refused == 1
    assert [event.name for event in net.hub.events][-2:] == ["frame.unusable", "peer.broke_off"]
    assert "rogue" not in net.hub.peers, "it may not go on from where it was"
    serves(net)


def test_a_message_that_is_too_large_is_denied_and_the_rest_goes_on() -> None:
    net = Net()
    sender, reader = net.joined("sender"), net.joined("reader")
    reader.subscribe(">")
    stem = "outcome.default.e.operation_outcome"
    sender.put(Run(stem, True, [b"x" * (MAX_MESSAGE_BYTES + 1)]))
    sender.put(Run(stem, True, [b"y"]))
    assert reader.messages == [b"y"]
    assert f"larger than {MAX_MESSAGE_BYTES} bytes" in sender.denials[0]
    sender.put(Run(stem, True, [b"x" * MAX_MESSAGE_BYTES]))
    assert len(reader.messages) == 2, "the largest that may be passes"


def test_a_frame_that_is_too_large_ends_the_connection() -> None:
    net = Net()
    rogue = net.joined("rogue")
    rogue.say(b"\x95" + b"x" * MAX_FRAME_BYTES)
    assert rogue.closed
    assert "frame.unusable" in {event.name for event in net.hub.events}
    serves(net)


def test_a_stranger_is_told_so_whatever_it_sends() -> None:
    net = Net()
    stranger = net.connect()
    stranger.say(b"x" * (MAX_FRAME_BYTES * 2))
    assert stranger.frames == [Stranger("hub")]
    stranger.say(Frame(1, 0, 0, [Subscribe(1, "r", [">"])]))
    assert stranger.frames[-1] == Stranger("hub")
    stranger.say(b"junk")
    assert stranger.closed
    serves(net)


def test_counts_that_make_no_sense_do_no_harm() -> None:
    net = Net()
    rogue = net.joined("rogue")
    rogue.subscribe(">")
    top = 2**64 - 1
    rogue.put(Standing([("reader-1", top, top, -5)] * 3, top))
    rogue.put(Subscribe(top, "x", [">"]), Fetch(top, QUEUE.format("default")), Unsubscribe(-7))
    rogue.put(Question(-1, "statistics"))
    told = msgspec.msgpack.decode(rogue.of(Answer)[-1].parts[0], type=BusStatistics)
    assert told.subscriptions[0].dropped == 0
    rogue.say(Frame(-3, -9, -1, [Subscribe(3, "x", [">"])]))
    rogue.say(Frame(top, top, top))
    assert not rogue.closed
    serves(net)


def test_subscriptions_patterns_and_names_are_bounded() -> None:
    net = Net()
    peer = net.joined("x")
    assert "at most 256" in peer.subscribe(*["state.>"] * 257).refused
    assert "pattern" in peer.subscribe("a..b").refused
    peer.put(Subscribe(1, "x" * 300, [">"]))
    for number in range(4_097):
        peer.put(Subscribe(number, "r", ["control.>"]))
    assert "4096 subscriptions" in peer.items[-1].refused  # type: ignore[union-attr]


# -- bounds for those who do not take what they ask for ---------------------------------------


def overdrawn(net: Net) -> tuple[Peer, Peer]:
    provider, greedy = net.joined("provider"), net.joined("greedy")
    provider.put(*(Provide(f"state.default.e{number}.queue") for number in range(20)))
    greedy.subscribe(">")
    greedy.acknowledges = False
    return provider, greedy


def test_snapshots_for_one_who_does_not_take_them_are_fetched_a_few_at_a_time() -> None:
    net = Net()
    provider, greedy = overdrawn(net)
    megabyte = [b"x" * (1 << 20)]
    answered = 0
    for _ in range(300):
        greedy.put(*(Fetch(1, f"state.default.e{number}.queue") for number in range(20)))
        wanted = provider.of(Wanted)
        for want in wanted[answered:]:
            answered += 1
            for last in (False, False, True):
                provider.put(Snapshot(want.stem, want.ticket, megabyte, last))
    (peer,) = (p for p in net.hub._peers if p.name == "greedy")
    assert peer.backlog.owed_bytes < 24 << 20
    assert peer.num_wants <= 20
    assert len(net.hub._snapshots) <= 20
    assert not greedy.closed, "nothing forbids to ask"
    serves(net)


def test_a_provider_without_end_is_cut_off_from_who_does_not_take_it() -> None:
    net = Net(Hub(id="hub", now=-10.0, bounds=Bounds(owed_bytes=10 << 20)))
    provider, greedy = overdrawn(net)
    want = provider.of(Wanted)[0]
    for _ in range(40):
        provider.put(Snapshot(want.stem, want.ticket, [b"x" * (1 << 20)], False))
    (peer,) = (p for p in net.hub._peers if p.name == "greedy")
    assert peer.backlog.owed_bytes <= 12 << 20
    greedy.acknowledges = True
    net.pass_time(30.0)
    failed = [item for item in greedy.of(SnapshotFor) if item.failed]
    assert [item.stem for item in failed] == [want.stem]


def test_answers_that_are_not_taken_are_bounded() -> None:
    net = Net(Hub(id="hub", now=-10.0, bounds=Bounds(owed_bytes=1 << 20)))
    sender, greedy = net.joined("sender"), net.joined("greedy")
    for _ in range(50):
        sender.put(Run("outcome.default.e.operation_outcome", True, [b"x" * 100_000]))
    greedy.acknowledges = False
    (peer,) = (p for p in net.hub._peers if p.name == "greedy")
    for number in range(50):
        greedy.put(Question(number, "history", [">"]))
        assert peer.backlog.owed_bytes < 12 << 20
        if greedy.closed:
            break
    assert greedy.closed
    assert net.hub.peers == ["sender"]
    serves(net)


def test_what_stood_behind_what_may_not_be_said_is_not_taken_for_settled() -> None:
    """A frame that was acknowledged in part would lose the rest of it without a word."""
    net = Net()
    reader, sender = net.joined("reader"), net.joined("sender")
    reader.subscribe(">")
    run = run_of(envelope())
    sender.put(run, frames.CutOff("x"), run)
    assert len(reader.messages) == 1
    assert "sender" not in net.hub.peers
    again = net.connect()
    hello = Hello(LINK_VERSION, "sender", f"sender-{sender.connection}", 0, hub="hub/2")
    again.say(hello)
    (welcome,) = again.frames
    assert isinstance(welcome, Welcome)
    assert not welcome.resumed


def test_one_who_lives_and_takes_nothing_over_is_given_up() -> None:
    net = Net()
    sender, dead = net.joined("sender"), net.joined("dead")
    dead.subscribe(">")
    dead.acknowledges = False
    sender.put(run_of(envelope()))
    for _ in range(30):
        net.pass_time(1.0)
    assert "dead" in net.hub.peers
    net.pass_time(40.0)
    assert "dead" not in net.hub.peers
    assert [e.facts for e in net.hub.events if e.name == "peer.stuck"] == [{"peer": "dead"}]


def test_what_is_remembered_is_bounded_in_bytes_of_any_size_of_message() -> None:
    net = Net(Hub(id="hub", now=-10.0, history_bytes=100_000))
    sender = net.joined("sender")
    for _ in range(100):
        sender.put(Run("outcome.default.e.operation_outcome", True, [b""] * 1_000))
    kept = [run for chapter in net.hub._history._chapters for run in chapter.runs]
    assert sum(len(messages) for _, messages, _ in kept) < 2_000


def test_the_log_for_the_late_is_bounded_and_its_end_is_told() -> None:
    net = Net(Hub(id="hub", now=0.0, bounds=Bounds(reliable_bytes=50_000)))
    sender, late = net.joined("sender"), net.joined("late")
    late.put(Subscribe(1, "r", [">"], resumed=True))
    assert late.items[-1].complete  # type: ignore[union-attr]
    for _ in range(100):
        sender.put(Run("outcome.default.e.operation_outcome", True, [b"x" * 1_000]))
    assert not net.hub._settlement.waits
    assert net.hub._settlement._log == []
    late.put(Subscribe(2, "r", [">"], resumed=True))
    assert not late.of(frames.Subscribed)[-1].complete


def test_a_peer_that_comes_back_for_more_than_it_may_be_kept_is_cut_off_and_told() -> None:
    net = Net(Hub(id="hub", now=0.0, bounds=Bounds(reliable_messages=10)))
    sender, late = net.joined("sender"), net.joined("late")
    for _ in range(30):
        sender.put(run_of(envelope()))
    late.put(Subscribe(1, "r", [">"], resumed=True))
    assert len(late.of(CutOff)) == 1


# -- whatever comes ---------------------------------------------------------------------------

_small = st.one_of(st.integers(-2, 5), st.integers(-(2**63), 2**64 - 1))
_text = st.one_of(
    st.sampled_from(["", "a", "b", ">", "state.>", "state.default.e.queue", "outcome.a.b.c"]),
    st.text(max_size=8),
)
_runs = st.builds(Run, _text, st.booleans(), st.lists(st.binary(max_size=20), max_size=3))
_items = st.one_of(
    _runs,
    st.builds(frames.Lost, st.lists(_text, max_size=3)),
    st.builds(frames.Subscribe, _small, _text, st.lists(_text, max_size=3), st.booleans()),
    st.builds(frames.Subscribed, _small, st.lists(_text, max_size=2), st.booleans(), _text),
    st.builds(frames.Unsubscribe, _small),
    st.builds(frames.Provide, _text, st.booleans()),
    st.builds(frames.Unprovide, _text),
    st.builds(frames.Fetch, _small, _text),
    st.builds(frames.Wanted, _text, _small),
    st.builds(frames.Snapshot, _text, _small, st.lists(st.binary(max_size=20)), st.booleans()),
    st.builds(frames.CutOff, _text),
    st.builds(frames.Denied, _text),
    st.builds(frames.Will, st.lists(_runs, max_size=2)),
    st.builds(
        frames.Question, _small, st.sampled_from(["history", "statistics", "x"]), st.lists(_text)
    ),
    st.builds(frames.Answer, _small, st.lists(st.binary(max_size=20)), st.booleans()),
    st.builds(
        frames.Standing, st.lists(st.tuples(_text, _small, _small, _small), max_size=3), _small
    ),
)
_wires = st.one_of(
    st.builds(frames.Hello, st.sampled_from([1, 1, 1, 2]), _text, _text, _small, _text, _text),
    st.builds(frames.Challenge, st.binary(max_size=32)),
    st.builds(frames.Welcome, _small, _text, st.booleans(), _small),
    st.builds(frames.Refused, _text, st.booleans()),
    st.builds(frames.Stranger, _text),
    st.builds(frames.Goodbye),
    st.builds(frames.Frame, _small, _small, _small, st.lists(_items, max_size=4)),
)
_joining = st.builds(
    frames.Hello, st.just(1), st.sampled_from("abc"), st.sampled_from("st"), _small
)
_said = st.lists(
    st.tuples(
        st.sampled_from(["say", "say", "say", "items", "items", "close", "time", "raw"]),
        st.integers(101, 103),
        st.one_of(_wires, _joining),
        st.lists(_items, max_size=3),
        st.binary(max_size=40),
    ),
    max_size=25,
)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_documented_error(data: bytes) -> None:
    try:
        wire = decode(data)
    except RemoteProtocolError:
        return
    assert decode(encode(wire)) == wire


@given(_wires)
def test_any_frame_comes_back_as_it_was(wire: frames.Wire) -> None:
    assert decode(encode(wire)) == wire


@given(_wires, st.integers(0, 2**32))
def test_a_frame_with_any_byte_changed_is_a_frame_or_a_documented_error(
    wire: frames.Wire, seed: int
) -> None:
    rng = random.Random(seed)
    data = bytearray(encode(wire))
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        decode(bytes(data[: rng.randint(0, len(data))]))
        decode(bytes(data))
    except RemoteProtocolError:
        pass


@settings(max_examples=200)
@given(_said, st.booleans())
def test_whatever_comes_over_whichever_connection_the_hub_serves_the_others(
    said: list[tuple[str, int, frames.Wire, list[frames.Item], bytes]], keys: bool
) -> None:
    net = Net(Hub(id="hub", now=0.0, keyring=tenants() if keys else None))
    numbers = dict.fromkeys((101, 102, 103), 0)
    for connection in () if keys else numbers:
        hello = Hello(LINK_VERSION, f"peer-{connection}", f"s-{connection}", 0)
        net.hub.receive(connection, encode(hello), net.now)
    for what, connection, wire, items, data in said:
        if what == "say":
            net.hub.receive(connection, encode(wire), net.now)
            numbers[connection] = 0 if isinstance(wire, Hello) else numbers[connection]
        elif what == "items":
            numbers[connection] += 1
            frame = Frame(numbers[connection], 0, 0, items)
            net.hub.receive(connection, encode(frame), net.now)
        elif what == "raw":
            net.hub.receive(connection, data, net.now)
        elif what == "close":
            net.hub.closed(connection, net.now)
            numbers[connection] = 0
        else:
            net.now += 7.0
            net.hub.tick(net.now)
        for number in net.hub.to_close:
            net.hub.closed(number, net.now)
        net.hub.to_close.clear()
        net.hub.turn(net.now)
        while net.hub.busy:
            net.hub.turn(net.now)
        for number, out in net.hub.output:
            if number in numbers:
                decode(out)
        net.hub.output.clear()
        assert net.hub.next_due() >= 0.0
    net.hub.statistics()
    serves(net, "umbra" if keys else "")
    net.pass_time(60.0)
    serves(net, "umbra" if keys else "")
