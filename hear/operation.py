"""The life of one control: everything that moves an operation from state to state lives here.

An operation has a *phase*, which its outcomes tell, at its sender and at its engine. The table
``TRANSITIONS`` has all moves; what is not in it is forbidden, so an operation ends exactly once
(paper, section 3.3: acceptance is not completion).

While it is open at its engine it has a *stage* as well, of which no message tells: whether it waits
for its request, is being applied, or is in effect. ``STAGES`` has all moves of it; from each stage
an operation may end.
"""

from typing import Final, Literal

from hear.errors import LocalProtocolError
from hear.messages import DEFAULT_TENANT, Control, Key, OperationStatus

Ref = tuple[str, str]
"""A tenant and an id (of a request, a context or an operation) that is its own."""

Phase = Literal["submitted", "accepted", "completed", "rejected", "unsupported", "failed"]

TRANSITIONS: Final[dict[Phase, dict[OperationStatus, Phase]]] = {
    "submitted": {
        "accepted": "accepted",
        "rejected": "rejected",
        "unsupported": "unsupported",
    },
    "accepted": {"completed": "completed", "failed": "failed"},
    "completed": {},
    "rejected": {},
    "unsupported": {},
    "failed": {},
}

Stage = Literal["admitted", "kept", "applying", "in_effect"]

STAGES: Final[dict[Stage, tuple[Stage, ...]]] = {
    "admitted": ("kept", "applying"),  # it was found to be a control that can be carried out
    "kept": ("applying",),  # the request that it names has not arrived
    "applying": ("in_effect",),  # the backend was handed it, and has not said that it is done
    "in_effect": (),  # what it asked for holds until its lease or its request ends
}

TERMINAL: Final[frozenset[Phase]] = frozenset(p for p, after in TRANSITIONS.items() if not after)


class Operation:
    """One control on its way, from submission to its one terminal outcome.

    Its id is its own among those of ``tenant``, and so are the names in its key.
    """

    __slots__ = (
        "control",
        "deadline_s",
        "id",
        "key",
        "phase",
        "source",
        "stage",
        "submitted_s",
        "tenant",
    )

    def __init__(
        self,
        *,
        id: str,
        control: Control,
        key: Key,
        source: str,
        submitted_s: float,
        deadline_s: float,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        self.id = id
        self.control = control
        self.key = key
        self.source = source
        self.submitted_s = submitted_s
        self.deadline_s = deadline_s
        self.tenant = tenant
        self.phase: Phase = "submitted"
        self.stage: Stage = "admitted"

    @property
    def ref(self) -> Ref:
        """Its tenant and its id, which together are its own on an engine."""
        return self.tenant, self.id

    @property
    def request_ref(self) -> Ref:
        """The request that it names, among those of its tenant; of an empty id if it names none."""
        return self.tenant, self.key.request or ""

    @property
    def context_ref(self) -> Ref:
        """The context that it names, among those of its tenant; of an empty id if it names none."""
        return self.tenant, self.key.context or ""

    @property
    def terminal(self) -> bool:
        """Whether the operation has ended."""
        return self.phase in TERMINAL

    def advance(self, status: OperationStatus) -> None:
        """Move to the phase that an outcome with ``status`` leads to.

        Raises:
            LocalProtocolError: the table has no such move; nothing is changed.
        """
        try:
            self.phase = TRANSITIONS[self.phase][status]
        except KeyError:
            raise LocalProtocolError(
                f"operation {self.id}: {status} after {self.phase}, expected one of "
                f"{sorted(TRANSITIONS[self.phase]) or 'nothing'}"
            ) from None

    def enter(self, stage: Stage) -> None:
        """Move to another stage at the engine.

        Raises:
            LocalProtocolError: the table has no such move, or the operation has ended; nothing is
                changed.
        """
        if self.terminal or stage not in STAGES[self.stage]:
            raise LocalProtocolError(
                f"operation {self.id}: {stage} after {self.phase} and {self.stage}, expected one "
                f"of {'nothing' if self.terminal else sorted(STAGES[self.stage]) or 'nothing'}"
            )
        self.stage = stage

    def __repr__(self) -> str:
        kind = type(self.control).__name__
        return f"<Operation {self.id} {kind} {self.phase}>"
