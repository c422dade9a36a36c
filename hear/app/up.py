"""``hear up``: a whole cluster, each part in a process of its own, kept running.

Reads ``cluster.toml`` and makes the command line of each part (``hear run ...``); what keeps them
running is ``hear.app.supervisor``. Without a file it starts a small cluster to try things out.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import structlog
import trio
from msgspec import Meta, Struct

from hear.app import plugins
from hear.app.cli import Command
from hear.app.config import Line, load_toml, where
from hear.app.connection import (
    NAME,
    check_url,
    cluster_directory,
    connected,
    default_url,
    make_own_folders,
    own_name,
    run_directory,
    run_until_signal,
)
from hear.app.log import to_stderr
from hear.app.supervisor import Part, Supervisor
from hear.errors import BusError, ConfigError
from hear.interfaces import Bus
from hear.messages import DEFAULT_TENANT

_log = structlog.get_logger("hear.app.up")

READY_S: Final = 15.0
LAUNCHED_READY_S: Final = 300.0
"""The same if there are engines of other kinds, which may load a model first."""

_BUS: Final = "bus"
_HEAR: Final = (sys.executable, "-P", "-m", "hear.app.cli")
"""With ``-m`` alone, a module in the folder where one stands would hide an installed one."""
_OF_SIMULATED: Final = ("profile", "block_size")
_OF_LAUNCHED: Final = ("model", "options", "cpu_tier_gib")
_Name = Annotated[str, Meta(pattern=rf"^{NAME}\Z")]  # $ would let a line end pass
_Tenant = Annotated[Line, Meta(min_length=1, max_length=256)]
_Option = Annotated[str, Meta(pattern=r"^[^\x00]*\Z")]  # JSON may have lines


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[[engine]]``. Without a name it gets ``engine0``, ``engine1``, ...

    A kind is simulated in a process of HEAR's own (``hear.engines``: ``profile`` and
    ``block_size``), or real and has a launcher (``hear.launchers``: ``model``, ``options`` of its
    server and ``cpu_tier_gib``).
    """

    name: _Name | None = None
    kind: Line = "simulated"
    endpoint: Line | None = None
    profile: Line | None = None
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    model: Line | None = None
    options: tuple[_Option, ...] | None = None
    cpu_tier_gib: Annotated[float, Meta(gt=0)] | None = None
    tenants: tuple[_Tenant, ...] | None = None
    """Who is told of it before their first request; by default, the tenants of all policies."""


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[[policy]]``. A higher rank prevails in arbitration; without one, the earlier does."""

    policy: Line
    name: _Name | None = None
    rank: int | None = None
    tenant: _Tenant = DEFAULT_TENANT


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster."""

    bus: Line | None = None
    keys: Line | None = None
    """Keyring of the hub, and with it ``key``: the key of the parts that are started here."""
    key: Line | None = None
    without_keys: bool = False
    """Let the hub listen where others reach it, without keys: they may do everything."""
    state: Line | None = None
    """Folder for what has to survive a restart; by default beside the sockets."""
    engine: tuple[EngineConfig, ...] = ()
    policy: tuple[PolicyConfig, ...] = ()


