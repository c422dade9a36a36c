"""Bytes over nng. The only place that knows pynng.

nng's own ways of waiting are slow under trio and do not see cancellation while traffic flows, so
both ends wait for the descriptor that tells of messages, and then take without waiting what is
there. Sockets are closed before the process ends: nng's threads do not survive the interpreter.

The hub has one socket for all its peers. nng keeps at most three messages for one connection of it
and silently drops more, which is why the link above has a window. It takes in no message that is
larger than a frame may be, from anybody.

With TLS the certificate of the other end has to be signed by the authority, and, if it says what it
may be used for, for the end where it is used: nng's TLS (Mbed TLS) checks that. Whose it is is
checked here and at the hub: the one of the hub has the ``server_name`` as its common name, the one
of a client the name of its key. So no client's can be the hub's.
"""

import select
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pynng
import trio

from hear.app.own_files import check_free, is_trusted, read_own
from hear.buses.nng.access import TlsFiles
from hear.buses.nng.frames import MAX_FRAME_BYTES
from hear.errors import ConfigError

_RECONNECT_MIN_MS: Final = 20
_RECONNECT_MAX_MS: Final = 200
_QUEUE: Final = 128
_MOST_AT_ONCE: Final = 64
_MOST_GONE: Final = 4_096
# nng hands a message from thread to thread; more of them than have work only get in the way.
_THREADS: Final = ("TASK", "EXPIRE", "POLLER")
for _kind in _THREADS:
    pynng.lib.nng_init_set_parameter(getattr(pynng.lib, f"NNG_INIT_NUM_{_kind}_THREADS"), 1)

_SCHEMES: Final = ("ipc", "tcp", "tls+tcp")


def _check(url: str, tls: TlsFiles | None) -> None:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES or not rest:
        raise ConfigError(
            f"bus {url!r}: expected ipc://PATH, tcp://HOST:PORT or tls+tcp://HOST:PORT"
        )
    host, _, port = rest.rpartition(":")
    if scheme != "ipc" and not (host and port.isdecimal() and 0 < int(port) < 65_536):
        raise ConfigError(f"bus {url!r}: expected {scheme}://HOST:PORT, with a port up to 65535")
    if (scheme == "tls+tcp") is (tls is None):
        more = (
            "needs certificates, from [tls] in the key file (--key) or the keyring (--keys)"
            if tls is None
            else "takes no certificates"
        )
        raise ConfigError(f"bus {url!r}: {scheme} {more}")


def _tls_config(tls: TlsFiles | None, *, server: bool) -> pynng.TLSConfig | None:
    if tls is None:
        return None
    # Read here and not by nng, so that what was looked at is what is used.
    own = read_own(Path(tls.certificate))
    authority = read_own(Path(tls.authority), secret=False)
    try:
        return pynng.TLSConfig(
            pynng.TLSConfig.MODE_SERVER if server else pynng.TLSConfig.MODE_CLIENT,
            server_name=None if server else tls.server_name,
            auth_mode=pynng.TLSConfig.AUTH_MODE_REQUIRED,
            ca_string=authority,
            own_cert_string=own,
            own_key_string=own,
        )
    except (pynng.NNGException, OSError) as error:
        raise ConfigError(
            f"certificates {tls.certificate} and {tls.authority} cannot be used: {error}"
        ) from error


class _Arrivals:
    """Whether a socket has received something. nng tells it by a descriptor.

    Asking the descriptor costs a twentieth of what it costs to ask nng for a message in vain.
    """

    def __init__(self, socket: pynng.Pair1) -> None:
        self._descriptor: int = socket.recv_fd
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def any(self) -> bool:
        """Whether something has come."""
        return bool(self._poll.poll(0))

    async def wait(self) -> None:
        """Wait until something has come, or the socket is closed."""
        with suppress(trio.ClosedResourceError):
            await trio.lowlevel.wait_readable(self._descriptor)


