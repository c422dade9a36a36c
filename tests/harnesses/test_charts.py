"""Charts: scales with round ticks, and lines of few points that keep every peak."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.harnesses.eval.report.charts import (
    MAX_NAME,
    Bar,
    Curve,
    Scale,
    bar_chart,
    downsample,
    from_zero,
    gutter,
    line_chart,
    logarithmic,
    short,
    summarise,
)

spikes = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(spikes, st.integers(1, 40))
def test_downsampling_keeps_both_ends_and_both_extremes(values: list[float], buckets: int) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = downsample(points, buckets)
    assert len(kept) <= 2 * buckets + 2
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert max(y for _, y in kept) == max(values)
    assert min(y for _, y in kept) == min(values)
    assert kept == sorted(kept)


@given(spikes, st.integers(1, 40))
def test_the_band_of_a_curve_reaches_every_peak(values: list[float], buckets: int) -> None:
    curve = summarise("", "", [(float(x), y) for x, y in enumerate(values)], buckets)
    if curve.band is None:
        assert [y for _, y in curve.points] == values
        return
    low, high = curve.band
    assert max(y for _, y in high) == max(values)
    assert min(y for _, y in low) == min(values)


def test_a_line_of_means_holds_each_value_until_the_next() -> None:
    points = [(0.0, 1.0), (5.0, 3.0), (5.0, 9.0), (5.0, 3.0), (10.0, 0.0)]
    curve = summarise("", "", points, 1)
    assert curve.points[1] == (5.0, 2.0)
    assert curve.band == ([(5.0, 0.0)], [(5.0, 9.0)])


@given(st.floats(1e-3, 1e7))
def test_ticks_are_few_and_lie_within_their_scale(high: float) -> None:
    for scale in (from_zero([high]), Scale(0.0, high), logarithmic([high, high * 3], 0.01)):
        ticks = scale.ticks()
        assert 2 <= len(ticks) <= 9
        assert all(-1e-6 <= scale(tick) <= 1 + 1e-6 for tick in ticks)


def test_a_log_scale_draws_what_is_too_small_at_its_floor() -> None:
    scale = logarithmic([0.0, 100.0], 0.01)
    assert scale(0.0) == 0.0
    assert scale(100.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.05, "0.05"), (12.0, "12"), (1500, "1,500"), (25_000, "25k"), (1_500_000, "1.5M")],
)
def test_axis_values_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_a_line_goes_from_corner_to_corner_of_its_scales() -> None:
    curve = Curve("a", "p1", [(0.0, 0.0), (10.0, 5.0)])
    chart = line_chart([curve], x=Scale(0, 10), y=Scale(0, 5), label="rise", height=100)
    assert 'd="M0 100L1000 0"' in chart
    assert 'aria-label="rise"' in chart


def test_a_bar_is_as_long_as_its_value_and_says_it() -> None:
    bar = Bar(name="a & b", style="p1", value=25.0, text="25.0", more=50.0, interval=(20.0, 30.0))
    chart = bar_chart([("50% load", [bar])], scale=Scale(0, 100), label="share")
    assert '<rect class="bar" x="0" width="25.00%"' in chart
    assert '<rect class="bar more" x="25.00%" width="50.00%"' in chart
    assert '<line class="whisker" x1="20.00%" x2="30.00%"' in chart
    assert "a &amp; b" in chart
    assert ">25.0</text>" in chart


def test_a_long_name_left_of_a_bar_is_cut_in_its_middle_and_whole_in_its_tip() -> None:
    long = "cache-aware + " + "x" * 60 + " + session-aware"
    chart = bar_chart([("", [Bar(long, "p0", 1.0, "1")])], scale=Scale(0, 1), label="l")
    drawn = re.findall(r'<text class="name"[^>]*>([^<]*)<', chart)[0]
    assert len(drawn) == MAX_NAME
    assert drawn.startswith("cache-aware")
    assert drawn.endswith("session-aware")
    assert f"<title>{long}</title>" in chart
    assert gutter([long]) == gutter(["x" * MAX_NAME]) > gutter(["fcfs"])
