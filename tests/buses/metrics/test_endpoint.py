"""The endpoint is scraped over HTTP, off the loop of trio."""

import urllib.error
import urllib.request
from functools import partial

import pytest
import trio
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from hear.buses.memory import MemoryBus
from hear.buses.observe.metrics.endpoint import parse_address, serving
from hear.buses.observe.metrics.tap import serve
from hear.delivery import Sequencer
from hear.errors import ConfigError
from hear.interfaces import BusStatistics, SubscriptionStatistics
from hear.messages import Key, QueueChanged, RequestOutcome


async def scrape(url: str) -> str:
    """Get a page in a thread, within bounds."""

    def get() -> str:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())

    with trio.fail_after(20):
        return await trio.to_thread.run_sync(get)


def samples(page: str) -> dict[tuple[str, ...], float]:
    """The samples of a page, by name and values of labels."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def test_what_passes_on_a_bus_is_scraped_over_http() -> None:
    bus = MemoryBus()
    engine, key = Sequencer("e0"), Key(engine="e0", request="r")
    async with trio.open_nursery() as nursery:
        url = await nursery.start(partial(serve, bus, listen="127.0.0.1:0"))
        bus.publish(engine.wrap(QueueChanged(num_waiting=3), key, 50.0))
        outcome = RequestOutcome(status="completed", queue_s=0.3, prefill_s=0.1, decode_s=1.0)
        bus.publish(engine.wrap(outcome, key, 60.0))
        await trio.testing.wait_all_tasks_blocked()
        page = samples(await scrape(url))
        assert page["hear_queue_requests", "e0", "waiting"] == 3
        assert page["hear_requests_total", "e0", "", "completed"] == 1
        assert page["hear_request_ttft_seconds_bucket", "e0", "0.5"] == 1
        assert page["hear_request_ttft_seconds_bucket", "e0", "0.25"] == 0
        assert ("hear_subscription_dropped_total", "metrics") in page
        assert ("hear_kv_blocks", "e0", "gpu", "used") not in page
        nursery.cancel_scope.cancel()
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        await scrape(url)
    assert bus.statistics().subscriptions == ()


async def test_a_scrape_is_answered_while_the_loop_is_busy() -> None:
    registry = CollectorRegistry()
    Counter("things_total", "Things.", registry=registry).inc(3)
    async with serving("127.0.0.1:0", registry) as url:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: ASYNC210 - the point of it
            assert b"things_total 3.0" in answer.read()


async def test_a_port_that_is_taken_is_one_clear_error() -> None:
    async with serving("127.0.0.1:0", CollectorRegistry()) as url:
        port = url.rpartition(":")[2].partition("/")[0]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: cannot listen there: Address"):
            async with serving(f"127.0.0.1:{port}", CollectorRegistry()):
                pass
    async with serving(f"127.0.0.1:{port}", CollectorRegistry()):
        pass  # it is free again


@pytest.mark.parametrize("address", ["host.invalid:0", "203.0.113.7:0", "x" * 300 + ":0"])
async def test_a_host_that_is_not_here_is_one_clear_error(address: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen there"):
        async with serving(address, CollectorRegistry()):
            pass


def test_addresses_are_host_and_port() -> None:
    assert parse_address("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert parse_address("[::1]:0") == ("::1", 0)
    assert parse_address("name:65535") == ("name", 65_535)
    for text in ("", "9464", ":9464", "host", "host:", "host:x", "host:-1", "host:65536", "::1:80"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            parse_address(text)


class CentralBus(MemoryBus):
    """A bus with a hub, which answers for all, or does not answer."""

    answers = True

    async def central_statistics(self) -> BusStatistics:
        if not self.answers:
            await trio.sleep_forever()
        slow = SubscriptionStatistics("slow", queued=7, received=5, dropped=3)
        return BusStatistics({"state": 9}, (slow, slow), lagged=2)


async def test_a_hub_is_asked_for_all_and_what_it_does_not_say_is_absent() -> None:
    bus = CentralBus()
    async with trio.open_nursery() as nursery:
        url = await nursery.start(partial(serve, bus, listen="127.0.0.1:0"))
        await trio.testing.wait_all_tasks_blocked()
        page = samples(await scrape(url))
        assert page["hear_subscription_queued", "slow"] == 14  # two of one name
        assert page["hear_subscription_dropped_total", "slow"] == 6
        assert page["hear_bus_published_total", "state"] == 9
        assert page["hear_bus_lagged_total",] == 2
        nursery.cancel_scope.cancel()


async def test_a_hub_that_does_not_answer_is_waited_for_within_bounds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    from hear.buses.observe.metrics.bus_statistics import ask

    bus = CentralBus()
    bus.answers = False
    with trio.fail_after(10):
        assert await ask(bus) is None
