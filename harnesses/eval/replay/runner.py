"""One replay: a workload under one configuration, through the whole loop, in virtual time.

Bus, worker, policies and engine are the very parts that serve in real time; only the clock is
trio's ``MockClock``, which jumps whenever all wait.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from hear.app.cluster import Cluster, running
from hear.blocks import pack
from hear.errors import EngineError
from hear.harnesses.eval.replay.audit import Audit, Tap
from hear.harnesses.eval.report.metrics import make_row
from hear.harnesses.eval.report.results import ProtocolCost, RunResult, TurnRecord
from hear.harnesses.eval.workloads.workload import Session, Turn, Workload
from hear.harnesses.session import HarnessSession
from hear.interfaces import InferenceRequest, InferenceResult
from hear.messages import (
    DEFAULT_TENANT,
    ContextClosed,
    ContextOpened,
    ContextPaused,
    RequestDescribed,
    RequestOutcome,
)
from hear.subjects import impossible

Loop = Literal["closed", "open"]


def replay(
    workload: Workload,
    *,
    engine: str,
    policy: str,
    engines: int = 1,
    load: float = 100.0,
    seed: int = 0,
    loop: Loop = "closed",
    progress: Callable[[int], None] = lambda done: None,
    tap: Tap = lambda envelopes, time_s: None,
) -> RunResult:
    """Replay a workload and return what came of it. Equal arguments give equal results.

    Args:
        workload: what to replay; it is not sampled here, ``load`` and ``seed`` are only recorded.
        engine: a profile of the simulated engine, by name or path.
        policy: names of policies joined by ``+``, or ``fcfs``.
        engines: how many such engines serve it, from two on behind a pool.
        loop: closed, where a turn is sent no earlier than the one before it has completed, or
            open, where it is sent at its recorded time in any case.
        progress: told the number of turns that have ended.
        tap: given all that is heard on the bus, in batches, and the virtual time.

    Raises:
        ConfigError: the profile or the policy cannot be used.
    """
    run = Replay(workload, loop, progress, tap)
    began = time.perf_counter()
    with _ordered_tasks(seed):
        clock = MockClock(autojump_threshold=0)
        trio.run(run.main, engine, engines, policy, clock=clock)
    run_s = time.perf_counter() - began
    return run.result(
        engine=Path(engine).stem, engines=engines, load=load, policy=policy, seed=seed, run_s=run_s
    )


class _ordered_tasks:  # noqa: N801, a context manager that reads as a function
    """Make trio run the tasks that are ready in an order that depends on ``seed`` alone.

    Trio shuffles them to keep programs from relying on an order, and has no public way to ask for
    a repeatable one; this is the switch that its own tests and Hypothesis use.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        from trio._core import _run

        self._before = _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r.getstate()
        _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
        _run._r.seed(self._seed)

    def __exit__(self, *error: object) -> None:
        from trio._core import _run

        _run._ALLOW_DETERMINISTIC_SCHEDULING = self._before[0]  # type: ignore[misc]
        _run._r.setstate(self._before[1])


