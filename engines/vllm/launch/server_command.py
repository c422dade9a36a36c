"""The command that starts vLLM's server with HEAR inside: what is added, and what contradicts it.

Only makes the command and says what is wrong; nothing is started here, and vLLM is not imported.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any, Final, NamedTuple

from hear.engines.vllm.launch.options import Options
from hear.engines.vllm.versions import Installed, require
from hear.errors import ConfigError
from hear.messages import DEFAULT_TENANT

SCHEDULER: Final = "hear.engines.vllm.plugin.scheduler.HearScheduler"
ASYNC_SCHEDULER: Final = "hear.engines.vllm.plugin.scheduler.HearAsyncScheduler"
HASH_ALGORITHM: Final = "sha256_cbor"
HASH_SEED: Final = "0"
DEFAULT_PORT: Final = 8000
GIB: Final = 1 << 30

_SWITCH_ON: Final = "--enable-prefix-caching"
_EVERYWHERE: Final = ("", "0.0.0.0", "::")


class LaunchSettings(NamedTuple):
    """What HEAR itself is told: how the engine joins a bus, and how large its CPU tier is."""

    bus: str
    name: str
    key: Path | None = None
    ranks: Mapping[str, int] = {}
    tenants: tuple[str, ...] = (DEFAULT_TENANT,)
    endpoint: str | None = None
    cpu_tier_gib: float | None = None
    operation_log: Path | None = None


class Plan(NamedTuple):
    """A command, what its environment has beside that of this process, and where it will listen."""

    command: tuple[str, ...]
    environment: dict[str, str]
    host: str
    port: int | None


def plan(
    arguments: Sequence[str],
    settings: LaunchSettings,
    vllm: Installed,
    environment: Mapping[str, str],
) -> Plan:
    """How to start vLLM with ``arguments``, those that would stand after ``vllm serve``.

    Raises:
        ConfigError: an argument contradicts what HEAR needs, or the model is no model.
    """
    options = Options(arguments)
    _check_model(options.model)
    for check in (_check_scheduling, _check_single, _check_tier):
        check(options, settings)
    host, port = _address(options)
    added: list[str] = []
    if options.last("--scheduler-cls") is None:
        added += _scheduler(options, vllm)
    if options.switch(_SWITCH_ON) is None:
        added += [_SWITCH_ON]
    if options.last("--prefix-caching-hash-algo") is None:
        added += ["--prefix-caching-hash-algo", HASH_ALGORITHM]
    if settings.cpu_tier_gib is not None:
        tier = tier_config(int(settings.cpu_tier_gib * GIB))
        added += ["--kv-transfer-config", json.dumps(tier)]
    added += ["--kv-events-config", json.dumps(_events(options))]
    added += ["--additional-config", json.dumps(_additional(options, settings))]
    kept = options.without("--kv-events-config", "--additional-config")
    return Plan(
        command=(*_server(kept, vllm), *added),
        environment={
            k: v for k, v in {"PYTHONHASHSEED": HASH_SEED}.items() if k not in environment
        },
        host=host,
        port=port,
    )


def of_cluster(engine: Any, *, name: str, joining: Sequence[str]) -> list[str]:
    """The arguments of ``hear`` that start an engine of a cluster; ``engine`` is its configuration.

    ``joining`` are the arguments that say how it joins the bus.

    Raises:
        ConfigError: it has no model, or vLLM is not here, or an option cannot be used.
    """
    if engine.model is None:
        raise ConfigError("an engine of kind 'vllm' needs a model")
    options = list(engine.options or ())
    tier = engine.cpu_tier_gib
    # Planned once here, so that what cannot be used is said before anything starts.
    settings = LaunchSettings(bus="", name=name, cpu_tier_gib=tier)
    plan([engine.model, *options], settings, require(), os.environ)
    own = ["--with-parent", "--name", name, *joining]
    own += ["--cpu-tier-gib", str(tier)] if tier is not None else []
    return ["vllm", "serve", engine.model, *own, *options]


def tier_config(num_bytes: int) -> dict[str, Any]:
    """What vLLM's ``--kv-transfer-config`` has to be for a CPU tier of so many bytes.

    Answers are kept too, since in a conversation they are part of the next prompt.
    """
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TierSpec",
            "spec_module_path": "hear.engines.vllm.plugin.tier",
            "cpu_bytes_to_use": num_bytes,
            "offload_prompt_only": False,
            "self_describing_kv_events": True,
        },
    }


def _server(arguments: Sequence[str], vllm: Installed) -> list[str]:
    """vLLM's server. Its command needs a distribution named vllm, so without one, what it calls."""
    start = [sys.executable, "-P", "-m"]  # not before all else from the working folder
    if vllm.named_vllm:
        return [*start, "vllm.entrypoints.cli.main", "serve", *arguments]
    start.append("vllm.entrypoints.openai.api_server")
    if arguments and not arguments[0].startswith("-"):
        return [*start, "--model", *arguments]
    return [*start, *arguments]


