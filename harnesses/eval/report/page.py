"""Replay results as one page of HTML that needs nothing beside itself.

Owns what stands on the page and in which words. The same results give the same bytes.
"""

from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Final

from hear.harnesses.eval.report.charts import escape
from hear.harnesses.eval.report.comparison import (
    Comparison,
    check,
    compare,
    notes_of,
    scope_of,
    spell,
)
from hear.harnesses.eval.report.figures import (
    Palette,
    Scene,
    occupancy_chart,
    over_time,
    panels,
    reuse_chart,
    scenes,
    ttft_distributions,
)
from hear.harnesses.eval.report.output import write_whole
from hear.harnesses.eval.report.page_tables import (
    TIMES,
    best_of_each_load,
    cost_table,
    engines_table,
    results_table,
)
from hear.harnesses.eval.report.results import RunResult
from hear.harnesses.eval.report.timelines import choose_sessions, timelines

DEFINITIONS: Final = (
    ("TTFT", "time to first token: from the moment the client sent a turn to its first token, "
     "queue included. P50 and P95 are percentiles over all served turns of a run."),
    ("session", "response-waiting time of a conversation: the sum over its turns of the time from "
     "sending to the last token. Mean over conversations."),
    ("batch", "from the first arrival to the last token of the last conversation."),
    ("turns/min", "served turns a minute, from the first arrival to the last token."),
    ("reuse", "share of the prompt tokens of follow-up turns whose KV was found in a tier of the "
     "cache and not computed again; 'of all' counts the prompts of first turns, too."),
    (TIMES, "how many times better than fcfs, or else round-robin, on the same seeds: its time "
     "divided by this one, or this rate divided by its. Below 1 is worse."),
    ("±", "standard deviation over seeds. Charts over time show one seed, the one named there."),
    ("GPU KV in use", "share of the GPU's KV blocks held by running requests. Cached blocks hold "
     "reusable KV that no running request needs; they give way to whoever needs room."),
    ("KV restored", "prompt tokens whose KV was brought back to the GPU from a slower tier."),
    ("operation", "one control that a policy sent. Each ends in exactly one outcome."),
    ("guard violation", "a request that had waited longer than its bound was passed by a later "
     "one that had not."),
)  # fmt: skip


def write_report(
    results: Sequence[RunResult], path: Path, command: str = "", title: str = "Replay"
) -> None:
    """Write the page, whole or not at all. ``command`` is the command line that made the results,
    ``title`` what they are of.

    Raises:
        OSError: the page can't be written; what stood at ``path`` before still does.
    """
    write_whole(path, page(results, command, title).encode())


def page(results: Sequence[RunResult], command: str = "", title: str = "Replay") -> str:
    """The page as text."""
    data = files("hear.harnesses.eval.workloads") / "data"
    style = (data / "report.css").read_text(encoding="utf-8")
    script = (data / "report.js").read_text(encoding="utf-8")
    comparisons = compare(result.row for result in results)
    palette = Palette(results)
    if comparisons:
        title += ": " + ", ".join(dict.fromkeys(c.workload for c in comparisons))
    body = [
        _header(
            title,
            comparisons,
            scope_of(result.row for result in results),
        ),
        _checks(results),
        _legend(palette) if comparisons else "<p>There are no runs, so there are no results.</p>",
        *(_setting(list(group), results, palette) for _, group in _settings(comparisons)),
        _costs(results, palette) if results else "",
        _definitions(),
        _provenance(results, command),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + f"\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _settings(
    comparisons: Sequence[Comparison],
) -> "groupby[tuple[str, str], Comparison]":
    return groupby(comparisons, key=lambda c: (c.workload, c.engine))


def _header(title: str, comparisons: Sequence[Comparison], scope: Sequence[str]) -> str:
    lines = []
    for (workload, engine), group in _settings(comparisons):
        blocks = list(group)
        seeds = sorted({seed for c in blocks for line in c.lines for seed in line.seeds})
        loads = "; ".join(
            f"{c.load:g}% load, {max(line.turns // len(line.seeds) for line in c.lines):,} turns"
            for c in blocks
        )
        lines.append(
            f"<p class='lead'><b>{escape(workload)}</b> on {escape(engine)}: {escape(loads)}; "
            f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}.</p>"
        )
    lines += [f"<p class='lead'>{escape(line)}.</p>" for line in scope]
    return f"<header>\n<h1>{escape(title)}</h1>\n{''.join(lines)}\n</header>"


def _checks(results: Sequence[RunResult]) -> str:
    checks = check(results)
    notes = "".join(
        f"<li>{escape(note)}</li>" for note in notes_of([result.row for result in results])
    )
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in checks.problems)
    kind, word = ("passed", "Self-checks passed") if checks.passed else ("broken", "Broken promise")
    return (
        f'<section class="checks {kind}"><p><b>{word}:</b> {escape(checks.summary)}.</p>'
        f"{f'<ul>{problems}</ul>' if problems else ''}"
        f"{f'<ul>{notes}</ul>' if notes else ''}</section>"
    )


def _legend(palette: Palette) -> str:
    """The policies and their colours; the script makes switches of them."""
    chips = "".join(
        f'<li><label><input type="checkbox" checked hidden data-key="{palette.keys[policy]}">'
        f'<svg class="swatch" width="22" height="10" aria-hidden="true"><line class="curve '
        f'{palette.styles[policy]}" x1="1" x2="21" y1="5" y2="5"/></svg>'
        f"{escape(spell(policy))}</label></li>"
        for policy in palette.styles
    )
    return f'<nav class="legend" aria-label="Policies"><ul>{chips}</ul></nav>'


