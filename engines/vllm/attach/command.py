"""``hear vllm attach``: a vLLM server that runs by itself, joined to a bus from outside."""

import argparse
from functools import partial

import trio

from hear.app import plugins
from hear.app.cli import Command
from hear.app.connection import add_bus_arguments, check_name, connected, run_until_signal
from hear.engines.worker.options import add_worker_arguments, parse_ranks, tenants_of


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
    add_worker_arguments(parser)
    add_bus_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command."""
    with plugins.extra("attach", "hear vllm attach", "httpx", "prometheus_client", "zmq"):
        from hear.engines.vllm.attach.kv_sockets import check_endpoint
        from hear.engines.vllm.attach.worker import serve_attached
        from hear.engines.vllm.launch.server import check_url
    name, ranks = check_name(namespace.name), parse_ranks(namespace.ranks)
    url = check_url(namespace.url)
    for endpoint in filter(None, (namespace.kv_events, namespace.kv_replay)):
        check_endpoint(endpoint)

    async def main(stopping: trio.Event) -> int:
        async with (
            connected(namespace.bus, name=name, key=namespace.key) as bus,
            trio.open_nursery() as nursery,
        ):
            serve = partial(
                serve_attached,
                bus,
                url=url,
                name=name,
                kv_events=namespace.kv_events,
                kv_replay=namespace.kv_replay,
                topic=namespace.topic,
                hash_seed=namespace.hash_seed,
                tenants=tenants_of(namespace),
                ranks=ranks,
            )
            nursery.start_soon(serve)
            await stopping.wait()
            nursery.cancel_scope.cancel()
        return 0

    return run_until_signal(main)


COMMAND = Command("join a vLLM server that runs already, as it is", configure, run)
