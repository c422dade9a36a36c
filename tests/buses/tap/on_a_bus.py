"""The ``hear`` command on a bus within its own process: ``python -m tests.buses.tap.on_a_bus tap``.

``test://`` is a memory bus on which a small cluster serves until the command leaves. With
``test://closing`` the bus is closed as soon as requests have been served.
"""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import trio

from hear import cli, plugins
from hear.seams import Bus
from tests.buses.tap.scene import Load, serving
from tests.buses.tap.test_follow import Remembering


@asynccontextmanager
async def a_bus(url: str, *, name: str, key: Path | None = None) -> AsyncIterator[Bus]:
    """The bus, with one burst of requests after another on it."""
    bus = Remembering()
    async with serving(bus) as cluster, trio.open_nursery() as nursery:
        load = Load(cluster)

        async def serve() -> None:
            if url.endswith("closing"):
                await load.burst(4)
                bus.close()
            number = 0
            while True:
                await load.turn(f"r{number}", f"c{number % 4}")
                number += 1

        nursery.start_soon(serve)
        yield bus
        nursery.cancel_scope.cancel()


def main(arguments: list[str]) -> int:
    """The command with that bus among those that are known."""
    names, load = plugins.names, plugins.load

    def known(group: str) -> list[str]:
        return [*names(group), "test"] if group == "buses" else names(group)

    def loaded(group: str, name: str) -> object:
        made: Callable[..., object] = a_bus
        return made if (group, name) == ("buses", "test") else load(group, name)

    with patch.object(plugins, "names", known), patch.object(plugins, "load", loaded):
        return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
