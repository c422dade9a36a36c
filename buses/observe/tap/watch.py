"""The tap itself: what comes is chosen, read, laid out and handed to the output, until an end."""

import errno
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, Protocol

import trio

from hear.buses.observe.tap.filters import Filter
from hear.buses.observe.tap.follow import Follower, Numbers, as_remembering
from hear.buses.observe.tap.output import Output
from hear.buses.observe.tap.reading import Reading, read
from hear.errors import BusError, ConfigError, LaggedError
from hear.interfaces import Bus
from hear.messages import Envelope
from hear.subjects import stem_of

WRITE_OUT_S: Final = 10.0
"""How long the end of a tap waits for a slow reader of its output."""
_CANCELLED_WRITE_OUT_S: Final = 0.3
SILENT_S: Final = 3.0
"""How long a tap that was asked for a name shows nothing before it says which names there are."""
_SHOWN_NAMES: Final = 20


class Form(Protocol):
    """How messages, losses and notices look: ``Lines`` or ``Records``."""

    def message(self, reading: Reading) -> str: ...

    def gap(self, time_s: float, source: str, stem: str, missed: int) -> str: ...

    def notice(self, time_s: float, text: str) -> str: ...


class _Tap:
    """Receives, and writes what passes."""

    def __init__(
        self, chosen: Filter, form: Form, output: Output, count: int | None, done: trio.Event
    ) -> None:
        self._chosen = chosen
        self._form = form
        self._output = output
        self._left = count
        self._numbers = Numbers()
        self._done = done
        self.has_shown = False

    def take(self, envelopes: Sequence[Envelope]) -> Iterable[Envelope]:
        """Write what passes. A tap asks for no snapshots: others would pay for its losses."""
        for envelope in envelopes:
            if self._done.is_set():
                break
            arrival = None
            if self._chosen.covers(envelope):
                arrival, missed = self._numbers.observe(envelope)
                if missed:
                    self._output.put(
                        self._form.gap(envelope.time_s, envelope.source, stem_of(envelope), missed)
                    )
            if not self._chosen.passes(envelope):
                continue
            if not self._output.has_room:
                self._output.drop()
                continue
            reading = read(envelope, arrival)
            if reading.message is not None and not self._chosen.mentions(reading.message):
                continue
            if self._output.put(self._form.message(reading)):
                self.has_shown = True
                self._count()
        return ()

    def cut_off(self, error: LaggedError) -> None:
        """Say so; what was missed then shows as gaps."""
        self.notice(f"cut off and subscribed again: {error}")

    def notice(self, text: str) -> None:
        """Write something of the tap's own."""
        self._output.put(self._form.notice(trio.current_time(), text))

    def _count(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self._done.set()


async def watch(
    bus: Bus,
    chosen: Filter,
    form: Form,
    *,
    name: str,
    descriptor: int,
    encoding: str = "utf-8",
    history: bool = False,
    count: int | None = None,
    for_s: float | None = None,
) -> None:
    """Write what passes on a bus to ``descriptor``, until ``count`` messages or ``for_s`` seconds
    are over, or nobody reads any more.

    Raises:
        BusError: the bus was lost.
        ConfigError: nothing can be written to the descriptor.
    """
    done = trio.Event()
    failed: list[OSError] = []
    token = trio.lowlevel.current_trio_token()

    def on_closed(error: OSError) -> None:
        failed.append(error)
        with suppress(trio.RunFinishedError):  # it may have ended by itself
            token.run_sync_soon(done.set)

    def dropped_line(number: int) -> str:
        noun = "message" if number == 1 else "messages"
        return form.notice(clock(), f"{number} {noun} not shown: the output was not read in time")

    clock = trio.current_time
    output = Output(descriptor, on_closed=on_closed, dropped_line=dropped_line, encoding=encoding)
    live = trio.Event()
    lost: BusError | None = None
    written = False
    try:
        tap = _Tap(chosen, form, output, count, done)
        if history and as_remembering(bus) is None:
            tap.notice("this bus keeps no history")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_done, done, nursery.cancel_scope)
            if chosen.names:
                nursery.start_soon(_tell_names, bus, chosen.names, tap, live)
            if for_s is not None:
                nursery.start_soon(_time_out, for_s, live, done)
            try:
                await Follower(bus, chosen.patterns, name=name).run(
                    tap, history=history, on_live=live.set
                )
            except BusError as error:
                lost = error
            nursery.cancel_scope.cancel()
        output.finish()
        await trio.to_thread.run_sync(output.join, WRITE_OUT_S, abandon_on_cancel=True)
        written = True
    finally:
        if not written:
            output.finish()
            output.join(_CANCELLED_WRITE_OUT_S)
    if lost is not None:
        raise lost
    if failed and failed[0].errno != errno.EPIPE:
        raise ConfigError(f"standard output: {failed[0].strerror}")


async def _tell_names(bus: Bus, wanted: str, tap: _Tap, live: trio.Event) -> None:
    """Say so if a name that was asked for shows nothing; it may be misspelt."""
    await live.wait()
    await trio.sleep(SILENT_S)
    if tap.has_shown:
        return
    known = ""
    if (remembering := as_remembering(bus)) is not None:
        with suppress(BusError):  # which ends the tap, and says so itself
            known = _names_in(await remembering.history([">"]))
    tap.notice(f"nothing of {wanted} so far{known}")


def _names_in(past: Sequence[Envelope]) -> str:
    engines = {e.key.engine or e.source for e in past if e.category == "state"}
    policies = {e.source for e in past if e.category == "control"}
    return "".join(
        f"; {what} on this bus: {', '.join(sorted(names)[:_SHOWN_NAMES])}"
        for what, names in (("engines", engines), ("policies", policies))
        if names
    )


async def _until_done(done: trio.Event, scope: trio.CancelScope) -> None:
    await done.wait()
    scope.cancel()


async def _time_out(for_s: float, live: trio.Event, done: trio.Event) -> None:
    await live.wait()
    await trio.sleep(for_s)
    done.set()