class ClientWire:
    """A connection to the hub that comes back by itself."""

    def __init__(self, url: str, tls: TlsFiles | None = None, *, any_owner: bool = True) -> None:
        """Begin to connect.

        Args:
            any_owner: whether to speak to a hub of another user of this machine.

        Raises:
            ConfigError: the address or a certificate cannot be used.
        """
        _check(url, tls)
        self._url = url
        self._any_owner = any_owner
        self._tls = _tls_config(tls, server=False)
        self._hub_name = None if tls is None else tls.server_name or host_of(url)
        self.impostor: str | None = None
        """Whose certificate was shown last by who was not the hub."""
        self._socket = self._dial()
        self._arrivals = _Arrivals(self._socket)

    def _dial(self) -> pynng.Pair1:
        try:
            socket = pynng.Pair1(
                recv_buffer_size=_QUEUE,
                send_buffer_size=_QUEUE,
                recv_max_size=MAX_FRAME_BYTES,
                reconnect_time_min=_RECONNECT_MIN_MS,
                reconnect_time_max=_RECONNECT_MAX_MS,
                tls_config=self._tls,
            )
            if self._hub_name is not None:
                socket.add_pre_pipe_connect_cb(self._check_hub)
            if not self._any_owner:
                socket.add_pre_pipe_connect_cb(_close_if_strangers)
            try:
                socket.dial(self._url, block=False)
            except BaseException:
                socket.close()
                raise
        except (pynng.NNGException, ValueError) as error:
            raise ConfigError(f"bus {self._url!r} cannot be dialled: {error}") from error
        return socket

    def _check_hub(self, pipe: Any) -> None:
        """On nng's thread: nothing is sent to who shows the certificate of somebody else."""
        name = _common_name(pipe.pipe)
        if name != self._hub_name:
            self.impostor = name
            pipe.close()

    async def readable(self) -> None:
        """Wait until something has come."""
        await self._arrivals.wait()

    def receive(self) -> list[bytes]:
        """What has come; up to 64 frames at once. Nothing comes to a closed socket."""
        got: list[bytes] = []
        with suppress(pynng.TryAgain, pynng.Closed):
            while len(got) < _MOST_AT_ONCE and self._arrivals.any():
                got.append(self._socket.recv(block=False))
        return got

    def send(self, data: bytes) -> bool:
        """Send without waiting; returns False if there is no room, and the data is not sent."""
        try:
            self._socket.send(data, block=False)
        except pynng.TryAgain:
            return False
        return True

    def reconnect(self) -> None:
        """Give up the connection, for one that stands only in appearance."""
        self.close()
        self._socket = self._dial()
        self._arrivals = _Arrivals(self._socket)

    def close(self) -> None:
        """Close the socket."""
        _close(self._socket)


