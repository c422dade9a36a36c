"""What the holder of a key can do to others at the hub: take its share of the time, and no more.

What is counted here is work and bytes and not seconds: how much is done in one turn, what others
get between two of an attacker's turns, and what is left when all have gone. Before, the hub did
what a frame asked for at once: 20,000 questions in one held it for 47 s, 4,000 subscriptions of 255
patterns for 30 s, and what it kept was bounded for each peer, if at all, and not for each key.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from hear.buses.nng import handling, server, snapshots
from hear.buses.nng.access import Grants
from hear.buses.nng.backlog import Bounds
from hear.buses.nng.frames import (
    MAX_FRAME_BYTES,
    MAX_ITEM_BYTES,
    MAX_PATTERN_BYTES,
    MAX_PATTERNS,
    MAX_ROWS,
    MAX_WILL_RUNS,
    Fetch,
    Frame,
    Item,
    Lost,
    Provide,
    Question,
    Run,
    Snapshot,
    SnapshotFor,
    Standing,
    Subscribe,
    Subscribed,
    Unprovide,
    Unsubscribe,
    Wanted,
    Will,
    encode,
)
from hear.buses.nng.history import History
from hear.buses.nng.hub import MAX_INBOX_BYTES, MAX_INBOX_FRAMES, MAX_ITEMS, SLOW_S, Hub
from hear.buses.nng.index import PatternIndex, StemIndex
from hear.buses.nng.peers import Peer as HubPeer
from hear.buses.nng.questions import MAX_TOLD
from hear.buses.nng.snapshots import MAX_KEY_STREAM_BYTES
from hear.buses.nng.turns import Ring
from hear.delivery import Sequencer
from hear.messages import Key, OperationOutcome
from hear.subjects import Pattern
from tests.buses.nng_peers import Net, Peer, envelope, run_of, snapshot, tenants

OUTCOME = "outcome.acme.e.operation_outcome"
MESSAGE = run_of(envelope("acme", "acme")).messages[0]
OTHERS = run_of(envelope("umbra", "umbra"))


def work_of(what: Callable[[], object]) -> int:
    """How much something does: calls and returns, of functions in Python and in C."""
    done = 0

    def count(*_: object) -> None:
        nonlocal done
        done += 1

    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(None)
    return done


def pour(net: Net, peer: Peer, *items: Item) -> None:
    """Have a frame of a peer wait for its turn."""
    peer._number += 1
    data = encode(Frame(peer._number, peer._received, 0, list(items)))
    assert len(data) <= MAX_FRAME_BYTES, "a frame that may come"
    assert peer.seals is not None
    net.hub.receive(peer.connection, peer.seals.seal(data), net.now)


def hub_peer(net: Net, peer: Peer) -> HubPeer:
    found = net.hub._peers.at(peer.connection)
    assert found is not None
    return found


def nothing_is_left(net: Net) -> None:
    """Check that the hub keeps nothing of anybody."""
    hub = net.hub
    assert hub.peers == []
    assert not list(hub._peers)
    assert not hub._to_do
    assert not hub._dirty
    assert not any(hub._inbox_bytes.values())
    assert not any(map(hub._peers.count, hub._inbox_bytes))
    for index in (hub._routes._of_state, hub._routes._of_reliable):
        assert not index.root.below
        assert not index.root.values
    assert hub._snapshots._stems._root == {}
    assert len(hub._snapshots) == 0
    assert not hub._snapshots.provided
    assert not any(hub._snapshots._key_bytes.values())
    assert not hub._closing
    assert not hub._joining._connections
    assert not hub._joining._strangers


def all_go(net: Net) -> None:
    """Have all peers go, and time pass."""
    for peer in net.peers.values():
        if not peer.closed:
            net.hub.closed(peer.connection, net.now)
            net.closed.add(peer.connection)
    net.now += 100.0
    for _ in range(3):
        net.hub.tick(net.now)
        net.settle()


# -- time -------------------------------------------------------------------------------------

ATTACKS: dict[str, Callable[[], list[Item]]] = {
    "questions": lambda: [Question(n, "statistics") for n in range(5_000)],
    "questions about history": lambda: [Question(n, "history", [">"]) for n in range(5_000)],
    "subscriptions": lambda: [
        Subscribe(n, "r", [f"intent.acme.w{n}-{m}.>" for m in range(50)]) for n in range(50)
    ],
    "subscriptions that are none": lambda: [
        Subscribe(n, "r", ["intent.acme.>"] * 80 + [".."]) for n in range(60)
    ],
    "subscriptions for all streams": lambda: [
        Subscribe(1, "r", [f"state.acme.*.*.k{n}" for n in range(MAX_PATTERNS)])
    ],
    "subscriptions without a pattern": lambda: [Subscribe(n, "r", []) for n in range(5_000)],
    "messages that are none": lambda: [Run(OUTCOME, True, [b""] * 50_000)],
    "messages": lambda: [Run(OUTCOME, True, [MESSAGE] * 700)],
    "parts of a snapshot": lambda: [Snapshot("state.acme.e.queue", 1, [b""] * 50_000, True)],
    "snapshots": lambda: [Snapshot("state.acme.e.queue", 1, [], False)] * 4_000,
    "losses": lambda: [Lost([f"state.acme.{n}.queue" for n in range(4_000)])],
    "rows": lambda: [Standing([("", n, n, n) for n in range(MAX_ROWS)])] * 70,
    "streams": lambda: [Provide(f"state.acme.n{n}.queue") for n in range(2_000)],
    "wants": lambda: [Fetch(1, "state.acme.e.queue")] * 4_000,
    "wills": lambda: [Will([run_of(envelope("acme", "acme"))] * 300), *[Will([], True)] * 4_000],
    "goings": lambda: [Unsubscribe(n) for n in range(5_000)],
    "streams no more": lambda: [Unprovide(f"state.acme.n{n}.queue") for n in range(2_000)],
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_turn_is_bounded_whatever_is_asked_for_and_others_have_theirs(
    attack: Callable[[], list[Item]],
) -> None:
    """Twenty peers of one key ask for as much as they can. One of another says a thing at a time,
    and is never more than a turn away from being heard."""
    net = Net(keyring=tenants())
    victim, reader = net.joined("victim", "umbra"), net.joined("reader", "umbra")
    reader.subscribe("outcome.umbra.>")
    attackers = [net.joined(f"a{n}", "acme") for n in range(20)]
    for attacker in attackers:
        attacker.put(Subscribe(1, "r", ["*.acme.>"]))
        attacker.acknowledges = False
    attackers[0].put(*(Provide(f"state.acme.e{n}.queue") for n in range(1_000)))
    attackers[0].put(Provide("state.acme.e.queue"))
    items = attack()
    for attacker in attackers:
        pour(net, attacker, *items)
    most = 0
    for turn in range(40):
        pour(net, victim, OTHERS)
        for _ in range(2):
            most = max(most, work_of(lambda: net.hub.turn(net.now)))
        assert not hub_peer(net, victim).inbox, "it was heard"
        net.carry()
        assert len(reader.messages) == turn + 1
    assert most <= 150_000, "which takes some 10 ms"


def test_what_takes_long_and_cannot_be_divided_is_paid_for_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One message of 100 KB that has to be taken apart takes a tenth of a second."""
    odd = b"\x81\xd9\x01a\xdd" + (45_000).to_bytes(4, "big") + b"\x91\xc0" * 45_000
    net = Net(keyring=tenants())
    victim, attacker = net.joined("victim", "umbra"), net.joined("a", "acme")
    for _ in range(20):
        pour(net, attacker, Run(OUTCOME, True, [odd]))
        pour(net, victim, *[OTHERS] * 100)
    served: list[str] = []
    spent: Counter[str] = Counter()
    serve = net.hub._serve

    def recording(peer: HubPeer, now: float) -> int:
        units = serve(peer, now)
        served.append(peer.name)
        spent[peer.name] += units
        return units

    monkeypatch.setattr(net.hub, "_serve", recording)
    while net.hub._to_do:
        net.hub.turn(net.now)
    first, second = [n for n, name in enumerate(served) if name == "a"][:2]
    assert spent["a"] > 20 * 50_000
    assert set(served[first + 1 : second]) == {"victim"}
    assert "victim" not in served[second:], "who asked for less in all is done before"


