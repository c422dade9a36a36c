"""A message that passes the hub has one meaning: no map in it has a key twice.

Before, such a message passed, and of two readers one took the first value and one the last: a
message could be granted by its first source and believed by its last.
"""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.buses.nng.frames import Run, Snapshot
from hear.codec import check_unambiguous, encode
from hear.errors import RemoteProtocolError
from tests.buses.nng_peers import Net, envelope, run_of, tenants

Entries = list[tuple[str, Any]]
LARGE = 256 << 10


def text(value: str, form: int) -> bytes:
    """A text in one of the forms that msgpack has for it, 0 the shortest."""
    data = value.encode()
    if form == 0:
        return msgspec.msgpack.encode(value)
    size = {1: 1, 2: 2, 3: 4}[form]
    return bytes([0xD8 + form]) + len(data).to_bytes(size, "big") + data


def container(count: int, is_map: bool, form: int) -> bytes:
    """The head of a map or an array in one of its forms."""
    if form == 0 and count < 16:
        return bytes([(0x80 if is_map else 0x90) | count])
    if form == 1:
        return (b"\xde" if is_map else b"\xdc") + count.to_bytes(2, "big")
    return (b"\xdf" if is_map else b"\xdd") + count.to_bytes(4, "big")


class Map:
    """A map of which each key may be there more than once, and its forms."""

    def __init__(self, entries: Entries, form: int) -> None:
        self.entries = entries
        self.form = form

    def encode(self) -> bytes:
        head = container(len(self.entries), True, self.form)
        return head + b"".join(
            text(key, self.form) + encode_any(value, self.form) for key, value in self.entries
        )

    @property
    def is_ambiguous(self) -> bool:
        keys = [key for key, _ in self.entries]
        return len(set(keys)) < len(keys) or any(ambiguous(value) for _, value in self.entries)


def encode_any(value: Any, form: int) -> bytes:
    if isinstance(value, Map):
        return value.encode()
    if isinstance(value, list):
        head = container(len(value), False, form)
        return head + b"".join(encode_any(one, form) for one in value)
    if isinstance(value, str):
        return text(value, form)
    return msgspec.msgpack.encode(value)


def ambiguous(value: Any) -> bool:
    if isinstance(value, Map):
        return value.is_ambiguous
    return isinstance(value, list) and any(map(ambiguous, value))


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 999), st.text("ab", max_size=3), st.binary(max_size=4)
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.builds(
            Map,
            st.lists(st.tuples(st.sampled_from(["a", "b", "aa"]), inner), max_size=3),
            st.integers(0, 3),
        ),
    ),
    max_leaves=12,
)
maps = st.builds(
    Map,
    st.lists(st.tuples(st.sampled_from(["a", "b", "aa"]), values), max_size=3),
    st.integers(0, 3),
)


def passes(frame: bytes) -> bool:
    try:
        check_unambiguous(frame)
    except RemoteProtocolError:
        return False
    return True


@given(made=maps, large=st.booleans())
def test_a_message_passes_if_no_map_in_it_has_a_key_twice_in_whichever_encoding(
    made: Map, large: bool
) -> None:
    if large:  # the way that large ones are looked at is another
        made = Map([("large", bytes(LARGE)), *made.entries], made.form)
    assert passes(made.encode()) is not made.is_ambiguous


@pytest.mark.parametrize("depth", [0, 1, 5])
@pytest.mark.parametrize("form", [0, 1, 2, 3])
@pytest.mark.parametrize("in_arrays", [True, False])
@pytest.mark.parametrize("large", [True, False])
def test_a_key_twice_is_found_at_any_depth(
    depth: int, form: int, in_arrays: bool, large: bool
) -> None:
    for times in (1, 2):
        inner: Any = Map([("a", 1)] * times, form)
        for _ in range(depth):
            inner = ["x", inner] if in_arrays else Map([("x", 0), ("y", inner)], form)
        made = Map([("large", bytes(LARGE if large else 0)), ("inner", inner)], form)
        assert passes(made.encode()) is (times == 1)


@given(data=st.binary(max_size=60), large=st.booleans())
def test_any_bytes_pass_or_are_a_documented_error(data: bytes, large: bool) -> None:
    passes(data)
    passes(b"\x81\xa1a" + data)
    if large:
        passes(b"\x82\xa1a\xc6" + LARGE.to_bytes(4, "big") + bytes(LARGE) + b"\xa1b" + data)


