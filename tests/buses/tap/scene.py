"""A small cluster that serves: one simulated engine, Cache-Aware and a guard, on any bus."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

import trio

from hear.app import plugins
from hear.app.cluster import Cluster, running
from hear.blocks import chain_all, pack
from hear.harnesses.session import HarnessSession
from hear.interfaces import Bus, InferenceRequest
from hear.messages import ContextPaused, RequestDescribed

BLOCK_SIZE = 512
_NUM_BLOCKS = 16


@asynccontextmanager
async def serving(bus: Bus, policy: str = "cache-aware+guard:40") -> AsyncIterator[Cluster]:
    """The cluster of ``hear.app.cluster`` on this bus."""
    load = plugins.load_installed

    def with_this_bus(group: str, name: str) -> object:
        return (lambda: bus) if group == "buses" else load(group, name)

    with patch.object(plugins, "load_installed", with_this_bus):
        async with running(
            engine="simulated", profile="h100-qwen3-8b", block_size=BLOCK_SIZE, policy=policy
        ) as cluster:
            yield cluster


class Load:
    """Sends requests of a few contexts that share prefixes, so that policies have work."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._harness = HarnessSession(cluster.bus, workflow="w", source="harness")

    async def turn(self, request: str, context: str, version: int = 1) -> None:
        """One request, described and served, and its context then paused."""
        tokens = _NUM_BLOCKS * BLOCK_SIZE
        hashes = chain_all(f"{context} {n}".encode() for n in range(_NUM_BLOCKS))
        self._harness.say(
            RequestDescribed(
                role="coder",
                turn=version,
                prompt_tokens=tokens,
                block_size=BLOCK_SIZE,
                prefix_hashes=pack(hashes),
            ),
            request=request,
            context=context,
            context_version=version,
            engine=self._cluster.engine_name,
        )
        await self._cluster.engine.generate(
            InferenceRequest(
                id=request,
                prompt_tokens=tokens,
                output_tokens=50,
                prompt_hashes=hashes,
                context=context,
                context_version=version,
            )
        )
        self._harness.say(ContextPaused(cause="tool", tool="search"), context=context)

    async def burst(self, number: int, num_contexts: int = 4) -> None:
        """So many requests at once."""
        async with trio.open_nursery() as nursery:
            for n in range(number):
                version = n // num_contexts + 1
                nursery.start_soon(self.turn, f"r{n}", f"c{n % num_contexts}", version)
