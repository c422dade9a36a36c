"""The engine's side: what becomes of each control, one rule of the protocol at a time."""

from math import inf, nan

import msgspec
import pytest

from hear.engine_operations import (
    DEFAULT_DEADLINE_S,
    GONE_S,
    MAX_DEADLINE_S,
    Actions,
    EngineOperations,
)
from hear.interfaces import ApplyResult, OperationEnded
from hear.messages import (
    Admit,
    BoundWait,
    Cancel,
    ContextOpened,
    Control,
    Envelope,
    Hold,
    Key,
    OperationOutcome,
    OperationStatus,
    Prepare,
    Prioritise,
    Release,
    Retain,
    Withdraw,
)
from hear.operation import Operation
from tests.hear.builders import envelope

CONTROLS = ("prioritise", "bound_wait", "retain", "release", "prepare", "hold", "admit")
DONE = ApplyResult("completed")
LEASED = ApplyResult("accepted", standing=True)
UNDER_WAY = ApplyResult("accepted")

Said = list[tuple[str | None, str, str]]
"""Operation, status and reason of each answer."""


def said(actions: Actions) -> Said:
    return [(a.key.operation, a.outcome.status, a.outcome.reason) for a in actions.outcomes]


def ids(operations: list[Operation]) -> list[str]:
    return [operation.id for operation in operations]


class Driver:
    """The driver of an engine's operations."""

    def __init__(
        self, *, ranks: dict[str, int] | None = None, max_open: int = 100, remember: int = 100
    ) -> None:
        self.operations = EngineOperations(
            engine="e0", controls=CONTROLS, ranks=ranks, max_open=max_open, remember=remember
        )
        self.now = 0.0

    def send(
        self,
        id: str | None,
        control: Control,
        *,
        request: str | None = None,
        context: str | None = None,
        version: int | None = None,
        source: str = "p",
        engine: str | None = "e0",
    ) -> Actions:
        key = Key(
            engine=engine, request=request, context=context, context_version=version, operation=id
        )
        return self.receive(envelope(control, key, source=source, time_s=self.now))

    def receive(self, sent: Envelope) -> Actions:
        return self.operations.receive(sent, self.now)

    def arrives(self, request: str, **key: int | str) -> Actions:
        context, version = key.get("context"), key.get("context_version")
        assert context is None or isinstance(context, str)
        assert version is None or isinstance(version, int)
        made = Key(request=request, context=context, context_version=version)
        return self.operations.request_arrived(made, self.now)

    def carry_out(self, actions: Actions, result: ApplyResult = DONE) -> Said:
        """Let the backend say ``result`` to all that it is handed; returns what is answered."""
        answers = said(actions)
        for operation in actions.apply:
            answers += said(self.operations.applied(operation, result))
        return answers


@pytest.fixture
def driver() -> Driver:
    """A driver that has seen request r arrive."""
    made = Driver()
    made.arrives("r")
    return made


# -- acceptance and the end -------------------------------------------------------------------


def test_a_control_that_is_carried_out_at_once_is_answered_once(driver: Driver) -> None:
    actions = driver.send("a", Prioritise(priority=-1), request="r")
    assert (ids(actions.apply), actions.revert, actions.outcomes) == (["a"], [], [])
    assert driver.carry_out(actions) == [("a", "completed", "")]
    assert driver.operations.open_operations == []


def test_a_control_that_takes_its_time_is_accepted_and_then_completed(driver: Driver) -> None:
    actions = driver.send("a", BoundWait(max_wait_s=40.0), request="r")
    assert driver.carry_out(actions, LEASED) == [("a", "accepted", "")]
    assert ids(driver.operations.open_operations) == ["a"]
    ended = OperationEnded("a", OperationOutcome(status="completed", detail="left the queue"))
    assert said(driver.operations.ended(ended)) == [("a", "completed", "")]
    assert driver.operations.open_operations == []


