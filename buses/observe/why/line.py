"""The line that a request waits in: who left it first, and on what ground.

Follows the queue of one engine, and the controls that move requests in it. A ground is judged by
the engine's own rule (docs/protocol.md, section 6): the protected first, in waiting order, then by
priority, then by arrival. It knows nothing of caches.
"""

from typing import Final

from hear.buses.observe.why.facts import Crowd, Ground, Passed, Place
from hear.codec import open_body
from hear.errors import RemoteProtocolError
from hear.messages import (
    Control,
    Envelope,
    Message,
    OperationOutcome,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    WaitingRequest,
)

ORDERING: Final = frozenset({"prioritise", "bound_wait", "hold"})
_REFUSED: Final = frozenset({"rejected", "unsupported", "failed"})


class Line:
    """The queue of one engine, as one request saw it."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.running: dict[str, None] = {}
        self.crowd: Crowd | None = None
        self.places: list[Place] = []
        self.passed: list[Passed] = []
        self.started_s: float | None = None
        self._waiting: dict[str, WaitingRequest] = {}
        self._arrived: dict[str, float] = {}
        self._controls: dict[tuple[str, str], Envelope] = {}  # by request and kind
        self._open: dict[str, tuple[str, str]] = {}  # by operation

    # -- requests and what is asked for them -----------------------------------------------------

    def arrived(self, request: str, time_s: float) -> None:
        """The engine has accepted a request. If this one comes again, that is what counts."""
        again = self._arrived.get(request) != time_s  # and not the same message once more
        self._arrived[request] = time_s
        if request == self.request and again:
            self.started_s = None
            self.places.clear()
            self.passed.clear()
            # Who came a moment ago is accepted and not yet reported in the queue.
            there = self._arrived.keys() | self._waiting.keys()
            num_waiting = len(there - self.running.keys() - {request})
            self.crowd = Crowd(running=len(self.running), waiting=num_waiting)

    def ended(self, request: str) -> None:
        """A request has left the engine."""
        if request == self.request:
            return
        self._arrived.pop(request, None)
        self._waiting.pop(request, None)
        self.running.pop(request, None)
        for kind in ORDERING:
            control = self._controls.pop((request, kind), None)
            if control is not None and control.key.operation is not None:
                self._open.pop(control.key.operation, None)

    def asked(self, control: Envelope) -> None:
        """A policy has sent a control that may move a request."""
        request, operation = control.key.request, control.key.operation
        if request is not None and operation is not None:
            self._open[operation] = request, control.kind
            self._controls[request, control.kind] = control

    def answered(self, outcome: Envelope) -> None:
        """An engine has answered a control; a refused one moves nobody."""
        operation = outcome.key.operation
        place = self._open.get(operation or "")
        if place is None:
            return
        message = opened_body(outcome)
        if isinstance(message, OperationOutcome) and message.status in _REFUSED:
            del self._open[operation or ""]
            control = self._controls.get(place)
            if control is not None and control.key.operation == operation:
                del self._controls[place]

    def control_of(self, kind: str, request: str | None = None) -> tuple[str, Control] | None:
        """Who asked for this kind of control for a request (this one by default), and what."""
        envelope = self._controls.get((request or self.request, kind))
        message = None if envelope is None else opened_body(envelope)
        if envelope is None or not isinstance(message, Control):
            return None
        return envelope.source, message

    # -- the queue -------------------------------------------------------------------------------

    def replace(self, snapshot: QueueSnapshot, time_s: float) -> None:
        """The whole queue, as the engine told it."""
        self._waiting = {w.request: w for w in snapshot.waiting}
        self.running = {r.request: None for r in snapshot.running}
        for waiting in snapshot.waiting:
            if waiting.request == self.request:
                self._note_place(waiting, time_s)
        if self.request in self.running and self.started_s is None:
            self.started_s = time_s

    def change(self, change: QueueChanged, time_s: float) -> None:
        """What moved in it."""
        for waiting in change.waiting:
            self.running.pop(waiting.request, None)
            self._waiting[waiting.request] = waiting
            if waiting.request == self.request:
                self._note_place(waiting, time_s)
        if self.request in change.started:
            if self.started_s is None:
                self.started_s = time_s
        elif self.started_s is None and self.request in self._waiting:
            self.passed += [self._pass(request, time_s) for request in change.started]
        for request in change.started:
            self._waiting.pop(request, None)
            self.running[request] = None
        for request in change.ended:
            self.ended(request)

    def restart(self) -> None:
        """The engine began a new epoch, with an empty queue."""
        self._waiting.clear()
        self.running.clear()

    def _note_place(self, waiting: WaitingRequest, time_s: float) -> None:
        self.places.append(
            Place(
                time_s=time_s,
                priority=waiting.priority,
                protected=waiting.protected,
                held=waiting.held,
            )
        )

    def _pass(self, request: str, time_s: float) -> Passed:
        other, mine = self._waiting.get(request), self._waiting[self.request]
        arrived_s = other.since_s if other is not None else self._arrived.get(request)
        ground, kind, of = self._ground(request, other, mine, arrived_s)
        control = self.control_of(kind, of) if kind else None
        return Passed(
            request=request,
            arrived_s=arrived_s,
            started_s=time_s,
            ground=ground,
            by=control[0] if control else "",
            why=control[1].reason if control else "",
            prompt_tokens=other.prompt_tokens if other is not None else 0,
        )

    def _ground(
        self,
        request: str,
        other: WaitingRequest | None,
        mine: WaitingRequest,
        arrived_s: float | None,
    ) -> tuple[Ground, str, str]:
        """The ground, and the kind of control behind it and the request that it was for."""
        if mine.held and not (other is not None and other.held):
            return "held", "hold", self.request
        earlier = arrived_s is not None and arrived_s <= mine.since_s
        protected = other is not None and other.protected
        ahead, behind = self._priority(request, other), self._priority(self.request, mine)
        if protected and not mine.protected:
            if earlier and ahead <= behind:
                return "earlier", "", request
            return "protected", "bound_wait", request
        if protected == mine.protected and not protected and ahead < behind and not earlier:
            if self.control_of("prioritise", request) is None and behind > 0:
                return "put_back", "prioritise", self.request
            return "priority", "prioritise", request
        if earlier and (protected == mine.protected) and (protected or ahead <= behind):
            return "earlier", "", request
        return "untold", "", request

    def _priority(self, request: str, waiting: WaitingRequest | None) -> int:
        # Who is moved and starts at once is not reported as waiting at its new place.
        control = self.control_of("prioritise", request)
        if control is not None and isinstance(control[1], Prioritise):
            return control[1].priority
        return waiting.priority if waiting is not None else 0


def opened_body(envelope: Envelope) -> Message | None:
    """The body of a message; None if its kind is not known, or it cannot be read."""
    try:
        return open_body(envelope)
    except RemoteProtocolError:
        return None
