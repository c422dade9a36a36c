"""Takes the controls for one serving instance off a bus and into its ``Intake``.

An engine's worker and a pool read their controls alike: in order, with what passes its deadline
ended in time, and with another subscription when they were cut off from one for being slow. What
becomes of a control is the intake's, and what to do about it its owner's.
"""

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from math import inf
from types import TracebackType
from typing import NoReturn, Self

import structlog
import trio

from hear.errors import LaggedError
from hear.intake import Intake, Step
from hear.messages import DEFAULT_TENANT, Envelope
from hear.seams import Bus, Subscription
from hear.subjects import token

_log = structlog.get_logger("hear.controls")

CAPACITY = 65_536
"""Controls that may wait to be taken in."""


class ControlReader:
    """A subscription to the controls for the instance that an intake is of."""

    def __init__(
        self,
        bus: Bus,
        intake: Intake,
        carry_out: Callable[[Step], None],
        *,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """``carry_out`` is handed what follows from each control and from each deadline."""
        self._bus = bus
        self._intake = intake
        self._carry_out = carry_out
        self._pattern = f"control.{token(tenant)}.{token(intake.engine)}.>"
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
                _log.error("controls.lost", engine=self._intake.engine, error=str(error))
                await self._stack.aclose()
                self._controls = await self._subscribe()

    async def _subscribe(self) -> Subscription:
        name = self._intake.engine
        subscription = self._bus.subscribe([self._pattern], name=name, capacity=CAPACITY)
        return await self._stack.enter_async_context(subscription)

    async def _take_in(self) -> None:
        while True:
            batch: Iterable[Envelope] = ()
            with trio.move_on_at(self._intake.next_expiry() or inf):
                batch = await self._controls.receive()
            now = trio.current_time()
            for envelope in batch:
                self._carry_out(self._intake.receive(envelope, now))
            self._carry_out(self._intake.expire(now))
