"""What a message says, in words: one renderer for each kind.

A sentence leaves out its subject, who is the source and stands before it: "asks engine0: prioritise
r17 at -24". This module knows neither bus nor terminal; what it returns may hold any character that
a peer has sent, and is made safe where it is shown.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from hear.blocks import HASH_BYTES
from hear.codec import UNREADABLE
from hear.messages import (
    Actions,
    Admit,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    BoundWait,
    Cancel,
    CapabilitiesReported,
    Configure,
    ContextClosed,
    ContextForked,
    ContextOpened,
    ContextPaused,
    ContextResumed,
    ContextVersioned,
    Control,
    CostsReported,
    Envelope,
    Hold,
    Key,
    Message,
    OperationOutcome,
    Place,
    Prepare,
    PressureReported,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    Release,
    RequestDescribed,
    RequestOutcome,
    RequestReadinessChanged,
    ResidencyChanged,
    ResidencyPartial,
    ResidencySnapshot,
    Retain,
    ReuseExpected,
    Route,
    TierPressure,
    WaitingRequest,
    Withdraw,
    WorkflowDescribed,
)

_SHOWN = 4
"""Most names of one list that a sentence gives; of the rest it gives the number."""
_RAW_CHARACTERS = 400
_RAW_BYTES = 4096


def say(envelope: Envelope, message: Message) -> str:
    """What a message says, without its source."""
    if isinstance(message, Control):
        return _control(envelope, message)
    return WORDS[type(message)](envelope.key, message)


def say_unknown(envelope: Envelope) -> str:
    """What can be said of a kind that is not known here: its size and its raw fields."""
    raw = bytes(envelope.body)
    known = f"unknown kind {envelope.kind!r} from {envelope.source}, {len(raw)} bytes"
    if len(raw) > _RAW_BYTES:
        return known
    try:
        fields = msgspec.msgpack.decode(raw)
    except (*UNREADABLE, ValueError):
        return f"{known}, not readable as MessagePack"
    if isinstance(fields, dict):
        shown = " ".join(f"{k}={v!r}" for k, v in fields.items() if k != "kind")
    else:
        shown = repr(fields)
    if len(shown) > _RAW_CHARACTERS:
        shown = f"{shown[:_RAW_CHARACTERS]} ..."
    return f"{known}: {shown}" if shown else known


def say_unreadable(envelope: Envelope, error: str) -> str:
    """What can be said of a message whose body is not what its kind promises."""
    return (
        f"unreadable {envelope.kind!r} from {envelope.source}, {len(envelope.body)} bytes: {error}"
    )


# -- parts of sentences -----------------------------------------------------------------------


def about(key: Key) -> str:
    """The request or else the context that a key names."""
    if key.request is not None:
        return key.request
    return _context(key) if key.context is not None else ""


def _context(key: Key) -> str:
    version = "" if key.context_version is None else f" v{key.context_version}"
    return f"context {key.context}{version}"


def _of_context(key: Key) -> str:
    return f"of {_context(key)}" if key.context is not None else ""


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _num_blocks(packed: bytes) -> int:
    return len(packed) // HASH_BYTES


def _blocks(packed: bytes) -> str:
    return _many(_num_blocks(packed), "block") if packed else ""


def _names(names: Iterable[str]) -> str:
    shown = list(names)
    more = len(shown) - _SHOWN
    listed = ", ".join(shown[:_SHOWN])
    return f"{listed} and {more} more" if more > 0 else listed


def _join(*parts: str, by: str = ", ") -> str:
    return by.join(part for part in parts if part)


def _after_colon(head: str, *parts: str) -> str:
    tail = _join(*parts)
    return f"{head}: {tail}" if tail else head


# -- intent -----------------------------------------------------------------------------------


def _described(key: Key, m: RequestDescribed) -> str:
    blocks = _blocks(m.prefix_hashes)
    size = f"of {m.block_size}" if blocks and m.block_size else ""
    return _after_colon(
        f"describes {_join(about(key), _of_context(key), by=' ')}",
        f"turn {m.turn}" if m.turn else "",
        f"role {m.role}" if m.role else "",
        f"stage {m.stage}" if m.stage else "",
        _many(m.prompt_tokens, "token") if m.prompt_tokens else "",
        _join(blocks, size, by=" "),
        f"at most {m.max_output_tokens} out" if m.max_output_tokens is not None else "",
        f"about {m.expected_output_tokens} out" if m.expected_output_tokens is not None else "",
        f"after {_names(m.depends_on)}" if m.depends_on else "",
        f"for {key.engine}" if key.engine else "",
        "" if m.ready else "not ready yet",
    )


def _readiness(key: Key, m: RequestReadinessChanged) -> str:
    return f"{about(key)} is {'ready' if m.ready else 'no longer ready'}"


def _opened(key: Key, m: ContextOpened) -> str:
    return _join(f"opens {_context(key)}", f"for role {m.role}" if m.role else "", by=" ")


def _versioned(key: Key, m: ContextVersioned) -> str:
    return _after_colon(
        f"{_context(key)} is the newest",
        _many(m.tokens, "token") if m.tokens else "",
        _blocks(m.prefix_hashes),
    )


def _forked(key: Key, m: ContextForked) -> str:
    version = "" if m.parent_version is None else f" v{m.parent_version}"
    return f"forks {_context(key)} from {m.parent}{version}"


def _paused(key: Key, m: ContextPaused) -> str:
    cause = {"tool": "for a tool", "person": "for a person", "other": ""}[m.cause]
    if m.tool:
        cause = f"for the tool {m.tool}"
    expected = f"about {m.expected_pause_s:g} s" if m.expected_pause_s is not None else ""
    return _join(f"{_context(key)} pauses", cause, expected, by=" ")


def _reuse(key: Key, m: ReuseExpected) -> str:
    within = f" within {m.horizon_s:g} s" if m.horizon_s is not None else ""
    by = f" by {m.predictor}" if m.predictor else ""
    return f"expects {_context(key)} again{within}, probability {m.probability:.2f}, {m.basis}{by}"


def _workflow(key: Key, m: WorkflowDescribed) -> str:
    return _after_colon(
        f"describes workflow {key.workflow}",
        f"roles {_names(m.roles)}" if m.roles else "",
        _steps(m),
    )


def _steps(m: WorkflowDescribed) -> str:
    if not m.steps:
        return ""
    return f"steps {_names(f'{s.name} after {_after(s)}' if s.after else s.name for s in m.steps)}"


def _after(step: Actions) -> str:
    every = "" if len(step.after) == 1 else f"{step.join} of "
    return f"{every}{' and '.join(step.after)}"


# -- control ----------------------------------------------------------------------------------

_Asks = Callable[[str, Any], str]

CONTROL_WORDS: Final[dict[type[Control], _Asks]] = {
    Prioritise: lambda what, m: f"prioritise {what} at {m.priority}",
    BoundWait: lambda what, m: f"bound the wait of {what} to {m.max_wait_s:g} s",
    Retain: lambda what, m: _join(
        f"retain {what} for {m.lease_s:g} s at score {m.score:.2f}",
        _blocks(m.prefix_hashes),
    ),
    Release: lambda what, m: f"release {what}",
    Prepare: lambda what, m: _join(
        f"prepare {what} on {m.tier}",
        _blocks(m.prefix_hashes),
        "computing what is missing" if m.compute else "",
    ),
    Place: lambda what, m: _join(f"place {what} on {m.tier}", _blocks(m.prefix_hashes)),
    Hold: lambda what, m: f"hold {what} for {m.hold_s:g} s at most",
    Admit: lambda what, m: f"admit {what}",
    Route: lambda what, m: f"route {what} to {' or '.join(m.targets)}",
    Configure: lambda what, m: f"run {what} in mode {' or '.join(m.modes)}",
    Cancel: lambda what, m: f"cancel operation {m.target}",
    Withdraw: lambda what, m: "withdraw all that this sender asked for",
}


def ask(key: Key, message: Control) -> str:
    """What a control asks for, without sender, engine and operation."""
    return _join(
        CONTROL_WORDS[type(message)](about(key), message),
        "required" if message.force == "requirement" else "",
        f"else {' or '.join(message.fallback)}" if message.fallback else "",
    )


def _control(envelope: Envelope, message: Control) -> str:
    key = envelope.key
    life = (
        "" if message.deadline_s is None else f"within {message.deadline_s - envelope.time_s:.0f} s"
    )
    return _join(
        f"asks {key.engine or 'any engine'}: {_join(ask(key, message), life)}",
        f"({message.reason})" if message.reason else "",
        f"op {key.operation}" if key.operation else "",
        by=" ",
    )


# -- state ------------------------------------------------------------------------------------


def _residency_changed(key: Key, m: ResidencyChanged) -> str:
    moved: Counter[tuple[str, str]] = Counter()
    for change in m.changes:
        match change:
            case BlocksStored():
                moved["stores", f"on {change.tier}"] += _num_blocks(change.prefix_hashes)
            case BlocksRemoved():
                moved["removes", f"from {change.tier}"] += _num_blocks(change.prefix_hashes)
            case BlocksCleared():
                moved["clears", change.tier or "every tier"] += 1
    said = (
        f"{verb} {where}" if verb == "clears" else f"{verb} {_many(number, 'block')} {where}"
        for (verb, where), number in moved.items()
    )
    return ", ".join(said) or "reports no change of residency"


def _residency(key: Key, m: ResidencySnapshot | ResidencyPartial) -> str:
    held: Counter[str] = Counter()
    for chain in m.chains:
        held[chain.tier] += _num_blocks(chain.prefix_hashes)
    said = ", ".join(f"{_many(number, 'block')} on {tier}" for tier, number in held.items())
    part = f" (part {m.part + 1} of {m.parts})" if m.parts > 1 else ""
    if isinstance(m, ResidencyPartial):
        known = f"holds {said}, and cannot tell what else" if said else "cannot tell what it holds"
        return known + part
    return f"holds {said or 'no blocks'}{part}"


def wait_words(w: WaitingRequest) -> str:
    """A request in the queue, and how it stands there."""
    return _join(
        w.request,
        f"at {w.priority}" if w.priority else "",
        "protected" if w.protected else "",
        "held" if w.held else "",
        by=" ",
    )


def _queue_changed(key: Key, m: QueueChanged) -> str:
    moved = _join(
        f"+{len(m.waiting)}" if m.waiting else "",
        f"-{len(m.ended)}" if m.ended else "",
        by=" ",
    )
    return _after_colon(
        f"queue {m.num_waiting} waiting {m.num_running} running" + (f" ({moved})" if moved else ""),
        f"waits {_names(map(wait_words, m.waiting))}" if m.waiting else "",
        f"starts {_names(m.started)}" if m.started else "",
        f"ends {_names(m.ended)}" if m.ended else "",
    )


def _queue(key: Key, m: QueueSnapshot) -> str:
    return _after_colon(
        f"queue {len(m.waiting)} waiting {len(m.running)} running, all told",
        f"waits {_names(map(wait_words, m.waiting))}" if m.waiting else "",
        f"runs {_names(r.request for r in m.running)}" if m.running else "",
    )


def kv_share(tier: TierPressure) -> float:
    """The share of a tier's blocks that requests use now, or that hold what could be reused."""
    return min((tier.used + tier.cached) / tier.num_blocks, 1.0) if tier.num_blocks else 0.0


