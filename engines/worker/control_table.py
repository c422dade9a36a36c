"""Carrying out controls as every engine of ours does: by a handler for each kind.

A handler says at once how it went, or that the effect is under way; ``_end`` then tells of its end.
"""

from collections.abc import Callable

from hear.errors import RemoteProtocolError
from hear.interfaces import ApplyResult
from hear.messages import Cancel, Control, OperationOutcome, Route, Withdraw
from hear.operation import Operation, Ref

Handler = Callable[[Operation, float], ApplyResult]
"""Carries out a control at a time of the engine's clock, in seconds."""


class ControlTable:
    """What each control does to one engine, which fills in ``_handlers``.

    ``ended`` collects the operations that have ended, for the engine to report and clear.
    """

    _handlers: dict[type[Control], Handler]

    def __init__(self, name: str) -> None:
        self.ended: list[tuple[Ref, OperationOutcome]] = []
        self._name = name
        self._fallbacks: dict[Ref, str] = {}

    def supported(self) -> tuple[str, ...]:
        """The kinds of control that this engine carries out."""
        return tuple(str(kind.__struct_config__.tag) for kind in self._handlers)

    def apply(self, operation: Operation, now: float) -> ApplyResult:
        """Carry out a control, or begin to."""
        if isinstance(operation.control, Cancel | Withdraw):
            return ApplyResult("completed")  # what it ends was reverted before
        try:
            result = self._handlers[type(operation.control)](operation, now)
        except RemoteProtocolError as error:
            return ApplyResult("rejected", "malformed", str(error))
        if result.status == "accepted" and result.fallback is not None:
            self._fallbacks[operation.ref] = result.fallback
        return result

    def _route(self, operation: Operation, now: float) -> ApplyResult:
        """Nothing is left to do where a request was routed to."""
        control = operation.control
        assert isinstance(control, Route)
        if self._name in control.targets:
            return ApplyResult("completed")
        if self._name in control.fallback:
            return ApplyResult("completed", fallback=self._name)
        return ApplyResult("rejected", "not_this_engine", f"this is {self._name}")

    def _end(self, operation: Ref, status: str, reason: str, detail: str = "") -> None:
        """An operation that was accepted has ended."""
        outcome = OperationOutcome(
            status="completed" if status == "completed" else "failed",
            reason=reason,
            detail=detail,
            fallback=self._fallbacks.pop(operation, None),
        )
        self.ended.append((operation, outcome))
