"""What happens in the day of ``benchmarks.soak``: agents, visitors, and every fault once.

Agents have sessions of one to six turns; some never close them, some describe requests that they
never send, some hang up. Each hour a tenant comes with a policy of its own and leaves, every second
hour an engine joins the bus, crashes, and leaves, and is spoken of after that. Names are never used
again, but by the harness that starts again and counts from 1.

Faults come one after the other, each within an hour, beside a bus that loses and repeats a few
messages in a thousand all day.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from typing import Final

import trio

from hear.app.cluster import Cluster
from hear.blocks import chain_all, pack
from hear.buses.memory import MemoryBus
from hear.engine_view import EngineViews
from hear.engines.simulated.backend import SimulatedEngine
from hear.engines.simulated.profile import load_profile
from hear.engines.worker.loop import EngineWorker
from hear.errors import EngineError, LaggedError
from hear.harness_view import HarnessView
from hear.harnesses.session import HarnessSession
from hear.interfaces import Ask, InferenceRequest
from hear.messages import ContextClosed, ContextOpened, Envelope, RequestDescribed
from hear.policies.guard import Guard
from hear.policies.runtime.runner import PolicyRunner

BLOCK: Final = 512
PROFILE: Final = "h100-qwen3-8b"
LOST: Final = 0.002
"""The part of all messages that the bus loses, and that it repeats."""

OUTAGE_S: Final = 20.0


class FaultyBus(MemoryBus):
    """Loses and repeats messages; while it is ``out`` it loses all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = Random(seed)
        self.out = False
        self.lost = self.repeated = 0

    def publish(self, envelope: Envelope) -> None:
        """Send a message, mostly once.

        Raises:
            BusError: the bus is closed.
        """
        fate = self._draw.random()
        if self.out or fate < LOST:
            self.lost += 1
            return
        super().publish(envelope)
        if fate > 1 - LOST:
            self.repeated += 1
            super().publish(envelope)


class Faulty(Guard):
    """Asks like Guard-40 for a while, and then raises."""

    name = "faulty"

    def __init__(self) -> None:
        super().__init__(40)
        self._left = 20

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        """Decide, or not.

        Raises:
            RuntimeError: it has decided twenty times.
        """
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("a policy of one's own may have a fault")
        return super().decide(h, s)