async def test_a_hub_that_always_has_something_to_do_keeps_time_all_the_same() -> None:
    """Before, whoever saw to it that the hub never came to an end of its work stopped its clock:
    connections that did not join stayed, lost ones were not noticed, nobody had a sign of life."""
    ticks = 0
    enough = trio.Event()

    def tick(now: float) -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 3:
            enough.set()

    hub = SimpleNamespace(
        busy=True, tick=tick, turn=lambda now: None, output=[], events=[], to_close=[7], closed=max,
        next_due=lambda: trio.current_time() + 1.0,
    )  # fmt: skip
    closed: list[int] = []
    wire = SimpleNamespace(opened=list, closed=list, close_connection=closed.append)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server._keep_time, cast(Any, wire), cast(Any, hub), server._Log())
            await enough.wait()
            nursery.cancel_scope.cancel()
    assert closed == [7]


# -- whose turn it is -------------------------------------------------------------------------


def waiting(grants: Grants, name: str) -> HubPeer:
    return cast(HubPeer, _Waiting(grants, name))


@dataclass(eq=False)
class _Waiting:
    grants: Grants
    name: str


@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5), rounds=st.integers(1, 50))
def test_keys_take_turns_and_peers_of_a_key_among_each_other(sizes: list[int], rounds: int) -> None:
    keys = [Grants((), (), ()) for _ in sizes]
    peers = {
        key: [waiting(key, str(n)) for n in range(size)]
        for key, size in zip(keys, sizes, strict=True)
    }
    ring = Ring()
    for members in peers.values():
        for peer in members:
            ring.add(peer)
    turns = []
    for _ in range(rounds * len(keys)):
        peer = ring.pop()
        turns.append(peer)
        ring.add(peer)
        ring.add(peer)  # once is enough
    for start in range(len(turns) - len(keys) + 1):
        window = turns[start : start + len(keys)]
        assert len({id(peer.grants) for peer in window}) == len(keys), "each key once"
    for key in keys:
        own = [peer for peer in turns if peer.grants is key]
        for start in range(len(own) - len(peers[key]) + 1):
            assert len({id(p) for p in own[start : start + len(peers[key])]}) == len(peers[key])
    for members in peers.values():
        for peer in members:
            ring.discard(peer)
            ring.discard(peer)
    assert not ring


