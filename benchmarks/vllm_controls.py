"""Controls sent to a real engine, for ``vllm_overhead``: one at a time, and as many as go."""

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from hear.app.clock import new_epoch
from hear.app.connection import connected
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.errors import EngineError
from hear.interfaces import Bus, InferenceClient, InferenceRequest, Subscription
from hear.messages import Control, Envelope, Key, OperationOutcome, Prioritise, Retain
from hear.operation import TERMINAL
from hear.sender_operations import SenderOperations

ANSWER_S: Final = 10.0
PAUSE_S: Final = 0.01
"""Between two controls, so that each finds the engine as the first did."""

SLOTS: Final = 16
"""Requests that the engine serves at once; more wait."""

NOBODY: Final = "nobody"
"""A name that no engine has: what is sent to it costs the bus, and is answered by none."""

LAST_S: Final = 240.0
"""How long a flood's last outcomes may take: an engine gives controls a share of its time."""

_TICK_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine as seen from the bus and from its data path; ``request`` makes one of a length."""

    bus: Bus
    name: str
    client: InferenceClient
    request: Callable[[int], InferenceRequest]


@dataclass(slots=True)
class Latencies:
    """``applied`` is until the engine had a result, by the clock that both share; ``answered``
    until it was heard of on the bus, by the sender's own clock alone. In milliseconds."""

    applied_ms: list[float] = field(default_factory=list)
    answered_ms: list[float] = field(default_factory=list)


async def latencies(engine: Engine, count: int, *, busy: bool) -> dict[str, Latencies]:
    """How soon controls take hold; of a busy engine also those that move a waiting request.

    Raises:
        EngineError: a control was not carried out.
    """
    kept = engine.request(16)
    await engine.client.generate(kept)
    found = {"retain": Latencies()}
    async with (
        engine.bus.subscribe(["outcome.*.*.operation_outcome.>"], name="overhead") as outcomes,
        trio.open_nursery() as nursery,
    ):
        controls = _Controls(engine, outcomes)
        waiting: InferenceRequest | None = None
        if busy:
            for _ in range(SLOTS):
                nursery.start_soon(engine.client.generate, engine.request(3500))
            await trio.sleep(1.0)  # until they decode
            waiting = engine.request(16)
            nursery.start_soon(engine.client.generate, waiting)
            await trio.sleep(0.3)  # until it waits
            found["prioritise"] = Latencies()
        for number in range(count):
            control: Control = Retain(lease_s=60.0, score=1 - number / (2 * count))
            about = Key(context=kept.context, engine=engine.name)
            await controls.measure(control, about, found["retain"])
            if waiting is not None:
                control = Prioritise(priority=1 + number % 2)
                about = Key(request=waiting.id, engine=engine.name)
                await controls.measure(control, about, found["prioritise"])
        nursery.cancel_scope.cancel()
    return found


class _Controls:
    """Sends one control after the other and waits for the answer to each."""

    def __init__(self, engine: Engine, outcomes: Subscription) -> None:
        self._bus = engine.bus
        self._outcomes = outcomes
        self._sequencer = Sequencer("overhead-controls", new_epoch())

    async def measure(self, control: Control, about: Key, into: Latencies) -> None:
        await trio.sleep(PAUSE_S)
        sent_s = trio.current_time()
        operation = self._sequencer.next_id()
        key = Key(
            request=about.request, context=about.context, engine=about.engine, operation=operation
        )
        self._bus.publish(self._sequencer.wrap(control, key, sent_s))
        with trio.move_on_after(ANSWER_S):
            while True:
                for envelope in await self._outcomes.receive():
                    if envelope.key.operation == operation:
                        self._check(envelope)
                        into.applied_ms.append(1e3 * (envelope.time_s - sent_s))
                        into.answered_ms.append(1e3 * (trio.current_time() - sent_s))
                        return
        raise EngineError(f"{type(control).__name__}: no answer within {ANSWER_S:g} s")

    @staticmethod
    def _check(envelope: Envelope) -> None:
        outcome = open_body(envelope)
        assert isinstance(outcome, OperationOutcome)
        if outcome.status not in ("accepted", "completed"):
            raise EngineError(f"{outcome.control}: {outcome.status}: {outcome.reason}")


async def flood(url: str, engine: str, seconds: float, rate: int) -> int:
    """Send controls at a rate, count how each ends, and print what came of it as JSON.

    They are of two kinds in turns: priorities of requests that are not there, which the engine's
    engine keeps until their deadline, and leases of a context, which its scheduler has to look at.
    As every sender does, it says again what has not been answered.
    """
    sent: set[str] = set()
    sender_operations = SenderOperations()
    ends: dict[str, set[str]] = {}
    sequencer = Sequencer("flood", new_epoch())
    async with (
        connected(url, name="flood") as bus,
        bus.subscribe(
            ["outcome.*.*.operation_outcome.>"], name="flood", capacity=4_000_000
        ) as outcomes,
        trio.open_nursery() as nursery,
    ):
        heard = trio.Event()

        async def hear() -> None:
            nonlocal heard
            while True:
                batch = await outcomes.receive()
                for envelope in batch:
                    outcome = open_body(envelope)
                    operation = envelope.key.operation or ""
                    if operation not in sent or not isinstance(outcome, OperationOutcome):
                        continue
                    sender_operations.hear(envelope.key, outcome)
                    if outcome.status in TERMINAL:
                        # To what is said again an engine gives the same answer again.
                        ends.setdefault(operation, set()).add(outcome.status)
                heard.set()

        nursery.start_soon(hear)
        begun_s = trio.current_time()
        while (passed_s := trio.current_time() - begun_s) < seconds:
            for number in range(len(sent), int(passed_s * rate)):
                operation = sequencer.next_id()
                sent.add(operation)
                now = trio.current_time()
                control, key = _flooding(number, engine, operation, now)
                envelope = sequencer.wrap(control, key, now)
                bus.publish(envelope)
                if engine != NOBODY:
                    sender_operations.submit(envelope, control, now, now + LAST_S)
            await trio.sleep(_TICK_S)
        if engine != NOBODY:
            with trio.move_on_after(LAST_S):
                unanswered: deque[Envelope] = deque()
                while len(ends) < len(sent):
                    unanswered += sender_operations.due(trio.current_time())[0]
                    for _ in range(min(len(unanswered), int(rate * _TICK_S))):
                        bus.publish(unanswered.popleft())
                    heard = trio.Event()
                    with trio.move_on_after(_TICK_S if unanswered else 0.1):
                        await heard.wait()
        nursery.cancel_scope.cancel()
    told: dict[str, int | None] = {"sent": len(sent)}
    if engine == NOBODY:
        told |= dict.fromkeys(("ended", "lost", "ended_twice"))
    else:
        counts = [len(ends.get(operation, ())) for operation in sent]
        told["ended"] = sum(1 for count in counts if count)
        told["lost"] = counts.count(0)
        told["ended_twice"] = sum(1 for count in counts if count > 1)
    print(json.dumps(told))
    return 0


def _flooding(number: int, engine: str, operation: str, now: float) -> tuple[Control, Key]:
    if number % 2:
        key = Key(request=f"flood-{number % 1000}", engine=engine, operation=operation)
        return Prioritise(priority=number % 7, deadline_s=now + 1.0), key
    key = Key(context="overhead/1", engine=engine, operation=operation)
    return Retain(lease_s=1.0, score=0.5, deadline_s=now + 5.0), key
