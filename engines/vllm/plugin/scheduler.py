"""vLLM's schedulers with HEAR in them, for ``--scheduler-cls`` (``hear vllm serve`` names one).

The mixin only tells ``Plugin`` where something happens and lets it have its turn between steps.
What it needs of vLLM is few names, which ``versions.py`` holds to the range that was tested.
"""

from collections.abc import Callable
from typing import Any

import structlog
import vllm.v1.engine.core as engine_core
from vllm.config.kv_events import KVEventsConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType

from hear.app.log import to_stderr_unless_set_up
from hear.engines.vllm.plugin.bridge import SchedulerLock
from hear.engines.vllm.plugin.engine_side import Plugin
from hear.engines.vllm.plugin.host import Host
from hear.engines.vllm.plugin.settings import settings_of
from hear.engines.vllm.plugin.waiting_queue import WaitingQueue

_log = structlog.get_logger("hear.vllm")


class _Tee:
    """A publisher of KV events that HEAR hears as well."""

    def __init__(self, inner: Any, hear: Callable[[Any], None]) -> None:
        self._inner = inner
        self._hear = hear

    def publish(self, batch: Any) -> None:
        self._hear(batch.events)
        self._inner.publish(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_Over: Any = object
"""A scheduler of vLLM, as far as types are concerned: the mixin is only ever used over one."""


class HearMixin(_Over):
    """Over a scheduler of vLLM.

    vLLM calls it on the engine's thread, which holds the scheduler lock but while a step computes.
    Then HEAR's thread may carry commands out (``bridge``), which calls the methods that do not take
    part in a step, such as ``add_request``.

    HEAR can make serving better and must never break it: if something of HEAR's fails, that is
    logged once, its bus is told that the engine has stopped, and vLLM serves on in its own order.
    """

    kv_event_publisher: Any
    hear: Plugin | None = None
    hear_host: Host | None = None
    _scheduler_lock = SchedulerLock()
    """The plug-in's lock. This one, of the class, is used if the plug-in could not be made, and
    then nobody else tries it."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = settings_of(vllm_config.additional_config)
        events = vllm_config.kv_events_config
        if events is None or not events.enable_kv_cache_events:
            # HEAR needs them in the process alone; nobody else is told.
            vllm_config.kv_events_config = KVEventsConfig(
                enable_kv_cache_events=True, publisher="null"
            )
        super().__init__(vllm_config, *args, **kwargs)
        self.waiting = WaitingQueue()
        self.kv_holding_waiting = WaitingQueue()
        # Both are in HEAR's order, whatever the policy. Whom to preempt is for vLLM the last that
        # runs, which ``Plugin.before_step`` sees to. Its own way by priority may preempt one that
        # has been given tokens in the same step, and then leaves hashes on blocks that are never
        # computed (vLLM's issue 57580), which others would reuse.
        self.policy = SchedulingPolicy.FCFS
        to_stderr_unless_set_up()
        try:
            self.hear = Plugin(self, settings)
            self.hear_host = Host(self.hear, self, settings)
        except Exception:
            self._give_up()
            return
        self.kv_event_publisher = _Tee(
            self.kv_event_publisher, lambda events: self._tell("kv_events", events)
        )
        self.hear.bridge.drain = lambda: self._tell("turn")
        self._scheduler_lock = self.hear.bridge.scheduler_lock
        self.hear_host.start()

    def _tell(self, hook: str, *args: Any) -> None:
        """Let the plug-in do its part at one of the places that it hooks."""
        if self.hear is None:
            return
        try:
            getattr(self.hear, hook)(*args)
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        """Go on without HEAR, from within the handling of what went wrong with it."""
        _log.exception("hear.failed", effect="vLLM serves on in its own order, without HEAR")
        host, self.hear, self.hear_host = self.hear_host, None, None
        for queue in (self.waiting, self.kv_holding_waiting):
            queue.admit_all()
        if host is not None:
            host.stop(wait=False)

    def add_request(self, request: Any) -> None:
        self._scheduler_lock.acquire()
        is_new = request.request_id not in self.requests
        if is_new:
            self._tell("arriving", request)
        super().add_request(request)
        if is_new and request.request_id in self.requests:
            self._tell("added", request)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        self._scheduler_lock.acquire()
        return super().finish_requests(*args, **kwargs)

    def has_requests(self) -> bool:
        self._scheduler_lock.acquire()
        self._tell("turn")
        has_some: bool = super().has_requests()
        if not has_some:
            self._tell("idle")
        return has_some

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._scheduler_lock.acquire()
        self._tell("before_step")
        output = super().schedule(*args, **kwargs)
        self._tell("scheduled", output)
        if output.total_num_scheduled_tokens:
            self._scheduler_lock.release()
        return output

    def get_grammar_bitmask(self, *args: Any, **kwargs: Any) -> Any:
        # Called while a step computes, or is about to.
        was_open = self._scheduler_lock.acquire()
        bitmask = super().get_grammar_bitmask(*args, **kwargs)
        if was_open:
            self._scheduler_lock.release()
        return bitmask

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._scheduler_lock.acquire()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._tell("stepped", scheduler_output)
        return outputs

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._tell("preempted", request)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        freed = super()._free_request(request, *args, **kwargs)
        self._tell("freed", request)
        return freed

    def shutdown(self) -> None:
        if self.hear_host is not None:
            self.hear_host.stop()
        super().shutdown()


class HearScheduler(HearMixin, Scheduler):
    """Over the synchronous scheduler."""


class HearAsyncScheduler(HearMixin, AsyncScheduler):
    """Over the scheduler that plans a step while the one before runs."""


def _let_commands_wake_an_idle_engine() -> None:
    """Make an engine core show its input queue to the plug-in in its scheduler.

    An idle engine sleeps on that queue, and a scheduler is not told whose it is. This module is
    loaded while the engine core is being made, before its loop begins.
    """
    original = engine_core.EngineCoreProc._process_input_queue

    def introduce(core: Any) -> None:
        plugin = getattr(core.scheduler, "hear", None)
        if isinstance(plugin, Plugin):
            queue = core.input_queue
            plugin.bridge.wake_engine = lambda: queue.put_nowait(
                (EngineCoreRequestType.WAKEUP, None)
            )
        core._process_input_queue = original.__get__(core)  # once is enough
        core._process_input_queue()

    engine_core.EngineCoreProc._process_input_queue = introduce


_let_commands_wake_an_idle_engine()
