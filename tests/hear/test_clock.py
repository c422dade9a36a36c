"""The clock that processes share."""

import subprocess
import sys
import time
from math import inf

import pytest
import trio

from hear.app.clock import SharedClock, new_epoch


def test_trio_tells_the_time_of_the_unix_epoch_and_sleeps_by_it() -> None:
    async def main() -> tuple[float, float]:
        begun = trio.current_time()
        with trio.move_on_at(begun + 0.02):
            await trio.sleep_forever()
        return begun, trio.current_time()

    begun, ended = trio.run(main, clock=SharedClock())
    assert begun == pytest.approx(time.time(), abs=5.0)
    assert 0.02 <= ended - begun < 5.0


def test_a_step_of_the_wall_clock_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SharedClock()
    before = clock.current_time()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert clock.current_time() >= before
    assert clock.deadline_to_sleep_time(inf) == inf
    assert clock.deadline_to_sleep_time(before - 1.0) == 0.0


def test_two_processes_agree() -> None:
    code = "from hear.app.clock import SharedClock; print(SharedClock().current_time())"
    theirs = float(subprocess.check_output([sys.executable, "-c", code]))
    assert SharedClock().current_time() == pytest.approx(theirs, abs=5.0)


def test_epochs_grow() -> None:
    epochs = [new_epoch() for _ in range(1_000)]
    assert epochs == sorted(set(epochs))
    assert epochs[0] > 1_600_000_000_000
