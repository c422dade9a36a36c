"""HEAR's cache controls in the form in which vLLM carries hints: ``KvHintsEnvelope``, both ways.

vLLM carries an envelope with a request from ``AsyncLLM.generate(kv_hints=...)`` to its scheduler
(``Request.kv_hints``) and to the offloading policy (``ReqContext.kv_hints``); no HTTP route of 0.32
or 0.33 fills it. The envelope is fixed there (``vllm/v1/kv_hints/protocol.py``); action types are
open strings. Two kinds of actions are read:

- HEAR's own, in its name, version ``1.0``. They hold all that a control holds:

      Retain   hear.retain   biases eviction for a while, and yields to service
      Release  hear.release  ends that and lets the blocks go first
      Prepare  hear.prepare  brings blocks to a tier, or computes them if ``compute`` allows it
      Place    hear.place    moves blocks to a tier and out of the faster ones

- Upstream's, ``kv.retain@1.x`` and ``vllm.set_priority@1.x``, as ``upstream_hints.py`` says.

Other actions are passed over: ``from_envelope`` returns them untouched. In HEAR's payload, hashes
are decimal strings (JSON's numbers end at 2**53) in ``block_hashes``, a lease is ``ttl_seconds``;
all else has the name that it has on HEAR's wire. ``action_id`` is the operation.

The plug-in reads the envelopes that ride on requests (``plugin.py``, ``backend.py``) and gives
their controls to the worker as if ``ENGINE/hints`` had published them, for the tenant of the
request. They are arbitrated with the others, and answered by outcomes on the bus, for which the
envelope has no room. A malformed envelope costs its hints and never the request.

Not expressible. In an envelope: controls on other axes than retention and placement; source and
tenant, which are those of the request that it rides on; outcomes. In HEAR: actions between engines
(``kv.fetch``), and a time of execution.

This module owns the translation. It knows neither bus nor scheduler, and carries out nothing.
"""

import math
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct, field
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from hear.blocks import pack, unpack
from hear.engines.vllm import upstream_hints
from hear.engines.vllm.upstream_hints import Ride
from hear.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from hear.messages import Key, Place, Prepare, Release, Retain
from hear.messages.control import Force, Score
from hear.messages.envelope import Seconds

PROTOCOL_VERSION: Final = "0.1"
OWN: Final = "hear."
"""How the types of HEAR's own actions begin."""

ACTION_VERSION: Final = "1.0"
MAX_ACTIONS: Final = 128
"""Actions of one envelope. A client that sends more gets none of them carried out."""

CacheControl = Retain | Release | Prepare | Place
_Hash = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,19})$")]
_Name = Annotated[str, Meta(min_length=1)]


class Hint(NamedTuple):
    """One cache control, and what it is about. ``key.operation`` and ``key.context`` are given."""

    control: CacheControl
    key: Key


class Hints(NamedTuple):
    """What an envelope holds: the controls of HEAR's and upstream's actions, and other actions.

    ``others`` are as they came; ``refused`` says of each action of upstream's that is not as it
    should be what is wrong with it.
    """

    hints: tuple[Hint, ...]
    others: tuple[Any, ...]
    refused: tuple[str, ...] = ()


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


class _Prepare(_Payload, frozen=True, kw_only=True):
    tier: str = "gpu"
    prefix_hashes: tuple[_Hash, ...] = field(default=(), name="block_hashes")
    compute: bool = False


class _Place(_Payload, frozen=True, kw_only=True):
    tier: str
    prefix_hashes: tuple[_Hash, ...] = field(default=(), name="block_hashes")


_KEY_FIELDS: Final = ("context", "context_version", "request", "engine", "workflow")
_TYPES: Final[dict[str, tuple[type[CacheControl], type[_Payload]]]] = {
    "hear.retain": (Retain, _Retain),
    "hear.release": (Release, _Release),
    "hear.prepare": (Prepare, _Prepare),
    "hear.place": (Place, _Place),
}
_NAMES: Final = {control: name for name, (control, _) in _TYPES.items()}


