"""Whose a block is: the tenants of one engine, numbered, and blocks that carry that number.

An engine salts its prefix cache for each tenant, so that equal hashes of two are different blocks.
Here a block inside the engine is the hash that its tenant uses, with the tenant's number above its
64 bits: no two tenants can name the same block, whatever they send. The default tenant has number
0, so its blocks are its hashes.
"""

from collections.abc import Sequence
from typing import Final

from hear.messages import DEFAULT_TENANT

MAX_TENANTS: Final = 4_096
"""Most tenants that one engine tells apart between two starts."""

_BITS: Final = 64
_HASH: Final = (1 << _BITS) - 1


def owner_of(block: int) -> int:
    """The number of the tenant whose block it is."""
    return block >> _BITS


def hash_of(block: int) -> int:
    """The hash by which its tenant knows a block."""
    return block & _HASH


def blocks_of(owner: int, hashes: Sequence[int]) -> Sequence[int]:
    """The blocks that a tenant names by these hashes."""
    if not owner:
        return hashes
    base = owner << _BITS
    return [base | hash for hash in hashes]


class Tenants:
    """The numbers of tenants."""

    def __init__(self) -> None:
        self._names = [DEFAULT_TENANT]
        self._numbers = {DEFAULT_TENANT: 0}

    def number(self, tenant: str) -> int | None:
        """The number of a tenant, which may be new; None if there is no room for it."""
        number = self._numbers.get(tenant)
        if number is None and len(self._names) < MAX_TENANTS:
            number = self._numbers[tenant] = len(self._names)
            self._names.append(tenant)
        return number

    def known(self, tenant: str) -> int | None:
        """The number of a tenant that has been here; None of any other."""
        return self._numbers.get(tenant)

    def name(self, number: int) -> str:
        """The tenant that has a number."""
        return self._names[number]
