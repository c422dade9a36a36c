"""KV events without sockets: frames of a real server, and what may come instead of them."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.blocks import pack, unpack
from hear.engines.vllm.hashing import low64, prefix_hashes
from hear.engines.vllm.kv_events import END_OF_REPLAY, EventReader, KvFollower
from hear.errors import EngineError, RemoteProtocolError
from hear.messages import BlocksCleared, BlocksRemoved, BlocksStored
from tests.engines.vllm.fake_server import BLOCK, CLEARED, removed, stored

SAMPLE = Path(__file__).parent / "data" / "kv_events_0.32.0.msgpack"
Frames = Sequence[bytes]


def batch(seq: int, *events: object, time_s: float | None = None) -> list[bytes]:
    time_s = 100.0 + seq if time_s is None else time_s
    return [b"kv", seq.to_bytes(8, "big"), msgspec.msgpack.encode([time_s, list(events), 0])]


def held(follower: KvFollower) -> set[int]:
    return {b for chain in follower.residents.chains() for b in unpack(chain.prefix_hashes)}


def following(*messages: Frames, replayed: Sequence[Frames] | None = ()) -> KvFollower:
    """A follower that has asked from 0 on, was answered with ``replayed``, and heard the rest."""
    made = KvFollower(BLOCK)
    made.replayed(replayed)
    for frames in messages:
        made.live(frames)
    return made


# -- what a real server sent ----------------------------------------------------------------------


def sample() -> dict[str, list[list[bytes]]]:
    return msgspec.msgpack.decode(SAMPLE.read_bytes(), type=dict[str, list[list[bytes]]])


def test_a_real_servers_events_add_up_to_what_it_holds() -> None:
    live = sample()["live"]
    follower = KvFollower(32)
    follower.replayed([])
    for number, frames in enumerate(live):
        heard = follower.live(frames)
        assert heard.changes
        assert follower.next_seq == number + 1
    assert follower.known
    assert follower.scheme == "vllm-sha256_cbor-64"
    # The last two requests were of the same 70 tokens, one of them with a salt.
    prompt = [(1_000 + i) % 480 + 5 for i in range(70)]
    expected = prefix_hashes(prompt, 32) + prefix_hashes(prompt, 32, cache_salt="tenant")
    assert held(follower) == set(expected)
    assert not follower.reader.left_out
    assert (follower.duplicates, follower.gaps, follower.unclosed) == (0, 0, 0)


def test_a_real_servers_replay_closes_a_gap() -> None:
    messages = sample()
    follower = KvFollower(32)
    follower.replayed([])
    for frames in messages["live"][:4]:
        follower.live(frames)
    follower.live(messages["live"][-1])
    assert follower.wants == 3  # the last one too, to see that it is the same server
    follower.replayed([f for f in messages["replay_from_3"] if f[-2] != END_OF_REPLAY])
    assert follower.known
    assert follower.next_seq == len(messages["live"])
    assert (follower.gaps, follower.unclosed) == (1, 0)


# -- forms ----------------------------------------------------------------------------------------


def test_number_and_payload_are_found_whatever_stands_before_them() -> None:
    _, number, payload = batch(7, CLEARED)
    reader = EventReader(BLOCK)
    forms = ([number, payload], [b"kv", number, payload], [b"", number, payload])
    for frames in (*forms, [b"", b"kv", number, payload]):
        read = reader.read(frames)
        assert read is not None
        assert (read.seq, read.changes) == (7, [BlocksCleared(tier="gpu")])
    for frames in ([b"", b"", END_OF_REPLAY, b""], [b"", END_OF_REPLAY, b""]):
        assert reader.read(frames) is None


def test_older_events_are_arrays_and_name_no_medium() -> None:
    older = [
        ["BlockStored", [11, 12], 10, list(range(32)), BLOCK, None],
        ["BlockRemoved", [11]],
        ["AllBlocksCleared"],
    ]
    read = EventReader(BLOCK).read(batch(0, *older))
    assert read is not None
    assert read.changes == [
        BlocksStored(tier="gpu", parent=10, prefix_hashes=pack([11, 12])),
        BlocksRemoved(tier="gpu", prefix_hashes=pack([11])),
        BlocksCleared(tier="gpu"),
    ]


def test_whole_hashes_and_their_low_halves_are_the_same_blocks() -> None:
    whole = [bytes([n] * 32) for n in (1, 2)]
    read = EventReader(BLOCK).read(batch(0, stored([whole[1]], parent=whole[0])))
    assert read is not None
    assert read.changes == [
        BlocksStored(tier="gpu", parent=low64(whole[0]), prefix_hashes=pack([low64(whole[1])]))
    ]


def test_media_are_tiers() -> None:
    events = [stored([n], medium=m) for n, m in enumerate(("GPU", "CPU", "STORAGE"))]
    read = EventReader(BLOCK).read(batch(0, *events, stored([9], locality="REMOTE")))
    assert read is not None
    assert [c.tier for c in read.changes] == ["gpu", "cpu", "disk", "remote"]


def test_what_cannot_be_used_is_left_out_and_counted() -> None:
    reader = EventReader(BLOCK)
    useless = [
        stored([1], group_idx=1),
        removed(1, group_idx=1),
        stored([2], block_size=BLOCK // 2),
        stored([3], lora_name="adapter"),
        stored([4], lora_id=7),
        stored([5], medium="TAPE"),
        {"type": "BlockPainted", "colour": "red"},
    ]
    read = reader.read(batch(0, *useless, stored([6])))
    assert read is not None
    assert read.changes == [BlocksStored(tier="gpu", prefix_hashes=pack([6]))]
    assert reader.left_out == {
        "group": 2,
        "partial": 1,
        "lora": 2,
        "medium TAPE": 1,
        "type BlockPainted": 1,
    }


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"alone"],
        [b"kv", b"short", b""],
        [b"kv", bytes(8), b"\xc1"],
        [b"kv", bytes(8), msgspec.msgpack.encode({"ts": 1})],
        batch(0, 7),
        batch(0, {}),
        batch(0, []),
        batch(0, {"type": "BlockStored"}),
        batch(0, {"type": "BlockRemoved", "block_hashes": "abc"}),
        batch(0, ["BlockStored", "x"]),
    ],
)
def test_nonsense_is_an_error_of_the_sender(frames: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        EventReader(BLOCK).read(frames)


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_frames_are_read_or_refused(frames: list[bytes]) -> None:
    follower = following(batch(0, stored([1])))
    follower.live(frames)  # raises nothing
    assert follower.next_seq is not None


# -- schemes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme", ["vllm-sha256-64", "vllm-sha256-64-unseeded", "vllm-sha256_cbor-64-unseeded"]
)
def test_the_scheme_is_told_by_a_first_block(scheme: str) -> None:
    tokens = list(range(2 * BLOCK))
    hashes = prefix_hashes(tokens, BLOCK, scheme=scheme)
    later = stored(hashes[1:], parent=hashes[0], tokens=tokens[BLOCK:])
    salted = stored([5], tokens=tokens[:BLOCK], extra_keys=[["salt"]])
    follower = following(batch(0, later), batch(1, salted))
    assert follower.scheme is None
    follower.live(batch(2, stored(hashes, tokens=tokens)))
    assert follower.scheme == scheme


def test_a_scheme_that_is_not_known_is_none() -> None:
    assert following(batch(0, stored([1], tokens=range(BLOCK)))).scheme == ""


# -- order ----------------------------------------------------------------------------------------


def test_a_server_that_has_published_nothing_holds_nothing() -> None:
    follower = following()
    assert follower.known
    assert follower.next_seq == 0


def test_a_history_from_its_beginning_is_all_that_is_held() -> None:
    follower = following(replayed=[batch(0, stored([1, 2])), batch(1, removed(2))])
    assert follower.known
    assert held(follower) == {1}


def test_a_history_that_does_not_go_back_to_the_beginning_is_a_part() -> None:
    follower = following(replayed=[batch(40, stored([1, 2])), batch(41, removed(7))])
    assert not follower.known
    assert held(follower) == {1, 2}


def test_a_server_that_keeps_no_history_and_has_served_may_hold_anything() -> None:
    follower = KvFollower(BLOCK, served=True)
    follower.replayed([])
    assert not follower.known
    follower.live(batch(9, stored([1])))
    assert not follower.known
    assert held(follower) == {1}


def test_without_replay_all_is_known_if_the_first_batch_is_heard() -> None:
    assert following(batch(0, stored([1])), replayed=None).known
    assert not following(batch(1, stored([1])), replayed=None).known


def test_a_gap_is_closed_by_what_is_replayed() -> None:
    messages = [batch(n, stored([n])) for n in range(6)]
    follower = following(*messages[:2])
    assert not follower.live(messages[4]).changes
    assert follower.wants == 1
    heard = follower.replayed(messages[1:6])
    assert [
        list(unpack(c.prefix_hashes)) for c in heard.changes if isinstance(c, BlocksStored)
    ] == [
        [2],
        [3],
        [4],
        [5],
    ]
    assert follower.known
    assert not heard.anew
    assert not follower.live(messages[5]).changes
    assert (follower.duplicates, follower.gaps, follower.unclosed) == (1, 1, 0)


@pytest.mark.parametrize("answer", [None, [batch(4, stored([4])), batch(5, stored([5]))]])
def test_after_a_gap_that_is_not_closed_only_what_comes_is_known(
    answer: list[list[bytes]] | None,
) -> None:
    follower = following(batch(0, stored([0])), batch(1, stored([1])))
    follower.live(batch(5, stored([5])))
    heard = follower.replayed(answer)
    assert heard.anew
    assert not follower.known
    assert held(follower) == ({4, 5} if answer else {5})
    follower.live(batch(6, removed(0, 5)))  # one of them was not known of
    assert held(follower) == ({4} if answer else set())
    assert not follower.known


def test_a_cache_that_is_cleared_is_known_again() -> None:
    follower = following(batch(3, stored([3])), replayed=None)
    heard = follower.live(batch(4, CLEARED, stored([9])))
    assert heard.anew
    assert follower.known
    assert held(follower) == {9}


def test_a_first_tier_that_is_cleared_says_nothing_of_a_second() -> None:
    follower = following(batch(3, stored([3], medium="CPU")), replayed=None)
    follower.live(batch(4, CLEARED))
    assert not follower.known
    assert held(follower) == {3}


def test_a_batch_that_cannot_be_read_is_a_gap_that_is_not_closed() -> None:
    follower = following(batch(0, stored([1])))
    heard = follower.live([b"kv", (1).to_bytes(8, "big"), b"\xc1"])
    assert heard.anew
    assert not follower.known
    follower.live(batch(2, stored([2])))
    assert follower.wants is None
    assert held(follower) == {2}
    assert follower.reader.left_out["unreadable"] == 1


def test_what_a_stranger_sends_is_counted_and_changes_nothing() -> None:
    follower = following(batch(0, stored([1])))
    assert not follower.live([b"hello"]).anew
    assert follower.known
    assert follower.reader.left_out["unreadable"] == 1


def test_a_check_finds_a_lost_end() -> None:
    follower = following(batch(0, stored([0])))
    follower.check()
    assert follower.wants == 0
    follower.replayed([batch(0, stored([0])), batch(1, stored([1]))])
    assert held(follower) == {0, 1}
    assert (follower.known, follower.duplicates) == (True, 0)


def test_a_check_that_nobody_answers_changes_nothing() -> None:
    follower = following(batch(0, stored([0])))
    follower.check()
    heard = follower.replayed(None)
    assert not heard.changes
    assert not heard.anew
    assert follower.known


# -- a server that has begun anew -----------------------------------------------------------------


def test_a_lower_number_at_a_later_time_is_of_another_run() -> None:
    follower = following(*(batch(n, stored([n])) for n in range(5)))
    with pytest.raises(EngineError, match="begun anew: batch 0 came, expected 5"):
        follower.live(batch(0, stored([7]), time_s=1_000.0))


def test_a_lower_number_at_an_earlier_time_came_twice() -> None:
    messages = [batch(n, stored([n])) for n in range(5)]
    follower = following(*messages)
    assert not follower.live(messages[2]).changes
    assert follower.duplicates == 1


@pytest.mark.parametrize(
    "answer", [[], [batch(4, stored([4]), time_s=1_000.0), batch(5, time_s=1_001.0)]]
)
def test_a_check_finds_another_run_by_the_batch_that_was_heard_last(
    answer: list[list[bytes]],
) -> None:
    messages = [batch(n, stored([n])) for n in range(5)]
    follower = following(*messages[3:], replayed=messages[:3])
    follower.check()
    with pytest.raises(EngineError, match="begun anew"):
        follower.replayed(answer)


def test_a_server_that_keeps_nothing_is_not_taken_for_another() -> None:
    follower = following(batch(0, stored([1])), replayed=[])
    follower.check()
    follower.replayed([])
    assert follower.known


# -- whatever is lost -----------------------------------------------------------------------------


@given(st.data())
def test_whatever_is_lost_what_is_said_to_be_held_is_held(data: st.DataObject) -> None:
    """Batches are lost, doubled and asked for again; who says that it knows all does."""
    numbers = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=30))
    engine: set[int] = set()
    messages, states = [], []
    for seq, number in enumerate(numbers):
        if number in engine:
            engine.discard(number)
            messages.append(batch(seq, removed(number)))
        else:
            engine.add(number)
            messages.append(batch(seq, stored([number])))
        states.append(set(engine))
    keeps = data.draw(st.integers(1, 30))
    follower = KvFollower(BLOCK)
    follower.replayed([])
    sent = 0
    for seq, frames in enumerate(messages):
        fate = data.draw(st.sampled_from(("sent", "sent", "lost", "twice")))
        for _ in range({"sent": 1, "lost": 0, "twice": 2}[fate]):
            follower.live(frames)
            sent = seq + 1
            if follower.wants is not None:
                kept = range(max(follower.wants, seq + 1 - keeps), seq + 1)
                answered = data.draw(st.booleans())
                follower.replayed([messages[n] for n in kept] if answered else None)
        if sent:
            assert follower.next_seq == sent
            assert held(follower) <= states[sent - 1]
            if follower.known:
                assert held(follower) == states[sent - 1]
