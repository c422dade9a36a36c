"""False hubs, relays and borrowed certificates over real connections.

Before, the documented certificates were all good for ``localhost`` and for both ends, so a tenant's
own was the hub's for everyone, and what came over TCP from whoever answered was believed.
"""

import struct
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pynng
import pytest
import trio

from hear.buses.nng import client
from hear.buses.nng.client import connect
from hear.buses.nng.frames import LINK_VERSION, Challenge, Hello, Wire, decode
from hear.buses.nng.seal import is_sealed
from hear.buses.nng.server import hub
from hear.delivery import Sequencer
from hear.errors import BusError
from hear.messages import Key, RequestDescribed
from tests.buses.test_nng import free_port, make_certificates, write_keys
from tests.secret_files import write_secret

OLD_RECIPE = """
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$1" \
  -keyout "$2.key" -out "$2.csr"
printf 'subjectAltName=DNS:localhost,DNS:hub.hear,IP:127.0.0.1\n' > "$2.ext"
openssl x509 -req -days 365 -in "$2.csr" -CA authority.pem -CAkey authority.key \
  -CAcreateserial -extfile "$2.ext" -out "$2.crt"
cat "$2.crt" "$2.key" > "$2.pem"
chmod 600 "$2.pem"
"""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Keys and certificates by docs/security.md, and some that say nothing of what they are for."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    for common_name in ("localhost", "acme", "hub.hear"):
        subprocess.run(
            ["bash", "-euc", OLD_RECIPE, "bash", common_name, f"old-{common_name}"],
            cwd=folder, check=True, capture_output=True, timeout=60,
        )  # fmt: skip
    return write_keys(folder)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 1.0)


def with_certificate(path: Path, certificate: str, name: str = "hub.hear") -> Path:
    """A key file or keyring with another certificate, or another name for the hub."""
    made = path.with_name(f"{path.stem}-with-{certificate}-{name}.toml")
    lines = [
        f'certificate = "{certificate}.pem"' if line.startswith("certificate =") else line
        for line in path.read_text().replace('server_name = "hub.hear"', f'server_name = "{name}"')
        .splitlines()
    ]  # fmt: skip
    write_secret(made, "\n".join(lines))
    return made


async def why_not(url: str, key: Path) -> str:
    """What one who joins is told; it is one line."""
    with trio.fail_after(20), pytest.raises(BusError) as error:
        async with connect(url, name="me", key=key):
            pass
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(f"{url}: bus cannot be joined as 'me': ")
    return text


# -- certificates -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("certificate", "reason"),
    [
        ("acme", "nobody answers"),  # it says that it is a client's
        ("old-acme", "shows a certificate of 'acme', which is not the hub's"),
        ("old-localhost", "shows a certificate of 'localhost', which is not the hub's"),
    ],
)
async def test_no_certificate_but_the_hubs_is_one(
    certificate: str, reason: str, keys: dict[str, Path]
) -> None:
    """Also if whoever shows it has the whole keyring."""
    url = f"tls+tcp://127.0.0.1:{free_port()}"
    async with hub(url, keys=with_certificate(keys["keyring"], certificate)) as made:
        assert reason in await why_not(url, keys["operator"])
        assert made.peers == []


async def test_a_certificate_of_the_host_is_the_hubs_only_if_the_key_file_names_no_other(
    keys: dict[str, Path],
) -> None:
    url = f"tls+tcp://localhost:{free_port()}"
    async with hub(url, keys=with_certificate(keys["keyring"], "old-localhost")):
        assert "not the hub's" in await why_not(url, keys["operator"])
        named = with_certificate(keys["operator"], "operator", "localhost")
        async with connect(url, name="me", key=named):
            pass


@pytest.mark.parametrize(
    ("key", "certificate", "reason"),
    [
        ("acme", "hub.hear", "nobody answers"),  # it says that it is a server's
        ("acme", "old-hub.hear", "key 'acme' came with a certificate of 'hub.hear'"),
        ("umbra", "acme", "key 'umbra' came with a certificate of 'acme'"),
        ("operator", "acme", "key 'operator' came with a certificate of 'acme'"),
        ("acme", "old-localhost", "key 'acme' came with a certificate of 'localhost'"),
    ],
)
async def test_a_key_is_good_with_its_own_certificate_alone(
    key: str, certificate: str, reason: str, keys: dict[str, Path]
) -> None:
    url = f"tls+tcp://127.0.0.1:{free_port()}"
    async with hub(url, keys=keys["keyring"]) as made:
        assert reason in await why_not(url, with_certificate(keys[key], certificate))
        assert made.peers == []
        async with connect(url, name="me", key=keys[key]):
            assert made.peers == ["me"]


# -- false hubs -------------------------------------------------------------------------------


@asynccontextmanager
async def false_hub(
    url: str, answer: Callable[[Wire | None], list[bytes]]
) -> AsyncIterator[list[Wire | None]]:
    """Somebody who listens where the hub should, and hears what is said there. None: a sealed
    frame."""
    heard: list[Wire | None] = []

    async def listen() -> None:
        while True:
            message = await socket.arecv_msg()
            heard.append(None if is_sealed(message.bytes) else decode(message.bytes))
            for data in answer(heard[-1]):
                socket.send_msg(pynng.Message(data, message.pipe), block=False)

    with pynng.Pair1(polyamorous=True, listen=url) as socket:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            yield heard
            nursery.cancel_scope.cancel()


