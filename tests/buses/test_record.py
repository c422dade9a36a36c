"""Recording a bus: what is heard is in the file, and a file that fails disturbs nobody."""

import argparse
import errno
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from hear import codec
from hear.app import cli, connection
from hear.buses.memory import MemoryBus
from hear.buses.observe import record
from hear.buses.observe.record import BusRecorder
from hear.delivery import Sequencer
from hear.errors import BusError
from hear.messages import Envelope, Key, OperationOutcome, QueueChanged, QueueSnapshot
from hear.recording import Header, Heard, Noted, Recording

KEY = Key(engine="e")


class File:
    """A file in memory that takes ``room`` bytes, a few at a time."""

    def __init__(self, room: float = math.inf, most: int = 1 << 30) -> None:
        self.data = bytearray()
        self.room = room
        self.most = most

    def write(self, data: bytes | memoryview, /) -> int:
        taken = int(min(len(data), self.most, self.room - len(self.data)))
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.data += bytes(data[:taken])
        return taken

    def records(self) -> list[Heard | Noted]:
        return list(Recording([bytes(self.data)]))

    def heard(self) -> list[bytes]:
        return [codec.encode(r.envelope) for r in self.records() if isinstance(r, Heard)]

    def notes(self) -> list[str]:
        return [r.note.what for r in self.records() if isinstance(r, Noted)]


class Engine:
    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.sequencer = Sequencer("e")
        self.log: list[Envelope] = []

    def queue(self) -> None:
        self.publish(self.sequencer.wrap(QueueChanged(num_waiting=1), KEY, trio.current_time()))

    def outcome(self) -> None:
        outcome = OperationOutcome(status="completed")
        self.publish(self.sequencer.wrap(outcome, KEY, trio.current_time()))

    def publish(self, envelope: Envelope) -> None:
        self.log.append(envelope)
        self.bus.publish(envelope)

    def snapshot(self) -> list[Envelope]:
        return [self.sequencer.wrap_snapshot(QueueSnapshot(), KEY, trio.current_time())]

    def wire(self) -> list[bytes]:
        return [codec.encode(envelope) for envelope in self.log]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread does, which tells nobody."""
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.002)


async def test_all_that_is_heard_is_in_the_file_also_before_the_end() -> None:
    bus, file = MemoryBus(), File(most=7)
    engine = Engine(bus)
    bus.provide_snapshots("state.default.e.queue", engine.snapshot)
    recording = BusRecorder(bus, file, Header(bus="memory://"))
    async with trio.open_nursery() as nursery:
        await nursery.start(recording.run)
        await until(lambda: len(file.heard()) >= 1)  # the snapshot for one who comes late
        for _ in range(5):
            engine.queue()
            engine.outcome()
        await until(lambda: len(file.heard()) >= 11)
        assert file.heard()[1:] == engine.wire()
        await until(lambda: recording.written == 11)
        nursery.cancel_scope.cancel()
    assert file.notes() == ["ended"]


async def test_a_bus_that_closes_ends_the_recording_whole() -> None:
    bus, file = MemoryBus(), File()
    engine = Engine(bus)

    async def expect_the_end(task_status: trio.TaskStatus[None]) -> None:
        with pytest.raises(BusError, match="closed"):
            await BusRecorder(bus, file, Header()).run(task_status)

    async with trio.open_nursery() as nursery:
        await nursery.start(expect_the_end)
        engine.outcome()
        bus.close()
    assert file.heard() == engine.wire()
    assert file.notes() == ["ended"]


async def test_being_cut_off_is_noted_and_the_recording_goes_on() -> None:
    bus, file = MemoryBus(), File()
    engine = Engine(bus)
    recording = BusRecorder(bus, file, Header(), capacity=3)
    async with trio.open_nursery() as nursery:
        await nursery.start(recording.run)
        for _ in range(5):
            engine.outcome()
        await until(
            lambda: recording.recorder.cut_offs > 0 and bool(bus.statistics().subscriptions)
        )
        engine.outcome()
        await until(lambda: len(file.heard()) >= 1)
        nursery.cancel_scope.cancel()
    assert file.heard() == engine.wire()[5:]
    assert file.notes() == ["cut_off", "ended"]


async def test_state_that_was_lost_is_noted_as_a_gap() -> None:
    bus, file = MemoryBus(), File()
    engine = Engine(bus)
    recording = BusRecorder(bus, file, Header(), capacity=3)
    async with trio.open_nursery() as nursery:
        await nursery.start(recording.run)
        engine.queue()
        await until(lambda: len(file.heard()) >= 1)
        for _ in range(10):
            engine.queue()
        await until(lambda: len(file.heard()) >= 4)
        nursery.cancel_scope.cancel()
    assert (recording.recorder.gaps, recording.recorder.missed) == (1, 7)
    assert file.notes() == ["gap", "ended"]


@pytest.mark.parametrize("room", [0, 10, 150, 400, 555])
async def test_a_full_disk_ends_the_recording_alone_and_the_file_can_be_read(room: int) -> None:
    bus, file = MemoryBus(), File(room=room)
    engine = Engine(bus)
    heard: list[Envelope] = []

    over = trio.Event()

    async def record_until_full() -> None:
        with pytest.raises(OSError, match="No space left"):
            await BusRecorder(bus, file, Header()).run()
        over.set()

    async with bus.subscribe([">"], name="other") as other:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(record_until_full)
            await until(lambda: len(bus.statistics().subscriptions) == 2 or over.is_set())
            for _ in range(40):
                engine.outcome()
                await trio.sleep(0.001)
        while len(heard) < 40:
            heard += await other.receive()
    assert heard == engine.log
    if room >= 150:
        kept = file.heard()
        assert kept == engine.wire()[: len(kept)]


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def on_memory_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command find a bus on which an engine speaks all the time."""

    @asynccontextmanager
    async def connected(
        url: str, *, name: str, key: Path | None = None
    ) -> AsyncIterator[MemoryBus]:
        if url == "memory://nobody":
            raise BusError(f"{url}: nobody answers")
        async with MemoryBus() as bus, trio.open_nursery() as nursery:

            async def speak() -> None:
                engine = Engine(bus)
                while True:
                    engine.queue()
                    engine.outcome()
                    await trio.sleep(0.002)

            nursery.start_soon(speak)
            yield bus
            nursery.cancel_scope.cancel()

    monkeypatch.setattr(connection, "connected", connected)


