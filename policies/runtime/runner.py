"""Runs one policy: keeps its views, calls it once for each burst of messages, sends its controls.

A policy serves one tenant, and hears of no other whatever its patterns say.
A policy that raises, does not return or asks for what it may not is reported; its controls end
and it is left out, while everything else goes on.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from traceback import extract_tb
from typing import TypeVar

import structlog
import trio
from msgspec.structs import replace

from hear.blocks import unpack
from hear.codec import open_body
from hear.compatibility import in_words
from hear.delivery import Arrival, GapDetector, Sequencer
from hear.engine_operations import DEFAULT_DEADLINE_S
from hear.engine_view import EngineViews, StateRefusedError
from hear.errors import (
    BusError,
    LaggedError,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
)
from hear.harness_view import HarnessView
from hear.interfaces import Ask, Bus, Policy, Subscription
from hear.messages import (
    DEFAULT_TENANT,
    BoundWait,
    Cancel,
    ContextVersioned,
    Control,
    Envelope,
    Key,
    Message,
    OperationOutcome,
    RequestDescribed,
    RequestOutcome,
    Retain,
    Withdraw,
)
from hear.policies.runtime.asks import check_ask
from hear.policies.runtime.mismatches import Mismatches
from hear.policies.runtime.watchdog import TimeLimitPassed, time_limit
from hear.sender_operations import SenderOperations
from hear.subjects import impossible, narrowed, token
from hear.yielding import Preferences

_T = TypeVar("_T")
_log = structlog.get_logger("hear.policy")

DECIDE_LIMIT_S = 5.0
"""Longest time, by the wall clock, that one decision may take."""

MAX_OPEN = 16_384
"""From how many open operations of one policy on preferences give way, the least worthy first."""

MAX_REQUIRED = 131_072
"""Most operations that one policy may have open, so that it cannot drown the engine and others."""

MAX_AT_ONCE = 1_000
"""Most decisions without time passing: a policy that reacts to its own controls has no end."""

SAY_AGAIN_S = 60.0
"""How often at most it is said that a policy has more to ask for than it may."""

CUT_OFF_AGAIN_S = 60.0
"""A policy that is cut off from the bus twice within this time is too slow for its traffic."""

FORGOTTEN_AGAIN_S = 3_600.0
"""How often at most it is said that views had to give up requests or engines."""

MAX_ENGINES = 4_096
"""Most engines of which is remembered that they were there, or were asked for something."""

_GUARD_LIFE_S = 86_400.0
_FOR_EVER_S = 1e9
_TELLING = frozenset({"malformed", "unsupported_control", "wrong_engine", "overloaded"})


@dataclass(slots=True)
class PolicyStatistics:
    """What a policy has done, for the table of the protocol's cost. Times are wall time.

    ``forgotten`` counts the requests, and the engines, that its views gave up without having heard
    of their ends: they were silent for long, or too many.
    At its limits ``gave_way`` preferences were cancelled to make room, and ``unasked`` controls
    were not sent.
    """

    decisions: int = 0
    controls: int = 0
    decide_s: float = 0.0
    gaps: int = 0
    forgotten: int = 0
    gave_way: int = 0
    unasked: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failure: str | None = None


def always_heard(tenant: str) -> tuple[str, ...]:
    """The patterns of what every policy of a tenant hears, whatever it observes.

    Its views need the ends of what is in them, and its runner what becomes of its controls.
    """
    own = token(tenant)
    return (
        f"outcome.{own}.>",
        f"state.{own}.*.capabilities.>",
        f"intent.{own}.*.context_closed.>",
    )


class PolicyRunner:
    """One policy on one bus."""

    def __init__(
        self,
        bus: Bus,
        policy: Policy,
        *,
        source: str | None = None,
        tenant: str = DEFAULT_TENANT,
        epoch: int = 1,
        decide_limit_s: float = DECIDE_LIMIT_S,
        leave_limit_s: float = DEFAULT_DEADLINE_S,
        capacity: int = 65_536,
    ) -> None:
        """Run ``policy`` under the name ``source``, its own by default.

        ``tenant`` is whose requests it serves; a ``*`` in the tenant's place of what it observes
        stands for that one alone. ``epoch`` is the incarnation of that source: who starts it again
        on the same bus has to give a larger one, since engines remember the operations of the last.
        ``leave_limit_s`` is how long ``run`` waits, at its end, for the answers that are still
        owed. ``capacity`` bounds
        the messages that wait to be heard: outcomes of all policies come by, and a burst of theirs
        must not push this one out.

        Raises:
            LocalProtocolError: the policy observes what is no pattern, or another tenant.
        """
        self.policy = policy
        self.source = source or policy.name
        self.statistics = PolicyStatistics()
        self.stopped = trio.Event()
        self._bus = bus
        self._tenant = tenant
        self._observed = {self._of_tenant(pattern) for pattern in policy.observes}
        self._sequencer = Sequencer(self.source, epoch, tenant)
        self._open_operations = SenderOperations()
        self._preferences = Preferences()
        self._said_full_s = -inf
        self._h = HarnessView()
        self._s = EngineViews()
        self._capacity = capacity
        self._engines: dict[str, None] = {}
        self._asked: dict[str, None] = {}  # engines that it has sent a control
        self._outcomes = GapDetector()
        self._mismatches = Mismatches()
        # Hashes matter to who compares them with what an engine holds. One that does not would
        # only say again what the others say.
        self._compares = any(".residency." in pattern for pattern in self._observed)
        self._cut_off_s = -inf
        self._told_forgotten = 0
        self._told_forgotten_s = -inf
        self._warned: set[tuple[str, str]] = set()
        self._decided_s = -inf
        self._decided_at_once = 0
        self._decide_limit_s = decide_limit_s
        self._leave_limit_s = leave_limit_s
        self._serving = trio.CancelScope()
        self._stopping = False

    @property
    def num_open(self) -> int:
        """Operations of this policy without a terminal outcome; none once ``run`` has ended."""
        return len(self._open_operations)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until ``stop`` or until the policy fails; then its controls are withdrawn.

        The answers to what is still open are awaited for a bounded time.
        """
        own = set(always_heard(self._tenant))
        for pattern in self.policy.observes:
            if why := impossible(pattern):
                _log.warning(
                    "pattern.matches_nothing", policy=self.source, pattern=pattern, why=why
                )
        patterns = self._observed | own
        try:
            while not await self._serve(patterns, task_status):
                if self.statistics.failure is not None:
                    # It was shut out for good, and still has to take back what it asked for.
                    async with self._subscribe(own) as messages:
                        with self._containing():
                            await self._leave(messages)
                    break
                # What it missed of state it gets anew; and what was answered, if it asks again.
                self._say_again(self._open_operations.ask_again(trio.current_time()))
                task_status = trio.TASK_STATUS_IGNORED
        except BusError as error:
            self._fail(f"lost the bus: {error}")
        finally:
            self._count_lost(self._open_operations.due(inf)[1])
            self.stopped.set()

    def _of_tenant(self, pattern: str) -> str:
        own = narrowed(pattern, self._tenant)
        if own is None:
            raise LocalProtocolError(
                f"policy {self.source!r} observes {pattern!r}, of another tenant than the "
                f"{self._tenant!r} that it serves: expected '*' in the tenant's place"
            )
        return own

    def stop(self) -> None:
        """Let ``run`` come to its end."""
        self._stopping = True
        self._serving.cancel()

    async def _serve(self, patterns: Iterable[str], task_status: trio.TaskStatus[None]) -> bool:
        """Serve and leave; returns False if the subscription was cut off before."""
        async with self._subscribe(patterns) as messages:
            try:
                with self._serving:
                    task_status.started()
                    if self._stopping:
                        self._serving.cancel()
                    while self.statistics.failure is None:
                        with self._containing():
                            await self._hear_next(messages)
                            self._decide_if_needed()
                with self._containing():
                    await self._leave(messages)
            except LaggedError as error:
                now = trio.current_time()
                if now < self._cut_off_s + CUT_OFF_AGAIN_S or self._stopping:
                    self._fail(f"was too slow: {error}")
                else:
                    _log.warning("policy.cut_off", policy=self.source, why=str(error))
                self._cut_off_s = now
                self._serving = trio.CancelScope()
                return False
        return True

    @contextmanager
    def _containing(self) -> Iterator[None]:
        """Let a fault in HEAR's own code end this policy, and not the engines of its process."""
        try:
            yield
        except BusError:
            raise
        except Exception as error:
            _log.exception("policy.fault", policy=self.source)
            self._fail(f"fault in HEAR: {error!r}")

    def _subscribe(self, patterns: Iterable[str]) -> Subscription:
        return self._bus.subscribe(sorted(patterns), name=self.source, capacity=self._capacity)

    async def _leave(self, messages: Subscription) -> None:
        for engine in dict.fromkeys([*self._engines, *self._asked]):
            self._send(Ask(Withdraw(reason=f"{self.source} leaves"), Key(engine=engine)))
        with trio.move_on_after(self._leave_limit_s):
            while len(self._open_operations):
                await self._hear_next(messages)
        self._bus.set_will(self.source, ())

    async def _hear_next(self, messages: Subscription) -> None:
        """Take over what has come, and send again what was not answered in time."""
        due = self._open_operations.next_due()
        batch: Iterable[Envelope] = ()
        with trio.move_on_at(inf if due is None else due):
            batch = await messages.receive()
        self._touch_views(self._bring_up_to_date)
        for envelope in batch:
            if self._touch_views(partial(self._hear, envelope)):
                messages.request_snapshot(envelope)
        again, lost = self._open_operations.due(trio.current_time())
        self._count_lost(lost)
        self._say_again(again)

    def _touch_views(self, act: Callable[[], _T]) -> _T | None:
        """Do something with the views, which a policy may have left in any state."""
        try:
            return act()
        except (AttributeError, TypeError, LookupError) as error:
            self._fail(f"left its views unusable: {error!r}")
            return None

    def _say_again(self, envelopes: Iterable[Envelope]) -> None:
        for envelope in envelopes:
            self._bus.publish(envelope)

    # -- what is heard ------------------------------------------------------------------------

    def _hear(self, envelope: Envelope) -> bool:
        """Take over one message; returns whether a snapshot of its stream is needed."""
        try:
            message = open_body(envelope)
        except RemoteProtocolError as error:
            _log.warning("message.unreadable", policy=self.source, error=str(error))
            return False  # as if it had not come; of state, the next one shows the gap
        if message is None:
            return False
        if envelope.category == "state":
            self._meet(envelope.key.engine or envelope.source, envelope.epoch)
            try:
                needs_snapshot = self._s.apply(envelope, message)
            except StateRefusedError as error:
                _log.warning("message.unreadable", policy=self.source, error=str(error))
                return error.ask
            self.statistics.gaps = self._s.gaps
            return needs_snapshot
        if envelope.category == "outcome":
            known = self._outcomes.knows(envelope)  # who comes late has missed nothing of its own
            if self._outcomes.observe(envelope) is Arrival.GAP and known:
                engine = envelope.key.engine or envelope.source
                self._say_again(self._open_operations.ask_again(trio.current_time(), engine))
        if isinstance(message, OperationOutcome):
            operation = self._open_operations.hear(envelope.key, message)
            if operation is not None and operation.terminal:
                self.statistics.outcomes[operation.phase] += 1
                self._warn_of_refusal(message)
        elif envelope.category == "intent" or isinstance(message, RequestOutcome):
            self._h.apply(envelope, self._with_readable_hashes(envelope, message))
        return False

    def _warn_of_refusal(self, outcome: OperationOutcome) -> None:
        """Tell the policy's author, once of each kind, why a control can never be, or not now."""
        what = (outcome.control, outcome.reason)
        if outcome.reason in _TELLING and what not in self._warned:
            self._warned.add(what)
            _log.warning(
                "control.refused",
                policy=self.source,
                control=outcome.control,
                reason=outcome.reason,
                detail=outcome.detail,
            )

    def _bring_up_to_date(self) -> None:
        """Tell the views the time; say what they gave up, once for all of it in a while."""
        now = trio.current_time()
        self._h.advance(now)
        self._s.advance(now)
        forgotten = self._h.num_forgotten + self._s.num_forgotten
        self.statistics.forgotten = max(self.statistics.forgotten, forgotten)
        if forgotten == self._told_forgotten or now < self._told_forgotten_s + FORGOTTEN_AGAIN_S:
            return
        _log.warning(
            "view.forgotten",
            policy=self.source,
            forgotten=forgotten - self._told_forgotten,
            requests=len(self._h.requests),
            request_bytes=self._h.requests.size_bytes,
            engines=len(self._s),
            detail="no end was heard of them, and they were silent for long or too many",
        )
        self._told_forgotten, self._told_forgotten_s = forgotten, now

    def _meet(self, engine: str, epoch: int) -> None:
        """Note that an engine is there, in which incarnation."""
        self._say_again(self._open_operations.hear_epoch(engine, epoch, trio.current_time()))
        met = self._engines.pop(engine, False) is None
        self._engines[engine] = None
        if met:
            return
        if len(self._engines) > MAX_ENGINES:
            del self._engines[next(iter(self._engines))]
        if self._sequencer.epoch > 1 and engine not in self._asked:
            # An earlier incarnation of this policy may have ended without taking anything back.
            self._send(Ask(Withdraw(reason=f"{self.source} begins anew"), Key(engine=engine)))

    def _with_readable_hashes(self, envelope: Envelope, message: Message) -> Message:
        """The message, without its block hashes if they are none: no policy has to look."""
        if isinstance(message, RequestDescribed | ContextVersioned):
            try:
                unpack(message.prefix_hashes)
            except RemoteProtocolError as error:
                _log.warning(
                    "hashes.unreadable", policy=self.source, message=envelope.id, error=str(error)
                )
                return replace(message, prefix_hashes=b"")
        return message

    def _count_lost(self, lost: Iterable[object]) -> None:
        for _ in lost:
            self.statistics.outcomes["failed"] += 1

    # -- what is decided ----------------------------------------------------------------------

    def _decide_if_needed(self) -> None:
        if not (self._h.changes or self._s.changes):
            return
        now = trio.current_time()
        self._decided_at_once = self._decided_at_once + 1 if now == self._decided_s else 1
        self._decided_s = now
        if self._decided_at_once > MAX_AT_ONCE:
            self._fail(f"decided {MAX_AT_ONCE} times at one instant, as if in answer to itself")
            return
        self._decide(now)

    def _decide(self, now: float) -> None:
        self._h.advance(now)
        if self._compares:
            self._warn_of_mismatches()
        begun = time.perf_counter()
        try:
            with time_limit(self._decide_limit_s):
                asks = list(self.policy.decide(self._h, self._s))
            self._h.clear_changes()
            self._s.clear_changes()
        except TimeLimitPassed:
            asks = []
            self._fail(f"did not decide within {self._decide_limit_s:g} s")
        except (Exception, SystemExit) as error:
            asks = []
            at = extract_tb(error.__traceback__)[-1]
            where = f"{at.filename}:{at.lineno}, in {at.name}"
            self._fail(f"raised {type(error).__name__}: {error}", at=where)
        self.statistics.decide_s += time.perf_counter() - begun
        self.statistics.decisions += 1
        for ask in asks:
            try:
                self._send(check_ask(ask))
            except ProtocolError as error:
                self._fail(str(error))
                return

    def _warn_of_mismatches(self) -> None:
        for found in self._mismatches.found(self._h, self._s):
            _log.warning(
                "description.does_not_fit",
                policy=self.source,
                described_by=found.described_by,
                engine=found.engine,
                why=in_words(found.differing, found.described_by, found.engine),
                effect="reuse there is unknown, and nothing is planned on it; said once",
            )

    def _send(self, ask: Ask) -> None:
        """Publish what a policy asks for.

        Raises:
            ProtocolError: it has no form on the wire.
        """
        message, key = ask
        now = trio.current_time()
        if not isinstance(message, Control):
            self._bus.publish(self._sequencer.wrap(message, key, now))
            return
        if len(self._open_operations) >= MAX_OPEN and not self._make_room(message, now):
            self.statistics.unasked += 1
            return
        if message.engine_epoch is None:
            message = replace(message, engine_epoch=self._open_operations.epoch_of(key.engine))
        key = replace(key, operation=self._sequencer.next_id())
        envelope = self._sequencer.wrap(message, key, now)
        deadline_s = DEFAULT_DEADLINE_S if message.deadline_s is None else message.deadline_s - now
        life_s = deadline_s
        if isinstance(message, Retain):
            life_s += message.lease_s
        elif isinstance(message, BoundWait):
            life_s += _GUARD_LIFE_S  # it ends with its request
        answer_by_s = now + deadline_s + DEFAULT_DEADLINE_S
        give_up_s = now + life_s + DEFAULT_DEADLINE_S
        self._preferences.add(
            self._open_operations.submit(envelope, message, now, give_up_s, answer_by_s=answer_by_s)
        )
        self.statistics.controls += 1
        self._bus.publish(envelope)
        if key.engine is not None and key.engine not in self._asked:
            self._asked[key.engine] = None
            if len(self._asked) > MAX_ENGINES:
                del self._asked[next(iter(self._asked))]
            if key.engine not in self._engines:
                _log.warning("engine.unknown", policy=self.source, engine=key.engine)
            self._leave_word(now)

    def _make_room(self, control: Control, now: float) -> bool:
        """Whether a control may be sent although the limit is reached.

        The least worthy preference is cancelled for it. What is cancelled is open until its engine
        says so, and an engine may be gone: hence a second limit, for each force.
        """
        if isinstance(control, Withdraw | Cancel):
            return True
        if now >= self._said_full_s + SAY_AGAIN_S:
            self._said_full_s = now
            _log.warning(
                "policy.asks_too_much",
                policy=self.source,
                open=len(self._open_operations),
                gave_way=self.statistics.gave_way,
                unasked=self.statistics.unasked,
                effect="its least worthy preferences give way",
            )
        required = control.force == "requirement"
        if len(self._open_operations) >= (MAX_REQUIRED if required else 2 * MAX_OPEN):
            return False
        yielding = self._preferences.least(control, self.source)
        if yielding is not None:
            self.statistics.gave_way += 1
            cancel = Cancel(target=yielding.id, reason=f"{MAX_OPEN} operations are open")
            self._send(Ask(cancel, Key(engine=yielding.key.engine)))
        return required or yielding is not None

    def _leave_word(self, now: float) -> None:
        """Have everything withdrawn if this process is lost."""
        message = Withdraw(reason=f"{self.source} was lost", deadline_s=now + _FOR_EVER_S)
        will = []
        for engine in self._asked:
            key = Key(engine=engine, operation=self._sequencer.next_id())
            # Without a number, since it takes its place among the others only if it is ever said.
            will.append(replace(self._sequencer.wrap_snapshot(message, key, now), seq=0))
        self._bus.set_will(self.source, will)

    def _fail(self, why: str, **more: str) -> None:
        if self.statistics.failure is None:
            self.statistics.failure = why
            self._h, self._s = HarnessView(), EngineViews()  # whatever it did to the old ones
            self._told_forgotten = 0
            _log.error("policy.failed", policy=self.source, why=why, **more)