@given(costs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=60))
def test_who_takes_several_turns_in_one_owes_them(costs: list[tuple[int, int]]) -> None:
    """However large the things are that keys do, none gets more turns than another, but for one."""
    keys = [Grants((), (), ()) for _ in range(3)]
    plan: dict[int, list[int]] = {n: [c for k, c in costs if k == n] or [1] for n in range(3)}
    ring = Ring()
    peers = [waiting(key, str(n)) for n, key in enumerate(keys)]
    for peer in peers:
        ring.add(peer)
    taken = [0, 0, 0]
    for step in range(200):
        peer = ring.pop()
        n = int(peer.name)
        cost = plan[n][step % len(plan[n])]
        taken[n] += cost
        ring.took(peer.grants, cost - 1)
        ring.add(peer)
    assert max(taken) - min(taken) <= 2 * 9


def test_who_is_alone_owes_nobody() -> None:
    ring = Ring()
    one, other = waiting(Grants((), (), ()), "one"), waiting(Grants((), (), ()), "other")
    ring.add(one)
    for _ in range(5):
        assert ring.pop() is one
        ring.took(one.grants, 1_000)
        ring.add(one)
    assert ring.pop() is one
    ring.add(one)
    ring.add(other)
    assert [ring.pop(), ring.pop()] == [one, other]


# -- what is kept -----------------------------------------------------------------------------


def test_frames_that_nobody_has_looked_at_are_bounded_for_each_peer_and_key() -> None:
    net = Net(keyring=tenants())
    victim, reader = net.joined("victim", "umbra"), net.joined("reader", "umbra")
    reader.subscribe("outcome.umbra.>")
    attackers = [net.joined(f"a{n}", "acme") for n in range(20)]
    large = Run(OUTCOME, True, [bytes(100_000)])
    for _ in range(2 * MAX_INBOX_FRAMES):
        for attacker in attackers:
            pour(net, attacker, large)
    kept = [hub_peer(net, attacker) for attacker in attackers]
    assert max(len(peer.inbox) for peer in kept) <= MAX_INBOX_FRAMES
    assert sum(peer.inbox_bytes for peer in kept) <= MAX_INBOX_BYTES
    assert net.hub._inbox_bytes[kept[0].grants] == sum(peer.inbox_bytes for peer in kept)
    pour(net, victim, OTHERS)
    for _ in range(2):
        net.hub.turn(net.now)
    net.carry()
    assert len(reader.messages) == 1
    net.settle()
    assert not any(net.hub._inbox_bytes.values())
    all_go(net)
    nothing_is_left(net)


def test_what_found_no_room_among_the_frames_that_wait_comes_again() -> None:
    """An honest process with a key of which others flood gets through when its turn comes."""
    net = Net(keyring=tenants())
    reader, honest = net.joined("reader", "ops"), net.joined("honest", "acme")
    reader.subscribe("outcome.acme.>")
    attackers = [net.joined(f"a{n}", "acme") for n in range(20)]
    for _ in range(2 * MAX_INBOX_FRAMES):
        for attacker in attackers:
            pour(net, attacker, Run(OUTCOME, True, [bytes(100_000)]))
    said = encode(Frame(1, 0, 0, [Run(OUTCOME, True, [MESSAGE])]))
    assert honest.seals is not None
    for _ in range(2):
        net.hub.receive(honest.connection, honest.seals.seal(said), net.now)
        net.settle()
    assert reader.messages == [MESSAGE]


