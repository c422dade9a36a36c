"""Attacks on a hub, with an honest client and an honest engine beside them.

    python -m benchmarks.attacks [--quick] [--only NAME ...] [--json FILE]

The hub is a process (``hear run bus``) with a keyring like the one of docs/security.md. The client
of one tenant sends controls to an engine at a steady rate and waits for their outcomes, each in a
process of its own; the time from one to the other is what is measured. Then, for each attack, the
same again with another process that attacks the hub for as long: as a stranger, or with the key of
another tenant. An attacker is another machine's in earnest, so here it runs at the lowest priority
(``nice``), and takes what processor time the others leave.

What has to hold of each attack: the 99th percentile at most 10 times that without an attack and
never above 250 ms, no control unanswered, and the hub under 300 MB. It ends with 1 if something
does not. The loads are bounded: an attack ends after some seconds, whatever it does.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from benchmarks import rogue
from hear.app.connection import run
from hear.buses.nng.access import KeyFile, load_key
from hear.buses.nng.client import connect
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.messages import Key, OperationOutcome, Prioritise

RATE_PER_S: Final = 100
SECONDS: Final = 8.0
QUICK_SECONDS: Final = 3.0
ANSWER_WITHIN_S: Final = 10.0
MOST_TIMES: Final = 10.0
MOST_MS: Final = 250.0
MOST_MB: Final = 300.0
END_WITHIN_S: Final = 2.0
READY_S: Final = 20.0
TENANT: Final = "umbra"
ENGINE: Final = "engine0"

KEYRING: Final = {
    "workers": (["state.>", "outcome.>"], ["control.>"], ["engine*"]),
    "acme": (["intent.acme.>", "control.acme.>"], ["*.acme.>"], ["acme", "acme-*"]),
    "umbra": (["intent.umbra.>", "control.umbra.>"], ["*.umbra.>"], ["umbra", "umbra-*"]),
}
"""What each key may publish and hear, and the names that it may speak under."""


# -- the honest ones -------------------------------------------------------------------------------


def say(**facts: Any) -> None:
    """Tell the parent."""
    print(json.dumps(facts), flush=True)


async def be_engine(url: str, key: Path) -> int:
    """Answer each control of the tenant."""
    sequencer = Sequencer(ENGINE, int(time.time() * 1000), tenant=TENANT)
    async with (
        connect(url, name=ENGINE, key=key) as bus,
        bus.subscribe([f"control.{TENANT}.{ENGINE}.>"], name="controls") as controls,
    ):
        say(ready=True)
        while True:
            for envelope in await controls.receive():
                bus.publish(
                    sequencer.wrap(
                        OperationOutcome(status="completed"), envelope.key, trio.current_time()
                    )
                )


async def be_client(url: str, key: Path, seconds: float) -> int:
    """Send controls at a steady rate; say how long each took to be answered."""
    sequencer = Sequencer(TENANT, int(time.time() * 1000), tenant=TENANT)
    asked: dict[str, float] = {}
    took_ms: list[float] = []
    async with (
        connect(url, name="client", key=key) as bus,
        bus.subscribe([f"outcome.{TENANT}.>"], name="outcomes") as outcomes,
        trio.open_nursery() as nursery,
    ):

        async def listen() -> None:
            while True:
                for envelope in await outcomes.receive():
                    message = open_body(envelope)
                    begun = asked.pop(envelope.key.operation or "", None)
                    if isinstance(message, OperationOutcome) and begun is not None:
                        took_ms.append(1e3 * (time.perf_counter() - begun))

        nursery.start_soon(listen)
        say(ready=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        begun = time.perf_counter()
        for number in range(int(seconds * RATE_PER_S)):
            await trio.sleep(max(0.0, begun + number / RATE_PER_S - time.perf_counter()))
            operation = sequencer.next_id()
            asked[operation] = time.perf_counter()
            control = Prioritise(priority=number)
            own = Key(engine=ENGINE, operation=operation, request=f"r{number}")
            bus.publish(sequencer.wrap(control, own, trio.current_time()))
        with trio.move_on_after(ANSWER_WITHIN_S):
            while asked:  # noqa: ASYNC110 - the last of them end it, or the time does
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    say(took_ms=took_ms, unanswered=len(asked))
    return 0


# -- one measurement -------------------------------------------------------------------------------


class Case(msgspec.Struct, frozen=True):
    """What was seen of the honest client and of the hub while one attack went on."""

    attack: str
    answered: int
    unanswered: int
    p50_ms: float
    p99_ms: float
    hub_mb: float
    hub_log_kb: float
    hub_ended_s: float


def measure(attack: str, seconds: float, folder: Path) -> Case:
    """Attack a fresh hub for some seconds."""
    url = f"tcp://127.0.0.1:{free_port()}"
    log = folder / f"{attack}.log"
    with (
        log.open("wb") as errors,
        process(
            "-m",
            "hear.app.cli",
            "run",
            "bus",
            "--bus",
            url,
            "--keys",
            str(folder / "ring.toml"),
            stderr=errors,
        ) as hub,
    ):
        wait_for(url)
        with (
            process(
                "-m", "benchmarks.attacks", "--be", "engine", "--url", url, "--keys", str(folder)
            ) as engine,
            process(
                "-m",
                "benchmarks.attacks",
                "--be",
                "client",
                "--url",
                url,
                "--keys",
                str(folder),
                "--seconds",
                str(seconds),
            ) as client,
        ):
            heard(engine)
            heard(client)
            with attacking(attack, url, folder):
                if attack != NOBODY:
                    time.sleep(0.5)
                client.stdin.write(b"\n")
                client.stdin.flush()
                found = heard(client)
                peak_mb = peak_bytes(hub.pid) / 1e6
                begun = time.perf_counter()
                hub.send_signal(signal.SIGTERM)
                hub.wait(10.0)
                ended_s = time.perf_counter() - begun
    took_ms = sorted(found["took_ms"]) or [float("inf")]
    return Case(
        attack=attack,
        answered=len(found["took_ms"]),
        unanswered=found["unanswered"],
        p50_ms=statistics.median(took_ms),
        p99_ms=took_ms[min(len(took_ms) - 1, int(len(took_ms) * 0.99))],
        hub_mb=peak_mb,
        hub_log_kb=log.stat().st_size / 1e3,
        hub_ended_s=ended_s,
    )


NOBODY: Final = "nobody"


@contextmanager
def attacking(attack: str, url: str, folder: Path) -> Iterator[None]:
    """A process that attacks, for as long as the context lasts."""
    if attack == NOBODY:
        yield
        return
    arguments = ("--be", "attacker", "--attack", attack, "--url", url, "--keys", str(folder))
    with process("-m", "benchmarks.attacks", *arguments, stderr=subprocess.DEVNULL):
        yield


@contextmanager
def process(*arguments: str, stderr: Any = None) -> Iterator[Any]:
    """A process of Python, ended with the context."""
    made = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=Path(__file__).parents[1],
    )
    try:
        yield made
    finally:
        made.kill()
        made.wait()
        for pipe in (made.stdin, made.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def heard(child: Any) -> dict[str, Any]:
    """The next line of a child."""
    line = child.stdout.readline()
    if not line:
        raise SystemExit("a process has ended before its time")
    found: dict[str, Any] = json.loads(line)
    return found


def wait_for(url: str) -> None:
    """Wait until somebody listens."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(rogue.address_of(url), timeout=1.0):
            return
        time.sleep(0.05)
    raise SystemExit(f"nobody listens at {url}")


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def write_keys(folder: Path) -> None:
    """The keyring, and a file for each key."""
    ring = []
    for number, (name, (publish, subscribe, sources)) in enumerate(KEYRING.items(), 1):
        head = f'name = "{name}"\nsecret = "{number:02x}{os.urandom(31).hex()}"\n'
        lists = f"publish = {publish}\nsubscribe = {subscribe}\nsources = {sources}\n"
        ring.append(f"[[key]]\n{head}{lists}")
        write(folder / f"{name}.toml", head)
    write(folder / "ring.toml", "\n".join(ring))


