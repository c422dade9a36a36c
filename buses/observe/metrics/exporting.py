"""Spans to an OpenTelemetry collector, without ever waiting for it.

The queue is bounded: while the collector is slow or down, new spans are dropped and counted. The
exporter blocks, so it runs in a thread, one batch at a time.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import structlog
import trio
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode
from prometheus_client import Counter

from hear.buses.observe.metrics.families import Family
from hear.buses.observe.metrics.spans import SpanData
from hear.errors import ConfigError

MAX_QUEUED: Final = 8_192
MAX_BATCH: Final = 512
EXPORT_WITHIN_S: Final = 5.0
LAST_EXPORT_WITHIN_S: Final = 0.5  # a command has 1.5 s to end, and the endpoint takes as long

_log = structlog.get_logger("hear.metrics")
_RESOURCE = Resource({SERVICE_NAME: "hear"})
_SCOPE = InstrumentationScope("hear.metrics")


def otlp_exporter(url: str) -> SpanExporter:
    """What sends spans to a collector by OTLP over HTTP; a URL without a path gets /v1/traces.

    Raises:
        ConfigError: this is no URL of a collector.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"--otlp {url!r}: expected http://HOST:PORT or https://HOST:PORT")
    endpoint = url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"
    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_WITHIN_S)


def readable(span: SpanData) -> ReadableSpan:
    """The span in the form that OpenTelemetry exports."""

    def context(span_id: int) -> SpanContext:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(span.trace_id, span_id, is_remote=False, trace_flags=sampled)

    return ReadableSpan(
        name=span.name,
        context=context(span.span_id),
        parent=None if span.parent_id is None else context(span.parent_id),
        resource=_RESOURCE,
        attributes=span.attributes,
        events=[Event(name, timestamp=_ns(when)) for name, when in span.events],
        kind=SpanKind.INTERNAL,
        instrumentation_scope=_SCOPE,
        status=(
            Status(StatusCode.OK) if span.failed is None else Status(StatusCode.ERROR, span.failed)
        ),
        start_time=_ns(span.start_s),
        end_time=_ns(span.end_s),
    )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


class SpanQueue:
    """Spans on their way. ``fates`` counts them as exported, dropped (no room) or failed."""

    def __init__(
        self, exporter: SpanExporter, fates: Family[Counter], *, max_queued: int = MAX_QUEUED
    ) -> None:
        self._exporter = exporter
        self._fates = fates
        self._max_queued = max_queued
        self._queued: deque[SpanData] = deque()
        self._came = trio.Event()
        self._failing = False

    def put(self, span: SpanData) -> None:
        """Take a span, or drop it if the queue is full. Never waits."""
        if len(self._queued) >= self._max_queued:
            self._fates("dropped").inc()
            return
        self._queued.append(span)
        self._came.set()

    async def run(self) -> None:
        """Export until cancelled; what is then left is given one last, short try."""
        try:
            while True:
                await self._came.wait()
                await self._export_batch()
                if not self._queued:
                    self._came = trio.Event()
        finally:
            with trio.CancelScope(shield=True, deadline=_soon()):
                while self._queued and not self._failing:
                    await self._export_batch()
            self._fates("dropped").inc(len(self._queued))

    async def _export_batch(self) -> None:
        batch = [self._queued.popleft() for _ in range(min(len(self._queued), MAX_BATCH))]
        try:
            sent = await trio.to_thread.run_sync(self._export, batch, abandon_on_cancel=True)
        except trio.Cancelled:
            # Perhaps the thread still sends them; a span that comes twice has the same id.
            self._queued.extendleft(reversed(batch))
            raise
        fate = "exported" if sent else "failed"
        self._fates(fate).inc(len(batch))
        if self._failing != (fate == "failed"):
            self._failing = not self._failing
            _log.warning("spans.failing" if self._failing else "spans.exported_again")

    def _export(self, batch: Sequence[SpanData]) -> bool:
        try:
            result = self._exporter.export([readable(span) for span in batch])
        except Exception as error:  # whatever it is, the tap goes on
            _log.warning("spans.failed", error=repr(error))
            return False
        return result is SpanExportResult.SUCCESS


def _soon() -> float:
    return trio.current_time() + LAST_EXPORT_WITHIN_S
