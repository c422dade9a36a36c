"""The read-only subscriber: messages off the bus and into what counts them.

It publishes nothing and asks for nothing. If it is too slow and cut off, it says so in a metric and
begins anew.
"""

from functools import partial
from typing import Final

import trio
from prometheus_client import CollectorRegistry

from hear.buses.observe.metrics.bus_statistics import BusStatisticsCollector, ask
from hear.buses.observe.metrics.collecting import Collecting
from hear.buses.observe.metrics.endpoint import serving
from hear.buses.observe.metrics.exporting import SpanQueue, otlp_exporter
from hear.buses.observe.metrics.spans import SpanData
from hear.errors import LaggedError
from hear.interfaces import Bus

CAPACITY: Final = 65_536
INTERVAL_S: Final = 1.0
_AT_ONCE: Final = 512  # messages; then others may run


async def follow(
    bus: Bus,
    collecting: Collecting,
    *,
    capacity: int = CAPACITY,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Count what passes until cancelled.

    Raises:
        BusError: the bus is closed.
    """
    started = False
    while True:
        try:
            async with bus.subscribe([">"], name="metrics", capacity=capacity) as messages:
                if not started:
                    started = True
                    task_status.started()
                while True:
                    batch = await messages.receive()
                    now = trio.current_time()
                    for number, envelope in enumerate(batch, 1):
                        collecting.hear(envelope, now)
                        if number % _AT_ONCE == 0:
                            await trio.lowlevel.checkpoint()
        except LaggedError:
            collecting.lose()


async def watch(bus: Bus, collecting: Collecting, statistics: BusStatisticsCollector) -> None:
    """Ask the bus how its readers fare, and settle what is open, once a second until cancelled."""
    while True:
        statistics.statistics = await ask(bus)
        collecting.settle(trio.current_time())
        await trio.sleep(INTERVAL_S)


async def serve(
    bus: Bus,
    *,
    listen: str,
    otlp: str | None = None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve metrics at ``listen``, and send spans to ``otlp``, until cancelled.

    What it is started with is the URL that can be scraped.

    Raises:
        ConfigError: an address cannot be used.
        BusError: the bus is closed.
    """
    registry = CollectorRegistry()
    queue: list[SpanQueue] = []

    def on_span(span: SpanData) -> None:
        for each in queue:
            each.put(span)

    collecting = Collecting(registry, on_span=on_span if otlp is not None else None)
    if otlp is not None:
        queue.append(SpanQueue(otlp_exporter(otlp), collecting.families.spans))
    statistics = BusStatisticsCollector()
    registry.register(statistics)
    async with serving(listen, registry) as url, trio.open_nursery() as nursery:
        for each in queue:
            nursery.start_soon(each.run)
        await nursery.start(partial(follow, bus, collecting))
        nursery.start_soon(watch, bus, collecting, statistics)
        task_status.started(url)
