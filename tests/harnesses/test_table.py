"""The terminal tables: the paper's form, at any width, whatever the results hold."""

import io
from typing import Any

import pytest
from rich.console import Console  # noqa: TID251, of any width, terminal and encoding

from hear.harnesses.eval.report.comparison import scope_of
from hear.harnesses.eval.report.page import page
from hear.harnesses.eval.report.results import ProtocolCost, Row, RunResult
from hear.harnesses.eval.report.table import cost_table, print_results, results_table, self_checks
from hear.harnesses.eval.workloads.workload import LeftOut


def row(policy: str = "fcfs", **changes: Any) -> Row:
    """A row with the numbers of FCFS at 75% load in the paper's Table 4."""
    fields: dict[str, Any] = {
        "workload": "mooncake",
        "engine": "h100",
        "load": 75.0,
        "policy": policy,
        "seed": 1,
        "turns": 1_926,
        "ttft_p50_s": 10.9,
        "ttft_p95_s": 51.9,
        "ttft_max_s": 56.7,
        "session_s": 50.2,
        "session_p50_s": 40.1,
        "batch_s": 900.0,
        "turns_per_min": 116.4,
        "reuse_pct": 8.0,
        "reuse_all_pct": 5.0,
        "rejected": 0,
        "guard_violations": 0,
        "operations": {},
        "operations_open": 0,
    }
    return Row(**{**fields, **changes})


def result(policy: str = "fcfs", problems: tuple[str, ...] = (), **changes: Any) -> RunResult:
    """A run without turns or samples, which the tables don't look at."""
    cost = ProtocolCost(
        messages={"intent": 5_000, "control": 1_234, "state": 25_000, "outcome": 2_000},
        decisions={"cache-aware": 400},
        controls={"prioritise": 1_234},
        decide_s={"cache-aware": 0.02},
        run_s=10.0,
    )
    return RunResult(row=row(policy, **changes), turns=(), samples=(), cost=cost, problems=problems)


def shown(*what: Any, width: int = 200, terminal: bool = False, encoding: str = "utf-8") -> str:
    """What a console of that width prints, without trailing blanks."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    Console(file=file, width=width, force_terminal=terminal, color_system=None).print(*what)
    file.flush()
    return "\n".join(line.rstrip() for line in raw.getvalue().decode(encoding).splitlines())


def line_of(text: str, policy: str) -> str:
    """The one line that starts with ``policy``."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith(f"{policy}  "))
    return line


def test_each_value_stands_beside_its_ratio_to_fcfs_and_above_one_is_better() -> None:
    text = shown(results_table([row(), row("session-aware", ttft_p50_s=8.2, turns_per_min=121.0)]))
    assert line_of(text, "fcfs").split()[1:3] == ["10.9", "x1.00"]
    words = line_of(text, "session-aware").split()
    assert words[1:3] == ["8.2*", "x1.33"]  # a shorter time and a greater rate are both better
    assert words[9:11] == ["121.0*", "x1.04"]


def test_a_worse_value_has_a_ratio_below_one() -> None:
    text = shown(results_table([row(), row("guard:40", ttft_max_s=70.0)]))
    assert line_of(text, "guard:40").split()[5:7] == ["70.0", "x0.81"]


def test_one_row_alone_is_compared_with_itself_and_is_not_called_best() -> None:
    text = shown(results_table([row()]))
    assert "10.9" in text
    assert "*" not in text
    assert "times better" not in text


def test_without_fcfs_there_are_no_ratios() -> None:
    text = shown(results_table([row("cache-aware"), row("guard:40", ttft_p50_s=9.0)]))
    assert "x1" not in text
    assert "fcfs" not in text
    assert "9.0*" in text


def test_with_several_engines_ratios_are_to_round_robin_if_fcfs_was_not_run() -> None:
    four = {"engines": 4, "ttft_p50_s": 8.0}
    rows = [row("least-loaded", **four), row("round-robin", **{**four, "ttft_p50_s": 10.0})]
    text = shown(results_table(rows))
    assert "mooncake on 4 x h100" in text
    assert line_of(text, "least-loaded").split()[1:3] == ["8.0*", "x1.25"]
    assert "times better than round-robin" in text
    text = shown(results_table([*rows, row("fcfs", engines=4)]))
    assert line_of(text, "round-robin").split()[1:3] == ["10.0", "x1.09"]
    assert "times better than fcfs" in text


def test_rows_of_one_and_of_several_engines_stand_apart() -> None:
    text = shown(results_table([row(), row(engines=4)]))
    assert "mooncake on h100" in text
    assert "mooncake on 4 x h100" in text


def test_several_seeds_are_one_line_of_mean_and_deviation() -> None:
    rows = [row(seed=1), row(seed=2, ttft_p50_s=12.9)]
    rows += [row("cache-aware", seed=1, ttft_p50_s=5.0), row("cache-aware", seed=2, ttft_p50_s=7.0)]
    text = shown(results_table(rows))
    assert line_of(text, "cache-aware").split()[1:4] == ["6.0*", "±1.4", "x1.98"]
    assert "2 seeds" in text


def test_ratios_compare_the_same_seeds_only() -> None:
    rows = [row(seed=1, ttft_p50_s=10.0), row(seed=2, ttft_p50_s=90.0)]
    rows += [row("cache-aware", seed=1, ttft_p50_s=5.0)]
    assert "x2.00" in line_of(shown(results_table(rows)), "cache-aware")
    assert "x" not in line_of(
        shown(results_table([*rows[:2], row("other", seed=3)])), "other"
    ).removeprefix("other")


def test_loads_are_sections_in_ascending_order() -> None:
    text = shown(results_table([row(load=100.0), row(load=50.0)]))
    assert text.index("50% load") < text.index("100% load")