def _scheduler(options: Options, vllm: Installed) -> list[str]:
    """HEAR's scheduler in the form that suits how vLLM will run it.

    vLLM decides late whether it schedules asynchronously, and then a scheduler of the other form
    would do the wrong thing; so it is told, and refuses where it can't.
    """
    wanted = options.switch("--async-scheduling")
    if wanted is None and not vllm.cpu:
        return ["--scheduler-cls", ASYNC_SCHEDULER, "--async-scheduling"]
    # On CPUs it is never asynchronous, whatever is asked for.
    return ["--scheduler-cls", ASYNC_SCHEDULER if wanted and not vllm.cpu else SCHEDULER]


def _events(options: Options) -> dict[str, Any]:
    given = options.json("--kv-events-config")
    if given is None:
        return {"enable_kv_cache_events": True, "publisher": "null"}
    if given.get("enable_kv_cache_events") is False:
        raise ConfigError(
            "--kv-events-config: enable_kv_cache_events is false, but by these events HEAR knows "
            "what is in the cache; leave it out"
        )
    return {**given, "enable_kv_cache_events": True}


def _additional(options: Options, settings: LaunchSettings) -> dict[str, Any]:
    given = options.json("--additional-config") or {}
    if "hear" in given:
        raise ConfigError(
            "--additional-config: has a key 'hear', expected HEAR's own options instead: --bus, "
            "--name, --key, --ranks, --tenant, --endpoint"
        )
    own = {
        "name": settings.name,
        "bus": settings.bus,
        "key": None if settings.key is None else str(settings.key.absolute()),
        "ranks": dict(settings.ranks),
        "tenants": list(settings.tenants),
        "operation_log": None
        if settings.operation_log is None
        else str(settings.operation_log.absolute()),
        "endpoint": settings.endpoint or _endpoint(options, settings.bus),
    }
    return {**given, "hear": own}


def _endpoint(options: Options, bus: str) -> str | None:
    """Where those on the bus reach the server; None if it does not listen on a port."""
    host, port = _address(options)
    if port is None:
        return None
    if host in _EVERYWHERE:
        host = "127.0.0.1" if bus.startswith("ipc://") else gethostname()
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if options.last("--ssl-certfile") else "http"
    return f"{scheme}://{host}:{port}"


def _address(options: Options) -> tuple[str, int | None]:
    if options.last("--uds") is not None:
        return "", None
    text = options.last("--port") or str(DEFAULT_PORT)
    if not text.isdigit() or not 0 < int(text) < 1 << 16:
        raise ConfigError(f"--port: got {text!r}, expected a number from 1 to 65535")
    return options.last("--host") or "", int(text)


def _check_scheduling(options: Options, settings: LaunchSettings) -> None:
    scheduler = options.last("--scheduler-cls")
    if scheduler not in (None, SCHEDULER, ASYNC_SCHEDULER):
        raise ConfigError(
            f"--scheduler-cls: got {scheduler!r}, but HEAR needs its own; leave it out, or use "
            "hear vllm attach"
        )
    if options.switch(_SWITCH_ON) is False:
        raise ConfigError(
            "--no-enable-prefix-caching: without a prefix cache there is nothing for HEAR to see "
            "or keep; leave it out"
        )


def _check_single(options: Options, settings: LaunchSettings) -> None:
    size = options.last("--data-parallel-size", "-dp")
    if size not in (None, "1"):
        raise ConfigError(
            f"--data-parallel-size: got {size!r}, expected 1: start one server for each engine, so "
            "that a harness can tell them apart"
        )


def _check_tier(options: Options, settings: LaunchSettings) -> None:
    if settings.cpu_tier_gib is None:
        return
    for name in ("--kv-transfer-config", "--kv-offloading-size"):
        if options.has(name):
            raise ConfigError(f"--cpu-tier-gib and {name}: expected one of them, they do the same")


def _check_model(model: str | None) -> None:
    """See that a folder is a model's. Names of models elsewhere are for vLLM to find."""
    if model is None:
        return
    folder = Path(model).expanduser()
    if not folder.exists():
        if model.startswith((".", "/", "~")):
            raise ConfigError(f"model {model!r}: there is no such folder")
    elif folder.is_dir() and not any(
        (folder / name).is_file() for name in ("config.json", "params.json")
    ):
        raise ConfigError(f"model {model!r}: expected a config.json in this folder")
