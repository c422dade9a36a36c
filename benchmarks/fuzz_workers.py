"""The processes of the fuzzer: each runs batches of inputs under a limit of memory, and is watched.

An input is known by target, seed, batch and place in its batch, so nothing has to be sent but
numbers, and what killed a process can be made again. The watching process runs no target itself.
"""

import multiprocessing
import os
import resource
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from ctypes import c_int64
from itertools import chain, repeat
from random import Random
from typing import Any, Final, NamedTuple

from benchmarks.fuzz_targets import TARGETS
from hear.errors import HearError

BATCH = 1_000
"""Inputs for which a target keeps its state."""

WARM_BATCHES = 500
"""How many batches fill caches before the growth of memory is counted."""

_SPAWN: Final = multiprocessing.get_context("spawn")
_DONE = -1
_ALIKE = 2
"""How many failures of one kind are reduced and reported; the rest is counted."""


class Limits(NamedTuple):
    """``input_s``: wall time of one input; ``memory_bytes``: address space of a process."""

    input_s: float = 1.0
    memory_bytes: int = 1 << 30


class Failure(NamedTuple):
    """An input that its target did not take as it must: the last of ``inputs``."""

    target: str
    batch: int
    place: int
    error: str
    inputs: tuple[bytes, ...]


class Slot:
    """What a worker tells while it runs, in shared memory: numbers only, so that nobody waits."""

    FIELDS = ("batch", "place", "inputs", "refused", "warm_kib", "peak_kib")

    def __init__(self) -> None:
        self._values: Any = _SPAWN.RawArray(c_int64, [0, _DONE, *repeat(0, len(self.FIELDS) - 2)])

    def __getitem__(self, field: str) -> int:
        return int(self._values[self.FIELDS.index(field)])

    def at(self) -> tuple[int, int]:
        """Batch and place of the input that is being read; the place is -1 between batches."""
        return int(self._values[0]), int(self._values[1])

    def rest(self) -> None:
        """No input is being read."""
        self._values[1] = _DONE

    @property
    def raw(self) -> Any:
        """The shared numbers, in order of ``FIELDS``."""
        return self._values


def schedule(names: Sequence[str]) -> list[str]:
    """The targets of successive batches, each as often as its weight says."""
    return list(chain.from_iterable(repeat(name, TARGETS[name].weight) for name in names))


def inputs_of(target: str, seed: int, batch: int) -> Iterator[bytes]:
    """The inputs of one batch, always the same."""
    rng, generate = Random(f"{target} {seed} {batch}"), TARGETS[target].generate
    for _ in range(BATCH):
        yield generate(rng)


def bound_memory(limits: Limits) -> None:
    """Let this process have no more than it may."""
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_batches(
    slot: Slot,
    found: Any,
    names: list[str],
    seed: int,
    batches: range,
    limits: Limits,
    parent: int,
) -> None:
    """Run batches; the end of a worker process. What fails is put into the queue ``found``."""
    bound_memory(limits)
    raw, order = slot.raw, schedule(names)
    for number, batch in enumerate(batches):
        if os.getppid() != parent:
            return  # it was killed, and nobody watches any more
        target = order[batch % len(order)]
        raw[1], raw[0] = _DONE, batch
        frames = list(inputs_of(target, seed, batch))
        read = TARGETS[target].make()
        refused = place = 0
        for place, frame in enumerate(frames):
            raw[1] = place
            try:
                read(frame)
            except HearError:
                refused += 1
            except BaseException as error:
                found.put((batch, place, described(error)))
                break  # the state may be damaged
        raw[1] = _DONE
        raw[2] += place + 1
        raw[3] += refused
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if number < WARM_BATCHES:
            raw[4] = peak
        raw[5] = peak