@pytest.mark.parametrize("status", ["completed", "rejected", "unsupported", "failed"])
def test_the_outcome_says_what_the_backend_said(driver: Driver, status: OperationStatus) -> None:
    actions = driver.send("a", Prioritise(priority=-1), request="r")
    result = ApplyResult(status, "why", "more", "other")
    [answer] = driver.operations.applied(actions.apply[0], result).outcomes
    assert answer.outcome == OperationOutcome(
        status=status, control="prioritise", reason="why", detail="more", fallback="other"
    )
    assert answer.key.request == "r"


def test_the_backend_is_told_of_what_is_kept_for_a_request_that_has_not_come() -> None:
    driver = Driver()
    assert ids(driver.send("a", Prioritise(priority=-1), request="later").expect) == ["a"]
    driver.arrives("r")
    assert driver.send("b", Prioritise(priority=-1), request="r").expect == []


def test_a_refusal_after_acceptance_is_a_failure() -> None:
    driver = Driver()
    driver.send("a", Prioritise(priority=-1), request="later")
    actions = driver.arrives("later")
    refused = ApplyResult("rejected", "already_running")
    assert driver.carry_out(actions, refused) == [("a", "failed", "already_running")]


def test_the_end_of_what_is_not_open_is_ignored(driver: Driver) -> None:
    completed = OperationOutcome(status="completed")
    assert driver.operations.ended(OperationEnded("never heard of", completed)).outcomes == []
    actions = driver.send("a", Prioritise(priority=-1), request="r")
    driver.carry_out(actions)
    assert driver.operations.ended(OperationEnded("a", completed)).outcomes == []
    assert driver.operations.applied(actions.apply[0], DONE).outcomes == []


# -- delivered twice --------------------------------------------------------------------------


def test_a_control_delivered_again_after_its_end_gets_the_same_answer_and_acts_no_more(
    driver: Driver,
) -> None:
    control = Prioritise(priority=-1)
    driver.carry_out(
        driver.send("a", control, request="r"), ApplyResult("rejected", "already_running")
    )
    again = driver.send("a", control, request="r")
    assert (again.apply, again.revert) == ([], [])
    assert said(again) == [("a", "rejected", "already_running")]


def test_a_control_delivered_again_while_open_is_told_that_it_was_accepted(driver: Driver) -> None:
    control = Retain(lease_s=10.0)
    actions = driver.send("a", control, context="c")
    assert driver.send("a", control, context="c") == Actions()  # nothing to say yet
    driver.carry_out(actions, LEASED)
    again = driver.send("a", control, context="c")
    assert (said(again), again.apply) == ([("a", "accepted", "")], [])


def test_refusals_at_the_door_are_remembered_too(driver: Driver) -> None:
    first = driver.send("a", Prioritise(priority=1, deadline_s=-1.0), request="r")
    driver.now = 5.0
    assert said(driver.send("a", Prioritise(priority=1), request="r")) == said(first)


def test_the_answer_to_an_operation_outlives_a_restart(driver: Driver) -> None:
    driver.carry_out(driver.send("a", Prioritise(priority=1), request="r"))
    driver.operations.shut("engine_restarted")
    assert said(driver.send("a", Prioritise(priority=1), request="r")) == [("a", "completed", "")]


# -- refused at the door ----------------------------------------------------------------------


def test_a_control_without_an_operation_is_no_control(driver: Driver) -> None:
    assert driver.send(None, Prioritise(priority=1), request="r") == Actions()
    assert driver.send("", Prioritise(priority=1), request="r") == Actions()


def test_what_the_engine_does_not_offer_is_unsupported() -> None:
    driver = Driver()
    driver.operations = EngineOperations(engine="e0", controls=["prioritise"])
    actions = driver.send("a", Retain(lease_s=1.0), context="c")
    assert said(actions) == [("a", "unsupported", "unsupported_control")]
    assert actions.outcomes[0].outcome.control == "retain"