@pytest.mark.parametrize(
    ("patterns", "reason"),
    [
        (["state.>"] * (MAX_PATTERNS + 1), f"at most {MAX_PATTERNS}"),
        (["state." + "x" * (MAX_PATTERN_BYTES // 8)] * 9, f"of {MAX_PATTERN_BYTES} bytes"),
        (["state.\u00e9"], "letters, digits"),
    ],
)
def test_a_subscription_is_bounded_in_patterns_and_their_bytes(
    patterns: list[str], reason: str
) -> None:
    """Before, 98 subscriptions to patterns without a limit took 1.57 GB."""
    net = Net(keyring=tenants())
    peer = net.joined("a", "acme")
    assert reason in peer.subscribe(*patterns).refused
    assert hub_peer(net, peer).num_patterns == 0
    assert not peer.subscribe("state.acme.>", number=2).refused


@pytest.mark.parametrize("patterns", [[], ["state.acme.>"] * 64])
def test_patterns_of_a_key_are_bounded_and_those_of_others_are_not_counted(
    patterns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subscription without a pattern counts too. Before, all were bounded for each peer alone."""
    monkeypatch.setattr(handling, "MAX_KEY_PATTERNS", 640)
    net = Net(keyring=tenants())
    peers = [net.joined(f"a{n}", "acme") for n in range(5)]
    for number in range(300):
        peers[number % 5].put(Subscribe(number, "r", list(patterns)))
    there = sum(hub_peer(net, peer).num_patterns for peer in peers)
    answers = [answer for peer in peers for answer in peer.of(Subscribed)]
    assert there <= 640
    if patterns:
        assert sum("are the most" in answer.refused for answer in answers) == 290
    other = net.joined("other", "umbra")
    assert not other.subscribe("state.>").refused
    for number in range(300):
        peers[number % 5].put(Unsubscribe(number))
    assert sum(hub_peer(net, peer).num_patterns for peer in peers) == 0
    assert not peers[0].subscribe("state.acme.>").refused, "there is room again"
    all_go(net)
    nothing_is_left(net)


def test_streams_of_a_key_are_bounded_so_that_who_hears_them_can_be_told_of_all() -> None:
    """Before, a tenant that provided enough streams had every subscription of those who may hear
    them answered by an item that no link carries: they were stuck, and given up after a minute."""
    net = Net(keyring=tenants())
    peers = [net.joined(f"a{n}", "acme") for n in range(20)]
    for number, peer in enumerate(peers):
        for part in range(10):
            names = (f"{'x' * 3_000}{number}-{part}-{n}" for n in range(30))
            peer.put(*(Provide(f"state.acme.{name}.queue") for name in names))
    provided = net.hub._snapshots.provided
    assert 300 <= len(provided) <= 350
    assert sum(map(len, provided)) <= MAX_KEY_STREAM_BYTES
    assert any("the streams that all with one key" in r for peer in peers for r in peer.denials)
    tap = net.joined("tap", "ops")
    answer = tap.subscribe(">")
    assert answer.streams == provided
    assert len(encode(Frame(1, 0, 0, [answer]))) < MAX_ITEM_BYTES
    other = net.joined("worker", "umbra")
    other.put(Provide("state.umbra.e.queue"))
    assert not other.denials
    all_go(net)
    nothing_is_left(net)


def test_who_provides_what_another_of_its_key_did_takes_its_place_and_no_more_room() -> None:
    net = Net(keyring=tenants())
    one, two = net.joined("one", "acme"), net.joined("two", "acme")
    streams = [f"state.acme.{'x' * 50}{n}.queue" for n in range(100)]
    one.put(*map(Provide, streams))
    kept = dict(net.hub._snapshots._key_bytes)
    two.put(*map(Provide, streams))
    one.put(*map(Provide, streams))
    assert net.hub._snapshots._key_bytes == kept
    assert hub_peer(net, two).text_bytes == 0
    all_go(net)
    nothing_is_left(net)


def small_key(mebibytes: int) -> Net:
    """Tenants of which each may have so much kept."""
    net = Net(keyring=tenants())
    for grants in net.hub._joining._keyring._grants.values():  # type: ignore[union-attr]
        grants.max_bytes = mebibytes << 20
    return net


def total_bytes(net: Net, peer: Peer) -> int:
    grants = hub_peer(net, peer).grants
    return sum(p.size_bytes for p in net.hub._peers.with_grants(grants))


def test_with_too_much_for_a_key_the_one_is_cut_off_for_which_most_is_kept() -> None:
    """It lives, so its will is not done: before, floods had the wills of the living done."""
    net = small_key(4)
    sender = net.joined("sender", "acme")
    slow, quick = net.joined("slow", "acme"), net.joined("quick", "acme")
    other = net.joined("other", "ops")
    for reader in (slow, quick, other):
        reader.subscribe("outcome.acme.>")
    slow.acknowledges = False
    for _ in range(100):
        sender.put(Run(OUTCOME, True, [MESSAGE] * 400))
        assert total_bytes(net, sender) <= 4 << 20
    assert net.hub.peers == ["sender", "slow", "quick", "other"]
    assert len(quick.messages) == len(other.messages) == 100 * 400
    assert [e.facts["peer"] for e in net.hub.events if e.name == "peer.cut_off"] == ["slow"]
    all_go(net)
    nothing_is_left(net)


KEPT: dict[str, Callable[[int], list[Item]]] = {
    "subscriptions": lambda n: [Subscribe(n, "r", ["state.acme." + "y" * 4_000] * 8)],
    "streams": lambda n: [Provide(f"state.acme.{'y' * 3_000}{n}.queue")],
    "wants": lambda n: [Fetch(1, f"state.acme.w{n}{'y' * 3_000}.queue")],
    "wills": lambda n: [Will([Run(OUTCOME, True, [MESSAGE] * 400)], True)] if n < 2 else [],
    "rows": lambda n: [Standing([("y" * 10_000, n, n, n)] * 10)],
    "denials": lambda n: [Run(f"state.umbra.{'y' * 3_000}{n}.queue", False, [b""])],
    "answers": lambda n: [Question(n, "history", [">"]), Run(OUTCOME, True, [MESSAGE] * 300)],
    "messages": lambda n: [Run(OUTCOME, True, [MESSAGE] * 300)],
    "losses": lambda n: [Lost([f"state.acme.{n}-{m}.queue" for m in range(200)])],
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_whatever_is_kept_for_a_key_is_bounded_and_goes_with_its_peers(
    kept: Callable[[int], list[Item]],
) -> None:
    """Eight peers that take nothing over have the hub keep one thing for them, again and again."""
    net = small_key(2)
    other, reader = net.joined("other", "umbra"), net.joined("reader", "umbra")
    reader.subscribe("outcome.umbra.>")
    for round_ in range(4):
        peers = [net.joined(f"a{round_}-{n}", "acme") for n in range(8)]
        for peer in peers:
            peer.put(Subscribe(1, "r", ["*.acme.>"]))
            peer.acknowledges = False
        for number in range(20):
            for peer in peers:
                items = kept(number)
                if items and not peer.closed and net.hub._peers.at(peer.connection):
                    peer.put(*items)
                    if net.hub._peers.at(peer.connection):
                        assert total_bytes(net, peer) <= 2 << 20
        net.now += 70.0
        for peer in (other, reader):
            peer.acknowledge()
        other.put(OTHERS)
        assert len(reader.messages) == round_ + 1
    all_go(net)
    nothing_is_left(net)


def test_parts_of_a_snapshot_count_for_as_many_as_they_are_for() -> None:
    """Before, a part of a few bytes for 4,000 subscriptions counted for a few bytes and took 32 KB,
    and some 16,000 of them could wait for each peer."""
    net = Net(keyring=tenants())
    provider, reader = net.joined("provider", "acme"), net.joined("reader", "acme")
    provider.put(Provide("state.acme.e.queue"))
    for start in range(0, 4_000, 1_000):
        reader.put(*(Subscribe(n, "r", []) for n in range(start, start + 1_000)))
    reader.acknowledges = False
    for start in range(0, 4_000, 1_000):
        reader.put(*(Fetch(n, "state.acme.e.queue") for n in range(start, start + 1_000)))
    wanted = provider.of(Wanted)
    before = hub_peer(net, reader).backlog.owed_bytes
    for _ in range(5):
        provider.put(*[Snapshot("state.acme.e.queue", wanted[0].ticket, [], False)] * 20)
    backlog = hub_peer(net, reader).backlog
    assert backlog.owed_bytes - before > 90 * 4_000 * 5


def test_a_will_is_bounded_in_messages_also_of_one_run_and_of_many_parts() -> None:
    for items in (
        [Will([Run(OUTCOME, True, [b""] * (MAX_WILL_RUNS + 1))])],
        [Will([Run(OUTCOME, True, [b""])] * 600, n > 0) for n in range(2)],
        [Will([Run(OUTCOME, True, [])] * 600, n > 0) for n in range(2)],
    ):
        net = Net(keyring=tenants())
        peer = net.joined("a", "acme")
        for item in items:
            peer.put(item)
        assert peer.closed
        (why,) = (e.facts["error"] for e in net.hub.events if e.name == "frame.unusable")
        assert "a will of" in why


def test_one_question_of_a_peer_is_open_at_once() -> None:
    net = Net(keyring=tenants())
    peer = net.joined("a", "acme")
    peer.acknowledges = False
    for number in range(1_000):
        pour(net, peer, *[Question(number * 20 + n, "history", [">"]) for n in range(20)])
        net.hub.turn(net.now)
    kept = hub_peer(net, peer)
    assert kept.backlog.owed_bytes < 4 << 20
    assert kept.size_bytes < 8 << 20


# -- snapshots --------------------------------------------------------------------------------


def test_a_tenant_that_never_answers_for_its_streams_keeps_nobody_from_those_of_others() -> None:
    """Before, four such streams were enough: a reader that waited for four snapshots was fetched no
    other, so no policy that hears all engines had any state of any of them."""
    net = Net(keyring=tenants())
    silent, worker = net.joined("silent", "acme"), net.joined("worker", "umbra")
    reader = net.joined("reader", "ops")
    silent.put(*(Provide(f"state.acme.e{n}.queue") for n in range(1_000)))
    worker.put(*(Provide(f"state.umbra.e{n}.queue") for n in range(10)))
    reader.subscribe("state.>")
    assert len(silent.of(Wanted)) == 4
    answered = 0
    while answered < len(worker.of(Wanted)):
        wanted = worker.of(Wanted)[answered]
        worker.put(Snapshot(wanted.stem, wanted.ticket, [snapshot("umbra", "umbra")], True))
        answered += 1
    whole = [item.stem for item in reader.of(SnapshotFor) if item.last and not item.failed]
    assert whole == [f"state.umbra.e{n}.queue" for n in range(10)]
    net.hub.closed(silent.connection, net.now)
    net.closed.add(silent.connection)
    net.pass_time(30.0)
    told = {item.stem for item in reader.of(SnapshotFor)}
    assert len(told) == 1_010, "and who is gone answers for nothing"
    all_go(net)
    nothing_is_left(net)


def test_a_stream_that_another_key_provides_by_now_is_fetched_of_it() -> None:
    net = Net(keyring=tenants())
    silent, worker = net.joined("silent", "acme"), net.joined("worker", "ops")
    reader = net.joined("reader", "ops")
    silent.put(*(Provide(f"state.acme.e{n}.queue") for n in range(20)))
    reader.subscribe("state.>")
    worker.put(*(Provide(f"state.acme.e{n}.queue") for n in range(20)))
    answered = 0
    while answered < len(worker.of(Wanted)):
        wanted = worker.of(Wanted)[answered]
        worker.put(Snapshot(wanted.stem, wanted.ticket, [], True))
        answered += 1
    assert len({item.stem for item in reader.of(SnapshotFor)}) == 20
    assert hub_peer(net, reader).text_bytes == 0
    all_go(net)
    nothing_is_left(net)


def test_a_snapshot_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader keeps all parts until the last has come. Before, it did so without a bound."""
    monkeypatch.setattr(snapshots, "MAX_SNAPSHOT_BYTES", 100_000)
    net = Net(keyring=tenants())
    provider, reader = net.joined("provider", "acme"), net.joined("reader", "ops")
    provider.put(Provide("state.acme.e.queue"))
    reader.subscribe("state.>")
    ticket = provider.of(Wanted)[0].ticket
    for _ in range(50):
        part = [snapshot("acme", "acme")] * 50
        provider.put(Snapshot("state.acme.e.queue", ticket, part, False))
    assert sum(map(len, reader.messages)) < 100_000
    assert reader.of(SnapshotFor)[-1].failed
    assert len(net.hub._snapshots) == 0


# -- property tests of the indexes and of what is remembered ----------------------------------

tokens = st.sampled_from(["a", "b", "c", "*"])
pattern_texts = st.one_of(
    st.just(">"),
    st.lists(tokens, min_size=1, max_size=4).map(lambda parts: ".".join([*parts, ">"])),
    st.lists(tokens, min_size=1, max_size=5).map(".".join),
)
stem_texts = st.lists(st.sampled_from(["a", "b", "c"]), min_size=4, max_size=4).map(".".join)


@given(
    there=st.lists(st.tuples(pattern_texts, st.integers(0, 5)), max_size=25),
    gone=st.lists(st.integers(0, 24), max_size=25, unique=True),
    stems=st.lists(stem_texts, min_size=1, max_size=6),
)
def test_an_index_of_patterns_finds_what_they_cover(
    there: list[tuple[str, int]], gone: list[int], stems: list[str]
) -> None:
    index: PatternIndex[int] = PatternIndex()
    for pattern, value in there:
        index.add(pattern, value)
    left = [entry for n, entry in enumerate(there) if n not in gone]
    for n in gone:
        if n < len(there):
            index.remove(*there[n])
    for stem in stems:
        expected = {value for pattern, value in left if Pattern(pattern).covers(stem)}
        assert set(index.find(stem)) == expected
    for entry in left:
        index.remove(*entry)
    assert not index.root.below
    assert not index.root.values


@given(
    stems=st.lists(stem_texts, max_size=25, unique=True),
    gone=st.lists(st.integers(0, 24), max_size=25, unique=True),
    patterns=st.lists(pattern_texts, max_size=6),
)
def test_an_index_of_stems_finds_what_patterns_cover_each_once(
    stems: list[str], gone: list[int], patterns: list[str]
) -> None:
    index = StemIndex()
    for stem in stems:
        index.add(stem)
    left = [stem for n, stem in enumerate(stems) if n not in gone]
    for n in gone:
        if n < len(stems):
            index.remove(stems[n])
    found = list(index.covered(patterns))
    assert sorted(found) == sorted(
        stem for stem in left if any(Pattern(text).covers(stem) for text in patterns)
    )
    for stem in left:
        index.remove(stem)
    assert index._root == {}


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("remember"), st.integers(1, 400)),
            st.tuples(st.just("read"), st.integers(1, 3)),
        ),
        max_size=40,
    ),
    max_bytes=st.sampled_from([1, 500, 5_000, 60_000]),
)
def test_what_is_remembered_is_told_in_order_while_it_is_forgotten(
    steps: list[tuple[str, int]], max_bytes: int
) -> None:
    """A reader of history that is overtaken by its end misses what is gone, and gets nothing twice,
    nothing out of order and nothing of what was said after it asked in any chapter but the last."""
    history = History(max_bytes)
    grants = Grants((), (">",))
    said = 0
    told: list[int] = []
    reading: Iterator[tuple[list[bytes], bool] | None] = iter(())
    ended = True

    def read() -> None:
        nonlocal ended
        part = next(reading, (None, True))
        if part is not None and part[0] is not None:
            told.extend(int(message) for message in part[0])
            ended = part[1]

    for what, count in steps:
        if what == "remember":
            for _ in range(count):
                said += 1
                history.remember(Run("state.a.b.c", False, [b"%d" % said]), len(str(said)))
            assert history._size_bytes <= max_bytes
        else:
            if ended:
                told.clear()
                reading = history.tell(("state.>",), grants)
                ended = False
            for _ in range(count):
                read()
            assert told == sorted(set(told))
    for _ in range(5_000):
        if ended:
            break
        read()
    assert told == sorted(set(told))
    told.clear()
    ended, reading = False, history.tell(("state.>",), grants)
    while not ended:
        read()
    assert told == list(range(said - len(told) + 1, said + 1)), "all that is left, to the end"


