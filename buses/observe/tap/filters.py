"""Which messages a tap wants: the subjects to subscribe to, and what to look for in an envelope.

Options of different kinds must all hold; of one kind, any. A body is decoded for one question only,
whether a report of the queue mentions a request, and only after its envelope has passed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, get_args

from hear.errors import ConfigError, LocalProtocolError
from hear.messages import Category, Envelope, Message, QueueChanged, QueueSnapshot
from hear.subjects import Pattern, stem_of, token

CATEGORIES: Final[tuple[str, ...]] = get_args(Category)
_TOKENS = 5
_REMEMBERED = 65_536
"""Most operations, and requests, that a filter keeps in mind."""

_Tokens = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for; an empty field asks for nothing in particular."""

    subjects: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()
    contexts: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()


class Filter:
    """Chooses messages. It learns as it goes: which operations are a policy's, which requests run
    on a context.
    """

    def __init__(self, wanted: Wanted) -> None:
        """Make a filter.

        Raises:
            ConfigError: a subject pattern is not one, or nothing can ever match.
        """
        self._wanted = wanted
        self.patterns = _patterns(wanted)
        self._whole = [Pattern(p) for p in self.patterns if p.endswith((".*", ">"))]
        self._covered: dict[str, bool] = {}
        self._operations: dict[str, None] = {}
        self._of_contexts: dict[str, None] = {}  # requests
        self._usual = re.compile(f"(?:{'|'.join(map(re.escape, wanted.policies))})-[0-9]+-[0-9]+")

    @property
    def names(self) -> str:
        """What was asked for by name, in words; empty if nothing was."""
        wanted = self._wanted
        return ", ".join(
            f"{what} {name!r}"
            for what, names in (
                ("request", wanted.requests),
                ("context", wanted.contexts),
                ("engine", wanted.engines),
                ("policy", wanted.policies),
            )
            for name in names
        )

    def covers(self, envelope: Envelope) -> bool:
        """Whether all messages of its stem come by, so that a hole in their numbers is a loss."""
        stem = stem_of(envelope)
        known = self._covered.get(stem)
        if known is None:
            if len(self._covered) >= _REMEMBERED:
                self._covered.clear()
            known = any(pattern.matches(f"{stem}.-") for pattern in self._whole)
            self._covered[stem] = known
        return known

    def passes(self, envelope: Envelope) -> bool:
        """Whether the envelope is of a wanted message, as far as it tells."""
        wanted, key = self._wanted, envelope.key
        state = envelope.category == "state"
        if wanted.categories and envelope.category not in wanted.categories:
            return False
        if wanted.engines and (key.engine or (envelope.source if state else None)) not in (
            wanted.engines
        ):
            return False
        if wanted.policies and not self._is_of_policy(envelope):
            return False
        if state:
            return not (wanted.requests or wanted.contexts) or _is_queue(envelope)
        if wanted.contexts:
            if key.context not in wanted.contexts:
                return False
            if key.request is not None:
                _remember(self._of_contexts, key.request)
        return not wanted.requests or key.request in wanted.requests

    def mentions(self, message: Message) -> bool:
        """Whether a report of the queue that passed mentions a wanted request or context."""
        rows: list[tuple[str, str | None]]
        match message:
            case QueueChanged():
                rows = [(w.request, w.context) for w in message.waiting]
                rows += [(request, None) for request in (*message.started, *message.ended)]
            case QueueSnapshot():
                rows = [(w.request, w.context) for w in message.waiting]
                rows += [(r.request, r.context) for r in message.running]
            case _:
                return True
        requests, contexts = self._wanted.requests, self._wanted.contexts
        return not (requests or contexts) or any(
            (not requests or request in requests)
            and (not contexts or context in contexts or request in self._of_contexts)
            for request, context in rows
        )

    def _is_of_policy(self, envelope: Envelope) -> bool:
        operation = envelope.key.operation
        if envelope.source in self._wanted.policies:
            if envelope.category == "control" and operation is not None:
                _remember(self._operations, operation)
            return True
        if envelope.kind != "operation_outcome" or operation is None:
            return False
        # An outcome may overtake its control, and a lease may be older than the tap; the id that
        # senders make the usual way tells as well.
        return operation in self._operations or self._usual.fullmatch(operation) is not None


def _is_queue(envelope: Envelope) -> bool:
    return envelope.kind in ("queue_changed", "queue_snapshot")


def _remember(kept: dict[str, None], name: str) -> None:
    kept[name] = None
    if len(kept) > _REMEMBERED:
        del kept[next(iter(kept))]


# -- what to subscribe to ---------------------------------------------------------------------


def _patterns(wanted: Wanted) -> tuple[str, ...]:
    given = [_five_tokens(text) for text in wanted.subjects]
    if not (wanted.categories or wanted.engines or _is_about_something(wanted)):
        return tuple(sorted({_text(tokens) for tokens in given})) or (">",)
    needed = list(_needed(wanted))
    if given:
        both = (_intersect(a, b) for a in given for b in needed)
        needed = [tokens for tokens in both if tokens is not None]
    if not needed:
        raise ConfigError("no message can match all of these options")
    return tuple(sorted({_text(tokens) for tokens in needed}))


def _is_about_something(wanted: Wanted) -> bool:
    return bool(wanted.requests or wanted.contexts or wanted.policies)


def _five_tokens(text: str) -> _Tokens:
    try:
        Pattern(text)
    except LocalProtocolError as error:
        raise ConfigError(str(error)) from None
    tokens = text.split(".")
    if tokens[-1] == ">":
        tokens = tokens[:-1] + ["*"] * (_TOKENS + 1 - len(tokens))
    if len(tokens) != _TOKENS:
        raise ConfigError(
            f"subject pattern {text!r}: {len(tokens)} tokens, and a subject has {_TOKENS} "
            f"(<category>.<tenant>.<instance>.<topic>.<key>); end it with '.>' for the rest"
        )
    return tuple(tokens)


def _text(tokens: _Tokens) -> str:
    kept = list(tokens)
    while len(kept) > 1 and kept[-1] == kept[-2] == "*":
        kept.pop()
    if kept == ["*"]:
        return ">"
    if len(kept) < _TOKENS or kept[-1] == "*":
        kept[-1] = ">"
    return ".".join(kept)


def _intersect(a: _Tokens, b: _Tokens) -> _Tokens | None:
    """The pattern of all that both match; None if that is nothing."""
    both = []
    for x, y in zip(a, b, strict=True):
        if "*" not in (x, y) and x != y:
            return None
        both.append(y if x == "*" else x)
    return tuple(both)


def _needed(wanted: Wanted) -> Iterator[_Tokens]:
    """What the options leave over of each category."""
    engines = [token(name) for name in wanted.engines] or ["*"]
    keys = [token(name) for name in wanted.requests] or ["*"]
    for category in wanted.categories or CATEGORIES:
        if category == "state":
            if wanted.policies:
                continue  # no policy says state
            topic = "queue" if wanted.requests or wanted.contexts else "*"
            yield from ((category, "*", engine, topic, "*") for engine in engines)
        elif category == "intent":
            # Its instance is the workflow; the engine, if known, stands in the key alone.
            yield from ((category, "*", "*", "*", key) for key in keys)
        else:
            topic = "operation_outcome" if category == "outcome" and wanted.policies else "*"
            yield from ((category, "*", e, topic, key) for e in engines for key in keys)