@pytest.mark.parametrize("kind", ["tomorrow", "context_opened"])
def test_a_kind_that_is_unknown_or_no_control_is_unsupported(driver: Driver, kind: str) -> None:
    key = Key(engine="e0", request="r", operation="a")
    sent = msgspec.structs.replace(envelope(ContextOpened(), key), kind=kind, category="control")
    assert said(driver.receive(sent)) == [("a", "unsupported", "unsupported_control")]


def test_a_body_that_cannot_be_read_is_malformed(driver: Driver) -> None:
    key = Key(engine="e0", request="r", operation="a")
    sent = msgspec.structs.replace(
        envelope(Prioritise(priority=1), key), body=msgspec.Raw(b"\x81\xa4kind\xc0")
    )
    assert said(driver.receive(sent)) == [("a", "rejected", "malformed")]


@pytest.mark.parametrize(
    "control", [Prioritise(priority=1), BoundWait(max_wait_s=1.0), Hold(), Admit()]
)
def test_a_control_of_a_request_without_its_name_is_malformed(
    driver: Driver, control: Control
) -> None:
    assert said(driver.send("a", control, context="c")) == [("a", "rejected", "malformed")]


@pytest.mark.parametrize("control", [Retain(lease_s=1.0), Release(), Prepare()])
def test_a_control_of_a_context_without_its_name_is_malformed(
    driver: Driver, control: Control
) -> None:
    assert said(driver.send("a", control, request="r")) == [("a", "rejected", "malformed")]


def test_a_control_for_another_engine_is_rejected(driver: Driver) -> None:
    actions = driver.send("a", Prioritise(priority=1), request="r", engine="e1")
    assert said(actions) == [("a", "rejected", "wrong_engine")]
    actions = driver.send("b", Prioritise(priority=1), request="r", engine=None)
    assert ids(actions.apply) == ["b"]


@pytest.mark.parametrize(
    ("deadline_s", "reason"),
    [(9.0, "deadline_passed"), (10.0, "deadline_passed"), (nan, "malformed"), (inf, "malformed")],
)
def test_a_deadline_that_is_over_or_no_time_is_rejected(
    driver: Driver, deadline_s: float, reason: str
) -> None:
    driver.now = 10.0
    actions = driver.send("a", Prioritise(priority=1, deadline_s=deadline_s), request="r")
    assert said(actions) == [("a", "rejected", reason)]


def full_of_leases(*scores: float, ranks: dict[str, int] | None = None) -> Driver:
    """A driver at its limit: a lease of each score, as operation and context a, b and so on."""
    driver = Driver(max_open=len(scores), ranks=ranks)
    driver.arrives("r")
    for id, score in zip("abcdef", scores, strict=False):
        lease = Retain(lease_s=9.0, score=score)
        driver.carry_out(driver.send(id, lease, context=id), LEASED)
    return driver


def test_at_its_limit_the_engine_turns_down_what_is_worth_least_but_still_lets_go() -> None:
    driver = full_of_leases(0.5, 0.5)
    full = driver.send("z", Retain(lease_s=9.0, score=0.4), context="z")
    assert (said(full), full.apply) == ([("z", "rejected", "overloaded")], [])
    assert ("y", "completed", "") in driver.carry_out(driver.send("y", Cancel(target="a")))
    assert ids(driver.send("x", Retain(lease_s=9.0, score=0.4), context="z").apply) == ["x"]


def test_at_its_limit_the_least_worthy_preference_gives_way() -> None:
    driver = full_of_leases(0.5, 0.2, 0.3)
    actions = driver.send("z", Retain(lease_s=9.0, score=0.4), context="z")
    assert said(actions) == [("b", "failed", "overloaded")]
    assert (ids(actions.revert), ids(actions.apply)) == (["b"], ["z"])
    assert len(driver.operations.open_operations) == 3


def test_of_equals_the_oldest_gives_way() -> None:
    driver = full_of_leases(0.5, 0.5)
    actions = driver.send("z", Retain(lease_s=9.0, score=0.5), context="z")
    assert said(actions) == [("a", "failed", "overloaded")]


