"""HEAR's cache controls in the form in which vLLM carries hints: ``KvHintsEnvelope``, both ways.

vLLM 0.32 carries an envelope with a request from ``AsyncLLM.generate(kv_hints=...)`` to its
scheduler (``Request.kv_hints``) and to the offloading policy (``ReqContext.kv_hints``); no HTTP
route fills it yet. The envelope is fixed there (``vllm/v1/kv_hints/protocol.py``); action types are
open strings, and vLLM itself carries out none. HEAR's types are the words that upstream's proposals
use where the meaning is the same, and its own where there is none:

    Retain   kv.retain    biases eviction for a while, and yields to service
    Release  kv.release   ends that and lets the blocks go first (to evict them would be more)
    Prepare  kv.prefetch  brings blocks to a tier, or computes them if ``compute`` allows it
    Place    kv.demote    moves blocks to a tier and out of the faster ones

What belongs to a type is left by upstream to whoever carries it out, and its drafts differ. So the
payload is HEAR's, and ``action_version`` says so: ``hear-1``. Another consumer passes such an
action over, and ``from_envelope`` returns actions of other versions untouched. In the payload,
hashes are decimal strings (JSON's numbers end at 2**53) in ``block_hashes``, a lease is
``ttl_seconds``; all else has the name that it has on HEAR's wire. ``action_id`` is the operation.

Those that ride on a request are taken in (``plugin.py``, ``backend.py``): a fact to HEAR's thread,
and from there to the worker as controls off the bus are, said by ``ENGINE/hints`` and of the tenant
of the request. They are arbitrated with the others, and answered by outcomes on the bus, for which
the envelope has no room. A malformed envelope costs its hints and never the request.

Not expressible. In an envelope: controls on other axes than retention and placement; source and
tenant, which are those of the request that it rides on; outcomes. In HEAR: ranges of tokens and
priorities within one prompt, actions between engines (``kv.fetch``), and a time of execution.

This module owns the translation. It knows neither bus nor scheduler, and carries out nothing.
"""

import math
from collections.abc import Iterable
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct, field
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from hear.blocks import pack, unpack
from hear.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from hear.messages import Key, Place, Prepare, Release, Retain
from hear.messages.control import Force, Score
from hear.messages.envelope import Seconds

PROTOCOL_VERSION: Final = "0.1"
ACTION_VERSION: Final = "hear-1"

CacheControl = Retain | Release | Prepare | Place
_Hash = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,19})$")]
_Name = Annotated[str, Meta(min_length=1)]


class Hint(NamedTuple):
    """One cache control, and what it is about. ``key.operation`` and ``key.context`` are given."""

    control: CacheControl
    key: Key


class Hints(NamedTuple):
    """What an envelope holds: HEAR's actions, and those of others as they came."""

    hints: tuple[Hint, ...]
    others: tuple[Any, ...]


class _Payload(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    context: _Name
    context_version: int | None = None
    request: str | None = None
    engine: str | None = None
    workflow: str | None = None
    force: Force = "preference"
    deadline_s: float | None = None
    fallback: tuple[str, ...] = ()
    reason: str = ""
    engine_epoch: int | None = None


class _Release(_Payload, frozen=True, kw_only=True):
    pass


class _Retain(_Payload, frozen=True, kw_only=True):
    score: Score = 1.0
    lease_s: Seconds = field(name="ttl_seconds")
    prefix_hashes: tuple[_Hash, ...] = field(default=(), name="block_hashes")


class _Prefetch(_Payload, frozen=True, kw_only=True):
    tier: str = "gpu"
    prefix_hashes: tuple[_Hash, ...] = field(default=(), name="block_hashes")
    compute: bool = False


class _Demote(_Payload, frozen=True, kw_only=True):
    tier: str
    prefix_hashes: tuple[_Hash, ...] = field(default=(), name="block_hashes")


_KEY_FIELDS: Final = ("context", "context_version", "request", "engine", "workflow")
_TYPES: Final[dict[str, tuple[type[CacheControl], type[_Payload]]]] = {
    "kv.retain": (Retain, _Retain),
    "kv.release": (Release, _Release),
    "kv.prefetch": (Prepare, _Prefetch),
    "kv.demote": (Place, _Demote),
}
_NAMES: Final = {control: name for name, (control, _) in _TYPES.items()}


def to_envelope(message_id: str, hints: Iterable[Hint]) -> Any:
    """Say cache controls as a ``KvHintsEnvelope``. ``message_id`` should name it among all.

    Raises:
        LocalProtocolError: one of them has no form there, or two are one operation.
    """
    actions = [_action(hint) for hint in hints]
    where = f"kv_hints {message_id!r}"
    _check_ids(where, [action.action_id for action in actions], LocalProtocolError)
    return KvHintsEnvelope(PROTOCOL_VERSION, message_id, actions)


def from_envelope(value: object) -> Hints:
    """Read a ``KvHintsEnvelope``, or what JSON or MessagePack make of one: all of it, or nothing.

    Raises:
        RemoteProtocolError: it is no envelope, or an action of HEAR's version is none of HEAR's.
    """
    try:
        envelope = msgspec.convert(msgspec.to_builtins(value), KvHintsEnvelope)
    except (msgspec.ValidationError, TypeError, RecursionError) as error:
        raise RemoteProtocolError(f"kv_hints: {_line(error)}; got {_shown(value)}") from None
    where = f"kv_hints {envelope.message_id!r:.80}"
    if envelope.protocol_version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"{where}: protocol_version is {envelope.protocol_version!r:.80}, "
            f"expected {PROTOCOL_VERSION!r}"
        )
    own, others = [], []
    for number, action in enumerate(envelope.actions):
        if action.action_version == ACTION_VERSION:
            own.append(_hint(f"{where}: actions[{number}]", action))
        else:
            others.append(action)
    _check_ids(where, [hint.key.operation for hint in own], RemoteProtocolError)
    return Hints(tuple(own), tuple(others))


