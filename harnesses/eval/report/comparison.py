"""Runs side by side: what several seeds of one policy come to, and how each stands to a baseline.

Owns the arithmetic and the number formats that the terminal table and the page share, so that
both say the same. Knows nothing of how either is drawn.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

from hear.harnesses.eval.report.results import Row, RunResult
from hear.harnesses.eval.workloads.workload import LeftOut

BASELINES: Final = ("fcfs", "round-robin")
"""What the others are compared with: the first of these that was run."""
CATEGORIES: Final = ("intent", "control", "state", "outcome")


@dataclass(frozen=True, slots=True)
class Metric:
    """One column: the field of ``Row`` it shows, and which way is better."""

    field: str
    name: str
    unit: str
    lower_is_better: bool


METRICS: Final = (
    Metric("ttft_p50_s", "TTFT P50", "s", lower_is_better=True),
    Metric("ttft_p95_s", "TTFT P95", "s", lower_is_better=True),
    Metric("ttft_max_s", "TTFT max", "s", lower_is_better=True),
    Metric("session_s", "session", "s", lower_is_better=True),
    Metric("batch_s", "batch", "s", lower_is_better=True),
    Metric("turns_per_min", "turns", "/min", lower_is_better=False),
    Metric("reuse_pct", "reuse", "%", lower_is_better=False),
    Metric("reuse_all_pct", "of all", "%", lower_is_better=False),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One metric of one policy.

    ``ratio`` above 1 is better than the baseline, and None where there is none. ``mean`` is None
    where nothing was measured. The spread is over seeds.
    """

    mean: float | None
    low: float = 0.0
    high: float = 0.0
    deviation: float | None = None
    ratio: float | None = None
    best: bool = False
    digits: int = 1

    @property
    def text(self) -> str:
        """The mean, in the digits of its column."""
        return "-" if self.mean is None else f"{self.mean:,.{self.digits}f}"

    @property
    def deviation_text(self) -> str:
        """The standard deviation over seeds, or nothing."""
        return "" if self.deviation is None else f"{self.deviation:,.{self.digits}f}"

    @property
    def ratio_text(self) -> str:
        """The ratio in three digits or more, or nothing."""
        if self.ratio is None:
            return ""
        return f"{self.ratio:.{2 if self.ratio < 9.995 else 1 if self.ratio < 99.95 else 0}f}"