@given(place=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_message_with_any_byte_changed_passes_or_is_a_documented_error(
    place: int, byte: int
) -> None:
    data = bytearray(encode(envelope()))
    data[place % len(data)] = byte
    passes(bytes(data))


HUGE = (1 << 32) - 1
STRANGE = {
    "nothing": b"",
    "an array of 4 billion": b"\xdd" + HUGE.to_bytes(4, "big"),
    "a map of 4 billion": b"\xdf" + HUGE.to_bytes(4, "big"),
    "an array of 4 billion in a map": b"\x81\xa1a\xdd" + HUGE.to_bytes(4, "big"),
    "a map of 4 billion in a map": b"\x81\xa1a\xdf" + HUGE.to_bytes(4, "big"),
    "a text of 4 billion": b"\x81\xa1a\xdb" + HUGE.to_bytes(4, "big"),
    "an extension of 4 billion": b"\x81\xa1a\xc9" + HUGE.to_bytes(4, "big") + b"\x01",
    "the byte that msgpack never uses": b"\x81\xa1a\xc1",
    "a map as a key": b"\x81\x81\xa1a\x01\x01",
    "a key that is no text": b"\x82\xa1a\x01\xdc\x00\x00\x01",
    "an impossible time": b"\x81\xa1a\xd7\xff" + b"\xff" * 8,
    "half of a surrogate pair": b"\x81\xa1a\xa3\xed\xa0\x80",
    "more after its end": b"\x81\xa1a\x01\x01",
    "100,000 arrays one in the other": b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0",
    "a million maps one in the other": b"\x81\xa1a" * 1_000_000 + b"\xc0",
    "more elements than are looked at": b"\x81\xd9\x01a\xdd\x00\x02\x00\x00" + b"\xc0" * (2 << 16),
}


@pytest.mark.parametrize("frame", STRANGE.values(), ids=STRANGE)
def test_what_is_strange_is_the_senders_error_and_no_other(frame: bytes) -> None:
    assert not passes(frame)


@pytest.mark.parametrize("large", [True, False])
def test_what_lies_deep_is_not_copied_for_each_level(large: bool) -> None:
    """Before, 8 MiB in 900 arrays were copied 900 times, and the hub stood still for 1.4 s."""
    size = 8_000_000 if large else 200_000
    data = b"\xc6" + size.to_bytes(4, "big") + bytes(size)
    assert not passes(b"\x81\xd9\x01a" + b"\x91" * 900 + data)
    assert not passes(b"\x81\xd9\x01a" + b"\x91" * 60 + data), "each level is looked through again"
    assert passes(b"\x81\xd9\x01a" + b"\x91" * 6 + data)
    assert passes(b"\x81\xd9\x01a" + b"\x91" * 60 + b"\xc0"), "what is small may be deep"


def test_extensions_and_times_pass_whatever_they_mean() -> None:
    for value in (b"\xd4\x05\x01", b"\xc7\x02\x07\x81\xa1", b"\xd6\xff\x00\x00\x00\x01"):
        assert passes(b"\x81\xa1a" + value)


@pytest.mark.parametrize("where", ["envelope", "body", "a newer field"])
@pytest.mark.parametrize("as_snapshot", [True, False])
def test_the_hub_passes_on_no_message_with_two_meanings(where: str, as_snapshot: bool) -> None:
    net = Net(keyring=tenants())
    reader, sender = net.joined("reader", "ops"), net.joined("sender", "acme")
    reader.subscribe(">")
    honest = run_of(envelope("acme", "acme"))
    (data,) = honest.messages
    fields = msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw])
    entries = [(key, bytes(value)) for key, value in fields.items()]
    if where == "envelope":
        entries.append(("source", msgspec.msgpack.encode("ops")))
    else:
        twice = Map([("status", "completed"), ("status", "failed")], 0).encode()
        name = "body" if where == "body" else "newer"
        entries = [(k, v) for k, v in entries if k != name] + [(name, twice)]
    forged = container(len(entries), True, 0) + b"".join(text(k, 0) + v for k, v in entries)
    if as_snapshot:
        sender.put(Snapshot(honest.stem, 1, [forged], True))
    else:
        sender.put(Run(honest.stem, True, [forged, data]))
    assert reader.messages == ([] if as_snapshot else [data])
    assert any("a key twice" in reason for reason in sender.denials)
    assert net.hub.refused == 1