def _action(hint: Hint) -> Any:
    control, key = hint
    where = f"hint {key.operation!r}"
    name = _NAMES.get(type(control))
    if name is None:
        raise LocalProtocolError(
            f"{where}: {type(control).__name__} has no form in kv_hints, expected one of "
            f"{', '.join(kind.__name__ for kind in _NAMES)}"
        )
    if not key.operation or not key.context:
        raise LocalProtocolError(f"{where}: a hint needs an operation and a context, got {key}")
    payload_type = _TYPES[name][1]
    values: dict[str, Any] = {name: getattr(key, name) for name in _KEY_FIELDS}
    for name_ in payload_type.__struct_fields__:
        if name_ not in _KEY_FIELDS:
            values[name_] = getattr(control, name_)
    if "prefix_hashes" in values:
        try:
            values["prefix_hashes"] = tuple(map(str, unpack(values["prefix_hashes"])))
        except ProtocolError as error:
            raise LocalProtocolError(f"{where}: {_line(error)}") from None
    for name_, given in values.items():
        if isinstance(given, float) and not math.isfinite(given):
            raise LocalProtocolError(f"{where}: {name_} is {given}, which JSON has no form for")
    try:
        # Through JSON, so that another engine or language can read what is sent.
        payload = msgspec.json.decode(msgspec.json.encode(payload_type(**values)))
        msgspec.convert(payload, payload_type)
    except (msgspec.MsgspecError, TypeError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"{where}: {_line(error)}; got {_shown(control)}") from None
    return KvHintAction(key.operation, name, ACTION_VERSION, payload)


def _hint(where: str, action: Any) -> Hint:
    where = f"{where} ({action.action_id!r:.80})"
    if action.action_type not in _TYPES:
        raise RemoteProtocolError(
            f"{where}: action_type is {action.action_type!r:.80}, expected one of "
            f"{', '.join(_TYPES)}"
        )
    if not action.action_id:
        raise RemoteProtocolError(f"{where}: action_id is empty, expected an operation's id")
    kind, payload_type = _TYPES[action.action_type]
    try:
        payload = msgspec.convert(action.payload, payload_type)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(
            f"{where}: {action.action_type}: {_line(error)}; got payload {_shown(action.payload)}"
        ) from None
    values = {name: getattr(payload, name) for name in payload.__struct_fields__}
    key = Key(operation=action.action_id, **{name: values.pop(name) for name in _KEY_FIELDS})
    if "prefix_hashes" in values:
        hashes = [int(number) for number in values["prefix_hashes"]]
        if max(hashes, default=0) >= 1 << 64:
            raise RemoteProtocolError(
                f"{where}: block_hashes has {max(hashes)}, expected less than 2**64"
            )
        values["prefix_hashes"] = pack(hashes)
    return Hint(kind(**values), key)


def _check_ids(where: str, ids: list[Any], error: type[ProtocolError]) -> None:
    if len(set(ids)) < len(ids):
        twice = next(name for at, name in enumerate(ids) if name in ids[:at])
        raise error(
            f"{where}: action_id {twice!r:.80} comes twice, expected one for each operation"
        )


def _shown(value: object) -> str:
    """What came, in a piece of one line."""
    try:
        return _line(repr(value))
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"


def _line(text: object) -> str:
    return " ".join(f"{text!s:.200}".split())