class HubWire:
    """One socket for all who join. A connection is a number."""

    def __init__(self, url: str, tls: TlsFiles | None = None) -> None:
        """Begin to listen.

        Raises:
            ConfigError: the address or a certificate cannot be used, or the address is in use.
        """
        _check(url, tls)
        self._has_certificates = tls is not None
        if url.startswith("ipc://"):
            check_free(Path(url.removeprefix("ipc://")))
        self._pipes: dict[int, Any] = {}
        self._opened: list[int] = []
        # Filled by a thread of nng, emptied by ours.
        self._come: deque[Any] = deque()
        self._gone: deque[int] = deque()
        self._were_here: deque[int] = deque(maxlen=_MOST_GONE)
        config = _tls_config(tls, server=True)
        try:
            self._socket = pynng.Pair1(
                polyamorous=True,
                recv_buffer_size=_QUEUE,
                send_buffer_size=_QUEUE,
                recv_max_size=MAX_FRAME_BYTES,
                tls_config=config,
            )
            self._socket.add_post_pipe_connect_cb(self._come.append)
            self._socket.add_post_pipe_remove_cb(lambda pipe: self._gone.append(pipe.id))
            try:
                self._socket.listen(url)
            except BaseException:
                self._socket.close()
                raise
        except pynng.AddressInUse as error:
            raise ConfigError(f"bus {url!r}: the address is in use") from error
        except (pynng.NNGException, ValueError) as error:
            raise ConfigError(f"bus {url!r} cannot be listened on: {error}") from error
        self._arrivals = _Arrivals(self._socket)

    async def readable(self) -> None:
        """Wait until something has come."""
        await self._arrivals.wait()

    def receive(self) -> list[tuple[int, bytes]]:
        """What has come, and over which connection; up to 64 frames at once."""
        got: list[tuple[int, bytes]] = []
        with suppress(pynng.TryAgain):
            while len(got) < _MOST_AT_ONCE and self._arrivals.any():
                pipe, data = _receive(self._socket)
                number = pynng.lib.nng_pipe_id(pipe)
                if number in self._pipes or self._enter(number, pipe):
                    got.append((number, data))
        return got

    def opened(self) -> list[tuple[int, str | None]]:
        """The connections that have come since this was asked last, each with the common name in
        the certificate of its other end; None without TLS. Of some only a frame may have come."""
        while self._come:
            pipe = self._come.popleft()
            self._enter(pipe.id, pipe.pipe)
        opened, self._opened = self._opened, []
        return [
            (number, _common_name(self._pipes[number].pipe) if self._has_certificates else None)
            for number in opened
            if number in self._pipes
        ]

    def _enter(self, number: int, pipe: Any) -> bool:
        """Note a connection; returns False if it has gone already. What came over it last is then
        dropped, and the link sends it again over the next one."""
        if number in self._were_here:
            return False
        if number not in self._pipes:
            self._pipes[number] = pynng.Pipe(pipe, self._socket)
            self._opened.append(number)
        return True

    def send(self, connection: int, data: bytes) -> bool:
        """Send without waiting; returns False if there is no room at the moment, which there is
        once nng's thread has handed on what all connections were sent before."""
        pipe = self._pipes.get(connection)
        if pipe is None:
            return True  # it has gone, and the link will see to it
        try:
            self._socket.send_msg(pynng.Message(data, pipe), block=False)
        except pynng.TryAgain:
            return False
        except pynng.NNGException:  # the connection has gone
            pass
        return True

    def closed(self) -> list[int]:
        """The connections that have gone since this was asked last."""
        gone = []
        while self._gone:
            number = self._gone.popleft()
            self._were_here.append(number)
            if self._pipes.pop(number, None) is not None:
                gone.append(number)
        return gone

    def close_connection(self, connection: int) -> None:
        """Close one connection."""
        pipe = self._pipes.pop(connection, None)
        if pipe is not None:
            self._were_here.append(connection)
            with suppress(pynng.NNGException):  # it may have gone by itself
                pipe.close()

    def close(self) -> None:
        """Close the socket and all connections."""
        _close(self._socket)


def _close_if_strangers(pipe: Any) -> None:
    """Close a connection to another user's hub before anything passes over it.

    A socket can be looked at before, but not a hub that comes in the place of one that has gone.
    """
    uid = pynng.ffi.new("uint64_t *")
    unknown = pynng.lib.nng_pipe_get_uint64(pipe.pipe, b"ipc:peer-uid", uid)
    if not unknown and not is_trusted(uid[0]):  # unknown of a connection that is not ipc://
        pipe.close()


def _close(socket: pynng.Pair1) -> None:
    with suppress(RuntimeError):  # outside of trio, where nobody waits
        trio.lowlevel.notify_closing(socket.recv_fd)
    socket.close()


def _receive(socket: pynng.Pair1) -> tuple[Any, bytes]:
    """The next message and its pipe, without waiting.

    Not by way of ``recv_msg``, which enters the pipe in a table of the socket, for good if the pipe
    has gone meanwhile: connections that send something and go would fill it.
    """
    message = pynng.ffi.new("nng_msg **")
    flags = pynng.lib.NNG_FLAG_NONBLOCK
    pynng.check_err(pynng.lib.nng_recvmsg(socket.socket, message, flags))
    try:
        body = pynng.lib.nng_msg_body(message[0])
        data = bytes(pynng.ffi.buffer(body, pynng.lib.nng_msg_len(message[0])))
        return pynng.lib.nng_msg_get_pipe(message[0]), data
    finally:
        pynng.lib.nng_msg_free(message[0])


def _common_name(pipe: Any) -> str:
    """The common name in the certificate of a connection's other end; "" if it cannot be told."""
    found = pynng.ffi.new("char **")
    if pynng.lib.nng_pipe_get_string(pipe, b"tls-peer-cn", found) != 0:
        return ""
    try:
        name: bytes = pynng.ffi.string(found[0])
        return name.decode("utf-8", errors="replace")
    finally:
        pynng.lib.nng_strfree(found[0])


def host_of(url: str) -> str:
    """The host in the address of a bus, without the brackets of an IPv6 address."""
    return url.partition("://")[2].rpartition(":")[0].strip("[]")
