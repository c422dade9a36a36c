"""The ``hear`` command. It only gathers the commands of the wings, found through entry points."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, NoReturn

from hear.app import output, plugins
from hear.errors import ConfigError, HearError

_DISTRIBUTION = "hear-protocol"


class Command(NamedTuple):
    """A subcommand: ``configure`` adds its arguments, ``run`` returns the exit code."""

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, where argparse would print how to use it as well, and takes
    no option for another one that begins alike (``--key`` for ``--keys``)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Bad input is one line and code 2."""
    if arguments is None:  # this is the whole program
        output.show_uncaught()
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
        if arguments is None:
            _log_to_stderr()
        code: int = namespace.run(namespace)
        output.flush()
    except HearError as error:
        output.complain(error)
        return 2
    except OSError as error:
        output.complain(error)
        output.give_up()
        return 1
    except KeyboardInterrupt:
        output.complain("stopped")
        return 130
    return code


def _to_load(arguments: Sequence[str]) -> list[str]:
    """The commands that have to be imported: the one that is asked for, or for help all of them."""
    names = plugins.names("commands")
    return [arguments[0]] if arguments and arguments[0] in names else names


def _log_to_stderr() -> None:
    """No command can forget it, and each may choose another level."""
    from hear.app.log import to_stderr

    to_stderr("warning")


if __name__ == "__main__":
    sys.exit(main())
