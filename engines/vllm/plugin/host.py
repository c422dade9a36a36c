"""HEAR's thread in an engine's process: a trio loop of its own, with the bus and the worker.

Serving comes first: an engine whose bus is not there serves in its own order, and joins as soon as
the bus answers. If this thread fails, that is logged, and the engine serves on.
"""

import threading
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from hear.app.clock import SharedClock, new_epoch
from hear.app.connection import connected, default_url
from hear.app.nursery import unwrapped
from hear.engines.vllm.plugin.backend import VllmBackend
from hear.engines.vllm.plugin.engine_side import Plugin
from hear.engines.vllm.plugin.settings import Settings
from hear.engines.worker.loop import EngineWorker
from hear.engines.worker.operation_log import OperationLog
from hear.errors import BusError, ConfigError

_log = structlog.get_logger("hear.vllm")

RETRY_S: Final = (0.2, 5.0)
"""Shortest and longest time between attempts to join the bus."""

CONTROL_SHARE: Final = 0.15
"""How much of a processor controls may take, of which the engine's own thread needs one."""

STOP_WITHIN_S: Final = 1.0
"""How long an engine that ends waits for this thread to leave the bus."""


class Host:
    """The thread of one engine."""

    def __init__(self, plugin: Plugin, scheduler: Any, settings: Settings) -> None:
        self.backend = VllmBackend(plugin, scheduler, settings)
        self._settings = settings
        self._cancel = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=self._main, name="hear", daemon=True)

    def start(self) -> None:
        """Begin, and return at once."""
        if self._settings.bus != "memory":
            self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Leave the bus; waits no longer than ``STOP_WITHIN_S``, or not at all."""
        token = self._token
        if token is not None:
            try:
                token.run_sync_soon(self._cancel.cancel)
            except trio.RunFinishedError:
                return
            if wait:
                self._thread.join(STOP_WITHIN_S)

    def _main(self) -> None:
        try:
            with unwrapped():
                trio.run(self._run, clock=SharedClock())
        except Exception:
            _log.exception("hear.failed", engine=self._settings.name)

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self.backend.listen()
        with self._cancel:
            path, operation_log = self._settings.operation_log, None
            wait_s, said = RETRY_S[0], ""
            while True:
                try:
                    if operation_log is None and path is not None:
                        operation_log = OperationLog(Path(path))
                    await self._join(operation_log)
                except (BusError, ConfigError) as error:
                    if str(error) != said:  # it may last for days
                        said = str(error)
                        _log.warning("bus.not_joined", engine=self._settings.name, error=said)
                await trio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_S[1])

    async def _join(self, operation_log: OperationLog | None) -> None:
        settings = self._settings
        key = None if settings.key is None else Path(settings.key)
        url = settings.bus or default_url()
        async with connected(url, name=settings.name, key=key) as bus:
            worker = EngineWorker(
                bus,
                self.backend,
                name=settings.name,
                ranks=settings.ranks,
                tenants=settings.tenants,
                epoch=new_epoch(),
                operation_log=operation_log,
                endpoint=settings.endpoint,
                share=CONTROL_SHARE,
            )
            _log.info("bus.joined", engine=settings.name, bus=url)
            await worker.run()
