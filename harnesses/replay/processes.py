"""Runs side by side, each in a process of its own, so that one that dies takes no other along."""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from typing import Any, NamedTuple

import msgspec
import structlog

from hear.errors import HearError
from hear.harnesses.replay.plan import Run, execute
from hear.harnesses.replay.results import RunResult


class Finished(NamedTuple):
    """A run that has ended: its place in the list, and its result or why there is none."""

    index: int
    result: RunResult | None
    error: str


class _Child(NamedTuple):
    index: int
    process: SpawnProcess
    results: Connection
    done: "Synchronized[int]"


def run_all(
    runs: Sequence[Run], jobs: int, progress: Callable[[int, int], None]
) -> Iterator[Finished]:
    """Carry out runs, ``jobs`` at a time, and yield each as it ends.

    ``progress`` is told, now and then, the place of a run and how many of its turns have ended.
    When the caller stops early, what still runs is killed.
    """
    context = multiprocessing.get_context("spawn")
    pending = list(enumerate(runs))[::-1]
    children: list[_Child] = []
    try:
        while pending or children:
            while pending and len(children) < jobs:
                index, run = pending.pop()
                receiver, sender = context.Pipe(duplex=False)
                done = context.Value("q", 0)
                process = context.Process(target=_child, args=(run, sender, done), daemon=True)
                with _ignored_interrupts():
                    process.start()
                sender.close()
                children.append(_Child(index, process, receiver, done))
            ready = wait([child.results for child in children], timeout=0.2)
            for child in children:
                progress(child.index, child.done.value)
            for child in [child for child in children if child.results in ready]:
                children.remove(child)
                yield _collect(child)
    finally:
        for child in children:
            child.process.kill()
            child.process.join()


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Let a process that is started now ignore Ctrl-C from its first instruction on.

    The parent hears it, and ends its children.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _collect(child: _Child) -> Finished:
    try:
        kind, payload = child.results.recv()
    except EOFError:
        child.process.join()
        return Finished(
            child.index, None, f"its process died with exit code {child.process.exitcode}"
        )
    finally:
        child.results.close()
    child.process.join()
    if kind == "error":
        return Finished(child.index, None, payload)
    return Finished(child.index, msgspec.msgpack.decode(payload, type=RunResult), "")


def _child(run: Run, results: Connection, done: Any) -> None:
    log_to_stderr()

    def progress(count: int) -> None:
        done.value = count

    try:
        payload = msgspec.msgpack.encode(execute(run, progress))
    except HearError as error:
        results.send(("error", str(error)))
    except Exception as error:
        results.send(("error", f"{type(error).__name__}: {error}"))
        raise
    else:
        results.send(("result", payload))


def log_to_stderr() -> None:
    """Send warnings and errors to standard error, so that results stay clean."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
