"""The data path of a simulated engine between processes: requests in, results out.

An engine listens at ``sim+unix://PATH`` or ``sim+tcp://HOST:PORT``. On the wire each message is
four bytes of length, big-endian, and so many bytes of MessagePack: from the client a pair of number
and ``InferenceRequest``, from the engine number, ``InferenceResult`` or nil, and an error.
A client that hangs up takes its requests with it, as one of a real engine does.

Times in a result are of the engine's clock, which processes of a deployment share.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
import structlog
import trio

from hear.app.connection import check_own_folders, make_own_folders
from hear.app.nursery import unwrapped
from hear.app.own_files import check_free
from hear.codec import UNREADABLE
from hear.endpoints import is_host, is_port, scheme_of
from hear.errors import ConfigError, EngineError, UnservedError
from hear.interfaces import InferenceClient, InferenceRequest, InferenceResult

_log = structlog.get_logger("hear.engine")

CONNECT_S: Final = 5.0
_LENGTH_BYTES: Final = 4
_MAX_BYTES: Final = 64 << 20
_CHUNK: Final = 64 << 10
_UNIX: Final = "sim+unix://"
_TCP: Final = "sim+tcp://"

_requests = msgspec.msgpack.Decoder(tuple[int, InferenceRequest])
_results = msgspec.msgpack.Decoder(tuple[int, InferenceResult | None, str])


@dataclass(frozen=True, slots=True)
class _Address:
    path: str = ""
    host: str = ""
    port: int = 0


def _parse(endpoint: str) -> _Address:
    scheme = scheme_of(endpoint)
    if scheme == "sim+unix":
        return _Address(path=endpoint.removeprefix(_UNIX))
    host, _, port = endpoint.removeprefix(_TCP).rpartition(":")
    if scheme == "sim+tcp" and is_host(host) and is_port(port):
        return _Address(host=host, port=int(port))
    raise ConfigError(
        f"endpoint {endpoint!r:.200}: expected {_UNIX}PATH or {_TCP}HOST:PORT of a simulated engine"
    )


def check_endpoint(endpoint: str) -> None:
    """See that an address can be one of a simulated engine.

    Raises:
        ConfigError: it cannot.
    """
    _parse(endpoint)


async def serve(
    engine: InferenceClient,
    endpoint: str,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an engine at ``endpoint`` until cancelled. Tells the address, with the port it got.

    Raises:
        ConfigError: the address cannot be used, or is in use.
    """
    address = _parse(endpoint)
    if address.path:
        make_own_folders(Path(address.path))
        check_free(Path(address.path))
    try:
        if address.path:
            listeners: list[trio.SocketListener] = [await _listen(address.path)]
            bound = os.lstat(address.path)
        else:
            listeners = await trio.open_tcp_listeners(address.port, host=address.host)
    except OSError as error:
        raise ConfigError(f"endpoint {endpoint!r}: cannot be listened on: {error}") from error
    told = endpoint
    if not address.path:
        told = f"{_TCP}{address.host}:{listeners[0].socket.getsockname()[1]}"
    try:
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(trio.serve_listeners, partial(_converse, engine), [listener])
            task_status.started(told)
    finally:
        if address.path:
            with trio.CancelScope(shield=True), suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(address.path), bound):  # still our own
                    await trio.Path(address.path).unlink()


async def _listen(path: str) -> trio.SocketListener:
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    try:
        try:
            await sock.bind(path)
        except OSError:
            if not await _is_stale(path):
                raise
            await trio.Path(path).unlink()
            await sock.bind(path)
        sock.listen(128)
        return trio.SocketListener(sock)
    except BaseException:
        sock.close()
        raise


