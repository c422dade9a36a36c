"""The bus between processes: how much it carries, how soon, and beside pyzmq.

    python -m benchmarks.bus [--quick] [--json FILE]

Each part of a measurement is a process of its own: the hub, publishers, subscribers. What is
counted at a subscriber are messages of HEAR that it has decoded and checked for gaps, as any reader
does. pyzmq carries the same bytes in the same batches, without a hub, and its subscribers do the
same work; it is the yardstick of what the machine can do, in the same run.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import trio

from hear.app import log
from hear.app.connection import run
from hear.blocks import pack
from hear.buses.nng.client import connect
from hear.buses.nng.server import serve
from hear.codec import decode, encode, open_body
from hear.delivery import GapDetector, Sequencer
from hear.messages import (
    BlocksStored,
    Key,
    Message,
    PressureReported,
    Prioritise,
    QueueChanged,
    ResidencyChanged,
    WaitingRequest,
)

NUM_SUBSCRIBERS: Final = 8
MESSAGE_BYTES: Final = 200
TARGET_RATE: Final = 30_000
RATE_STEPS: Final = (30_000, 36_000, 42_000, 50_000, 60_000, 75_000)
ROUND_TRIPS_PER_S: Final = 1_000
BATCH: Final = 64
READY_S: Final = 20.0
_TICK_S: Final = 0.002


# -- the processes ---------------------------------------------------------------------------------


def say(**facts: Any) -> None:
    """Tell the parent."""
    print(json.dumps(facts), flush=True)


def message_of(size_bytes: int) -> tuple[Message, Key]:
    """A change of residency whose envelope comes to ``size_bytes`` or a few more."""
    key = Key(engine="engine0")
    empty = len(encode(Sequencer("engine0", 10**12).wrap(_stored(0), key, time.time())))
    return _stored(max(0, -(-(size_bytes - empty) // 8))), key


def _stored(blocks: int) -> ResidencyChanged:
    hashes = pack(range(2**63, 2**63 + blocks))
    return ResidencyChanged(changes=(BlocksStored(tier="gpu", prefix_hashes=hashes),))


async def be_hub(url: str) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda **status: serve(url, **status))
        say(ready=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


async def be_subscriber(url: str, name: str) -> None:
    """Count what comes until the last word."""
    detector, count = GapDetector(), 0
    first_s = last_s = 0.0
    async with (
        connect(url, name=name) as bus,
        bus.subscribe(["state.>"], name=name, capacity=65_536) as subscription,
    ):
        say(ready=True)
        while True:
            batch = await subscription.receive()
            now = time.monotonic()
            first_s = first_s or now
            for envelope in batch:
                detector.observe(envelope)
            count += len(batch)
            if batch[-1].source == "end":
                break
            last_s = now
    say(count=count - 1, seconds=last_s - first_s, gaps=detector.gaps, missed=detector.missed)


async def be_publisher(url: str, rate: float, seconds: float) -> None:
    """Publish at a steady rate, then say the last word."""
    message, key = message_of(MESSAGE_BYTES)
    sequencer, end = Sequencer("engine0", 10**12), Sequencer("end")
    async with connect(url, name="publisher") as bus:
        size_bytes = len(encode(sequencer.wrap(message, key, trio.current_time())))
        sequencer = Sequencer("engine0", 10**12)
        say(ready=True)
        begun, sent, total = trio.current_time(), 0, int(rate * seconds)
        while sent < total:
            await trio.sleep(_TICK_S)
            now = trio.current_time()
            due = min(total, int((now - begun) * rate))
            for _ in range(due - sent):
                bus.publish(sequencer.wrap(message, key, now))
            sent = due
        took = trio.current_time() - begun
        while not bus.idle:  # noqa: ASYNC110 - the bus has no event for it
            await trio.sleep(0.05)
        bus.publish(end.wrap(PressureReported(), Key(engine="end"), trio.current_time()))
        dropped = bus.dropped
    say(count=sent, seconds=took, dropped=dropped, size_bytes=size_bytes, cpu_s=time.process_time())


async def be_state(url: str, rate: float, seconds: float) -> None:
    """Report a new request at a steady rate."""
    sequencer, key = Sequencer("engine0", 10**12), Key(engine="engine0")
    async with connect(url, name="engine0") as bus:
        say(ready=True)
        begun = trio.current_time()
        for number in range(int(rate * seconds)):
            await trio.sleep_until(begun + number / rate)
            waiting = WaitingRequest(request=f"r{number}", since_s=trio.current_time())
            changed = QueueChanged(waiting=(waiting,), num_waiting=1)
            bus.publish(sequencer.wrap(changed, key, trio.current_time()))
        await trio.sleep(0.5)
    say(done=True)


async def be_policy(url: str) -> None:
    """Answer each report with a control that says when the report was made."""
    sequencer = Sequencer("policy", 10**12)
    async with (
        connect(url, name="policy") as bus,
        bus.subscribe(["state.*.*.queue.>"], name="policy", capacity=65_536) as subscription,
    ):
        say(ready=True)
        while True:
            for envelope in await subscription.receive():
                message = open_body(envelope)
                assert isinstance(message, QueueChanged)
                waiting = message.waiting[0]
                control = Prioritise(priority=-1, reason=repr(waiting.since_s))
                operation = sequencer.next_id()
                about = Key(request=waiting.request, engine="engine0", operation=operation)
                bus.publish(sequencer.wrap(control, about, trio.current_time()))


async def be_worker(url: str, expected: int) -> None:
    """Take controls in, and note how long ago the report was made that each answers."""
    taken: list[float] = []
    async with (
        connect(url, name="worker") as bus,
        bus.subscribe(["control.>"], name="worker", capacity=65_536) as subscription,
    ):
        say(ready=True)
        with trio.move_on_after(600):
            while len(taken) < expected:
                for envelope in await subscription.receive():
                    message = open_body(envelope)
                    assert isinstance(message, Prioritise)
                    taken.append(trio.current_time() - float(message.reason))
    say(latencies_ms=[round(value * 1e3, 4) for value in taken])


# -- the same over pyzmq ---------------------------------------------------------------------------


def zmq_socket(kind: str, url: str, *, bind: bool) -> Any:
    import zmq

    made: Any = zmq.Context.instance().socket(getattr(zmq, kind))
    made.set_hwm(100_000)
    made.linger = 2_000
    if kind == "SUB":
        made.subscribe(b"")
    if bind:
        made.bind(url)
    else:
        made.connect(url)
    return made


async def zmq_receive(sock: Any) -> list[bytes]:
    import zmq

    got: list[bytes] = []
    while not got:
        try:
            while len(got) < BATCH * BATCH:
                got.extend(sock.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            if not got:
                if not sock.events & zmq.POLLIN:
                    await trio.lowlevel.wait_readable(sock.fd)
                else:
                    await trio.lowlevel.checkpoint()
    return got


async def zmq_subscriber(url: str, name: str) -> None:
    detector, count = GapDetector(), 0
    first_s = last_s = 0.0
    sock = zmq_socket("SUB", url, bind=False)
    say(ready=True)
    ended = False
    while not ended:
        batch = [decode(part) for part in await zmq_receive(sock)]
        now = time.monotonic()
        first_s = first_s or now
        for envelope in batch:
            detector.observe(envelope)
        count += len(batch)
        ended = batch[-1].source == "end"
        last_s = last_s if ended else now
    say(count=count - 1, seconds=last_s - first_s, gaps=detector.gaps, missed=detector.missed)


async def zmq_publisher(url: str, rate: float, seconds: float) -> None:
    message, key = message_of(MESSAGE_BYTES)
    sequencer, end = Sequencer("engine0", 10**12), Sequencer("end")
    sock = zmq_socket("PUB", url, bind=True)
    await trio.sleep(1.0)  # for all to have joined: pyzmq has no word for it
    say(ready=True)
    begun, sent, total = trio.current_time(), 0, int(rate * seconds)
    while sent < total:
        await trio.sleep(_TICK_S)
        now = trio.current_time()
        due = min(total, int((now - begun) * rate))
        parts = [encode(sequencer.wrap(message, key, now)) for _ in range(due - sent)]
        for at in range(0, len(parts), BATCH):
            sock.send_multipart(parts[at : at + BATCH])
        sent = due
    took = trio.current_time() - begun
    await trio.sleep(1.0)
    sock.send_multipart([encode(end.wrap(PressureReported(), Key(engine="end"), 0.0))])
    say(count=sent, seconds=took, dropped=0, cpu_s=time.process_time())
    await trio.sleep(0.5)


async def zmq_state(url: str, rate: float, seconds: float) -> None:
    sequencer, key = Sequencer("engine0", 10**12), Key(engine="engine0")
    sock = zmq_socket("PUB", url, bind=True)
    await trio.sleep(1.0)
    say(ready=True)
    begun = trio.current_time()
    for number in range(int(rate * seconds)):
        await trio.sleep_until(begun + number / rate)
        waiting = WaitingRequest(request=f"r{number}", since_s=trio.current_time())
        changed = QueueChanged(waiting=(waiting,), num_waiting=1)
        sock.send_multipart([encode(sequencer.wrap(changed, key, trio.current_time()))])
    await trio.sleep(0.5)
    say(done=True)


async def zmq_policy(url: str, out: str) -> None:
    sequencer = Sequencer("policy", 10**12)
    sock, answers = zmq_socket("SUB", url, bind=False), zmq_socket("PUB", out, bind=True)
    say(ready=True)
    while True:
        for part in await zmq_receive(sock):
            message = open_body(decode(part))
            assert isinstance(message, QueueChanged)
            waiting = message.waiting[0]
            control = Prioritise(priority=-1, reason=repr(waiting.since_s))
            about = Key(request=waiting.request, engine="engine0", operation=sequencer.next_id())
            answers.send_multipart([encode(sequencer.wrap(control, about, trio.current_time()))])


async def zmq_worker(url: str, expected: int) -> None:
    sock = zmq_socket("SUB", url, bind=False)
    say(ready=True)
    taken: list[float] = []
    with trio.move_on_after(600):
        while len(taken) < expected:
            for part in await zmq_receive(sock):
                message = open_body(decode(part))
                assert isinstance(message, Prioritise)
                taken.append(trio.current_time() - float(message.reason))
    say(latencies_ms=[round(value * 1e3, 4) for value in taken])


# -- the measurements ------------------------------------------------------------------------------


class Child:
    """A process of a measurement."""

    def __init__(self, role: str, *arguments: object, module: str = "benchmarks.bus") -> None:
        self.role = role
        command = [sys.executable, "-m", module, "--role", role, *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> dict[str, Any]:
        """The next thing that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.role} ended with code {self._process.wait()}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def end(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        self._process.stdout.close()


@contextmanager
def children() -> Iterator[list[Child]]:
    """A list of processes that end with it, last first."""
    started: list[Child] = []
    try:
        yield started
    finally:
        for child in reversed(started):
            child.end()


def start(
    started: list[Child], role: str, *arguments: object, module: str = "benchmarks.bus"
) -> Child:
    """Start a process and wait until it is ready."""
    child = Child(role, *arguments, module=module)
    started.append(child)
    assert child.hear()["ready"]
    return child


def new_url(kind: str, folder: Path) -> str:
    """An address that nobody uses."""
    if kind == "ipc":
        return f"ipc://{folder}/{time.monotonic_ns()}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def fan_out(kind: str, rate: float, seconds: float, folder: Path, *, zmq: bool) -> dict[str, Any]:
    """One publisher at a rate to all subscribers."""
    url = new_url(kind, folder)
    prefix = "zmq-" if zmq else ""
    with children() as started:
        if not zmq:
            start(started, "hub", url)
        readers = [Child(f"{prefix}subscriber", url, f"s{n}") for n in range(NUM_SUBSCRIBERS)]
        started += readers
        for reader in readers:
            assert reader.hear()["ready"]
        publisher = start(started, f"{prefix}publisher", url, rate, seconds)
        sent = publisher.hear()
        got = [reader.hear() for reader in readers]
    unseen = sum(sent["count"] - reader["count"] - reader["missed"] for reader in got)
    return {
        "transport": kind,
        "bus": "pyzmq" if zmq else "hear",
        "offered_per_s": rate,
        "published_per_s": sent["count"] / sent["seconds"],
        "received_per_s": min(reader["count"] / reader["seconds"] for reader in got),
        "lost_and_seen": sum(reader["missed"] for reader in got),
        "lost_unseen": unseen,
        "message_bytes": sent.get("size_bytes", MESSAGE_BYTES),
    }


def most(kind: str, seconds: float, folder: Path, *, zmq: bool) -> list[dict[str, Any]]:
    """Raise the rate until something is lost or the rate is not reached."""
    rows = []
    for rate in RATE_STEPS:
        row = fan_out(kind, rate, seconds, folder, zmq=zmq)
        rows.append(row)
        show_fan_out(row)
        if row["lost_and_seen"] or row["lost_unseen"] or row["received_per_s"] < 0.95 * rate:
            break
    return rows


def round_trip(kind: str, seconds: float, folder: Path, *, zmq: bool) -> dict[str, Any]:
    """State, decision, control: three processes, at a steady rate."""
    url, out = new_url(kind, folder), new_url(kind, folder)
    prefix = "zmq-" if zmq else ""
    expected = int(ROUND_TRIPS_PER_S * seconds)
    with children() as started:
        if zmq:
            start(started, "zmq-policy", url, out)
            worker = start(started, "zmq-worker", out, expected)
        else:
            start(started, "hub", url)
            start(started, "policy", url)
            worker = start(started, "worker", url, expected)
        start(started, f"{prefix}state", url, ROUND_TRIPS_PER_S, seconds)
        latencies = worker.hear()["latencies_ms"]
    skipped = len(latencies) // 10  # imports and first allocations
    tail = sorted(latencies[skipped:])
    return {
        "transport": kind,
        "bus": "pyzmq" if zmq else "hear",
        "rate_per_s": ROUND_TRIPS_PER_S,
        "count": len(latencies),
        "expected": expected,
        "p50_ms": statistics.median(tail),
        "p99_ms": tail[int(len(tail) * 0.99)],
        "max_ms": tail[-1],
    }


def show_fan_out(row: dict[str, Any]) -> None:
    print(
        f"  {row['bus']:6} {row['transport']:4} offered {row['offered_per_s']:>7,.0f}/s   "
        f"received {row['received_per_s']:>7,.0f}/s by each of {NUM_SUBSCRIBERS}   "
        f"lost and seen {row['lost_and_seen']:>6,}   lost unseen {row['lost_unseen']}",
        flush=True,
    )


def show_round_trip(row: dict[str, Any]) -> None:
    print(
        f"  {row['bus']:6} {row['transport']:4} {row['count']:,} of {row['expected']:,} came back"
        f"   p50 {row['p50_ms']:.2f} ms   p99 {row['p99_ms']:.2f} ms   max {row['max_ms']:.1f} ms",
        flush=True,
    )


def measure(quick: bool) -> dict[str, Any]:
    """Everything, in the order in which it is shown."""
    buses = (False, True) if find_spec("zmq") else (False,)
    if len(buses) == 1:
        print("pyzmq is not installed, so there is nothing to stand beside (extra: bench)")
    seconds = 2.0 if quick else 5.0
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "fan_out": [],
        "round_trip": [],
    }
    with tempfile.TemporaryDirectory(prefix="hear-") as name:
        folder = Path(name)
        print(f"one publisher to {NUM_SUBSCRIBERS} subscribers, {MESSAGE_BYTES} bytes a message")
        for zmq in buses:
            for kind in ("ipc", "tcp"):
                if quick:
                    row = fan_out(kind, TARGET_RATE, seconds, folder, zmq=zmq)
                    show_fan_out(row)
                    result["fan_out"].append(row)
                else:
                    result["fan_out"] += most(kind, seconds, folder, zmq=zmq)
        print(f"state to decision to control, {ROUND_TRIPS_PER_S:,} a second")
        for zmq in buses:
            for kind in ("ipc", "tcp"):
                row = round_trip(kind, seconds, folder, zmq=zmq)
                show_round_trip(row)
                result["round_trip"].append(row)
    return result


ROLES: Final[dict[str, Any]] = {
    "hub": be_hub,
    "subscriber": be_subscriber,
    "publisher": be_publisher,
    "state": be_state,
    "policy": be_policy,
    "worker": be_worker,
    "zmq-subscriber": zmq_subscriber,
    "zmq-publisher": zmq_publisher,
    "zmq-state": zmq_state,
    "zmq-policy": zmq_policy,
    "zmq-worker": zmq_worker,
}


def run_role(roles: dict[str, Any], words: list[str]) -> None:
    """Be one process of a measurement, as a command of HEAR runs."""
    log.to_stderr("critical")
    role, *rest = words
    values = [float(word) if word.replace(".", "", 1).isdigit() else word for word in rest]

    async def main() -> int:
        await roles[role](*values)
        return 0

    sys.exit(run(main))


def main() -> None:
    """Run the benchmark, or one process of it."""
    parser = argparse.ArgumentParser(description="The bus between processes, beside pyzmq.")
    parser.add_argument("--quick", action="store_true", help="under 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        run_role(ROLES, arguments.role)
        return
    result = measure(arguments.quick)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
