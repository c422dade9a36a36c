"""The cache hints that vLLM itself defines, as HEAR's leases, and leases as such hints.

vLLM's repository defines two actions after 0.33 (``vllm/v1/kv_hints/retain.py``, ``actions.py`` and
``README.md`` there); no release up to 0.33 carries any out:

    kv.retain@1.x          directives of token ranges: a priority of 0 to 100 for a duration
    vllm.set_priority@1.0  a claim on the request's cached blocks: an integer for a time to live

Both speak of the request that they ride on, so they are read with what is known of it (``Ride``).
They become ``Retain`` and ``Release``, which differ in four ways:

1. A lease covers a prompt from its first block on, since no block is of use without those before
   it. A directive's ``start`` is therefore not looked at; upstream demands that priorities fall
   along the prompt, so no block is protected more than was asked by more than one directive.
2. A lease without end, or longer than the engine allows, lasts as long as the engine allows.
3. A lease begins when its request arrives. vLLM applies ``vllm.set_priority`` at completion.
4. The engine gives operations their order, so a claim's ``revision`` is not looked at.

Priorities above 100 count as 100. Numbers below 1 protect nothing: they end a claim.

This module owns that translation, of one action's payload; the envelope is ``hints.py``'s. It does
not import vLLM.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from hear.blocks import pack, unpack
from hear.errors import LocalProtocolError
from hear.messages import Control, Key, Release, Retain

RETAIN: Final = "kv.retain"
SET_PRIORITY: Final = "vllm.set_priority"
VERSION: Final = "1.0"
MAX_PRIORITY: Final = 100
MAX_DURATION_S: Final = 30 * 24 * 3600.0
"""Upstream's bound on a directive; HEAR's engines have lower ones."""

Asked = tuple[Key, Retain | Release]
"""A control and what it is about; ``key.operation`` is not given yet."""

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Priority = Annotated[int, Meta(ge=0, le=MAX_PRIORITY)]
_Duration = Annotated[float, Meta(ge=0, le=MAX_DURATION_S)]


class Ride(NamedTuple):
    """The request that an envelope rides on.

    ``blocks`` are HEAR's hashes of its prompt's full blocks, of ``block_size`` tokens each;
    ``max_lease_s`` is the longest lease that the engine gives.
    """

    key: Key
    blocks: Sequence[int]
    block_size: int
    max_lease_s: float


class _Directive(Struct, frozen=True, forbid_unknown_fields=True):
    priority: _Priority
    start: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    end: Annotated[int, Meta(ge=1)] | UnsetType | None = UNSET
    duration: _Duration | None = None
    covers_output: bool = False

    def __post_init__(self) -> None:
        if self.covers_output and not (self.start is UNSET and self.end is UNSET):
            raise ValueError("covers_output cannot be combined with start or end")
        if self.end and self.end <= self.first_token:
            raise ValueError(f"end is {self.end}, expected more than start, {self.first_token}")

    @property
    def first_token(self) -> int:
        return self.start or 0

    @property
    def reaches_the_end(self) -> bool:
        return self.covers_output or not self.end


class _Retain(Struct, frozen=True):
    directives: Annotated[list[_Directive], Meta(max_length=128)]
    scope: _Name | None = None

    def __post_init__(self) -> None:
        along = sorted(
            self.directives, key=lambda one: (one.covers_output, one.first_token)
        )  # generated tokens stand behind all others
        for before, after in pairwise(along):
            if after.priority > before.priority:
                raise ValueError(
                    f"priority {after.priority} follows {before.priority} along the prompt, "
                    "expected priorities that never rise"
                )


class _SetPriority(Struct, frozen=True, forbid_unknown_fields=True):
    target: Literal["request_cached"]
    location: Literal["local_g1"]
    claim_id: _Name
    revision: Annotated[int, Meta(ge=0)]
    value: int | None
    ttl_seconds: Annotated[float, Meta(gt=0, le=1e12)] | None = None

    def __post_init__(self) -> None:
        if (self.value is None) is not (self.ttl_seconds is None):
            raise ValueError("value and ttl_seconds come together, or neither does")


def reads(action: Any) -> bool:
    """Whether an action is of a type and a version that ``read`` knows."""
    return (action.action_type, action.action_version.partition(".")[0]) in _READERS


def read(action: Any, ride: Ride) -> list[Asked]:
    """What an action asks for, as leases and their ends.

    Raises:
        msgspec.ValidationError: its payload is not as upstream defines it.
    """
    payload_type, translate = _READERS[action.action_type, action.action_version.partition(".")[0]]
    return translate(msgspec.convert(action.payload, payload_type), ride)


def write(control: Control, key: Key, block_size: int | None) -> dict[str, Any]:
    """The payload of ``kv.retain@1.0`` for a ``Retain`` or ``Release``; its scope is the context.

    Block hashes are said as the range of tokens that they hold, for which ``block_size`` is needed.

    Raises:
        LocalProtocolError: it has no form there.
    """
    where = f"hint {key.operation!r}"
    directive: dict[str, Any] = {"start": 0, "priority": 0}
    if isinstance(control, Retain):
        if control.force == "requirement" and "preference" not in control.fallback:
            raise LocalProtocolError(f"{where}: {RETAIN} is a preference, got a requirement")
        directive["priority"] = max(round(MAX_PRIORITY * control.score), 1)
        directive["duration"] = min(control.lease_s, MAX_DURATION_S)
        if control.prefix_hashes:
            if block_size is None:
                raise LocalProtocolError(
                    f"{where}: {RETAIN} names tokens, got block hashes and no block size"
                )
            directive["end"] = len(unpack(control.prefix_hashes)) * block_size
    elif not isinstance(control, Release):
        raise LocalProtocolError(
            f"{where}: {type(control).__name__} has no form in {RETAIN}, expected Retain, Release"
        )
    return {"scope": key.context, "directives": [directive]}


def _of_directives(payload: _Retain, ride: Ride) -> list[Asked]:
    controls: list[Asked] = []
    for directive in payload.directives:
        length = None
        if not directive.reaches_the_end:
            assert directive.end
            length = directive.end // ride.block_size
        if directive.priority:
            lease_s = ride.max_lease_s if directive.duration is None else directive.duration
            if lease_s:
                controls += _lease(ride, payload.scope, directive.priority, lease_s, length)
        elif directive.first_token == 0 and not directive.covers_output:
            controls.append((_key(ride, payload.scope, None), Release()))
    return controls


def _of_claim(payload: _SetPriority, ride: Ride) -> list[Asked]:
    if payload.value is None or payload.value < 1:
        # A lease of no time takes the place of the one before it, and pushes no block out.
        return _lease(ride, payload.claim_id, MAX_PRIORITY, 0.0, None)
    return _lease(ride, payload.claim_id, payload.value, payload.ttl_seconds or 0.0, None)


def _lease(
    ride: Ride, scope: str | None, priority: int, lease_s: float, length: int | None
) -> list[Asked]:
    """A lease on the first ``length`` blocks of a request, or on all that its context has."""
    key = _key(ride, scope, length)
    blocks = ride.blocks[:length]
    # The blocks of a context that the engine knows are followed as it grows; others are named.
    follows = length is None and ride.key.context is not None
    if not (blocks or follows):
        return []
    lease_s = min(lease_s, ride.max_lease_s)
    score = min(priority, MAX_PRIORITY) / MAX_PRIORITY
    hashes = b"" if follows else pack(blocks)
    return [(key, Retain(score=score, lease_s=lease_s, prefix_hashes=hashes))]


def _key(ride: Ride, scope: str | None, length: int | None) -> Key:
    """What a hint is about: each range is a context of its own, since a context has one lease."""
    own = ride.key.context is not None and length is None
    name = ride.key.context or scope or ride.key.request
    return Key(
        request=ride.key.request,
        context=name if length is None else f"{name}[:{length * ride.block_size}]",
        context_version=ride.key.context_version if own else None,
    )


_READERS: Final[dict[tuple[str, str], tuple[type[Any], Callable[[Any, Ride], list[Asked]]]]] = {
    (RETAIN, "1"): (_Retain, _of_directives),
    (SET_PRIORITY, "1"): (_SetPriority, _of_claim),
}
