"""The engine's queue as HEAR's thread knows it: a copy, kept by the news of the engine's thread.

It owns who waits and who runs, and how many of each tenant and with how many tokens: with a long
queue, to count them anew with each news would cost the engine's thread the interpreter.
"""

from collections import defaultdict
from dataclasses import dataclass

from hear.engines.vllm.plugin.bridge import Moved
from hear.messages import QueueChanged, QueueSnapshot, RunningRequest, WaitingRequest
from hear.operation import Ref


@dataclass(slots=True)
class _Totals:
    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    running_tokens: int = 0

    def count(self, moved: Moved, sign: int) -> None:
        if moved.state == "waiting":
            self.waiting += sign
            self.waiting_tokens += sign * moved.prompt_tokens
        else:
            self.running += sign
            self.running_tokens += sign * (moved.prompt_tokens + moved.output_tokens)


class QueueCopy:
    """Who waits and who runs. ``offset_s`` leads from ``time.monotonic`` to the clock of trio."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self._rows: dict[Ref, Moved] = {}
        self._totals: defaultdict[str, _Totals] = defaultdict(_Totals)

    def rows(self) -> list[tuple[str, Moved]]:
        """All requests that are there, each with its tenant."""
        return [(tenant, moved) for (tenant, _), moved in self._rows.items()]

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
        own = [moved for (owner, _), moved in self._rows.items() if owner == tenant]
        waiting = sorted((m for m in own if m.state == "waiting"), key=_place)
        return QueueSnapshot(
            waiting=tuple(map(self._as_waiting, waiting)),
            running=tuple(_as_running(m) for m in own if m.state == "running"),
        )

    def move(self, tenant: str, rows: list[Moved]) -> QueueChanged:
        """Take in where requests of a tenant stand now; returns what to tell it."""
        waiting, started, ended = [], [], []
        totals = self._totals[tenant]
        for moved in rows:
            ref = tenant, moved.key.request or ""
            if (former := self._rows.pop(ref, None)) is not None:
                totals.count(former, -1)
            if moved.state == "ended":
                ended.append(ref[1])
                continue
            self._rows[ref] = moved
            totals.count(moved, 1)
            if moved.state == "waiting":
                waiting.append(self._as_waiting(moved))
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

    def _as_waiting(self, moved: Moved) -> WaitingRequest:
        return WaitingRequest(
            request=moved.key.request or "",
            context=moved.key.context,
            since_s=moved.since_s + self.offset_s,
            priority=moved.priority,
            protected=moved.protected,
            held=moved.held,
            prompt_tokens=moved.prompt_tokens,
        )


def _place(moved: Moved) -> tuple[bool, bool, int, float]:
    """The order in which vLLM would take those who wait; the held, whom it would not, last."""
    return moved.held, not moved.protected, 0 if moved.protected else moved.priority, moved.since_s


def _as_running(moved: Moved) -> RunningRequest:
    return RunningRequest(
        request=moved.key.request or "",
        context=moved.key.context,
        prompt_tokens=moved.prompt_tokens,
        output_tokens=moved.output_tokens,
    )
