from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.errors import LocalProtocolError
from hear.messages import OperationStatus
from hear.operation import STAGES, TERMINAL, TRANSITIONS, Phase, Stage
from tests.hear.builders import operation

STATUSES: tuple[OperationStatus, ...] = get_args(OperationStatus)
PHASES: tuple[Phase, ...] = get_args(Phase)


def test_the_table_names_every_phase_and_each_leads_only_to_phases() -> None:
    assert set(TRANSITIONS) == set(PHASES)
    assert {after for row in TRANSITIONS.values() for after in row.values()} < set(PHASES)
    assert set(PHASES) == {"submitted", "accepted"} | TERMINAL


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("phase", PHASES)
def test_what_is_not_in_the_table_raises_and_changes_nothing(
    phase: Phase, status: OperationStatus
) -> None:
    op = operation()
    op.phase = phase
    if status in TRANSITIONS[phase]:
        op.advance(status)
        assert op.phase == status
    else:
        with pytest.raises(LocalProtocolError, match=f"operation op: {status} after {phase}"):
            op.advance(status)
        assert op.phase == phase


@given(st.lists(st.sampled_from(STATUSES), max_size=10))
def test_an_operation_ends_once_at_most(statuses: list[OperationStatus]) -> None:
    op, ends = operation(), 0
    for status in statuses:
        try:
            op.advance(status)
        except LocalProtocolError:
            continue
        ends += op.terminal
    assert ends == op.terminal <= 1


@pytest.mark.parametrize("after", STAGES)
@pytest.mark.parametrize("before", STAGES)
def test_a_stage_that_is_not_in_the_table_raises_and_changes_nothing(
    before: Stage, after: Stage
) -> None:
    op = operation()
    op.stage = before
    if after in STAGES[before]:
        op.enter(after)
        assert op.stage == after
    else:
        with pytest.raises(LocalProtocolError, match=f"operation op: {after} after submitted"):
            op.enter(after)
        assert op.stage == before


def test_what_has_ended_enters_no_stage() -> None:
    op = operation()
    op.advance("rejected")
    with pytest.raises(LocalProtocolError, match="kept after rejected and admitted"):
        op.enter("kept")


def test_acceptance_is_not_the_end_and_completion_needs_acceptance() -> None:
    op = operation()
    with pytest.raises(LocalProtocolError):
        op.advance("completed")
    op.advance("accepted")
    assert not op.terminal
    op.advance("completed")
    assert op.terminal


def test_an_operation_can_be_shown() -> None:
    assert repr(operation("p-1-1")) == "<Operation p-1-1 Prioritise submitted>"