def _pressure(key: Key, m: PressureReported) -> str:
    tiers = (
        f"{t.tier} {kv_share(t):.0%} full "
        f"({t.used:,} used, {t.cached:,} cached of {t.num_blocks:,})"
        for t in m.tiers
    )
    return _join(
        *tiers,
        f"{m.num_waiting} waiting {m.num_running} running",
        _many(m.preemptions, "preemption") if m.preemptions else "",
        f"{m.restored_tokens:,} tokens restored" if m.restored_tokens else "",
        f"{m.load_backlog_s:.1f} s of transfers ahead" if m.load_backlog_s >= 0.05 else "",
    )


def _capabilities(key: Key, m: CapabilitiesReported) -> str:
    return _join(
        f"serves {m.model or 'an unnamed model'}",
        f"controls {' '.join(m.controls) or 'none'}",
        f"at submission {' '.join(m.at_submission)}" if m.at_submission else "",
        f"modes {' '.join(m.modes) or 'none'}",
        *(f"{t.name} {_many(t.num_blocks, 'block')}" for t in m.tiers),
        f"blocks of {m.block_size} tokens" if m.block_size else "",
        f"at {m.endpoint}" if m.endpoint else "",
    )


def _costs(key: Key, m: CostsReported) -> str:
    return _join(
        f"costs, {m.basis}: prefill {m.prefill_tokens_per_s:,.0f} tokens/s",
        f"decode step {1000 * m.decode_step_s:.1f} ms",
        f"{m.kv_bytes_per_token:,.0f} bytes of KV a token",
        f"loads {m.load_bytes_per_s / 1e9:.1f} GB/s" if m.load_bytes_per_s else "",
    )


