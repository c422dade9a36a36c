"""Replay results in the terminal, in the form of the paper's Tables 3 and 4.

Each table is laid out for the width it is given: the ratio beside its value where there is room,
below it where there is not. Names come from outside and are never read as markup.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from rich import box
from rich.console import Console as AnyConsole  # noqa: TID251, for its type alone
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from hear import escaping
from hear.app.console import of_results
from hear.harnesses.eval.report.comparison import (
    Cell,
    Comparison,
    CostLine,
    Metric,
    baseline_of,
    check,
    compare,
    costs,
    notes_of,
    scope_of,
    spell,
)
from hear.harnesses.eval.report.results import Row, RunResult


def print_results(results: Sequence[RunResult], console: AnyConsole | None = None) -> None:
    """Print the results, what the protocol cost, and the self-checks."""
    if console is None:
        console = of_results()
    console.print(results_table([result.row for result in results]))
    for line in scope_of(result.row for result in results):
        console.print(Text(escaping.one_line(line), style="dim"), soft_wrap=True)
    for note in notes_of([result.row for result in results]):
        console.print(Text(escaping.one_line(note), style="yellow"), soft_wrap=True)
    if results:
        console.print()
        console.print(cost_table(results))
    console.print()
    console.print(self_checks(results), soft_wrap=True)


def results_table(rows: Sequence[Row]) -> RenderableType:
    """One table a workload and engine, in sections by load, one line a policy."""
    comparisons = compare(rows)
    if not comparisons:
        return Text("no runs, so no results")
    tables: list[RenderableType] = []
    for _, group in groupby(comparisons, key=lambda c: (c.workload, c.engine)):
        blocks = list(group)
        tables += [_Fitted(partial(_results, blocks)), Text()]
    return Group(*tables, _Note(comparisons))


def cost_table(results: Sequence[RunResult]) -> RenderableType:
    """What the protocol itself cost, one line a policy, over all its runs (paper, Table 7)."""
    lines = costs(results)
    return _Fitted(partial(_costs, lines))


def self_checks(results: Sequence[RunResult]) -> Text:
    """One line when every promise was kept; in red what was not."""
    checks = check(results)
    if checks.passed:
        return Text(checks.summary, style="green")
    lines = [checks.summary, *(f"  {escaping.one_line(problem)}" for problem in checks.problems)]
    return Text("\n".join(lines), style="bold red")


@dataclass(frozen=True, slots=True)
class _Style:
    """How to lay out: ``stacked`` in narrow space; ``marked`` where bold can't be seen."""

    name_width: int
    stacked: bool
    marked: bool
    plus_minus: str


class _Fitted:
    """A table in the widest layout that fits where it is printed."""

    def __init__(self, build: Callable[[_Style], Table]) -> None:
        self._build = build

    def __rich_console__(self, console: AnyConsole, options: ConsoleOptions) -> RenderResult:
        plus_minus = "±" if options.encoding.lower().startswith("utf") else "+-"
        boundless = options.update(width=10_000)
        for name_width, stacked in ((40, False), (22, False), (22, True)):
            style = _Style(name_width, stacked, not console.is_terminal, plus_minus)
            table = self._build(style)
            if Measurement.get(console, boundless, table).maximum <= options.max_width:
                break
        yield table


class _Note:
    """What the signs in the table mean, in one dim line."""

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        lines = [line for comparison in comparisons for line in comparison.lines]
        self._baseline = baseline_of(line.policy for line in lines) if len(lines) > 1 else None
        self._seeds = max(len(line.seeds) for line in lines)
        self._best = any(cell.best for line in lines for cell in line.cells.values())

    def __rich_console__(self, console: AnyConsole, options: ConsoleOptions) -> RenderResult:
        says = []
        if self._baseline is not None:
            says.append(f"xN: times better than {self._baseline} (below 1 is worse)")
        if self._best:
            says.append(("bold" if console.is_terminal else "*") + ": best at that load")
        if self._seeds > 1:
            says.append(f"mean and standard deviation of up to {self._seeds} seeds")
        if says:
            yield Text("; ".join(says), style="dim")


def _table(title: str, style: _Style) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", show_edge=False)
    table.pad_edge = False
    if style.stacked:  # room for nine numbers beside the name in 80 columns
        table.padding = (0, 1, 0, 0)
    table.title_style = "bold"
    table.add_column("policy", overflow="fold", min_width=13, max_width=style.name_width)
    return table