class Day:
    """The agents of one day. ``served`` and ``failed`` count their requests."""

    def __init__(
        self, cluster: Cluster, bus: FaultyBus, seed: int, sessions_per_hour: float
    ) -> None:
        self._cluster = cluster
        self._bus = bus
        self._sessions_per_hour = sessions_per_hour
        self._draw = Random(seed)
        self._number = 0
        self.served = self.failed = self.abandoned = 0
        self.faults: Counter[str] = Counter()
        """How often each fault has happened, by its name."""

    async def hours(self, count: float) -> None:
        """Agents, tenants and engines for so many hours."""
        end_s = trio.current_time() + 3600 * count
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._visits, end_s)
            nursery.start_soon(self._faults, end_s)
            while trio.current_time() < end_s:
                await trio.sleep(self._draw.expovariate(self._sessions_per_hour / 3600))
                nursery.start_soon(self._session, self._name("agent"))

    def _name(self, kind: str) -> str:
        self._number += 1
        return f"{kind}-{self._number}"

    async def _session(self, name: str) -> None:
        draw = Random(name)
        harness = HarnessSession(self._cluster.bus, workflow=name, source=f"harness/{name}")
        harness.say(ContextOpened(role="agent"), context=name)
        blocks = draw.randint(1, 12)
        for turn in range(1, draw.randint(1, 6) + 1):
            blocks += draw.randint(0, 3)
            await self._turn(harness, name, turn, blocks, draw)
            await trio.sleep(draw.uniform(1, 90))
        if draw.random() < 0.7:
            harness.say(ContextClosed(), context=name)

    async def _turn(
        self, harness: HarnessSession, name: str, turn: int, blocks: int, draw: Random
    ) -> None:
        request, pool = f"{name}/{turn}", self._cluster.engine_name
        hashes = chain_all(f"{name}/{index}".encode() for index in range(blocks))
        tokens = blocks * BLOCK + draw.randint(1, BLOCK - 1)
        described = RequestDescribed(
            turn=turn, prompt_tokens=tokens, block_size=BLOCK, prefix_hashes=pack(hashes)
        )

        def describe(engine: str) -> None:
            harness.say(
                described, request=request, context=name, context_version=turn, engine=engine
            )

        describe(pool)
        if draw.random() < 0.05:
            self.abandoned += 1
            return  # described, and never sent
        asked = InferenceRequest(
            id=request,
            prompt_tokens=tokens,
            output_tokens=draw.randint(1, 200),
            prompt_hashes=hashes,
            context=name,
            context_version=turn,
        )
        patience_s = draw.uniform(0.1, 2.0) if draw.random() < 0.05 else 3600.0
        with trio.move_on_after(patience_s) as patience:
            try:
                await self._cluster.generate(asked, on_routed=describe)
                self.served += 1
            except EngineError:
                self.failed += 1
        self.abandoned += patience.cancelled_caught

    async def _visits(self, end_s: float) -> None:
        hour = 0
        while trio.current_time() + 3600 <= end_s:
            await self._tenant(self._name("tenant"))
            if hour % 2 == 0:
                await self._engine(self._name("guest"))
            hour += 1
            await trio.sleep_until(min(end_s, trio.current_time() + 3000))

    async def _tenant(self, name: str) -> None:
        """A tenant with a policy of its own, on one of the engines, for ten requests."""
        engine = min(self._cluster.engines)
        client = self._cluster.engines[engine]
        runner = PolicyRunner(self._cluster.bus, Guard(40), source=f"guard/{name}", tenant=name)
        harness = HarnessSession(
            self._cluster.bus, workflow=name, source=f"harness/{name}", tenant=name
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(runner.run)
            for number in range(10):
                described = RequestDescribed(prompt_tokens=700, block_size=BLOCK)
                harness.say(described, request=f"{name}/{number}", engine=engine)
                asked = InferenceRequest(f"{name}/{number}", 700, 8, [], tenant=name)
                await client.generate(asked)
            runner.stop()

    async def _engine(self, name: str) -> None:
        """An engine that joins, crashes once and leaves, and is spoken of after that."""
        engine = SimulatedEngine(load_profile(PROFILE), block_size=BLOCK, name=name)
        worker = EngineWorker(self._cluster.bus, engine, name=name)
        harness = HarnessSession(self._cluster.bus, workflow=name, source=f"harness/{name}")
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.run)
            for number in range(12):
                request = f"{name}/{number}"
                described = RequestDescribed(prompt_tokens=700, block_size=BLOCK)
                harness.say(described, request=request, engine=name)
                if number == 6:
                    engine.crash()
                    await trio.sleep(5)
                try:
                    await engine.generate(InferenceRequest(request, 700, 8, []))
                    self.served += 1
                except EngineError:
                    self.failed += 1
            nursery.cancel_scope.cancel()
        for number in range(3):  # the harness does not know yet
            described = RequestDescribed(prompt_tokens=700, block_size=BLOCK)
            harness.say(described, request=f"{name}/late{number}", engine=name)

    # -- faults -------------------------------------------------------------------------------

    async def _faults(self, end_s: float) -> None:
        faults: list[Callable[[], Awaitable[None]]] = [
            self._outage,
            self._crash,
            self._failing_policy,
            self._reader_that_does_not_read,
            self._harness_that_starts_again,
        ]
        while trio.current_time() + 1800 <= end_s:
            await trio.sleep(self._draw.uniform(60, 1200))
            fault = faults[self.faults.total() % len(faults)]
            await fault()
            self.faults[fault.__name__.strip("_")] += 1

    async def _outage(self) -> None:
        """Nothing that is said is heard for a while."""
        self._bus.out = True
        await trio.sleep(OUTAGE_S)
        self._bus.out = False

    async def _crash(self) -> None:
        """An engine that serves loses all that it holds."""
        engine = self._cluster.engines[max(self._cluster.engines)]
        assert isinstance(engine, SimulatedEngine)
        engine.crash()

    async def _failing_policy(self) -> None:
        """A policy of all tenants' requests raises, having asked for something."""
        runner = PolicyRunner(self._cluster.bus, Faulty(), source=self._name("faulty"))
        with trio.move_on_after(600):
            await runner.run()

    async def _reader_that_does_not_read(self) -> None:
        """Somebody taps the bus and stops reading, so that it is cut off."""
        patterns = ["intent.>", "control.>", "outcome.>"]
        reader = self._cluster.bus.subscribe(patterns, name=self._name("tap"), capacity=16)
        async with reader:
            await trio.sleep(600)
            try:
                await reader.receive()
            except LaggedError:
                return

    async def _harness_that_starts_again(self) -> None:
        """The same workflow, context and requests, counted from 1 again, in its next epoch."""
        for _ in range(2):
            await self._session("harness-that-starts-again")
