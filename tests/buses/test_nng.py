"""The bus between processes: the shipped conformance checks, over each kind of address."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from hear.buses.nng.client import connect
from hear.buses.nng.server import hub
from hear.buses.testing import CHECKS, Check
from hear.seams import Bus


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_keeps_what_every_bus_promises(check: Check) -> None:
    @asynccontextmanager
    async def bus() -> AsyncIterator[Bus]:
        with tempfile.TemporaryDirectory() as folder:
            url = f"ipc://{Path(folder)}/bus"
            async with hub(url), connect(url, name="me") as made:
                yield made

    with trio.fail_after(60):
        await check(bus, 200)
