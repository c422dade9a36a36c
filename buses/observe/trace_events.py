"""A recording as events of the Chrome trace event format, which Perfetto opens.

One process for each engine, as each tenant hears of it: its requests as nested asynchronous slices
(queue, prefill, decode) that all carry the request's id, and counters of its queue and its KV
blocks. One process holds a track for each policy, with a slice for each control, and each engine
has a track of the outcomes that it gave; a flow leads from a control to its outcomes. Events are
not in order of time, which the format allows. Nothing here writes.
"""

from collections.abc import Generator, Iterable, Iterator
from math import floor
from typing import Any, Final

from hear.buses.observe.tap.lines import of_tenant
from hear.codec import open_body
from hear.errors import RemoteProtocolError
from hear.messages import (
    Control,
    Envelope,
    OperationOutcome,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    RequestOutcome,
)
from hear.recording import Noted, Record

Event = dict[str, Any]

_POLICIES_PID: Final = 1
_OUTCOMES_TID: Final = 1
_OPENED: Final = frozenset(
    {
        "queue_changed",
        "queue_snapshot",
        "pressure_reported",
        "request_outcome",
        "operation_outcome",
    }
)


class TraceEvents:
    """Turns records into events. ``origin_s`` is the time that becomes 0 microseconds."""

    def __init__(self, origin_s: float) -> None:
        self._origin_s = origin_s
        self._last_s = origin_s
        self._pids: dict[str, int] = {}
        self._tids: dict[str, int] = {}
        self._arrived: dict[tuple[str, str], float] = {}
        self._sent: dict[str, str] = {}  # source of each control by operation, as it is shown

    def events(self, records: Iterable[Record]) -> Iterator[Event]:
        """All events of a recording, in the order in which their ends were heard."""
        yield self._metadata("process_name", _POLICIES_PID, 0, "policies")
        yield self._metadata("thread_name", _POLICIES_PID, 0, "recorder")
        for record in records:
            if isinstance(record, Noted):
                yield self._event(
                    "i",
                    f"recorder: {record.note.what}",
                    record.time_s,
                    _POLICIES_PID,
                    0,
                    s="g",
                    args={"text": record.note.text, "missed": record.note.missed},
                )
                continue
            envelope = record.envelope
            self._last_s = max(self._last_s, envelope.time_s)
            if envelope.category != "control" and envelope.kind not in _OPENED:
                continue
            try:
                message = open_body(envelope)
            except RemoteProtocolError:
                continue
            match message:
                case Control():
                    yield from self._control(envelope, message)
                case OperationOutcome():
                    yield from self._outcome(envelope, message)
                case RequestOutcome():
                    yield from self._request(envelope, message)
                case QueueChanged():
                    counts = {"waiting": message.num_waiting, "running": message.num_running}
                    yield from self._counter(envelope, "queue", counts)
                case QueueSnapshot():
                    counts = {"waiting": len(message.waiting), "running": len(message.running)}
                    yield from self._counter(envelope, "queue", counts)
                case PressureReported():
                    for tier in message.tiers:
                        blocks = {"used": tier.used, "cached": tier.cached}
                        yield from self._counter(envelope, f"KV blocks {tier.tier}", blocks)
        yield from self._open_requests()

    # -- requests --------------------------------------------------------------------------------

    def _request(self, envelope: Envelope, outcome: RequestOutcome) -> Iterator[Event]:
        if envelope.key.request is None:
            return
        request, engine = of_tenant(envelope.key.request, envelope.tenant), _engine_of(envelope)
        if outcome.status == "accepted":
            self._arrived[engine, request] = envelope.time_s
            return
        end_s = envelope.time_s
        spans = [
            ("queue", outcome.queue_s),
            ("prefill", outcome.prefill_s),
            ("decode", outcome.decode_s),
        ]
        begin_s = self._arrived.pop((engine, request), end_s - sum(s for _, s in spans))
        pid = yield from self._engine(engine)
        args = {
            "request": envelope.key.request,
            "context": envelope.key.context,
            "status": outcome.status,
            "reason": outcome.reason,
            "prompt_tokens": outcome.prompt_tokens,
            "output_tokens": outcome.output_tokens,
            "reused_tokens": outcome.reused_tokens,
            "preemptions": outcome.preemptions,
        }
        yield from self._slice(request, request, pid, begin_s, end_s, args)
        at_s = begin_s
        for name, seconds in spans:
            until_s = min(at_s + seconds, end_s)
            if seconds > 0:
                yield from self._slice(name, request, pid, at_s, until_s, {})
            at_s = until_s

    def _slice(
        self, name: str, request: str, pid: int, begin_s: float, end_s: float, args: Event
    ) -> Iterator[Event]:
        yield self._event("b", name, begin_s, pid, 0, cat="request", id=request, args=args)
        yield self._event("e", name, end_s, pid, 0, cat="request", id=request)

    def _open_requests(self) -> Iterator[Event]:
        for (engine, request), begin_s in self._arrived.items():
            pid = yield from self._engine(engine)
            args = {"request": request, "status": "had not ended when the recording did"}
            yield from self._slice(request, request, pid, begin_s, self._last_s, args)

    # -- controls and their outcomes -------------------------------------------------------------

    def _control(self, envelope: Envelope, control: Control) -> Iterator[Event]:
        operation = _operation_of(envelope)
        tid = yield from self._policy(of_tenant(envelope.source, envelope.tenant))
        args = {
            "operation": envelope.key.operation,
            "request": envelope.key.request,
            "context": envelope.key.context,
            "engine": envelope.key.engine,
            "force": control.force,
            "reason": control.reason,
        }
        yield self._moment(envelope.kind, envelope.time_s, _POLICIES_PID, tid, "control", args)
        if operation is not None and operation not in self._sent:
            self._sent[operation] = envelope.source
            yield self._flow("s", operation, envelope.time_s, _POLICIES_PID, tid)

    def _outcome(self, envelope: Envelope, outcome: OperationOutcome) -> Iterator[Event]:
        operation = _operation_of(envelope)
        pid = yield from self._engine(_engine_of(envelope))
        args = {
            "operation": envelope.key.operation,
            "request": envelope.key.request,
            "context": envelope.key.context,
            "policy": self._sent.get(operation or ""),
            "reason": outcome.reason,
            "detail": outcome.detail,
        }
        name = f"{outcome.control} {outcome.status}"
        yield self._moment(name, envelope.time_s, pid, _OUTCOMES_TID, "outcome", args)
        if operation is not None and operation in self._sent:
            terminal = outcome.status != "accepted"
            yield self._flow(
                "f" if terminal else "t", operation, envelope.time_s, pid, _OUTCOMES_TID
            )
            if terminal:
                del self._sent[operation]

    def _moment(
        self, name: str, time_s: float, pid: int, tid: int, category: str, args: Event
    ) -> Event:
        # A flow needs a slice to hold on to, and an instant is none. Slices of one track must not
        # overlap in part, so what comes within the same microsecond stands at the same one.
        event = self._event("X", name, time_s, pid, tid, cat=category, dur=1, args=args)
        event["ts"] = floor(event["ts"])
        return event

    def _flow(self, phase: str, operation: str, time_s: float, pid: int, tid: int) -> Event:
        more = {"bp": "e"} if phase == "f" else {}
        event = self._event(
            phase, "operation", time_s, pid, tid, cat="operation", id=operation, **more
        )
        event["ts"] = floor(event["ts"])
        return event

    # -- the rest --------------------------------------------------------------------------------

    def _counter(self, envelope: Envelope, name: str, values: Event) -> Iterator[Event]:
        pid = yield from self._engine(_engine_of(envelope))
        yield self._event("C", name, envelope.time_s, pid, 0, args=values)

    def _engine(self, name: str) -> Generator[Event, None, int]:
        """The process of an engine; named before its first event."""
        pid = self._pids.get(name)
        if pid is None:
            pid = self._pids[name] = _POLICIES_PID + 1 + len(self._pids)
            yield self._metadata("process_name", pid, 0, name)
            yield self._metadata("thread_name", pid, 0, "requests")
            yield self._metadata("thread_name", pid, _OUTCOMES_TID, "outcomes of controls")
        return pid

    def _policy(self, source: str) -> Generator[Event, None, int]:
        """The track of a policy; named before its first event."""
        tid = self._tids.get(source)
        if tid is None:
            tid = self._tids[source] = len(self._tids) + 1
            yield self._metadata("thread_name", _POLICIES_PID, tid, source)
        return tid

    @staticmethod
    def _metadata(name: str, pid: int, tid: int, value: str) -> Event:
        return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}

    def _event(
        self, phase: str, name: str, time_s: float, pid: int, tid: int, **more: object
    ) -> Event:
        ts = round(1e6 * (time_s - self._origin_s), 3)
        return {"ph": phase, "name": name, "ts": ts, "pid": pid, "tid": tid, **more}


def _engine_of(envelope: Envelope) -> str:
    return of_tenant(envelope.key.engine or envelope.source, envelope.tenant)


def _operation_of(envelope: Envelope) -> str | None:
    operation = envelope.key.operation
    return None if operation is None else of_tenant(operation, envelope.tenant)
