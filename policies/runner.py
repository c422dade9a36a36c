"""Runs one policy: keeps its views, calls it once for each burst of messages, sends its controls.

A policy that raises, or that does not return, is reported; its controls end and it is left out,
while everything else goes on.
"""

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from types import FrameType

import structlog
import trio

from hear.codec import open_body
from hear.delivery import Outbox, Sequencer
from hear.engine_view import EngineViews
from hear.errors import BusError, RemoteProtocolError
from hear.harness_view import HarnessView
from hear.intake import DEFAULT_DEADLINE_S
from hear.messages import (
    DEFAULT_TENANT,
    BoundWait,
    Control,
    Envelope,
    Key,
    OperationOutcome,
    RequestOutcome,
    Retain,
    Withdraw,
)
from hear.seams import Ask, Bus, Policy, Subscription

_log = structlog.get_logger("hear.policy")

DECIDE_LIMIT_S = 5.0
"""Longest time, by the wall clock, that one decision may take."""

_GUARD_LIFE_S = 86_400.0


class _DecisionTimeout(BaseException):
    """Raised inside a policy that does not return. Not an Exception, so that it is not caught."""


@dataclass(slots=True)
class PolicyStatistics:
    """What a policy has done, for the table of the protocol's cost. Times are wall time."""

    decisions: int = 0
    controls: int = 0
    decide_s: float = 0.0
    gaps: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failure: str | None = None


class PolicyRunner:
    """One policy on one bus."""

    def __init__(
        self,
        bus: Bus,
        policy: Policy,
        *,
        source: str | None = None,
        tenant: str = DEFAULT_TENANT,
        decide_limit_s: float = DECIDE_LIMIT_S,
    ) -> None:
        self.policy = policy
        self.source = source or policy.name
        self.statistics = PolicyStatistics()
        self.stopped = trio.Event()
        self._bus = bus
        self._tenant = tenant
        self._sequencer = Sequencer(self.source, tenant=tenant)
        self._outbox = Outbox()
        self._h = HarnessView()
        self._s = EngineViews()
        self._decide_limit_s = decide_limit_s
        self._serving = trio.CancelScope()

    @property
    def num_open(self) -> int:
        """Operations of this policy without a terminal outcome."""
        return len(self._outbox)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until ``stop`` or until the policy fails; then its controls are withdrawn.

        The answers to what is still open are awaited for a bounded time.
        """
        patterns = {*self.policy.observes, f"outcome.{self._tenant}.>"}
        patterns.add(f"state.{self._tenant}.*.capabilities.>")
        async with self._bus.subscribe(sorted(patterns), name=self.source) as messages:
            try:
                with self._serving:
                    task_status.started()
                    while self.statistics.failure is None:
                        await self._turn(messages)
                self._withdraw()
                with trio.move_on_after(DEFAULT_DEADLINE_S):
                    while len(self._outbox):
                        for envelope in await messages.receive():
                            self._hear(envelope)
            except BusError as error:
                self._fail(f"lost the bus: {error}")
            finally:
                self.stopped.set()

    def stop(self) -> None:
        """Let ``run`` come to its end."""
        self._serving.cancel()

    async def _turn(self, messages: Subscription) -> None:
        batch: Iterable[Envelope] = ()
        with trio.move_on_at(self._outbox.next_due() or inf):
            batch = await messages.receive()
        for envelope in batch:
            if self._hear(envelope):
                messages.request_snapshot(envelope)
        self._send_again()
        if self._h.changes or self._s.changes:
            self._decide()

    # -- what is heard ------------------------------------------------------------------------

    def _hear(self, envelope: Envelope) -> bool:
        """Take over one message; returns whether a snapshot of its stream is needed."""
        try:
            message = open_body(envelope)
        except RemoteProtocolError as error:
            _log.warning("message.unreadable", policy=self.source, error=str(error))
            return False
        if message is None:
            return False
        if isinstance(message, OperationOutcome):
            operation = self._outbox.hear(envelope.key, message)
            if operation is not None and operation.terminal:
                self.statistics.outcomes[message.status] += 1
        elif envelope.category == "state":
            engine = envelope.key.engine or envelope.source
            self._count_lost(self._outbox.hear_epoch(engine, envelope.epoch))
            needs_snapshot = self._s.apply(envelope, message)
            self.statistics.gaps = self._s.gaps
            return needs_snapshot
        elif envelope.category == "intent" or isinstance(message, RequestOutcome):
            self._h.apply(envelope, message)
        return False

    def _count_lost(self, lost: Iterable[object]) -> None:
        for _ in lost:
            self.statistics.outcomes["failed"] += 1

    def _send_again(self) -> None:
        again, lost = self._outbox.due(trio.current_time())
        self._count_lost(lost)
        for envelope in again:
            self._bus.publish(envelope)

    # -- what is decided ----------------------------------------------------------------------

    def _decide(self) -> None:
        self._h.now = trio.current_time()
        begun = time.perf_counter()
        try:
            with _time_limit(self._decide_limit_s):
                asks = list(self.policy.decide(self._h, self._s))
        except _DecisionTimeout:
            self._fail(f"did not decide within {self._decide_limit_s} s")
            asks = []
        except Exception as error:
            self._fail(f"raised {type(error).__name__}: {error}")
            asks = []
        self.statistics.decide_s += time.perf_counter() - begun
        self.statistics.decisions += 1
        self._h.changes.clear()
        self._s.changes.clear()
        for ask in asks:
            self._send(ask)

    def _send(self, ask: Ask) -> None:
        control, key = ask
        now = trio.current_time()
        if not isinstance(control, Control):
            self._bus.publish(self._sequencer.wrap(control, key, now))
            return
        if key.engine is None:
            self._fail(f"asked for {type(control).__name__} without an engine in the key")
            return
        key = Key(
            request=key.request,
            context=key.context,
            context_version=key.context_version,
            engine=key.engine,
            operation=self._sequencer.next_id(),
            workflow=key.workflow,
        )
        envelope = self._sequencer.wrap(control, key, now)
        life = DEFAULT_DEADLINE_S if control.deadline_s is None else control.deadline_s - now
        if isinstance(control, Retain):
            life += control.lease_s
        elif isinstance(control, BoundWait):
            life += _GUARD_LIFE_S  # it ends with its request
        self._outbox.submit(envelope, control, now, now + life + DEFAULT_DEADLINE_S)
        self.statistics.controls += 1
        self._bus.publish(envelope)

    def _fail(self, why: str) -> None:
        if self.statistics.failure is None:
            self.statistics.failure = why
            _log.error("policy.failed", policy=self.source, why=why)

    def _withdraw(self) -> None:
        for engine in self._s:
            self._send(Ask(Withdraw(reason=f"{self.source} leaves"), Key(engine=engine)))


# -- the watchdog -----------------------------------------------------------------------------


@contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """Raise ``_DecisionTimeout`` in the code inside once ``limit_s`` of wall time have passed.

    Python can only be interrupted by a signal, and only in the main thread; elsewhere, and where
    there are no interval timers, a decision is not limited.
    """
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise _DecisionTimeout

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