async def _is_stale(path: str) -> bool:
    """Whether a socket is there that nobody listens on: its engine was killed."""
    if not await trio.Path(path).is_socket():
        return False
    try:
        stream = await trio.open_unix_socket(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # as where another user listens, and we may not connect
    await stream.aclose()
    return False


async def _converse(engine: InferenceClient, stream: trio.SocketStream) -> None:
    try:
        async with stream, trio.open_nursery() as nursery:
            lock = trio.Lock()
            messages = _Messages(stream)
            while (data := await messages.next()) is not None:
                number, request = _requests.decode(data)
                nursery.start_soon(_answer, engine, number, request, stream, lock)
            nursery.cancel_scope.cancel()
    except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the client hung up
    except* (*UNREADABLE, EngineError) as group:
        _log.warning("request.unreadable", error=str(group.exceptions[0]))


async def _answer(
    engine: InferenceClient,
    number: int,
    request: InferenceRequest,
    stream: trio.SocketStream,
    lock: trio.Lock,
) -> None:
    result: InferenceResult | None = None
    error = ""
    try:
        result = await engine.generate(request)
    except EngineError as failure:
        error = str(failure)
    async with lock:
        await _send(stream, msgspec.msgpack.encode((number, result, error)))


class SimulatedClient:
    """The far end of a simulated engine's data path. Made by ``connect``."""

    def __init__(self, endpoint: str, stream: trio.SocketStream) -> None:
        self._endpoint = endpoint
        self._stream = stream
        self._lock = trio.Lock()
        self._numbers = count(1)
        self._waiting: dict[int, trio.Event] = {}
        self._results: dict[int, tuple[InferenceResult | None, str]] = {}
        self._gone = False
        self._why = "the engine has hung up"

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        """Send a request and wait for its last token, or for its refusal.

        Raises:
            EngineError: the engine refuses the request as such.
            UnservedError: it has gone.
        """
        if self._gone:
            raise UnservedError(f"{self._endpoint}: {self._why}")
        number = next(self._numbers)
        event = self._waiting[number] = trio.Event()
        try:
            async with self._lock:
                await _send(self._stream, msgspec.msgpack.encode((number, request)))
            await event.wait()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise UnservedError(f"{self._endpoint}: the engine has hung up") from error
        finally:
            del self._waiting[number]
        if number not in self._results:
            raise UnservedError(f"{self._endpoint}: request {request.id!r}: {self._why}")
        result, why = self._results.pop(number)
        if result is None:
            raise EngineError(f"{self._endpoint}: request {request.id!r}: {why}")
        return result

    async def listen(self) -> None:
        """Take in results until the engine hangs up."""
        try:
            messages = _Messages(self._stream)
            while (data := await messages.next()) is not None:
                number, result, error = _results.decode(data)
                if number in self._waiting:
                    self._results[number] = result, error
                    self._waiting[number].set()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, EngineError):
            pass
        except UNREADABLE as error:
            self._why = f"an answer that cannot be read: {error}"
            _log.warning("result.unreadable", endpoint=self._endpoint, error=str(error))
        finally:
            self._gone = True
            for event in self._waiting.values():
                event.set()


@asynccontextmanager
async def connect(endpoint: str) -> AsyncIterator[SimulatedClient]:
    """Reach the simulated engine at ``endpoint``.

    Raises:
        ConfigError: this is no address of one.
        UnservedError: nobody listens there.
    """
    address = _parse(endpoint)
    if address.path and not check_own_folders(Path(address.path)):
        raise UnservedError(f"{endpoint}: nobody listens there: there is no such folder")
    dial: Callable[[], Awaitable[trio.SocketStream]]
    if address.path:
        dial = partial(trio.open_unix_socket, address.path)
    else:
        dial = partial(trio.open_tcp_stream, address.host, address.port)
    try:
        with trio.fail_after(CONNECT_S):
            stream = await dial()
    except (OSError, trio.TooSlowError) as error:
        raise UnservedError(f"{endpoint}: nobody listens there: {error}") from error
    client = SimulatedClient(endpoint, stream)
    with unwrapped():
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(client.listen)
            try:
                yield client
            finally:
                nursery.cancel_scope.cancel()


async def _send(stream: trio.SocketStream, data: bytes) -> None:
    await stream.send_all(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


class _Messages:
    """The messages that come over a stream."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def next(self) -> bytes | None:
        """The next message; None if the other end has hung up."""
        buffer = self._buffer
        while (end := self._end()) is None:
            chunk = await self._stream.receive_some(_CHUNK)
            if not chunk:
                return None
            buffer += chunk
        data = bytes(buffer[_LENGTH_BYTES:end])
        del buffer[:end]
        return data

    def _end(self) -> int | None:
        """Where the first message in the buffer ends, if it is all there."""
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if size > _MAX_BYTES:
            raise EngineError(f"a message of {size} bytes, expected at most {_MAX_BYTES}")
        end = _LENGTH_BYTES + size
        return end if len(self._buffer) >= end else None
