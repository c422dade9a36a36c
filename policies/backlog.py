"""What each engine has yet to do, in prompt tokens: its queue, and what was just sent to it.

Between the moment a request is routed and the moment its engine reports it, only the one who routed
it knows; a burst would all go to the engine that was idle before it. Kept by the change, so that a
decision costs nothing that grows with the queues. It must not know what a decision is made by.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hear.engine_view import EngineView, EngineViews
from hear.messages import QueueChanged, QueueSnapshot

_SPARE_ENGINES = 1_024

LOST_S = 60.0
"""After how long a request that no engine has reported is taken for one that never came."""


@dataclass(slots=True)
class _Work:
    """One request: its prompt, and how much of it is to be computed, in tokens."""

    prompt_tokens: int
    to_compute: int
    expected_s: float
    seen: bool = False
    started: bool = False


@dataclass(slots=True)
class _Engine:
    """``num_waiting``, ``waiting`` and ``prompts`` sum up ``work``; ``prefill`` has started."""

    epoch: int
    work: dict[str, _Work] = field(default_factory=dict)
    num_waiting: int = 0
    waiting: int = 0
    prompts: int = 0
    prefill: float = 0.0
    drained_s: float = 0.0

    def add(self, request: str, work: _Work) -> None:
        self.drop(request)
        self.work[request] = work
        self.prompts += work.prompt_tokens
        self.waiting += work.to_compute
        self.num_waiting += 1

    def drop(self, request: str) -> None:
        work = self.work.pop(request, None)
        if work is not None:
            self.prompts -= work.prompt_tokens
            if not work.started:
                self.waiting -= work.to_compute
                self.num_waiting -= 1

    def start(self, work: _Work) -> None:
        if not work.started:
            work.started = True
            self.waiting -= work.to_compute
            self.num_waiting -= 1
            self.prefill += work.to_compute

    def seen(self) -> list[str]:
        """The requests that it has reported."""
        return [request for request, work in self.work.items() if work.seen]

    def drain(self, now: float, rate: float) -> None:
        """Prefill goes on at ``rate`` tokens a second, if that is known; decoding is left out."""
        self.prefill = max(self.prefill - (now - self.drained_s) * rate, 0.0) if rate else 0.0
        self.drained_s = now


class Backlogs:
    """The work ahead of each engine, by name."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._where: dict[str, str] = {}  # requests by the engine that they are expected at
        self._unseen: dict[str, None] = {}  # those that none has reported, oldest first

    def outstanding(self, engine: str) -> int:
        """Prompt tokens of all requests at an engine that have not ended."""
        return self._engines[engine].prompts if engine in self._engines else 0

    def num_waiting(self, engine: str) -> int:
        """Requests at an engine that have not started."""
        return self._engines[engine].num_waiting if engine in self._engines else 0

    def ahead(self, engine: str, now: float, rate: float) -> float:
        """Tokens that an engine computes before those of a request that comes now.

        ``rate`` is what it computes in a second.
        """
        at = self._engines.get(engine)
        if at is None:
            return 0.0
        at.drain(now, rate)
        return at.waiting + at.prefill

    def expect(
        self, request: str, engine: str, prompt_tokens: int, to_compute: int, now: float
    ) -> None:
        """A request was or is being sent to an engine, and so to no other.

        Nothing changes if it is known to be there.
        """
        if self._where.get(request) == engine:
            return
        self.end(request)
        at = self._engines.setdefault(engine, _Engine(epoch=0))
        at.add(request, _Work(prompt_tokens, to_compute, now))
        self._where[request] = engine
        self._unseen[request] = None

    def end(self, request: str) -> None:
        """A request has ended, or will not come."""
        self._unseen.pop(request, None)
        engine = self._where.pop(request, None)
        if engine is not None:
            self._engines[engine].drop(request)

    def observe(self, s: EngineViews, now: float) -> list[str]:
        """Take over what has changed in the queues; returns the requests that are gone with it."""
        gone: list[str] = []
        for name in s.forgotten:
            gone += self._leave(name)
        for view, message in s.changes:
            if isinstance(message, QueueChanged | QueueSnapshot):
                gone += self._observe(view, message, now)
        while self._unseen:
            oldest = next(iter(self._unseen))
            if now - self._engines[self._where[oldest]].work[oldest].expected_s < LOST_S:
                break
            gone.append(oldest)
            self.end(oldest)
        if len(self._engines) > len(s) + _SPARE_ENGINES:  # names that only requests have brought
            idle = [name for name, at in self._engines.items() if not at.work and name not in s]
            for name in idle:
                del self._engines[name]
        return gone

    def _leave(self, engine: str) -> Iterable[str]:
        """Nothing is known of an engine any more; what is on its way there may still come."""
        at = self._engines.get(engine)
        if at is None:
            return ()
        gone = at.seen()
        for request in gone:
            self.end(request)
        if not at.work:
            del self._engines[engine]
        return gone

    def _observe(
        self, view: EngineView, message: QueueChanged | QueueSnapshot, now: float
    ) -> Iterable[str]:
        at = self._engines.setdefault(view.name, _Engine(view.epoch))
        at.drain(now, max(view.costs.prefill_tokens_per_s, 0.0) if view.costs is not None else 0.0)
        gone: list[str] = []
        if at.epoch != view.epoch:  # what it had has failed; what is on its way to it has not
            at.epoch, at.prefill = view.epoch, 0.0
            gone = at.seen()
        elif isinstance(message, QueueSnapshot):
            gone = [r for r in at.seen() if r not in view.waiting and r not in view.running]
        if isinstance(message, QueueSnapshot):
            started: Iterable[str] = tuple(view.running)
        else:
            gone += message.ended
            started = message.started
        gone = [request for request in gone if self._where.get(request) == view.name]
        for request in gone:
            self.end(request)
        for waiting in message.waiting:
            tokens = waiting.prompt_tokens
            if waiting.request in at.work and at.work[waiting.request].started:
                self.end(waiting.request)  # it was preempted, and is computed anew
            self.expect(waiting.request, view.name, tokens, tokens, now)  # if nobody has told
            self._see(waiting.request, at)
        for request in started:
            if request in at.work:
                self._see(request, at)
                at.start(at.work[request])
        return gone

    def _see(self, request: str, at: _Engine) -> None:
        at.work[request].seen = True
        self._unseen.pop(request, None)
