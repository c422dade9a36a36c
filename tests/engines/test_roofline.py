"""Actions times of the roofline, against figures worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.engines.simulated.profile import load_profile, shipped_profiles
from hear.engines.simulated.roofline import Roofline
from tests.engines.builders import BLOCK, profile

H100 = Roofline(load_profile("h100-qwen3-8b"), 512)


def test_a_full_chunk_of_prefill_is_bound_by_compute() -> None:
    tokens = 8192
    pairs = tokens * (tokens + 1) // 2
    flops = 2 * 8.2e9 * tokens + 4 * 36 * 32 * 128 * pairs
    assert H100.step_s(tokens, pairs, tokens) == pytest.approx(flops / (989e12 * 0.92) + 0.003)


def test_a_decode_step_is_bound_by_reading_the_weights_and_the_kv() -> None:
    context = 40_000
    moved = 8.2e9 * 2 + 147_456 * context
    expected = moved / (3.35e12 * 0.8) + 0.003
    assert H100.step_s(1, context, context) == pytest.approx(expected)
    assert H100.decode_step_s(context) == pytest.approx(expected)


def test_a_block_crosses_the_link_at_its_rate() -> None:
    assert H100.block_transfer_s == pytest.approx(512 * 147_456 / 25e9)


def test_prefill_rate_is_of_a_first_chunk() -> None:
    rate = H100.prefill_tokens_per_s(8192)
    assert rate == pytest.approx(8192 / H100.step_s(8192, 8192 * 8193 // 2, 8192))


@given(
    st.tuples(st.integers(1, 9000), st.integers(1, 10**9), st.integers(1, 10**6)),
    st.tuples(st.integers(0, 9000), st.integers(0, 10**9), st.integers(0, 10**6)),
)
def test_more_work_never_takes_less_time(
    work: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    tokens, pairs, kv = (a + b for a, b in zip(work, more, strict=True))
    assert H100.step_s(tokens, pairs, kv) >= H100.step_s(*work)


@pytest.mark.parametrize("name", shipped_profiles())
def test_each_shipped_profile_has_room_and_takes_time(name: str) -> None:
    made = load_profile(name, 512)
    assert made.num_blocks("gpu", 512) > 100
    assert Roofline(made, 512).step_s(1, 1, 1) > made.gpu.step_s


def test_the_small_engine_of_these_tests_has_the_blocks_that_it_says() -> None:
    made = profile(gpu=7, cpu=3)
    assert (made.num_blocks("gpu", BLOCK), made.num_blocks("cpu", BLOCK)) == (7, 3)
