"""Spans reach a collector, and one that is down or slow hurts nobody."""

import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from hear.buses.observe.metrics.exporting import SpanQueue, otlp_exporter
from hear.buses.observe.metrics.families import Families
from hear.buses.observe.metrics.spans import SpanData
from hear.errors import ConfigError


def span(number: int) -> SpanData:
    return SpanData(name=f"s{number}", trace_id=1, span_id=number + 1, start_s=1.0, end_s=2.0)


class Counted:
    """A queue and what became of its spans."""

    def __init__(self, exporter: SpanExporter, **options: int) -> None:
        self._registry = CollectorRegistry()
        fates = Families(self._registry).spans
        self.queue = SpanQueue(exporter, fates, **options)

    def __call__(self, fate: str) -> float:
        return self._registry.get_sample_value("hear_spans_total", {"fate": fate}) or 0

    async def until(self, fate: str, count: int) -> None:
        with trio.fail_after(20):
            while self(fate) < count:  # noqa: ASYNC110 - counters tell no event
                await trio.sleep(0.005)


class Broken(SpanExporter):
    """Raises, or says that it failed, until it is mended."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises
        self.mended = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.mended:
            return SpanExportResult.SUCCESS
        if self.raises:
            raise ConnectionError("nobody there")
        return SpanExportResult.FAILURE


class Stuck(SpanExporter):
    """Does not return until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.begun.set()
        self.go.wait(30)
        return SpanExportResult.SUCCESS


async def test_spans_are_exported_in_order() -> None:
    exporter = InMemorySpanExporter()
    counted = Counted(exporter)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(counted.queue.run)
        for number in range(1_200):  # more than a batch
            counted.queue.put(span(number))
        await counted.until("exported", 1_200)
        nursery.cancel_scope.cancel()
    assert [s.name for s in exporter.get_finished_spans()] == [f"s{n}" for n in range(1_200)]
    assert counted("dropped") == counted("failed") == 0


@pytest.mark.parametrize("raises", [True, False])
async def test_what_a_broken_collector_does_not_take_is_counted_and_later_ones_go_on(
    raises: bool,
) -> None:
    exporter = Broken(raises=raises)
    counted = Counted(exporter)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(counted.queue.run)
        counted.queue.put(span(1))
        await counted.until("failed", 1)
        exporter.mended = True
        counted.queue.put(span(2))
        await counted.until("exported", 1)
        nursery.cancel_scope.cancel()


async def test_a_stuck_collector_costs_bounded_memory_and_no_time() -> None:
    exporter = Stuck()
    counted = Counted(exporter, max_queued=10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(counted.queue.run)
        counted.queue.put(span(0))
        with trio.fail_after(20):
            await trio.to_thread.run_sync(exporter.begun.wait, 20)
        for number in range(15):
            counted.queue.put(span(number))
        assert counted("dropped") == 5
        with trio.fail_after(5):  # ending does not wait for it either
            nursery.cancel_scope.cancel()
            await trio.lowlevel.checkpoint_if_cancelled()
    exporter.go.set()
    assert counted("exported") == 0
    assert counted("dropped") == 16


async def test_what_is_left_at_the_end_is_given_a_last_try() -> None:
    exporter = InMemorySpanExporter()
    counted = Counted(exporter)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(counted.queue.run)
        await trio.testing.wait_all_tasks_blocked()
        counted.queue.put(span(1))
        nursery.cancel_scope.cancel()
    assert len(exporter.get_finished_spans()) == 1


# -- over HTTP ------------------------------------------------------------------------------------


class Collector(BaseHTTPRequestHandler):
    received: list[tuple[str, ExportTraceServiceRequest]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, ExportTraceServiceRequest]]]]:
    received: list[tuple[str, ExportTraceServiceRequest]] = []
    handler = type("Handler", (Collector,), {"received": received})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


async def test_spans_go_to_a_collector_by_otlp_over_http(
    collector: tuple[str, list[tuple[str, ExportTraceServiceRequest]]],
) -> None:
    url, received = collector
    exporter = otlp_exporter(url)
    counted = Counted(exporter)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(counted.queue.run)
        counted.queue.put(span(7))
        await counted.until("exported", 1)
        nursery.cancel_scope.cancel()
    exporter.shutdown()
    [(path, message)] = received
    assert path == "/v1/traces"
    [resource] = message.resource_spans
    assert resource.resource.attributes[0].value.string_value == "hear"
    [sent] = resource.scope_spans[0].spans
    assert sent.name == "s7"
    assert sent.span_id == (8).to_bytes(8)
    assert sent.end_time_unix_nano - sent.start_time_unix_nano == 10**9


@pytest.mark.parametrize(
    "url", ["", "localhost:4318", "ftp://here", "http://", "http://here:port", "http://[::1"]
)
def test_what_is_no_url_of_a_collector_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        otlp_exporter(url)
