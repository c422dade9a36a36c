"""What an engine with HEAR in it is told: ``--additional-config '{"hear": {...}}'``."""

from collections.abc import Mapping

import msgspec

from hear.app.connection import check_name, check_url
from hear.errors import ConfigError
from hear.messages import DEFAULT_TENANT
from hear.messages.envelope import Seconds


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``--additional-config '{"hear": {...}}'`` holds.

    ``bus`` is an address, or "memory" if a test hands the plug-in its bus; ``endpoint`` is where
    clients send requests; ``operation_log`` is a file; ``tenants`` are told of the engine at once,
    others with their first request.
    """

    name: str = "vllm0"
    bus: str = ""
    key: str | None = None
    ranks: dict[str, int] = {}
    tenants: tuple[str, ...] = (DEFAULT_TENANT,)
    endpoint: str = ""
    operation_log: str | None = None
    max_lease_s: Seconds = 3600.0
    retention_decay_s: Seconds = 400.0


def settings_of(additional_config: object) -> Settings:
    """Read the settings of an engine; without any they are the defaults, on this user's bus.

    Raises:
        ConfigError: they are malformed.
    """
    found = additional_config.get("hear", {}) if isinstance(additional_config, Mapping) else {}
    try:
        settings = msgspec.convert(found, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--additional-config: hear: {error}") from None
    check_name(settings.name)
    if settings.bus and settings.bus != "memory":
        check_url(settings.bus)
    return settings