def test_whose_sender_ranks_lower_is_worth_less() -> None:
    driver = full_of_leases(0.9, 0.9, ranks={"above": 1})
    actions = driver.send("z", Retain(lease_s=9.0, score=0.1), context="z", source="above")
    assert said(actions) == [("a", "failed", "overloaded")]
    actions = driver.send("y", Retain(lease_s=9.0, score=0.8), context="y")
    assert said(actions) == [("y", "rejected", "overloaded")]


def test_what_waits_for_its_request_gives_way_to_nothing_but_requirements() -> None:
    driver = Driver(max_open=1)
    driver.send("a", Prioritise(priority=-1), request="later")
    lease = driver.send("b", Retain(lease_s=9.0, score=1.0), context="b")
    assert said(lease) == [("b", "rejected", "overloaded")]
    required = driver.send("c", BoundWait(max_wait_s=1.0, force="requirement"), request="later")
    assert said(required) == [("a", "failed", "overloaded"), ("c", "accepted", "")]
    assert ids(driver.arrives("later").apply) == ["c"]  # and of what gave way nothing is left


def test_a_requirement_never_gives_way_and_one_on_a_request_that_is_here_always_has_room() -> None:
    driver = Driver(max_open=1)
    bound = BoundWait(max_wait_s=1.0, force="requirement")
    for request in ("r1", "r2", "r3"):
        driver.arrives(request)
        actions = driver.send(request, bound, request=request)
        assert ids(actions.apply) == [request]
        assert driver.carry_out(actions, LEASED) == [(request, "accepted", "")]
    assert said(driver.send("a", bound, request="later")) == [("a", "rejected", "overloaded")]
    assert said(driver.send("b", Prioritise(priority=1), request="r1")) == [
        ("b", "rejected", "overloaded")
    ]


def test_at_its_limit_a_lease_can_be_renewed_and_nobody_gives_way() -> None:
    driver = full_of_leases(0.5, 0.2)
    renewed = driver.send("z", Retain(lease_s=9.0, score=0.1), context="a")
    assert said(renewed) == [("a", "completed", "renewed")]
    assert ids(renewed.apply) == ["z"]


def test_a_control_for_an_older_version_than_was_seen_is_stale(driver: Driver) -> None:
    driver.arrives("r2", context="c", context_version=3)
    stale = driver.send("a", Retain(lease_s=1.0), context="c", version=2)
    assert said(stale) == [("a", "rejected", "stale_version")]
    for id, version in (("b", 3), ("c", None), ("d", 5)):
        assert ids(driver.send(id, Retain(lease_s=1.0), context="c", version=version).apply) == [id]
    stale = driver.send("e", Retain(lease_s=1.0), context="c", version=4)
    assert said(stale) == [("e", "rejected", "stale_version")]


def test_versions_of_a_context_go_on_from_that_of_its_latest_request(driver: Driver) -> None:
    driver.arrives("r9", context="c", context_version=9)
    driver.operations.request_ended("r9", driver.now)
    driver.arrives("r2", context="c", context_version=2)  # its harness has started again
    stale = driver.send("a", Retain(lease_s=1.0), context="c", version=1)
    assert said(stale) == [("a", "rejected", "stale_version")]
    for id, version in (("b", 2), ("c", 3)):
        assert ids(driver.send(id, Retain(lease_s=1.0), context="c", version=version).apply) == [id]
    stale = driver.send("d", Retain(lease_s=1.0), context="c", version=2)
    assert said(stale) == [("d", "rejected", "stale_version")]


# -- before its request -----------------------------------------------------------------------


def test_a_control_may_come_before_its_request() -> None:
    driver = Driver()
    early = driver.send("a", Prioritise(priority=-1), request="r")
    assert (said(early), early.apply) == ([("a", "accepted", "")], [])
    actions = driver.arrives("r")
    assert ids(actions.apply) == ["a"]
    assert driver.carry_out(actions) == [("a", "completed", "")]
    assert driver.operations.next_expiry() is None


