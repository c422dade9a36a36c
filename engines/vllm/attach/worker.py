"""The worker that joins a running vLLM server to a bus."""

import sys

import structlog

from hear.app.clock import new_epoch
from hear.engines.vllm.attach.backend import attached
from hear.engines.worker.loop import EngineWorker
from hear.interfaces import Bus
from hear.messages import DEFAULT_TENANT

_log = structlog.get_logger("hear.attach")


async def serve_attached(
    bus: Bus,
    *,
    url: str,
    name: str,
    kv_events: str | None = None,
    kv_replay: str | None = None,
    topic: str = "",
    hash_seed: str | None = None,
    tenants: tuple[str, ...] = (DEFAULT_TENANT,),
    ranks: dict[str, int] | None = None,
) -> None:
    """Join the server at ``url`` to a bus as the engine ``name``, until cancelled.

    However often the server goes, it is waited for.

    Raises:
        ConfigError: an address cannot be one.
        EngineError: no vLLM server is there as this begins, or its events are not.
    """
    async with attached(
        url,
        kv_events=kv_events,
        kv_replay=kv_replay,
        topic=topic,
        tenants=tenants,
        hash_seed=hash_seed,
    ) as engine:
        _log.info(
            "server.attached",
            url=url,
            engine=name,
            model=engine.capabilities().model,
            residency="known" if engine.residency_known() else "known in part",
        )
        worker = EngineWorker(
            bus,
            engine,
            name=name,
            ranks=ranks,
            tenants=tenants,
            epoch=new_epoch(),
            max_restarts=sys.maxsize,
        )
        await worker.run()
