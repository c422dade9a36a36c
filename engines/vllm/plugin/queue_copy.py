"""The engine's queue as HEAR's thread knows it: a copy, kept by the engine's events.

It owns who waits and who runs, and how many of each tenant and with how many tokens: with a long
queue, to count them anew with each engine_events would cost the engine's thread the interpreter.
"""

from collections import defaultdict
from dataclasses import dataclass

from hear.engines.vllm.plugin.bridge import RequestUpdate
from hear.messages import QueueChanged, QueueSnapshot, RunningRequest, WaitingRequest
from hear.operation import Ref


@dataclass(slots=True)
class _Totals:
    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    running_tokens: int = 0

    def count(self, update: RequestUpdate, sign: int) -> None:
        if update.state == "waiting":
            self.waiting += sign
            self.waiting_tokens += sign * update.prompt_tokens
        else:
            self.running += sign
            self.running_tokens += sign * (update.prompt_tokens + update.output_tokens)


class QueueCopy:
    """Who waits and who runs. ``offset_s`` leads from ``time.monotonic`` to the clock of trio."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self._rows: dict[Ref, RequestUpdate] = {}
        self._totals: defaultdict[str, _Totals] = defaultdict(_Totals)

    def rows(self) -> list[tuple[str, RequestUpdate]]:
        """All requests that are there, each with its tenant."""
        return [(tenant, update) for (tenant, _), update in self._rows.items()]

    @property
    def num_waiting(self) -> int:
        """How many wait, of all tenants."""
        return sum(totals.waiting for totals in self._totals.values())

    @property
    def num_running(self) -> int:
        """How many run, of all tenants."""
        return sum(totals.running for totals in self._totals.values())

    def snapshot(self, tenant: str) -> QueueSnapshot:
        """Who of a tenant waits, in the engine's order, and who runs."""
        own = [update for (owner, _), update in self._rows.items() if owner == tenant]
        waiting = sorted((m for m in own if m.state == "waiting"), key=_place)
        return QueueSnapshot(
            waiting=tuple(map(self._as_waiting, waiting)),
            running=tuple(_as_running(m) for m in own if m.state == "running"),
        )

    def move(self, tenant: str, rows: list[RequestUpdate]) -> QueueChanged:
        """Take in where requests of a tenant stand now; returns what to tell it."""
        waiting, started, ended = [], [], []
        totals = self._totals[tenant]
        for update in rows:
            ref = tenant, update.key.request or ""
            if (former := self._rows.pop(ref, None)) is not None:
                totals.count(former, -1)
            if update.state == "ended":
                ended.append(ref[1])
                continue
            self._rows[ref] = update
            totals.count(update, 1)
            if update.state == "waiting":
                waiting.append(self._as_waiting(update))
            else:
                started.append(ref[1])
        if not totals.waiting + totals.running:
            del self._totals[tenant]
        return QueueChanged(
            waiting=tuple(waiting),
            started=tuple(started),
            ended=tuple(ended),
            num_waiting=totals.waiting,
            num_running=totals.running,
            waiting_tokens=totals.waiting_tokens,
            running_tokens=totals.running_tokens,
        )

    def _as_waiting(self, update: RequestUpdate) -> WaitingRequest:
        return WaitingRequest(
            request=update.key.request or "",
            context=update.key.context,
            since_s=update.since_s + self.offset_s,
            priority=update.priority,
            protected=update.protected,
            held=update.held,
            prompt_tokens=update.prompt_tokens,
        )


def _place(update: RequestUpdate) -> tuple[bool, bool, int, float]:
    """The order in which vLLM would take those who wait; the held, whom it would not, last."""
    return (
        update.held,
        not update.protected,
        0 if update.protected else update.priority,
        update.since_s,
    )


def _as_running(update: RequestUpdate) -> RunningRequest:
    return RunningRequest(
        request=update.key.request or "",
        context=update.key.context,
        prompt_tokens=update.prompt_tokens,
        output_tokens=update.output_tokens,
    )