def test_a_control_whose_request_does_not_come_fails_at_its_deadline() -> None:
    driver = Driver()
    driver.send("a", Prioritise(priority=-1, deadline_s=5.0), request="r")
    assert driver.operations.next_expiry() == 5.0
    assert driver.operations.expire(4.9) == Actions()
    actions = driver.operations.expire(5.0)
    assert (said(actions), actions.revert) == ([("a", "failed", "deadline")], [])
    driver.now = 6.0
    assert driver.arrives("r").apply == []


def test_a_control_whose_deadline_has_passed_is_not_applied_though_its_request_comes() -> None:
    driver = Driver()
    driver.send("a", Prioritise(priority=-1, deadline_s=5.0), request="r")
    driver.now = 5.0  # and the driver has not yet asked what has expired
    actions = driver.arrives("r")
    assert (said(actions), actions.apply) == ([("a", "failed", "deadline")], [])


def test_a_deadline_is_the_engines_own_if_none_is_given_and_bounded_if_one_is() -> None:
    driver = Driver()
    driver.now = 100.0
    driver.send("a", Prioritise(priority=1, deadline_s=1e9), request="x")
    driver.send("b", Prioritise(priority=1), request="y")
    deadlines = {op.id: op.deadline_s for op in driver.operations.open_operations}
    assert deadlines == {"a": 100.0 + MAX_DEADLINE_S, "b": 100.0 + DEFAULT_DEADLINE_S}


def test_a_control_after_its_request_has_ended_fails(driver: Driver) -> None:
    driver.operations.request_ended("r", driver.now)
    actions = driver.send("a", Prioritise(priority=1), request="r")
    assert (said(actions), actions.apply) == ([("a", "failed", "request_gone")], [])


def test_a_name_that_is_used_again_later_is_that_of_a_new_request(driver: Driver) -> None:
    driver.operations.request_ended("r", driver.now)
    driver.now += GONE_S + 1
    assert said(driver.send("a", Prioritise(priority=1), request="r")) == [("a", "accepted", "")]
    assert ids(driver.arrives("r").apply) == ["a"]


def test_a_control_kept_for_a_request_that_is_refused_fails_with_it() -> None:
    driver = Driver()
    driver.send("a", Prioritise(priority=1), request="r")
    actions = driver.operations.request_ended(
        "r", driver.now
    )  # it never arrived: it was too long, say
    assert (said(actions), actions.revert) == ([("a", "failed", "request_gone")], [])
    assert driver.operations.next_expiry() is None


def test_controls_kept_for_one_request_are_arbitrated_when_it_comes() -> None:
    """The loser is never handed to the engine, since the engine would then act for what ended."""
    driver = Driver()
    driver.send("a", Prioritise(priority=1), request="r", source="p")
    driver.send("b", Prioritise(priority=2), request="r", source="p")
    driver.send("c", Prioritise(priority=3, force="requirement"), request="r", source="q")
    driver.send("d", Prioritise(priority=4), request="r", source="p")
    actions = driver.arrives("r")
    assert (ids(actions.apply), actions.revert) == (["c"], [])
    assert said(actions) == [
        ("a", "failed", "replaced"),
        ("b", "failed", "outranked"),
        ("d", "failed", "outranked"),
    ]


# -- deadlines --------------------------------------------------------------------------------


def test_an_effect_that_is_not_there_in_time_fails_and_is_undone(driver: Driver) -> None:
    actions = driver.send("a", Prepare(deadline_s=5.0), context="c")
    driver.carry_out(actions, UNDER_WAY)
    late = driver.operations.expire(5.0)
    assert (said(late), ids(late.revert)) == ([("a", "failed", "deadline")], ["a"])


def test_a_deadline_does_not_end_an_effect_that_is_there(driver: Driver) -> None:
    """A lease or a guard has a span of its own."""
    actions = driver.send("a", Retain(lease_s=100.0, deadline_s=5.0), context="c")
    driver.carry_out(actions, LEASED)
    assert driver.operations.expire(50.0) == Actions()
    assert ids(driver.operations.open_operations) == ["a"]


