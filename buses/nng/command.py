"""``hear run bus``: the hub in a process of its own."""

import argparse
from functools import partial
from pathlib import Path

import trio

from hear.buses.nng.server import serve
from hear.cli import Command
from hear.connection import (
    default_url,
    make_run_directory,
    run_directory,
    run_until_signal,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--bus",
        default=default_url(),
        metavar="URL",
        help="where to listen: ipc://PATH, tcp://HOST:PORT or tls+tcp://HOST:PORT (%(default)s)",
    )
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="who may join, and what each may say and hear; without it, all who reach the address",
    )


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command."""
    if namespace.bus.startswith(f"ipc://{run_directory()}/"):
        make_run_directory()

    async def main(stopping: trio.Event) -> int:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve, namespace.bus, keys=namespace.keys))
            await stopping.wait()
            nursery.cancel_scope.cancel()
        return 0

    return run_until_signal(main)


RUN = Command("the hub of a bus between processes", configure, run)