def test_batch_completion_is_shown_for_scbench_alone() -> None:
    assert "batch" not in shown(results_table([row()]))
    assert "batch" in shown(results_table([row(workload="scbench")]))


def test_rejections_and_guard_violations_are_shown_only_if_there_are_any() -> None:
    clean = shown(results_table([row()]))
    assert "rejected" not in clean
    assert "guard" not in clean
    text = shown(results_table([row(), row("tight", rejected=7, guard_violations=3)]))
    assert "rejected" in text
    assert line_of(text, "tight").split()[-2:] == ["7", "3"]


def test_a_run_that_served_nothing_shows_dashes_and_is_never_best() -> None:
    nothing = row("stuck", turns=0, ttft_p50_s=0.0, ttft_p95_s=0.0, ttft_max_s=0.0)
    words = line_of(shown(results_table([row(), nothing])), "stuck").split()
    assert words[1:] == ["-"] * 7


def test_no_rows_are_said_to_be_none() -> None:
    assert shown(results_table([])) == "no runs, so no results"
    print_results([], Console(file=io.StringIO()))


POLICIES = ("fcfs", "cache-aware", "session-aware+cache-aware+guard:40")


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("workload", ["mooncake", "scbench"])
def test_at_any_width_no_value_is_cut(width: int, seeds: int, workload: str) -> None:
    results = [
        result(policy, seed=seed, workload=workload, ttft_p50_s=163.0 + seed, session_s=1256.9)
        for policy in POLICIES
        for seed in range(seeds)
    ]
    text = shown(
        results_table([r.row for r in results]), cost_table(results), width=width, terminal=True
    )
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert text.count("x1.00") == len(POLICIES) * (8 if workload == "scbench" else 7)
    assert "1,256.9" in text
    assert text.count(" 0.20") == len(POLICIES)  # the last column of the costs


def test_a_narrow_terminal_stacks_the_ratio_under_its_value() -> None:
    text = shown(results_table([row(), row("cache-aware")]), width=80, terminal=True)
    assert "10.9 x1.00" not in text
    assert "x1.00" in text


def test_piped_output_has_no_colours_and_one_line_a_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_results([result(), result("session-aware+cache-aware+guard:40", ttft_p50_s=8.2)])
    text = capsys.readouterr().out
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if "guard:40" in line]
    assert len(lines) == 2  # one in the results, one in the costs
    assert "8.2* x1.33" in lines[0]


def test_output_that_cannot_hold_a_sign_gets_another() -> None:
    text = shown(results_table([row(seed=1), row(seed=2)]), encoding="ascii")
    assert "+-0.0" in text


def test_names_are_never_read_as_markup_or_control() -> None:
    text = shown(results_table([row("[red]x[/red]\x1b[2J\nnext", workload="[/]<script>")]))
    assert "[red]x[/red]\\x1b[2J\\nnext" in text
    assert "[/]<script>" in text


def test_the_cost_table_adds_up_the_runs_of_a_policy() -> None:
    words = line_of(
        shown(cost_table([result("cache-aware"), result("cache-aware")])), "cache-aware"
    )
    assert words.split()[1:] == [
        *("10,000", "2,468", "50,000", "4,000"),  # messages by category
        *("800", "2,468", "40.0", "50.0", "0.20"),
    ]


def test_a_policy_that_never_decides_has_no_time_a_decision() -> None:
    idle = RunResult(row=row(), turns=(), samples=(), cost=ProtocolCost())
    assert line_of(shown(cost_table([idle])), "fcfs").split()[-2:] == ["-", "-"]


def test_self_checks_pass_in_one_line_with_the_outcomes_counted() -> None:
    runs = [result(operations={"completed": 3, "failed": 1}), result(operations={"completed": 2})]
    text = self_checks(runs)
    assert text.plain == (
        "every operation ended in exactly one outcome: 6 operations (completed 5, failed 1), "
        "open 0; guard violations 0"
    )
    assert text.style == "green"


def test_self_checks_say_in_red_what_is_wrong_and_where() -> None:
    broken = result(
        "guard:40",
        problems=("2 operations have no terminal outcome",),
        operations_open=2,
        guard_violations=1,
        policy_failures=("guard: ZeroDivisionError",),
    )
    text = self_checks([result(), broken])
    assert text.style == "bold red"
    assert "not every operation ended: 2 operations, open 2; guard violations 1" in text.plain
    assert "guard:40, seed 1: 2 operations have no terminal outcome" in text.plain
    assert "policy failed: guard: ZeroDivisionError" in text.plain


def test_a_guard_violation_alone_fails_the_self_checks() -> None:
    assert self_checks([result(guard_violations=1)]).style == "bold red"


def test_a_line_says_what_was_replayed_and_what_was_left_out_and_why() -> None:
    left_out = LeftOut(
        why="of more than 40,960 tokens each",
        turns=160,
        sessions=112,
        prompt_tokens=30,
        of_prompt_tokens=100,
    )
    results = [
        result(policy, load=load, turns=turns, sessions=9, left_out=(left_out,), remarks=("so so",))
        for policy in POLICIES
        for load, turns in ((50.0, 1_300), (100.0, 2_568))
    ]
    line = (
        "mooncake: 1,300 turns of 9 sessions at 50%, 2,568 turns of 9 sessions at 100%; left out "
        "of the source: 160 turns (30% of its prompt tokens), of more than 40,960 tokens each, and "
        "so all of 112 sessions; so so"
    )
    assert scope_of([r.row for r in results]) == (line,)
    raw = io.StringIO()
    print_results(results, Console(file=raw, width=80, color_system=None))
    assert line in raw.getvalue()
    assert line in page(results)
