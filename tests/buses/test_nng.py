"""The bus between processes over real sockets: every promise, every kind of address, keys and
certificates, garbage, and processes of their own that die."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pynng
import pytest
import trio

from hear.buses.nng import client
from hear.buses.nng.access import load_key, load_keyring
from hear.buses.nng.client import NngBus, connect
from hear.buses.nng.frames import LINK_VERSION, MAX_MESSAGE_BYTES, Hello, Refused, decode, encode
from hear.buses.nng.server import hub
from hear.buses.testing import CHECKS, Check
from hear.delivery import Sequencer
from hear.errors import BusError, ConfigError, LocalProtocolError
from hear.interfaces import Bus
from hear.messages import Envelope, Key, OperationOutcome, PressureReported, RequestDescribed
from tests.secret_files import write_secret

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def blocks(language: str) -> list[str]:
    """The blocks of code in docs/security.md."""
    return re.findall(rf"```{language}\n(.*?)```", SECURITY, re.DOTALL)


def write_keys(folder: Path) -> dict[str, Path]:
    """The keyring of docs/security.md, and a key file for each of its keys."""
    keyring, _ = blocks("toml")
    paths = {"keyring": folder / "keyring.toml"}
    write_secret(paths["keyring"], keyring)
    for name, secret in re.findall(r'name = "(\w+)"\nsecret = "(\w+)"', keyring):
        paths[name] = folder / f"{name}.toml"
        write_secret(
            paths[name],
            f'name = "{name}"\nsecret = "{secret}"\n[tls]\nauthority = "authority.pem"\n'
            f'certificate = "{name}.pem"\nserver_name = "hub.hear"\n',
        )
    return paths


def make_certificates(folder: Path) -> None:
    """Run the commands of docs/security.md."""
    (commands,) = blocks("bash")
    subprocess.run(
        ["bash", "-euc", commands], cwd=folder, check=True, capture_output=True, timeout=60
    )


@pytest.fixture(scope="session")
def certified(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Keys and certificates, made by the commands of docs/security.md."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return write_keys(folder)


@asynccontextmanager
async def joined(url: str, keys: dict[str, Path] | None = None) -> AsyncIterator[NngBus]:
    keyring, key = (keys["keyring"], keys["operator"]) if keys else (None, None)
    async with hub(url, keys=keyring), connect(url, name="me", key=key) as bus:
        yield bus


# -- promises ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["ipc", "tcp", "tls+tcp"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_keeps_what_every_bus_promises(
    check: Check, scheme: str, tmp_path: Path, certified: dict[str, Path]
) -> None:
    def factory() -> AbstractAsyncContextManager[Bus]:
        if scheme == "ipc":
            return joined(f"ipc://{tmp_path}/bus")
        port = free_port()
        if scheme == "tcp":
            return joined(f"tcp://127.0.0.1:{port}")
        return joined(f"tls+tcp://127.0.0.1:{port}", certified)

    with trio.fail_after(60):
        await check(factory, 200)


# -- certificates -----------------------------------------------------------------------------


async def test_a_certificate_of_another_authority_is_refused_in_bounded_time(
    certified: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 1.0)
    await trio.to_thread.run_sync(make_certificates, tmp_path)
    strangers = write_keys(tmp_path)
    # It trusts the right hub, and shows a certificate that the hub does not trust.
    (tmp_path / "authority.pem").write_bytes(
        (certified["keyring"].parent / "authority.pem").read_bytes()
    )
    url = f"tls+tcp://127.0.0.1:{free_port()}"
    with trio.fail_after(20):
        async with hub(url, keys=certified["keyring"]) as made:
            with pytest.raises(BusError, match="nobody answers"):
                async with connect(url, name="x", key=strangers["operator"]):
                    pass
            assert made.peers == []
            async with connect(url, name="x", key=certified["operator"]):
                assert made.peers == ["x"]


async def test_a_hub_of_another_authority_or_name_is_not_believed(
    certified: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 1.0)
    folder = certified["keyring"].parent
    await trio.to_thread.run_sync(make_certificates, tmp_path)
    url = f"tls+tcp://127.0.0.1:{free_port()}"
    text = certified["operator"].read_text()
    for wrong in (
        text.replace('"hub.hear"', '"another.example"'),
        text.replace('"authority.pem"', f'"{tmp_path}/authority.pem"'),
    ):
        key = write_secret(folder / "wrong.toml", wrong)
        with trio.fail_after(20):
            async with hub(url, keys=certified["keyring"]):
                with pytest.raises(BusError, match="nobody answers"):
                    async with connect(url, name="x", key=key):
                        pass


async def test_one_without_a_certificate_gets_nowhere(certified: dict[str, Path]) -> None:
    port = free_port()
    with trio.fail_after(20):
        async with hub(f"tls+tcp://127.0.0.1:{port}", keys=certified["keyring"]) as made:
            config = pynng.TLSConfig(
                pynng.TLSConfig.MODE_CLIENT,
                server_name="hub.hear",
                ca_files=[str(certified["keyring"].parent / "authority.pem")],
            )
            with pynng.Pair1(tls_config=config, send_timeout=500) as bare:
                bare.dial(f"tls+tcp://127.0.0.1:{port}", block=False)
                with pynng.Pair1(send_timeout=500) as plain:
                    plain.dial(f"tcp://127.0.0.1:{port}", block=False)
                    for one in (bare, plain):
                        with pytest.raises(pynng.Timeout):
                            await one.asend(encode(Hello(LINK_VERSION, "x", "s", 0)))
            assert made.peers == []
            async with connect(f"tls+tcp://127.0.0.1:{port}", name="x", key=certified["operator"]):
                assert made.peers == ["x"]


async def test_addresses_and_files_that_cannot_be_used_are_refused_at_once(
    certified: dict[str, Path], tmp_path: Path
) -> None:
    plain = write_secret(tmp_path / "plain.toml", f'name = "x"\nsecret = "{"ab" * 32}"\n')
    broken = write_secret(
        tmp_path / "broken.toml",
        plain.read_text() + '[tls]\nauthority = "no"\ncertificate = "none"\n',
    )
    (tmp_path / "no").write_text("no certificate")
    write_secret(tmp_path / "rubbish", "no certificate")
    unlike = write_secret(
        tmp_path / "unlike.toml", broken.read_text().replace('"none"', '"rubbish"')
    )
    with trio.fail_after(10):
        for url, key in (
            ("tls+tcp://127.0.0.1:1", plain),
            ("tls+tcp://127.0.0.1:1", None),
            ("tls+tcp://127.0.0.1:1", broken),
            ("tls+tcp://127.0.0.1:1", unlike),
            ("udp://127.0.0.1:1", None),
            ("ipc://", None),
            ("tcp://nonsense", None),
        ):
            with pytest.raises(ConfigError, match=re.escape(url) + "|certificates|/none: cannot"):
                async with connect(url, name="x", key=key):
                    pass


# -- keys -------------------------------------------------------------------------------------


def test_the_example_in_the_document_can_be_loaded(tmp_path: Path) -> None:
    paths = write_keys(tmp_path)
    keyring = load_keyring(paths["keyring"])
    assert {grant.name for grant in keyring.key} == {
        "operator", "workers", "policies", "acme", "umbra", "tap",
    }  # fmt: skip
    write_secret(tmp_path / "acme.toml", blocks("toml")[1])
    key = load_key(tmp_path / "acme.toml")
    assert key.tls is not None
    assert key.tls.authority == str(tmp_path / "authority.pem"), "paths start at the file"


async def test_tenants_of_the_example_hear_and_say_what_they_may(tmp_path: Path) -> None:
    keys = write_keys(tmp_path)
    url = f"ipc://{tmp_path}/bus"
    with trio.fail_after(20):
        async with (
            hub(url, keys=keys["keyring"]) as made,
            connect(url, name="acme", key=keys["acme"]) as acme,
            connect(url, name="umbra", key=keys["umbra"]) as umbra,
            connect(url, name="tap", key=keys["tap"]) as tap,
            umbra.subscribe([">"], name="all") as heard,
            tap.subscribe([">"], name="all") as tapped,
        ):
            for tenant in ("acme", "umbra"):
                sequencer = Sequencer("acme", tenant=tenant)
                acme.publish(sequencer.wrap(RequestDescribed(), Key(workflow="w"), 0.0))
            umbra.publish(
                Sequencer("umbra", tenant="umbra").wrap(RequestDescribed(), Key(workflow="w"), 0.0)
            )
            messages: list[Envelope] = []
            while len(messages) < 2:
                messages += await tapped.receive()
            assert {(e.source, e.tenant) for e in messages} == {
                ("acme", "acme"),
                ("umbra", "umbra"),
            }
            own: list[Envelope] = []
            with trio.move_on_after(0.2):
                while True:
                    own += await heard.receive()
            assert [(e.source, e.tenant) for e in own] == [("umbra", "umbra")]
            assert (acme.denied, umbra.denied, made.refused) == (1, 0, 1)


async def test_a_wrong_key_and_a_missing_one_are_refused_with_a_reason(tmp_path: Path) -> None:
    keys = write_keys(tmp_path)
    keys["umbra"].write_text(keys["umbra"].read_text().replace("5555", "6666"))
    url = f"ipc://{tmp_path}/bus"
    with trio.fail_after(10):
        async with hub(url, keys=keys["keyring"]) as made:
            with pytest.raises(BusError, match="key 'umbra' is not valid here"):
                async with connect(url, name="x", key=keys["umbra"]):
                    pass
            with pytest.raises(BusError, match="asks for a key, and none was given"):
                async with connect(url, name="x"):
                    pass
            assert made.peers == []


# -- garbage on the socket --------------------------------------------------------------------


async def passes(bus: NngBus, operation: str) -> None:
    """Check that the bus goes on."""
    async with bus.subscribe(["outcome.>"], name=operation) as subscription:
        done = OperationOutcome(status="completed")
        bus.publish(Sequencer(operation).wrap(done, Key(engine="e"), 0.0))
        await subscription.receive()


async def test_junk_over_nng_ends_its_connection_and_nothing_else(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/bus"
    with trio.fail_after(30):
        async with joined(url) as bus:
            for number in range(5):
                with pynng.Pair1(reconnect_time_min=10, reconnect_time_max=10) as junk:
                    junk.dial(url, block=True)
                    for data in (b"", b"junk", b"\xff" * 100_000, b"\x95\xa1F"):
                        await junk.asend(data)
                await passes(bus, f"after-{number}")


async def test_a_newer_link_hears_why_it_is_refused(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/bus"
    with trio.fail_after(10):
        async with joined(url) as bus:
            with pynng.Pair1() as newer:
                newer.dial(url, block=True)
                await newer.asend(encode(Hello(LINK_VERSION + 1, "x", "s", 0)))
                answer = decode(await newer.arecv())
            assert isinstance(answer, Refused)
            assert f"version {LINK_VERSION + 1}" in answer.reason
            await passes(bus, "after")


async def test_junk_that_is_not_even_nng_disturbs_nobody() -> None:
    port = free_port()
    with trio.fail_after(30):
        async with joined(f"tcp://127.0.0.1:{port}") as bus:
            streams = []
            for data in (
                b"",
                b"GET / HTTP/1.1\r\n\r\n",
                b"\x00SP\x00\x00\x11\x00\x00" + b"\xff" * 64,
            ):
                for _ in range(10):
                    stream = await trio.open_tcp_stream("127.0.0.1", port)
                    streams.append(stream)
                    try:
                        if data:
                            await stream.send_all(data)
                    except trio.BrokenResourceError:
                        pass  # it was closed already
            await passes(bus, "while")
            for stream in streams:
                await stream.aclose()
            await passes(bus, "after")


async def test_messages_that_no_frame_can_hold_are_refused_where_they_are_made(
    tmp_path: Path,
) -> None:
    with trio.fail_after(30):
        async with joined(f"ipc://{tmp_path}/bus") as bus:
            large = OperationOutcome(status="completed", detail="x" * MAX_MESSAGE_BYTES)
            sequencer = Sequencer("e")
            with pytest.raises(LocalProtocolError, match=f"at most {MAX_MESSAGE_BYTES}"):
                bus.publish(sequencer.wrap(large, Key(engine="e"), 0.0))
            with pytest.raises(LocalProtocolError, match="a will of"):
                bus.set_will("me", [sequencer.wrap(large, Key(engine="e"), 0.0)])
            with pytest.raises(LocalProtocolError, match="expected at most 4096"):
                bus.publish(sequencer.wrap(PressureReported(), Key(engine="e" * 5_000), 0.0))
            large = OperationOutcome(status="completed", detail="x" * (MAX_MESSAGE_BYTES - 500))
            async with bus.subscribe(["outcome.>"], name="r") as subscription:
                for _ in range(3):
                    bus.publish(sequencer.wrap(large, Key(engine="e"), 0.0))
                heard = 0
                while heard < 3:
                    heard += len(await subscription.receive())


async def test_a_snapshot_that_no_frame_can_hold_is_none(tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with joined(f"ipc://{tmp_path}/bus") as bus:
            large = OperationOutcome(status="completed", detail="x" * MAX_MESSAGE_BYTES)
            made = Sequencer("e").wrap(large, Key(engine="e"), 0.0)
            bus.provide_snapshots("state.default.e.queue", lambda: [made])
            async with bus.subscribe([">"], name="r") as subscription:
                await passes(bus, "other")
                assert {e.source for e in await subscription.receive()} == {"other"}


# -- processes of their own -------------------------------------------------------------------


def start(*arguments: str) -> "subprocess.Popen[str]":
    """Start a process of ``nng_child``; returns once it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.buses.nng_child", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "ready\n":
        assert line, "it ended"
    return process


