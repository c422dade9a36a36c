"""A server's KV events followed without sockets: what a real one sent, and what may come of it."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.blocks import unpack
from hear.engines.vllm.attach.kv_follower import KvFollower
from hear.engines.vllm.hashing import prefix_hashes
from hear.engines.vllm.identity import Tenants, salt_of
from hear.engines.vllm.kv_events import END_OF_REPLAY
from hear.errors import EngineError
from hear.messages import DEFAULT_TENANT, BlocksStored
from tests.engines.vllm.fake_server import BLOCK, CLEARED, batch, removed, stored

SAMPLE = Path(__file__).parent / "data" / "kv_events_0.32.0.msgpack"
Frames = Sequence[bytes]


def held(follower: KvFollower) -> set[int]:
    return {b for chain in follower.holdings.chains() for b in unpack(chain.prefix_hashes)}


def following(*messages: Frames, replayed: Sequence[Frames] | None = ()) -> KvFollower:
    """A follower that has asked from 0 on, was answered with ``replayed``, and heard the rest."""
    made = KvFollower(BLOCK)
    made.replayed(replayed)
    for frames in messages:
        made.live(frames)
    return made


# -- what a real server sent -----------------------------------------------------------------------


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


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_frames_are_read_or_refused(frames: list[bytes]) -> None:
    follower = following(batch(0, stored([1])))
    follower.live(frames)  # raises nothing
    assert follower.next_seq is not None


# -- schemes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme", ["vllm-sha256-64", "vllm-sha256-64-unseeded", "vllm-sha256_cbor-64-unseeded"]
)
@pytest.mark.parametrize("salt", [None, "acme"])
def test_the_scheme_is_told_by_a_first_block(scheme: str, salt: str | None) -> None:
    tokens = list(range(2 * BLOCK))
    hashes = prefix_hashes(tokens, BLOCK, scheme=scheme, cache_salt=salt)
    later = stored(hashes[1:], parent=hashes[0], tokens=tokens[BLOCK:])
    picture = stored([5], tokens=tokens[:BLOCK], extra_keys=[[["picture", 0]]])
    follower = following(batch(0, later), batch(1, picture))
    assert follower.scheme is None
    keys = [[salt], None] if salt else None
    follower.live(batch(2, stored(hashes, tokens=tokens, extra_keys=keys)))
    assert follower.scheme == scheme


def test_a_scheme_that_is_not_known_is_none() -> None:
    assert following(batch(0, stored([1], tokens=range(BLOCK)))).scheme == ""


# -- order -----------------------------------------------------------------------------------------


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
    told = [c for c in heard.changes[DEFAULT_TENANT] if isinstance(c, BlocksStored)]
    assert [list(unpack(c.prefix_hashes)) for c in told] == [[2], [3], [4], [5]]
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


def test_a_gap_that_nobody_closed_is_asked_for_again_until_it_is_closed() -> None:
    messages = [batch(n, stored([n])) for n in range(9)]
    follower = following(*messages[:2])
    follower.live(messages[4])
    follower.replayed(None)  # the endpoint is silent
    assert (held(follower), follower.known) == ({4}, False)
    for number in (5, 6):
        follower.live(messages[number])
        follower.check()
        assert follower.wants == 1
        assert not follower.replayed(None).anew
    follower.check()
    heard = follower.replayed(messages[1:8])
    assert heard.anew
    assert (held(follower), follower.known) == (set(range(8)), True)
    follower.check()
    assert follower.wants == 7  # as ever
    follower.live(messages[8])
    assert held(follower) == set(range(9))


def test_a_gap_that_the_publisher_cannot_close_any_more_is_not_asked_for_again() -> None:
    messages = [batch(n, stored([n])) for n in range(7)]
    follower = following(*messages[:2])
    follower.live(messages[4])
    follower.replayed(None)
    follower.check()
    follower.replayed(messages[3:6])  # number 2 is not kept any more
    assert (held(follower), follower.known) == ({4, 5}, False)
    follower.check()
    assert follower.wants == 5


def test_after_a_gap_a_block_is_nobodys_until_it_is_known_what_came_before_it() -> None:
    tenants = Tenants(["acme"])
    follower = KvFollower(BLOCK, tenants=tenants)
    follower.replayed([])
    follower.live(batch(0, stored([1, 2], extra_keys=[[salt_of("acme", None)], None])))
    follower.live(batch(2, stored([3], parent=2)))
    follower.replayed(None)
    assert not list(follower.holdings.chains())
    assert not list(follower.holdings.chains("acme"))
    reused = stored([1, 2, 3], extra_keys=[[salt_of("acme", None)], None, None])
    heard = follower.live(batch(3, reused))
    assert list(heard.changes) == ["acme"]
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


# -- a server that has begun anew ------------------------------------------------------------------


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


# -- whatever is lost ------------------------------------------------------------------------------


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
