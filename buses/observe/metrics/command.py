"""``hear metrics``: a Prometheus endpoint, and OpenTelemetry spans, of what passes on a bus."""

import argparse
import logging
from functools import partial

import trio

from hear.app import output, plugins
from hear.app.cli import Command
from hear.app.connection import add_bus_arguments, connected, own_name
from hear.app.connection import run as run_until_signal

DEFAULT_LISTEN = "127.0.0.1:9464"
_OF_THE_EXTRA = ("prometheus_client", "opentelemetry", "requests", "google")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_bus_arguments(parser)
    parser.add_argument(
        "--listen",
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help="where Prometheus can scrape /metrics; port 0 takes a free one (%(default)s)",
    )
    parser.add_argument(
        "--otlp",
        metavar="URL",
        help="send spans to this collector, by OTLP over HTTP, as in http://127.0.0.1:4318",
    )


def run(namespace: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    with plugins.extra("metrics", "hear metrics", *_OF_THE_EXTRA):
        from prometheus_client import metrics as prometheus

        from hear.buses.observe.metrics.tap import serve
    # Else each series has a second one, of when this process first counted it.
    prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
    # A collector that is down is told of by hear.metrics, once, and counted.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    async def main() -> int:
        name = own_name("metrics")
        async with (
            connected(namespace.bus, name=name, key=namespace.key) as bus,
            trio.open_nursery() as nursery,
        ):
            url = await nursery.start(
                partial(serve, bus, listen=namespace.listen, otlp=namespace.otlp)
            )
            output.remark(f"metrics of {namespace.bus} at {url}")
        return 0

    return run_until_signal(main)


COMMAND = Command("serve metrics and spans of what passes on a bus", configure, run)