# -- all of it by chance ----------------------------------------------------------------------

streams = st.sampled_from([f"state.acme.{name}.queue" for name in "abc"])
short_runs = st.sampled_from(
    [
        run_of(envelope("acme", "acme")),
        run_of(envelope("acme", "acme", state=True)),
        Run("state.acme.a.queue", False, [b"junk"]),
    ]
)
said_items: st.SearchStrategy[Item] = st.one_of(
    short_runs,
    st.builds(Lost, st.lists(streams, max_size=3)),
    st.builds(
        Subscribe,
        st.integers(1, 4),
        st.just("r"),
        st.lists(st.sampled_from([">", "state.acme.>", "outcome.*.>", "state.*.a.>"]), max_size=3),
        st.booleans(),
    ),
    st.builds(Unsubscribe, st.integers(1, 4)),
    st.builds(Provide, streams, st.booleans()),
    st.builds(Unprovide, streams),
    st.builds(Fetch, st.integers(1, 4), streams),
    st.builds(
        Snapshot, streams, st.integers(1, 6), st.just([snapshot("acme", "acme")]), st.booleans()
    ),
    st.builds(Will, st.lists(short_runs, max_size=2), st.booleans()),
    st.builds(Question, st.integers(1, 9), st.sampled_from(["history", "statistics", "?"])),
    st.builds(Standing, st.just([("r", 1, 2, 3)]), st.integers(0, 3)),
)
steps_of_peers = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.one_of(
            st.lists(said_items, min_size=1, max_size=5),
            st.sampled_from(["close", "mute", "speak", "again", "wait"]),
        ),
    ),
    max_size=30,
)


