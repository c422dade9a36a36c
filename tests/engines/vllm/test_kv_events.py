"""KV events as they come off vLLM's publisher: the forms of frames, batches and events."""

import msgspec
import pytest

from hear.engines.vllm.hashing import low64
from hear.engines.vllm.holdings import Cleared, Removed, Stored
from hear.engines.vllm.kv_events import END_OF_REPLAY, EventReader
from hear.errors import RemoteProtocolError
from tests.engines.vllm.fake_server import BLOCK, CLEARED, batch, removed, stored


def test_number_and_payload_are_found_whatever_stands_before_them() -> None:
    _, number, payload = batch(7, CLEARED)
    reader = EventReader(BLOCK)
    forms = ([number, payload], [b"kv", number, payload], [b"", number, payload])
    for frames in (*forms, [b"", b"kv", number, payload]):
        read = reader.read(frames)
        assert read is not None
        assert (read.seq, read.events) == (7, [Cleared("gpu")])
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
    assert read.events == [Stored("gpu", [11, 12], 10), Removed("gpu", [11]), Cleared("gpu")]


def test_whole_hashes_and_their_low_halves_are_the_same_blocks() -> None:
    whole = [bytes([n] * 32) for n in (1, 2)]
    read = EventReader(BLOCK).read(batch(0, stored([whole[1]], parent=whole[0])))
    assert read is not None
    assert read.events == [Stored("gpu", [low64(whole[1])], low64(whole[0]))]


def test_media_are_tiers() -> None:
    events = [stored([n], medium=m) for n, m in enumerate(("GPU", "CPU", "STORAGE"))]
    read = EventReader(BLOCK).read(batch(0, *events, stored([9], locality="REMOTE")))
    assert read is not None
    assert [event.tier for event in read.events] == ["gpu", "cpu", "disk", "remote"]


def test_what_may_be_a_salt_is_read_off_a_first_block_alone() -> None:
    events = [
        stored([1, 2], extra_keys=[["acme"], None]),
        stored([3], parent=2, extra_keys=[["acme"]]),
        stored([4], extra_keys=[[["picture", 0], "acme"]]),
        stored([5], extra_keys=[7]),
    ]
    read = EventReader(BLOCK).read(batch(0, *events))
    assert read is not None
    assert [e.salts for e in read.events if isinstance(e, Stored)] == [["acme"], (), ["acme"], []]


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
    assert read.events == [Stored("gpu", [6], None, [])]
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
