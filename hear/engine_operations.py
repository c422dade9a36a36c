"""The engine's side of the protocol, without I/O: what becomes of each control that comes in.

``EngineOperations`` checks a control, keeps it until its request comes, arbitrates it against those
of other policies, and makes sure that each operation is answered by exactly one terminal outcome.
It calls no engine: it returns ``Actions`` that tell its driver (``hear.engines.worker.loop``) what
to hand to the backend and what to answer, and is told the results.

Theory of operation. An operation that is open here is at one of four stages
(``hear.operation.STAGES``), from each of which it may end:

    admitted -> kept -> applying -> in_effect
    admitted ---------> applying

=====================  ===========================================================================
who calls              what moves
=====================  ===========================================================================
``receive``            a control is refused, or admitted, and then kept (its request is not here)
                       or applied; ``Cancel`` and ``Withdraw`` end others of the same sender
``request_arrived``    what was kept for the request is applied
``request_ended``      what is open for the request ends
``applied``            the backend's result: it ends, is under way, or is in effect
``ended``              the backend ends what it had accepted: a lease that expired, or yielded
``expire``             what is past its deadline ends, unless it is in effect
``shut``               all ends: the engine has restarted, or stops
=====================  ===========================================================================

Invariants:

1. What is in ``_open`` has no terminal outcome, and what leaves it has had one, by ``_end`` alone.
   The outcome is remembered, and a control that is delivered again is answered with it.
2. An operation is in ``_kept`` as long as its stage is kept. The backend knows nothing of it but
   by ``Actions.expect``.
3. An operation is handed to the backend once at most, with ``Actions.apply``. If it is ended by
   anything but the backend and ``shut`` after that, ``Actions.revert`` comes with its outcome.
4. On each claim key one operation holds the claim at most. It is being applied, or in effect, or
   has completed and what it did to its request stands until that ends.
5. Whatever is not in effect ends by its deadline: it has a timer from when it is kept or handed
   over. What is in effect ends by its lease or with its request, as the backend says.
6. ``Actions`` are carried out in the order of their fields: what gives way is reverted before
   anything is told of it, and told before what takes its place is applied.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from hear.arbitration import Arbiter, claim_key_of
from hear.codec import KINDS, open_body
from hear.errors import RemoteProtocolError
from hear.interfaces import ApplyResult, OperationEnded
from hear.kept import Kept
from hear.messages import (
    AXES,
    Cancel,
    Control,
    Envelope,
    Key,
    OperationOutcome,
    OperationStatus,
    Release,
    Withdraw,
)
from hear.operation import Operation
from hear.yielding import Preferences

DEFAULT_DEADLINE_S = 60.0
MAX_DEADLINE_S = 3600.0
GONE_S = 5.0
"""How long a control fails at once since its request has ended; later ones wait for a request.