# -- outcome ----------------------------------------------------------------------------------


def _request_outcome(key: Key, m: RequestOutcome) -> str:
    reused = " ".join(f"{count:,} {tier}" for tier, count in m.reused_tokens.items() if count)
    spans: Sequence[str] = ()
    if m.queue_s or m.prefill_s or m.decode_s:
        spans = (
            f"queue {m.queue_s:.2f} s",
            f"prefill {m.prefill_s:.2f} s",
            f"decode {m.decode_s:.2f} s",
        )
    return _after_colon(
        f"{m.status} {_join(about(key), _of_context(key) if key.request else '', by=' ')}",
        m.reason,
        f"mode {m.mode}" if m.mode else "",
        f"{m.prompt_tokens:,} tokens in {m.output_tokens:,} out" if m.prompt_tokens else "",
        f"reused {reused}" if reused else "",
        *spans,
        _many(m.preemptions, "preemption") if m.preemptions else "",
    )


def how_it_fared(m: OperationOutcome) -> str:
    """Why an operation's outcome is what it is, or empty."""
    if m.reason == "outranked" and m.detail:
        why = f"outranked by {m.detail}"
    else:
        why = _join(m.reason, f"({m.detail})" if m.detail else "", by=" ")
    return _join(why, f"by the fallback {m.fallback}" if m.fallback is not None else "")