def test_a_guard_sent_ahead_is_not_ended_by_the_deadline_of_its_waiting() -> None:
    driver = Driver()
    driver.send("a", BoundWait(max_wait_s=40.0, deadline_s=5.0), request="r")
    driver.carry_out(driver.arrives("r"), LEASED)
    assert driver.operations.expire(5.0) == Actions()


# -- several policies -------------------------------------------------------------------------


def test_a_preference_against_a_requirement_is_outranked(driver: Driver) -> None:
    required = Prioritise(priority=1, force="requirement")
    driver.carry_out(driver.send("a", required, request="r", source="p"))
    actions = driver.send("b", Prioritise(priority=2), request="r", source="q")
    assert (said(actions), actions.apply) == ([("b", "rejected", "outranked")], [])
    assert actions.outcomes[0].outcome.detail == "p"


def test_a_claim_stands_as_long_as_its_request(driver: Driver) -> None:
    required = Prioritise(priority=1, force="requirement")
    driver.carry_out(driver.send("a", required, request="r", source="p"))
    driver.operations.request_ended("r", driver.now)
    driver.arrives("r")
    assert ids(driver.send("b", Prioritise(priority=2), request="r", source="q").apply) == ["b"]


def test_who_is_displaced_hears_of_it_and_is_undone_first() -> None:
    driver = Driver(ranks={"high": 1})
    driver.carry_out(driver.send("a", Retain(lease_s=9.0), context="c", source="low"), LEASED)
    actions = driver.send("b", Retain(lease_s=5.0), context="c", source="high")
    assert (ids(actions.revert), ids(actions.apply)) == (["a"], ["b"])
    assert said(actions) == [("a", "failed", "outranked")]
    assert actions.outcomes[0].outcome.detail == "high"


@pytest.mark.parametrize(
    ("later", "reason"), [(Retain(lease_s=9.0), "renewed"), (Release(), "released")]
)
def test_a_senders_next_word_completes_its_lease(later: Control, reason: str) -> None:
    driver = Driver()
    driver.carry_out(driver.send("a", Retain(lease_s=9.0), context="c"), LEASED)
    actions = driver.send("b", later, context="c")
    assert (ids(actions.revert), ids(actions.apply)) == (["a"], ["b"])
    assert said(actions) == [("a", "completed", reason)]


def test_what_is_replaced_before_it_took_hold_was_not_completed() -> None:
    driver = Driver()
    driver.carry_out(driver.send("a", Prepare(tier="gpu"), context="c"), UNDER_WAY)
    actions = driver.send("b", Prepare(tier="cpu"), context="c")
    assert (said(actions), ids(actions.revert)) == ([("a", "failed", "replaced")], ["a"])


@pytest.mark.parametrize(
    "result", [ApplyResult("rejected", "no_room"), ApplyResult("failed", "broken")]
)
@pytest.mark.parametrize(
    "control",
    [Retain(lease_s=9.0, force="requirement"), Prioritise(priority=1, force="requirement")],
)
def test_what_the_engine_did_not_do_stands_in_nobodys_way(
    driver: Driver, control: Control, result: ApplyResult
) -> None:
    driver.carry_out(driver.send("a", control, request="r", context="c", source="p"), result)
    weaker = msgspec.structs.replace(control, force="preference")
    assert ids(driver.send("b", weaker, request="r", context="c", source="q").apply) == ["b"]


def test_a_release_that_is_done_stands_in_nobodys_way(driver: Driver) -> None:
    driver.carry_out(driver.send("a", Release(force="requirement"), context="c", source="p"))
    assert ids(driver.send("b", Retain(lease_s=1.0), context="c", source="q").apply) == ["b"]


