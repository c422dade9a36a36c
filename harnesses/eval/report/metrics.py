"""From the turns of a run to its row of the table."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from hear.harnesses.eval.report.results import Row, TurnRecord


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of sorted values, interpolated between neighbours; 0 of none."""
    if not values:
        return 0.0
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def reuse_pct(turns: Iterable[TurnRecord]) -> float:
    """Reused tokens, of any tier, as a share of prompt tokens."""
    reused = prompt = 0
    for turn in turns:
        reused += sum(turn.reused_tokens.values())
        prompt += turn.prompt_tokens
    return 100 * reused / prompt if prompt else 0.0


def make_row(
    turns: Sequence[TurnRecord],
    *,
    engine_names: Iterable[str] = (),
    notes: Iterable[str] = (),
    **fixed: Any,
) -> Row:
    """Sum up the turns of a run; ``fixed`` are the fields of the row that are known already."""
    served = [turn for turn in turns if turn.status == "completed"]
    by_engine = dict.fromkeys(sorted(engine_names), 0)
    for turn in served:
        by_engine[turn.engine] = by_engine.get(turn.engine, 0) + 1
    idle = [f"{name} served no turn" for name, count in by_engine.items() if served and not count]
    ttfts = sorted(turn.first_token_s - turn.sent_s for turn in served)
    waits: dict[str, float] = {}
    for turn in served:
        waits[turn.session] = waits.get(turn.session, 0.0) + turn.finished_s - turn.sent_s
    begun = min((turn.sent_s for turn in served), default=0.0)
    batch_s = max((turn.finished_s for turn in served), default=0.0) - begun
    return Row(
        turns=len(served),
        ttft_p50_s=_rounded(percentile(ttfts, 50)),
        ttft_p95_s=_rounded(percentile(ttfts, 95)),
        ttft_max_s=_rounded(ttfts[-1] if ttfts else 0.0),
        session_s=_rounded(fmean(waits.values()) if waits else 0.0),
        session_p50_s=_rounded(percentile(sorted(waits.values()), 50)),
        batch_s=_rounded(batch_s),
        turns_per_min=_rounded(60 * len(served) / batch_s if batch_s else 0.0),
        reuse_pct=_rounded(reuse_pct(turn for turn in served if turn.turn > 1)),
        reuse_all_pct=_rounded(reuse_pct(served)),
        rejected=sum(1 for turn in turns if turn.status == "rejected"),
        turns_by_engine=by_engine,
        notes=(*notes, *idle),
        **fixed,
    )


def _rounded(value: float) -> float:
    return round(value, 6)