async def started(stack: list["subprocess.Popen[str]"], *arguments: str) -> "subprocess.Popen[str]":
    process = await trio.to_thread.run_sync(start, *arguments)
    stack.append(process)
    return process


@pytest.fixture
def children() -> Iterator[list["subprocess.Popen[str]"]]:
    stack: list[subprocess.Popen[str]] = []
    yield stack
    for process in stack:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def outcomes(heard: list[Envelope], engine: str) -> list[int]:
    return [
        int(e.key.operation or 0)
        for e in heard
        if e.category == "outcome" and e.key.engine == engine
    ]


async def test_messages_between_processes_survive_a_hub_that_is_killed(
    tmp_path: Path, children: list["subprocess.Popen[str]"]
) -> None:
    url = f"ipc://{tmp_path}/bus"
    with trio.fail_after(60):
        first = await started(children, "hub", url)
        async with (
            connect(url, name="reader") as bus,
            bus.subscribe([">"], name="reader") as subscription,
        ):
            await started(children, "publish", url, "one")
            heard: list[Envelope] = []
            while len(outcomes(heard, "one")) < 5:
                heard += await subscription.receive()
            first.kill()
            await trio.to_thread.run_sync(first.wait)
            await started(children, "hub", url)
            until = max(outcomes(heard, "one")) + 20
            while until not in outcomes(heard, "one"):
                heard += await subscription.receive()
            said = list(dict.fromkeys(outcomes(heard, "one")))
            assert said == list(range(said[0], said[-1] + 1)), "none is missing, in order"