def to_envelope(
    message_id: str,
    hints: Iterable[Hint],
    *,
    form: Literal["hear", "upstream"] = "hear",
    block_size: int | None = None,
) -> Any:
    """Say cache controls as a ``KvHintsEnvelope``. ``message_id`` should name it among all.

    ``form`` says for whom: an engine with HEAR's plug-in, or any that carries out vLLM's own
    ``kv.retain@1.0``, which tells ``Retain`` and ``Release`` alone and needs the engine's
    ``block_size`` where a control names blocks.

    Raises:
        LocalProtocolError: one of them has no form there, two are one operation, or there are more
            than ``MAX_ACTIONS``.
    """
    actions = [
        _action(hint) if form == "hear" else _upstream_action(hint, block_size) for hint in hints
    ]
    where = f"kv_hints {message_id!r}"
    _check_ids(where, [action.action_id for action in actions], LocalProtocolError)
    return KvHintsEnvelope(PROTOCOL_VERSION, message_id, actions)


def from_envelope(value: object, ride: Ride | None = None) -> Hints:
    """Read a ``KvHintsEnvelope``, or what JSON or MessagePack make of one.

    HEAR's own actions are all read, or nothing is. Upstream's are read if ``ride`` says what they
    ride on, each by itself, as upstream asks of those who carry them out.

    Raises:
        RemoteProtocolError: it is no envelope, has more than ``MAX_ACTIONS``, or one of HEAR's own
            actions is not as it should be.
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
    own: list[Hint] = []
    upstream: list[Hint] = []
    others: list[Any] = []
    refused: list[str] = []
    _check_ids(
        where,
        [action.action_id for action in envelope.actions if action.action_type.startswith(OWN)],
        RemoteProtocolError,
        len(envelope.actions),
    )
    for number, action in enumerate(envelope.actions):
        at = f"{where}: actions[{number}]"
        if action.action_type.startswith(OWN):
            own.append(_hint(at, action))
        elif ride is not None and upstream_hints.reads(action):
            try:
                upstream += _upstream_hints(envelope.message_id, number, action, ride)
            except (msgspec.ValidationError, OverflowError) as error:
                refused.append(
                    f"{at} ({action.action_id!r:.80}): {action.action_type}: {_line(error)}; "
                    f"got payload {_shown(action.payload)}"
                )
        else:
            others.append(action)
    return Hints((*own, *upstream), tuple(others), tuple(refused))


def _upstream_action(hint: Hint, block_size: int | None) -> Any:
    _check_key(hint)
    try:
        payload = upstream_hints.write(hint.control, hint.key, block_size)
    except ProtocolError as error:
        raise LocalProtocolError(_line(error)) from None
    return KvHintAction(hint.key.operation, upstream_hints.RETAIN, upstream_hints.VERSION, payload)


def _upstream_hints(message_id: str, number: int, action: Any, ride: Ride) -> list[Hint]:
    # Upstream's ids name an action for its sender alone, and the same may come with each request.
    operation = f"{ride.key.request}/{message_id[:80]}/{number}"
    return [
        Hint(control, msgspec.structs.replace(key, operation=f"{operation}.{part}"))
        for part, (key, control) in enumerate(upstream_hints.read(action, ride))
    ]


def _action(hint: Hint) -> Any:
    control, key = hint
    where = f"hint {key.operation!r}"
    name = _NAMES.get(type(control))
    if name is None:
        raise LocalProtocolError(
            f"{where}: {type(control).__name__} has no form in kv_hints, expected one of "
            f"{', '.join(kind.__name__ for kind in _NAMES)}"
        )
    _check_key(hint)
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
    if action.action_type not in _TYPES or action.action_version != ACTION_VERSION:
        raise RemoteProtocolError(
            f"{where}: the action is {action.action_type!r:.80} version "
            f"{action.action_version!r:.80}, expected version {ACTION_VERSION} of one of "
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


def _check_key(hint: Hint) -> None:
    if not hint.key.operation or not hint.key.context:
        raise LocalProtocolError(
            f"hint {hint.key.operation!r}: a hint needs an operation and a context, got {hint.key}"
        )


def _check_ids(
    where: str, ids: list[Any], error: type[ProtocolError], num_actions: int | None = None
) -> None:
    count = len(ids) if num_actions is None else num_actions
    if count > MAX_ACTIONS:
        raise error(f"{where}: got {count} actions, expected at most {MAX_ACTIONS}")
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
