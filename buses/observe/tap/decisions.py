"""The last decisions of each policy, with their reasons and what became of them.

Pure, and bounded in policies and in decisions of each. Policies and operations are of one tenant:
two may use the same names.
"""

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from hear.buses.observe.tap.lines import of_tenant
from hear.buses.observe.tap.reading import Reading
from hear.buses.observe.tap.words import ask, how_it_fared
from hear.escaping import printable
from hear.messages import Control, OperationOutcome

MAX_POLICIES: Final = 64
MAX_DECISIONS: Final = 20
_MAX_EARLY = 256

_OfTenant = tuple[str, str]


@dataclass(frozen=True, slots=True)
class DecisionPicture:
    """One control: what it asks for, why, and how it stands (``sent``, or a status)."""

    time_s: float
    engine: str
    asks: str
    reason: str
    status: str
    why: str


@dataclass(frozen=True, slots=True)
class PolicyPicture:
    """One policy. ``decisions`` are its last ones, the newest first."""

    name: str
    asked: int
    outcomes: tuple[tuple[str, int], ...]
    decisions: tuple[DecisionPicture, ...]


@dataclass(slots=True)
class _Decision:
    operation: _OfTenant
    time_s: float
    engine: str
    asks: str
    reason: str
    outcome: OperationOutcome | None = None

    def picture(self) -> DecisionPicture:
        outcome = self.outcome
        return DecisionPicture(
            time_s=self.time_s,
            engine=printable(self.engine),
            asks=printable(self.asks),
            reason=printable(self.reason),
            status="sent" if outcome is None else outcome.status,
            why="" if outcome is None else printable(how_it_fared(outcome)),
        )


@dataclass(slots=True)
class _Policy:
    asked: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    decisions: deque[_Decision] = field(default_factory=deque)
    asked_at: int = 0  # when it last asked for something, as a count


class Decisions:
    """Who sends controls, and what was sent last."""

    def __init__(self) -> None:
        self._policies: dict[_OfTenant, _Policy] = {}
        self._num_asked = 0
        self._by_operation: dict[_OfTenant, tuple[_Policy, _Decision]] = {}
        self._early: OrderedDict[_OfTenant, OperationOutcome] = OrderedDict()

    def apply(self, reading: Reading) -> None:
        """Take over a control or an operation's outcome."""
        envelope, message = reading.envelope, reading.message
        if envelope.key.operation is None:
            return
        operation = envelope.tenant, envelope.key.operation
        if isinstance(message, Control):
            self._apply_control(operation, reading, message)
        elif isinstance(message, OperationOutcome):
            self._apply_outcome(operation, message)

    def pictures(self) -> tuple[PolicyPicture, ...]:
        """All policies, in the order in which they were heard of."""
        return tuple(
            PolicyPicture(
                name=printable(of_tenant(name, tenant)),
                asked=policy.asked,
                outcomes=tuple(policy.outcomes.items()),
                decisions=tuple(decision.picture() for decision in reversed(policy.decisions)),
            )
            for (tenant, name), policy in self._policies.items()
        )

    def _apply_control(self, operation: _OfTenant, reading: Reading, control: Control) -> None:
        if operation in self._by_operation:
            return  # sent again
        envelope = reading.envelope
        name = envelope.tenant, envelope.source
        policy = self._policies.get(name)
        if policy is None:
            if len(self._policies) >= MAX_POLICIES:
                self._forget_policy()
            policy = self._policies[name] = _Policy()
        self._num_asked += 1
        policy.asked_at = self._num_asked
        policy.asked += 1
        decision = _Decision(
            operation=operation,
            time_s=envelope.time_s,
            engine=envelope.key.engine or "",
            asks=ask(envelope.key, control),
            reason=control.reason,
        )
        policy.decisions.append(decision)
        self._by_operation[operation] = policy, decision
        if len(policy.decisions) > MAX_DECISIONS:
            del self._by_operation[policy.decisions.popleft().operation]
        early = self._early.pop(operation, None)
        if early is not None:
            self._apply_outcome(operation, early)

    def _forget_policy(self) -> None:
        """Give up the policy that has been silent longest."""
        name = min(self._policies, key=lambda name: self._policies[name].asked_at)
        for decision in self._policies.pop(name).decisions:
            del self._by_operation[decision.operation]

    def _apply_outcome(self, operation: _OfTenant, outcome: OperationOutcome) -> None:
        found = self._by_operation.get(operation)
        if found is None:  # it took the shorter way, or its control was too long ago
            self._early[operation] = outcome
            if len(self._early) > _MAX_EARLY:
                self._early.popitem(last=False)
            return
        policy, decision = found
        if decision.outcome is None or decision.outcome.status == "accepted":
            if outcome.status != "accepted":
                policy.outcomes[outcome.status] += 1
            decision.outcome = outcome