@dataclass(frozen=True, slots=True)
class Line:
    """One policy at one load, over all its seeds. ``cells`` goes by the field of the metric."""

    policy: str
    seeds: tuple[int, ...]
    turns: int
    cells: dict[str, Cell]
    rejected: int
    guard_violations: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """All policies on one workload, engine and load: one block of the paper's Table 4.

    ``engine`` says how many there are, if it is not one.
    """

    workload: str
    engine: str
    load: float
    lines: tuple[Line, ...]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The columns. Batch completion means something only where a batch is served (SCBench)."""
        batch = "scbench" in self.workload.lower()
        return tuple(metric for metric in METRICS if batch or metric.field != "batch_s")


def baseline_of(policies: Iterable[str]) -> str | None:
    """Which of the policies the others are compared with; None if there is none."""
    run = {policy.strip().lower(): policy for policy in policies}
    return next((run[name] for name in BASELINES if name in run), None)


def served_by(row: Row) -> str:
    """The engines of a row in words."""
    return row.engine if row.engines == 1 else f"{row.engines} x {row.engine}"


def scope_of(rows: Iterable[Row]) -> tuple[str, ...]:
    """What was replayed of each workload and what was left out, a line each."""
    sizes: dict[str, dict[float, tuple[int, int]]] = {}
    last: dict[str, Row] = {}
    for row in rows:
        size = row.turns + row.rejected, row.sessions
        sizes.setdefault(row.workload, {}).setdefault(row.load, size)
        last[row.workload] = row
    lines = []
    for workload, loads in sizes.items():
        held = ", ".join(
            f"{turns:,} turns of {sessions:,} sessions at {load:g}%"
            for load, (turns, sessions) in sorted(loads.items())
        )
        row = last[workload]
        says = [f"{workload}: {held}", *map(_left_out, row.left_out), *row.remarks]
        lines.append("; ".join(says))
    return tuple(lines)


def notes_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """Who served how much, of several engines, and who took part in name only."""
    lines = []
    for row in rows:
        if len(row.turns_by_engine) > 1:
            shares = ", ".join(f"{name} {turns:,}" for name, turns in row.turns_by_engine.items())
            lines.append(f"{run_name(row)}: turns by engine: {shares}")
        lines += [f"{run_name(row)}: {note}" for note in row.notes]
    return tuple(lines)


def _left_out(part: LeftOut) -> str:
    share = 100 * part.prompt_tokens / (part.of_prompt_tokens or 1)
    return (
        f"left out of the source: {part.turns:,} turns ({share:.0f}% of its prompt tokens), "
        f"{part.why}, and so all of {part.sessions:,} sessions"
    )


def compare(rows: Iterable[Row]) -> tuple[Comparison, ...]:
    """Group rows by workload, engines and load; loads ascend, all else keeps its order."""
    groups: dict[tuple[str, str], dict[float, dict[str, list[Row]]]] = {}
    for row in rows:
        loads = groups.setdefault((row.workload, served_by(row)), {})
        loads.setdefault(row.load, {}).setdefault(row.policy, []).append(row)
    return tuple(
        Comparison(workload, engine, load, _lines(loads[load]))
        for (workload, engine), loads in groups.items()
        for load in sorted(loads)
    )


def _lines(policies: dict[str, list[Row]]) -> tuple[Line, ...]:
    baseline = policies.get(baseline_of(policies) or "", [])
    columns = {metric.field: _column(metric, policies, baseline) for metric in METRICS}
    return tuple(
        Line(
            policy=policy,
            seeds=tuple(row.seed for row in rows),
            turns=sum(row.turns for row in rows),
            cells={field: column[policy] for field, column in columns.items()},
            rejected=sum(row.rejected for row in rows),
            guard_violations=sum(row.guard_violations for row in rows),
        )
        for policy, rows in policies.items()
    )


def _column(
    metric: Metric, policies: dict[str, list[Row]], baseline: Sequence[Row]
) -> dict[str, Cell]:
    means = {policy: _mean(metric, rows) for policy, rows in policies.items()}
    known = [mean for mean in means.values() if mean is not None]
    best = (min if metric.lower_is_better else max)(known, default=None)
    digits = 2 if known and min(known) < 1 and max(known) < 100 else 1
    tell_best = len({f"{mean:.{digits}f}" for mean in known}) > 1  # a difference that shows
    cells = {}
    for policy, rows in policies.items():
        values = _values(metric, rows)
        cells[policy] = Cell(
            mean=means[policy],
            low=min(values, default=0.0),
            high=max(values, default=0.0),
            deviation=stdev(values) if len(values) > 1 else None,
            ratio=_ratio(metric, rows, baseline),
            best=tell_best and means[policy] == best,
            digits=digits,
        )
    return cells


def _values(metric: Metric, rows: Iterable[Row]) -> list[float]:
    """The measured values. A run that served nothing has none, whatever its fields say."""
    served = (row for row in rows if row.turns > 0 and row.ttft_max_s > 0)
    values = (float(getattr(row, metric.field)) for row in served)
    return [value for value in values if math.isfinite(value)]


def _mean(metric: Metric, rows: Iterable[Row]) -> float | None:
    values = _values(metric, rows)
    return fmean(values) if values else None


def _ratio(metric: Metric, rows: Sequence[Row], baseline: Sequence[Row]) -> float | None:
    """How many times better than the baseline, over the seeds that both have run."""
    seeds = {row.seed for row in rows} & {row.seed for row in baseline}
    mine = _mean(metric, (row for row in rows if row.seed in seeds))
    base = _mean(metric, (row for row in baseline if row.seed in seeds))
    if not mine or not base:
        return None
    return base / mine if metric.lower_is_better else mine / base


@dataclass(frozen=True, slots=True)
class CostLine:
    """What the protocol cost under one policy, over all its runs (paper, Table 7)."""

    policy: str
    runs: int
    messages: dict[str, int]
    decisions: int
    controls: dict[str, int]
    decide_s: float
    run_s: float

    @property
    def decide_us(self) -> float | None:
        """Microseconds of policy code a decision."""
        return self.decide_s / self.decisions * 1e6 if self.decisions else None

    @property
    def share_pct(self) -> float | None:
        """Policy code as a share of the wall time of the runs."""
        return self.decide_s / self.run_s * 100 if self.run_s > 0 else None


def costs(results: Sequence[RunResult]) -> tuple[CostLine, ...]:
    """One line a policy; the four categories always, others where there are any."""
    by_policy: dict[str, list[RunResult]] = {}
    for result in results:
        by_policy.setdefault(result.row.policy, []).append(result)
    lines = []
    for policy, runs in by_policy.items():
        messages = Counter(dict.fromkeys(CATEGORIES, 0))
        controls: Counter[str] = Counter()
        for run in runs:
            messages.update(run.cost.messages)
            controls.update(run.cost.controls)
        lines.append(
            CostLine(
                policy=policy,
                runs=len(runs),
                messages=dict(messages),
                decisions=sum(sum(run.cost.decisions.values()) for run in runs),
                controls=dict(sorted(controls.items())),
                decide_s=sum(sum(run.cost.decide_s.values()) for run in runs),
                run_s=sum(run.cost.run_s for run in runs),
            )
        )
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class Checks:
    """Whether the protocol kept its promises; ``problems`` says where it did not."""

    operations: dict[str, int]
    open: int
    guard_violations: int
    problems: tuple[str, ...]

    @property
    def total(self) -> int:
        """How many operations there were, ended or not."""
        return sum(self.operations.values()) + self.open

    @property
    def passed(self) -> bool:
        """Whether there is nothing to complain of."""
        return not (self.open or self.guard_violations or self.problems)

    @property
    def summary(self) -> str:
        """One sentence: what holds, or what does not."""
        ended = ", ".join(f"{outcome} {count:,}" for outcome, count in self.operations.items())
        counts = (
            f"{self.total:,} operations{f' ({ended})' if ended else ''}, open {self.open:,}; "
            f"guard violations {self.guard_violations:,}"
        )
        if not self.total and self.passed:
            return "no policy asked for anything, so there are no operations; guard violations 0"
        if self.open:
            return f"not every operation ended: {counts}"
        return f"every operation ended in exactly one outcome: {counts}"


def check(results: Sequence[RunResult]) -> Checks:
    """Add up what the runs say of themselves."""
    operations: Counter[str] = Counter()
    problems = []
    for result in results:
        operations.update(result.row.operations)
        where = run_name(result.row)
        problems += [f"{where}: {problem}" for problem in result.problems]
        problems += [f"{where}: policy failed: {why}" for why in result.row.policy_failures]
    return Checks(
        operations=dict(sorted(operations.items())),
        open=sum(result.row.operations_open for result in results),
        guard_violations=sum(result.row.guard_violations for result in results),
        problems=tuple(problems),
    )


def run_name(row: Row) -> str:
    """A run in words, to say where something happened."""
    return f"{row.workload}, {served_by(row)}, {row.load:g}% load, {row.policy}, seed {row.seed}"


def spell(policy: str) -> str:
    """A policy's name with room to break the line at each ``+``, as the paper writes it."""
    return " + ".join(part.strip() for part in policy.split("+"))
