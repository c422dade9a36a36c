"""Guard-W: a requirement for each request, once, with a bound that makes sense."""

import pytest

from hear.errors import ConfigError
from hear.interfaces import Ask
from hear.messages import BoundWait, Key, RequestDescribed, RequestReadinessChanged
from hear.policies.guard import Guard
from tests.policies.stage import ENGINE, Stage


@pytest.fixture
def stage() -> Stage:
    return Stage(Guard(40))


def guarded(asks: list[Ask]) -> list[str | None]:
    for message, key in asks:
        assert isinstance(message, BoundWait)
        assert message.force == "requirement"
        assert message.max_wait_s == 40
        assert key == Key(request=key.request, engine=ENGINE)
    return [key.request for _, key in asks]


def test_each_request_is_guarded_as_it_is_described(stage: Stage) -> None:
    stage.describe("a")
    stage.describe("b")
    assert guarded(stage.decide()) == ["a", "b"]


def test_a_request_is_guarded_once(stage: Stage) -> None:
    stage.describe("a")
    stage.decide()
    stage.describe("a")
    stage.wait("a")
    stage.outcome("a", "accepted")
    stage.intent(RequestReadinessChanged(ready=True), Key(request="a"))
    assert stage.decide() == []


def test_a_request_that_is_not_ready_is_guarded_when_it_is(stage: Stage) -> None:
    stage.describe("a", ready=False)
    assert stage.decide() == []
    stage.intent(RequestReadinessChanged(ready=True), Key(request="a"))
    assert guarded(stage.decide()) == ["a"]


def test_a_request_that_has_ended_already_is_not_guarded(stage: Stage) -> None:
    stage.describe("a")
    stage.outcome("a", "rejected")
    assert stage.decide() == []


def test_a_request_that_is_sent_again_after_it_failed_is_guarded_again(stage: Stage) -> None:
    stage.describe("a")
    stage.decide()
    stage.outcome("a", "failed")
    stage.decide()
    stage.describe("a")
    assert guarded(stage.decide()) == ["a"]


def test_a_request_that_moves_is_guarded_on_its_new_engine(stage: Stage) -> None:
    stage.describe("a", engine="other")
    assert [key.engine for _, key in stage.decide()] == ["other"]
    stage.describe("a")
    assert guarded(stage.decide()) == ["a"]


def test_what_names_no_engine_or_no_request_cannot_be_guarded(stage: Stage) -> None:
    stage.describe("a", engine=None)
    stage.intent(RequestDescribed(), Key(engine=ENGINE, context="c"))
    stage.intent(RequestReadinessChanged(ready=True), Key(request="nobody's"))
    assert stage.decide() == []


@pytest.mark.parametrize("bound", [0, -1, float("nan"), float("inf"), 1e9])
def test_a_bound_that_makes_no_sense_is_refused(bound: float) -> None:
    with pytest.raises(ConfigError, match="guard: W is"):
        Guard(bound)


def test_its_name_tells_its_bound() -> None:
    assert [Guard().name, Guard(2.5).name] == ["guard:40", "guard:2.5"]


def test_a_request_is_guarded_on_its_engine_and_not_in_the_pool_before_it(stage: Stage) -> None:
    stage.pool()
    stage.describe("r", engine="pool")
    assert stage.decide() == []
    stage.describe("r")
    assert guarded(stage.decide()) == ["r"]
