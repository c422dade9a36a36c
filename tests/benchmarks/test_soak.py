"""The soak: a day of a few agents with every fault, and whether it would see a leak."""

from collections import Counter

import pytest
from trio.testing import MockClock

from benchmarks.soak import grown, soak, tables
from hear.kept import Kept
from hear.residency import ResidencyDirectory


async def test_after_a_day_with_every_fault_nothing_has_grown_and_no_policy_is_lost(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await soak(24, seed=3, sessions_per_hour=4) == []
    told = capsys.readouterr().out
    for fault in ("outage", "crash", "failing_policy", "reader_that", "harness_that"):
        assert f"{fault}" in told


def test_a_table_that_has_grown_is_found() -> None:
    directories = [ResidencyDirectory()]
    before = tables()
    for number in range(200):
        directories[0].watch(str(number), [number])
    found = grown(before, tables())
    assert any("ResidencyDirectory._watches" in line for line in found)
    assert grown(before, before) == []
    assert grown(Counter(a=100), Counter(a=125 + 64)) == []
    assert Kept.__name__ not in {name.partition(".")[0] for name in tables()}
