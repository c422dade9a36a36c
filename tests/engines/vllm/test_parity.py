"""The simulated engine beside vLLM's own scheduler, on a few of the benchmark's workloads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import vllm_parity
from benchmarks.parity_workload import Workload, make_workload
from benchmarks.vllm_parity import compare
from hear.engines.kv.eviction import EvictionOrder
from hear.engines.simulated.kv_cache import KvCache
from hear.engines.simulated.scheduler import Scheduler
from hear.engines.simulated.waiting import WaitingQueue
from tests.engines.vllm.real import NEEDS_VLLM

pytestmark = NEEDS_VLLM

SEEDS = range(16)
NEVER_COMPUTED = 366
"""In this workload vLLM leaves a hash on a block that was never computed."""


def few() -> list[Workload]:
    return [make_workload(seed) for seed in SEEDS]


def test_both_decide_alike_in_every_step() -> None:
    compared = [compare(workload) for workload in few()]
    assert [each.difference for each in compared] == [None] * len(compared)
    # And there was something to decide.
    for what in ("reused_tokens", "evictions", "preemptions"):
        assert sum(getattr(each, what) for each in compared) > 20, what
    workloads = few()
    assert {workload.order for workload in workloads} == {"fcfs", "priority"}
    assert {workload.reserve_full_prompt for workload in workloads} == {True, False}


def test_the_difference_that_is_meant_is_seen_and_is_the_only_one() -> None:
    compared = compare(make_workload(NEVER_COMPUTED))
    assert compared.difference is None
    assert compared.kept_names


def last_in_first_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EvictionOrder, "pop", lambda self: self._plain.popitem(last=True)[0])


def start_before_end(patch: pytest.MonkeyPatch) -> None:
    release = KvCache.release
    patch.setattr(
        KvCache, "release", lambda self, names, now: release(self, list(names)[::-1], now)
    )


def whole_prompts_reused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvCache, "match", lambda self, hashes, limit: (0, 0))


def one_request_fewer(patch: pytest.MonkeyPatch) -> None:
    made = Scheduler.__init__

    def init(self: Any, limits: Any, *others: Any) -> None:
        seqs = max(1, limits.max_num_seqs - 1)
        made(self, msgspec.structs.replace(limits, max_num_seqs=seqs), *others)

    patch.setattr(Scheduler, "__init__", init)


def first_preempted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_victim", lambda self: self.running[0])


def back_of_the_queue(patch: pytest.MonkeyPatch) -> None:
    add = WaitingQueue.add

    def later(self: Any, request: Any) -> None:
        request.arrival_s += request.preemptions
        add(self, request)

    patch.setattr(WaitingQueue, "add", later)


@pytest.mark.parametrize(
    "change",
    [
        last_in_first_out,
        start_before_end,
        whole_prompts_reused,
        one_request_fewer,
        first_preempted,
        back_of_the_queue,
    ],
)
def test_an_engine_that_decides_otherwise_is_found_out(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    assert any(compare(workload).difference is not None for workload in few())


def test_the_command_tells_the_first_difference_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "parity.json"
    assert vllm_parity.main(["--workloads", "2", "--seed", "4", "--json", str(path)]) == 0
    assert "2 of 2 workloads alike in every step" in capsys.readouterr().out
    [first, second] = msgspec.json.decode(path.read_bytes())["workloads"]
    assert (first["seed"], second["seed"]) == (4, 5)
    assert first["steps"] > 10
    last_in_first_out(monkeypatch)
    assert vllm_parity.main(["--workloads", "2", "--seed", "4", "--json", str(path)]) == 1
    told = capsys.readouterr().out
    assert "workload 4, step" in told
    assert told.count("  vLLM      ") == told.count("  simulated ") >= 1
    difference = msgspec.json.decode(path.read_bytes())["workloads"][0]["difference"]
    assert difference["vllm"] != difference["simulated"]


def test_a_workload_is_made_from_its_seed_alone() -> None:
    assert make_workload(3) == make_workload(3)
    assert make_workload(3) != make_workload(4)
    for seed in range(200):
        workload = make_workload(seed)
        assert workload.arrivals
        for arrival in workload.arrivals:
            assert arrival.prompt_tokens > 0
            assert arrival.output_tokens > 0
            assert len(arrival.tokens) <= workload.num_blocks * workload.block_size
