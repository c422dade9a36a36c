"""How much is measured, how it is timed, and how it is shown.

The garbage collector is off within ``no_gc``, as in ``timeit``.
"""

import gc
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, ParamSpec

import msgspec
from rich.table import Table

from hear.app.console import Console

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = ParamSpec("P")

ENGINE = "engine0"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything. The defaults are those of the table in README.md.

    What is timed at once is short where it can be, since on a machine that others use too a long
    piece of work is interrupted, and a median over many short ones is not moved by that.
    """

    prompt_blocks: int = 8192
    directory_blocks: int = 2_000_000
    fill_blocks: int = 512
    match_repeats: int = 200
    sweep_bytes: int = 64 * 2**20
    waiting: int = 1000
    apply_blocks: int = 4096
    apply_repeats: int = 12
    decide_prompt_blocks: int = 2048
    decide_contexts: int = 50
    decide_events: int = 64
    decide_repeats: int = 20
    codec_repeats: int = 200
    codec_sample_s: float = 0.001
    engine_requests: int = 256
    engine_repeats: int = 5


QUICK = Sizes(
    match_repeats=40,
    apply_repeats=4,
    decide_repeats=6,
    codec_repeats=50,
    engine_requests=128,
    engine_repeats=3,
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity. Those that share ``section`` and ``what`` are compared."""

    section: str
    what: str
    who: str
    unit: str
    samples: tuple[float, ...]

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.unit.endswith("/s")

    @property
    def middle(self) -> float:
        """The median."""
        return median(self.samples)

    @property
    def spread(self) -> tuple[float, float] | None:
        """The quartiles, None of a single sample."""
        if len(self.samples) < 2:
            return None
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return low, high


@dataclass(slots=True)
class Report:
    """What was measured, and what has to be said of it."""

    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, section: str, what: str, who: str, unit: str, samples: Iterable[float]) -> None:
        """Take in one figure."""
        self.figures.append(Figure(section, what, who, unit, tuple(samples)))


def seconds(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> float:
    """The time of one call."""
    begun = perf_counter()
    function(*args, **kwargs)
    return perf_counter() - begun


def seconds_a_call(function: Callable[[], object], sample_s: float) -> float:
    """The time of one call, from as many as take about ``sample_s``."""
    calls = 1
    while True:
        begun = perf_counter()
        for _ in range(calls):
            function()
        took = perf_counter() - begun
        if took >= sample_s / 2:
            return took / calls
        calls *= 2


@contextmanager
def no_gc() -> Iterator[None]:
    """Keep the garbage collector out of the figures."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resident_bytes() -> int | None:
    """Memory of this process, None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


class Caches:
    """Makes the processor forget what it has read, by reading more than its caches hold."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = bytes(size_bytes)

    def empty(self) -> None:
        """Read it all."""
        self._memory.count(1)


def number(value: float) -> str:
    """Three digits, or all before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table_of(figures: Sequence[Figure]) -> Table:
    """One section; the last column says how many times the cost of the first row a row costs."""
    table = Table()
    table.add_column("what")
    table.add_column("who")
    for heading in ("median", "quartiles", "unit", "repeats", "cost"):
        table.add_column(heading, justify="left" if heading == "unit" else "right")
    for what in dict.fromkeys(figure.what for figure in figures):
        rows = [figure for figure in figures if figure.what == what]
        for place, figure in enumerate(rows):
            cost = figure.middle / rows[0].middle if rows[0].middle else 0.0
            if figure.is_rate and cost:
                cost = 1 / cost
            spread = figure.spread
            table.add_row(
                what if place == 0 else "",
                figure.who,
                number(figure.middle),
                f"{number(spread[0])} - {number(spread[1])}" if spread else "-",
                figure.unit,
                str(len(figure.samples)),
                f"{number(cost)}x" if len(rows) > 1 else "",
                end_section=place == len(rows) - 1,
            )
    return table


def print_report(report: Report, console: Console) -> None:
    """Show all figures, a table a section."""
    console.print(*_machine().values(), sep=", ", highlight=False)
    console.print("cost: how many times the cost of the first row of its kind", style="dim")
    for section, figures in groupby(report.figures, key=lambda figure: figure.section):
        console.print(f"\n{section}", style="bold", highlight=False, soft_wrap=True)
        console.print(table_of(list(figures)))
    for note in report.notes:
        console.print(note, highlight=False)


def as_json(report: Report, sizes: "DataclassInstance") -> bytes:
    """All figures with their samples."""
    rows = [
        {**asdict(figure), "median": figure.middle, "quartiles": figure.spread}
        for figure in report.figures
    ]
    whole = {
        "machine": _machine(),
        "sizes": asdict(sizes),
        "notes": report.notes,
        "figures": rows,
    }
    return msgspec.json.format(msgspec.json.encode(whole))


def _machine() -> dict[str, str]:
    return {
        "python": f"Python {platform.python_version()}",
        "msgspec": f"msgspec {version('msgspec')}",
        "trio": f"trio {version('trio')}",
        "platform": platform.platform(),
        "cpus": f"{os.cpu_count()} CPUs",
    }
