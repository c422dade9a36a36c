"""The page of a replay: what stands on it, that it is whole, safe, small and always the same."""

import math
import random
from collections.abc import Sequence
from heapq import heappop, heappush
from statistics import quantiles

from hear.harnesses.replay.results import ProtocolCost, Row, RunResult, Sample, TurnRecord

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