@settings(max_examples=30)
@given(steps=steps_of_peers, small=st.booleans(), keyed=st.booleans())
def test_nothing_of_anybody_is_left_when_all_have_gone(
    steps: list[tuple[int, Any]], small: bool, keyed: bool
) -> None:
    """Whatever peers say, however they go, and whether they take over what comes: then the hub has
    forgotten all, and an honest sender that was there all the time hears that all is settled."""
    bounds = Bounds(4, 2_000, 4, 2_000, 8, 4_000) if small else None
    net = Net(Hub(id="hub", now=-10.0, keyring=tenants() if keyed else None, bounds=bounds))
    key = "acme" if keyed else ""
    witness = net.joined("witness", "ops" if keyed else "")
    slots: list[Peer | None] = [None] * 5
    names = iter(range(10_000))
    for number, step in steps:
        peer = slots[number]
        if peer is None or peer.closed:
            peer = slots[number] = net.joined(f"p{next(names)}", key)
        if step == "close":
            net.hub.closed(peer.connection, net.now)
            net.closed.add(peer.connection)
        elif step in ("mute", "speak"):
            peer.acknowledges = step == "speak"
        elif step == "wait":
            net.pass_time(1.0)
        elif step != "again" and net.hub._peers.at(peer.connection) is not None:
            peer.put(*step)
        witness.put(run_of(envelope("acme", "acme")))
    for peer in slots:
        if peer is not None:
            net.hub.closed(peer.connection, net.now)
            net.closed.add(peer.connection)
    net.pass_time(30.0)
    frames = [frame for frame in witness.frames if isinstance(frame, Frame)]
    assert net.hub.peers == ["witness"]
    assert max((frame.settled for frame in frames), default=0) == len(steps)
    assert hub_peer(net, witness).unsettled == type(hub_peer(net, witness).unsettled)()
    all_go(net)
    nothing_is_left(net)


