"""Reaching an engine as it says of itself on the bus: its endpoint, and how it hashes prompts.

Whoever publishes capabilities chooses among the clients and hash schemes that are installed here,
and chooses no code. Nothing is connected here.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from hear.app import plugins
from hear.endpoints import scheme_of
from hear.errors import ConfigError, PluginError
from hear.interfaces import InferenceClient

Reach = Callable[[], AbstractAsyncContextManager[InferenceClient]]
"""Connects to an engine anew each time."""


def client_of(engine: str, endpoint: str) -> Reach:
    """What reaches the engine at the endpoint that it has told.

    Raises:
        ConfigError: this is no endpoint.
        PluginError: no client for endpoints of its scheme is installed.
    """
    origin = f"engine {engine!r:.80} at {endpoint!r:.200}"
    scheme = scheme_of(endpoint)
    if scheme is None:
        raise ConfigError(f"{origin}: this is no endpoint, expected SCHEME://ADDRESS")
    return partial(plugins.load_received("clients", scheme, origin), endpoint)


def hasher_of(engine: str, scheme: str) -> Callable[..., Sequence[int]]:
    """What hashes prompts as the engine says that it does, by its ``hash_scheme``.

    Raises:
        PluginError: nothing that is installed does.
    """
    origin = f"engine {engine!r:.80}"
    if not scheme:
        raise PluginError(f"{origin} does not tell how it hashes blocks (hash_scheme)")
    found: Callable[..., Sequence[int]] = plugins.load_received("hash_schemes", scheme, origin)
    return found
