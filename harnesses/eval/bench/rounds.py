"""Several rounds of the same arms: medians, and how each arm stands to the baseline of its round.

Every round serves all arms one after the other, each round beginning with another, so that what
the machine does meanwhile falls on none of them alone. Ratios are taken within a round.
"""

from collections.abc import Sequence
from statistics import median
from typing import Final

from msgspec import Struct
from rich import box
from rich.table import Table
from rich.text import Text

from hear import escaping
from hear.app.console import Console
from hear.harnesses.eval.report.comparison import METRICS, Metric, baseline_of, spell
from hear.harnesses.eval.report.results import Row

_TIMES: Final = "x"


class Paired(Struct, frozen=True, kw_only=True):
    """One metric of one arm over all rounds; ratios above 1 are better than the baseline's."""

    policy: str
    metric: str
    median: float
    ratio: float | None = None
    lowest: float | None = None
    highest: float | None = None
    rounds: int


def order(arms: Sequence[str], number: int) -> list[str]:
    """The arms in the order in which a round, counted from 0, serves them."""
    shift = number % len(arms)
    return [*arms[shift:], *arms[:shift]]


def pair(rounds: Sequence[Sequence[Row]], arms: Sequence[str]) -> list[Paired]:
    """Medians over rounds, and of the ratios to the baseline in the same round."""
    baseline = baseline_of(arms)
    found = []
    for metric in METRICS:
        for arm in arms:
            values, ratios = [], []
            for rows in rounds:
                by_arm = {row.policy: getattr(row, metric.field) for row in rows}
                if arm not in by_arm:
                    continue
                values.append(by_arm[arm])
                base = by_arm.get(baseline or "")
                if base and by_arm[arm]:
                    own = by_arm[arm]
                    ratios.append(base / own if metric.lower_is_better else own / base)
            if values:
                found.append(_paired(arm, metric, values, ratios))
    return found


def _paired(arm: str, metric: Metric, values: Sequence[float], ratios: Sequence[float]) -> Paired:
    return Paired(
        policy=arm,
        metric=metric.field,
        median=median(values),
        ratio=median(ratios) if ratios else None,
        lowest=min(ratios, default=None),
        highest=max(ratios, default=None),
        rounds=len(values),
    )


def print_pairs(pairs: Sequence[Paired], console: Console) -> None:
    """One line an arm: the median, and times better than the baseline, with its range."""
    table = Table(box=box.SIMPLE_HEAD, title="Medians over rounds", title_justify="left")
    table.title_style = "bold"
    table.add_column("policy")
    shown = [m for m in METRICS if any(pair.metric == m.field for pair in pairs)]
    for metric in shown:
        table.add_column(f"{metric.name}\n{metric.unit}", justify="right", no_wrap=True)
    for arm in dict.fromkeys(pair.policy for pair in pairs):
        cells = {pair.metric: pair for pair in pairs if pair.policy == arm}
        texts = [_cell(cells.get(metric.field)) for metric in shown]
        table.add_row(Text(escaping.cell(spell(arm))), *texts)
    console.print(table)


def _cell(pair: Paired | None) -> str:
    if pair is None:
        return "-"
    text = f"{pair.median:.2f}"
    if pair.ratio is not None:
        text += f" {_TIMES}{pair.ratio:.2f}"
        if pair.rounds > 1:
            text += f"\n({pair.lowest:.2f}-{pair.highest:.2f})"
    return text
