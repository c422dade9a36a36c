"""The page of a replay: what stands on it, that it is whole, safe, small and always the same."""

import math
import random
import re
from collections.abc import Sequence
from heapq import heappop, heappush
from html.parser import HTMLParser
from pathlib import Path
from statistics import quantiles
from typing import Any
from xml.etree import ElementTree

import pytest
from msgspec import structs

from hear.harnesses.eval.report.comparison import compare
from hear.harnesses.eval.report.figures import distribution, occupancy, scenes
from hear.harnesses.eval.report.page import page, write_report
from hear.harnesses.eval.report.page_tables import TIMES
from hear.harnesses.eval.report.results import ProtocolCost, Row, RunResult, Sample, TurnRecord
from hear.harnesses.eval.report.timelines import choose_sessions

POLICIES = (
    "fcfs",
    "cache-aware",
    "cache-aware+guard",
    "session-aware",
    "session-aware+cache-aware+guard",
)


def synthetic(
    policy: str = "fcfs",
    *,
    load: float = 100.0,
    seed: int = 0,
    sessions: int = 40,
    samples: int = 300,
    workload: str = "mooncake",
    rejected: int = 0,
) -> RunResult:
    """A run of a toy engine of eight slots; like a real one in shape, not in its numbers."""
    rng = random.Random(f"{seed}")
    reuse = 0.1 + 0.3 * ("session" in policy) + 0.2 * ("cache" in policy)
    pace = 100.0 / load / (1 + reuse)
    waiting: list[tuple[float, float, str, int]] = []
    for index in range(sessions):
        start = rng.uniform(0, 600)
        heappush(waiting, (start, start, f"session-{index:03}", 0))
    slots = [0.0] * 8
    turns: list[TurnRecord] = []
    while waiting:
        _, sent, session, turn = heappop(waiting)
        free = heappop(slots)
        started = max(sent, free)
        prefill = rng.uniform(1, 12) * 40 / sessions * 5 / pace / 4 / (1 + 2 * reuse)
        finished = started + prefill + rng.uniform(1, 20)
        heappush(slots, finished)
        prompt = rng.randrange(2_000, 30_000)
        turns.append(
            TurnRecord(
                request=f"{session}/{turn}",
                session=session,
                turn=turn,
                sent_s=sent,
                started_s=started,
                first_token_s=started + prefill,
                finished_s=finished,
                prompt_tokens=prompt,
                output_tokens=200,
                reused_tokens={"gpu": int(prompt * reuse)},
            )
        )
        if rng.random() < 0.7:
            again = finished + rng.expovariate(1 / 40)
            urgency = 30 * reuse if "cache" in policy else 0
            heappush(waiting, (again - urgency, again, session, turn + 1))
    turns += [
        TurnRecord(
            request=f"r{n}", session="late", turn=n, sent_s=5.0, status="rejected", reason="full"
        )
        for n in range(rejected)
    ]
    return RunResult(
        row=_row(policy, load, seed, workload, turns, reuse * 100),
        turns=tuple(turns),
        samples=_samples(turns, samples, reuse),
        cost=ProtocolCost(
            messages={"intent": 4 * len(turns), "control": 900, "state": 5_000, "outcome": 3_000},
            decisions={} if policy == "fcfs" else {name: 400 for name in policy.split("+")},
            controls={} if policy == "fcfs" else {"prioritise": 700, "bound_wait": 200},
            decide_s={} if policy == "fcfs" else {name: 0.02 for name in policy.split("+")},
            run_s=12.5,
        ),
    )


def _row(
    policy: str,
    load: float,
    seed: int,
    workload: str,
    turns: Sequence[TurnRecord],
    reuse_pct: float,
) -> Row:
    served = [turn for turn in turns if turn.status == "completed"]
    ttft = [turn.first_token_s - turn.sent_s for turn in served]
    cuts = quantiles(ttft, n=20, method="inclusive") if len(ttft) > 1 else [0.0] * 19
    last = max((turn.finished_s for turn in served), default=0.0)
    waits = sum(turn.finished_s - turn.sent_s for turn in served)
    return Row(
        workload=workload,
        engine="simulated",
        load=load,
        policy=policy,
        seed=seed,
        turns=len(turns),
        ttft_p50_s=cuts[9],
        ttft_p95_s=cuts[18],
        ttft_max_s=max(ttft, default=0.0),
        session_s=waits / max(1, len({turn.session for turn in served})),
        session_p50_s=waits / max(1, len({turn.session for turn in served})),
        batch_s=last,
        turns_per_min=len(served) / last * 60 if last else 0.0,
        reuse_pct=reuse_pct,
        reuse_all_pct=reuse_pct * 0.8,
        rejected=len(turns) - len(served),
        guard_violations=0,
        operations={} if policy == "fcfs" else {"completed": 800, "failed": 100},
        operations_open=0,
    )


