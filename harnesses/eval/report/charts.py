"""Charts as inline SVG: scales, ticks, lines, bars and intervals.

A chart is as wide as its place on the page: positions across are percentages, and lines live in a
nested SVG that stretches while text keeps its size. Colours and strokes belong to the style sheet;
a chart only names classes. Knows nothing of what the numbers mean.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hear.escaping import ends, printable

Point = tuple[float, float]

SPAN: Final = 1000
"""Width of the stretched coordinates that lines are drawn in."""


def escape(text: object) -> str:
    """``text`` for the inside of an element or of a quoted attribute."""
    return html.escape(printable(str(text)))


def number(value: float) -> str:
    """A coordinate, no longer than the eye can tell."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def short(value: float) -> str:
    """A value in few characters: 0.05, 12, 1,500, 25k, 1.5M."""
    size = abs(value)
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= factor * (10 if unit == "k" else 1):
            return f"{value / factor:.3g}{unit}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to 0..1. On a log scale, what lies below ``low`` is drawn at ``low``."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where ``value`` lies between ``low`` (0) and ``high`` (1)."""
        if self.log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int = 5) -> list[float]:
        """About ``count`` round values, none outside."""
        if self.log:
            return self._decades(count)
        step = _step((self.high - self.low) / count * 0.75)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    def _decades(self, count: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for leads in ((1, 2, 5), (1, 3), (1,)):
            ticks = [lead * 10.0**power for power in range(first, last + 1) for lead in leads]
            ticks = [t for t in ticks if self.low * 0.999 <= t <= self.high * 1.001]
            if len(ticks) <= count + 2:
                break
        return ticks


def from_zero(values: Iterable[float]) -> Scale:
    """A linear scale from 0 to a round number above all of ``values``."""
    high = max((value for value in values if math.isfinite(value)), default=0.0)
    if high <= 0:
        return Scale(0.0, 1.0)
    step = _step(high / 5)
    return Scale(0.0, math.ceil(high / step - 1e-9) * step)


def logarithmic(values: Iterable[float], floor: float) -> Scale:
    """A log scale over ``values``, cut at ``floor`` below, over a factor of ten at least."""
    known = [max(value, floor) for value in values if math.isfinite(value)] or [floor]
    low = 10.0 ** math.floor(math.log10(min(known)) + 1e-9)
    return Scale(low, max(max(known), low * 10), log=True)


def _step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(lead * power for lead in (1, 2, 5, 10) if lead * power >= rough * 0.999)


def downsample(points: Sequence[Point], buckets: int) -> list[Point]:
    """At most ``2 * buckets + 2`` of ``points``: of each stretch the lowest and the highest.

    So a peak is never lost, however short. ``points`` are in order of x; the first and the last
    are kept. Stretches are of equal length in x.
    """
    if len(points) <= 2 * buckets + 2:
        return list(points)
    start, width = points[0][0], points[-1][0] - points[0][0]
    extremes: dict[int, tuple[int, int]] = {}
    for index, (x, y) in enumerate(points):
        bucket = min(int((x - start) / width * buckets), buckets - 1) if width > 0 else 0
        low, high = extremes.setdefault(bucket, (index, index))
        extremes[bucket] = (
            index if y < points[low][1] else low,
            index if y > points[high][1] else high,
        )
    kept = {0, len(points) - 1}.union(*extremes.values())
    return [points[index] for index in sorted(kept)]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart. ``style`` is a class of the style sheet.

    ``band`` are the lowest and the highest points around the line, drawn as a shade.
    """

    name: str
    style: str
    points: Sequence[Point]
    band: tuple[Sequence[Point], Sequence[Point]] | None = None


def summarise(name: str, style: str, points: Sequence[Point], buckets: int) -> Curve:
    """A curve of many points: the mean over each stretch, in a band from lowest to highest.

    Each value lasts until the next point. Few points are drawn as they are, without a band.
    """
    if len(points) <= 2 * buckets or points[-1][0] <= points[0][0]:
        return Curve(name, style, points)
    start, width = points[0][0], (points[-1][0] - points[0][0]) / buckets
    sums, lows, highs = [0.0] * buckets, [math.inf] * buckets, [-math.inf] * buckets
    for (begin, y), (end, _) in pairwise(points):
        first = min(int((begin - start) / width), buckets - 1)
        last = min(int((end - start) / width), buckets - 1)
        for bucket in range(first, last + 1):
            left = start + bucket * width
            sums[bucket] += y * max(0.0, min(end, left + width) - max(begin, left))
            lows[bucket], highs[bucket] = min(lows[bucket], y), max(highs[bucket], y)
    lows[-1], highs[-1] = min(lows[-1], points[-1][1]), max(highs[-1], points[-1][1])
    middles = [start + (bucket + 0.5) * width for bucket in range(buckets)]
    means = list(zip(middles, (total / width for total in sums), strict=True))
    low, high = (list(zip(middles, values, strict=True)) for values in (lows, highs))
    return Curve(name, style, [points[0], *means, points[-1]], (low, high))


