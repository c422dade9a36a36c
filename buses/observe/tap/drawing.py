"""Pictures as coloured text: bars, timelines, decisions. It knows no screen and keeps nothing."""

from collections.abc import Iterable, Sequence
from typing import Final

from rich.text import Text

from hear.buses.observe.tap.board import EnginePicture, Picture, TierPicture
from hear.buses.observe.tap.decisions import DecisionPicture, PolicyPicture
from hear.buses.observe.tap.lines import clock_time
from hear.buses.observe.tap.timelines import Phase, RequestPicture
from hear.escaping import cell, one_line

_BAR = 20
_OLD_S, _LOST_S = 5.0, 30.0
_DECISIONS_SHOWN = 6
SPANS_S: Final = (5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14_400.0, 86_400.0)
"""What a timeline may span, in seconds."""

PHASES: Final[dict[Phase, tuple[str, str]]] = {
    "queue": ("░", "yellow"),
    "running": ("▒", "cyan"),
    "prefill": ("▓", "blue"),
    "decode": ("█", "green"),
}
"""Character and colour of each phase of a request."""
NOW: Final = "│"

_STATUS_STYLES = {
    "waiting": "yellow",
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "rejected": "red",
    "unsupported": "red",
    "sent": "dim",
}


def status_style(status: str) -> str:
    """The colour of a status."""
    return _STATUS_STYLES.get(status, "")


# -- engines ----------------------------------------------------------------------------------


def engines(picture: Picture) -> Text:
    """The pane of engines."""
    if not picture.engines:
        return Text("no engine has said anything yet", "dim")
    return Text("\n\n").join(_engine(engine) for engine in picture.engines)


def _engine(engine: EnginePicture) -> Text:
    head = Text(cell(engine.name), "bold")
    head.append(f"  {cell(engine.model)}  epoch {engine.epoch}  ", "dim")
    head.append(_age(engine.age_s), _age_style(engine.age_s))
    if engine.gaps:
        head.append(f"  {engine.gaps} gaps", "yellow")
    lines = [head, _queue(engine)]
    lines += [_tier(tier) for tier in engine.tiers]
    if engine.residency_known:
        lines.append(Text(f"residency {engine.num_blocks:,} blocks"))
    elif engine.residency_partial:
        lines.append(Text(f"residency {engine.num_blocks:,} blocks, others unknown", "yellow"))
    else:
        lines.append(Text("residency unknown", "yellow"))
    return Text("\n").join(lines)


def _queue(engine: EnginePicture) -> Text:
    if engine.num_waiting is None:
        return Text("queue unknown", "yellow")
    said = f"queue {engine.num_waiting} waiting  {engine.num_running} running"
    if engine.preemptions:
        said += f"  {engine.preemptions} preemptions"
    if engine.backlog_s >= 0.05:
        said += f"  {engine.backlog_s:.1f} s to load"
    return Text(said)


def _tier(tier: TierPicture) -> Text:
    used = _share(tier.used, tier.num_blocks)
    full = _share(tier.used + tier.cached, tier.num_blocks)
    num_used, num_full = round(used * _BAR), round(full * _BAR)
    bar = Text(f"{cell(tier.tier):4} ")
    bar.append("█" * num_used, "green" if full < 0.9 else "yellow" if full < 0.98 else "red")
    bar.append("▒" * (num_full - num_used), "cyan")
    bar.append("░" * (_BAR - num_full), "dim")
    bar.append(f" {full:4.0%} ")
    bar.append(f"{tier.used:,} used {tier.cached:,} cached of {tier.num_blocks:,}", "dim")
    if tier.held is not None:
        bar.append(f", holds {tier.held:,}", "dim")
    return bar


def _share(part: int, whole: int) -> float:
    return min(part / whole, 1.0) if whole else 0.0


def _age(age_s: float | None) -> str:
    if age_s is None:
        return "never heard"
    return f"{age_s:.1f} s ago" if age_s < 60 else f"{age_s / 60:.0f} min ago"


def _age_style(age_s: float | None) -> str:
    if age_s is None or age_s >= _LOST_S:
        return "bold red"
    return "yellow" if age_s >= _OLD_S else "dim"


# -- requests ---------------------------------------------------------------------------------


