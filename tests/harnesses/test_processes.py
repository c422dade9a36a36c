"""Runs in processes of their own: results, deaths, and nothing left behind."""

import multiprocessing

import pytest

from hear.harnesses.eval.replay.plan import Run, Source
from hear.harnesses.eval.replay.processes import Finished, run_all


def run(policy: str = "fcfs", *, sessions: int = 2, engine: str = "rtx-pro-6000-qwen3-8b") -> Run:
    source = Source(name="scbench", sessions=sessions)
    return Run(source=source, engine=engine, load=100, policy=policy, seed=1)


def all_of(runs: list[Run], jobs: int) -> list[Finished]:
    finished = list(run_all(runs, jobs, lambda place, done: None))
    assert multiprocessing.active_children() == []
    return sorted(finished, key=lambda one: one.place)


def test_one_that_dies_or_goes_wrong_takes_no_other_along() -> None:
    died, unmakeable, no_engine, fine = all_of(
        [
            run("tests.harnesses.gone_wrong:Dies"),
            run("tests.harnesses.gone_wrong:Unmakeable"),
            run(engine="no-such-engine"),
            run("guard:40"),
        ],
        jobs=2,
    )
    assert (died.result, died.error) == (None, "its process died with exit code 7")
    assert (unmakeable.result, unmakeable.error) == (None, "RuntimeError: only one of me")
    assert no_engine.result is None
    assert no_engine.error.startswith("no engine named 'no-such-engine'")
    assert fine.error == ""
    assert fine.result is not None
    assert fine.result.row.policy == "guard:40"


def test_progress_is_told_by_place() -> None:
    told: dict[int, list[int]] = {0: [], 1: []}

    def progress(place: int, done: int) -> None:
        told[place].append(done)

    finished = list(run_all([run(), run()], 2, progress))
    assert len(finished) == 2
    assert all(counts and counts == sorted(counts) for counts in told.values())


def test_whoever_stops_early_leaves_no_process_behind() -> None:
    runs = run_all([run(), run(sessions=38), run(sessions=38)], 3, lambda place, done: None)
    first = next(runs)
    assert first.place == 0
    assert len(multiprocessing.active_children()) == 2
    runs.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


def test_an_exception_in_the_one_who_watches_leaves_no_process_behind() -> None:
    def progress(place: int, done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_all([run(sessions=38)], 1, progress))
    assert multiprocessing.active_children() == []
