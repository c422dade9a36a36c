"""Between the bus, which is trio's, and the screen, which is asyncio's.

The bus side runs in a thread with a trio loop of its own. Trio's guest mode on top of asyncio would
do without a thread, but then a screen that takes long to draw keeps the bus waiting, until the tap
is cut off, and each loop has to outlive the other's end. So here either ends by itself, and all
that passes between them is the newest picture, which cannot be changed and never piles up.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress

import trio

from hear.app.clock import SharedClock
from hear.app.nursery import unwrapped
from hear.buses.observe.tap.board import Board, Picture
from hear.buses.observe.tap.follow import Follower
from hear.errors import LaggedError
from hear.interfaces import Bus
from hear.messages import Envelope

INTERVAL_S = 0.2
"""How often a picture is made, however many messages come."""
STOP_WITHIN_S = 1.5

Join = Callable[[], AbstractAsyncContextManager[Bus]]


class Bridge:
    """A thread that follows a bus and keeps the newest picture of it."""

    def __init__(
        self,
        join: Join,
        *,
        name: str,
        interval_s: float = INTERVAL_S,
        on_picture: Callable[[Picture], None] = lambda picture: None,
    ) -> None:
        """``on_picture`` is called in the thread with each picture."""
        self._join = join
        self._name = name
        self._interval_s = interval_s
        self._on_picture = on_picture
        self._board = Board()
        self._picture: Picture | None = None
        self._error: BaseException | None = None
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._stopped = False
        self._joined = threading.Event()
        self._lock = threading.Lock()
        # A daemon: if joining a bus hangs in a library, the process still ends.
        self._thread = threading.Thread(target=self._run, name="tap bus", daemon=True)

    def start(self) -> None:
        """Begin to follow the bus."""
        self._thread.start()

    def wait_joined(self, within_s: float) -> bool:
        """Wait for the first picture or for the end; returns whether either has come."""
        return self._joined.wait(within_s)

    def latest(self) -> Picture | None:
        """The newest picture; None before the first."""
        return self._picture

    @property
    def ended(self) -> bool:
        """Whether the bus side is over, by itself or by ``stop``."""
        return self._thread.ident is not None and not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """Why the bus side ended by itself."""
        return self._error

    def stop(self, within_s: float = STOP_WITHIN_S) -> bool:
        """Leave the bus; returns whether that was done within the time."""
        with self._lock:
            self._stopped = True
            token = self._token
        if token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._scope.cancel)
        if self._thread.ident is not None:
            self._thread.join(within_s)
        return not self._thread.is_alive()

    # -- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with unwrapped():
                trio.run(self._main, clock=SharedClock())
        except BaseException as error:  # told to the thread that shows it
            self._error = error
        finally:
            self._joined.set()

    async def _main(self) -> None:
        with self._lock:
            self._token = trio.lowlevel.current_trio_token()
            if self._stopped:
                self._scope.cancel()
        with self._scope:
            async with self._join() as bus, trio.open_nursery() as nursery:
                follower = Follower(bus, [">"], name=self._name)
                nursery.start_soon(self._draw, follower)
                await follower.run(self, history=True)

    async def _draw(self, follower: Follower) -> None:
        while True:
            self._picture = self._board.picture(
                trio.current_time(),
                dropped=follower.dropped,
                times_cut_off=follower.times_cut_off,
            )
            self._joined.set()
            self._on_picture(self._picture)
            await trio.sleep(self._interval_s)

    def take(self, envelopes: Sequence[Envelope]) -> Iterable[Envelope]:
        """Take over what has come; returns what a snapshot is needed of."""
        now = trio.current_time()
        return [envelope for envelope in envelopes if self._board.apply(envelope, now)]

    def cut_off(self, error: LaggedError) -> None:
        """The follower counts it, and comes back."""