@pytest.mark.usefixtures("on_memory_bus")
def test_the_command_records_for_a_time_what_matches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.hear"
    arguments = ["record", str(out), "--for", "0.2", "--subject", "outcome.>", "--bus", "memory://"]
    assert cli.main(arguments) == 0
    read = Recording([out.read_bytes()])
    assert read.header.patterns == ("outcome.>",)
    assert read.header.bus == "memory://"
    assert abs(read.header.started_s - out.stat().st_mtime) < 60
    kinds = {r.envelope.kind for r in read if isinstance(r, Heard)}
    assert kinds == {"operation_outcome"}
    assert " messages in 0.2 s" in capsys.readouterr().out


@pytest.mark.usefixtures("on_memory_bus")
def test_a_file_that_exists_is_kept_unless_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.hear"
    out.write_text("mine")
    arguments = ["record", str(out), "--for", "0.05", "--bus", "memory://"]
    assert cli.main(arguments) == 2
    assert out.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert cli.main([*arguments, "--force", "--bus", "memory://nobody"]) == 2
    assert out.read_text() == "mine"
    assert cli.main([*arguments, "--force"]) == 0
    assert Recording([out.read_bytes()]).header.bus == "memory://"


@pytest.mark.usefixtures("on_memory_bus")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{folder}"], "is a folder"),
        (["{folder}/no/out.hear"], "No such file or directory"),
        (["{folder}/x.hear", "--for", "0"], "positive number of seconds"),
        (["{folder}/x.hear", "--for", "nan"], "positive number of seconds"),
        (["{folder}/x.hear", "--subject", "state..>"], "subject pattern"),
        (["{folder}/x.hear", "--bus", "memory://nobody"], "nobody answers"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_file(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(folder=tmp_path) for word in arguments]
    assert cli.main(["record", "--for", "5", "--bus", "memory://", *words]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("on_memory_bus")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_device_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["record", "/dev/full", "--for", "5", "--bus", "memory://"]) == 1
    error = capsys.readouterr().err
    assert error == (
        "hear: /dev/full: cannot be written to its end: No space left on device; "
        "0 messages can be read\n"
    )


_KILLED = """
import os, sys, trio
from hear.buses.memory import MemoryBus
from hear.buses.observe.record import BusRecorder
from hear.delivery import Sequencer
from hear.messages import Key, OperationOutcome
from hear.recording import Header

async def main():
    bus, said, key = MemoryBus(), Sequencer("e"), Key(engine="e")
    with open(sys.argv[1], "wb", buffering=0) as file:
        recording = BusRecorder(bus, file, Header())
        async with trio.open_nursery() as nursery:
            await nursery.start(recording.run)
            for number in range(100):
                bus.publish(said.wrap(OperationOutcome(status="completed"), key, 0.0))
                while recording.written <= number:
                    await trio.sleep(0.001)
            os.kill(os.getpid(), 9)

trio.run(main)
"""


def test_a_recorder_that_is_killed_loses_nothing_that_it_has_written(tmp_path: Path) -> None:
    out = tmp_path / "out.hear"
    done = subprocess.run([sys.executable, "-c", _KILLED, str(out)], timeout=60)
    assert done.returncode == -9
    read = Recording([out.read_bytes()])
    assert sum(isinstance(r, Heard) for r in read) == 100


def test_the_arguments_have_the_defaults_that_the_help_tells() -> None:
    parser = argparse.ArgumentParser()
    record.configure(parser)
    namespace = parser.parse_args(["x.hear"])
    assert (namespace.seconds, namespace.subject, namespace.force) == (math.inf, None, False)