def described(error: BaseException) -> str:
    """The error and where it was raised, without what leads there."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error!s:.300}{where}"


def _replay(found: Any, target: str, inputs: Sequence[bytes], limits: Limits) -> None:
    bound_memory(limits)
    found.send(read_all(target, inputs, limits))


def read_all(target: str, inputs: Sequence[bytes], limits: Limits) -> str | None:
    """Give inputs to a fresh target; returns what the first that fails does, None if none does.

    Here the time of an input is that of the processor, so that a busy machine is no failure.
    """
    read = TARGETS[target].make()
    for frame in inputs:
        begun = time.process_time()
        try:
            read(frame)
        except HearError:
            pass
        except BaseException as error:
            return described(error)
        took_s = time.process_time() - begun
        if took_s > limits.input_s:
            return f"hang: {took_s:.1f} s of the processor's time"
    return None


def replay(target: str, inputs: Sequence[bytes], limits: Limits) -> str | None:
    """Give inputs to a fresh target in a process of its own; returns how it failed, if it did."""
    receiver, sender = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_replay, args=(sender, target, inputs, limits), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(30 + 10 * limits.input_s):
            return f"hang: not done after {30 + 10 * limits.input_s:g} s"
        error: str | None = receiver.recv()
        return error
    except EOFError:
        process.join(10)
        return f"died: exit code {process.exitcode}"
    finally:
        process.kill()
        process.join(10)
        receiver.close()


def reduced(
    target: str, inputs: Sequence[bytes], limits: Limits, *, tries: int = 40
) -> tuple[tuple[bytes, ...], str | None]:
    """The fewest inputs found that fail with the last of them, and how; None if they don't."""
    kept = list(inputs)
    error = replay(target, kept[-1:], limits)
    if error is not None:
        return tuple(kept[-1:]), error
    error = replay(target, kept, limits)
    size = len(kept) // 2
    while error is not None and size and tries:
        place = 0
        while place < len(kept) - 1 and tries:
            fewer = kept[:place] + kept[min(place + size, len(kept) - 1) :]
            tries -= 1
            still = replay(target, fewer, limits)
            if still is None:
                place += size
            else:
                kept, error = fewer, still
        size //= 2
    return tuple(kept), error


class Fuzzing:
    """A run over ``num_batches`` batches (None: until ``stop``) on some processes."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        seed: int,
        jobs: int,
        num_batches: int | None,
        limits: Limits | None = None,
        first_batch: int = 0,
    ) -> None:
        self.names = list(names)
        self.seed = seed
        self.limits = limits or Limits()
        self.unconfirmed = 0
        self.repeated = 0
        self._seen: Counter[tuple[str, str]] = Counter()
        self._end = 2**62 if num_batches is None else first_batch + num_batches
        self._jobs = jobs
        self._slots = [Slot() for _ in range(jobs)]
        self._found = _SPAWN.SimpleQueue()
        self._processes = [
            self._start(job, range(first_batch + job, self._end, jobs)) for job in range(jobs)
        ]
        self._moved: list[tuple[tuple[int, int], float]] = [((-1, -1), time.monotonic())] * jobs

    def _start(self, job: int, batches: range) -> Any:
        slot = self._slots[job]
        slot.rest()  # starting takes a while, and is no input
        process = _SPAWN.Process(
            target=run_batches,
            args=(slot, self._found, self.names, self.seed, batches, self.limits, os.getpid()),
            daemon=True,
        )
        process.start()
        return process

    def watch(self) -> Iterator[Failure]:
        """What failed since it was last asked. To be called several times a second."""
        while not self._found.empty():
            batch, place, error = self._found.get()
            yield from self._failure(batch, place, error)
        now = time.monotonic()
        for job, process in enumerate(self._processes):
            at = self._slots[job].at()
            if not process.is_alive():
                if process.exitcode:
                    yield from self._failure(*at, f"died: exit code {process.exitcode}")
                    self._go_on(job)
            elif at != self._moved[job][0] or at[1] == _DONE:
                self._moved[job] = at, now
            elif now - self._moved[job][1] > self.limits.input_s:
                process.kill()
                process.join()
                # Only what also takes long in a process of its own hangs; else the machine did.
                yield from self._failure(*at, f"hang: longer than {self.limits.input_s:g} s")
                self._go_on(job)

    def _go_on(self, job: int) -> None:
        batches = range(self._slots[job]["batch"] + self._jobs, self._end, self._jobs)
        self._processes[job] = self._start(job, batches)
        self._moved[job] = (-1, -1), time.monotonic()

    def _failure(self, batch: int, place: int, error: str) -> Iterator[Failure]:
        order = schedule(self.names)
        target = order[batch % len(order)]
        # What was raised where: one fault is met again and again, and each time takes a while.
        alike = target, f"{error.partition(':')[0]} {error.rpartition(' at ')[2]}"
        if self._seen[alike] >= _ALIKE:
            self.repeated += 1
            return
        inputs = list(inputs_of(target, self.seed, batch))[: place + 1]
        few, again = reduced(target, inputs, self.limits)
        if again is None and error.startswith("hang"):
            self.unconfirmed += 1
        else:
            self._seen[alike] += 1
            yield Failure(target, batch, place, again or f"{error} (not seen again)", few)

    @property
    def running(self) -> bool:
        """Whether any process still is at it."""
        return any(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def total(self, field: str) -> int:
        """A number summed over all workers."""
        return sum(slot[field] for slot in self._slots)

    @property
    def growth_kib(self) -> int:
        """By how much the peak of any worker grew after its first batches."""
        return max(slot["peak_kib"] - slot["warm_kib"] for slot in self._slots)

    @property
    def peak_kib(self) -> int:
        """The largest resident set of any worker."""
        return max(slot["peak_kib"] for slot in self._slots)