def write(path: Path, text: str) -> None:
    """A file that nobody else may read."""
    path.touch(mode=0o600)
    path.write_text(text)


def broken(case: Case, base: Case) -> list[str]:
    """What does not hold."""
    limit_ms = min(MOST_TIMES * base.p99_ms, MOST_MS)
    found = []
    if case.p99_ms > limit_ms:
        found.append(f"p99 of {case.p99_ms:.1f} ms, expected at most {limit_ms:.1f}")
    if case.unanswered:
        found.append(f"{case.unanswered} controls were not answered")
    if case.hub_mb > MOST_MB:
        found.append(f"the hub took {case.hub_mb:.0f} MB, expected at most {MOST_MB:.0f}")
    if case.hub_ended_s > END_WITHIN_S:
        found.append(f"the hub took {case.hub_ended_s:.1f} s to end on SIGTERM")
    return found


def main() -> int:
    """Run all attacks, or be a part of one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [attack.__name__ for attack in (*rogue.STRANGERS, *rogue.HOLDERS)]
    parser.add_argument("--quick", action="store_true", help="three seconds each")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--be", choices=("engine", "client", "attacker"), help=argparse.SUPPRESS)
    parser.add_argument("--attack", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.be == "engine":
        return run(lambda: be_engine(given.url, given.keys / "workers.toml"))
    if given.be == "client":
        return run(lambda: be_client(given.url, given.keys / f"{TENANT}.toml", given.seconds))
    if given.be == "attacker":
        return attack(given.attack, given.url, load_key(given.keys / "acme.toml"))
    seconds = QUICK_SECONDS if given.quick else SECONDS
    failed = False
    cases = []
    print(
        f"{'attack':18} {'p50 ms':>8} {'p99 ms':>8} {'times':>6} {'answered':>9} {'missing':>8} "
        f"{'hub MB':>7} {'log KB':>7} {'ends s':>7}"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_keys(Path(folder))
        base: Case | None = None
        for name in [NOBODY, *(given.only or names)]:
            case = measure(name, seconds, Path(folder))
            base = base or case
            cases.append(case)
            problems = broken(case, base)
            failed |= bool(problems)
            print(
                f"{name:18} {case.p50_ms:8.2f} {case.p99_ms:8.2f} "
                f"{case.p99_ms / base.p99_ms:6.1f} {case.answered:9} {case.unanswered:8} "
                f"{case.hub_mb:7.0f} {case.hub_log_kb:7.1f} {case.hub_ended_s:7.2f}"
                + "".join(f"\n  DOES NOT HOLD: {problem}" for problem in problems),
                flush=True,
            )
    if given.json:
        given.json.write_bytes(msgspec.json.encode(cases))
    return 1 if failed else 0


def attack(name: str, url: str, key: KeyFile) -> int:
    """Attack until the parent ends it, at the latest after a minute."""
    os.nice(19)
    signal.alarm(60)
    (chosen,) = (a for a in (*rogue.STRANGERS, *rogue.HOLDERS) if a.__name__ == name)
    while True:
        with suppress(Exception):  # a connection that is refused or closed is begun anew
            chosen(url, key)
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