def test_a_lease_that_has_ended_stands_in_nobodys_way(driver: Driver) -> None:
    lease = Retain(lease_s=9.0, force="requirement")
    driver.carry_out(driver.send("a", lease, context="c", source="p"), LEASED)
    yielded = OperationOutcome(status="failed", reason="yielded")
    assert said(driver.operations.ended(OperationEnded("a", yielded))) == [
        ("a", "failed", "yielded")
    ]
    assert ids(driver.send("b", Retain(lease_s=1.0), context="c", source="q").apply) == ["b"]


# -- cancel and withdraw ----------------------------------------------------------------------


def test_a_cancelled_operation_fails_and_its_effect_goes(driver: Driver) -> None:
    driver.carry_out(driver.send("a", Retain(lease_s=9.0), context="c"), LEASED)
    actions = driver.send("x", Cancel(target="a"))
    assert ids(actions.revert) == ["a"]
    assert said(actions) == [("a", "failed", "cancelled")]
    assert ids(actions.apply) == ["x"], "it is completed by the backend, after the revert"
    assert driver.carry_out(actions)[1:] == [("x", "completed", "")]


def test_what_was_never_handed_out_needs_no_undoing() -> None:
    driver = Driver()
    driver.send("a", Prioritise(priority=1), request="r")
    actions = driver.send("x", Cancel(target="a"))
    assert actions.revert == []
    assert driver.carry_out(actions) == [("a", "failed", "cancelled"), ("x", "completed", "")]
    assert driver.arrives("r") == Actions()
    assert driver.operations.next_expiry() is None


def test_what_cannot_be_cancelled_is_told_why(driver: Driver) -> None:
    driver.carry_out(driver.send("theirs", Retain(lease_s=9.0), context="c", source="q"), LEASED)
    driver.carry_out(driver.send("done", Prioritise(priority=1), request="r"))
    for id, target, reason in (
        ("x1", "theirs", "not_yours"),
        ("x2", "x2", "not_yours"),
        ("x3", "done", "already_terminal"),
        ("x4", "never heard of", "unknown_operation"),
    ):
        actions = driver.send(id, Cancel(target=target))
        assert (said(actions), actions.revert) == ([(id, "rejected", reason)], [])
    assert ids(driver.operations.open_operations) == ["theirs"]


def test_who_withdraws_leaves_nothing_behind_and_others_alone() -> None:
    driver = Driver()
    driver.arrives("r")
    driver.send("kept", Prioritise(priority=1), request="later")
    driver.carry_out(driver.send("done", Prioritise(priority=-1), request="r"))
    driver.carry_out(driver.send("leased", Retain(lease_s=9.0), context="c"), LEASED)
    driver.carry_out(driver.send("other", Retain(lease_s=9.0), context="d", source="q"), LEASED)
    actions = driver.send("x", Withdraw())
    assert sorted(ids(actions.revert)) == ["done", "leased"]
    assert driver.carry_out(actions) == [
        ("kept", "failed", "withdrawn"),
        ("leased", "failed", "withdrawn"),
        ("x", "completed", ""),
    ]
    assert ids(driver.operations.open_operations) == ["other"]
    assert driver.arrives("later").apply == []


# -- the end of a request, and of the engine --------------------------------------------------


def test_what_is_open_for_a_request_ends_with_it(driver: Driver) -> None:
    driver.carry_out(driver.send("a", BoundWait(max_wait_s=40.0), request="r"), LEASED)
    actions = driver.operations.request_ended("r", driver.now)
    assert (said(actions), ids(actions.revert)) == ([("a", "failed", "request_gone")], ["a"])


def test_a_lease_on_a_context_outlives_the_request_that_it_names(driver: Driver) -> None:
    driver.carry_out(driver.send("a", Retain(lease_s=9.0), context="c", request="r"), LEASED)
    assert driver.operations.request_ended("r", driver.now) == Actions()
    assert ids(driver.operations.open_operations) == ["a"]


