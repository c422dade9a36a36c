"""``hear vllm``: start real vLLM with HEAR inside, and what that needs."""

import argparse
from typing import Final

from hear.app.cli import Command
from hear.engines.vllm.attach import command as attach_command
from hear.engines.vllm.launch import install_command, model_command, serve_command

SUBCOMMANDS: Final[dict[str, Command]] = {
    "serve": serve_command.COMMAND,
    "attach": attach_command.COMMAND,
    "install-cpu": install_command.COMMAND,
    "make-model": model_command.COMMAND,
}

_RAW: Final = {"serve", "install-cpu"}
"""Those that pass most of their arguments on, options included."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add each subcommand."""
    commands = parser.add_subparsers(dest="vllm_command", required=True, metavar="COMMAND")
    for name, command in SUBCOMMANDS.items():
        raw = name in _RAW
        sub = commands.add_parser(
            name,
            help=command.help,
            description=command.help,
            # No argument begins with a NUL, so none is taken for an option of this parser.
            prefix_chars="\0" if raw else "-",
            add_help=not raw,
        )
        command.configure(sub)
        sub.set_defaults(run_vllm=command.run)


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command."""
    code: int = namespace.run_vllm(namespace)
    return code


COMMAND: Final = Command("real vLLM: start it with HEAR inside, install it", configure, run)
