"""Output that is not read, that is read slowly, that is closed."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from hear.buses.observe.tap.output import Output

WITHIN_S = 10.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        with suppress(OSError):  # the test may have closed it
            os.close(end)


class Closed:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.errors: list[OSError] = []

    def __call__(self, error: OSError) -> None:
        self.errors.append(error)
        self.event.set()


def output(writer: int, closed: Closed | None = None, **limits: Any) -> Output:
    return Output(
        writer,
        on_closed=closed or Closed(),
        dropped_line=lambda number: f"dropped {number}",
        **limits,
    )


def read_all(reader: int) -> list[str]:
    data = b""
    while chunk := os.read(reader, 1 << 16):
        data += chunk
    return data.decode().splitlines()


def end(made: Output, writer: int) -> None:
    made.finish()
    assert made.join(WITHIN_S)
    os.close(writer)


def test_lines_come_out_whole_and_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    made = output(writer)
    lines = [f"line {n} é" for n in range(100)]
    for line in lines:
        assert made.put(line)
    end(made, writer)
    assert read_all(reader) == lines


def test_what_is_not_read_is_dropped_and_told_and_memory_stays_bounded(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    made = output(writer, max_lines=50)
    line = "x" * 1000
    num_put = sum(made.put(line) for _ in range(5000))
    # A pipe takes 64 KiB, one batch is being written, and 50 lines wait.
    assert num_put < 300
    assert made.dropped == 5000 - num_put
    assert not made.has_room
    made.drop()

    read: list[str] = []
    reading = threading.Thread(target=lambda: read.extend(read_all(reader)))
    reading.start()
    end(made, writer)
    reading.join(WITHIN_S)
    told = [text for text in read if text != line]
    assert len(read) - len(told) == num_put
    # Told at once or in several places, by when the writer got its turn.
    assert all(text.startswith("dropped ") for text in told)
    assert sum(int(text.split()[1]) for text in told) == 5000 - num_put + 1


def test_a_few_long_lines_are_bounded_by_their_bytes(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    made = output(writer, max_bytes=1_000_000)
    num_put = sum(made.put("x" * 300_000) for _ in range(100))
    assert num_put <= 9
    os.close(reader)
    made.finish()
    assert made.join(WITHIN_S)


def test_the_note_stands_where_the_lines_are_missing(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    made = output(writer)
    made.put("before")
    made.drop()
    made.drop()
    made.put("after")
    end(made, writer)
    assert read_all(reader) == ["before", "dropped 2", "after"]


def test_a_closed_pipe_is_told_when_writing(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    closed = Closed()
    made = output(writer, closed)
    os.close(reader)
    made.put("x")
    assert closed.event.wait(WITHIN_S)
    assert [error.errno for error in closed.errors] == [errno.EPIPE]
    assert made.put("y")  # goes nowhere, and is no loss
    made.finish()
    assert made.join(WITHIN_S)


def test_a_closed_pipe_is_told_also_if_there_is_nothing_to_write(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    closed = Closed()
    output(writer, closed)
    os.close(reader)
    assert closed.event.wait(WITHIN_S)


def test_a_full_disk_is_another_error() -> None:
    closed = Closed()
    writer = os.open("/dev/full", os.O_WRONLY)
    try:
        made = output(writer, closed)
        made.put("x")
        assert closed.event.wait(WITHIN_S)
        assert [error.errno for error in closed.errors] == [errno.ENOSPC]
        assert made.join(WITHIN_S)
    finally:
        os.close(writer)


def test_an_end_does_not_wait_for_a_reader_that_has_stopped(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    made = output(writer)
    made.put("x" * 500_000)
    made.finish()
    assert not made.join(0.01)
    os.close(reader)  # lets the thread go
    assert made.join(WITHIN_S)


def test_what_an_encoding_cannot_say_is_replaced(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    made = Output(writer, on_closed=Closed(), dropped_line=str, encoding="ascii")
    made.put("caf\xe9")
    end(made, writer)
    assert read_all(reader) == ["caf?"]
