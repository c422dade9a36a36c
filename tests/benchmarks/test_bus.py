"""The benchmarks of the bus run, and would see what they are there to see."""

from pathlib import Path

from benchmarks.bus import fan_out, round_trip
from benchmarks.faults import _audit


def test_a_small_fan_out_and_round_trip_lose_nothing(tmp_path: Path) -> None:
    row = fan_out("ipc", 500.0, 1.0, tmp_path, zmq=False)
    assert row["lost_unseen"] == row["lost_and_seen"] == 0
    assert row["received_per_s"] > 100
    trip = round_trip("tcp", 0.2, tmp_path, zmq=False)
    assert trip["count"] == trip["expected"] == 200
    assert 0 < trip["p50_ms"] <= trip["p99_ms"] <= trip["max_ms"]


def test_the_audit_finds_what_is_lost_doubled_and_contradicted(tmp_path: Path) -> None:
    journal, effects, seen = (tmp_path / name for name in ("journal", "effects", "seen"))
    journal.write_text(
        "issued 500\nended op0 completed \nended op1 completed \nended op2 failed deadline\n"
        "ended op2 completed \nended op3 completed \ndone\n"
    )
    effects.write_text("op0\nop1\nop1\nop9\n")
    seen.write_text(
        "op0 completed \nop1 completed \nop1 failed x\nop2 completed \nop3 completed \n"
    )
    found = _audit(5, journal, effects, seen)
    assert found["ended"] == 4
    assert found["lost"] == 1
    assert found["ended_twice"] == 1  # op2
    assert found["acted_twice"] == 1  # op1
    assert found["completed_without_effect"] == 2  # op2, op3
    assert found["two_ends"] == 1  # op1
    assert found["acted_without_end"] == 1  # op9
    assert found["journal_and_witness_differ"] == 2  # op1, op2
