"""The same messages in the same order bring the same decisions, over whichever bus they come."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import trio

from hear.buses.memory import MemoryBus
from hear.buses.nng.client import connect
from hear.buses.nng.server import hub
from hear.codec import open_body
from hear.harnesses.eval.replay.runner import replay
from hear.harnesses.eval.workloads import mooncake
from hear.interfaces import Bus
from hear.messages import Control, Envelope, Message
from hear.policies.runtime.runner import PolicyRunner
from hear.policies.runtime.spec import parse

POLICIES = "cache-aware+guard:2+session-aware"
NAMES = ("cache-aware", "guard:2", "session-aware")

Decision = tuple[str, str, str | None, str | None, Message]


@pytest.fixture(scope="module")
def heard() -> Sequence[Envelope]:
    """All but the controls that pass in the first 20 seconds of the Mooncake trace."""
    messages: list[Envelope] = []
    replay(
        mooncake.load(window=(0.0, 20.0)).sample(60, 1),
        engine="h100-qwen3-8b",
        policy=POLICIES,
        seed=1,
        tap=lambda envelopes, time_s: messages.extend(envelopes),
    )
    return [e for e in messages if e.category != "control"]


async def decisions(
    make: Callable[[], AbstractAsyncContextManager[Bus]], messages: Sequence[Envelope]
) -> list[Decision]:
    """What the policies ask for as the messages come, one after the other."""
    decided: list[Decision] = []
    seen: set[str | None] = set()
    async with make() as bus, trio.open_nursery() as nursery:
        runners = [PolicyRunner(bus, made, leave_limit_s=0.0) for made in parse(POLICIES).make()]
        for runner in runners:
            await nursery.start(runner.run)
        async with bus.subscribe([">"], name="tap", capacity=65_536) as tap:
            for message in messages:
                if message.source in {runner.source for runner in runners}:
                    continue  # a prediction, which they make anew here
                bus.publish(message)
                await _settled(bus)
            await _settled(bus)
            while tap.statistics().queued:
                for envelope in await tap.receive():
                    body, key = open_body(envelope), envelope.key
                    # One that is not answered in time is said again.
                    if isinstance(body, Control) and key.operation not in seen:
                        seen.add(key.operation)
                        decided.append(
                            (envelope.source, key.engine or "", key.request, key.context, body)
                        )
        nursery.cancel_scope.cancel()
    return decided


async def _settled(bus: Bus) -> None:
    """Wait until all that was said has been heard and answered by all whom it is for."""
    before: object = None
    quiet = 0
    with trio.fail_after(20):
        while quiet < 3:
            await trio.sleep(0.003)
            rows = {row.name: row for row in bus.statistics().subscriptions}
            said = sum(bus.statistics().published.values())
            heard = rows["tap"].queued + rows["tap"].received
            unread = sum(row.queued for name, row in rows.items() if name != "tap")
            now = (said, heard, [row.received for row in rows.values()])
            idle = heard >= said and not unread and getattr(bus, "idle", True)
            quiet = quiet + 1 if idle and now == before else 0
            before = now


async def test_memory_and_nng_bring_the_same_decisions(
    heard: Sequence[Envelope], tmp_path: Path
) -> None:
    @asynccontextmanager
    async def over_memory() -> AsyncIterator[Bus]:
        async with MemoryBus() as bus:
            yield bus

    @asynccontextmanager
    async def over_nng() -> AsyncIterator[Bus]:
        url = f"ipc://{tmp_path}/bus"
        async with hub(url), connect(url, name="all") as bus:
            yield bus

    first = await decisions(over_memory, heard)
    second = await decisions(over_nng, heard)
    # Each decides by itself: what follows from the messages is the order of its own controls.
    by_policy = [
        {name: [d for d in all_of_them if d[0] == name] for name in NAMES}
        for all_of_them in (first, second)
    ]
    for name, made in by_policy[0].items():
        assert len(made) > 3, name
        assert by_policy[1][name] == made
