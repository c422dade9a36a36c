"""Workloads: what a sample keeps, what cannot be made, when sessions arrive."""

from itertools import pairwise

import pytest
from msgspec import structs

from hear.errors import ConfigError
from hear.harnesses.eval.workloads.arrivals import poisson_arrivals
from hear.harnesses.eval.workloads.workload import Session, Turn, Workload

TURN = Turn(prompt_tokens=600, output_tokens=10, prompt_hashes=(7,))


def session(name: str, parent: str | None = None, after_turns: int = 0) -> Session:
    return Session(id=name, turns=(TURN, TURN), parent=parent, after_turns=after_turns)


def waiting(name: str, sub_agent: str) -> Session:
    turn = structs.replace(TURN, waits_for=(sub_agent,))
    return Session(id=name, turns=(turn,))


def workload(*sessions: Session) -> Workload:
    return Workload(name="w", block_size=512, sessions=sessions)


MANY = workload(
    *(
        each
        for number in range(40)
        for each in (session(f"s{number}"), session(f"s{number}/a", f"s{number}", 1))
    )
)


def ids(load: Workload) -> set[str]:
    return {each.id for each in load.sessions}


def test_samples_of_one_seed_are_nested() -> None:
    kept = [ids(MANY.sample(percent, seed=3)) for percent in (25, 50, 75, 100)]
    assert [len(names) for names in kept] == [20, 40, 60, 80]
    assert all(fewer < more for fewer, more in pairwise(kept))


def test_a_sample_keeps_sessions_whole_with_their_sub_agents_and_in_order() -> None:
    half = MANY.sample(50, seed=0)
    assert all((f"{name}/a" in ids(half)) for name in ids(half) if "/" not in name)
    assert [each for each in MANY.sessions if each.id in ids(half)] == list(half.sessions)
    assert half.num_turns == MANY.num_turns // 2


def test_a_sample_is_told_by_its_seed() -> None:
    assert MANY.sample(50, seed=1) == MANY.sample(50, seed=1)
    assert ids(MANY.sample(50, seed=1)) != ids(MANY.sample(50, seed=2))


@pytest.mark.parametrize("percent", [0, -5, 100.5, float("nan")])
def test_a_sample_of_no_possible_size_is_refused(percent: float) -> None:
    with pytest.raises(ConfigError, match=r"^load: got .*%, expected above 0 and at most 100$"):
        MANY.sample(percent, seed=0)


def test_a_sample_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="1% of the 40 sessions of w is none of them"):
        MANY.sample(1, seed=0)


@pytest.mark.parametrize(
    ("sessions", "message"),
    [
        ([session("a"), session("a")], "session 'a' is there twice"),
        ([Session(id="a", turns=())], "session 'a' has no turn"),
        ([session("a", parent="b")], "sub-agent 'a' has the parent 'b', expected a session"),
        ([session("a", parent="a")], "sub-agent 'a' has the parent 'a', expected a session"),
        ([session("a"), session("b", "a", 3)], "'b' starts after 3 turns, expected 0 to 2"),
        ([waiting("a", "b")], "turn 1 of 'a' waits for 'b', expected one of its sub-agents"),
        (
            [waiting("a", "b"), session("b")],
            "turn 1 of 'a' waits for 'b', expected one of its sub-agents",
        ),
        (
            [waiting("a", "b"), session("b", "a", after_turns=1)],
            "turn 1 of 'a' waits for 'b', which starts only after turn 1",
        ),
    ],
)
def test_a_workload_that_could_not_be_replayed_cannot_be_made(
    sessions: list[Session], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        workload(*sessions)


def test_a_turn_may_wait_for_a_sub_agent_that_started_before_it() -> None:
    assert workload(waiting("a", "b"), session("b", "a", after_turns=0)).num_turns == 3


def test_arrivals_are_poisson_and_another_rate_only_stretches_them() -> None:
    arrivals = poisson_arrivals(4000, 2.0, seed=5)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(2000, rel=0.05)
    assert poisson_arrivals(4000, 1.0, seed=5) == pytest.approx([2 * at for at in arrivals])
    assert poisson_arrivals(10, 2.0, seed=5) == arrivals[:10]
    assert poisson_arrivals(10, 2.0, seed=6) != arrivals[:10]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"^rate: got .* sessions a second, expected above 0$"):
        poisson_arrivals(3, rate, seed=0)