Long enough for a control that was on its way when the request ended, and no longer: a harness that
starts again may describe a request with the same id, whose controls come before it does.
"""

MAX_OPEN_BYTES = 1 << 26
"""Most that the controls without an end take, about; beyond it new ones are ``overloaded``."""

MAX_REMEMBERED_BYTES = 1 << 26
"""Most that each of the tables of what has ended and of what was seen takes, about."""

_OPERATION_BYTES = 1_000  # objects around what a control says, about
_SPARE_TIMERS = 1_024
_CONTEXT_AXES = ("retention", "placement")


@dataclass(frozen=True, slots=True)
class KeyedOutcome:
    """An outcome to publish, and what it is about."""

    key: Key
    outcome: OperationOutcome


@dataclass(slots=True)
class Actions:
    """What the driver has to do, in this order."""

    expect: list[Operation] = field(default_factory=list)
    revert: list[Operation] = field(default_factory=list)
    outcomes: list[KeyedOutcome] = field(default_factory=list)
    apply: list[Operation] = field(default_factory=list)


class EngineOperations:
    """Takes in the controls of one tenant for one engine."""

    def __init__(
        self,
        *,
        engine: str,
        controls: Iterable[str],
        at_submission: Iterable[str] = (),
        ranks: dict[str, int] | None = None,
        epoch: int = 1,
        ended: Iterable["KeyedOutcome"] = (),
        max_open: int = 65_536,
        remember: int = 65_536,
        max_open_bytes: int = MAX_OPEN_BYTES,
    ) -> None:
        """``controls`` are the kinds that the engine supports; ``remember`` bounds memory.

        ``at_submission`` are those that act on a request only as it arrives.

        ``epoch`` is the incarnation of the engine; whoever restarts it sets it anew. ``ended`` is
        how operations ended in earlier ones, oldest first.
        """
        self.engine = engine
        self.epoch = epoch
        self._at_submission = frozenset(at_submission)
        self._controls = frozenset(controls) | self._at_submission | {"cancel", "withdraw"}
        self._arbiter = Arbiter(ranks)
        self._preferences = Preferences(ranks)
        self._max_open = max_open
        self._remember = remember
        self._max_open_bytes = max_open_bytes
        self._open: dict[str, Operation] = {}
        self._sizes: dict[str, int] = {}  # of those, in bytes
        self._open_bytes = 0
        self._ended: Kept[KeyedOutcome] = Kept(max_entries=remember, max_bytes=MAX_REMEMBERED_BYTES)
        for answer in ended:
            if answer.key.operation is not None:
                self._remember_end(answer.key.operation, answer)
        self._kept: dict[str, dict[str, Operation]] = {}
        self._requests: dict[str, set[str]] = {}
        # A control on a request is compared with the version of that request alone: a context may
        # fork, and requests on several of its versions may be served at once.
        self._served_versions: dict[str, int] = {}
        self._gone: OrderedDict[str, float] = OrderedDict()  # and when; the latest stand last
        self._versions: Kept[int] = Kept(max_entries=remember, max_bytes=MAX_REMEMBERED_BYTES)
        self._timers: list[tuple[float, str]] = []

    @property
    def open_operations(self) -> list[Operation]:
        """Operations without a terminal outcome, oldest first."""
        return list(self._open.values())

    # -- what comes off the bus ---------------------------------------------------------------

    def receive(self, envelope: Envelope, now: float) -> Actions:
        """Take in one control."""
        actions = Actions()
        key = envelope.key
        if not key.operation:
            return actions  # nobody could be told; a control without an operation is no control
        if (ended := self._ended.get(key.operation)) is not None:
            actions.outcomes.append(ended)
            return actions
        if (known := self._open.get(key.operation)) is not None:
            if known.phase == "accepted":
                actions.outcomes.append(self._outcome(known, "accepted"))
            return actions
        try:
            control = open_body(envelope)
        except RemoteProtocolError as error:
            self._refuse(actions, envelope, "rejected", "malformed", str(error))
            return actions
        if not isinstance(control, Control) or envelope.kind not in self._controls:
            known_kind = "this engine does not offer it" if envelope.kind in KINDS else "unknown"
            self._refuse(actions, envelope, "unsupported", "unsupported_control", known_kind)
            return actions
        meant_for = control.engine_epoch
        if meant_for is not None and meant_for < self.epoch:
            detail = f"meant for epoch {meant_for}, this is {self.epoch}"
            self._refuse(actions, envelope, "failed", "engine_restarted", detail)
            return actions
        deadline = control.deadline_s
        if deadline is None:
            deadline = envelope.time_s + DEFAULT_DEADLINE_S
        if not deadline > now:  # which a NaN is not either
            detail = f"deadline was {deadline:.3f} s, now is {now:.3f} s"
            self._refuse(actions, envelope, "rejected", "deadline_passed", detail)
            return actions
        operation = Operation(
            id=key.operation,
            control=control,
            key=key,
            source=envelope.source,
            submitted_s=now,
            deadline_s=min(deadline, now + MAX_DEADLINE_S),
            tenant=envelope.tenant,
        )
        self._open[operation.id] = operation
        size = self._sizes[operation.id] = _OPERATION_BYTES + len(envelope.body) + _letters(key)
        self._open_bytes += size
        self._admit(actions, operation)
        return actions

    def _admit(self, actions: Actions, operation: Operation) -> None:
        control = operation.control
        if refusal := self._check(operation):
            self._end(actions, operation, "rejected", *refusal)
        elif isinstance(control, Cancel):
            self._cancel(actions, operation, control)
        elif isinstance(control, Withdraw):
            self._withdraw(actions, operation)
        elif (limit := self._limit()) and not self._make_room(actions, operation):
            self._end(actions, operation, "rejected", "overloaded", limit)
        else:
            self._preferences.add(operation)
            self._take(actions, operation)

    def _limit(self) -> str:
        """Which limit is passed; empty if none is."""
        if len(self._open) > self._max_open:
            return f"{self._max_open} operations are open"
        if self._open_bytes > self._max_open_bytes:
            return f"the open operations take {self._max_open_bytes} bytes"
        return ""

    def _make_room(self, actions: Actions, operation: Operation) -> bool:
        """Whether an operation may be open at the limit: the least worthy preference gives way.

        No room is needed where one of the two will end, since another operation holds the claim.
        Nor does a requirement on a request that is here need any: of those there are no more than
        requests are served.
        """
        claim_key = claim_key_of(AXES[type(operation.control)], operation.key)
        holder = None if claim_key is None else self._arbiter.holder(claim_key)
        if holder is not None and holder.id in self._open:
            return True
        yielding = self._preferences.least(operation.control, operation.source)
        if yielding is not None:
            self._stop(actions, yielding, "overloaded", operation.id)
            return True
        is_required = operation.control.force == "requirement"
        return is_required and operation.key.request in self._requests

    def _take(self, actions: Actions, operation: Operation) -> None:
        control, key = operation.control, operation.key
        if AXES[type(control)] not in _CONTEXT_AXES and key.request not in self._requests:
            assert key.request is not None
            if self._has_gone(key.request, operation.submitted_s):
                self._accept(operation)
                self._end(actions, operation, "failed", "request_gone", "the request has ended")
            else:
                # Accepted, since it will be acted on, and told so, since that may take a while.
                self._accept(operation)
                actions.outcomes.append(self._outcome(operation, "accepted"))
                operation.enter("kept")
                self._kept.setdefault(key.request, {})[operation.id] = operation
                self._arm(operation)
                actions.expect.append(operation)
        elif self._acts_at_submission(operation):
            detail = "it acts only if it comes before its request"
            self._end(actions, operation, "rejected", "already_submitted", detail)
        else:
            self._arbitrate(actions, operation)

    def _acts_at_submission(self, operation: Operation) -> bool:
        return str(operation.control.__struct_config__.tag) in self._at_submission

    def _check(self, operation: Operation) -> tuple[str, str] | None:
        """The reason code and detail for which a control is turned down at the door."""
        control, key = operation.control, operation.key
        axis = AXES[type(control)]
        if key.engine not in (None, self.engine):
            return "wrong_engine", f"this is {self.engine}, the key names {key.engine}"
        if axis in _CONTEXT_AXES:
            if key.context is None:
                return "malformed", "the key names no context"
        elif axis != "none" and key.request is None:
            return "malformed", "the key names no request"
        if axis in _CONTEXT_AXES:
            if stale := self._stale(key, self._versions.get(key.context or "")):
                return "stale_version", stale
            self._saw_version(key)
        elif stale := self._stale(key, self._served_versions.get(key.request or "")):
            return "stale_version", stale
        return None

    @staticmethod
    def _stale(key: Key, seen: int | None) -> str:
        """What is wrong with the version that a control names; empty if nothing is."""
        named = key.context_version
        if seen is None or named is None or named >= seen:
            return ""
        return f"version {named}, seen {seen}"

    def _arbitrate(self, actions: Actions, operation: Operation) -> None:
        claim_key = claim_key_of(AXES[type(operation.control)], operation.key)
        if claim_key is not None:
            claim = self._arbiter.claim(claim_key, operation)
            if not claim.wins:
                holder = self._arbiter.holder(claim_key)
                by = holder.source if holder else ""
                if operation.phase == "accepted":  # it was kept for its request before
                    self._end(actions, operation, "failed", "outranked", by)
                else:
                    self._end(actions, operation, "rejected", "outranked", by)
                return
            if claim.displaced is not None and claim.displaced.id in self._open:
                self._displace(actions, claim.displaced, operation)
        if claim_key is not None and claim_key[0] not in _CONTEXT_AXES:
            self._requests[claim_key[1]].add(operation.id)
        self._apply(actions, operation)

    @staticmethod
    def _apply(actions: Actions, operation: Operation) -> None:
        operation.enter("applying")
        actions.apply.append(operation)

    def _displace(self, actions: Actions, old: Operation, new: Operation) -> None:
        if old in actions.apply:  # both were kept for the request that now came
            actions.apply.remove(old)
        else:
            actions.revert.append(old)
        self._accept(old)
        if old.source != new.source:
            self._end(actions, old, "failed", "outranked", new.source)
        elif old.stage == "in_effect":
            reason = "released" if isinstance(new.control, Release) else "renewed"
            self._end(actions, old, "completed", reason, new.id)
        else:
            self._end(actions, old, "failed", "replaced", new.id)  # its effect never took hold

    def _cancel(self, actions: Actions, operation: Operation, control: Cancel) -> None:
        target = self._open.get(control.target)
        if target is None:
            reason = "already_terminal" if control.target in self._ended else "unknown_operation"
            self._end(actions, operation, "rejected", reason, control.target)
        elif target.source != operation.source or target is operation:
            self._end(actions, operation, "rejected", "not_yours", control.target)
        else:
            self._stop(actions, target, "cancelled", operation.id)
            self._apply(actions, operation)  # it is completed when what was reverted is gone

    def _withdraw(self, actions: Actions, operation: Operation) -> None:
        source = operation.source
        for claim_key, claim in self._arbiter.of_source(source):
            self._arbiter.drop(claim_key, claim)
            if claim.id not in self._open:
                actions.revert.append(claim)  # it completed, and its effect stands
        for target in [op for op in self._open.values() if op.source == source]:
            if target is not operation:
                self._stop(actions, target, "withdrawn", operation.id)
        self._apply(actions, operation)

    def _stop(self, actions: Actions, target: Operation, reason: str, detail: str) -> None:
        if not self._unkeep(target):
            actions.revert.append(target)
            self._drop_claim(target)
        self._accept(target)
        self._end(actions, target, "failed", reason, detail)

    # -- what the driver tells ----------------------------------------------------------------

    def applied(self, operation: Operation, result: ApplyResult) -> Actions:
        """The backend has been handed an operation and said ``result``."""
        actions = Actions()
        if operation.id not in self._open:
            return actions
        if result.status in ("rejected", "unsupported") and operation.phase == "accepted":
            result = result._replace(status="failed")
        if result.status in ("completed", "failed", "accepted"):
            already = operation.phase == "accepted"
            self._accept(operation)
            if result.status == "accepted":
                if not already:
                    actions.outcomes.append(self._outcome(operation, "accepted"))
                if result.standing and operation.stage != "in_effect":
                    operation.enter("in_effect")
                elif not result.standing:
                    self._arm(operation)
                return actions
        self._end(actions, operation, result.status, result.reason, result.detail, result.fallback)
        # What is done to a request stands until the request ends; all else has left nothing that
        # a later control would have to respect, nor does what nobody can change or undo any more.
        stands = result.status == "completed" and not self._acts_at_submission(operation)
        if not stands or AXES[type(operation.control)] in _CONTEXT_AXES:
            self._drop_claim(operation)
        return actions

    def handed_over(self, operation: Operation) -> None:
        """The backend has an operation and will say ``applied`` later, in time or not."""
        self._arm(operation)

    def applied_later(self, operation_id: str, result: ApplyResult) -> Actions:
        """The result on an operation that was handed over; of no use if it has ended since."""
        operation = self._open.get(operation_id)
        return Actions() if operation is None else self.applied(operation, result)

    def ended(self, event: OperationEnded) -> Actions:
        """The backend reports the end of an operation that it had accepted."""
        actions = Actions()
        operation = self._open.get(event.operation)
        if operation is not None:
            outcome = event.outcome
            self._accept(operation)
            self._end(
                actions, operation, outcome.status, outcome.reason, outcome.detail, outcome.fallback
            )
            self._drop_claim(operation)
        return actions

    def request_arrived(self, key: Key, now: float) -> Actions:
        """The engine has a new request; what was kept for it can act."""
        actions = Actions()
        assert key.request is not None
        self._requests.setdefault(key.request, set())
        if key.context is not None and key.context_version is not None:
            # Also where it is smaller: a harness that has started again counts from 1.
            self._versions.keep(key.context, key.context_version, 0.0)
        if key.context_version is not None:
            self._served_versions[key.request] = key.context_version
        for operation in self._kept.pop(key.request, {}).values():
            if operation.deadline_s <= now:
                self._end(actions, operation, "failed", "deadline", "its request came too late")
            elif stale := self._stale(operation.key, key.context_version):
                self._end(actions, operation, "failed", "stale_version", stale)
            else:
                self._arbitrate(actions, operation)
        return actions

    def request_ended(self, request: str, now: float) -> Actions:
        """A request has left the engine; what is still open for it ends.

        Controls that name it fail at once for ``GONE_S`` from now on; later its name may be that
        of a new request, as where a harness has started again and counts from 1.
        """
        actions = Actions()
        self._served_versions.pop(request, None)
        open_ones = [self._open[id] for id in sorted(self._requests.pop(request, ()))]
        for operation in [*open_ones, *self._kept.get(request, {}).values()]:
            self._stop(actions, operation, "request_gone", "the request has ended")
        for axis in set(AXES.values()):
            if axis not in _CONTEXT_AXES:
                self._arbiter.drop((axis, request))
        self._gone[request] = now
        self._gone.move_to_end(request)
        if len(self._gone) > self._remember:
            self._gone.popitem(last=False)
        self._forget_gone(now)
        return actions

    def _has_gone(self, request: str, now: float) -> bool:
        self._forget_gone(now)
        return request in self._gone

    def _forget_gone(self, now: float) -> None:
        while self._gone and next(iter(self._gone.values())) < now - GONE_S:
            self._gone.popitem(last=False)

    def expire(self, now: float) -> Actions:
        """End what has passed its deadline."""
        actions = Actions()
        while self._timers and self._timers[0][0] <= now:
            operation = self._open.get(heappop(self._timers)[1])
            if operation is None:
                continue
            if self._unkeep(operation):
                self._end(actions, operation, "failed", "deadline", "its request did not come")
            elif operation.stage != "in_effect":
                self._stop(actions, operation, "deadline", "the effect was not there in time")
        return actions

    def next_expiry(self) -> float | None:
        """When ``expire`` has to be called next."""
        while self._timers and self._timers[0][1] not in self._open:
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def shut(self, reason: str) -> Actions:
        """End everything that is open, as the engine restarts or stops. Forgets all requests."""
        actions = Actions()
        for operation in list(self._open.values()):
            self._accept(operation)
            self._end(actions, operation, "failed", reason)
        self._kept.clear()
        self._requests.clear()
        self._served_versions.clear()
        self._timers.clear()
        self._versions = Kept(max_entries=self._remember, max_bytes=MAX_REMEMBERED_BYTES)
        self._arbiter = Arbiter(self._arbiter.ranks)
        self._preferences = Preferences(self._arbiter.ranks)
        return actions

    # -- pieces -------------------------------------------------------------------------------

    def _saw_version(self, key: Key) -> None:
        if key.context is not None and key.context_version is not None:
            seen = max(self._versions.get(key.context, 0), key.context_version)
            self._versions.keep(key.context, seen, 0.0)

    def _arm(self, operation: Operation) -> None:
        heappush(self._timers, (operation.deadline_s, operation.id))
        # Timers of what has ended stay until they are due, which may be in an hour.
        if len(self._timers) > 2 * len(self._open) + _SPARE_TIMERS:
            self._timers = sorted({timer for timer in self._timers if timer[1] in self._open})

    def _unkeep(self, operation: Operation) -> bool:
        """Whether an operation was kept for its request, and so never handed out."""
        if operation.stage != "kept":
            return False
        request = operation.key.request or ""
        kept = self._kept[request]
        del kept[operation.id]
        if not kept:
            del self._kept[request]
        return True

    def _drop_claim(self, operation: Operation) -> None:
        if (claim_key := claim_key_of(AXES[type(operation.control)], operation.key)) is not None:
            self._arbiter.drop(claim_key, operation)

    @staticmethod
    def _accept(operation: Operation) -> None:
        if operation.phase == "submitted":
            operation.advance("accepted")

    def _outcome(
        self,
        operation: Operation,
        status: OperationStatus,
        reason: str = "",
        detail: str = "",
        fallback: str | None = None,
    ) -> KeyedOutcome:
        kind = str(operation.control.__struct_config__.tag)
        outcome = OperationOutcome(
            status=status, control=kind, reason=reason, detail=detail, fallback=fallback
        )
        return KeyedOutcome(operation.key, outcome)

    def _end(
        self,
        actions: Actions,
        operation: Operation,
        status: OperationStatus,
        reason: str = "",
        detail: str = "",
        fallback: str | None = None,
    ) -> None:
        operation.advance(status)
        del self._open[operation.id]
        self._open_bytes -= self._sizes.pop(operation.id)
        if (of_request := self._requests.get(operation.key.request or "")) is not None:
            of_request.discard(operation.id)
        answer = self._outcome(operation, status, reason, detail, fallback)
        self._remember_end(operation.id, answer)
        actions.outcomes.append(answer)

    def _refuse(
        self,
        actions: Actions,
        envelope: Envelope,
        status: OperationStatus,
        reason: str,
        detail: str,
    ) -> None:
        outcome = OperationOutcome(
            status=status, control=envelope.kind, reason=reason, detail=detail
        )
        answer = KeyedOutcome(envelope.key, outcome)
        assert envelope.key.operation is not None
        self._remember_end(envelope.key.operation, answer)
        actions.outcomes.append(answer)

    def _remember_end(self, operation_id: str, answer: KeyedOutcome) -> None:
        outcome = answer.outcome
        size = _OPERATION_BYTES + _letters(answer.key) + len(outcome.detail)
        self._ended.keep(operation_id, answer, 0.0, size_bytes=size)


def _letters(key: Key) -> int:
    """How many letters the names of a key have."""
    names = (key.request, key.context, key.engine, key.operation, key.workflow)
    return sum(len(name or "") for name in names)
