"""Takes the controls for one serving instance off a bus.

An engine's worker and a pool read their controls alike: in order, with what passes its deadline
ended in time, and with another subscription when they were cut off from one for being slow. What
becomes of a control, and what to do about it, is the instance's.
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from math import inf
from types import TracebackType
from typing import NoReturn, Protocol, Self

import structlog
import trio

from hear.errors import LaggedError
from hear.interfaces import Bus, Subscription
from hear.messages import Envelope
from hear.subjects import token

_log = structlog.get_logger("hear.controls")

CAPACITY = 65_536
"""Controls that may wait to be taken in."""

BURST_S = 0.2
"""Processor time that controls may take at once, where they may take a share of it only."""

SLICE = 32
"""Controls that are taken in at a stretch."""


class Instance(Protocol):
    """Who the controls are for."""

    @property
    def name(self) -> str:
        """Its name, in subjects and in the keys of controls."""
        ...

    def take_in(self, envelope: Envelope, now: float) -> None:
        """Take in one control."""
        ...

    def expire(self, now: float) -> None:
        """End what has passed its deadline."""
        ...

    def next_expiry(self) -> float | None:
        """When ``expire`` has to be called next."""
        ...


class ControlReader:
    """A subscription to the controls for one instance."""

    def __init__(
        self, bus: Bus, instance: Instance, *, tenant: str | None = None, share: float = 1.0
    ) -> None:
        """Read the controls of one tenant, or of all.

        ``share`` (0, 1] is how much of a processor may go into it, beyond a burst of ``BURST_S``.
        Where an engine runs in the same process a flood of controls must not take its time; they
        wait on the bus meanwhile.
        """
        self._bus = bus
        self._share = share
        self._credit_s = BURST_S
        self._counted_s = -inf
        self._instance = instance
        whose = "*" if tenant is None else token(tenant)
        self._pattern = f"control.{whose}.{token(instance.name)}.>"
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._controls = await self._subscribe()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def run(self) -> NoReturn:
        """Take controls in until cancelled.

        Raises:
            BusError: the bus is lost.
        """
        while True:
            try:
                await self._take_in()
            except LaggedError as error:
                _log.error("controls.lost", engine=self._instance.name, error=str(error))
                await self._stack.aclose()
                self._controls = await self._subscribe()

    async def _subscribe(self) -> Subscription:
        name = self._instance.name
        subscription = self._bus.subscribe([self._pattern], name=name, capacity=CAPACITY)
        return await self._stack.enter_async_context(subscription)

    async def _take_in(self) -> None:
        while True:
            batch: Sequence[Envelope] = ()
            with trio.move_on_at(self._instance.next_expiry() or inf):
                batch = await self._controls.receive()
            for start in range(0, len(batch) or 1, SLICE):
                began_s = time.thread_time()
                now = trio.current_time()
                for envelope in batch[start : start + SLICE]:
                    self._instance.take_in(envelope, now)
                self._instance.expire(now)
                await self._rest(time.thread_time() - began_s)

    async def _rest(self, spent_s: float) -> None:
        """Make up for processor time that was spent beyond what there was credit for."""
        if self._share >= 1:
            return
        now = trio.current_time()
        earned_s = min((now - self._counted_s) * self._share, BURST_S)
        self._counted_s = now
        self._credit_s = min(self._credit_s + earned_s, BURST_S) - spent_s
        if self._credit_s < 0:
            await trio.sleep(-self._credit_s / self._share)
