"""Fuzzing: nothing that a stranger sends may do more to a reader than be refused.

    python -m benchmarks.fuzz --inputs 10000000
    python -m benchmarks.fuzz --seconds 20 --json FILE
    python -m benchmarks.fuzz --replay fuzz-failures/messages-1f2e3d4c.fuzz

Each target of ``benchmarks.fuzz_targets`` is given hostile bytes on every core. A failure is an
exception that is no ``HearError``, a broken promise, an input that takes longer than ``--limit``,
or a process that dies or runs out of ``--memory``. What fails is reduced, saved, and shown with the
command that runs it again. The same seed gives the same inputs; the exit code is 1 if any failed.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import msgspec

from benchmarks.fuzz_targets import TARGETS
from benchmarks.fuzz_workers import BATCH, Failure, Fuzzing, Limits, replay
from hear.app import output

_POLL_S = 0.1
_ENOUGH_FAILURES = 20


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did. ``repeated`` counts failures like one that is in ``failures``.

    Memory is of the worker that took most; growth is after its first batches.
    """

    targets: list[str]
    seed: int
    jobs: int
    inputs: int
    refused: int
    wall_s: float
    inputs_per_s: float
    peak_mib: float
    growth_mib: float
    slow_unconfirmed: int
    repeated: int
    failures: list[dict[str, str]]


class Saved(msgspec.Struct, frozen=True):
    """A file of a failure: its inputs, of which the last one fails."""

    target: str
    error: str
    inputs: tuple[bytes, ...]


def save(failure: Failure, folder: Path) -> Path:
    """Write the inputs of a failure to a file that ``--replay`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{failure.target}-{crc32(b''.join(failure.inputs)):08x}.fuzz"
    saved = Saved(failure.target, failure.error, failure.inputs)
    path.write_bytes(msgspec.msgpack.encode(saved))
    return path


def fuzz(
    names: Sequence[str],
    *,
    inputs: int | None,
    seconds: float | None,
    seed: int = 0,
    jobs: int = 1,
    limits: Limits | None = None,
    folder: Path = Path("fuzz-failures"),
) -> Report:
    """Run until either bound is reached or too much has failed."""
    begun = time.monotonic()
    num_batches = None if inputs is None else -(-inputs // BATCH)
    fuzzing = Fuzzing(names, seed=seed, jobs=jobs, num_batches=num_batches, limits=limits)
    failures: list[dict[str, str]] = []
    told_s = begun
    try:
        while len(failures) < _ENOUGH_FAILURES:
            running = fuzzing.running
            for failure in fuzzing.watch():
                path = save(failure, folder)
                command = f"python -m benchmarks.fuzz --replay {path}"
                failures.append({"error": failure.error, "command": command})
                print(f"FAILED {failure.target}: {failure.error}\n  {command}", flush=True)
            if not running:
                break
            now = time.monotonic()
            if seconds is not None and now - begun >= seconds:
                break
            if now - told_s >= 60:
                told_s = now
                output.remark(f"{fuzzing.total('inputs'):,} inputs, {now - begun:.0f} s")
            time.sleep(_POLL_S)
    finally:
        fuzzing.stop()
    wall_s = time.monotonic() - begun
    total = fuzzing.total("inputs")
    return Report(
        targets=list(names),
        seed=seed,
        jobs=jobs,
        inputs=total,
        refused=fuzzing.total("refused"),
        wall_s=round(wall_s, 1),
        inputs_per_s=round(total / wall_s),
        peak_mib=round(fuzzing.peak_kib / 1024, 1),
        growth_mib=round(fuzzing.growth_kib / 1024, 1),
        slow_unconfirmed=fuzzing.unconfirmed,
        repeated=fuzzing.repeated,
        failures=failures,
    )


def _replay(path: Path, limits: Limits) -> int:
    try:
        saved = msgspec.msgpack.decode(path.read_bytes(), type=Saved)
    except (OSError, msgspec.MsgspecError) as error:
        output.remark(f"{path}: not a saved failure: {error}")
        return 2
    if saved.target not in TARGETS:
        print(f"{path}: target {saved.target!r}, expected one of {', '.join(TARGETS)}")
        return 2
    print(f"{saved.target}: {len(saved.inputs)} inputs; last: {saved.inputs[-1][:200]!r}")
    print(f"then: {saved.error}")
    again = replay(saved.target, saved.inputs, limits)
    print(f"now:  {again or 'no failure'}")
    return 1 if again else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, metavar="N", help="stop after N inputs")
    parser.add_argument("--seconds", type=float, metavar="N", help="stop after N seconds")
    parser.add_argument("--seed", type=int, default=0, help="other seeds give other inputs (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="only this one (all)"
    )
    parser.add_argument("--limit", type=float, default=1.0, help="seconds that one input may take")
    parser.add_argument("--memory", type=int, default=1_024, help="MiB that a process may have")
    parser.add_argument(
        "--out", type=Path, default=Path("fuzz-failures"), help="folder for what fails"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE too")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run a saved failure again")
    options = parser.parse_args(arguments)
    limits = Limits(options.limit, options.memory << 20)
    if options.replay is not None:
        return _replay(options.replay, limits)
    if options.inputs is None and options.seconds is None:
        parser.error("expected --inputs N or --seconds N, or --replay FILE")
    given = (options.inputs, options.seconds, options.jobs, options.limit, options.memory)
    if any(value is not None and value <= 0 for value in given):
        parser.error("every number has to be above 0")
    report = fuzz(
        options.target or list(TARGETS),
        inputs=options.inputs,
        seconds=options.seconds,
        seed=options.seed,
        jobs=options.jobs,
        limits=limits,
        folder=options.out,
    )
    print(
        f"{report.inputs:,} inputs in {report.wall_s:g} s ({report.inputs_per_s:,}/s on "
        f"{report.jobs} processes), {report.refused:,} refused\n"
        f"{len(report.failures)} failed, {report.repeated} more like these, "
        f"{report.slow_unconfirmed} slow but not again\n"
        f"memory at most {report.peak_mib:g} MiB, {report.growth_mib:g} of it after the first "
        "batches"
    )
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
