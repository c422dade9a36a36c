"""Decisions and what became of them, bounded."""

from hear.buses.observe.tap.decisions import MAX_DECISIONS, MAX_POLICIES, Decisions, PolicyPicture
from hear.buses.observe.tap.reading import read
from hear.messages import OperationOutcome, OperationStatus, Prioritise
from tests.buses.tap.builders import Voice


class Scene:
    def __init__(self) -> None:
        self.decisions = Decisions()
        self._engine = Voice("e0")
        self._policies: dict[str, Voice] = {}

    def ask(self, operation: str, policy: str = "p", priority: int = -3) -> None:
        voice = self._policies.setdefault(policy, Voice(policy))
        control = Prioritise(priority=priority, reason="3 blocks")
        envelope = voice.say(control, 5.0, request="r1", engine="e0", operation=operation)
        self.decisions.apply(read(envelope))

    def answer(self, operation: str, status: OperationStatus, reason: str = "") -> None:
        outcome = OperationOutcome(status=status, reason=reason, detail="guard" if reason else "")
        self.decisions.apply(read(self._engine.say(outcome, engine="e0", operation=operation)))

    @property
    def policy(self) -> PolicyPicture:
        [picture] = self.decisions.pictures()
        return picture


def test_a_decision_shows_what_why_and_what_became_of_it() -> None:
    scene = Scene()
    scene.ask("p-1-1")
    [decision] = scene.policy.decisions
    assert (decision.engine, decision.asks) == ("e0", "prioritise r1 at -3")
    assert (decision.reason, decision.status, decision.why) == ("3 blocks", "sent", "")
    scene.answer("p-1-1", "accepted")
    assert scene.policy.decisions[0].status == "accepted"
    assert not scene.policy.outcomes
    scene.answer("p-1-1", "failed", "outranked")
    [decision] = scene.policy.decisions
    assert (decision.status, decision.why) == ("failed", "outranked by guard")
    assert scene.policy.outcomes == (("failed", 1),)


def test_what_is_said_twice_counts_once() -> None:
    scene = Scene()
    for _ in range(2):
        scene.ask("p-1-1")
        scene.answer("p-1-1", "completed")
    scene.answer("p-1-1", "accepted")
    assert (scene.policy.asked, scene.policy.outcomes) == (1, (("completed", 1),))
    assert scene.policy.decisions[0].status == "completed"


def test_an_outcome_that_overtakes_its_control_is_not_lost() -> None:
    scene = Scene()
    scene.answer("p-1-1", "completed")
    scene.ask("p-1-1")
    assert scene.policy.decisions[0].status == "completed"


def test_the_newest_come_first_and_the_oldest_go() -> None:
    scene = Scene()
    for n in range(MAX_DECISIONS + 5):
        scene.ask(f"p-1-{n}", priority=n)
    assert scene.policy.asked == MAX_DECISIONS + 5
    assert len(scene.policy.decisions) == MAX_DECISIONS
    assert scene.policy.decisions[0].asks == f"prioritise r1 at {MAX_DECISIONS + 4}"
    scene.answer("p-1-0", "completed")
    assert scene.policy.outcomes == ()


def test_strangers_without_end_fill_no_memory() -> None:
    scene = Scene()
    for n in range(500):
        scene.ask(f"s{n}-1-1", policy=f"s{n}")
        scene.answer(f"x-1-{n}", "completed")
    assert len(scene.decisions.pictures()) == MAX_POLICIES
    assert len(scene.decisions._by_operation) == MAX_POLICIES
    assert len(scene.decisions._early) <= 256
