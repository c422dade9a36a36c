"""Puts a bus, engines and policies together in one process, each found by its entry point.

The same parts run on the real clock and on trio's ``MockClock``.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from hear.app import plugins
from hear.errors import ConfigError
from hear.interfaces import Bus, InferenceClient, InferenceRequest, InferenceResult

POOL = "pool"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster. ``stop_policies`` lets them withdraw and hear their last answers.

    ``engine`` is what requests are sent to, and ``engine_name`` what they are described for: the
    engine if there is one, and the pool in front of them if there are several. ``engines`` and
    ``workers`` are by the names of the engines; ``pool`` is None if there is one engine.
    """

    bus: Bus
    engine: InferenceClient
    engine_name: str
    engines: Mapping[str, InferenceClient]
    workers: Mapping[str, Any]
    pool: Any
    policies: tuple[Any, ...]

    @property
    def num_open(self) -> int:
        """Operations without a terminal outcome, wherever they are."""
        places = [*self.workers.values(), *([] if self.pool is None else [self.pool])]
        return sum(place.num_open for place in places)

    async def generate(
        self, request: InferenceRequest, on_routed: Callable[[str], None]
    ) -> InferenceResult:
        """Serve one request; a pool tells ``on_routed`` of its engine before it goes there.

        Raises:
            EngineError: the request cannot be served.
        """
        if self.pool is None:
            return await self.engine.generate(request)
        result: InferenceResult = await self.pool.generate(request, on_routed=on_routed)
        return result

    async def stop_policies(self) -> None:
        """End every policy in order; afterwards none has an open operation."""
        for policy in self.policies:
            policy.stop()
        for policy in self.policies:
            await policy.stopped.wait()


@asynccontextmanager
async def running(
    *,
    engine: str,
    profile: str,
    block_size: int,
    policy: str,
    engines: int = 1,
    bus: Bus | None = None,
) -> AsyncIterator[Cluster]:
    """Start a cluster with the policies that ``policy`` names.

    Its engines are alike and named engine0, engine1 and so on. From two on, a pool named ``pool``
    stands in front of them. ``bus`` is one that others are on, too; without it, it has its own.

    Raises:
        ConfigError: a profile, a policy's argument or the number of engines cannot be used.
        PluginError: a part is missing.
    """
    if engines < 1:
        raise ConfigError(f"engines: got {engines}, expected 1 or more")
    if bus is None:
        bus = plugins.load_installed("buses", "memory")()
    make_backend = plugins.load_installed("engines", engine)
    names = [f"engine{number}" for number in range(engines)]
    backends = {name: make_backend(profile, block_size=block_size, name=name) for name in names}
    policies = plugins.load_installed("parts", "policy-spec")(policy).make()
    make_runner = plugins.load_installed("parts", "policy-runner")
    runners = tuple(make_runner(bus, made) for made in policies)
    ranks = {runner.source: len(runners) - place for place, runner in enumerate(runners)}
    make_worker = plugins.load_installed("parts", "engine-worker")
    workers = {
        name: make_worker(bus, backend, name=name, ranks=ranks)
        for name, backend in backends.items()
    }
    pool = None
    if engines > 1:
        pool = plugins.load_installed("parts", "dispatcher")(bus, backends, name=POOL, ranks=ranks)
    async with trio.open_nursery() as nursery:
        for worker in workers.values():
            await nursery.start(worker.run)
        if pool is not None:
            await nursery.start(pool.run)
        async with trio.open_nursery() as policy_nursery:
            for runner in runners:
                await policy_nursery.start(runner.run)
            yield Cluster(
                bus=bus,
                engine=backends[names[0]] if pool is None else pool,
                engine_name=names[0] if pool is None else POOL,
                engines=backends,
                workers=workers,
                pool=pool,
                policies=runners,
            )
            policy_nursery.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