def span_s(requests: Iterable[RequestPicture], now: float) -> float:
    """What the timelines have to span so that all that is at an engine now fits in."""
    oldest = min(
        (r.stretches[0].start_s for r in requests if r.active and r.stretches), default=now
    )
    return next((span for span in SPANS_S if now - oldest <= span), SPANS_S[-1])


def timeline(request: RequestPicture, now: float, span: float, width: int) -> Text:
    """The last ``span`` seconds of a request in ``width`` characters; the last one is now."""
    columns = max(width - 1, 1)
    cells: list[Phase | None] = [None] * columns
    begin = now - span
    for stretch in request.stretches:
        end_s = now if stretch.end_s is None else stretch.end_s
        first = int((stretch.start_s - begin) / span * columns)
        last = int((end_s - begin) / span * columns)
        for column in range(max(first, 0), min(max(last, first + 1), columns)):
            cells[column] = stretch.phase  # of phases that share a column, the later
    text = Text(no_wrap=True)
    for phase in cells:
        text.append(*(PHASES[phase] if phase is not None else (" ", "")))
    text.append(NOW, "bold" if request.active else "dim")
    return text


def legend(span: float) -> Text:
    """What the characters of the timelines mean."""
    text = Text(f"last {span:g} s: ")
    for phase, (character, style) in PHASES.items():
        text.append(character, style)
        text.append(f" {phase}  ")
    text.append(f"{NOW} now")
    return text


# -- policies ---------------------------------------------------------------------------------


def policies(picture: Picture, shown: int = _DECISIONS_SHOWN) -> Text:
    """The pane of decisions, the newest of each policy first."""
    if not picture.policies:
        return Text("no policy has asked for anything yet", "dim")
    return Text("\n\n").join(_policy(policy, shown) for policy in picture.policies)


def _policy(policy: PolicyPicture, shown: int) -> Text:
    head = Text(cell(policy.name), "bold")
    head.append(f"  {policy.asked:,} asked", "dim")
    for status, number in policy.outcomes:
        head.append(f"  {number:,} {status}", status_style(status))
    return Text("\n").join([head, *map(_decision, policy.decisions[:shown])])


def _decision(decision: DecisionPicture) -> Text:
    text = Text(f"{clock_time(decision.time_s)[:8]} ", "dim")
    text.append(f"{cell(decision.engine)}: " if decision.engine else "", "dim")
    text.append(one_line(decision.asks))
    text.append(f" ({one_line(decision.reason)})" if decision.reason else "", "dim")
    text.append(f" {decision.status}", status_style(decision.status))
    text.append(
        f": {one_line(decision.why)}" if decision.why else "",
        status_style(decision.status),
    )
    return text


# -- the whole bus ----------------------------------------------------------------------------


def traffic(picture: Picture, *, paused: bool) -> Text:
    """The line of message rates."""
    text = Text("PAUSED  " if paused else "", "bold reverse")
    text.append(f"{clock_time(picture.now)[:8]}  ", "dim not bold not reverse")
    text.append(
        "  ".join(f"{cell(name)} {rate:,.1f}/s" for name, rate in picture.rates),
        "not reverse",
    )
    text.append(f"  {picture.num_messages:,} messages", "dim not bold not reverse")
    text.append(
        f"  contexts {picture.num_contexts:,} ({picture.num_paused:,} paused)",
        "dim not bold not reverse",
    )
    return text


def losses(picture: Picture, warning: str = "") -> Text:
    """The line of what was lost, the last loss, and the last warning of the bus itself."""
    counted: Sequence[tuple[str, int]] = (
        ("gaps", picture.gaps),
        ("missed", picture.missed),
        ("dropped", picture.dropped),
        ("cut off", picture.times_cut_off),
        ("unreadable", picture.unreadable),
        ("of unknown kind", picture.unknown),
    )
    text = Text("lost: ", "dim")
    bad = [f"{number:,} {name}" for name, number in counted if number]
    text.append("  ".join(bad) or "nothing", "yellow" if bad else "dim")
    if picture.losses:
        last = picture.losses[-1]
        text.append(
            f"  (last: {last.missed:,} on {cell(last.stem)} from {cell(last.source)})",
            "dim",
        )
    if warning:
        text.append(f"  {warning}", "yellow")
    return text
