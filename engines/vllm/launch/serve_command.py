"""``hear vllm serve``: vLLM's own server, with HEAR's scheduler in it."""

import argparse
import os
import shlex
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import trio

from hear.app import output
from hear.app.cli import Command, Parser
from hear.app.connection import (
    add_bus_arguments,
    check_name,
    check_url,
    cluster_directory,
    connected,
    make_own_folders,
)
from hear.app.nursery import unwrapped
from hear.app.supervisor import TRY_AGAIN
from hear.endpoints import is_host, is_plain
from hear.engines.vllm import versions
from hear.engines.vllm.launch.process import (
    PortInUseError,
    become,
    check_port,
    run_under_supervisor,
)
from hear.engines.vllm.launch.server_command import LaunchSettings, plan
from hear.engines.worker.options import add_worker_arguments, parse_ranks, tenants_of
from hear.errors import BusError, ConfigError

DEFAULT_NAME: Final = "vllm0"
PROBE_S: Final = 10.0
"""A bus takes some seconds to say that a name is in use; loading a model takes longer."""


def own_options() -> argparse.ArgumentParser:
    """HEAR's own options. vLLM has none of these names; a test says so."""
    parser = Parser(
        prog="hear vllm serve",
        usage="hear vllm serve MODEL [options of HEAR] [options of vLLM]",
        description="Start vLLM's OpenAI server with HEAR's scheduler in it. All options that are "
        "not named here go to vLLM unchanged (vllm serve --help=all).",
        allow_abbrev=False,
        add_help=False,
    )
    add_bus_arguments(parser)
    parser.add_argument(
        "--name", default=DEFAULT_NAME, help="of the engine on the bus (%(default)s)"
    )
    add_worker_arguments(parser)
    parser.add_argument(
        "--endpoint", metavar="URL", help="where clients reach the server (from --host and --port)"
    )
    parser.add_argument(
        "--operation-log",
        "--ledger",  # its former name
        type=Path,
        metavar="FILE",
        help="what became of operations, so that none acts twice if the engine is killed (a file "
        "beside the sockets of this user)",
    )
    parser.add_argument(
        "--cpu-tier-gib",
        type=_gib,
        metavar="N",
        help="keep what leaves the first tier in so much host memory (no such tier)",
    )
    parser.add_argument(
        "--untested", action="store_true", help="go on with a vLLM that HEAR is not tested with"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command and what its environment gains"
    )
    parser.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)
    return parser


def configure(parser: argparse.ArgumentParser) -> None:
    """Take every argument as it is: whose an option is, is decided in ``run``."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command; goes on as vLLM unless something is wrong."""
    parser = own_options()
    if {"-h", "--help"} & set(namespace.arguments):
        parser.print_help()
        return 0
    own, rest = parser.parse_known_args(namespace.arguments)
    if not rest:
        raise ConfigError("hear vllm serve: expected a MODEL (see hear vllm serve --help)")
    settings = LaunchSettings(
        bus=own.bus,
        name=check_name(own.name),
        key=own.key,
        ranks=parse_ranks(own.ranks),
        tenants=tenants_of(own),
        endpoint=_endpoint(own.endpoint),
        cpu_tier_gib=own.cpu_tier_gib,
        operation_log=own.operation_log or cluster_directory(own.bus) / f"{own.name}.operations",
    )
    check_url(settings.bus)
    absent = own.dry_run and versions.installed() is None
    vllm = versions.OF_THE_EXTRA if absent else versions.require(untested=own.untested)
    made = plan(rest, settings, vllm, os.environ)
    if own.dry_run:
        if absent:
            output.complain("vLLM is not installed; with the extra vllm it would be")
        changes = [f"{name}={value}" for name, value in made.environment.items()]
        output.say_whole(shlex.join([*changes, *made.command]))
        return 0
    try:
        if made.port is not None:
            check_port(made.host, made.port)
    except PortInUseError as error:
        if not own.with_parent:
            raise
        # An earlier one may still be about to end; whoever keeps this running tries again.
        output.complain(error)
        return TRY_AGAIN
    if settings.operation_log is not None:
        make_own_folders(settings.operation_log)
    if not own.with_parent:
        _say_if_alone(settings)
        become(made.command, made.environment)
    return run_under_supervisor(made.command, made.environment)


def _say_if_alone(settings: LaunchSettings) -> None:
    """Say so if nobody answers on the bus; vLLM serves all the same, and the plug-in tries again.

    Raises:
        ConfigError: the key cannot be used.
    """

    async def probe() -> None:
        with trio.fail_after(PROBE_S):
            async with connected(settings.bus, name=settings.name, key=settings.key):
                pass

    try:
        with unwrapped():
            trio.run(probe)
    except (BusError, trio.TooSlowError) as error:
        reason = str(error) or "no answer"
        output.complain(
            f"{settings.bus}: {reason}; vLLM serves in its own order until HEAR gets through"
        )


def _endpoint(url: str | None) -> str | None:
    """Where clients are told to send requests, if it was said."""
    if url is not None:
        try:
            parts = urlsplit(url if is_plain(url) else "")
            usable = parts.scheme in ("http", "https") and is_host(parts.hostname or "")
            usable = usable and parts.username is None  # it is told to everyone on the bus
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(f"--endpoint {url!r:.200}: expected http://HOST:PORT")
    return url


def _gib(word: str) -> float:
    """A size in GiB that this machine's memory can hold."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    try:
        size = float(word)
    except ValueError:
        size = -1.0
    if not 0 < size < memory:
        raise argparse.ArgumentTypeError(
            f"got {word!r}, expected GiB above 0 and below the {memory:.1f} of this machine"
        )
    return size


COMMAND: Final = Command("start vLLM's server with HEAR in it", configure, run)
