"""Session-Aware: what it learns and from what, and the leases that it asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.errors import ConfigError
from hear.interfaces import Ask
from hear.messages import ContextClosed, Key, Release, Retain, ReuseExpected
from hear.policies.session_aware import ContinuationEstimator, SessionAware
from tests.policies.stage import ENGINE, Stage


@pytest.fixture
def stage() -> Stage:
    return Stage(SessionAware())


def retained(asks: list[Ask]) -> dict[str | None, float]:
    return {k.context: m.score for m, k in asks if isinstance(m, Retain)}


def predicted(asks: list[Ask]) -> dict[str | None, float]:
    return {k.context: m.probability for m, k in asks if isinstance(m, ReuseExpected)}


def released(asks: list[Ask]) -> list[str | None]:
    return [k.context for m, k in asks if isinstance(m, Release)]


def serve(stage: Stage, context: str, turn: int = 1) -> list[Ask]:
    """One turn from its description to its end; returns what was asked for."""
    request = f"{context}/{turn}"
    stage.describe(request, context=context, turn=turn)
    asks = stage.decide()
    stage.outcome(request, "accepted", context)
    asks += stage.decide()
    stage.now += 1
    stage.outcome(request, "completed", context)
    return asks + stage.decide()


# -- leases and predictions -------------------------------------------------------------------


def test_a_lease_is_asked_for_when_a_request_is_accepted(stage: Stage) -> None:
    stage.describe("r", context="c", turn=1)
    assert stage.decide() == []
    stage.outcome("r", "accepted", "c")
    [(message, key)] = stage.decide()
    assert isinstance(message, Retain)
    assert (message.force, message.lease_s, message.prefix_hashes) == ("preference", 3600, b"")
    assert message.score == pytest.approx(0.3)
    assert key == Key(context="c", engine=ENGINE)


def test_a_completed_request_gives_a_prediction_that_is_marked_as_one(stage: Stage) -> None:
    serve(stage, "c")
    stage.describe("r", context="c", turn=2)
    stage.outcome("r", "completed", "c")
    [(message, key)] = [ask for ask in stage.decide() if isinstance(ask.message, ReuseExpected)]
    assert isinstance(message, ReuseExpected)
    assert (message.basis, message.predictor) == ("predicted", "session-aware")
    assert key == Key(context="c", engine=ENGINE)


def test_a_lease_is_asked_for_again_after_the_request_with_what_was_learned(stage: Stage) -> None:
    for number in range(60):
        serve(stage, f"other{number}")
    stage.describe("r", context="c", turn=1)
    stage.outcome("r", "accepted", "c")
    before = retained(stage.decide())["c"]
    stage.outcome("r", "completed", "c")
    asks = stage.decide()
    assert predicted(asks)["c"] == pytest.approx(before, rel=0.05)
    assert retained(asks) == predicted(asks)

    stage.describe("r", context="d", turn=1)
    stage.outcome("r", "accepted", "d")
    before = retained(stage.decide())["d"]
    for number in range(30):
        stage.describe(f"more{number}", context=f"other{number}", turn=2)  # they came back
    stage.decide()
    stage.outcome("r", "completed", "d")
    asks = stage.decide()
    assert retained(asks)["d"] == predicted(asks)["d"] > before * 1.05


def test_each_turn_renews_the_lease(stage: Stage) -> None:
    assert set(retained(serve(stage, "c", 1))) == {"c"}
    assert set(retained(serve(stage, "c", 2))) == {"c"}


def test_a_closed_context_is_released_where_it_was_leased(stage: Stage) -> None:
    serve(stage, "c")
    stage.intent(ContextClosed(), Key(context="c"))
    stage.intent(ContextClosed(), Key(context="never leased"))
    assert stage.decide() == [
        Ask(Release(reason="context closed"), Key(context="c", engine=ENGINE))
    ]
    stage.intent(ContextClosed(), Key(context="c"))
    assert stage.decide() == []


@pytest.mark.parametrize("one_burst", [True, False])
def test_the_last_outcome_of_a_closed_context_asks_for_nothing(
    stage: Stage, one_burst: bool
) -> None:
    stage.describe("r", context="c", turn=1)
    stage.outcome("r", "accepted", "c")
    stage.decide()
    stage.intent(ContextClosed(), Key(context="c"))
    if not one_burst:
        assert released(stage.decide()) == ["c"]
    stage.outcome("r", "completed", "c")
    asks = stage.decide()
    assert released(asks) == (["c"] if one_burst else [])
    assert (retained(asks), predicted(asks)) == ({}, {})


def test_a_context_that_is_used_again_after_it_was_closed_is_leased_again(stage: Stage) -> None:
    serve(stage, "c")
    stage.intent(ContextClosed(), Key(context="c"))
    stage.decide()
    assert set(retained(serve(stage, "c", 2))) == {"c"}


@pytest.mark.parametrize("status", ["rejected", "failed"])
def test_a_request_that_was_not_served_asks_for_nothing(stage: Stage, status: str) -> None:
    stage.describe("r", context="c", turn=1)
    stage.outcome("r", status, "c")  # type: ignore[arg-type]
    assert stage.decide() == []


def test_a_request_without_a_context_asks_for_nothing(stage: Stage) -> None:
    stage.describe("r")
    stage.outcome("r", "accepted")
    stage.outcome("r", "completed")
    assert stage.decide() == []


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lease_that_makes_no_sense_is_refused(lease_s: float) -> None:
    with pytest.raises(ConfigError, match="lease"):
        SessionAware(lease_s)


# -- what is learned, and from what -----------------------------------------------------------


class Log:
    """Every turn that has completed so far, in which cell, and whether another followed it."""

    def __init__(self) -> None:
        self.turns: list[tuple[int, int]] = []
        self.followed: list[bool] = []
        self.last: dict[str, int] = {}
        self.gaps: dict[str, list[float]] = {}
        self.ended_s: dict[str, float] = {}

    def begun(self, context: str, now: float) -> tuple[int, int]:
        gaps = self.gaps.setdefault(context, [])
        if context in self.last:
            self.followed[self.last[context]] = True
            gaps.append(now - self.ended_s[context])
        mean = sum(gaps) / len(gaps) if gaps else 0.0
        pause = 1 + sum(mean >= bound for bound in (15, 60, 180)) if gaps else 0
        return min(len(gaps) + 1, 5), pause

    def completed(self, context: str, cell: tuple[int, int], now: float) -> None:
        self.last[context], self.ended_s[context] = len(self.turns), now
        self.turns.append(cell)
        self.followed.append(False)

    def estimate(self, depth: int, pause: int) -> float:
        share = 0.3
        for belongs in (
            [True] * len(self.turns),
            [turn[0] == depth for turn in self.turns],
            [turn == (depth, pause) for turn in self.turns],
        ):
            outcomes = [f for f, inside in zip(self.followed, belongs, strict=True) if inside]
            share = (sum(outcomes) + 4 * share) / (len(outcomes) + 4)
        return share


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from([1, 20, 100])), max_size=40))
def test_each_estimate_follows_from_the_turns_that_have_completed_and_no_others(
    turns: list[tuple[str, int]],
) -> None:
    stage, log = Stage(SessionAware()), Log()
    for number, (context, pause_s) in enumerate(turns):
        stage.now += pause_s
        cell = log.begun(context, stage.now)
        stage.describe(f"{number}", context=context, turn=1)
        stage.outcome(f"{number}", "accepted", context)
        assert retained(stage.decide())[context] == pytest.approx(log.estimate(*cell))
        stage.now += 1
        stage.outcome(f"{number}", "completed", context)
        log.completed(context, cell, stage.now)
        assert predicted(stage.decide())[context] == pytest.approx(log.estimate(*cell))


def test_sessions_that_come_back_raise_the_estimate_and_others_lower_it() -> None:
    ends, returns = Stage(SessionAware()), Stage(SessionAware())
    for number in range(20):
        serve(ends, f"c{number}")
        serve(returns, f"c{number}")
        returns.now += 5
        serve(returns, f"c{number}", 2)
    low = predicted(serve(ends, "new"))["new"]
    high = predicted(serve(returns, "new"))["new"]
    assert low < 0.3 < high


def test_the_description_of_the_next_turn_in_the_burst_of_the_outcome_is_no_hint() -> None:
    """The cell that a turn completes in may not depend on whether it was followed."""

    def predictions(together: bool) -> list[float]:
        stage = Stage(SessionAware())
        found: list[float] = []
        for number in range(10):
            context = f"c{number}"
            stage.describe("1", context=context, turn=1)
            stage.outcome("1", "accepted", context)
            stage.decide()
            stage.outcome("1", "completed", context)
            asks = [] if together else stage.decide()
            stage.describe("2", context=context, turn=2)
            found += predicted(asks + stage.decide()).values()
            stage.outcome("2", "completed", context)
            stage.decide()
        return found

    assert predictions(together=True) == predictions(together=False)


def test_a_turn_that_was_followed_before_it_ended_counts_as_followed(stage: Stage) -> None:
    for number in range(20):
        context = f"c{number}"
        stage.describe(f"{context}/1", context=context, turn=1)
        stage.describe(f"{context}/2", context=context, turn=2)
        stage.decide()
        stage.outcome(f"{context}/1", "completed", context)
        stage.decide()
    stage.describe("r", context="new", turn=1)
    stage.outcome("r", "accepted", "new")
    assert retained(stage.decide())["new"] > 0.5


def test_a_context_that_closes_with_its_last_outcome_is_learned_from(stage: Stage) -> None:
    for number in range(30):
        request, context = f"r{number}", f"c{number}"
        stage.describe(request, context=context, turn=1)
        stage.decide()
        stage.outcome(request, "completed", context)
        stage.intent(ContextClosed(), Key(context=context))
        stage.decide()
    stage.describe("r", context="new", turn=1)
    stage.outcome("r", "accepted", "new")
    assert retained(stage.decide())["new"] < 0.15


def test_what_was_idle_for_longer_than_a_lease_is_forgotten() -> None:
    stage = Stage(SessionAware(lease_s=100))
    serve(stage, "c")
    stage.now += 101
    assert set(retained(serve(stage, "d"))) == {"d"}
    stage.intent(ContextClosed(), Key(context="c"))
    stage.intent(ContextClosed(), Key(context="d"))
    assert released(stage.decide()) == ["d"]


# -- the estimator by itself ------------------------------------------------------------------


def test_without_data_the_estimate_is_the_prior() -> None:
    assert ContinuationEstimator(prior=0.4).probability((1, 0)) == pytest.approx(0.4)


def test_a_cell_is_drawn_to_its_depth_and_that_to_the_whole() -> None:
    estimator = ContinuationEstimator(prior=0.5, weight=4)
    for _ in range(100):
        estimator.completed((2, 1))
        estimator.returned((2, 1))
    whole = estimator.probability((1, 0))
    row = estimator.probability((2, 3))
    cell = estimator.probability((2, 1))
    assert 0.9 < whole < row < cell < 1


def test_cells_tell_depth_and_pause_apart_and_are_few() -> None:
    cell = ContinuationEstimator.cell
    assert cell(1, []) != cell(2, [10.0])
    assert cell(2, [10.0]) != cell(2, [20.0]) != cell(2, [100.0]) != cell(2, [1000.0])
    assert cell(3, [10.0, 90.0]) == cell(3, [50.0, 50.0])
    assert cell(5, [1.0]) == cell(500, [1.0])


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans()), min_size=1, max_size=200
    )
)
def test_every_estimate_is_a_probability(turns: list[tuple[int, int, bool]]) -> None:
    estimator = ContinuationEstimator()
    for depth, gap, followed in turns:
        estimator.completed((depth, gap))
        if followed:
            estimator.returned((depth, gap))
    for depth, gap, _ in turns:
        assert 0 < estimator.probability((depth, gap)) < 1


def test_requests_that_never_end_do_not_pile_up_in_a_context_that_goes_on(stage: Stage) -> None:
    """As where an engine is seen from outside, and tells no outcomes."""
    for turn in range(1, 201):
        stage.now += 300.0
        stage.describe(f"r{turn}", [turn], context="c", turn=turn)
        stage.decide()
    policy = stage.policy
    assert isinstance(policy, SessionAware)
    assert len(policy._known["c"].requests) == len(stage.h.requests) < 20


def test_a_context_that_is_closed_is_not_known_once_its_requests_have_ended(stage: Stage) -> None:
    stage.describe("r", [1], context="c", turn=1)
    stage.intent(ContextClosed(), Key(context="c"))
    stage.decide()
    policy = stage.policy
    assert isinstance(policy, SessionAware)
    assert list(policy._known) == ["c"]
    stage.outcome("r", "completed", context="c")
    stage.outcome("of another", "completed", context="c")
    stage.decide()
    assert not policy._known
