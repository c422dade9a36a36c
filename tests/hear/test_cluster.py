"""Clusters in one process: what is started, what requests are sent to, and that all of it ends."""

from collections.abc import Iterable

import pytest
import trio
import trio.testing

from hear.app.cluster import Cluster, running
from hear.blocks import pack
from hear.codec import open_body
from hear.engine_view import EngineViews
from hear.errors import ConfigError
from hear.harness_view import HarnessView
from hear.harnesses.session import HarnessSession
from hear.interfaces import Ask, InferenceRequest, Subscription
from hear.messages import (
    CapabilitiesReported,
    Key,
    OperationOutcome,
    RequestDescribed,
    RequestOutcome,
    Route,
)

PROFILE = "h100-qwen3-8b"


def request(id: str) -> InferenceRequest:
    return InferenceRequest(id=id, prompt_tokens=1000, output_tokens=2, prompt_hashes=(1,))


async def serve(cluster: Cluster, count: int) -> list[str]:
    """Serve some requests one after another; returns what was told of their engines."""
    told: list[str] = []
    for number in range(count):
        result = await cluster.generate(request(f"r{number}"), told.append)
        assert result.outcome.status == "completed"
    return told


async def test_one_engine_stands_alone(autojump_clock: trio.testing.MockClock) -> None:
    async with running(
        engine="simulated", profile=PROFILE, block_size=512, policy="guard"
    ) as cluster:
        assert cluster.engine_name == "engine0"
        assert list(cluster.engines) == list(cluster.workers) == ["engine0"]
        assert cluster.engine is cluster.engines["engine0"]
        assert cluster.pool is None
        assert await serve(cluster, 2) == []
        await cluster.stop_policies()
        assert cluster.num_open == 0


async def test_several_engines_stand_behind_a_pool(autojump_clock: trio.testing.MockClock) -> None:
    async with (
        running(
            engine="simulated", profile=PROFILE, block_size=512, policy="fcfs", engines=3
        ) as cluster,
        cluster.bus.subscribe(["state.*.*.capabilities.>", "outcome.>"], name="test") as heard,
    ):
        assert cluster.engine_name == "pool"
        assert cluster.engine is cluster.pool
        names = ["engine0", "engine1", "engine2"]
        assert list(cluster.engines) == list(cluster.workers) == names
        assert await serve(cluster, 4) == [*names, "engine0"]
        messages = [(envelope.source, open_body(envelope)) for envelope in await heard.receive()]
    capabilities = {who: m for who, m in messages if isinstance(m, CapabilitiesReported)}
    assert {who: m.targets for who, m in capabilities.items()} == {
        "pool": ("engine0", "engine1", "engine2"),
        **dict.fromkeys(names, ()),
    }
    ended = [
        who for who, m in messages if isinstance(m, RequestOutcome) and m.status == "completed"
    ]
    assert ended == [*names, "engine0"]


async def test_policies_rank_at_the_pool_as_at_the_engines(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running(
        engine="simulated",
        profile=PROFILE,
        block_size=512,
        policy="tests.hear.test_cluster:ToTheFirst+tests.hear.test_cluster:ToTheLast",
        engines=2,
    ) as cluster:
        assert await serve(cluster, 3) == ["engine0"] * 3
        await cluster.stop_policies()
        assert cluster.num_open == 0
        outcomes = [policy.statistics.outcomes for policy in cluster.policies]
        assert [sum(each.values()) for each in outcomes] == [6, 6]
        # A withdrawal at the pool and at each engine; and the routes of one of them.
        assert [each["completed"] for each in outcomes] == [3 + 3, 3]


class ToTheFirst:
    """Routes three requests before they come."""

    name = "to-the-first"
    observes = ("intent.*.*.request_described.>",)
    target = "engine0"

    def __init__(self) -> None:
        self.asked = False

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        if self.asked:
            return []
        self.asked = True
        route = Route(targets=(self.target,))
        return [Ask(route, Key(request=f"r{n}", engine="pool")) for n in range(3)]


class ToTheLast(ToTheFirst):
    name = "to-the-last"
    target = "engine1"


@pytest.mark.parametrize("engines", [0, -1])
async def test_a_cluster_without_engines_is_none(engines: int) -> None:
    with pytest.raises(ConfigError, match=f"engines: got {engines}, expected 1 or more"):
        async with running(
            engine="simulated", profile=PROFILE, block_size=512, policy="fcfs", engines=engines
        ):
            pass


@pytest.mark.parametrize("policy", ["guard:20", "session-aware"])
async def test_a_harness_that_starts_again_and_counts_from_1_is_controlled_as_before(
    policy: str, autojump_clock: trio.testing.MockClock
) -> None:
    async def run(cluster: Cluster, heard: Subscription, epoch: int) -> list[tuple[str, str, str]]:
        harness = HarnessSession(cluster.bus, workflow="w", source="harness", epoch=epoch)
        for turn in (1, 2, 3):
            hashes = tuple(range(1, 10 * turn))
            tokens = 512 * len(hashes)
            described = RequestDescribed(prompt_tokens=tokens, prefix_hashes=pack(hashes))
            harness.say(
                described, request=f"r{turn}", context="c", context_version=turn, engine="engine0"
            )
            await trio.sleep(1)  # the controls come before the request does
            await cluster.engine.generate(
                InferenceRequest(
                    id=f"r{turn}",
                    context="c",
                    context_version=turn,
                    prompt_tokens=tokens,
                    output_tokens=8,
                    prompt_hashes=hashes,
                )
            )
        await trio.sleep(12)  # it starts again, within the bound of the first run
        messages = [open_body(envelope) for envelope in await heard.receive()]
        return sorted(
            (m.control, m.status, m.reason) for m in messages if isinstance(m, OperationOutcome)
        )

    async with (
        running(engine="simulated", profile=PROFILE, block_size=512, policy=policy) as cluster,
        cluster.bus.subscribe(["outcome.>"], name="test") as heard,
    ):
        runs = [await run(cluster, heard, epoch) for epoch in (1, 2, 3)]
    first = {(control, status) for control, status, _ in runs[0]}
    assert first
    assert not any(status in ("failed", "rejected") for _, status in first)
    for again in runs[1:]:
        assert {(control, status) for control, status, _ in again} == first
