"""What the figures of the page show: from runs to curves and bars (paper, Figures 3 and 5).

Owns which values are drawn. How they are drawn is ``charts``, what is said about them ``report``.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

from hear.harnesses.eval.report.charts import (
    Bar,
    Curve,
    Point,
    Scale,
    bar_chart,
    downsample,
    escape,
    from_zero,
    gutter,
    line_chart,
    logarithmic,
    summarise,
)
from hear.harnesses.eval.report.comparison import Comparison, baseline_of, served_by, spell
from hear.harnesses.eval.report.results import RunResult, Sample, TurnRecord

BUCKETS: Final = 180
TTFT_FLOOR_S: Final = 0.01
COLOURS: Final = 7


@dataclass(frozen=True, slots=True)
class Scene:
    """One workload, engine and load, with the runs that are drawn of it: one a policy, one seed.

    ``absent`` are the policies that have no run of that seed.
    """

    comparison: Comparison
    seed: int
    runs: dict[str, RunResult]
    absent: tuple[str, ...]

    @property
    def load(self) -> str:
        """The load in words."""
        return f"{self.comparison.load:g}% load"


def scenes(comparisons: Sequence[Comparison], results: Sequence[RunResult]) -> tuple[Scene, ...]:
    """Choose for each load the seed that most policies have run, the first of equals."""
    made = []
    for comparison in comparisons:
        place = (comparison.workload, comparison.engine, comparison.load)
        here = [r for r in results if (r.row.workload, served_by(r.row), r.row.load) == place]
        seeds = Counter(seed for line in comparison.lines for seed in set(line.seeds))
        seed = max(seeds, key=lambda seed: (seeds[seed], -seed))
        runs: dict[str, RunResult] = {}
        for result in here:
            if result.row.seed == seed:
                runs.setdefault(result.row.policy, result)
        absent = tuple(line.policy for line in comparison.lines if line.policy not in runs)
        made.append(Scene(comparison, seed, runs, absent))
    return tuple(made)


class Palette:
    """A class of the style sheet for each policy: ``p0`` is the baseline; colours come again."""

    def __init__(self, results: Sequence[RunResult]) -> None:
        policies = dict.fromkeys(result.row.policy for result in results)
        baseline = baseline_of(policies)
        others = [policy for policy in policies if policy != baseline]
        self.styles = {policy: "p0" for policy in policies}
        for index, policy in enumerate(others):
            again = f" again{index // COLOURS}" if index >= COLOURS else ""
            self.styles[policy] = f"p{index % COLOURS + 1}{again}"
        self.keys = {policy: f"k{index}" for index, policy in enumerate(policies)}

    def __getitem__(self, policy: str) -> str:
        """Colour, and the key that the switch of the policy turns off."""
        return f"{self.styles[policy]} {self.keys[policy]}"


def reuse_chart(group: Sequence[Comparison], palette: Palette) -> str:
    """Reuse of follow-up turns by load and policy; whiskers from the lowest seed to the highest."""
    groups = []
    for comparison in group:
        bars = []
        for line in comparison.lines:
            cell = line.cells["reuse_pct"]
            several = cell.deviation is not None
            bars.append(
                Bar(
                    name=spell(line.policy),
                    style=palette[line.policy],
                    value=cell.mean,
                    text=cell.text,
                    interval=(cell.low, cell.high) if several else None,
                    tip=f"{spell(line.policy)}, {comparison.load:g}% load: {cell.text}% reused"
                    + (f" ({cell.low:.1f} to {cell.high:.1f} over seeds)" if several else ""),
                )
            )
        groups.append((f"{comparison.load:g}% load", bars))
    values = [line.cells["reuse_pct"].high for c in group for line in c.lines]
    return bar_chart(groups, scale=from_zero(values), label="KV reuse by load and policy")


def occupancy_chart(
    group: Sequence[Comparison], results: Sequence[RunResult], palette: Palette
) -> str:
    """GPU blocks in use and, lighter, blocks cached for reuse; averaged over time, then seeds."""
    shares: dict[tuple[str, str, float, str], list[Point]] = {}
    for result in results:
        row = result.row
        if result.samples:
            key = (row.workload, served_by(row), row.load, row.policy)
            shares.setdefault(key, []).append(occupancy(result.samples))
    groups = []
    for comparison in group:
        place = (comparison.workload, comparison.engine, comparison.load)
        bars = []
        for line in comparison.lines:
            name, style = spell(line.policy), palette[line.policy]
            runs = shares.get((*place, line.policy))
            if runs is None:
                bars.append(Bar(name=name, style=style, value=None, text=""))
                continue
            used, cached = (fmean(run[i] for run in runs) * 100 for i in (0, 1))
            tip = f"{name}, {comparison.load:g}% load: {used:.1f}% in use, {cached:.1f}% cached"
            bars.append(
                Bar(
                    name=name,
                    style=style,
                    value=used,
                    text=f"{used:.1f} + {cached:.1f}",
                    more=cached,
                    tip=tip,
                )
            )
        groups.append((f"{comparison.load:g}% load", bars))
    return bar_chart(groups, scale=Scale(0, 100), label="GPU KV occupancy by load and policy")


def occupancy(samples: Sequence[Sample]) -> Point:
    """Shares of GPU blocks in use and cached, averaged over time."""
    whole = samples[-1].time_s - samples[0].time_s
    if whole <= 0:
        return (samples[0].gpu_used, samples[0].gpu_cached)
    used = cached = 0.0
    for sample, following in pairwise(samples):
        lasting = (following.time_s - sample.time_s) / whole
        used += sample.gpu_used * lasting
        cached += sample.gpu_cached * lasting
    return (used, cached)


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity over time: a row of the small multiples. What only grows needs no band."""

    name: str
    value: Callable[[Sample], float]
    percent: bool = False
    grows: bool = False


