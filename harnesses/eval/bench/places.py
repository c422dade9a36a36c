"""Where an arm is served: a server of its own, started for it, or one that runs already.

Either way there is a bus, an engine with a name on it, and a client that reaches it. The stock
server knows nothing of HEAR: its bus is one that nobody else hears.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from hear.app import plugins
from hear.app.connection import connected, own_name
from hear.errors import ConfigError, EngineError
from hear.harnesses.eval.bench import servers
from hear.harnesses.eval.bench.script import Hasher
from hear.harnesses.eval.replay.live import find_engines
from hear.harnesses.pool.reaching import client_of, hasher_of
from hear.interfaces import Bus, InferenceClient
from hear.messages import CapabilitiesReported

STOCK: Final = "stock"
"""The arm in which vLLM serves as it comes, without HEAR."""

HUB_S: Final = 15.0
ENGINE_NAME: Final = "engine0"
_SHOWN: Final = 8
"""Engines that an error lists."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests go. ``hash_prefix`` names blocks as the engine does; ``salt`` is the cache's.

    ``label`` is the engine's name in the results.
    """

    bus: Bus
    engine: str
    client: InferenceClient
    block_size: int
    hash_prefix: Hasher
    label: str
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Vllm:
    """A fresh vLLM on ``model``, a folder or a name, with further options of vLLM's own."""

    model: str
    options: tuple[str, ...]
    block_size: int

    @property
    def label(self) -> str:
        """Its name in the results."""
        return f"vllm {Path(self.model).name}"

    def command(self, bus: str, ranks: str) -> servers.Command:
        """How it is started with HEAR in it."""
        port = servers.free_port()
        return servers.vllm(ENGINE_NAME, self.model, self.options, port=port, bus=bus, ranks=ranks)


@dataclass(frozen=True, slots=True)
class Simulated:
    """A fresh simulated engine, in a process of its own and on the real clock."""

    profile: str
    block_size: int

    @property
    def label(self) -> str:
        """Its name in the results."""
        return Path(self.profile).stem

    def command(self, bus: str, ranks: str) -> servers.Command:
        """How it is started."""
        return servers.simulated(ENGINE_NAME, self.profile, self.block_size, bus, ranks)


@asynccontextmanager
async def fresh(engine: Vllm | Simulated, policy: str, logs: Path) -> AsyncIterator[Place]:
    """A server started for one arm, with a hub of its own; leaving the context ends both.

    The hub is a process; policies and harness share the caller's, and one place on the bus, since
    on few cores each further process takes time from the engine.

    Raises:
        EngineError: the server or the hub does not come up.
        PluginError: the engine cannot be reached, or its prompts hashed, by what is installed.
    """
    url = f"ipc://{logs}/bus"
    async with AsyncExitStack() as stack:
        if policy == STOCK:
            if not isinstance(engine, Vllm):
                raise ConfigError(f"{STOCK}: there is no {engine.label} without HEAR, only vLLM")
            yield await _stock(stack, engine, logs)
            return
        hub = await stack.enter_async_context(servers.running(servers.hub(url), logs))
        join = partial(connected, url, name=own_name("bench"))
        await hub.until(partial(_try, join), "starting", HUB_S)
        bus = await stack.enter_async_context(join())
        made = plugins.load_installed("parts", "policy-spec")(policy).make()
        ranks = ",".join(f"{p.name}={len(made) - place}" for place, p in enumerate(made))
        command = engine.command(url, ranks)
        server = await stack.enter_async_context(servers.running(command, logs))
        capabilities = await server.until(partial(_heard, bus), "starting")
        reach = client_of(ENGINE_NAME, capabilities.endpoint)
        await server.until(partial(_try, reach), "starting")
        client = await stack.enter_async_context(reach())
        yield _place(bus, ENGINE_NAME, client, capabilities, engine.label)


@asynccontextmanager
async def joined(
    bus_url: str, endpoint: str, *, salt: str, key: Path | None = None
) -> AsyncIterator[Place]:
    """An engine that runs already: the one on the bus that takes requests at ``endpoint``.

    What other arms have left in its cache is kept from this one by a ``salt`` of its own.

    Raises:
        ConfigError: no engine on the bus says that it takes requests there.
    """
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connected(bus_url, name=own_name("bench"), key=key))
        engines = await find_engines(bus)
        wanted = endpoint.rstrip("/")
        for name, capabilities in engines.items():
            if capabilities.endpoint.rstrip("/") == wanted:
                client = await stack.enter_async_context(client_of(name, endpoint)())
                label = capabilities.model or name
                yield _place(bus, name, client, capabilities, label, salt)
                return
    known = [f"{name!r:.80} at {c.endpoint!r:.200}" for name, c in engines.items()]
    told = ", ".join(known[:_SHOWN]) + (f" and {len(known) - _SHOWN} more" * (len(known) > _SHOWN))
    raise ConfigError(f"--engine-url {endpoint}: on {bus_url} are engines: {told or 'none at all'}")


async def _stock(stack: AsyncExitStack, engine: Vllm, logs: Path) -> Place:
    port = servers.free_port()
    command = servers.stock_vllm(STOCK, engine.model, engine.options, port=port)
    server = await stack.enter_async_context(servers.running(command, logs))
    reach = partial(plugins.load_installed("clients", "http"), f"http://127.0.0.1:{port}")
    await server.until(partial(_try, reach), "starting")
    client = await stack.enter_async_context(reach())
    bus = plugins.load_installed("buses", "memory")()
    return Place(bus, STOCK, client, engine.block_size, lambda token_ids: (), engine.label)


def _place(
    bus: Bus,
    name: str,
    client: InferenceClient,
    capabilities: CapabilitiesReported,
    label: str,
    salt: str = "",
) -> Place:
    hash_prompt = hasher_of(name, capabilities.hash_scheme)
    size = capabilities.block_size
    return Place(
        bus=bus,
        engine=name,
        client=client,
        block_size=size,
        hash_prefix=lambda token_ids: hash_prompt(token_ids, size, tenant_salt=salt),
        label=label,
        salt=salt,
    )


async def _heard(bus: Bus) -> CapabilitiesReported:
    """What the engine says of itself, once it does."""
    found = await find_engines(bus, within_s=servers.LOOK_EVERY_S)
    if ENGINE_NAME not in found:
        raise EngineError(f"{ENGINE_NAME} has not told of itself on the bus")
    return found[ENGINE_NAME]


async def _try(make: Callable[[], AbstractAsyncContextManager[object]]) -> None:
    """See whether a context can be entered; whoever then wants to stay enters it anew."""
    async with make():
        pass
