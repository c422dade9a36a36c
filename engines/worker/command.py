"""``hear run engine``: one engine and its worker in a process of their own."""

import argparse
from pathlib import Path

import trio

from hear.app import plugins
from hear.app.cli import Command
from hear.app.clock import new_epoch
from hear.app.connection import (
    add_bus_arguments,
    check_name,
    cluster_directory,
    connected,
    make_own_folders,
    run_until_signal,
)
from hear.engines.simulated import serving
from hear.engines.worker.loop import EngineWorker
from hear.engines.worker.operation_log import OperationLog
from hear.engines.worker.options import add_worker_arguments, parse_ranks, tenants_of
from hear.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", help="name of the engine, which no other on the bus has")
    parser.add_argument(
        "--kind",
        default="simulated",
        help=f"one of {', '.join(plugins.names('engines'))} (simulated)",
    )
    parser.add_argument(
        "--profile",
        default="h100-qwen3-8b",
        metavar="NAME|FILE",
        help="what to simulate (h100-qwen3-8b)",
    )
    parser.add_argument("--block-size", type=int, default=512, help="tokens in a block (512)")
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="where it takes requests: sim+unix://PATH or sim+tcp://HOST:PORT (a socket)",
    )
    parser.add_argument(
        "--operation-log",
        "--ledger",  # its former name
        type=Path,
        metavar="FILE",
        help="what became of operations, so that none acts twice if this process is killed",
    )
    add_worker_arguments(parser)
    add_bus_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command."""
    name = check_name(namespace.name)
    folder = cluster_directory(namespace.bus)
    endpoint = namespace.endpoint or f"sim+unix://{folder}/{name}.engine"
    serving.check_endpoint(endpoint)
    if not 1 <= namespace.block_size <= 1 << 20:
        raise ConfigError(f"--block-size {namespace.block_size}: expected 1 to {1 << 20} tokens")
    if namespace.endpoint is None:
        make_own_folders(folder / name)
    ranks = parse_ranks(namespace.ranks)
    backend = plugins.load_typed("engines", namespace.kind)(
        namespace.profile, block_size=namespace.block_size, name=name
    )
    operation_log = (
        None if namespace.operation_log is None else OperationLog(namespace.operation_log)
    )

    async def main(stopping: trio.Event) -> int:
        async with (
            connected(namespace.bus, name=name, key=namespace.key) as bus,
            trio.open_nursery() as nursery,
        ):
            told = await nursery.start(serving.serve, backend, endpoint)
            worker = EngineWorker(
                bus,
                backend,
                name=name,
                ranks=ranks,
                tenants=tenants_of(namespace),
                epoch=new_epoch(),
                operation_log=operation_log,
                endpoint=told,
            )
            await nursery.start(worker.run)
            await stopping.wait()
            nursery.cancel_scope.cancel()
        return 0

    return run_until_signal(main)


RUN = Command("one engine, with the worker that joins it to a bus", configure, run)
