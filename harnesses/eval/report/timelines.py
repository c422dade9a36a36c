"""Sessions over time, each a row: waiting in the queue, in service, away (paper, Figure 4)."""

from collections.abc import Iterator, Sequence
from typing import Final

from hear.harnesses.eval.report.charts import SPAN, Scale, escape, number, short, stretched, x_axis
from hear.harnesses.eval.report.comparison import spell
from hear.harnesses.eval.report.figures import Palette, Scene, until_last
from hear.harnesses.eval.report.results import TurnRecord

SESSIONS: Final = 32
ROW: Final = 6
"""Height of a row in pixels."""

Stretch = tuple[float, float]


def choose_sessions(scene: Scene, count: int = SESSIONS) -> list[str]:
    """At most ``count`` sessions, evenly spread over their arrivals.

    Those with several turns if there are enough of them, since a session of one turn shows
    nothing of what comes between turns. The same sessions are shown under every policy.
    """
    first: dict[str, float] = {}
    turns: dict[str, int] = {}
    for run in scene.runs.values():
        numbers: dict[str, int] = {}
        for turn in run.turns:
            first[turn.session] = min(turn.sent_s, first.get(turn.session, turn.sent_s))
            numbers[turn.session] = numbers.get(turn.session, 0) + 1
        for session, number_of_turns in numbers.items():
            turns[session] = max(number_of_turns, turns.get(session, 0))
    ordered = sorted(first, key=lambda session: (first[session], session))
    several = [session for session in ordered if turns[session] > 1]
    pool = several if len(several) >= count else ordered
    if len(pool) <= count:
        return pool
    return [pool[round(index * (len(pool) - 1) / (count - 1))] for index in range(count)]


def timelines(
    scene: Scene, sessions: Sequence[str], palette: Palette
) -> Iterator[tuple[str, str, str]]:
    """Style, title and chart of each policy's panel, all over the same stretch of time."""
    wanted = set(sessions)
    shown = {
        policy: [turn for turn in run.turns if turn.session in wanted]
        for policy, run in scene.runs.items()
    }
    ends = (max(turn.sent_s, turn.finished_s) for turns in shown.values() for turn in turns)
    x = until_last(ends)
    for policy, turns in shown.items():
        by_session: dict[str, list[TurnRecord]] = {session: [] for session in sessions}
        for turn in turns:
            by_session[turn.session].append(turn)
        yield palette[policy], spell(policy), _panel(spell(policy), by_session, x)


def _panel(policy: str, sessions: dict[str, list[TurnRecord]], x: Scale) -> str:
    height = max(1, len(sessions)) * ROW
    rows = "".join(
        _row(session, sorted(turns, key=lambda turn: (turn.sent_s, turn.turn)), index, x)
        for index, (session, turns) in enumerate(sessions.items())
    )
    label = f"Timeline of {len(sessions)} sessions under {policy}"
    return (
        f'<svg class="plot timeline" role="img" aria-label="{escape(label)}" width="100%" '
        f'height="{height}">{x_axis(x, height, short, 8, grid=True)}{stretched(rows, height)}</svg>'
    )


def _row(session: str, turns: Sequence[TurnRecord], index: int, x: Scale) -> str:
    queue: list[Stretch] = []
    service: list[Stretch] = []
    gap: list[Stretch] = []
    refused: list[Stretch] = []
    until: float | None = None
    for turn in turns:
        if until is not None and turn.sent_s > until:
            gap.append((until, turn.sent_s))
        if turn.status == "completed":
            if (x(turn.started_s) - x(turn.sent_s)) * SPAN >= 0.3:
                queue.append((turn.sent_s, turn.started_s))
            service.append((turn.started_s, turn.finished_s))
        else:
            refused.append((turn.sent_s, turn.sent_s))
        until = max(until or 0.0, turn.sent_s, turn.finished_s)
    kinds = {"gap": gap, "queue": queue, "service": service, "refused": refused}
    middle = index * ROW + ROW / 2
    paths = "".join(
        f'<path class="{kind}" d="{"".join(_dash(stretch, middle, x) for stretch in stretches)}"/>'
        for kind, stretches in kinds.items()
        if stretches
    )
    done = [turn for turn in turns if turn.status == "completed"]
    waited = sum(turn.started_s - turn.sent_s for turn in done)
    answered, away = (sum(end - start for start, end in kind) for kind in (service, gap))
    title = (
        f"{session}: {len(turns)} turns, {waited:.1f} s in the queue, {answered:.1f} s in service, "
        f"{away:.1f} s between turns" + (f", {len(refused)} turns not served" if refused else "")
    )
    return (
        f'<g class="session"><title>{escape(title)}</title>'
        f'<rect class="hit" x="0" y="{index * ROW}" width="{SPAN}" height="{ROW}"/>{paths}</g>'
    )


def _dash(stretch: Stretch, y: float, x: Scale) -> str:
    start, end = (x(time) * SPAN for time in stretch)
    return f"M{number(start)} {number(y)}h{number(max(end - start, 0.8))}"
