"""Between the engine's thread and HEAR's: commands one way, engine events the other.

Theory of operation. Two threads: the *engine's*, which runs vLLM's scheduler, and *HEAR's*, which
runs a trio loop with the bus and the worker. What a control does to the scheduler may be done by
either, under the ``SchedulerLock``:

- ``Bridge.command`` (HEAR's thread) puts a command into the queue. If a step is computing, it gets
  the lock and carries out the whole queue itself; else it wakes the engine's thread, which carries
  the queue out between two steps, or at once if it was idle.
- ``Bridge.tell`` (whoever holds the lock) puts engine events into the other queue and has HEAR's
  loop called once for all of them, since each call costs HEAR's thread a turn of the interpreter,
  which the engine's thread could use.

Invariants:

1. Who touches the scheduler, ``engine_side`` or what it drives holds the lock; the bus and the
   worker are touched on HEAR's thread alone.
2. HEAR's thread never waits for the lock; the engine's waits while commands are carried out.
3. Commands are carried out in the order in which they were given, whichever thread does it.
4. Engine events are received in the order in which they happened. Those from before ``listen`` are
   received first; if HEAR's loop is over they are dropped, and the engine serves on.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import trio

from hear.engines.vllm.upstream_hints import Ride
from hear.interfaces import ApplyResult
from hear.messages import Key, OperationOutcome, RequestOutcome
from hear.operation import Operation, Ref


class Command(NamedTuple):
    """What HEAR's thread wants: one of the kinds of ``Plugin``'s table, about one operation."""

    kind: Literal["apply", "revert", "expect", "answered"]
    operation: Operation | None
    name: Ref = ("", "")


class RequestUpdate(NamedTuple):
    """Where a request stands in the queue. ``since_s`` is of ``time.monotonic``."""

    key: Key
    tenant: str
    state: str
    since_s: float
    priority: int
    protected: bool
    held: bool
    prompt_tokens: int
    output_tokens: int


class Gauges(NamedTuple):
    """How full the engine is. ``cached`` are blocks that can be found by their hash."""

    free: int
    cached: int
    restored_tokens: int
    preemptions: int


class StepTimings(NamedTuple):
    """What the engine's steps have taken so far: those that only decoded, and the others."""

    decode_steps: int = 0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0


@dataclass(slots=True)
class EngineEvents:
    """What happened in the engine since the last of these.

    ``awaiting`` are those of ``arrived`` that do not start before they are answered, ``hints`` what
    came with them in vLLM's form: the tenant, the request that carried it, and the envelope.
    """

    arrived: list[tuple[Key, str]] = field(default_factory=list)
    awaiting: list[Ref] = field(default_factory=list)
    hints: list[tuple[str, Ride, Any]] = field(default_factory=list)
    updates: list[RequestUpdate] = field(default_factory=list)
    results: list[tuple[Ref, ApplyResult]] = field(default_factory=list)
    operations: list[tuple[Ref, OperationOutcome]] = field(default_factory=list)
    outcomes: list[tuple[Key, str, RequestOutcome]] = field(default_factory=list)
    kv_events: list[Any] = field(default_factory=list)
    gauges: Gauges | None = None
    step_timings: StepTimings | None = None
    timer_s: float | None = None


class SchedulerLock:
    """Guards vLLM's scheduler, its block pool, and all of HEAR's that stands on them.

    The engine's thread holds it whenever it is not waiting for a step to compute: it releases the
    lock as it leaves the scheduler with a step, and acquires it before whatever it does there next.
    HEAR's thread tries it and never waits; if it is in at the moment in which the engine's thread
    comes back, that one waits for as long as a few commands take, which is microseconds.
    """

    def __init__(self) -> None:
        """Made on the engine's thread, which holds it from the beginning."""
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_released = False
        self._inside: int | None = None

    def release(self) -> None:
        """Engine's thread: a step computes. Nothing happens if it does not hold the lock."""
        if not self._is_released:
            self._is_released = True
            self._lock.release()

    def acquire(self) -> bool:
        """Engine's thread: back in the scheduler; whether it had released the lock.

        What HEAR's thread does inside may call vLLM's code that comes through here, too: then the
        lock stays as it is.
        """
        if not self._is_released or self._inside == threading.get_ident():
            return False
        self._lock.acquire()
        self._is_released = False
        return True

    def run_if_free(self, work: Callable[[], None]) -> bool:
        """HEAR's thread: do something under the lock, if it can be had; whether it was done."""
        if not self._lock.acquire(blocking=False):
            return False
        self._inside = threading.get_ident()
        try:
            work()
        finally:
            self._inside = None
            self._lock.release()
        return True


class Bridge:
    """The two queues, and the lock.

    ``wake_engine`` is set by whoever runs the engine's thread, and ``drain`` by whoever carries
    commands out.
    """

    def __init__(self) -> None:
        self.wake_engine: Callable[[], None] = lambda: None
        self.drain: Callable[[], None] = lambda: None
        self.scheduler_lock = SchedulerLock()
        self._commands: deque[Command] = deque()
        self._engine_events: deque[EngineEvents] = deque()
        self._token: trio.lowlevel.TrioToken | None = None
        self._receive: Callable[[EngineEvents], None] = lambda engine_events: None
        self._handing_over = False
        self._over = False

    # -- HEAR's thread ------------------------------------------------------------------------

    def listen(self, receive: Callable[[EngineEvents], None]) -> None:
        """Have events received on the trio loop that this is called in; older ones come first."""
        self._receive = receive
        self._token = trio.lowlevel.current_trio_token()
        self._hand_over()

    def command(self, command: Command) -> None:
        """Have a command carried out, as soon as nobody else is in the scheduler."""
        self._commands.append(command)
        if not self.scheduler_lock.run_if_free(self.drain):
            self.wake_engine()

    def _hand_over(self) -> None:
        self._handing_over = False
        while self._engine_events:
            self._receive(self._engine_events.popleft())

    # -- who holds the lock -------------------------------------------------------------------

    @property
    def has_commands(self) -> bool:
        """Whether there is something to drain."""
        return bool(self._commands)

    def next_command(self) -> Command | None:
        """The oldest command that is not carried out yet."""
        return self._commands.popleft() if self._commands else None

    def tell(self, engine_events: EngineEvents) -> None:
        """Hand events over. If HEAR's loop is over, nobody is told, and the engine serves on."""
        if self._over:
            return
        self._engine_events.append(engine_events)
        if self._token is None or self._handing_over:
            return
        self._handing_over = True
        try:
            self._token.run_sync_soon(self._hand_over)
        except trio.RunFinishedError:
            self._over = True
            self._engine_events.clear()