def _results(blocks: Sequence[Comparison], style: _Style) -> Table:
    metrics = blocks[0].metrics
    lines = [line for block in blocks for line in block.lines]
    counts = {
        "rejected": [line.rejected for line in lines],
        "guard\nbroken": [line.guard_violations for line in lines],
    }
    complaints = {name: column for name, column in counts.items() if any(column)}
    table = _table(
        f"{escaping.cell(blocks[0].workload)} on {escaping.cell(blocks[0].engine)}", style
    )
    for metric in metrics:
        table.add_column(_heading(metric), justify="right", no_wrap=True)
    for name in complaints:
        table.add_column(name, justify="right", no_wrap=True, style="red")
    columns = [_cells([line.cells[m.field] for line in lines], style) for m in metrics]
    columns += [[Text(f"{n:,}" if n else "") for n in column] for column in complaints.values()]
    rows = zip(*columns, strict=True)
    for block in blocks:
        table.add_section()
        table.add_row(Text(f"{block.load:g}% load", style="bold"))
        for line in block.lines:
            table.add_row(Text(escaping.cell(spell(line.policy))), *next(rows))
    return table


def _heading(metric: Metric) -> str:
    if metric.name.startswith("TTFT "):
        return f"TTFT\n{metric.name.removeprefix('TTFT ')} {metric.unit}"
    return f"{metric.name}\n{metric.unit}"


def _cells(cells: Sequence[Cell], style: _Style) -> list[Text]:
    """The cells of one column, their parts padded alike so that they line up."""
    marked = style.marked and any(cell.best for cell in cells)
    parts = [_parts(cell, marked, style.plus_minus) for cell in cells]
    if not style.stacked:
        value, spread, ratio = (max(map(len, column)) for column in zip(*parts, strict=True))
        parts = [(v.rjust(value), s.rjust(spread), r.ljust(ratio)) for v, s, r in parts]
    separator = "\n" if style.stacked else " "
    return [_join(separator, cell, part) for cell, part in zip(cells, parts, strict=True)]


def _parts(cell: Cell, marked: bool, plus_minus: str) -> tuple[str, str, str]:
    mark = "*" if cell.best else " "
    return (
        cell.text + (mark if marked else ""),
        cell.deviation_text and f"{plus_minus}{cell.deviation_text}",
        cell.ratio_text and f"x{cell.ratio_text}",
    )


def _join(separator: str, cell: Cell, parts: Sequence[str]) -> Text:
    styles = ("bold" if cell.best else "", "dim", "bold" if cell.best else "dim")
    text = Text(justify="right")
    for part, style in zip(parts, styles, strict=True):
        if part:
            text.append(separator if text else "")
            text.append(part, style)
    return text


def _costs(lines: Sequence[CostLine], style: _Style) -> Table:
    table = _table("What the protocol cost", style)
    categories = list(dict.fromkeys(category for line in lines for category in line.messages))
    headings = [f"{escaping.cell(category)}\nmessages" for category in categories]
    headings += ["decisions", "controls", "policy\ncode ms", "us a\ndecision", "share of\nrun, %"]
    if style.stacked:
        headings = [f"{escaping.cell(category)}\nmsgs" for category in categories]
        headings += ["deci-\nsions", "con-\ntrols", "code\nms", "us a\ndec.", "run\n%"]
    for heading in headings:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    count = _short if style.stacked else "{:,}".format
    decimal = _short if style.stacked else "{:,.1f}".format
    for line in lines:
        table.add_row(
            Text(escaping.cell(spell(line.policy))),
            *(count(line.messages.get(category, 0)) for category in categories),
            count(line.decisions),
            count(sum(line.controls.values())),
            decimal(line.decide_s * 1e3),
            "-" if line.decide_us is None else decimal(line.decide_us),
            "-" if line.share_pct is None else f"{line.share_pct:.2f}",
        )
    return table


def _short(count: float) -> str:
    """A count in four or five characters: 312, 45.6k, 1.23M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size * 0.9995:
            value = count / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{unit}"
    return f"{count:.0f}" if count >= 100 or float(count).is_integer() else f"{count:.1f}"
