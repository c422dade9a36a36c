"""The names of HEAR that ride on a request of vLLM, for the bus to key on.

A client puts them in ``vllm_xargs`` (flat strings and numbers), which arrive in the engine as
``sampling_params.extra_args``. A request without them is known by vLLM's own id. vLLM's ids do not
serve for all, since the frontend makes others of what a client calls its requests.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from hear.messages import DEFAULT_TENANT, Key

REQUEST: Final = "hear_request"
CONTEXT: Final = "hear_context"
VERSION: Final = "hear_version"
TENANT: Final = "hear_tenant"

MAX_TENANTS: Final = 4_096
"""Tenants of one engine that are told apart. What is salted for a further one is nobody's."""

_OF_TENANT: Final = "tenant:"

MAX_NAME: Final = 256
"""Longest name that is taken over, in characters; a longer one is as none."""


def extra_args_of(key: Key, tenant: str = DEFAULT_TENANT) -> dict[str, str | int]:
    """What a client puts in ``vllm_xargs`` for a request of this key."""
    made: dict[str, str | int] = {}
    if key.request is not None:
        made[REQUEST] = key.request
    if key.context is not None:
        made[CONTEXT] = key.context
        if key.context_version is not None:
            made[VERSION] = key.context_version
    if tenant != DEFAULT_TENANT:
        made[TENANT] = tenant
    return made


def key_of(extra_args: Mapping[str, Any] | None, fallback: str) -> Key:
    """The key of a request in the engine, whose id there is ``fallback``."""
    args = extra_args or {}
    version = args.get(VERSION)
    context = _name(args.get(CONTEXT))
    return Key(
        request=_name(args.get(REQUEST)) or fallback,
        context=context,
        context_version=version if context and _is_version(version) else None,
    )


def unusable(extra_args: Mapping[str, Any] | None) -> list[str]:
    """The fields of HEAR's on a request that are there and say nothing."""
    args = extra_args or {}
    names = [name for name in (REQUEST, CONTEXT, TENANT) if name in args and not _name(args[name])]
    return names + [VERSION] * (VERSION in args and not _is_version(args[VERSION]))


def tenant_of(extra_args: Mapping[str, Any] | None) -> str:
    """Whose a request is."""
    return _name((extra_args or {}).get(TENANT)) or DEFAULT_TENANT


def salt_of(tenant: str, cache_salt: str | None) -> str | None:
    """The salt of a request's prefix cache: tenants never share blocks, whatever they ask for.

    The default tenant's is what its client names, as without HEAR, unless that looks like a
    tenant's.
    """
    salt = cache_salt or ""
    if tenant == DEFAULT_TENANT and not salt.startswith(_OF_TENANT):
        return cache_salt
    return f"{_OF_TENANT}{len(tenant)}:{tenant}:{salt}"


def _tenant_in(salt: str) -> str | None:
    """The tenant that a salt is of, if it is of one."""
    length, colon, rest = salt.removeprefix(_OF_TENANT).partition(":")
    # Whoever sends requests chooses salts, and Python reads no number of thousands of digits.
    is_length = len(length) < 10 and length.isdecimal()
    if not (salt.startswith(_OF_TENANT) and colon and is_length):
        return None
    return rest[: int(length)]


class Tenants:
    """Those that are known, and whose a salt is: ``salt_of`` the other way round."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known: set[str] = set()
        for tenant in known:
            self.add(tenant)

    def add(self, tenant: str) -> None:
        """One has been heard of."""
        if tenant != DEFAULT_TENANT and len(self._known) < MAX_TENANTS:
            self._known.add(tenant)

    def of_salts(self, salts: Iterable[str]) -> str | None:
        """Whose the blocks of a prompt with these salts are; None if that cannot be told.

        A salt of nobody that is known is one that the default tenant's client has named.
        """
        told = False
        for salt in salts:
            tenant = _tenant_in(salt)
            if tenant in self._known:
                return tenant
            told = told or tenant not in (None, DEFAULT_TENANT)
        return None if told and len(self._known) == MAX_TENANTS else DEFAULT_TENANT

    @property
    def several(self) -> bool:
        """Whether there are others than the default tenant."""
        return bool(self._known)


def _name(value: object) -> str | None:
    """A name that can be told on the bus; None if this is none."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


def _is_version(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
