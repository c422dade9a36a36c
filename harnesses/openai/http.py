"""One exchange over HTTP/1.1 with trio: a request, and the answer as it comes.

Each exchange has a connection of its own, so that hanging up concerns nobody else and nothing is
ever sent on a connection that the server is just closing. Knows nothing of what is exchanged.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import h11
import trio

from hear.endpoints import is_host, is_plain
from hear.errors import ConfigError, EngineError

CONNECT_S: Final = 5.0
"""How long a server may take to accept a connection."""

_CHUNK: Final = 64 << 10


class UnreachableError(EngineError):
    """Nobody accepts a connection."""


class BrokenExchangeError(EngineError):
    """An exchange broke off, or was not one of HTTP."""


class Address(NamedTuple):
    """Where a server listens, and the path under which it does."""

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Read ``http://HOST[:PORT][/PREFIX]``, or the same with https.

        What could be read otherwise elsewhere, or would be sent to the server, is refused: spaces
        and line ends, user names and passwords, and hosts that are none.

        Raises:
            ConfigError: this is no such address.
        """
        try:
            parts = urlsplit(url if is_plain(url) else "")
            usual = {"http": 80, "https": 443}[parts.scheme]
            port = usual if parts.port is None else parts.port
        except (ValueError, KeyError):
            port = 0
        host = parts.hostname if port else None
        if (
            not host
            or not is_host(host)
            or parts.query
            or parts.fragment
            or parts.username is not None
        ):
            raise ConfigError(
                f"endpoint {url!r:.200}: expected http://HOST:PORT or https://HOST:PORT"
            )
        return cls(parts.scheme, host, port, parts.path.rstrip("/"))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """Host and port, as they stand in an address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Answer:
    """The answer to one request: ``status`` and ``kind`` (its type) first, then its body."""

    def __init__(self, stream: trio.abc.Stream, connection: h11.Connection) -> None:
        self._stream = stream
        self._connection = connection
        self.status = 0
        self.kind = ""

    async def begin(self) -> None:
        """Wait for the head.

        Raises:
            BrokenExchangeError: it does not come.
        """
        while not isinstance(event := await self._next(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise BrokenExchangeError("the server hung up without an answer")
        self.status = event.status_code
        headers = dict(event.headers)
        self.kind = headers.get(b"content-type", b"").decode("ascii", "replace")

    async def next(self) -> bytes | None:
        """The next piece of the body; None at its end.

        Raises:
            BrokenExchangeError: the server hangs up before that.
        """
        event = await self._next()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        if isinstance(event, h11.EndOfMessage):
            return None
        raise BrokenExchangeError("the server hung up in the middle of its answer")

    async def read(self, limit: int) -> bytes:
        """The body, at most ``limit`` bytes of it."""
        data = bytearray()
        while len(data) < limit and (piece := await self.next()) is not None:
            data += piece
        return bytes(data[:limit])

    async def _next(self) -> object:
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                self._connection.receive_data(bytes(await self._stream.receive_some(_CHUNK)))
        except h11.RemoteProtocolError as error:
            raise BrokenExchangeError(str(error) or "the answer is not one of HTTP") from error
        except (OSError, trio.BrokenResourceError) as error:
            raise BrokenExchangeError(f"the connection broke: {_why(error)}") from error
        return event


@asynccontextmanager
async def exchange(
    address: Address,
    method: str,
    path: str,
    *,
    headers: dict[str, str] | None = None,
    body: bytes = b"",
) -> AsyncIterator[Answer]:
    """Send a request, and follow the answer. Leaving the context hangs up.

    Only the connecting is bounded here: how long an answer may take is for the caller to say.

    Raises:
        UnreachableError: nobody accepts a connection within ``CONNECT_S``.
        BrokenExchangeError: the server hangs up, or what it says is not HTTP.
    """
    async with await _connect(address) as stream:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_CHUNK)
        all_headers = {"host": address.authority, "connection": "close", **(headers or {})}
        if body:
            all_headers["content-length"] = str(len(body))
        request = h11.Request(
            method=method, target=address.prefix + path, headers=list(all_headers.items())
        )
        data = connection.send(request) or b""
        data += (connection.send(h11.Data(data=body)) or b"") if body else b""
        data += connection.send(h11.EndOfMessage()) or b""
        try:
            await stream.send_all(data)
        except (OSError, trio.BrokenResourceError) as error:
            raise BrokenExchangeError(f"the connection broke: {_why(error)}") from error
        answer = Answer(stream, connection)
        await answer.begin()
        yield answer


async def _connect(address: Address) -> trio.abc.Stream:
    try:
        with trio.fail_after(CONNECT_S):
            if address.scheme == "http":
                return await trio.open_tcp_stream(address.host, address.port)
            stream = await trio.open_ssl_over_tcp_stream(
                address.host, address.port, https_compatible=True
            )
            await stream.do_handshake()
            return stream
    except trio.TooSlowError as error:
        raise UnreachableError(f"{address}: no connection within {CONNECT_S:g} s") from error
    except (OSError, trio.BrokenResourceError) as error:
        raise UnreachableError(f"{address}: no connection: {_why(error)}") from error


def _why(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup):
        return _why(error.exceptions[0])
    return " ".join(str(error).split()) or type(error).__name__