async def recorded(folder: Path, keys: dict[str, Path]) -> tuple[bytes, bytes]:
    """A challenge and the welcome that followed it, as a real hub sent them to a real client."""
    url, front = f"ipc://{folder}/real", f"ipc://{folder}/front"
    said: list[bytes] = []
    async with hub(url, keys=keys["keyring"]):
        with pynng.Pair1(dial=url) as behind, pynng.Pair1(listen=front) as before:
            async with trio.open_nursery() as nursery:

                async def carry(source: pynng.Pair1, target: pynng.Pair1, keep: bool) -> None:
                    while True:
                        data = await source.arecv()
                        if keep:
                            said.append(data)
                        await target.asend(data)

                nursery.start_soon(carry, before, behind, False)
                nursery.start_soon(carry, behind, before, True)
                async with connect(front, name="me", key=keys["acme"]):
                    pass
                nursery.cancel_scope.cancel()
    challenge, welcome = [data for data in said if not is_sealed(data)][:2]
    assert isinstance(decode(challenge), Challenge)
    return challenge, welcome


@pytest.mark.parametrize("challenges", [True, False])
async def test_a_recorded_hub_is_none(
    challenges: bool, tmp_path: Path, keys: dict[str, Path]
) -> None:
    with trio.fail_after(20):
        challenge, welcome = await recorded(tmp_path, keys)
        url = f"tcp://127.0.0.1:{free_port()}"

        def answer(said: Wire | None) -> list[bytes]:
            asks = isinstance(said, Hello) and not said.proof
            return [challenge] if asks and challenges else [welcome]

        async with false_hub(url, answer) as heard:
            why = await why_not(url, keys["acme"])
            assert "does not prove that it holds the key 'acme'" in why
            assert heard
            assert all(isinstance(said, Hello) for said in heard), "it was told nothing"


async def test_a_hub_without_keys_is_none_for_who_has_one(keys: dict[str, Path]) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    async with hub(url):
        assert "a hub without keys" in await why_not(url, keys["acme"])


async def test_who_speaks_an_older_link_is_told_so(keys: dict[str, Path]) -> None:
    """Also by a false hub that would like it: a client has no other version to fall back to."""
    url = f"tcp://127.0.0.1:{free_port()}"
    refusal = b"\x93\xa1R\xb2speaks version 1 !\xc3"
    async with false_hub(url, lambda said: [refusal]) as heard:
        assert "speaks version 1 !" in await why_not(url, keys["acme"])
        assert all(isinstance(said, Hello) and said.version == LINK_VERSION for said in heard)


# -- a relay ----------------------------------------------------------------------------------


class Relay:
    """Between a client and a hub on TCP: it reads every message, and may change each."""

    def __init__(self, port: int, hub_port: int) -> None:
        self.port = port
        self._hub_port = hub_port
        self.change: Callable[[bytes], list[bytes]] = lambda data: [data]
        self.changed = 0

    async def serve(self, task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED) -> None:
        await trio.serve_tcp(self._join, self.port, host="127.0.0.1", task_status=task_status)

    async def _join(self, near: trio.SocketStream) -> None:
        far = await trio.open_tcp_stream("127.0.0.1", self._hub_port)
        async with far, trio.open_nursery() as nursery:
            nursery.start_soon(self._carry, near, far, nursery.cancel_scope)
            nursery.start_soon(self._carry, far, near, nursery.cancel_scope)

    async def _carry(
        self, source: trio.SocketStream, target: trio.SocketStream, scope: trio.CancelScope
    ) -> None:
        left = b""
        greeted = False
        try:
            async for data in source:
                left += data
                if not greeted and len(left) >= 8:
                    await target.send_all(left[:8])
                    left, greeted = left[8:], True
                while len(left) >= 8 and len(left) >= 8 + (
                    size := struct.unpack(">Q", left[:8])[0]
                ):
                    hops, message, left = left[8:12], left[12 : 8 + size], left[8 + size :]
                    for data in self._changed(message):
                        await target.send_all(struct.pack(">Q", len(data) + 4) + hops + data)
        except trio.BrokenResourceError:
            pass
        scope.cancel()

    def _changed(self, message: bytes) -> list[bytes]:
        made = self.change(message) if is_sealed(message) else [message]
        self.changed += made != [message]
        return made


async def test_a_relay_reads_and_changes_nothing_for_long(keys: dict[str, Path]) -> None:
    """It may hold things up, as whoever cuts the cable may. What it changes, cuts short, says twice
    or puts in is dropped, and comes again unchanged once it lets it pass."""
    hub_url, port = f"tcp://127.0.0.1:{(hub_port := free_port())}", free_port()
    relay = Relay(port, hub_port)
    messages = Sequencer("acme", tenant="acme")
    with trio.fail_after(30):
        async with hub(hub_url, keys=keys["keyring"]) as made, trio.open_nursery() as nursery:
            await nursery.start(relay.serve)
            async with (
                connect(f"tcp://127.0.0.1:{port}", name="me", key=keys["acme"]) as bus,
                bus.subscribe(["intent.acme.>"], name="r") as reader,
            ):
                seen: list[bytes] = []

                def keep(data: bytes) -> list[bytes]:
                    seen.append(data)
                    return [data]

                for number, change in enumerate(
                    (
                        keep,
                        lambda data: [data[:-1] + bytes([data[-1] ^ 1])],
                        lambda data: [data[:-1]],
                        lambda data: [data, data],
                        lambda data: [data, *seen],
                        lambda data: [data[25:]],
                    ),
                    start=1,
                ):
                    relay.change = change
                    bus.publish(messages.wrap(RequestDescribed(), Key(workflow="w"), 0.0))
                    await trio.sleep(0.2)  # it has the time to do something
                    relay.change = keep
                    (heard,) = await reader.receive()
                    assert heard.seq == number
                assert relay.changed >= 5
                assert made.statistics().published["intent"] == 6
                assert bus.unreadable + made.refused > 0
            nursery.cancel_scope.cancel()