def line_chart(
    curves: Sequence[Curve],
    *,
    x: Scale,
    y: Scale,
    label: str,
    height: int = 150,
    x_text: Callable[[float], str] = short,
    y_text: Callable[[float], str] = short,
) -> str:
    """Lines over common axes. ``label`` says in words what is shown, for those who can't see it."""
    paths = "".join(
        f'<path class="band {escape(curve.style)}" '
        f'd="{_path([*curve.band[0], *reversed(curve.band[1])], x, y, height)}Z"/>'
        for curve in curves
        if curve.band is not None
    )
    paths += "".join(
        f'<path class="curve {escape(curve.style)}" data-name="{escape(curve.name)}" '
        f'd="{_path(curve.points, x, y, height)}"/>'
        for curve in curves
        if curve.points
    )
    limits = " ".join(
        f'data-{axis}="{scale.low!r} {scale.high!r}{" log" if scale.log else ""}"'
        for axis, scale in (("x", x), ("y", y))
    )
    return (
        f'<svg class="plot lines" role="img" aria-label="{escape(label)}" width="100%" '
        f'height="{height}" {limits}>'
        f"{y_axis(y, height, y_text)}{x_axis(x, height, x_text)}"
        f"{stretched(paths, height)}</svg>"
    )


def _path(points: Sequence[Point], x: Scale, y: Scale, height: int) -> str:
    places = [(number(x(px) * SPAN), number((1 - y(py)) * height)) for px, py in points]
    kept = [place for i, place in enumerate(places) if i == 0 or place != places[i - 1]]
    return "M" + "L".join(f"{px} {py}" for px, py in kept)


def stretched(content: str, height: int) -> str:
    """Content in coordinates 0..SPAN across, stretched to the width of the chart around it."""
    return (
        f'<svg width="100%" height="{height}" viewBox="0 0 {SPAN} {height}" '
        f'preserveAspectRatio="none">{content}</svg>'
    )


def y_axis(scale: Scale, height: int, text: Callable[[float], str], count: int = 5) -> str:
    """Grid lines with their values to the left."""
    parts = []
    for tick in scale.ticks(count):
        y = number((1 - scale(tick)) * height)
        parts.append(
            f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
            f'<text class="tick" x="-6" y="{y}" dy=".32em" text-anchor="end">'
            f"{escape(text(tick))}</text>"
        )
    return "".join(parts)


def x_axis(
    scale: Scale, height: int, text: Callable[[float], str], count: int = 5, grid: bool = False
) -> str:
    """The base line and the values below it, with lines through the chart if ``grid``."""
    parts = [f'<line class="axis" x1="0" x2="100%" y1="{height}" y2="{height}"/>']
    for tick in scale.ticks(count):
        x = f"{number(scale(tick) * 100)}%"
        if grid:
            parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{height}"/>')
        parts.append(
            f'<line class="axis" x1="{x}" x2="{x}" y1="{height}" y2="{height + 4}"/>'
            f'<text class="tick" x="{x}" y="{height + 16}" text-anchor="middle">'
            f"{escape(text(tick))}</text>"
        )
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; ``more`` lies beyond it, lighter; ``interval`` is where the seeds lie."""

    name: str
    style: str
    value: float | None
    text: str
    more: float = 0.0
    interval: tuple[float, float] | None = None
    tip: str = ""


def bar_chart(groups: Sequence[tuple[str, Sequence[Bar]]], *, scale: Scale, label: str) -> str:
    """Bars from left to right under headings, each with its name before it and its value after.

    The names stand left of the chart's own place, which ``gutter`` makes room for.
    """
    row, y, parts = 21, 0, []
    for heading, bars in groups:
        if heading:
            parts.append(f'<text class="group" x="-8" y="{y + 15}" text-anchor="end">')
            parts.append(f"{escape(ends(printable(heading), MAX_NAME))}</text>")
            y += row
        for bar in bars:
            parts.append(_bar(bar, y, scale))
            y += row
        y += 8
    height = max(y - 8, row)
    return (
        f'<svg class="plot bars" role="img" aria-label="{escape(label)}" width="100%" '
        f'height="{height}"><line class="axis" x1="0" x2="0" y1="0" y2="{height}"/>'
        f"{''.join(parts)}</svg>"
    )


MAX_NAME: Final = 40
"""Characters of a name left of a bar; of a longer one its beginning and its end stand there."""


def gutter(names: Iterable[str]) -> int:
    """Pixels that the longest name takes left of a bar chart."""
    return round(min(max(map(len, names), default=0), MAX_NAME) * 6.3) + 14


def _bar(bar: Bar, y: int, scale: Scale) -> str:
    middle = y + 10
    name = (
        f'<text class="name" x="-8" y="{middle}" dy=".34em" text-anchor="end">'
        f"{escape(ends(printable(bar.name), MAX_NAME))}</text>"
    )
    if bar.value is None:
        rest = f'<text class="value" x="0" dx="6" y="{middle}" dy=".34em">no data</text>'
        return f'<g class="{escape(bar.style)}">{name}{rest}</g>'
    width, whole = scale(bar.value), scale(bar.value + bar.more)
    shapes = [f'<rect class="bar" x="0" width="{_percent(width)}" y="{y + 3}" height="15"/>']
    if bar.more:
        shapes.append(
            f'<rect class="bar more" x="{_percent(width)}" width="{_percent(whole - width)}" '
            f'y="{y + 3}" height="15"/>'
        )
    end = whole
    if bar.interval is not None:
        low, high = (scale(value) for value in bar.interval)
        end = max(end, high)
        shapes.append(
            f'<line class="whisker" x1="{_percent(low)}" x2="{_percent(high)}" '
            f'y1="{middle}" y2="{middle}"/>'
        )
    text = (
        f'<text class="value" x="{_percent(end)}" dx="6" y="{middle}" dy=".34em">'
        f"{escape(bar.text)}</text>"
    )
    tip = bar.tip or (bar.name if len(bar.name) > MAX_NAME else "")
    tip = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<g class="{escape(bar.style)}">{tip}{name}{"".join(shapes)}{text}</g>'


def _percent(share: float) -> str:
    return f"{share * 100:.2f}%"
