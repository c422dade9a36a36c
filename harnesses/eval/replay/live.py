"""A workload on a running cluster, in real time: its engines are found on the bus.

The harness is the one of a replay. Only where requests go is different: to the endpoints that
engines tell of with their capabilities, and from two on through a pool that joins the bus.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import structlog
import trio

from hear.app.clock import new_epoch
from hear.app.cluster import POOL, Cluster
from hear.codec import open_body
from hear.errors import ConfigError, EngineError, RemoteProtocolError
from hear.harnesses.eval.replay.runner import Loop, Replay
from hear.harnesses.eval.report.metrics import make_row
from hear.harnesses.eval.report.results import Row
from hear.harnesses.eval.workloads.workload import Workload
from hear.harnesses.pool.dispatcher import Dispatcher
from hear.harnesses.pool.reaching import Reach, client_of
from hear.interfaces import Bus, InferenceClient, InferenceRequest, InferenceResult
from hear.messages import DEFAULT_TENANT, CapabilitiesReported
from hear.subjects import token

_log = structlog.get_logger("hear.play")

LOOK_S: Final = 2.0
"""Time in which engines may tell of themselves."""

MAX_ENGINES: Final = 1_024
"""Most engines that are played on: anyone who may say state can make names of engines."""


async def play(
    bus: Bus,
    workload: Workload,
    engines: Mapping[str, CapabilitiesReported],
    *,
    load: float,
    seed: int,
    loop: Loop,
    tenant: str = DEFAULT_TENANT,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[Row, list[str]]:
    """Serve a workload on the engines of a running cluster; returns its row, and what was broken.

    Args:
        workload: what to play; ``load`` and ``seed`` are only recorded.
        engines: where, as ``find_engines`` tells.
        tenant: whose requests they are.

    Raises:
        ConfigError: no engine can be reached, or one has blocks of another size.
        PluginError: one has an endpoint for which no client is installed.
    """
    check_engines(engines, workload, tenant)
    clients = {name: client_of(name, told.endpoint) for name, told in engines.items()}
    epoch = new_epoch()
    run = Replay(
        workload,
        loop,
        progress,
        lambda envelopes, time_s: None,
        epoch,
        tenant=tenant,
        prefix=f"{epoch:x}/",
    )
    async with trio.open_nursery() as nursery, reached(bus, clients, tenant) as cluster:
        await nursery.start(run.audit.run, bus)
        await run.play(cluster)
        unserved = {} if cluster.pool is None else dict(cluster.pool.unserved)
        nursery.cancel_scope.cancel()
    row = make_row(
        run.turns,
        workload=workload.name,
        sessions=len(workload.sessions),
        left_out=workload.left_out,
        remarks=workload.remarks,
        engine=engines[min(engines)].model or "?",
        engines=len(engines),
        load=load,
        policy="live",
        seed=seed,
        engine_names=engines,
        notes=[
            *run.audit.notes(),
            *(
                f"{engine} could not serve {count:,} requests, and others were asked"
                for engine, count in sorted(unserved.items())
            ),
            *([] if run.audit.sources else ["no policy asked for anything while this was played"]),
        ],
        guard_violations=run.audit.guard_violations,
        operations=dict(sorted(run.audit.outcomes.items())),
        operations_open=0,  # policies go on, and what they ask for may outlast this workload
        policy_failures=(),
    )
    failed = [turn for turn in run.turns if turn.status == "failed"]
    problems = [problem for problem in run.audit.problems() if "no terminal" not in problem]
    denied = getattr(bus, "denied", 0)
    if denied:
        problems.append(
            f"the key does not grant all that was said ({denied} reasons, in the log), so policies "
            "heard less than there was: docs/security.md has keys that do"
        )
    if failed:
        problems.append(f"{len(failed)} requests failed, the first by {failed[0].reason}")
    return row, problems


async def find_engines(
    bus: Bus, tenant: str = DEFAULT_TENANT, within_s: float = LOOK_S
) -> dict[str, CapabilitiesReported]:
    """The engines that tell a tenant of themselves within a time and take requests, by name."""
    found: dict[str, CapabilitiesReported] = {}
    pattern = f"state.{token(tenant)}.*.capabilities.>"
    async with bus.subscribe([pattern], name="play") as subscription:
        with trio.move_on_after(within_s):
            while True:
                for envelope in await subscription.receive():
                    try:
                        message = open_body(envelope)
                    except RemoteProtocolError:
                        continue
                    engine = envelope.key.engine
                    if (
                        isinstance(message, CapabilitiesReported)
                        and engine
                        and message.endpoint
                        and (engine in found or len(found) < MAX_ENGINES)
                    ):
                        found[engine] = message
    return dict(sorted(found.items()))


def check_engines(
    engines: Mapping[str, CapabilitiesReported], workload: Workload, tenant: str = DEFAULT_TENANT
) -> None:
    """See that a workload can be served.

    Raises:
        ConfigError: no engine takes requests, or one has blocks of another size.
    """
    if not engines:
        raise ConfigError(
            f"no engine on this bus tells tenant {tenant!r} where it takes requests (see: hear "
            "status; an engine tells those that hear run engine --tenant names, and those that it "
            "has served; --tenant says whose requests these are)"
        )
    for name, capabilities in engines.items():
        if capabilities.block_size != workload.block_size:
            raise ConfigError(
                f"engine {name!r:.80}: blocks of {capabilities.block_size} tokens, expected the "
                f"{workload.block_size} of {workload.name}"
            )


@asynccontextmanager
async def reached(
    bus: Bus, engines: Mapping[str, Reach], tenant: str = DEFAULT_TENANT
) -> AsyncIterator[Cluster]:
    """The engines, as the harness of a replay wants them."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        clients: dict[str, InferenceClient] = {}
        for name, reach in engines.items():
            clients[name] = _Reached(reach, nursery)
        pool: Dispatcher | None = None
        if len(clients) > 1:
            pool = Dispatcher(bus, clients, name=POOL, tenant=tenant, epoch=new_epoch())
            await nursery.start(pool.run)
        first = min(clients)
        yield Cluster(
            bus=bus,
            engine=clients[first] if pool is None else pool,
            engine_name=first if pool is None else POOL,
            engines=clients,
            workers={},
            pool=pool,
            policies=(),
        )
        nursery.cancel_scope.cancel()


class _Reached:
    """An engine at an endpoint; it is reached anew if it has hung up, as after a restart."""

    def __init__(self, reach: Reach, nursery: trio.Nursery) -> None:
        self._reach = reach
        self._nursery = nursery
        self._client: InferenceClient | None = None
        self._lock = trio.Lock()

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        """Send a request and wait for its last token, or for its refusal."""
        async with self._lock:
            if self._client is None:
                self._client = await self._nursery.start(self._hold)
        client = self._client
        try:
            return await client.generate(request)
        except EngineError:
            if self._client is client:
                self._client = None
            raise

    async def _hold(self, task_status: trio.TaskStatus[InferenceClient]) -> None:
        async with self._reach() as client:
            task_status.started(client)
            await trio.sleep_forever()
