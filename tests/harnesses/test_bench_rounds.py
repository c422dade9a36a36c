"""Rounds of arms: their order, and medians of what was measured within each."""

from io import StringIO
from typing import Any

from hear.app.console import Console
from hear.harnesses.eval.bench.rounds import order, pair, print_pairs
from hear.harnesses.eval.report.results import Row

ARMS = ["fcfs", "cache-aware"]


def row(policy: str, **changes: Any) -> Row:
    fields: dict[str, Any] = {
        "workload": "w",
        "engine": "e",
        "load": 100.0,
        "policy": policy,
        "seed": 1,
        "turns": 70,
        "rejected": 0,
        "guard_violations": 0,
        "operations": {},
        "operations_open": 0,
    }
    fields |= dict.fromkeys(("ttft_p50_s", "ttft_p95_s", "ttft_max_s", "session_s"), 4.0)
    fields |= dict.fromkeys(("session_p50_s", "batch_s", "turns_per_min"), 4.0)
    fields |= dict.fromkeys(("reuse_pct", "reuse_all_pct"), 10.0)
    return Row(**fields | changes)


def test_each_round_begins_with_another_arm_and_serves_all() -> None:
    arms = ["a", "b", "c"]
    assert [order(arms, n) for n in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_ratios_are_taken_within_a_round_and_their_median_is_told() -> None:
    rounds = [
        [row("fcfs", ttft_p50_s=4.0), row("cache-aware", ttft_p50_s=1.0)],
        [row("cache-aware", ttft_p50_s=4.0), row("fcfs", ttft_p50_s=8.0)],
        [row("fcfs", ttft_p50_s=9.0), row("cache-aware", ttft_p50_s=3.0)],
    ]
    found = {(p.policy, p.metric): p for p in pair(rounds, ARMS)}
    mine = found["cache-aware", "ttft_p50_s"]
    assert (mine.median, mine.ratio, mine.lowest, mine.highest) == (3.0, 3.0, 2.0, 4.0)
    assert found["fcfs", "ttft_p50_s"].ratio == 1.0
    assert found["fcfs", "ttft_p50_s"].rounds == 3


def test_more_is_better_where_it_is() -> None:
    rounds = [[row("fcfs", reuse_pct=10.0), row("cache-aware", reuse_pct=60.0)]]
    found = {(p.policy, p.metric): p for p in pair(rounds, ARMS)}
    assert found["cache-aware", "reuse_pct"].ratio == 6.0


def test_a_round_without_the_baseline_gives_values_and_no_ratio() -> None:
    rounds = [[row("cache-aware", ttft_p50_s=1.0)]]
    (mine,) = [p for p in pair(rounds, ARMS) if p.metric == "ttft_p50_s"]
    assert (mine.median, mine.ratio) == (1.0, None)


def test_no_rounds_give_nothing() -> None:
    assert pair([], ARMS) == []
    assert pair([[]], ARMS) == []


def test_the_table_says_median_ratio_and_range() -> None:
    rounds = [
        [row("fcfs"), row("cache-aware", ttft_p50_s=1.0)],
        [row("fcfs"), row("cache-aware", ttft_p50_s=2.0)],
    ]
    out = StringIO()
    print_pairs(pair(rounds, ARMS), Console(width=160, file=out))
    text = out.getvalue()
    assert "1.50 x3.00" in text
    assert "(2.00-4.00)" in text