SERIES: Final = (
    Series("GPU KV in use, %", lambda sample: sample.gpu_used * 100, percent=True),
    Series("KV restored so far, tokens", lambda sample: sample.restored_tokens, grows=True),
    Series("Requests waiting", lambda sample: sample.waiting),
)


def over_time(group: Sequence[Scene], palette: Palette) -> Iterator[tuple[str, str]]:
    """Title and chart of each panel, quantity by quantity and within it load by load."""
    for series in SERIES:
        for scene in group:
            curves = []
            values = [0.0]
            for policy, run in scene.runs.items():
                points = [(sample.time_s, series.value(sample)) for sample in run.samples]
                values += (value for _, value in points)
                name, style = spell(policy), palette[policy]
                curves.append(
                    Curve(name, style, downsample(points, BUCKETS))
                    if series.grows
                    else summarise(name, style, points, BUCKETS)
                )
            x = until_last(x for curve in curves for x, _ in curve.points)
            y = Scale(0, 100) if series.percent else from_zero(values)
            title = f"{series.name} · {scene.load}"
            yield title, line_chart(curves, x=x, y=y, label=title)


def until_last(times: Iterator[float]) -> Scale:
    """From the start to the last of ``times``."""
    return Scale(0.0, max(times, default=0.0) or 1.0)


def ttft_distributions(group: Sequence[Scene], palette: Palette) -> Iterator[tuple[str, str]]:
    """Title and chart of each panel: the share of served turns by time to first token."""
    times = {
        id(run): sorted(turn.first_token_s - turn.sent_s for turn in served(run.turns))
        for scene in group
        for run in scene.runs.values()
    }
    x = logarithmic((time for run in times.values() for time in run), TTFT_FLOOR_S)
    for scene in group:
        curves = [
            Curve(spell(policy), palette[policy], distribution(times[id(run)]))
            for policy, run in scene.runs.items()
        ]
        title = f"Turns with a first token, % · {scene.load}"
        yield title, line_chart(curves, x=x, y=Scale(0, 100), label=title, height=200)


def distribution(values: Sequence[float], count: int = 240) -> list[Point]:
    """(value, percent of values up to it) of sorted ``values``, the least and greatest kept."""
    if not values:
        return []
    last = len(values) - 1
    ranks = sorted({round(last * index / count) for index in range(count + 1)})
    first = (values[0], 0.0)
    return [first, *((values[rank], (rank + 1) / len(values) * 100) for rank in ranks)]


def served(turns: Sequence[TurnRecord]) -> list[TurnRecord]:
    """The turns that were answered."""
    return [turn for turn in turns if turn.status == "completed"]


def panels(charts: Iterable[tuple[str, str]], columns: int, names: Iterable[str] = ()) -> str:
    """A grid of titled charts; ``names`` are those that stand left of bars."""
    cells = "".join(
        f'<div class="panel"><h4>{escape(title)}</h4>{chart}</div>' for title, chart in charts
    )
    style = f"--columns:{columns};--gutter:{gutter(names)}px"
    return f'<div class="panels" style="{style}">{cells}</div>'