# -- what fresh eyes found ------------------------------------------------------------------------


def test_a_frame_of_very_many_items_ends_its_connection() -> None:
    """Before, 250 frames of 32,000 empty items each took 526 MB, which nobody counted."""
    net = Net(keyring=tenants())
    peer = net.joined("a", "acme")
    peer.put(*[Unsubscribe(1)] * MAX_ITEMS)
    assert not peer.closed
    peer.put(*[Unsubscribe(1)] * (MAX_ITEMS + 1))
    assert peer.closed


def test_a_reader_that_takes_a_little_now_and_then_does_not_hold_up_its_senders() -> None:
    """Before, one frame taken over in 20 s was enough to keep all that a sender said from being
    settled, until the sender could say nothing more to anybody."""
    net = Net(keyring=tenants())
    sender, slow = net.joined("e", "ops"), net.joined("slow", "acme")
    quick = net.joined("quick", "umbra")
    slow.subscribe("outcome.acme.>")
    quick.subscribe("outcome.umbra.>")
    slow.acknowledges = False
    large = OperationOutcome(status="completed", detail="y" * 70_000)
    made = Sequencer("e", tenant="acme").wrap(large, Key(engine="e"), 0.0)
    for _ in range(8):
        sender.put(run_of(made))
    for taken in range(1, 4):
        slow._received = taken
        slow.acknowledges = True
        slow.acknowledge()
        slow.acknowledges = False
        net.pass_time(SLOW_S / 2)
    assert "peer.cut_off" in {e.name for e in net.hub.events if e.facts.get("peer") == "slow"}
    sender.put(OTHERS)
    net.pass_time(1.0)
    settled = [f.settled for f in sender.frames if isinstance(f, Frame)]
    assert settled[-1] == sender._number, "all that it said"
    assert len(quick.messages) == 1
    assert "slow" in net.hub.peers


