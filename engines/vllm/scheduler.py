"""vLLM's schedulers with HEAR in them, for ``--scheduler-cls`` (``hear vllm serve`` names one).

The mixin only tells ``Plugin`` where something happens and lets it have its turn between steps.
What it needs of vLLM is few names, which ``versions.py`` holds to the range that was tested.
"""

from typing import Any

import vllm.v1.engine.core as engine_core
from vllm.config.kv_events import KVEventsConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType

from hear.engines.vllm.host import Host
from hear.engines.vllm.plugin import Plugin
from hear.engines.vllm.settings import settings_of
from hear.engines.vllm.waiting_queue import WaitingQueue


class _Tee:
    """A publisher of KV events that HEAR hears as well."""

    def __init__(self, inner: Any, plugin: Plugin) -> None:
        self._inner = inner
        self._plugin = plugin

    def publish(self, batch: Any) -> None:
        self._plugin.kv_events(batch.events)
        self._inner.publish(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_Over: Any = object
"""A scheduler of vLLM, as far as types are concerned: the mixin is only ever used over one."""


class HearMixin(_Over):
    """Over a scheduler of vLLM; everything here runs on the engine's thread."""

    kv_event_publisher: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        events = vllm_config.kv_events_config
        if events is None or not events.enable_kv_cache_events:
            # HEAR needs them in the process alone; nobody else is told.
            vllm_config.kv_events_config = KVEventsConfig(
                enable_kv_cache_events=True, publisher="null"
            )
        super().__init__(vllm_config, *args, **kwargs)
        self.waiting = WaitingQueue()
        self.kv_holding_waiting = WaitingQueue()
        # Whom to preempt goes by priority then, so that the protected are the last.
        self.policy = SchedulingPolicy.PRIORITY
        settings = settings_of(vllm_config.additional_config)
        self.hear = Plugin(self, settings)
        self.kv_event_publisher = _Tee(self.kv_event_publisher, self.hear)
        self.hear_host = Host(self.hear, self, settings)
        self.hear_host.start()

    def add_request(self, request: Any) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new and request.request_id in self.requests:
            self.hear.added(request)

    def has_requests(self) -> bool:
        self.hear.turn()
        has_some: bool = super().has_requests()
        if not has_some:
            self.hear.idle()
        return has_some

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.hear.before_step()
        output = super().schedule(*args, **kwargs)
        self.hear.scheduled(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.hear.stepped(scheduler_output)
        return outputs

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.hear.preempted(request)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        freed = super()._free_request(request, *args, **kwargs)
        self.hear.freed(request)
        return freed

    def shutdown(self) -> None:
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