def _setting(group: Sequence[Comparison], results: Sequence[RunResult], palette: Palette) -> str:
    """All that is shown of one workload on one engine."""
    drawn = scenes(group, results)
    seeds = sorted({scene.seed for scene in drawn})
    seed = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    absent = sorted({spell(policy) for scene in drawn for policy in scene.absent})
    shown = f" Shown: {seed}" + (f" (not run with it: {', '.join(absent)})." if absent else ".")
    return "\n".join(
        (
            f"<section>\n<h2>{escape(group[0].workload)} on {escape(group[0].engine)}</h2>",
            best_of_each_load(group),
            results_table(group, palette),
            _figure(
                "KV reuse and GPU KV occupancy",
                "Left: how much of the prompts of follow-up turns came out of the cache; longer "
                "is better. Right: GPU blocks that running requests use (solid) and blocks that "
                "hold KV for later (light), on average over the run. A policy that reuses more "
                "at the same occupancy keeps the right blocks, not more of them.",
                panels(
                    (
                        ("KV reuse of follow-up turns, %", reuse_chart(group, palette)),
                        (
                            "GPU KV blocks, %: in use + cached",
                            occupancy_chart(group, results, palette),
                        ),
                    ),
                    columns=2,
                    names=[spell(line.policy) for comparison in group for line in comparison.lines],
                ),
                paper="Figure 3",
            ),
            _figure(
                "Time to first token",
                "How many of the served turns had their first token within a time. The axis of "
                "time is logarithmic. A curve further to the left is faster; where curves cross, "
                "one policy is better for most turns and worse for the slowest." + shown,
                panels(ttft_distributions(drawn, palette), len(drawn))
                + '<p class="axis-name">time to first token, s (log)</p>',
            ),
            _figure(
                "The engine over time",
                "Look at the queue first: where it grows, arrivals outrun service, and the policy "
                "decides who waits. More KV restored means more was found again in a slower tier. "
                "Lines are means over short stretches of time, shades reach from the lowest to the "
                "highest of each. Scales differ between loads." + shown,
                panels(over_time(drawn, palette), len(drawn))
                + '<p class="axis-name">time since the start, s</p>',
                paper="Figure 5",
            ),
            _timelines(drawn, palette, shown),
            _engines(drawn, palette, shown),
            "</section>",
        )
    )


def _figure(title: str, caption: str, content: str, paper: str = "") -> str:
    source = f' <span class="source">after {paper} of the paper</span>' if paper else ""
    return (
        f"<figure>\n<figcaption><h3>{escape(title)}{source}</h3><p>{escape(caption)}</p>"
        f"</figcaption>\n{content}\n</figure>"
    )


def _timelines(drawn: Sequence[Scene], palette: Palette, shown: str) -> str:
    blocks = []
    for index, scene in enumerate(reversed(drawn)):
        sessions = choose_sessions(scene)
        charts = "".join(
            f'<div class="panel policy {style}"><h4>{escape(title)}</h4>{chart}</div>'
            for style, title, chart in timelines(scene, sessions, palette)
        )
        total = len({turn.session for run in scene.runs.values() for turn in run.turns})
        blocks.append(
            f"<details{' open' if index == 0 else ''}><summary>{escape(scene.load)}: "
            f"{len(sessions)} of {total} sessions</summary>{charts}"
            '<p class="axis-name">time since the start, s</p></details>'
        )
    key = (
        '<ul class="key"><li><i class="queue"></i>waiting in the queue</li>'
        '<li><i class="service"></i>in service: prefill and decode</li>'
        '<li><i class="gap"></i>away: between turns</li>'
        '<li><i class="refused"></i>turn not served</li></ul>'
    )
    return _figure(
        "Sessions over time",
        "Each row is one session, the same rows in the same order under every policy, from its "
        "first turn to its last. What differs between policies is how long the rows wait and "
        "which of them do. Sessions are picked evenly over their arrivals, among those of "
        "several turns where there are enough." + shown,
        key + "".join(blocks),
        paper="Figure 4",
    )


def _engines(drawn: Sequence[Scene], palette: Palette, shown: str) -> str:
    table = engines_table(drawn, palette)
    if not table:
        return ""
    return _figure(
        "How the engines shared the work",
        "The share of all prompt tokens that went to each engine, and what of the prompts of "
        "follow-up turns it found in its own cache. A session whose turns are spread over engines "
        "finds little." + shown,
        table,
    )


def _costs(results: Sequence[RunResult], palette: Palette) -> str:
    return (
        '<section><h2>What the protocol cost <span class="source">after Table 7 of the paper'
        "</span></h2><p>Messages on the bus by category, decisions and controls of the policies, "
        "and wall time inside policy code, over all runs of a policy. The share is of the wall "
        "time of the whole replay, which runs on a virtual clock and so is much shorter than what "
        f"it replays.</p>{cost_table(results, palette)}</section>"
    )


def _definitions() -> str:
    items = "".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in DEFINITIONS
    )
    return f"<section><h2>What the words mean</h2><dl>{items}</dl></section>"


def _provenance(results: Sequence[RunResult], command: str) -> str:
    made = f"<pre><code>{escape(command)}</code></pre>" if command else ""
    return (
        f"<section><h2>How this page was made</h2>{made}<p>{len(results)} runs. Every policy "
        "replays the same workload: arrivals, lengths, prefixes and think times are the same "
        "under each.</p></section>"
    )
