"""``hear vllm attach``: a vLLM server that runs by itself, joined to a bus from outside."""

import argparse
import sys

import structlog
import trio

from hear.cli import Command
from hear.clock import new_epoch
from hear.connection import add_bus_arguments, check_name, connected, run_until_signal
from hear.engines.vllm.attach import attached
from hear.engines.vllm.kv_sockets import check_endpoint
from hear.engines.vllm.server import check_url
from hear.engines.worker import EngineWorker
from hear.seams import Bus

_log = structlog.get_logger("hear.attach")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("url", help="the server, as http://HOST:PORT")
    parser.add_argument(
        "--name", default="vllm0", help="name of the engine, which no other on the bus has (vllm0)"
    )
    parser.add_argument(
        "--kv-events",
        metavar="ENDPOINT",
        help="where it publishes KV events, as tcp://HOST:PORT (without: residency is unknown)",
    )
    parser.add_argument(
        "--kv-replay",
        metavar="ENDPOINT",
        help="where it replays them (without: residency is unknown once an event is lost)",
    )
    parser.add_argument("--topic", default="", help="the topic of its KV events (any)")
    parser.add_argument(
        "--hash-seed",
        metavar="SEED",
        help="its PYTHONHASHSEED, so that its hash scheme is known before its first event",
    )
    add_bus_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command."""
    name = check_name(namespace.name)
    url = check_url(namespace.url)
    for endpoint in filter(None, (namespace.kv_events, namespace.kv_replay)):
        check_endpoint(endpoint)

    async def main(stopping: trio.Event) -> int:
        async with (
            connected(namespace.bus, name=name, key=namespace.key) as bus,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_serve, bus, url, name, namespace)
            await stopping.wait()
            nursery.cancel_scope.cancel()
        return 0

    return run_until_signal(main)


async def _serve(bus: Bus, url: str, name: str, namespace: argparse.Namespace) -> None:
    await serve_attached(
        bus,
        url=url,
        name=name,
        kv_events=namespace.kv_events,
        kv_replay=namespace.kv_replay,
        topic=namespace.topic,
        hash_seed=namespace.hash_seed,
    )


async def serve_attached(
    bus: Bus,
    *,
    url: str,
    name: str,
    kv_events: str | None = None,
    kv_replay: str | None = None,
    topic: str = "",
    hash_seed: str | None = None,
    ranks: dict[str, int] | None = None,
    epoch: int | None = None,
) -> None:
    """Join the server at ``url`` to a bus as the engine ``name``, until cancelled.

    However often the server goes, it is waited for.

    Raises:
        ConfigError: an address cannot be one.
        EngineError: no vLLM server is there as this begins, or its events are not.
    """
    async with attached(
        url, kv_events=kv_events, kv_replay=kv_replay, topic=topic, hash_seed=hash_seed
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
            epoch=new_epoch() if epoch is None else epoch,
            max_restarts=sys.maxsize,
        )
        await worker.run()


COMMAND = Command("join a vLLM server that runs by itself to a bus", configure, run)
