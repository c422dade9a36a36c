"""``hear run bus``: the hub in a process of its own."""

import argparse
import os
import resource
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import structlog
import trio

from hear.app.cli import Command
from hear.app.connection import default_url, make_own_folders, run_until_signal
from hear.buses.nng.server import serve
from hear.buses.nng.wire import host_of
from hear.errors import ConfigError

_log = structlog.get_logger("hear.hub")

MAX_DESCRIPTORS: Final = 4_096
"""Most descriptors of the process, and so about as many connections."""

_PRIVATE_UMASK = 0o077


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
    parser.add_argument(
        "--without-keys",
        action="store_true",
        help="listen without keys also where others reach the address: they may do everything",
    )


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command."""
    url, keys = namespace.bus, namespace.keys
    check_reach(url, keys=keys is not None, without_keys=namespace.without_keys)
    if url.startswith("ipc://"):
        make_own_folders(Path(url.removeprefix("ipc://")))
        if keys is None and not namespace.without_keys:
            os.umask(_PRIVATE_UMASK)  # of the socket: who may open it may do everything

    _limit_descriptors()

    async def main(stopping: trio.Event) -> int:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve, url, keys=keys))
            if warning := _warning(url, keys=keys is not None):
                _log.warning("hub.exposed", url=url, because=warning)
            await stopping.wait()
            nursery.cancel_scope.cancel()
        return 0

    return run_until_signal(main)


def _limit_descriptors() -> None:
    """Have more descriptors than a shell gives, and no more than connections without a word may
    fill: nng closes those that say nothing after some 10 s, and over TLS never, at 33 KB each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def check_reach(url: str, *, keys: bool, without_keys: bool) -> None:
    """See that no hub that grants everything to everyone listens where others reach it by mistake.

    Raises:
        ConfigError: it would, and nobody has said that it may; or both was said.
    """
    if keys and without_keys:
        raise ConfigError("--keys and --without-keys: expected one of them")
    if not keys and not without_keys and _is_for_others(url):
        raise ConfigError(
            f"bus {url!r}: without keys, whoever reaches this address may say and hear everything: "
            "give --keys FILE, listen on 127.0.0.1 or ipc://, or say that it is meant with "
            "--without-keys (without_keys = true in a cluster file)"
        )


def _warning(url: str, *, keys: bool) -> str:
    """What whoever runs the hub should know about who is kept out; nothing if all others are."""
    if not url.startswith("tcp://"):
        return ""
    if not keys:
        who = "everyone who reaches it" if _is_for_others(url) else "every user of this machine"
        return f"without keys, {who} may say and hear everything"
    if _is_for_others(url):
        return "tcp:// is not encrypted, what is said can be read on the way: use tls+tcp://"
    return ""


def _is_for_others(url: str) -> bool:
    """Whether other machines may reach an address. Of a name nobody knows, but of localhost."""
    if url.partition("://")[0] not in ("tcp", "tls+tcp"):
        return False
    host = host_of(url)
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


RUN = Command("the hub of a bus between processes", configure, run)
