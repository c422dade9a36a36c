"""``hear run``: one part of a cluster in this process, found through entry points."""

import argparse
import sys

from hear.app import output, plugins
from hear.app.cli import Command
from hear.app.supervisor import TRY_AGAIN
from hear.errors import BusError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add each part."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name in plugins.names("run"):
        part: Command = plugins.load_installed("run", name)
        sub = parts.add_parser(name, help=part.help, description=part.help)
        part.configure(sub)
        sub.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)
        sub.set_defaults(run_part=part.run)


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command."""
    from hear.app.connection import end_with_standard_input
    from hear.app.log import to_stderr

    to_stderr()
    if namespace.with_parent:
        end_with_standard_input(sys.stdin.fileno())
    try:
        code: int = namespace.run_part(namespace)
    except BusError as error:
        # Whoever keeps this part running may try again; anything else will not mend by itself.
        output.complain(error)
        return TRY_AGAIN
    return code


COMMAND = Command("run one part of a cluster: the bus, an engine or a policy", configure, run)
