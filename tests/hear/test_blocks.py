import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.blocks import HASH_BYTES, chain, chain_all, pack, unpack
from hear.errors import RemoteProtocolError
from tests.hear.strategies import hashes


@given(st.lists(hashes))
def test_packed_hashes_come_back_as_they_were(run: list[int]) -> None:
    packed = pack(run)
    assert len(packed) == HASH_BYTES * len(run)
    assert list(unpack(packed)) == run


def test_hashes_are_packed_little_endian() -> None:
    assert pack([0x0102030405060708, 1]) == bytes.fromhex("08070605040302010100000000000000")


def test_unpacked_hashes_can_be_sliced_and_counted_without_a_copy() -> None:
    run = unpack(pack(range(10)))
    assert len(run) == 10
    assert list(run[2:4]) == [2, 3]


@given(st.binary(max_size=40).filter(lambda b: len(b) % HASH_BYTES))
def test_a_length_that_is_not_whole_hashes_is_the_peers_error(packed: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{len(packed)} bytes, expected a multiple of 8"):
        unpack(packed)


@pytest.mark.parametrize("hash_", [-1, 2**64])
def test_a_hash_outside_of_64_bits_is_not_packed(hash_: int) -> None:
    with pytest.raises(OverflowError):
        pack([1, hash_])


@given(st.lists(st.binary(min_size=4, max_size=4), min_size=1), st.data())
def test_equal_hashes_mean_equal_prefixes(prompt: list[bytes], data: st.DataObject) -> None:
    changed = data.draw(st.integers(0, len(prompt) - 1))
    other = [*prompt[:changed], bytes(b ^ 1 for b in prompt[changed]), *prompt[changed + 1 :]]
    ours, theirs = chain_all(prompt), chain_all(other)
    assert ours[:changed] == theirs[:changed]
    assert not set(ours[changed:]) & set(theirs[changed:])


def test_a_salt_keeps_tenants_apart() -> None:
    assert chain(None, b"tokens", b"a") != chain(None, b"tokens", b"b")
    assert chain_all([b"x", b"y"], b"a")[-1] == chain(chain(None, b"x", b"a"), b"y", b"a")


def test_hashes_are_the_same_on_every_machine() -> None:
    assert chain_all([b"one", b"two"]) == [0xC915768BAADDF234, 0x5983A3CCE813D4C3]