def _operation_outcome(key: Key, m: OperationOutcome) -> str:
    verb = "does not support" if m.status == "unsupported" else m.status
    return _join(
        _after_colon(_join(verb, m.control or "control", about(key), by=" "), how_it_fared(m)),
        f"op {key.operation}" if key.operation else "",
        by=" ",
    )


WORDS: Final[dict[type[Message], Callable[[Key, Any], str]]] = {
    RequestDescribed: _described,
    RequestReadinessChanged: _readiness,
    ContextOpened: _opened,
    ContextVersioned: _versioned,
    ContextForked: _forked,
    ContextPaused: _paused,
    ContextResumed: lambda key, m: f"{_context(key)} goes on",
    ContextClosed: lambda key, m: f"closes {_context(key)}",
    ReuseExpected: _reuse,
    WorkflowDescribed: _workflow,
    ResidencyChanged: _residency_changed,
    ResidencyPartial: _residency,
    ResidencySnapshot: _residency,
    QueueChanged: _queue_changed,
    QueueSnapshot: _queue,
    PressureReported: _pressure,
    CapabilitiesReported: _capabilities,
    CostsReported: _costs,
    RequestOutcome: _request_outcome,
    OperationOutcome: _operation_outcome,
}
"""The renderer of each kind that is not a control; those are in ``CONTROL_WORDS``."""
