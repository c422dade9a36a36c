"""vLLM's block hashes without vLLM: numbers that vLLM 0.32.0 gave, and vLLM itself where it is."""

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.app import plugins
from hear.engines.vllm.hashing import SCHEMES, UNSEEDED, low64, prefix_hashes, scheme_of
from hear.errors import ConfigError
from tests.engines.vllm.real import NEEDS_VLLM

TOKENS = [(i * i * 7919) % 151_000 for i in range(48)]
GOLDEN = {
    ("sha256", "0", None): [15522864276426909795, 583133136191152181, 8232306379083666421],
    ("sha256", "0", "tenant"): [9494515700072851254, 9045258210702962245, 9104444138588909571],
    ("sha256", None, None): [5344931615422490327, 1542359357331227470, 8566382713405146841],
    ("sha256", None, "tenant"): [29289474154839839, 16494975861505818894, 9761991149786006801],
    ("sha256", "42", None): [15781286640272394041, 3427351582872068805, 14916033886198494820],
    ("sha256", "42", "tenant"): [640109209862676929, 4222965488482792139, 3402917915054485035],
    ("sha256_cbor", "0", None): [1475980655129100269, 12312256761298315045, 2636895920102258823],
    ("sha256_cbor", "0", "tenant"): [
        6470187591223561925,
        11469988524424933193,
        17767227893696501831,
    ],
    ("sha256_cbor", None, None): [
        9719724230273386381,
        16623501125802616573,
        13653243248362883895,
    ],
    ("sha256_cbor", None, "tenant"): [
        542937140801509828,
        16496242708419394111,
        12490883710169598133,
    ],
    ("sha256_cbor", "42", None): [
        13639682786013158663,
        10138267266942375423,
        8627386680532139306,
    ],
    ("sha256_cbor", "42", "tenant"): [
        17728828191432628001,
        3387428931418675963,
        3225230183737661758,
    ],
}


@pytest.mark.parametrize(("algorithm", "seed", "salt"), GOLDEN)
def test_the_numbers_are_those_that_vllm_gave(
    algorithm: str, seed: str | None, salt: str | None
) -> None:
    found = prefix_hashes(
        TOKENS,
        16,
        scheme=f"vllm-{algorithm}-64",
        seed=UNSEEDED if seed is None else seed,
        cache_salt=salt,
    )
    assert found == GOLDEN[algorithm, seed, salt]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("salt", ["", "tenant"])
def test_each_scheme_is_offered_by_name(scheme: str, salt: str) -> None:
    algorithm, seed = SCHEMES[scheme]
    found = plugins.load_installed("hash_schemes", scheme)(TOKENS, 16, tenant_salt=salt)
    assert found == GOLDEN[algorithm, None if seed == UNSEEDED else seed, salt or None]


@pytest.mark.parametrize("length", [0, 15, 16, 31, 32, 47])
def test_only_full_blocks_are_hashed(length: int) -> None:
    assert prefix_hashes(TOKENS[:length], 16) == prefix_hashes(TOKENS, 16)[: length // 16]


def test_a_scheme_is_named_for_what_can_be_computed_elsewhere_and_nothing_else() -> None:
    assert scheme_of("sha256_cbor") == "vllm-sha256_cbor-64"
    assert scheme_of("sha256", None) == "vllm-sha256-64-unseeded"
    assert scheme_of("sha256", "42") is None
    assert scheme_of("xxhash") is None


def test_both_forms_of_an_events_hash_are_the_same_block() -> None:
    whole = bytes(range(32))
    assert low64(whole) == low64(int.from_bytes(whole[-8:], "big")) == 0x18191A1B1C1D1E1F
    assert low64(-1) == 2**64 - 1  # versions that sent Python's own hash() sent signed ones


@pytest.mark.parametrize(
    ("tokens", "block_size", "scheme", "said"),
    [
        ([1], 0, "vllm-sha256-64", "block size 0"),
        ([-1], 1, "vllm-sha256-64", "token -1"),
        ([1 << 32], 1, "vllm-sha256_cbor-64", "token 4294967296"),
        ([1], 1, "hear-blake2b-64", "'hear-blake2b-64': expected one of vllm-sha256-64"),
    ],
)
def test_what_cannot_be_hashed_is_said(
    tokens: list[int], block_size: int, scheme: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        prefix_hashes(tokens, block_size, scheme=scheme)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), st.data())
def test_equal_prefixes_have_equal_hashes_and_others_have_not(
    tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    hashes = prefix_hashes(tokens, block_size)
    if not hashes:
        return
    at = data.draw(st.integers(0, len(hashes) * block_size - 1))
    other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    changed = prefix_hashes(other, block_size)
    same = at // block_size
    assert changed[:same] == hashes[:same]
    assert all(a != b for a, b in zip(changed[same:], hashes[same:], strict=True))


# -- against vLLM ---------------------------------------------------------------------------------


@pytest.fixture
def restored_seed() -> Iterator[None]:
    before = os.environ.get("PYTHONHASHSEED")
    yield
    if before is None:
        os.environ.pop("PYTHONHASHSEED", None)
    else:
        os.environ["PYTHONHASHSEED"] = before


class TestBesideVllm:
    pytestmark = NEEDS_VLLM

    @pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
    @pytest.mark.usefixtures("restored_seed")
    def test_it_computes_the_same(self, algorithm: str) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils

        function = get_hash_fn_by_name(algorithm)
        rng = random.Random(7)
        sizes = (23, 24, 255, 256, 65_535, 65_536, 2**32 - 1)
        for seed in ("0", "a seed with ünicode", None):
            os.environ.pop("PYTHONHASHSEED", None)
            if seed is not None:
                os.environ["PYTHONHASHSEED"] = seed
            kv_cache_utils.init_none_hash(function)
            for block_size in (1, 16, 24, 300):
                for salt in (None, "s", "a longer salt " * 30):
                    tokens = [rng.choice((*sizes, rng.randrange(200_000))) for _ in range(640)]
                    parent, expected = None, []
                    for start in range(0, len(tokens) - block_size + 1, block_size):
                        extra = (("cache_salt", salt),) if salt and not start else None
                        block = tokens[start : start + block_size]
                        parent = kv_cache_utils.hash_block_tokens(function, parent, block, extra)
                        expected.append(int.from_bytes(parent, "big") & (2**64 - 1))
                    found = prefix_hashes(
                        tokens,
                        block_size,
                        scheme=f"vllm-{algorithm}-64",
                        seed=UNSEEDED if seed is None else seed,
                        cache_salt=salt,
                    )
                    assert found == expected