def test_others_streams_end_no_reader_that_hears_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a reader was ended, and its will done, for asking for the streams of a tenant."""
    monkeypatch.setattr(snapshots, "_MAX_WANTS", 50)
    net = Net(keyring=tenants())
    tenant, reader = net.joined("t", "acme"), net.joined("reader", "ops")
    tenant.put(*(Provide(f"intent.acme.{n}.t") for n in range(100)))
    for number in range(3):
        assert not reader.subscribe("intent.>", number=number).refused
    assert not reader.closed
    tenant.put(*(Provide(f"intent.acme.{n}.t", resumed=True) for n in range(100)))
    assert not tenant.closed
    assert not reader.closed


def test_what_a_hub_keeps_for_those_who_come_back_is_bounded_in_runs_too() -> None:
    """Before, one subscription looked through it all at once, for 13 s."""
    net = Net(Hub(id="hub", now=0.0, keyring=tenants()))
    sender, reader = net.joined("a", "acme"), net.joined("r", "ops")
    for start in range(0, 20_000, 500):
        made = (envelope("acme", "acme", engine=f"e{start + n}") for n in range(500))
        sender.put(*map(run_of, made))
    assert len(list(net.hub._settlement.kept())) <= 16_384
    work = work_of(
        lambda: reader.put(
            Subscribe(1, "s", [f"outcome.none.e{n}.>" for n in range(256)], resumed=True)
        )
    )
    assert work < 1_000_000


def test_answers_that_wait_count_for_who_asked() -> None:
    """Before, 80 askers kept 600 MB that nobody counted."""
    net = Net(keyring=tenants())
    peer = net.joined("a", "acme")
    for start in range(0, 4_000, 500):
        peer.put(*(Subscribe(n, "n" * 250, []) for n in range(start, start + 500)))
    before = hub_peer(net, peer).size_bytes
    peer.acknowledges = False
    peer.put(Question(1, "statistics"))
    kept = hub_peer(net, peer)
    assert kept.answer is None, "nothing is to be made any more"
    assert kept.size_bytes - before > MAX_TOLD * 250