def _samples(turns: Sequence[TurnRecord], count: int, reuse: float) -> tuple[Sample, ...]:
    end = max((turn.finished_s for turn in turns), default=0.0)
    served = [turn for turn in turns if turn.finished_s]
    samples = []
    for index in range(count):
        now = end * index / max(1, count - 1)
        running = sum(turn.started_s <= now < turn.finished_s for turn in served)
        used = min(1.0, running / 8 * (0.9 + 0.1 * math.sin(index)))
        samples.append(
            Sample(
                time_s=now,
                waiting=sum(turn.sent_s <= now < turn.started_s for turn in served),
                running=running,
                gpu_used=used,
                gpu_cached=(1 - used) * min(1.0, now / 100),
                restored_tokens=int(now * 2_000 * reuse),
            )
        )
    return tuple(samples)


class Outline(HTMLParser):
    """What a browser sees: every start tag with its attributes, and that tags are nested."""

    VOID = frozenset({"meta", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def svgs(text: str) -> list[ElementTree.Element]:
    """The charts of a page, read as XML."""
    whole = re.compile(r'<svg class="(?:plot|swatch).*?</svg>(?=</div>|[^<])', re.DOTALL)
    return [ElementTree.fromstring(match.group()) for match in whole.finditer(text)]


@pytest.fixture(scope="module")
def results() -> list[RunResult]:
    """Two loads under five policies."""
    return [synthetic(policy, load=load) for load in (50.0, 100.0) for policy in POLICIES]


def test_the_page_holds_every_part_and_its_tags_are_nested(results: list[RunResult]) -> None:
    outline = Outline(page(results, command="hear replay mooncake --load 50,100"))
    assert outline.open == []
    text = " ".join(outline.text)
    for part in (
        "Self-checks passed",
        "KV reuse and GPU KV occupancy",
        "Time to first token",
        "The engine over time",
        "Sessions over time",
        "What the protocol cost",
        "What the words mean",
        "hear replay mooncake --load 50,100",
    ):
        assert part in text


def test_every_chart_is_well_formed_and_says_in_words_what_it_shows(
    results: list[RunResult],
) -> None:
    charts = [svg for svg in svgs(page(results)) if "plot" in svg.attrib["class"]]
    # bars; distribution and three series by load; a timeline by load and policy
    assert len(charts) == 2 + 2 * (1 + 3) + 2 * len(POLICIES)
    assert all(chart.attrib["aria-label"] for chart in charts)


def test_nothing_is_loaded_from_elsewhere(results: list[RunResult]) -> None:
    text = page(results)
    for _, attributes in Outline(text).tags:
        assert not {"src", "href", "action", "data", "poster"} & attributes.keys()
    assert "@import" not in text
    assert "url(" not in text
    assert re.findall(r"https?://[^\"')\s]+", text) == ["http://www.w3.org/2000/svg"]


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one.html", "two.html"):
        write_report([synthetic(policy) for policy in POLICIES], tmp_path / name, command="c")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_the_title_says_what_the_results_are_of(results: list[RunResult]) -> None:
    assert "<title>Replay: " in page(results)
    assert "<title>Bench: " in page(results, title="Bench")
    assert "<title>Bench</title>" in page([], title="Bench")


def test_names_are_shown_and_never_become_tags() -> None:
    hostile = "\"'><script>alert(1)</script>&amp;\x00\ud800"
    run = synthetic("<script>alert(2)</script>", workload=hostile)
    turns = tuple(structs.replace(turn, session=hostile) for turn in run.turns)
    run = structs.replace(
        run,
        turns=turns,
        problems=(f"lost: {hostile}",),
        cost=structs.replace(run.cost, messages={hostile: 1}, controls={hostile: 2}),
    )
    text = page([synthetic(workload=hostile), run], command=hostile)
    outline = Outline(text)
    assert outline.open == []
    assert [tag for tag, _ in outline.tags].count("script") == 1
    assert "<script>alert(2)</script>" in " ".join(outline.text)
    assert svgs(text)
    text.encode()


def test_ratios_stand_beside_their_values_and_the_best_is_marked(results: list[RunResult]) -> None:
    text = page(results)
    assert f'<span class="ratio">{TIMES}1.00</span>' in text
    assert text.count('<td class="best">') >= 2
    assert "how many times better than fcfs" in text


def test_without_fcfs_there_are_no_ratios() -> None:
    text = page([synthetic("cache-aware"), synthetic("session-aware")])
    assert 'class="ratio"' not in text


def test_several_seeds_show_their_deviation_and_one_of_them_over_time() -> None:
    runs = [synthetic(policy, seed=seed) for policy in POLICIES[:2] for seed in (1, 2, 3)]
    text = page([*runs, synthetic("late", seed=2)])
    assert 'class="spread"' in text
    assert "Shown: seed 2." in text  # the one that all policies have run
    assert 'class="whisker"' in text


def test_a_policy_without_the_seed_shown_is_named() -> None:
    runs = [synthetic(seed=1), synthetic("cache-aware", seed=1), synthetic("other", seed=9)]
    assert "not run with it: other" in page(runs)


def test_one_run_alone_makes_a_page() -> None:
    assert Outline(page([synthetic()])).open == []


def test_no_runs_at_all_make_a_page_that_says_so() -> None:
    assert "There are no runs" in page([])


@pytest.mark.parametrize("samples", [0, 1])
def test_a_run_without_a_single_turn_makes_a_page(samples: int) -> None:
    outline = Outline(page([synthetic(sessions=0, samples=samples), synthetic("cache-aware")]))
    assert outline.open == []
    assert "no data" in " ".join(outline.text)


def test_rejected_turns_are_counted_and_marked_on_their_row() -> None:
    text = page([synthetic(rejected=4), synthetic("cache-aware")])
    assert '<td class="count">4</td>' in text
    assert "4 turns not served" in text
    assert '<path class="refused"' in text


def test_broken_promises_are_said_first() -> None:
    run = synthetic("guard:40")
    broken = structs.replace(
        run, problems=("1 operation too many",), row=structs.replace(run.row, operations_open=1)
    )
    text = page([synthetic(), broken])
    assert text.index("Broken promise") < text.index("<table")
    assert "1 operation too many" in text


def test_a_page_of_many_long_runs_stays_small() -> None:
    long = synthetic(sessions=800, samples=200)
    samples = tuple(
        structs.replace(sample, time_s=sample.time_s + part * 0.001)
        for sample in long.samples
        for part in range(100)
    )
    runs = [
        structs.replace(
            long, samples=samples, row=structs.replace(long.row, policy=policy, load=load)
        )
        for policy in POLICIES
        for load in (50.0, 75.0, 100.0)
    ]
    assert len(long.turns) > 2_000
    assert len(page(runs).encode()) < 3_000_000


def test_the_sessions_shown_are_the_same_under_every_policy(results: list[RunResult]) -> None:
    (scene,) = scenes(compare(r.row for r in results if r.row.load == 50), results)
    sessions = choose_sessions(scene, 10)
    assert len(set(sessions)) == 10
    for run in scene.runs.values():
        assert set(sessions) <= {turn.session for turn in run.turns}


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_report([synthetic()], path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_occupancy_is_averaged_over_time_and_not_over_samples() -> None:
    fields: dict[str, Any] = {"waiting": 0, "running": 0, "gpu_cached": 0.5, "restored_tokens": 0}
    samples = [
        Sample(time_s=time, gpu_used=used, **fields)
        for time, used in ((0, 0.0), (9, 1.0), (9.5, 1.0), (10, 1.0))
    ]
    assert occupancy(samples) == pytest.approx((0.1, 0.5))


def test_a_distribution_of_many_turns_keeps_the_longest_wait() -> None:
    values = [0.1] * 5_000 + [99.0]
    points = distribution(values, count=50)
    assert points[-1] == (99.0, 100.0)
    assert points[0] == (0.1, 0.0)
    assert len(points) <= 52
