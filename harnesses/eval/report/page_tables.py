"""The tables of the page: results with their ratios (paper, Table 4), and costs (Table 7)."""

from collections.abc import Sequence
from typing import Final

from hear.harnesses.eval.report.charts import escape
from hear.harnesses.eval.report.comparison import (
    CATEGORIES,
    Cell,
    Comparison,
    Line,
    Metric,
    baseline_of,
    costs,
    spell,
)
from hear.harnesses.eval.report.figures import Palette, Scene
from hear.harnesses.eval.report.metrics import reuse_pct
from hear.harnesses.eval.report.results import RunResult

TIMES: Final = "\N{MULTIPLICATION SIGN}"


def best_of_each_load(group: Sequence[Comparison]) -> str:
    """Who is best at what, a sentence a load."""
    items = []
    for comparison in group:
        wins: dict[str, list[str]] = {}
        for metric in comparison.metrics:
            words = _PRAISE.get(metric.field)
            for line in comparison.lines:
                cell = line.cells[metric.field]
                if words and cell.best:
                    ratio = f", {TIMES}{cell.ratio_text}" if cell.ratio_text else ""
                    unit = metric.unit if metric.unit == "%" else f" {metric.unit}"
                    wins.setdefault(line.policy, []).append(f"{words} ({cell.text}{unit}{ratio})")
        says = "; ".join(f"{escape(spell(who))} has {_and(what)}" for who, what in wins.items())
        if says:
            items.append(f"<li><b>{comparison.load:g}% load:</b> {says}.</li>")
    return f'<ul class="short">{"".join(items)}</ul>' if items else ""


_PRAISE = {
    "ttft_p50_s": "the shortest median TTFT",
    "ttft_p95_s": "the shortest P95 TTFT",
    "session_s": "the shortest sessions",
    "reuse_pct": "the most reuse",
}


def _and(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def results_table(group: Sequence[Comparison], palette: Palette) -> str:
    """One table for a workload and engine, its loads one below the other."""
    metrics = group[0].metrics
    lines = [line for comparison in group for line in comparison.lines]
    counts = [
        (name, field)
        for name, field in (("rejected", "rejected"), ("guard broken", "guard_violations"))
        if any(getattr(line, field) for line in lines)
    ]
    arrow = {True: "lower is better", False: "higher is better"}
    heads = "".join(
        f'<th scope="col" title="{arrow[m.lower_is_better]}">{escape(m.name)}'
        f'<span class="unit">{"↓" if m.lower_is_better else "↑"} {escape(m.unit)}</span></th>'
        for m in metrics
    ) + "".join(f'<th scope="col" class="count">{name}</th>' for name, _ in counts)
    bodies = []
    for comparison in group:
        rows = "".join(_line(line, metrics, counts, palette) for line in comparison.lines)
        bodies.append(
            f'<tbody><tr class="load"><th scope="rowgroup" colspan="{1 + len(metrics)}">'
            f"{comparison.load:g}% load</th></tr>{rows}</tbody>"
        )
    several = any(len(line.seeds) > 1 for line in lines)
    baseline = baseline_of(line.policy for line in lines) if len(lines) > 1 else None
    caption = " ".join(
        (
            "Best of each load in bold."
            if any(cell.best for line in lines for cell in line.cells.values())
            else "",
            f"{TIMES} is how many times better than {baseline}." if baseline else "",
            "± is the standard deviation over seeds." if several else "",
        )
    ).strip()
    return (
        f'<div class="scroll"><table class="results"><caption>{caption}</caption><thead><tr>'
        f'<th scope="col">policy</th>{heads}</tr></thead>{"".join(bodies)}</table></div>'
    )


def _line(
    line: Line, metrics: Sequence[Metric], counts: Sequence[tuple[str, str]], palette: Palette
) -> str:
    cells = "".join(_cell(line.cells[metric.field]) for metric in metrics)
    extra = "".join(
        f'<td class="count">{f"{n:,}" if n else ""}</td>'
        for n in (getattr(line, field) for _, field in counts)
    )
    return (
        f'<tr class="policy {palette[line.policy]}"><th scope="row">{escape(spell(line.policy))}'
        f"</th>{cells}{extra}</tr>"
    )


def _cell(cell: Cell) -> str:
    best = ' class="best"' if cell.best else ""
    spread = (
        f'<span class="spread" title="{cell.low:.2f} to {cell.high:.2f}">'
        f"±{cell.deviation_text}</span>"
        if cell.deviation_text
        else ""
    )
    ratio = f'<span class="ratio">{TIMES}{cell.ratio_text}</span>' if cell.ratio_text else ""
    return f"<td{best}>{cell.text}{spread}{ratio}</td>"


def engines_table(group: Sequence[Scene], palette: Palette) -> str:
    """How several engines shared the work, a line a load and policy; nothing for one engine."""
    engines = sorted(
        {turn.engine for scene in group for r in scene.runs.values() for turn in r.turns}
    )
    if len(engines) < 2:
        return ""
    rows = []
    for scene in group:
        for policy, run in scene.runs.items():
            cells = []
            total = sum(turn.prompt_tokens for turn in run.turns) or 1
            for engine in engines:
                mine = [turn for turn in run.turns if turn.engine == engine]
                share = 100 * sum(turn.prompt_tokens for turn in mine) / total
                reused = reuse_pct(turn for turn in mine if turn.turn > 1)
                cells.append(f"<td>{share:.1f}</td><td>{reused:.1f}</td>")
            rows.append(
                f'<tr class="policy {palette[policy]}"><th scope="row">{escape(spell(policy))}, '
                f"{escape(scene.load)}</th>{''.join(cells)}</tr>"
            )
    heads = "".join(
        f'<th scope="col">{escape(engine)}<span class="unit">prompt tokens, %</span></th>'
        '<th scope="col">reuse<span class="unit">%</span></th>'
        for engine in engines
    )
    return (
        '<div class="scroll"><table class="costs"><thead><tr><th scope="col">policy</th>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def cost_table(results: Sequence[RunResult], palette: Palette) -> str:
    """What the protocol itself cost, one line a policy, over all its runs."""
    rows = []
    lines = costs(results)
    categories = list(dict.fromkeys((*CATEGORIES, *(c for line in lines for c in line.messages))))
    for line in lines:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in line.controls.items())
        rows.append(
            f'<tr class="policy {palette[line.policy]}"><th scope="row">'
            f"{escape(spell(line.policy))}</th><td>{line.runs}</td>"
            + "".join(f"<td>{line.messages.get(category, 0):,}</td>" for category in categories)
            + f"<td>{line.decisions:,}</td>"
            f'<td title="{escape(kinds)}">{sum(line.controls.values()):,}</td>'
            f"<td>{line.decide_s * 1e3:,.1f}</td>"
            f"<td>{'-' if line.decide_us is None else f'{line.decide_us:,.1f}'}</td>"
            f"<td>{'-' if line.share_pct is None else f'{line.share_pct:.2f}'}</td></tr>"
        )
    heads = "".join(
        f'<th scope="col">{escape(name)}<span class="unit">{unit}</span></th>'
        for name, unit in (
            ("runs", ""),
            *((category, "messages") for category in categories),
            ("decisions", ""),
            ("controls", ""),
            ("policy code", "ms"),
            ("a decision", "µs"),
            ("share of run", "%"),
        )
    )
    return (
        f'<div class="scroll"><table class="costs"><thead><tr><th scope="col">policy</th>{heads}'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
