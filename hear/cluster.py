"""Puts a bus, an engine and policies together in one process, each found by its entry point.

The same parts run on the real clock and on trio's ``MockClock``.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from hear import plugins
from hear.seams import Bus, InferenceClient


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster. ``stop_policies`` lets them withdraw and hear their last answers."""

    bus: Bus
    engine: InferenceClient
    engine_name: str
    worker: Any
    policies: tuple[Any, ...]

    async def stop_policies(self) -> None:
        """End every policy in order; afterwards none has an open operation."""
        for policy in self.policies:
            policy.stop()
        for policy in self.policies:
            await policy.stopped.wait()


@asynccontextmanager
async def running(
    *, engine: str, profile: str, block_size: int, policy: str, engine_name: str = "engine0"
) -> AsyncIterator[Cluster]:
    """Start a cluster of one engine, with the policies that ``policy`` names.

    Raises:
        ConfigError: a profile or a policy's argument cannot be used.
        PluginError: a part is missing.
    """
    bus = plugins.load("buses", "memory")()
    backend = plugins.load("engines", engine)(profile, block_size=block_size, name=engine_name)
    policies = plugins.load("parts", "policy-spec")(policy).make()
    make_runner = plugins.load("parts", "policy-runner")
    runners = tuple(make_runner(bus, made) for made in policies)
    ranks = {runner.source: len(runners) - place for place, runner in enumerate(runners)}
    worker = plugins.load("parts", "engine-worker")(bus, backend, name=engine_name, ranks=ranks)
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        async with trio.open_nursery() as policy_nursery:
            for runner in runners:
                await policy_nursery.start(runner.run)
            yield Cluster(bus, backend, engine_name, worker, runners)
            policy_nursery.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
