"""How the readers of a bus fare, as the bus itself tells: who lags, and who lost something.

The bus is asked on the trio side, now and then; a scrape, which comes from a thread, is given what
was last heard, and nothing once that has grown old.
"""

from collections.abc import Iterable
from typing import Final, Protocol, runtime_checkable

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hear.buses.observe.metrics.families import MAX_LABEL, OTHER
from hear.errors import BusError
from hear.escaping import printable
from hear.interfaces import Bus, BusStatistics

ASK_WITHIN_S: Final = 2.0
MAX_SUBSCRIBERS: Final = 500


@runtime_checkable
class _Central(Protocol):
    """A bus whose hub can be asked for the statistics of all that are joined to it."""

    async def central_statistics(self) -> BusStatistics: ...


async def ask(bus: Bus) -> BusStatistics | None:
    """The statistics of the whole bus; None if it does not answer in time."""
    if not isinstance(bus, _Central):
        return bus.statistics()
    try:
        with trio.move_on_after(ASK_WITHIN_S):
            return await bus.central_statistics()
    except BusError:
        pass
    return None


class BusStatisticsCollector(Collector):
    """Shows ``statistics``, as it was last set; nothing while that is None."""

    def __init__(self) -> None:
        self.statistics: BusStatistics | None = None

    def describe(self) -> Iterable[Metric]:
        """The families, without samples."""
        return self._families(BusStatistics(published={}, subscriptions=()))

    def collect(self) -> Iterable[Metric]:
        """The families, with what was last heard."""
        statistics = self.statistics
        return () if statistics is None else self._families(statistics)

    def _families(self, statistics: BusStatistics) -> list[Metric]:
        published = CounterMetricFamily(
            "hear_bus_published", "Messages published, as the bus counts.", labels=["category"]
        )
        for category, count in statistics.published.items():
            published.add_metric([printable(category)], count)
        lagged = CounterMetricFamily(
            "hear_bus_lagged", "Subscriptions that were cut off for being slow."
        )
        lagged.add_metric([], statistics.lagged)
        queued = GaugeMetricFamily(
            "hear_subscription_queued", "Messages not read yet.", labels=["subscriber"]
        )
        received = CounterMetricFamily(
            "hear_subscription_received", "Messages read.", labels=["subscriber"]
        )
        dropped = CounterMetricFamily(
            "hear_subscription_dropped", "Messages of state lost.", labels=["subscriber"]
        )
        # Two subscriptions may have one name; their numbers are added up.
        sums: dict[str, list[int]] = {}
        for row in statistics.subscriptions:
            name = printable(row.name)
            if len(name) > MAX_LABEL or (name not in sums and len(sums) >= MAX_SUBSCRIBERS):
                name = OTHER
            total = sums.setdefault(name, [0, 0, 0])
            for place, number in enumerate((row.queued, row.received, row.dropped)):
                total[place] += number
        for name, (num_queued, num_received, num_dropped) in sums.items():
            queued.add_metric([name], num_queued)
            received.add_metric([name], num_received)
            dropped.add_metric([name], num_dropped)
        return [published, lagged, queued, received, dropped]
