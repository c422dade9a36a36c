"""The ``hear`` command. It only gathers the commands of the wings, found through entry points."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import NamedTuple, NoReturn

from hear import plugins
from hear.errors import ConfigError, HearError

_DISTRIBUTION = "hear-protocol"


class Command(NamedTuple):
    """A subcommand: ``configure`` adds its arguments, ``run`` returns the exit code."""

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, where argparse would print how to use it as well."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Bad input is one line and code 2."""
    try:
        parser = Parser(
            prog="hear",
            description="Harness-engine pairing for agentic LLM serving.",
        )
        parser.add_argument("--version", action="version", version=f"hear {version(_DISTRIBUTION)}")
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        for name in _to_load(sys.argv[1:] if arguments is None else arguments):
            command: Command = plugins.load_installed("commands", name)
            sub = commands.add_parser(name, help=command.help, description=command.help)
            command.configure(sub)
            sub.set_defaults(run=command.run)
        namespace = parser.parse_args(arguments)
        code: int = namespace.run(namespace)
        if sys.stdout is not None:
            sys.stdout.flush()
    except HearError as error:
        print(f"hear: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"hear: {error}", file=sys.stderr)
        give_up_output()
        return 1
    except KeyboardInterrupt:
        print("hear: stopped", file=sys.stderr)
        return 130
    return code


def _to_load(arguments: Sequence[str]) -> list[str]:
    """The commands that have to be imported: the one that is asked for, or for help all of them."""
    names = plugins.names("commands")
    return [arguments[0]] if arguments and arguments[0] in names else names


def give_up_output() -> None:
    """What is left in the buffer of standard output would fail again as Python ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
