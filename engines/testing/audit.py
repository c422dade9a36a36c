"""What holds of operations whatever was done: legal steps, one end, acting once."""

from collections import Counter
from collections.abc import Iterable

from hear.engines.testing.setup import require
from hear.messages import OperationOutcome
from hear.operation import TERMINAL, TRANSITIONS, Phase


def check_operation(name: str, outcomes: Iterable[OperationOutcome]) -> None:
    """Check all outcomes that an engine has published for an operation, in order."""
    phase: Phase = "submitted"
    end: OperationOutcome | None = None
    for outcome in outcomes:
        if end is not None:
            require(outcome == end, f"{name}: after {end} nothing else, not {outcome}")
            continue
        if phase == outcome.status == "accepted":
            continue  # it was sent again
        if phase == "submitted" and outcome.status in ("completed", "failed"):
            phase = "accepted"  # a terminal outcome implies it
        require(
            outcome.status in TRANSITIONS[phase],
            f"{name}: one of {sorted(TRANSITIONS[phase])} after {phase}, not {outcome}",
        )
        phase = TRANSITIONS[phase][outcome.status]
        if phase in TERMINAL:
            end = outcome
    require(end is not None, f"{name} has an end; it is {phase}")


def check_applied(applied: Counter[tuple[str, str]]) -> None:
    """Check that no operation of a tenant was handed to the backend twice."""
    for (_, operation), times in applied.items():
        require(times == 1, f"{operation} is handed to the backend once, not {times} times")