def test_a_lease_does_not_make_the_request_that_it_names_arrive() -> None:
    driver = Driver()
    driver.carry_out(driver.send("a", Retain(lease_s=9.0), context="c", request="r"), LEASED)
    actions = driver.send("b", Prioritise(priority=1), request="r")
    assert (said(actions), actions.apply) == ([("b", "accepted", "")], [])


def test_a_restart_fails_whatever_is_open_and_forgets_requests_and_versions() -> None:
    driver = Driver()
    driver.arrives("r", context="c", context_version=7)
    driver.send("kept", Prioritise(priority=1), request="later")
    required = Retain(lease_s=9.0, force="requirement")
    driver.carry_out(driver.send("leased", required, context="c", source="q"), LEASED)
    actions = driver.operations.shut("engine_restarted")
    assert (actions.revert, actions.apply) == ([], [])
    assert said(actions) == [
        ("kept", "failed", "engine_restarted"),
        ("leased", "failed", "engine_restarted"),
    ]
    assert driver.operations.next_expiry() is None
    assert driver.arrives("later").apply == []
    actions = driver.send("new", Retain(lease_s=1.0), context="c", version=1)
    assert ids(actions.apply) == ["new"]
    assert said(driver.send("again", Prioritise(priority=1), request="r")) == [
        ("again", "accepted", "")
    ]


def test_memory_is_bounded() -> None:
    driver = Driver(remember=10)
    for number in range(100):
        request = f"r{number}"
        driver.arrives(request, context=f"c{number}", context_version=1)
        driver.carry_out(driver.send(f"op{number}", Prioritise(priority=1), request=request))
        driver.operations.request_ended(request, driver.now)
        driver.operations.request_ended(request, driver.now)  # told twice
    operations = driver.operations
    assert len(operations._ended) == len(operations._versions) == len(operations._gone) == 10
    assert not any(
        (operations._open, operations._requests, operations._kept, len(operations._arbiter))
    )
    assert said(driver.send("op99", Prioritise(priority=1), request="r99")) == [
        ("op99", "completed", "")
    ]


# -- controls that act at submission --------------------------------------------------------------


def at_submission() -> Driver:
    driver = Driver()
    driver.operations = EngineOperations(
        engine="e0", controls=("hold",), at_submission=("prioritise",)
    )
    return driver


def test_what_acts_at_submission_is_kept_for_its_request_and_handed_out_as_it_comes() -> None:
    driver = at_submission()
    assert said(driver.send("early", Prioritise(priority=1), request="r")) == [
        ("early", "accepted", "")
    ]
    actions = driver.operations.request_arrived(Key(request="r"), 1.0)
    assert ids(actions.apply) == ["early"]
    assert said(driver.operations.applied(actions.apply[0], DONE)) == [("early", "completed", "")]


def test_what_acts_at_submission_and_comes_late_is_rejected() -> None:
    driver = at_submission()
    driver.operations.request_arrived(Key(request="r"), 0.0)
    late = driver.send("late", Prioritise(priority=1, force="requirement"), request="r")
    assert said(late) == [("late", "rejected", "already_submitted")]
    assert not late.apply
    assert ids(driver.send("hold", Hold(), request="r").apply) == ["hold"]


def test_what_was_done_at_submission_is_not_undone() -> None:
    driver = at_submission()
    driver.send("early", Prioritise(priority=1), request="r")
    [operation] = driver.operations.request_arrived(Key(request="r"), 0.0).apply
    driver.operations.applied(operation, DONE)
    actions = driver.send("leave", Withdraw())
    assert not actions.revert
    assert ids(actions.apply) == ["leave"]
    assert said(driver.operations.applied(actions.apply[0], DONE)) == [("leave", "completed", "")]


def test_a_request_that_has_ended_is_gone_for_what_acts_at_submission_too() -> None:
    driver = at_submission()
    driver.operations.request_arrived(Key(request="r"), 0.0)
    driver.operations.request_ended("r", driver.now)
    assert said(driver.send("late", Prioritise(priority=1), request="r")) == [
        ("late", "failed", "request_gone")
    ]