async def test_a_process_that_is_killed_is_replaced_and_its_will_is_done(
    tmp_path: Path, children: list["subprocess.Popen[str]"]
) -> None:
    url = f"ipc://{tmp_path}/bus"
    with trio.fail_after(60):
        async with (
            hub(url),
            connect(url, name="reader") as bus,
            bus.subscribe(["outcome.>"], name="reader") as subscription,
        ):
            one = await started(children, "publish", url, "one")
            heard: list[Envelope] = []
            while len(outcomes(heard, "one")) < 3:
                heard += await subscription.receive()
            one.send_signal(signal.SIGKILL)
            await trio.to_thread.run_sync(one.wait)
            began = time.monotonic()
            await started(children, "publish", url, "one")
            while not outcomes(heard, "one-gone"):
                heard += await subscription.receive()
            assert time.monotonic() - began < 15.0, "sooner than by waiting"
            epochs = {e.epoch for e in heard if e.key.engine == "one"}
            while len(epochs) < 2:
                heard += await subscription.receive()
                epochs = {e.epoch for e in heard if e.key.engine == "one"}
            assert len(outcomes(heard, "one-gone")) == 1


async def test_a_process_that_is_stopped_for_a_while_loses_nothing(
    tmp_path: Path, children: list["subprocess.Popen[str]"]
) -> None:
    url = f"ipc://{tmp_path}/bus"
    with trio.fail_after(60):
        async with (
            hub(url) as made,
            connect(url, name="reader") as bus,
            bus.subscribe(["outcome.>"], name="reader") as subscription,
        ):
            one = await started(children, "publish", url, "one")
            heard: list[Envelope] = []
            while len(outcomes(heard, "one")) < 3:
                heard += await subscription.receive()
            one.send_signal(signal.SIGSTOP)
            try:
                await passes(bus, "other")
                with trio.move_on_after(6.0):
                    while True:
                        heard += await subscription.receive()
                assert "one" in made.peers
            finally:
                one.send_signal(signal.SIGCONT)
            until = max(outcomes(heard, "one")) + 5
            while until not in outcomes(heard, "one"):
                heard += await subscription.receive()
            said = outcomes(heard, "one")
            assert said == list(range(said[0], said[-1] + 1))
            assert outcomes(heard, "one-gone") == []


async def test_a_hub_is_where_nobody_else_is(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/bus"
    with trio.fail_after(10):
        async with hub(url):
            with pytest.raises(ConfigError, match="the address is in use"):
                async with hub(url):
                    pass


async def test_nobody_at_an_address_is_an_error_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 0.3)
    url = f"ipc://{tmp_path}/none"
    with trio.fail_after(5), pytest.raises(BusError, match=re.escape(url) + ".*nobody answers"):
        async with connect(url, name="x"):
            pass


async def test_a_name_in_use_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 0.5)
    url = f"ipc://{tmp_path}/bus"
    with trio.fail_after(10):
        async with joined(url) as bus:
            with pytest.raises(BusError, match="name 'me' is in use"):
                async with connect(url, name="me"):
                    pass
            await passes(bus, "first")


async def test_the_hub_remembers_and_counts(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/bus"
    with trio.fail_after(10):
        async with joined(url) as bus:
            await passes(bus, "one")
            await passes(bus, "two")
            assert [e.source for e in await bus.history(["outcome.>"])] == ["one", "two"]
            assert await bus.history(["control.>"]) == []
            told = await bus.central_statistics()
            assert told.published["outcome"] == 2
