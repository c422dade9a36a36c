"""``hear why REQUEST``: the story of a request, from a recording or from a running bus."""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import trio
from rich.table import Table

from hear.app import connection, console, output
from hear.app.cli import Command
from hear.app.log import to_stderr
from hear.buses.observe.why.facts import Story
from hear.buses.observe.why.story import find_story
from hear.buses.observe.why.telling import sentences
from hear.buses.observe.why.timeline import timeline
from hear.buses.observe.why.words import time_of_day
from hear.errors import ConfigError
from hear.escaping import cell, legible, one_line, to_json
from hear.interfaces import RememberingBus
from hear.messages import Envelope
from hear.recording import Heard, Record, opened

_WIDTH = 140  # of a table that goes to a file or a pipe


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("request", metavar="REQUEST", help="the id of a request")
    parser.add_argument(
        "--recording", type=Path, metavar="FILE", help="a file that hear record has written"
    )
    parser.add_argument(
        "--follow", action="store_true", help="on a bus: tell it again when the request has ended"
    )
    parser.add_argument(
        "--for",
        dest="seconds",
        type=connection.positive_seconds,
        default=math.inf,
        metavar="SECONDS",
        help="how long to follow it (until it ends)",
    )
    parser.add_argument("--tenant", help="whose request it is, if several have one of that id")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.add_argument(
        "--all", action="store_true", help="list the requests that went before it one by one"
    )
    connection.add_bus_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command."""
    to_stderr("warning")
    if namespace.recording is not None:
        if namespace.follow:
            raise ConfigError("--follow: a recording has no future; leave it out, or name a --bus")
        return _from_recording(namespace)
    return connection.run(lambda: _from_bus(namespace))


def _from_recording(namespace: argparse.Namespace) -> int:
    path: Path = namespace.recording
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: is no file; a recording is read twice, so it has to be one")
    with opened(path) as first:
        clock = first.header.clock
    tails: set[str] = set()

    def records(naming: Sequence[str]) -> Iterator[Record]:
        with opened(path) as recording:
            yield from recording.records(naming)
            tails.add(recording.tail())

    story = find_story(records, namespace.request, clock=clock, tenant=namespace.tenant)
    show(story, namespace, notes=sorted(tails - {""}))
    return 0


async def _from_bus(namespace: argparse.Namespace) -> int:
    name = connection.own_name("why")
    async with connection.connected(namespace.bus, name=name, key=namespace.key) as bus:
        if not hasattr(bus, "history"):
            raise ConfigError(
                f"bus {namespace.bus}: does not remember what has passed; "
                "use hear record, and then hear why --recording"
            )
        await explain(cast(RememberingBus, bus), namespace)
    return 0


async def explain(bus: RememberingBus, namespace: argparse.Namespace) -> None:
    """Tell the story from what a bus remembers; with ``--follow`` again when it has ended.

    Raises:
        ConfigError: the bus remembers nothing of the request.
        BusError: the bus is closed, or this reader was cut off.
    """
    if not namespace.follow:
        tell(await bus.history([">"]), namespace)
        return
    async with bus.subscribe([">"], name="why", capacity=65_536) as messages:
        heard = list(await bus.history([">"]))
        story = tell(heard, namespace)
        with trio.move_on_after(namespace.seconds):
            while story.ended_s is None:
                batch = await messages.receive()
                heard += batch
                if any(
                    e.kind == "request_outcome" and e.key.request == story.request for e in batch
                ):
                    story = _story(heard, namespace)
        tell(heard, namespace)


def tell(heard: Sequence[Envelope], namespace: argparse.Namespace) -> Story:
    """Print the story that these messages tell of the request."""
    story = _story(heard, namespace)
    show(story, namespace)
    return story


def _story(heard: Sequence[Envelope], namespace: argparse.Namespace) -> Story:
    # What came while the memory was read stands in both.
    distinct = {(e.source, e.epoch, e.id): e for e in heard}
    records = [Heard(envelope.time_s, envelope) for envelope in distinct.values()]
    return find_story(lambda naming: records, namespace.request, tenant=namespace.tenant)


def show(story: Story, namespace: argparse.Namespace, *, notes: Sequence[str] = ()) -> None:
    """Print a story: in words and as a table, or as JSON."""
    if namespace.json:
        output.say_whole(to_json(Told(sentences(story), notes, story), pretty=True))
        return
    story = legible(story)
    screen = console.of_results(_WIDTH)
    for number, sentence in enumerate([*sentences(story), *(f"{note}." for note in notes)]):
        screen.print(one_line(sentence), style="bold" if number == 0 else "", soft_wrap=True)
    screen.print(f"\nIn seconds from {time_of_day(story)}:", soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in timeline(story, each=namespace.all):
        table.add_row(f"{line.at_s:+.3f}", cell(line.who, _WIDTH // 3), one_line(line.what))
    screen.print(table)


class Told(msgspec.Struct, frozen=True):
    """What ``--json`` prints: the words, what is to be said of the source, and the facts."""

    summary: Sequence[str]
    notes: Sequence[str]
    facts: Story


COMMAND = Command("the story of one request: why it waited, and for whom", configure, run)
