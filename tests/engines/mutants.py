"""Ways to break an engine or its worker, each with the rules that have to notice.

A rule that nobody can break checks nothing.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hear import engine_operations
from hear.app.control_reader import ControlReader
from hear.arbitration import Arbiter, ClaimResult
from hear.codec import KINDS, encode_body, open_body
from hear.engine_operations import Actions, EngineOperations
from hear.engines.kv.leases import LeaseBook
from hear.engines.kv.retention import Retention
from hear.engines.kv.shared_prefixes import SharedPrefixes
from hear.engines.simulated.backend import SimulatedEngine
from hear.engines.simulated.controls import Controls
from hear.engines.simulated.kv_cache import KvCache
from hear.engines.simulated.placement import Placement
from hear.engines.simulated.reporting import outcome_of
from hear.engines.simulated.request import SimRequest
from hear.engines.simulated.scheduler import Scheduler
from hear.engines.simulated.tenants import Tenants
from hear.engines.simulated.waiting import WaitingQueue
from hear.engines.worker.loop import EngineWorker
from hear.engines.worker.tenant_session import TenantSession
from hear.errors import RemoteProtocolError
from hear.interfaces import ApplyResult
from hear.messages import (
    DEFAULT_TENANT,
    BlockChange,
    BlocksStored,
    Cancel,
    CapabilitiesReported,
    Control,
    Envelope,
    Hold,
    Key,
    Message,
    OperationOutcome,
    QueueSnapshot,
    RequestOutcome,
    ResidencySnapshot,
    Retain,
)
from hear.operation import Operation

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[Mutant, tuple[str, ...]]] = {}
DONE = ApplyResult("completed")


def breaks(*rules: str) -> Callable[[Mutant], Mutant]:
    """Enter a mutant into the list, with the rules that it breaks."""

    def enter(mutant: Mutant) -> Mutant:
        MUTANTS[mutant.__name__] = mutant, rules
        return mutant

    return enter


def _says_done(method: str, of: type = Controls) -> Mutant:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(of, method, lambda self, operation, now: DONE)

    return mutate


MUTANTS |= {
    "prioritise_in_words_only": (
        _says_done("_prioritise"),
        ("HEAR-EFFECT-1", "HEAR-EARLY-2", "HEAR-ONCE-4", "HEAR-WITHDRAW-2"),
    ),
    "bound_wait_in_words_only": (_says_done("_bound_wait"), ("HEAR-EFFECT-2", "HEAR-LIFE-3")),
    "hold_in_words_only": (
        _says_done("_hold"),
        ("HEAR-EFFECT-3", "HEAR-EARLY-3", "HEAR-FORCE-3", "HEAR-CLAIM-6"),
    ),
    "admit_in_words_only": (_says_done("_admit"), ("HEAR-EFFECT-4",)),
    "route_in_words_only": (_says_done("_route"), ("HEAR-EFFECT-8", "HEAR-FORCE-4")),
    "release_in_words_only": (_says_done("release", Retention), ("HEAR-LEASE-9",)),
    "bring_in_words_only": (
        _says_done("_bring"),
        ("HEAR-EFFECT-5", "HEAR-EFFECT-6", "HEAR-EFFECT-7"),
    ),
}


@breaks("HEAR-FORCE-1", "HEAR-EFFECT-2", "HEAR-WITHDRAW-3", "HEAR-CLAIM-5")
def nobody_is_ever_protected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "promote", lambda self, now: [])
    patch.setattr(WaitingQueue, "next_release", lambda self: None)


@breaks("HEAR-LIFE-10")
def a_bound_is_kept_under_the_id_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "__contains__", lambda self, r: r.ref in self._requests)


@breaks("HEAR-EFFECT-12")
def a_bound_is_for_those_that_wait(patch: pytest.MonkeyPatch) -> None:
    bound_wait = Controls._bound_wait

    def mutated(self: Controls, operation: Operation, now: float) -> ApplyResult:
        waiting = self._waiting(operation)
        return waiting if isinstance(waiting, ApplyResult) else bound_wait(self, operation, now)

    patch.setattr(Controls, "_bound_wait", mutated)


@breaks("HEAR-FORCE-2")
def holds_outlast_bounds(patch: pytest.MonkeyPatch) -> None:
    hold = WaitingQueue.hold

    def mutated(self: WaitingQueue, request: SimRequest, until: float, **_: bool) -> None:
        hold(self, request, until, required=True)
        request.bound_required = False

    bound = WaitingQueue.bound
    patch.setattr(WaitingQueue, "hold", mutated)
    patch.setattr(
        WaitingQueue, "bound", lambda self, request, s, required=False: bound(self, request, s)
    )


@breaks("HEAR-FORCE-2", "HEAR-EFFECT-3")
def nobody_wakes_for_the_end_of_a_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "next_release", lambda self: None)


@breaks("HEAR-FORCE-3")
def every_bound_counts_as_required(patch: pytest.MonkeyPatch) -> None:
    _bounds_count_as(patch, required=True)


def _bounds_count_as(patch: pytest.MonkeyPatch, *, required: bool) -> None:
    bound = WaitingQueue.bound

    def mutated(
        self: WaitingQueue, request: SimRequest, max_wait_s: float | None, **_: bool
    ) -> None:
        bound(self, request, max_wait_s, required=required)

    patch.setattr(WaitingQueue, "bound", mutated)


@breaks("HEAR-FORCE-5")
def fallbacks_are_not_named(patch: pytest.MonkeyPatch) -> None:
    apply = Controls.apply
    patch.setattr(
        Controls, "apply", lambda self, op, now: apply(self, op, now)._replace(fallback=None)
    )


@breaks("HEAR-EFFECT-7")
def place_leaves_the_blocks_where_they_were(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placement, "_copied", lambda self, job, now: DONE)


@breaks("HEAR-EFFECT-9")
def the_mode_is_another(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Controls, operation: Operation, now: float) -> ApplyResult:
        self._requests[operation.tenant, operation.key.request or ""].mode = "another"
        return DONE

    patch.setattr(Controls, "_configure", mutated)


@breaks("HEAR-EFFECT-10", "HEAR-WITHDRAW-2", "HEAR-WITHDRAW-3", "HEAR-LEASE-10", "HEAR-LIFE-6")
def nothing_is_reverted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Controls, "revert", lambda self, operation, now: None)


@breaks("HEAR-EFFECT-11")
def anybody_may_cancel(patch: pytest.MonkeyPatch) -> None:
    cancel = EngineOperations._cancel

    def mutated(
        self: EngineOperations, actions: Actions, operation: Operation, control: Cancel
    ) -> None:
        if (target := self._open.get(control.target)) is not None:
            operation.source = target.source
        cancel(self, actions, operation, control)

    patch.setattr(EngineOperations, "_cancel", mutated)


@breaks("HEAR-CLAIM-1", "HEAR-CLAIM-2", "HEAR-CLAIM-4", "HEAR-CLAIM-6")
def all_weigh_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arbiter, "_weight", lambda self, operation: (False, 0))


@breaks("HEAR-CLAIM-3", "HEAR-CLAIM-5", "HEAR-LEASE-4")
def the_first_prevails(patch: pytest.MonkeyPatch) -> None:
    claim = Arbiter.claim

    def mutated(self: Arbiter, claim_key: Any, operation: Operation) -> ClaimResult:
        return (
            ClaimResult(False, None)
            if self.holder(claim_key)
            else claim(self, claim_key, operation)
        )

    patch.setattr(Arbiter, "claim", mutated)


@breaks("HEAR-CLAIM-7")
def what_was_refused_stays_in_the_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineOperations, "_drop_claim", lambda self, operation: None)


@breaks("HEAR-WITHDRAW-1", "HEAR-WITHDRAW-2", "HEAR-WITHDRAW-3")
def withdraw_in_words_only(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: EngineOperations, actions: Actions, operation: Operation) -> None:
        self._accept(operation)
        self._end(actions, operation, "completed")

    patch.setattr(EngineOperations, "_withdraw", mutated)


# -- leases ---------------------------------------------------------------------------------------


@breaks("HEAR-LEASE-1")
def leases_rank_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseBook, "rank", lambda self, block: None)


@breaks("HEAR-EFFECT-13")
def what_is_being_computed_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placement, "_is_computing", lambda self, job: False)


@breaks("HEAR-LEASE-12")
def what_runs_is_released_in_words_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Retention, "_let_go", lambda self, name: True)


@breaks("HEAR-LEASE-13")
def what_waits_is_released_before_it_is_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Retention, "arrived", lambda self, name: None)


@breaks("HEAR-LEASE-14")
def a_lease_on_nothing_stands_for_its_time(patch: pytest.MonkeyPatch) -> None:
    retain = Retention.retain

    def kept(self: Retention, operation: Operation, now: float) -> ApplyResult:
        result = retain(self, operation, now)
        return ApplyResult("accepted", standing=True) if result.reason == "no_blocks" else result

    patch.setattr(Retention, "retain", kept)


@breaks("HEAR-LEASE-15")
def what_is_shared_is_released_too(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedPrefixes, "shared", lambda self, context, blocks: 0)


@breaks("HEAR-LEASE-2")
def scores_count_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("hear.engines.kv.leases.log", lambda score: 0.0)


@breaks("HEAR-LEASE-3", "HEAR-LEASE-4", "HEAR-EFFECT-11", "HEAR-CLAIM-7")
def leases_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseBook, "expired", lambda self, now: [])
    patch.setattr(LeaseBook, "next_expiry", lambda self: None)


@breaks("HEAR-LEASE-5")
def leases_yield_in_silence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Retention, "lost", lambda self, block: None)


@breaks("HEAR-LEASE-6")
def leased_blocks_are_never_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        KvCache,
        "num_allocatable",
        property(lambda self: self._num_plain_free + len(self._free._plain)),
    )


@breaks("HEAR-LEASE-7")
def leases_may_be_longer_than_said(patch: pytest.MonkeyPatch) -> None:
    honest = SimulatedEngine.capabilities

    def mutated(self: SimulatedEngine) -> CapabilitiesReported:
        return msgspec.structs.replace(honest(self), max_lease_s=1000.0)

    patch.setattr(SimulatedEngine, "capabilities", mutated)


@breaks("HEAR-LEASE-8")
def a_required_lease_is_promised(patch: pytest.MonkeyPatch) -> None:
    retain = Retention.retain

    def mutated(self: Retention, operation: Operation, now: float) -> ApplyResult:
        operation.control = msgspec.structs.replace(operation.control, force="preference")
        return retain(self, operation, now)

    patch.setattr(Retention, "retain", mutated)


@breaks("HEAR-LEASE-11")
def what_is_unknown_is_leased(patch: pytest.MonkeyPatch) -> None:
    blocks_of = Retention.blocks_of
    patch.setattr(Retention, "blocks_of", lambda self, op: blocks_of(self, op) or ())


@breaks("HEAR-LEASE-9")
def a_lease_outlives_its_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineOperations, "_displace", lambda self, actions, old, new: None)
    patch.setattr(Retention, "release", lambda self, operation, now: DONE)


# -- the life of a control ------------------------------------------------------------------------


@breaks("HEAR-LIFE-1", "HEAR-EFFECT-8")
def what_is_claimed_is_unsupported(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Controls, "_route", lambda self, op, now: ApplyResult("unsupported"))


@breaks("HEAR-LIFE-1", "HEAR-ONCE-3")
def an_end_is_followed_by_another(patch: pytest.MonkeyPatch) -> None:
    publish = TenantSession._publish

    def mutated(self: TenantSession, message: Message, key: Key) -> None:
        publish(self, message, key)
        if isinstance(message, OperationOutcome) and message.status == "completed":
            publish(self, msgspec.structs.replace(message, status="failed"), key)

    patch.setattr(TenantSession, "_publish", mutated)


@breaks("HEAR-REQUEST-1")
def the_end_of_a_request_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    publish = TenantSession._publish

    def mutated(self: TenantSession, message: Message, key: Key) -> None:
        publish(self, message, key)
        if isinstance(message, RequestOutcome) and message.status == "failed":
            publish(self, message, key)

    patch.setattr(TenantSession, "_publish", mutated)


@breaks("HEAR-LIFE-2", "HEAR-LIFE-3")
def the_end_of_a_request_goes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineOperations, "request_ended", lambda self, request, now: Actions())


@breaks("HEAR-LIFE-4", "HEAR-LIFE-6")
def deadlines_pass_unnoticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineOperations, "expire", lambda self, now: Actions())
    patch.setattr(EngineOperations, "next_expiry", lambda self: None)


@breaks("HEAR-LIFE-5")
def a_deadline_that_has_passed_is_overlooked(patch: pytest.MonkeyPatch) -> None:
    receive = EngineOperations.receive

    def mutated(self: EngineOperations, envelope: Envelope, now: float) -> Actions:
        control = open_body(envelope) if envelope.kind in KINDS else None
        if isinstance(control, Control):
            control = msgspec.structs.replace(control, deadline_s=None)
            envelope = msgspec.structs.replace(envelope, body=encode_body(control))
        return receive(self, envelope, now)

    patch.setattr(EngineOperations, "receive", mutated)


@breaks("HEAR-LIFE-7", "HEAR-LIFE-8", "HEAR-ONCE-5")
def nobody_is_told_of_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineOperations, "shut", lambda self, reason: Actions())


@breaks("HEAR-LIFE-8", "HEAR-LIFE-9")
def a_restart_goes_on_in_the_old_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("hear.delivery.Sequencer.restart", lambda self: None)


@breaks("HEAR-LIFE-8")
def clients_wait_for_a_crashed_engine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedEngine, "_fail_all", lambda self, reason: None)


@breaks("HEAR-LIFE-9", "HEAR-STATE-3")
def the_worker_does_not_say_what_it_has(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TenantSession, "introduce", lambda self: None)
    patch.setattr(TenantSession, "_residency_snapshot", lambda self: [])


@breaks("HEAR-DATA-1")
def the_engine_needs_the_bus(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineWorker, "_send", lambda self, envelope: self._bus.publish(envelope))


@breaks("HEAR-CAPABILITY-1")
def an_unknown_kind_is_passed_over(patch: pytest.MonkeyPatch) -> None:
    receive = EngineOperations.receive
    patch.setattr(
        EngineOperations,
        "receive",
        lambda self, e, now: receive(self, e, now) if e.kind in KINDS else Actions(),
    )


@breaks("HEAR-CAPABILITY-2")
def an_unknown_field_is_an_error(patch: pytest.MonkeyPatch) -> None:
    def mutated(envelope: Envelope) -> Message | None:
        if b"as_of" in bytes(envelope.body):
            raise RemoteProtocolError("unknown field as_of")
        return open_body(envelope)

    patch.setattr(engine_operations, "open_body", mutated)


@breaks("HEAR-CAPABILITY-3")
def hashes_are_taken_as_they_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Controls, "apply", lambda self, op, now: self._handlers[type(op.control)](op, now)
    )


@breaks("HEAR-ONCE-1", "HEAR-ONCE-3", "HEAR-ONCE-4", "HEAR-ONCE-5")
def operations_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    receive = EngineOperations.receive

    def mutated(self: EngineOperations, envelope: Envelope, now: float) -> Actions:
        self._open.pop(envelope.key.operation or "", None)
        self._ended.drop(envelope.key.operation or "")
        return receive(self, envelope, now)

    patch.setattr(EngineOperations, "receive", mutated)


@breaks("HEAR-ONCE-2")
def what_comes_again_is_passed_over(patch: pytest.MonkeyPatch) -> None:
    receive = EngineOperations.receive
    patch.setattr(
        EngineOperations,
        "receive",
        lambda self, e, now: Actions() if e.key.operation in self._open else receive(self, e, now),
    )


@breaks("HEAR-EARLY-1", "HEAR-EARLY-2", "HEAR-EARLY-3", "HEAR-LIFE-4", "HEAR-LIFE-7")
def nothing_is_kept_for_a_request(patch: pytest.MonkeyPatch) -> None:
    admit = EngineOperations._admit

    def mutated(self: EngineOperations, actions: Actions, operation: Operation) -> None:
        request = operation.key.request
        if request is not None and request not in self._requests:
            self._end(actions, operation, "rejected", "unknown_request")
        else:
            admit(self, actions, operation)

    patch.setattr(EngineOperations, "_admit", mutated)


@breaks("HEAR-VERSION-1")
def versions_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineOperations, "_saw_version", lambda self, key: None)


@breaks("HEAR-VERSION-2")
def a_sibling_makes_a_request_stale(patch: pytest.MonkeyPatch) -> None:
    check = EngineOperations._check

    def mutated(self: EngineOperations, operation: Operation) -> tuple[str, str] | None:
        key = operation.key
        seen = self._versions.get(key.context or "", 0)
        if key.request is not None and (key.context_version or seen) < seen:
            return "stale_version", ""
        return check(self, operation)

    patch.setattr(EngineOperations, "_check", mutated)


# -- tenants --------------------------------------------------------------------------------------


@breaks("HEAR-TENANT-1", "HEAR-TENANT-2")
def all_tenants_share_a_session(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineWorker, "_session", lambda self, tenant: self._sessions[DEFAULT_TENANT])


@breaks("HEAR-TENANT-1")
def everybody_is_told_the_whole_queue(patch: pytest.MonkeyPatch) -> None:
    queue = SimulatedEngine.queue

    def mutated(self: SimulatedEngine, tenant: str = DEFAULT_TENANT) -> QueueSnapshot:
        return queue(self, DEFAULT_TENANT)

    patch.setattr(SimulatedEngine, "queue", mutated)


@breaks("HEAR-TENANT-3", "HEAR-TENANT-4")
def blocks_are_everybodys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenants, "number", lambda self, tenant: 0)


@breaks("HEAR-TENANT-4")
def operations_are_everybodys(patch: pytest.MonkeyPatch) -> None:
    make = TenantSession.__init__
    shared: dict[str, Operation] = {}

    def mutated(self: TenantSession, tenant: str, **settings: Any) -> None:
        make(self, tenant, **settings)
        self._operations._open = shared

    patch.setattr(TenantSession, "__init__", mutated)


# -- what is said of the engine -------------------------------------------------------------------


@breaks("HEAR-STATE-2")
def evictions_are_not_reported(patch: pytest.MonkeyPatch) -> None:
    drain = KvCache.drain_changes

    def mutated(self: KvCache) -> dict[int, list[BlockChange]]:
        return {
            owner: [change for change in changes if isinstance(change, BlocksStored)]
            for owner, changes in drain(self).items()
        }

    patch.setattr(KvCache, "drain_changes", mutated)


@breaks("HEAR-STATE-1", "HEAR-STATE-2")
def some_of_the_state_is_lost(patch: pytest.MonkeyPatch) -> None:
    send = EngineWorker._send

    def mutated(self: EngineWorker, envelope: Envelope) -> None:
        if envelope.kind != "residency_changed" or envelope.seq % 3:
            send(self, envelope)

    patch.setattr(EngineWorker, "_send", mutated)


@breaks("HEAR-STATE-3", "HEAR-STATE-4")
def snapshots_are_empty(patch: pytest.MonkeyPatch) -> None:
    nothing = ResidencySnapshot()
    patch.setattr(TenantSession, "_residency_snapshot", lambda self: [self._snapshot(nothing)])


@breaks("HEAR-STATE-5")
def reuse_is_what_was_hoped_for(patch: pytest.MonkeyPatch) -> None:
    honest = outcome_of

    def mutated(sim: SimRequest, *rest: Any) -> RequestOutcome:
        return msgspec.structs.replace(honest(sim, *rest), reused_tokens={"gpu": sim.prompt_tokens})

    patch.setattr("hear.engines.simulated.backend.outcome_of", mutated)


# -- intent, and outputs --------------------------------------------------------------------------


def _acts_on_intent(act: Callable[[Envelope], Control | None]) -> Mutant:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        receive = EngineOperations.receive

        def mutated(self: EngineOperations, envelope: Envelope, now: float) -> Actions:
            if envelope.category != "intent":
                return receive(self, envelope, now)
            control = act(envelope)
            if control is None:
                return Actions()
            key = msgspec.structs.replace(envelope.key, operation=f"inferred-{envelope.id}")
            kind = str(control.__struct_config__.tag)
            inferred = msgspec.structs.replace(
                envelope, category="control", kind=kind, key=key, body=encode_body(control)
            )
            return receive(self, inferred, now)

        async def subscribe(self: ControlReader) -> Any:
            patterns = ["control.>", "intent.>"]
            subscription = self._bus.subscribe(patterns, name="curious", capacity=65_536)
            return await self._stack.enter_async_context(subscription)

        patch.setattr(EngineOperations, "receive", mutated)
        patch.setattr(ControlReader, "_subscribe", subscribe)

    return mutate


def _retains(envelope: Envelope) -> Control | None:
    return Retain(lease_s=1000.0) if envelope.kind == "reuse_expected" else None


def _holds(envelope: Envelope) -> Control | None:
    return Hold(hold_s=1e6) if envelope.kind == "request_readiness_changed" else None


MUTANTS |= {
    "reuse_that_is_expected_is_retained": (
        _acts_on_intent(_retains),
        ("HEAR-INTENT-1", "HEAR-INTENT-3"),
    ),
    "what_is_not_ready_is_held": (_acts_on_intent(_holds), ("HEAR-INTENT-1", "HEAR-INTENT-2")),
}


@breaks("HEAR-SAME-1")
def haste_makes_answers_short(patch: pytest.MonkeyPatch) -> None:
    prioritise = Controls._prioritise

    def mutated(self: Controls, operation: Operation, now: float) -> ApplyResult:
        self._requests[operation.tenant, operation.key.request or ""].output_tokens = 1
        return prioritise(self, operation, now)

    patch.setattr(Controls, "_prioritise", mutated)


@breaks("HEAR-EFFECT-1")
def a_block_is_lost_with_each_request(patch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def mutated(self: Scheduler, request: SimRequest) -> None:
        self._cache._num_plain_free -= 1
        add(self, request)

    patch.setattr(Scheduler, "add", mutated)


def _at_submission(*, too: bool = False) -> Mutant:
    capabilities = SimulatedEngine.capabilities

    def mutate(patch: pytest.MonkeyPatch) -> None:
        def mutated(self: SimulatedEngine) -> CapabilitiesReported:
            told = capabilities(self)
            kinds = tuple(kind for kind in told.controls if too or kind != "prioritise")
            return msgspec.structs.replace(told, controls=kinds, at_submission=("prioritise",))

        patch.setattr(SimulatedEngine, "capabilities", mutated)

    return mutate


MUTANTS["at_submission_and_whenever"] = _at_submission(too=True), ("HEAR-SUBMIT-1",)


@breaks("HEAR-SUBMIT-1")
def what_comes_too_late_acts(patch: pytest.MonkeyPatch) -> None:
    _at_submission()(patch)
    patch.setattr(EngineOperations, "_acts_at_submission", lambda self, operation: False)


@breaks("HEAR-SUBMIT-2")
def submitted_in_words_only(patch: pytest.MonkeyPatch) -> None:
    _at_submission()(patch)
    _says_done("_prioritise")(patch)