class Replay:
    """The harness of a replay: one task for each session."""

    def __init__(
        self,
        workload: Workload,
        loop: Loop,
        progress: Callable[[int], None],
        tap: Tap,
        epoch: int = 1,
        slack_s: float = 0.0,
        tenant: str = DEFAULT_TENANT,
        prefix: str = "",
    ) -> None:
        """``epoch`` is that of its harness; ``slack_s`` is for the audit of a real engine.

        ``prefix`` begins the names of requests and contexts on the bus. Where others are served
        as well, or the same workload was before, it keeps them apart.
        """
        self._workload = workload
        self._epoch = epoch
        self._loop = loop
        self._progress = progress
        self._tenant = tenant
        self._prefix = prefix
        self.audit = Audit(tap, slack_s, tenant=tenant)
        self.turns: list[TurnRecord] = []
        self.runners: tuple[Any, ...] = ()
        self.engine_names: tuple[str, ...] = ()
        self._children: dict[str, list[Session]] = {}
        for session in workload.sessions:
            if session.parent is not None:
                self._children.setdefault(session.parent, []).append(session)
        self._ended = {session.id: trio.Event() for session in workload.sessions}
        awaited = (
            key for session in workload.sessions for turn in session.turns for key in turn.after
        )
        self._turn_ended = {key: trio.Event() for key in awaited}
        self._start_s = 0.0

    async def main(self, engine: str, engines: int, policy: str) -> None:
        """Run everything to its end."""
        async with (
            running(
                engine="simulated",
                profile=engine,
                block_size=self._workload.block_size,
                policy=policy,
                engines=engines,
            ) as cluster,
            trio.open_nursery() as nursery,
        ):
            self.runners = cluster.policies
            await nursery.start(self.audit.run, cluster.bus)
            await self.play(cluster)
            await cluster.stop_policies()
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    def result(
        self, *, engine: str, engines: int, load: float, policy: str, seed: int, run_s: float
    ) -> RunResult:
        """What came of it: the row, its turns and samples, what it cost and what was broken."""
        audit, runners = self.audit, self.runners
        problems = audit.problems()
        if (num_open := sum(runner.num_open for runner in runners)) != audit.num_open:
            problems.append(f"policies count {num_open} open operations")
        row = make_row(
            self.turns,
            engine_names=self.engine_names,
            notes=[*self.audit.notes(), *self._idle_policies()],
            workload=self._workload.name,
            sessions=len(self._workload.sessions),
            left_out=self._workload.left_out,
            remarks=self._workload.remarks,
            engine=engine,
            engines=engines,
            load=load,
            policy=policy,
            seed=seed,
            guard_violations=audit.guard_violations,
            operations=dict(sorted(audit.outcomes.items())),
            operations_open=audit.num_open,
            policy_failures=tuple(
                f"{runner.source} {runner.statistics.failure}"
                for runner in runners
                if runner.statistics.failure is not None
            ),
        )
        cost = ProtocolCost(
            messages=dict(sorted(audit.messages.items())),
            decisions={r.source: r.statistics.decisions for r in runners},
            controls={r.source: r.statistics.controls for r in runners},
            decide_s={r.source: r.statistics.decide_s for r in runners},
            run_s=run_s,
        )
        return RunResult(
            row=row,
            turns=tuple(self.turns),
            samples=tuple(
                msgspec.structs.replace(sample, time_s=sample.time_s - self._start_s)
                for sample in audit.samples
                if sample.time_s >= self._start_s
            ),
            cost=cost,
            problems=tuple(problems),
        )

    def _idle_policies(self) -> list[str]:
        """Policies that asked for nothing, and why, if that can be told."""
        notes = []
        for runner in self.runners:
            why = [
                f"{pattern}: {broken}"
                for pattern in runner.policy.observes
                if (broken := impossible(pattern))
            ]
            if why:
                notes.append(f"{runner.source} observes what no message matches: {'; '.join(why)}")
            elif runner.source not in self.audit.sources:
                decisions = runner.statistics.decisions
                notes.append(f"{runner.source} asked for nothing, in {decisions:,} decisions")
        return notes

    async def play(self, cluster: Cluster) -> None:
        """Run all sessions on a cluster, to their end."""
        self._start_s = trio.current_time()
        self.engine_names = tuple(cluster.engines)
        async with trio.open_nursery() as sessions:
            for session in self._workload.sessions:
                if session.parent is None:
                    sessions.start_soon(self._session, session, cluster, sessions)

    async def _session(self, session: Session, cluster: Cluster, nursery: trio.Nursery) -> None:
        context = f"{self._prefix}{session.id}"
        harness = HarnessSession(
            cluster.bus,
            workflow=context,
            source=f"replay/{session.id}",
            tenant=self._tenant,
            epoch=self._epoch,
        )
        if session.parent is None:
            first = session.turns[0].at_s
            await trio.sleep_until(self._start_s + (session.start_s if first is None else first))
        else:
            await trio.sleep(session.start_s)
        await self._wait_for_others(session.turns[0])
        harness.say(ContextOpened(role=session.role), context=context)
        self._start_sub_agents(session, 0, cluster, nursery)
        if self._loop == "open" and session.turns[0].at_s is not None:
            await self._open_loop(session, harness, cluster, nursery)
        else:
            for number, turn in enumerate(session.turns, 1):
                await self._wait_until(turn)
                await self._turn(session, number, turn, harness, cluster)
                self._start_sub_agents(session, number, cluster, nursery)
        if session.parent is not None:
            harness.say(ContextClosed(), context=context)
        self._ended[session.id].set()

    async def _open_loop(
        self, session: Session, harness: HarnessSession, cluster: Cluster, nursery: trio.Nursery
    ) -> None:
        """Send each turn at its recorded time; one without a time follows the one before it."""
        num_ended = 0

        async def take(number: int, turn: Turn, ended: trio.Event) -> None:
            nonlocal num_ended
            await self._turn(session, number, turn, harness, cluster)
            ended.set()
            num_ended += 1
            self._start_sub_agents(session, num_ended, cluster, nursery)

        async with trio.open_nursery() as turns:
            before = trio.Event()
            before.set()
            for number, turn in enumerate(session.turns, 1):
                if turn.at_s is None:
                    await before.wait()
                await self._wait_until(turn)
                before = trio.Event()
                turns.start_soon(take, number, turn, before)

    def _start_sub_agents(
        self, session: Session, num_ended: int, cluster: Cluster, nursery: trio.Nursery
    ) -> None:
        for child in self._children.get(session.id, ()):
            if child.after_turns == num_ended:
                nursery.start_soon(self._session, child, cluster, nursery)

    async def _wait_for_others(self, turn: Turn) -> None:
        for session in turn.waits_for:
            await self._ended[session].wait()
        for awaited in turn.after:
            await self._turn_ended[awaited].wait()

    async def _wait_until(self, turn: Turn) -> None:
        await self._wait_for_others(turn)
        if turn.at_s is not None:
            await trio.sleep_until(self._start_s + turn.at_s)
        elif turn.think_s > 0:
            await trio.sleep(turn.think_s)

    async def _turn(
        self,
        session: Session,
        number: int,
        turn: Turn,
        harness: HarnessSession,
        cluster: Cluster,
    ) -> None:
        context = f"{self._prefix}{session.id}"
        request = f"{context}/{number}"
        described = RequestDescribed(
            role=session.role,
            turn=number,
            prompt_tokens=turn.prompt_tokens,
            block_size=self._workload.block_size,
            prefix_hashes=pack(turn.prompt_hashes),
            hash_scheme=self._workload.hash_scheme,
        )
        served_on = cluster.engine_name

        def describe(engine: str) -> None:
            nonlocal served_on
            served_on = engine
            harness.say(
                described,
                request=request,
                context=context,
                context_version=number,
                engine=engine,
            )

        describe(cluster.engine_name)
        sent_s = trio.current_time()
        inference = InferenceRequest(
            id=request,
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.output_tokens,
            prompt_hashes=turn.prompt_hashes,
            output_hashes=turn.output_hashes,
            context=context,
            context_version=number,
            prompt=turn.prompt_token_ids,
            tenant=self._tenant,
        )
        try:
            result = await cluster.generate(inference, on_routed=describe)
        except EngineError as error:
            # As a harness would: this answer is lost, and the session goes on.
            now = trio.current_time()
            lost = RequestOutcome(status="failed", reason=f"no_engine: {error}")
            result = InferenceResult(lost, sent_s, now, now, now)
        # What the session waits for next is known from how the answer ended, not from the future.
        following = session.turns[number].pause if number < len(session.turns) else "person"
        harness.say(ContextPaused(cause=following), context=context, context_version=number)
        outcome, start = result.outcome, self._start_s
        self.turns.append(
            TurnRecord(
                request=request,
                session=session.id,
                turn=number,
                engine=served_on,
                sent_s=result.sent_s - start,
                started_s=result.started_s - start,
                first_token_s=result.first_token_s - start,
                finished_s=result.finished_s - start,
                prompt_tokens=turn.prompt_tokens,
                output_tokens=outcome.output_tokens,
                reused_tokens=outcome.reused_tokens,
                preemptions=outcome.preemptions,
                status=outcome.status,
                reason=outcome.reason,
            )
        )
        if (ended := self._turn_ended.get((session.id, number))) is not None:
            ended.set()
        self._progress(len(self.turns))
