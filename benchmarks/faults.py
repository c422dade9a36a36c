"""What faults do to the bus: a reader that is stopped, processes that are killed, and how all end.

    python -m benchmarks.faults [stopped] [killed] [ended] [--quick] [--json FILE]

``stopped``: one of several readers is stopped (SIGSTOP) under load. How does the latency of the
others move, does memory stay bounded, and how soon is the stopped one right again?

``killed``: controls are sent while sender, hub, worker and policy are killed (SIGKILL) again and
again, at random. Each control must end in exactly one terminal outcome, and act once at most. The
sender writes down what it issues and what has ended, the backend what it does, and a witness on the
bus every terminal outcome; the three must agree.

``ended``: every part of a running cluster, under traffic, is told to end (SIGINT or SIGTERM); how
long does it take, and with which code?
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, Final

import trio

from benchmarks.bus import Child, children, new_url, run_role, say, start
from hear.app import log
from hear.app.clock import new_epoch
from hear.app.supervisor import Part, Supervisor
from hear.buses.nng.client import connect
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engine_view import EngineViews
from hear.engines.worker.loop import EngineWorker
from hear.engines.worker.operation_log import OperationLog
from hear.errors import BusError
from hear.harness_view import HarnessView
from hear.interfaces import ApplyResult, Ask, OperationEnded, Report
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    Cancel,
    CapabilitiesReported,
    Control,
    CostsReported,
    Envelope,
    Key,
    OperationOutcome,
    Prepare,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    Release,
    WaitingRequest,
    Withdraw,
)
from hear.operation import TERMINAL, Operation
from hear.policies.runtime.runner import PolicyRunner
from hear.sender_operations import SenderOperations
from hear.subjects import stem

LOAD_PER_S: Final = 1_000
MAX_OPEN: Final = 2_000
ENGINE: Final = "engine0"


# -- a reader that is stopped ----------------------------------------------------------------------


async def be_load(url: str, seconds: float) -> None:
    """An engine whose queue changes at a steady rate, and which answers for its snapshots."""
    sequencer, key = Sequencer(ENGINE, new_epoch()), Key(engine=ENGINE)
    waiting: dict[str, WaitingRequest] = {}
    async with connect(url, name=ENGINE) as bus:

        def snapshot() -> Iterable[Any]:
            message = QueueSnapshot(waiting=tuple(waiting.values()))
            yield sequencer.wrap_snapshot(message, key, trio.current_time())

        bus.provide_snapshots(stem("state", "default", key, "queue_snapshot"), snapshot)
        say(ready=True)
        begun, number = trio.current_time(), 0
        while (now := trio.current_time()) < begun + seconds:
            request = WaitingRequest(request=f"r{number}", since_s=now)
            waiting[request.request] = request
            started: tuple[str, ...] = ()
            if len(waiting) > 100:
                started = (next(iter(waiting)),)
                del waiting[started[0]]
            changed = QueueChanged(
                waiting=(request,), started=started, ended=started, num_waiting=len(waiting)
            )
            bus.publish(sequencer.wrap(changed, key, now))
            outcome = OperationOutcome(status="completed", control="release")
            about = Key(engine=ENGINE, operation=f"o{number}")
            bus.publish(sequencer.wrap(outcome, about, now))
            number += 1
            await trio.sleep_until(begun + number / LOAD_PER_S)
        await trio.sleep(1.0)
    say(count=number)


class Reader:
    """Keeps a view of the queue, and notes latencies by the second, and what a standstill did."""

    def __init__(self) -> None:
        self.views = EngineViews()
        self.latencies: dict[int, list[float]] = {}
        self.knew: list[float] = []  # times at which it saw a gap, or was told of one
        self.right: list[float] = []  # times at which it was up to date again after a standstill
        self._woken_s: float | None = None
        self._last_s = time.monotonic()

    def wakes(self, now: float) -> None:
        """Notice that this process stood still."""
        if time.monotonic() - self._last_s > 3.0:
            self._woken_s = now
        self._last_s = time.monotonic()

    def take(self, envelope: Envelope, now: float) -> bool:
        """Take a message over; returns whether a snapshot is needed."""
        if envelope.kind == "queue_changed":
            self.latencies.setdefault(int(now), []).append(now - envelope.time_s)
        message = open_body(envelope)
        if envelope.category != "state" or message is None:
            return False
        needs_snapshot = self.views.apply(envelope, message)
        if needs_snapshot:
            self.knew.append(now)
        elif self._woken_s is not None and envelope.time_s >= self._woken_s:
            self.right.append(now)
            self._woken_s = None
        return needs_snapshot


async def be_reader(url: str, name: str, seconds: float) -> None:
    """Read all, and come back if it is cut off."""
    reader = Reader()
    async with connect(url, name=name) as bus:
        say(ready=True)
        with trio.move_on_after(seconds):
            while True:
                try:
                    async with bus.subscribe([">"], name=name, capacity=16_384) as subscription:
                        while True:
                            batch = await subscription.receive()
                            now = trio.current_time()
                            reader.wakes(now)
                            for envelope in batch:
                                if reader.take(envelope, now):
                                    subscription.request_snapshot(envelope)
                except BusError:
                    reader.knew.append(trio.current_time())
    say(
        by_second={
            second: [statistics.median(values) * 1e3, max(values) * 1e3]
            for second, values in reader.latencies.items()
        },
        knew=reader.knew,
        right=reader.right,
        waiting=sorted(reader.views[ENGINE].waiting),
    )


def measure_stopped(quick: bool, folder: Path) -> dict[str, Any]:
    """Stop one reader of three for a while."""
    before_s, stopped_s, after_s = (5.0, 6.0, 3.0) if quick else (15.0, 60.0, 10.0)
    seconds = before_s + stopped_s + after_s
    url = new_url("ipc", folder)
    memory: list[int] = []
    with children() as started:
        hub = start(started, "hub", url)
        mine = {"module": "benchmarks.faults"}
        readers = [
            start(started, "reader", url, f"reader{n}", seconds + 4, **mine) for n in range(3)
        ]
        load = start(started, "load", url, seconds, **mine)
        time.sleep(before_s)
        memory.append(_resident_kib(hub.pid))
        stop_s = time.time()
        os.kill(readers[0].pid, signal.SIGSTOP)
        deadline = time.monotonic() + stopped_s
        while time.monotonic() < deadline:
            time.sleep(0.5)
            memory.append(_resident_kib(hub.pid))
        cont_s = time.time()
        os.kill(readers[0].pid, signal.SIGCONT)
        load.hear()
        stopped, *others = [reader.hear() for reader in readers]
    moved = []
    for other in others:
        rows = {int(second): values for second, values in other["by_second"].items()}
        quiet = [v[0] for s, v in rows.items() if stop_s - before_s + 2 < s < stop_s - 1]
        during = [v[0] for s, v in rows.items() if stop_s + 1 < s < cont_s - 1]
        moved.append((statistics.median(quiet), statistics.median(during)))
    right = [at - cont_s for at in stopped["right"] if at >= cont_s]
    result = {
        "stopped_s": stopped_s,
        "load_per_s": 2 * LOAD_PER_S,
        "others_p50_before_ms": [before for before, _ in moved],
        "others_p50_during_ms": [during for _, during in moved],
        "others_moved_percent": [100 * (during / before - 1) for before, during in moved],
        "others_gaps": sum(len(other["knew"]) for other in others),
        "hub_mib_before": memory[0] / 1024,
        "hub_mib_most": max(memory) / 1024,
        "right_again_s": right[0] if right else None,
        "knew_its_gap": any(at >= cont_s for at in stopped["knew"]),
        "views_agree": all(stopped["waiting"] == other["waiting"] for other in others),
    }
    print(f"  one of three readers stopped for {stopped_s:g} s at {2 * LOAD_PER_S:,} messages/s")
    for before, during in moved:
        print(f"  another's median latency {before:.2f} ms before, {during:.2f} ms meanwhile")
    print(
        f"  hub {result['hub_mib_before']:.0f} MiB, {result['hub_mib_most']:.0f} MiB at most\n"
        f"  the stopped one knew of its gap: {result['knew_its_gap']}; right again after "
        f"{result['right_again_s'] or inf:.2f} s; agrees with all: {result['views_agree']}",
        flush=True,
    )
    return result


def _resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


# -- processes that are killed ---------------------------------------------------------------------


class NotingBackend:
    """Does nothing but write down what it is asked to do; some of it takes a moment."""

    def __init__(self, effects: Path) -> None:
        self._effects = os.open(effects, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._under_way: list[tuple[float, str]] = []
        self._news = trio.Event()

    def capabilities(self) -> CapabilitiesReported:
        return CapabilitiesReported(controls=("release", "prepare"))

    def costs(self) -> CostsReported:
        return CostsReported(
            basis="estimated", prefill_tokens_per_s=1.0, decode_step_s=1.0, kv_bytes_per_token=1.0
        )

    def pressure(self) -> PressureReported:
        return PressureReported()

    def queue(self, tenant: str = DEFAULT_TENANT) -> QueueSnapshot:
        return QueueSnapshot()

    def residency(self, tenant: str = DEFAULT_TENANT) -> Iterable[BlocksStored]:
        return ()

    def residency_known(self) -> bool:
        return True

    def apply(self, operation: Operation) -> ApplyResult:
        if isinstance(operation.control, Cancel | Withdraw):
            return ApplyResult("completed")
        os.write(self._effects, f"{operation.id}\n".encode())
        if isinstance(operation.control, Release):
            return ApplyResult("completed")
        self._under_way.append((trio.current_time() + 0.005, operation.id))
        self._news.set()
        return ApplyResult("accepted")

    def expect(self, operation: Operation) -> None:
        """Nothing to do: no requests come here."""

    def revert(self, operation: Operation) -> None:
        self._under_way = [(at, id) for at, id in self._under_way if id != operation.id]

    async def run(self, report: Callable[[Report], None]) -> None:
        number = 0
        while True:
            with trio.move_on_after(0.05):
                await self._news.wait()
            self._news = trio.Event()
            await trio.sleep(0.005)
            now = trio.current_time()
            ended = [id for at, id in self._under_way if at <= now]
            self._under_way = [(at, id) for at, id in self._under_way if at > now]
            number += 1
            waiting = WaitingRequest(request=f"r{number}", since_s=now)
            done = OperationOutcome(status="completed", control="prepare")
            report(
                Report(
                    queue=QueueChanged(waiting=(waiting,)),
                    operations=[OperationEnded(id, done) for id in ended],
                )
            )


async def be_noting_worker(url: str, effects: str, operation_log: str) -> None:
    backend = NotingBackend(Path(effects))
    async with connect(url, name=ENGINE) as bus:
        worker = EngineWorker(
            bus,
            backend,
            name=ENGINE,
            epoch=new_epoch(),
            operation_log=OperationLog(Path(operation_log)),
        )
        await worker.run()


class Chatty:
    """A policy that asks for something whenever the queue changes."""

    name = "chatty"
    observes = ("state.*.*.queue.>",)

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        for _ in range(4):
            yield Ask(Release(reason="the queue changed"), Key(context="c", engine=ENGINE))


async def be_chatty_policy(url: str) -> None:
    async with connect(url, name="chatty") as bus:
        await PolicyRunner(bus, Chatty(), epoch=new_epoch()).run()


def _read_journal(path: Path) -> tuple[int, set[str]]:
    """How many were issued, and which have ended."""
    issued, ended = 0, set()
    for line in path.read_text(encoding="ascii").splitlines() if path.exists() else ():
        kind, _, rest = line.partition(" ")
        if kind == "issued":
            issued = max(issued, int(rest))
        elif kind == "ended":
            ended.add(rest.split(" ")[0])
    return issued, ended


async def be_sender(url: str, journal: str, total: float) -> None:
    """Send controls of known names, and write down each that was issued and each that has ended.

    A later incarnation goes on with what is open, under the same names.
    """
    path = Path(journal)
    issued, ended = _read_journal(path)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sender_operations = SenderOperations(first_retry_s=0.5, max_retry_s=2.0)
    sequencer = Sequencer("sender", new_epoch())
    waiting = deque(f"op{number}" for number in range(issued) if f"op{number}" not in ended)
    async with (
        connect(url, name="sender") as bus,
        bus.subscribe(
            ["outcome.>", "state.*.*.capabilities.>"], name="sender", capacity=262_144
        ) as subscription,
    ):
        while len(ended) < int(total):
            now = trio.current_time()
            news: list[str] = []
            while len(sender_operations) + len(news) < MAX_OPEN and (
                waiting or issued < int(total)
            ):
                if not waiting:
                    # Written before it is said, so that a later incarnation knows of it.
                    first, issued = issued, min(int(total), issued + 500)
                    os.write(file, f"issued {issued}\n".encode())
                    waiting.extend(f"op{number}" for number in range(first, issued))
                news.append(waiting.popleft())
            for id in news:
                control: Control = Release(deadline_s=now + 1e6)
                if id.endswith("7"):
                    control = Prepare(deadline_s=now + 1e6)
                key = Key(context=id, engine=ENGINE, operation=id)
                envelope = sequencer.wrap(control, key, now)
                sender_operations.submit(envelope, control, now, now + 1e6)
                bus.publish(envelope)
            with trio.move_on_at(sender_operations.next_due() or now + 1.0):
                for envelope in await subscription.receive():
                    for ask in _hear(envelope, sender_operations, ended, file):
                        bus.publish(ask)
            for envelope in sender_operations.due(trio.current_time())[0]:
                bus.publish(envelope)
    os.write(file, b"done\n")
    await trio.sleep_forever()


def _hear(
    envelope: Any, sender_operations: SenderOperations, ended: set[str], file: int
) -> list[Any]:
    message = open_body(envelope)
    if envelope.category == "state":
        return sender_operations.hear_epoch(ENGINE, envelope.epoch, trio.current_time())
    if isinstance(message, OperationOutcome):
        moved = sender_operations.hear(envelope.key, message)
        if moved is not None and moved.terminal:
            os.write(file, f"ended {moved.id} {message.status} {message.reason}\n".encode())
            ended.add(moved.id)
    return []


async def be_witness(url: str, out: str) -> None:
    """Write down every terminal outcome that is said on the bus, until told to end."""
    with Path(out).open("w", encoding="ascii") as file:  # noqa: ASYNC230 - nobody waits for it
        async with (
            connect(url, name="witness") as bus,
            bus.subscribe(["outcome.>"], name="witness", capacity=262_144) as subscription,
        ):
            say(ready=True)
            while True:
                for envelope in await subscription.receive():
                    message = open_body(envelope)
                    if isinstance(message, OperationOutcome) and message.status in TERMINAL:
                        told = f"{envelope.key.operation} {message.status} {message.reason}\n"
                        file.write(told)
                file.flush()


def measure_killed(quick: bool, folder: Path, seed: int) -> dict[str, Any]:
    """Send controls while each part is killed again and again."""
    total = 4_000 if quick else 1_000_000
    url = new_url("ipc", folder)
    journal, effects, seen = folder / "journal", folder / "effects", folder / "seen"
    me = (sys.executable, "-m", "benchmarks.faults", "--role")
    parts = [
        Part("hub", (sys.executable, "-m", "hear.app.cli", "run", "bus", "--bus", url)),
        Part("worker", (*me, "worker", url, str(effects), str(folder / "operations"))),
        Part("sender", (*me, "sender", url, str(journal), str(total))),
        Part("policy", (*me, "policy", url)),
    ]
    chance = random.Random(seed)
    kills: Counter[str] = Counter()
    took_s = 0.0

    async def drive() -> None:
        nonlocal took_s
        supervisor = Supervisor(max_pause_s=0.2)  # they end as often as we kill them
        policy = trio.CancelScope()

        async def keep_policy() -> None:
            with policy:
                await supervisor.keep(parts[-1])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run, parts[:-1])
            nursery.start_soon(keep_policy)
            with trio.fail_after(30):
                witness = await trio.to_thread.run_sync(_start_witness, url, seen)
            begun = trio.current_time()
            while not _is_done(journal):
                await trio.sleep(chance.uniform(0.5, 1.5) if quick else chance.uniform(1.0, 3.0))
                part = chance.choice(parts).name
                pid = supervisor.running.get(part)
                if pid is not None and not _is_done(journal):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        kills[part] += 1
            took_s = trio.current_time() - begun
            policy.cancel()  # it would go on for ever, and has to have its answers
            await trio.sleep(4.0)
            witness.end()
            nursery.cancel_scope.cancel()

    trio.run(drive)
    result = _audit(total, journal, effects, seen)
    result |= {"total": total, "kills": dict(kills), "seconds": took_s}
    print(
        f"  {total:,} controls in {took_s:.0f} s ({total / took_s:,.0f} a second) through "
        f"{sum(kills.values())} kills: {dict(kills)}\n"
        f"  ended {result['ended']:,}: {result['outcomes']}\n"
        f"  ended twice {result['ended_twice']}   acted twice {result['acted_twice']}   "
        f"lost {result['lost']}   completed without effect {result['completed_without_effect']}\n"
        f"  seen by a witness: {result['seen']:,} operations, the policy's included; "
        f"with two different ends {result['two_ends']}; acted and without an end "
        f"{result['acted_without_end']}",
        flush=True,
    )
    return result


def _start_witness(url: str, seen: Path) -> Child:
    return start([], "witness", url, seen, module="benchmarks.faults")


def _is_done(journal: Path) -> bool:
    with suppress(OSError), journal.open("rb") as file:
        file.seek(max(0, journal.stat().st_size - 5))
        return file.read() == b"done\n"
    return False


def _audit(total: int, journal: Path, effects: Path, seen: Path) -> dict[str, Any]:
    ends: dict[str, list[str]] = {}
    for line in journal.read_text(encoding="ascii").splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "ended":
            id, _, how = rest.partition(" ")
            ends.setdefault(id, []).append(how.strip())
    acted = Counter(effects.read_text(encoding="ascii").split())
    told: dict[str, set[str]] = {}
    for line in seen.read_text(encoding="ascii").splitlines():
        id, _, how = line.partition(" ")
        told.setdefault(id, set()).add(how.strip())
    return {
        "ended": len(ends),
        "outcomes": dict(Counter(how for hows in ends.values() for how in set(hows))),
        "lost": total - len(ends),
        "ended_twice": sum(len(set(hows)) > 1 for hows in ends.values()),
        "acted_twice": sum(count > 1 for count in acted.values()),
        "completed_without_effect": sum(
            "completed" in hows and id not in acted for id, hows in ends.items()
        ),
        "seen": len(told),
        "two_ends": sum(len(hows) > 1 for hows in told.values()),
        "acted_without_end": sum(id not in told for id in acted),
        "journal_and_witness_differ": sum(
            id in told and set(hows) != told[id] for id, hows in ends.items()
        ),
    }


# -- how all end -----------------------------------------------------------------------------------


def measure_ended(quick: bool, folder: Path, seed: int) -> dict[str, Any]:
    """Tell each part of a running cluster to end, under traffic."""
    rounds = 2 if quick else 50
    chance = random.Random(seed)
    took: list[float] = []
    codes: Counter[str] = Counter()
    wrong: list[str] = []
    for round in range(rounds):
        url = new_url("ipc" if round % 2 else "tcp", folder)
        hear = [sys.executable, "-m", "hear.app.cli", "run"]
        commands = {
            "bus": [*hear, "bus", "--bus", url],
            "engine": [
                *hear,
                "engine",
                ENGINE,
                "--bus",
                url,
                "--operation-log",
                f"{folder}/l{round}",
            ],
            "policy": [*hear, "policy", "cache-aware", "--bus", url],
            "traffic": [sys.executable, "-m", "benchmarks.faults", "--role", "traffic", url],
        }
        running = {
            name: subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
            for name, command in commands.items()
        }
        time.sleep(3.0 + chance.random())
        names = list(running)
        chance.shuffle(names)
        for name in names:
            process = running[name]
            number = chance.choice((signal.SIGINT, signal.SIGTERM))
            alive = process.poll() is None
            begun = time.monotonic()
            process.send_signal(number)
            try:
                code = process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            seconds = time.monotonic() - begun
            took.append(seconds)
            codes[f"{code}"] += 1
            assert process.stderr is not None
            said = process.stderr.read().decode(errors="replace")
            fits = code in (0, 128 + number, -number)
            if not (alive and fits and seconds <= 2.0) or "Traceback" in said:
                wrong.append(f"{name} {number.name} code {code} {seconds:.2f} s: {said[-300:]}")
    result = {
        "ends": len(took),
        "within_2_s": sum(seconds <= 2.0 for seconds in took),
        "longest_s": max(took),
        "median_s": statistics.median(took),
        "codes": dict(codes),
        "wrong": wrong,
    }
    print(
        f"  {result['ends']} ends under traffic: within 2 s {result['within_2_s']}, median "
        f"{result['median_s']:.2f} s, longest {result['longest_s']:.2f} s, codes {dict(codes)}, "
        f"wrong {len(wrong)}",
        flush=True,
    )
    for line in wrong:
        print(f"    {line}", flush=True)
    return result


async def be_traffic(url: str) -> None:
    """State and intent at a steady rate, from one who is to be ended like all others."""
    sequencer, key = Sequencer("traffic", new_epoch()), Key(engine="traffic")
    async with (
        connect(url, name="traffic") as bus,
        bus.subscribe([">"], name="traffic", capacity=65_536) as subscription,
        trio.open_nursery() as nursery,
    ):

        async def publish() -> None:
            number = 0
            while True:
                number += 1
                waiting = WaitingRequest(request=f"r{number}", since_s=trio.current_time())
                changed = QueueChanged(waiting=(waiting,))
                bus.publish(sequencer.wrap(changed, key, trio.current_time()))
                await trio.sleep(0.002)

        nursery.start_soon(publish)
        while True:
            await subscription.receive()


ROLES: Final[dict[str, Any]] = {
    "load": be_load,
    "reader": be_reader,
    "worker": be_noting_worker,
    "policy": be_chatty_policy,
    "sender": be_sender,
    "witness": be_witness,
    "traffic": be_traffic,
}


def main() -> None:
    """Run the benchmark, or one process of it."""
    parser = argparse.ArgumentParser(description="What faults do to the bus.")
    parser.add_argument("which", nargs="*", metavar="stopped|killed|ended")
    parser.add_argument("--quick", action="store_true", help="under 50 s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        run_role(ROLES, arguments.role)
        return
    unknown = set(arguments.which) - {"stopped", "killed", "ended"}
    if unknown:
        parser.error(f"{sorted(unknown)}: expected stopped, killed or ended")
    log.to_stderr("error")
    which = arguments.which or ["stopped", "killed", "ended"]
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hear-") as name:
        folder = Path(name)
        if "stopped" in which:
            result["stopped"] = measure_stopped(arguments.quick, folder)
        if "killed" in which:
            result["killed"] = measure_killed(arguments.quick, folder, arguments.seed)
        if "ended" in which:
            result["ended"] = measure_ended(arguments.quick, folder, arguments.seed)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
