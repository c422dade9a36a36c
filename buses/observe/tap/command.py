"""``hear tap``: what passes on a bus, as it passes, as lines or as a full screen."""

import argparse
import math
import os
import shutil
import sys

from hear.app import connection, output, plugins
from hear.app.cli import Command
from hear.app.log import to_stderr
from hear.buses.observe.tap.filters import CATEGORIES, Filter, Wanted
from hear.buses.observe.tap.lines import Lines
from hear.buses.observe.tap.records import Records
from hear.buses.observe.tap.watch import Form, watch
from hear.errors import ConfigError

_FILTERS = ("subject", "request", "context", "engine", "policy", "category")
_OF_LINES = (*_FILTERS, "count", "for", "json", "bodies", "history")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    connection.add_bus_arguments(parser)
    choose = parser.add_argument_group(
        "what to show", "Given twice, an option means either; different ones must all hold."
    )
    choose.add_argument(
        "--subject",
        action="append",
        metavar="PATTERN",
        help="subjects that match, such as 'state.*.engine0.>' ('*' one token, '>' the rest)",
    )
    choose.add_argument(
        "--request",
        action="append",
        metavar="ID",
        help="all about a request: intent, controls, outcomes, and the queue where it mentions it",
    )
    choose.add_argument("--context", action="append", metavar="ID", help="all about a context")
    choose.add_argument("--engine", action="append", metavar="NAME", help="to and from an engine")
    choose.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="what a policy has published, and the outcomes of its operations",
    )
    choose.add_argument("--category", action="append", choices=CATEGORIES, help="a category")
    parser.add_argument("--history", action="store_true", help="first what the bus remembers")
    parser.add_argument("--count", type=_count, metavar="N", help="end after N messages")
    parser.add_argument(
        "--for",
        type=_seconds,
        metavar="SECONDS",
        help="end after a time; 0 with --history: no more",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--bodies", action="store_true", help="with --json: every block hash")
    parser.add_argument("--screen", action="store_true", help="a full-screen view (Textual)")


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command; 0 at its end, also when nobody reads any more, and 2 without a bus."""
    if namespace.screen:
        return _run_screen(namespace)
    if namespace.bodies and not namespace.json:
        raise ConfigError("--bodies: expected together with --json")
    chosen = Filter(Wanted(*(tuple(getattr(namespace, name) or ()) for name in _FILTERS)))
    output.check_open()
    form = _form(namespace)
    to_stderr("warning")

    async def main() -> int:
        async with connection.connected(
            namespace.bus, name=connection.own_name("tap"), key=namespace.key
        ) as bus:
            descriptor, encoding = output.descriptor()
            await watch(
                bus,
                chosen,
                form,
                name=connection.own_name("tap"),
                descriptor=descriptor,
                encoding=encoding,
                history=namespace.history,
                count=namespace.count,
                for_s=getattr(namespace, "for"),
            )
        return 0

    return connection.run(main)


def _form(namespace: argparse.Namespace) -> Form:
    if namespace.json:
        return Records(all_hashes=namespace.bodies)
    terminal = output.is_terminal()
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    width = shutil.get_terminal_size().columns if terminal else None
    return Lines(colour=terminal and not plain, width=width)


def _run_screen(namespace: argparse.Namespace) -> int:
    given = [name for name in _OF_LINES if getattr(namespace, name) not in (None, False)]
    if given:
        raise ConfigError(f"--screen: expected without --{given[0]}, which is for lines")
    with plugins.extra("screen", "hear tap --screen", "textual"):
        from hear.buses.observe.tap.screen import show
    # Textual draws on standard error, so that standard output stays free.
    if not (sys.stdin and sys.stdin.isatty() and output.errors_are_seen()):
        raise ConfigError("--screen: this is no terminal; without it hear tap prints lines")
    name = connection.own_name("tap")
    return show(
        lambda: connection.connected(namespace.bus, name=name, key=namespace.key), name=name
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, 0 or more")
    return seconds


COMMAND = Command("show what passes on a bus, as it passes", configure, run)
