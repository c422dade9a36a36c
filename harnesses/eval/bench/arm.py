"""One arm: one workload under one configuration, on one engine, in real time.

The harness is the replay's own, with its audit; policies are those that serve anywhere. What a
client cannot see of a request (its time in the queue, what of its prompt came from which tier) is
taken from the engine's own outcome on the bus, where there is one.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import trio

from hear.app import plugins
from hear.app.clock import new_epoch
from hear.app.cluster import Cluster
from hear.codec import open_body
from hear.errors import EngineError, RemoteProtocolError
from hear.harnesses.eval.bench.places import STOCK, Place
from hear.harnesses.eval.bench.script import Script
from hear.harnesses.eval.replay.runner import Replay
from hear.harnesses.eval.report.results import RunResult, TurnRecord
from hear.interfaces import InferenceRequest, InferenceResult
from hear.messages import Envelope, RequestOutcome

SLACK_S: Final = 0.1
"""How long after a real engine has chosen whom to serve it may tell on the bus."""

ANSWERED_S: Final = 10.0
"""How long policies may wait for an engine's first and last answers."""

WARM_UP: Final = 2
"""Requests that nobody looks at: the first that a server computes take longer."""


@dataclass(frozen=True, slots=True)
class ArmResult:
    """What came of an arm, and what the engine answered, by request."""

    run: RunResult
    answers: dict[str, InferenceResult]

    @property
    def unserved(self) -> str:
        """How many requests were not served, and why the first was not; nothing if all were."""
        failed = [turn for turn in self.run.turns if turn.status != "completed"]
        if not failed:
            return ""
        return f"{len(failed)} requests were not served, the first by {failed[0].reason}"


async def serve(
    place: Place,
    script: Script,
    policy: str,
    progress: Callable[[int], None] = lambda done: None,
) -> ArmResult:
    """Serve a script under a policy.

    Raises:
        EngineError: the engine does not answer the policies.
        ConfigError: the policy cannot be made.
    """
    heard = _Outcomes()
    workload = script.workload(place.block_size, place.hash_prefix)
    run = Replay(workload, "closed", progress, heard.hear, new_epoch(), SLACK_S)
    client = _Remembering(place)
    await _warm_up(client, place, script)
    cluster = Cluster(
        bus=place.bus,
        engine=client,
        engine_name=place.engine,
        engines={place.engine: client},
        workers={},
        pool=None,
        policies=(),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(run.audit.run, place.bus)
        async with _policies(place, policy, run) as runners:
            run.runners = runners
            begun_s = trio.current_time()
            await run.play(cluster)
            run_s = trio.current_time() - begun_s
        alone = policy == STOCK  # nobody tells of requests then
        await _until(lambda: run.audit.num_open == 0 and (alone or heard.all_of(run.turns)))
        nursery.cancel_scope.cancel()
    result = run.result(
        engine=place.label, engines=1, load=100.0, policy=policy, seed=script.seed, run_s=run_s
    )
    return ArmResult(result if alone else _completed(result, heard), client.answers)


@asynccontextmanager
async def _policies(place: Place, policy: str, run: Replay) -> AsyncIterator[tuple[Any, ...]]:
    """The policies of an arm, once the engine has answered each of them; none of the stock arm."""
    names = "fcfs" if policy == STOCK else policy
    made = plugins.load_installed("parts", "policy-spec")(names).make()
    make_runner = plugins.load_installed("parts", "policy-runner")
    runners = tuple(make_runner(place.bus, each, epoch=new_epoch()) for each in made)
    async with trio.open_nursery() as nursery:
        for runner in runners:
            await nursery.start(runner.run)
        # Each begins by withdrawing what an earlier one of its name may have left.
        if not await _until(lambda: run.audit.outcomes.total() >= len(runners)):
            raise EngineError(
                f"{place.engine}: answered {run.audit.outcomes.total()} of {len(runners)} policies "
                f"within {ANSWERED_S:g} s"
            )
        yield runners
        for runner in runners:
            runner.stop()
        for runner in runners:
            await runner.stopped.wait()
        nursery.cancel_scope.cancel()


async def _until(holds: Callable[[], bool]) -> bool:
    with trio.move_on_after(ANSWERED_S):
        while not holds():  # noqa: ASYNC110 - the audit counts, and tells nobody
            await trio.sleep(0.02)
    return holds()


async def _warm_up(client: "_Remembering", place: Place, script: Script) -> None:
    """Send requests of their own tokens, one after the other; then forget them."""
    longest = script.longest_prompt
    for number in range(WARM_UP):
        prompt = longest[::-1][number:] or longest
        request = InferenceRequest(
            id=f"warm-up/{number}",
            prompt_tokens=len(prompt),
            output_tokens=script.sessions[0].turns[0].output_tokens,
            prompt_hashes=place.hash_prefix(prompt),
            prompt=prompt,
        )
        result = await client.generate(request)
        if result.outcome.status != "completed":
            raise EngineError(f"{place.engine}: the first request: {result.outcome.reason}")
    client.answers.clear()


class _Remembering:
    """The client of a place, with what was answered, and with the place's salt on each request."""

    def __init__(self, place: Place) -> None:
        self._client = place.client
        self._salt = place.salt
        self.answers: dict[str, InferenceResult] = {}

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        if self._salt:
            request = replace(request, cache_salt=self._salt)
        result = await self._client.generate(request)
        self.answers[request.id] = result
        return result


class _Outcomes:
    """How requests ended, as their engine told on the bus."""

    def __init__(self) -> None:
        self.outcomes: dict[str, RequestOutcome] = {}

    def all_of(self, turns: Sequence[TurnRecord]) -> bool:
        """Whether those that were served have been told of."""
        served = (turn.request for turn in turns if turn.status == "completed")
        return all(request in self.outcomes for request in served)

    def hear(self, envelopes: Sequence[Envelope], time_s: float) -> None:
        """Take in what is heard on the bus."""
        for envelope in envelopes:
            if envelope.kind != "request_outcome" or envelope.key.request is None:
                continue
            try:
                message = open_body(envelope)
            except RemoteProtocolError:
                continue
            if isinstance(message, RequestOutcome) and message.status != "accepted":
                self.outcomes[envelope.key.request] = message


def _completed(result: RunResult, heard: _Outcomes) -> RunResult:
    """A result with what the engine told of each request, and with what it did not."""
    turns = []
    differing = 0
    for turn in result.turns:
        outcome = heard.outcomes.get(turn.request)
        if outcome is not None and outcome.status == turn.status == "completed":
            seen, said = (sum(t.values()) for t in (turn.reused_tokens, outcome.reused_tokens))
            differing += bool(turn.reused_tokens) and seen != said
            turn = msgspec.structs.replace(
                turn,
                started_s=min(turn.sent_s + outcome.queue_s, turn.first_token_s),
                reused_tokens=outcome.reused_tokens,
                preemptions=outcome.preemptions,
            )
        turns.append(turn)
    problems = list(result.problems)
    if unheard := sum(turn.request not in heard.outcomes for turn in turns):
        problems.append(f"{unheard} requests had no outcome on the bus")
    if differing:
        problems.append(f"{differing} requests reused other tokens than their outcomes tell")
    return msgspec.structs.replace(result, turns=tuple(turns), problems=tuple(problems))
