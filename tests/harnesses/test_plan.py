"""Plans: which runs they hold, that each makes the same workload anywhere, and what is refused."""

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hear.errors import ConfigError
from hear.harnesses.eval.replay.plan import Plan, Run, Source, execute
from hear.harnesses.eval.replay.runner import replay

SMALL = Source(name="scbench", sessions=4)
ENGINE = "rtx-pro-6000-qwen3-8b"


def plan(source: Source = SMALL, **fields: Any) -> Plan:
    given: dict[str, Any] = {
        "engine": ENGINE,
        "loads": (50.0, 100.0),
        "policies": ("fcfs", "guard:40"),
        "seeds": (1, 2),
        **fields,
    }
    return Plan(source=source, **given)


def test_there_is_a_run_for_each_load_policy_and_seed_in_the_order_of_the_table() -> None:
    got = [(run.load, run.policy, run.seed) for run in plan().runs()]
    assert got == [
        (50, "fcfs", 1),
        (50, "fcfs", 2),
        (50, "guard:40", 1),
        (50, "guard:40", 2),
        (100, "fcfs", 1),
        (100, "fcfs", 2),
        (100, "guard:40", 1),
        (100, "guard:40", 2),
    ]
    assert all(run.loop == "open" for run in plan(loop="open").runs())
    assert all(run.engines == 3 for run in plan(engines=3).runs())


def test_every_policy_replays_the_same_workload() -> None:
    workloads = {run.policy: run.workload() for run in plan(loads=(50.0,), seeds=(3,)).runs()}
    assert workloads["fcfs"] == workloads["guard:40"]


def test_a_run_makes_the_same_workload_in_another_process() -> None:
    for run in plan().runs():
        assert pickle.loads(pickle.dumps(run)) == run
        assert msgspec.json.decode(msgspec.json.encode(run), type=Run) == run
        assert run.workload() == run.workload()


def test_turns_are_counted_before_anything_runs() -> None:
    one = plan()
    counts = one.count_turns()
    assert counts == [run.workload().num_turns for run in one.runs()]
    assert counts[0] == counts[2] < counts[4]


MOONCAKE = Source(name="mooncake", window=(0.0, 60.0))


def ids(load: float, seed: int = 1) -> set[str]:
    return {session.id for session in MOONCAKE.sampled(load, seed).sessions}


def test_loads_above_100_lay_further_windows_of_the_trace_over_the_first() -> None:
    layers = [{session.id for session in MOONCAKE.load(1, layer).sessions} for layer in range(3)]
    assert ids(100) == layers[0]
    assert ids(200) == layers[0] | layers[1]
    whole, part = layers[0] | layers[1], ids(250) - layers[0] - layers[1]
    assert ids(250) == whole | part
    assert part < layers[2]
    assert len(part) == pytest.approx(len(layers[2]) / 2, abs=1)


def test_what_a_load_keeps_a_higher_one_keeps_too() -> None:
    kept = [ids(load) for load in (50, 100, 130, 170, 200, 300)]
    assert all(fewer < more for fewer, more in pairwise(kept))
    assert ids(130, seed=1) != ids(130, seed=2)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (Source(name="scbench", task="needle"), "SCBench task: got 'needle'"),
        (Source(name="scbench", sessions=0), "sessions: got 0"),
        (Source(name="scbench", max_tokens=10), "max_tokens: got 10"),
        (Source(name="scbench", sessions=2, rate=-1.0), "rate: got -1"),
        (Source(name="mooncake", trace="/nonexistent"), "/nonexistent: cannot be read"),
        (Source(name="mooncake", window=(1e6, 2e6)), "window: got 1e"),
        (Source(name="agentic", max_tokens=1), "none of the"),
    ],
)
def test_a_workload_that_cannot_be_made_is_told_before_anything_runs(
    source: Source, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(source).count_turns()
    assert says in str(caught.value)


def test_a_load_that_keeps_no_session_is_told_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="is none of them"):
        plan(loads=(100.0, 0.5)).count_turns()


def test_options_reach_the_workload(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 600), (500, 700), (2000, 800), (2500, 5000)]
    lines = [
        {
            "timestamp": ms,
            "input_length": n,
            "output_length": 1,
            "hash_ids": list(range(-(-n // 512))),
        }
        for ms, n in rows
    ]
    trace.write_text("\n".join(msgspec.json.encode(line).decode() for line in lines))
    source = Source(name="mooncake", trace=str(trace), window=(0.4, 10.0), max_tokens=1000)
    turns = [t for s in source.load(1).sessions for t in s.turns]
    assert sorted(t.prompt_tokens for t in turns) == [700, 800]
    assert Source(name="scbench", sessions=3).load(1).num_turns < SMALL.load(1).num_turns
    slow, quick = (Source(name="agentic", rate=rate).load(1) for rate in (0.001, 0.01))
    assert slow.sessions[0].start_s == pytest.approx(10 * quick.sessions[0].start_s)


def test_executing_a_run_replays_it() -> None:
    run = Run(source=SMALL, engine=ENGINE, load=50, policy="guard:40", seed=2)
    told: list[int] = []
    result = execute(run, told.append)
    direct = replay(run.workload(), engine=ENGINE, policy="guard:40", load=50, seed=2)
    assert (result.row, result.turns) == (direct.row, direct.turns)
    assert told == list(range(1, result.row.turns + 1))
