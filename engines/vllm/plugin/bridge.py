"""Between the engine's thread and HEAR's: commands one way, news the other.

vLLM's scheduler may be touched on the engine's thread alone, and the bus on HEAR's alone. Neither
waits for the other for long. While a step computes nobody touches the scheduler, so HEAR's thread
carries commands out itself then (``Window``); else the engine's thread drains them between steps,
and an idle one, which blocks on its input queue, has to be woken for them. News are handed over in
batches, since each hand-over costs HEAR's thread a turn of the interpreter, which the engine's
could use.
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


class Moved(NamedTuple):
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


class Pace(NamedTuple):
    """What the engine's steps have taken so far: those that only decoded, and the others."""

    decode_steps: int = 0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0


@dataclass(slots=True)
class News:
    """What happened in the engine since the last news.

    ``awaiting`` are those of ``arrived`` that do not start before they are answered, ``hints`` what
    came with them in vLLM's form: the tenant, the request that carried it, and the envelope.
    """

    arrived: list[tuple[Key, str]] = field(default_factory=list)
    awaiting: list[Ref] = field(default_factory=list)
    hints: list[tuple[str, Ride, Any]] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    results: list[tuple[Ref, ApplyResult]] = field(default_factory=list)
    operations: list[tuple[Ref, OperationOutcome]] = field(default_factory=list)
    outcomes: list[tuple[Key, str, RequestOutcome]] = field(default_factory=list)
    kv_events: list[Any] = field(default_factory=list)
    gauges: Gauges | None = None
    pace: Pace | None = None
    timer_s: float | None = None


class Window:
    """The times in which the engine's thread is not in its scheduler, because a step computes.

    The engine's thread holds a lock at all other times. It opens the window when it leaves the
    scheduler with a step to compute, and closes it before whatever it does there next; if HEAR's
    thread is in it at that moment, it waits until that has come out, which takes microseconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_open = False
        self._inside: int | None = None

    def open(self) -> None:
        """Let HEAR's thread in."""
        if not self._is_open:
            self._is_open = True
            self._lock.release()

    def close(self) -> bool:
        """Let it in no more; whether it was open. What it does inside may come through here too."""
        if not self._is_open or self._inside == threading.get_ident():
            return False
        self._lock.acquire()
        self._is_open = False
        return True

    def use(self, work: Callable[[], None]) -> bool:
        """Do something inside, if it is open; whether it was done."""
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
    """The two queues, and the window.

    ``wake_engine`` is set by whoever runs the engine's thread, and ``drain`` by whoever carries
    commands out.
    """

    def __init__(self) -> None:
        self.wake_engine: Callable[[], None] = lambda: None
        self.drain: Callable[[], None] = lambda: None
        self.window = Window()
        self._commands: deque[Command] = deque()
        self._news: deque[News] = deque()
        self._token: trio.lowlevel.TrioToken | None = None
        self._receive: Callable[[News], None] = lambda news: None
        self._handing_over = False
        self._over = False

    # -- HEAR's thread ------------------------------------------------------------------------

    def listen(self, receive: Callable[[News], None]) -> None:
        """Have news received on the trio loop that this is called in; older ones come first."""
        self._receive = receive
        self._token = trio.lowlevel.current_trio_token()
        self._hand_over()

    def command(self, command: Command) -> None:
        """Have a command carried out, as soon as nobody else is in the scheduler."""
        self._commands.append(command)
        if not self.window.use(self.drain):
            self.wake_engine()

    def _hand_over(self) -> None:
        self._handing_over = False
        while self._news:
            self._receive(self._news.popleft())

    # -- the engine's thread ------------------------------------------------------------------

    @property
    def has_commands(self) -> bool:
        """Whether there is something to drain."""
        return bool(self._commands)

    def next_command(self) -> Command | None:
        """The oldest command that is not carried out yet."""
        return self._commands.popleft() if self._commands else None

    def tell(self, news: News) -> None:
        """Hand news over. If HEAR's thread has ended, nobody is told, and the engine serves on."""
        if self._over:
            return
        self._news.append(news)
        if self._token is None or self._handing_over:
            return
        self._handing_over = True
        try:
            self._token.run_sync_soon(self._hand_over)
        except trio.RunFinishedError:
            self._over = True
            self._news.clear()