DEFAULT: Final = ClusterConfig(
    engine=(EngineConfig(), EngineConfig()),
    policy=(PolicyConfig(policy="cache-aware"), PolicyConfig(policy="guard:40")),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "config",
        nargs="?",
        type=Path,
        metavar="cluster.toml",
        help="what to start; without it, two simulated engines, cache-aware and guard:40",
    )


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command."""
    to_stderr()
    make_own_folders(run_directory() / _BUS)
    path: Path | None = namespace.config
    config = DEFAULT if path is None else load_toml(path, ClusterConfig)
    url, parts = plan(config, path)

    async def main(stopping: trio.Event) -> int:
        supervisor = Supervisor(
            on_start=lambda part, pid: _log.info("part.started", part=part.name, pid=pid)
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run, parts)
            nursery.start_soon(_tell_when_ready, url, config, path)
            await stopping.wait()
            nursery.cancel_scope.cancel()
        return 0

    return run_until_signal(main)


def plan(config: ClusterConfig, path: Path | None) -> tuple[str, list[Part]]:
    """The address of the bus, and the parts of a cluster.

    Raises:
        ConfigError: two parts have one name, or something cannot be used.
    """
    url = config.bus or default_url()
    check_url(url)
    base = _base(path)
    state = base / config.state if config.state else cluster_directory(url) / "state"
    if (config.keys is None) is not (config.key is None):
        raise ConfigError(f"{path}: keys and key go together: one for the hub, one for the parts")
    key = [] if config.key is None else [f"--key={base / config.key}"]
    names = engine_names(config)
    policies = _policies(config, path)
    taken = {_BUS: "part of every cluster"}
    for name, kind in [(n, "engine") for n in names] + [(n, "policy") for n, _, _ in policies]:
        if name in taken:
            at = _at(path, f"{kind}[0].name")
            raise ConfigError(f"{at}: two parts are named {name!r}: {taken[name]}, and {kind}")
        taken[name] = kind
    keys = [] if config.keys is None else [f"--keys={base / config.keys}"]
    keys += ["--without-keys"] if config.without_keys else []
    parts = [_part(_BUS, [f"--bus={url}", *keys])]
    ranks = ",".join(f"{name}={rank}" for name, rank, _ in policies)
    for place, (name, engine) in enumerate(zip(names, config.engine, strict=True)):
        # What all kinds are told in the same words. A value is part of its option's word, so that
        # none that begins with a hyphen is taken for an option.
        joining = [f"--bus={url}", *key]
        joining += [f"--endpoint={engine.endpoint}"] if engine.endpoint else []
        joining += [f"--ranks={ranks}"] if ranks else []
        for tenant in _tenants(engine, config):
            joining += [f"--tenant={tenant}"]
        launched = engine.kind in plugins.names("launchers")
        kinds = [*plugins.names("engines"), *plugins.names("launchers")]
        if engine.kind not in kinds:
            at = _at(path, f"engine[{place}].kind")
            raise ConfigError(f"{at}: {engine.kind!r}: expected one of {', '.join(kinds)}")
        for setting in _OF_SIMULATED if launched else _OF_LAUNCHED:
            if getattr(engine, setting) is not None:
                at = _at(path, f"engine[{place}].{setting}")
                raise ConfigError(f"{at}: an engine of kind {engine.kind!r} has no {setting!r}")
        if launched:
            launch = plugins.load_installed("launchers", engine.kind)
            try:
                command = launch(engine, name=name, joining=joining)
            except ConfigError as error:
                raise ConfigError(f"{_at(path, f'engine[{place}].kind')}: {error}") from error
            parts.append(Part(name, (*_HEAR, *command)))
        else:
            operation_log = [f"--operation-log={state / name}.operations"]
            parts.append(
                _part("engine", [*_simulated(engine, name), *joining, *operation_log], name)
            )
    for (name, _, spec), policy in zip(policies, config.policy, strict=True):
        arguments = [spec, f"--name={name}", f"--bus={url}", *key, f"--tenant={policy.tenant}"]
        parts.append(_part("policy", arguments, name))
    return url, parts


def _simulated(engine: EngineConfig, name: str) -> list[str]:
    profile = engine.profile or "h100-qwen3-8b"
    block_size = engine.block_size or 512
    # Made once here, so that what cannot be used is said before anything starts.
    plugins.load_installed("engines", engine.kind)(profile, block_size=block_size, name=name)
    return [
        name,
        f"--kind={engine.kind}",
        f"--profile={profile}",
        f"--block-size={block_size}",
    ]


def engine_names(config: ClusterConfig) -> list[str]:
    """The names of the engines of a cluster."""
    return [engine.name or f"engine{place}" for place, engine in enumerate(config.engine)]


def _tenants(engine: EngineConfig, config: ClusterConfig) -> Iterable[str]:
    """Who is told of an engine from the beginning."""
    if engine.tenants is not None:
        return engine.tenants
    return dict.fromkeys(policy.tenant for policy in config.policy) or (DEFAULT_TENANT,)


def _policies(config: ClusterConfig, path: Path | None) -> list[tuple[str, int, str]]:
    """Name, rank and spec of each policy."""
    parse = plugins.load_installed("parts", "policy-spec")
    found = []
    for place, policy in enumerate(config.policy):
        setting = f"policy[{place}].policy"
        try:
            made = parse(policy.policy).make()
        except ConfigError as error:
            raise ConfigError(f"{_at(path, setting)}: {error}") from error
        if len(made) != 1:
            at = _at(path, setting)
            raise ConfigError(f"{at}: {policy.policy!r}, expected one policy in each [[policy]]")
        rank = len(config.policy) - place if policy.rank is None else policy.rank
        found.append((policy.name or made[0].name, rank, policy.policy))
    return found


def _base(path: Path | None) -> Path:
    """Where relative paths of a configuration begin."""
    return Path() if path is None else path.parent


def _at(path: Path | None, setting: str) -> str:
    """Where a setting stands, for an error."""
    return "default" if path is None else where(path, setting)


def _part(kind: str, arguments: list[str], name: str | None = None) -> Part:
    command = (*_HEAR, "run", kind, *arguments, "--with-parent")
    return Part(name or kind, command)


async def _tell_when_ready(url: str, config: ClusterConfig, path: Path | None) -> None:
    expected = set(engine_names(config))
    key = None if config.key is None else _base(path) / config.key
    launchers = plugins.names("launchers")
    launched = any(engine.kind in launchers for engine in config.engine)
    within_s = LAUNCHED_READY_S if launched else READY_S
    with trio.move_on_after(within_s):
        while True:
            try:
                async with connected(url, name=own_name("up"), key=key) as bus:
                    await _hear_engines(bus, expected)
                _log.info("cluster.ready", bus=url, engines=sorted(engine_names(config)))
                return
            except BusError:
                await trio.sleep(0.1)
    _log.warning("cluster.not_ready", bus=url, missing=sorted(expected), after_s=within_s)


async def _hear_engines(bus: Bus, expected: set[str]) -> None:
    async with bus.subscribe(["state.*.*.capabilities.>"], name="up") as subscription:
        while expected:
            for envelope in await subscription.receive():
                expected.discard(envelope.key.engine or "")


COMMAND = Command("start a cluster: bus, engines and policies, each kept running", configure, run)
