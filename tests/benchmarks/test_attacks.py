"""Attacks on a real hub: what must hold whatever the machine's speed is. Times are not judged."""

from pathlib import Path

import pytest

from benchmarks import attacks, rogue


@pytest.mark.parametrize("attack", ["half_sent_frames", "refused_hellos", "questions", "pieces"])
def test_an_honest_client_is_answered_and_the_hub_stays_small_and_ends(
    attack: str, tmp_path: Path
) -> None:
    attacks.write_keys(tmp_path)
    case = attacks.measure(attack, 1.0, tmp_path)
    assert case.unanswered == 0
    assert case.answered == attacks.RATE_PER_S
    assert case.hub_mb < attacks.MOST_MB
    assert case.hub_log_kb < 100
    assert case.hub_ended_s < attacks.END_WITHIN_S


def test_what_does_not_hold_is_said() -> None:
    good = attacks.Case("nobody", 100, 0, 1.0, 5.0, 60.0, 1.0, 0.1)
    bad = attacks.Case("flood", 90, 10, 100.0, 300.0, 400.0, 1.0, 5.0)
    assert attacks.broken(good, good) == []
    assert [problem.split()[0] for problem in attacks.broken(bad, good)] == [
        "p99",
        "10",
        "the",
        "the",
    ]


def test_each_attack_has_a_word_on_what_it_does() -> None:
    for attack in (*rogue.STRANGERS, *rogue.HOLDERS):
        assert attack.__doc__, attack.__name__
