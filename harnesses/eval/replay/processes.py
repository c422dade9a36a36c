"""Runs side by side, each in a process of its own, so that one that dies takes no other along."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from threading import Thread
from typing import Any, NamedTuple

import msgspec

from hear.app.log import to_stderr
from hear.errors import HearError
from hear.harnesses.eval.replay.plan import Run, execute
from hear.harnesses.eval.report.results import RunResult


class Finished(NamedTuple):
    """A run that has ended: its place in the list, and its result or why there is none."""

    place: int
    result: RunResult | None
    error: str


@dataclass(slots=True, eq=False)
class _Child:
    place: int
    process: SpawnProcess
    results: Connection
    done: "Synchronized[int]"
    at_work: bool = True  # its result has not come


def run_all(
    runs: Sequence[Run], jobs: int, progress: Callable[[int, int], None]
) -> Iterator[Finished]:
    """Carry out runs, ``jobs`` at a time, and yield each as it ends.

    ``progress`` is told, now and then, the place of a run and how many of its turns have ended.
    When the caller stops early, what still runs is killed. On Ctrl-C, the runs that had ended by
    then come first.
    """
    pending = list(enumerate(runs))[::-1]
    children: list[_Child] = []
    ended: deque[Finished] = deque()
    try:
        while pending or any(child.at_work for child in children):
            while pending and sum(child.at_work for child in children) < jobs:
                _start(*pending.pop(), children)
            _wait(children, timeout=0.2)
            for child in children:
                if child.at_work:
                    progress(child.place, child.done.value)
            yield from _collect(children, ended)
    except KeyboardInterrupt:
        yield from _collect(children, ended)
        raise
    finally:
        for child in children:
            child.process.kill()
        for child in children:
            child.process.join()


def _start(place: int, run: Run, children: list[_Child]) -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with _safe_path():
        done = context.Value("q", 0)  # which may start a process too
        process = context.Process(target=_child, args=(run, sender, done), daemon=True)
        with _held_interrupts():
            process.start()
            children.append(_Child(place, process, receiver, done))
    sender.close()


@contextmanager
def _safe_path() -> Iterator[None]:
    """Have processes that are started look for modules among what is installed alone: Python starts
    them with ``-c``, and then the folder where one stands would come first."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _wait(children: Sequence[_Child], timeout: float) -> Sequence[object]:
    return wait([child.results for child in children if child.at_work], timeout)


def _collect(children: Sequence[_Child], ended: deque[Finished]) -> Iterator[Finished]:
    """Yield what has come by now; what a Ctrl-C keeps from being yielded stays in ``ended``."""
    with _held_interrupts():
        ready = _wait(children, timeout=0)
        for child in children:
            if child.results in ready:
                ended.append(_receive(child))
                child.at_work = False
    for child in children:
        if not child.at_work:
            child.process.join()
    while ended:
        yield ended.popleft()


def _receive(child: _Child) -> Finished:
    try:
        kind, payload = child.results.recv()
    except (EOFError, OSError):
        child.process.join()
        code = child.process.exitcode
        return Finished(child.place, None, f"its process died with exit code {code}")
    finally:
        child.results.close()
    if kind == "error":
        return Finished(child.place, None, payload)
    return Finished(child.place, msgspec.msgpack.decode(payload, type=RunResult), "")


@contextmanager
def _held_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until what is inside is done; a process started inside never hears it.

    The parent does, and ends its children.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(run: Run, results: Connection, done: Any) -> None:
    to_stderr("warning")
    Thread(target=_follow_parent, daemon=True).start()

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


def _follow_parent() -> None:
    """End when the parent has, however that came."""
    if hasattr(signal, "pthread_sigmask"):  # the alarm of a policy's time limit is for the main one
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
