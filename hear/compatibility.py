"""Whether what a harness describes fits an engine: the model, the size of blocks, the hash scheme.

Block hashes name the same blocks to two sides only if both compute them in the same way, over
blocks of the same size, for the same model. Where these differ, no match of hashes says anything:
what could be reused is *unknown*, and not nothing. What a side does not tell is taken to fit.

This module knows neither views nor policies.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from hear.messages import CapabilitiesReported, RequestDescribed

_MAX_SHOWN = 80


class Difference(NamedTuple):
    """One thing that a description and an engine tell differently."""

    what: Literal["model", "block size", "hash scheme"]
    described: str
    engine: str


def differences(
    description: RequestDescribed, capabilities: CapabilitiesReported | None
) -> tuple[Difference, ...]:
    """What keeps a description's hashes from naming blocks of an engine; empty if nothing known.

    A description without hashes can differ in its model alone.
    """
    if capabilities is None:
        return ()
    told: list[tuple[Literal["model", "block size", "hash scheme"], object, object]] = [
        ("model", description.model, capabilities.model)
    ]
    if description.prefix_hashes:
        told.append(("block size", description.block_size, capabilities.block_size))
        told.append(("hash scheme", description.hash_scheme, capabilities.hash_scheme))
    return tuple(
        Difference(what, str(mine), str(theirs))
        for what, mine, theirs in told
        if mine and theirs and mine != theirs
    )


def serves(model: str, capabilities: CapabilitiesReported | None) -> bool:
    """Whether an engine may be sent a request for ``model``: it is not known to serve another."""
    return not (model and capabilities is not None and capabilities.model not in ("", model))


def in_words(differing: Iterable[Difference], who: str, engine: str) -> str:
    """Both sides of each difference, named. Names are as they were received, cut to a length."""
    who, engine = f"{who:.{_MAX_SHOWN}}", f"{engine:.{_MAX_SHOWN}}"
    return "; ".join(
        f"{what}: {who} uses {mine:.{_MAX_SHOWN}}, {engine} {theirs:.{_MAX_SHOWN}}"
        for what, mine, theirs in differing
    )
