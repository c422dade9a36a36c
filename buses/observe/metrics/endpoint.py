"""The HTTP endpoint that Prometheus scrapes: prometheus_client's own server, in its own thread."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from prometheus_client import CollectorRegistry, start_http_server

from hear.errors import ConfigError


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 address stands in brackets.

    Raises:
        ConfigError: it is no such address.
    """
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or (":" in host and bare == host) or not port.isascii():
        raise _bad(text)
    try:
        number = int(port)
    except ValueError:
        raise _bad(text) from None
    if not 0 <= number < 65_536:
        raise _bad(text)
    return bare, number


def _bad(text: str) -> ConfigError:
    return ConfigError(f"--listen {text!r}: expected HOST:PORT, as in 127.0.0.1:9464")


@asynccontextmanager
async def serving(address: str, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serve a registry at an address while inside; gives the URL that can be scraped.

    Raises:
        ConfigError: the address is none, or cannot be listened on.
    """
    host, port = parse_address(address)
    try:
        server, thread = await trio.to_thread.run_sync(
            lambda: start_http_server(port, addr=host, registry=registry)
        )
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--listen {address}: cannot listen there: {why}") from error
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        with trio.CancelScope(shield=True):  # the server looks twice a second whether to end
            await trio.to_thread.run_sync(close)
