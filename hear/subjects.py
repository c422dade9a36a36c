"""Subjects: where a message is found on the bus, and which ones a pattern matches.

``<category>.<tenant>.<instance>.<topic>.<key>``, dot-separated as in NATS, category first so that
access can be granted by prefix. The instance is the engine for state, outcome and control, and
the workflow for intent. The topic is the kind; for state it is the stream (residency, queue,
pressure, capabilities, costs), since a stream's messages are ordered among each other. In a
pattern ``*`` stands for one token and a last ``>`` for one or more.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from hear.codec import KINDS, topic_of
from hear.errors import LocalProtocolError
from hear.messages import Envelope, Key

NOBODY = "-"
"""The token where a message names no instance or no key."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_\-:/@+=]")
_TOKEN = re.compile(r"[A-Za-z0-9_\-:/@+=%]+")
_MAX_TOKENS = 5
_TOPIC_AT = 3
_MAX_STEMS = 16384
_MAX_KEPT = 160  # letters of what is remembered

Channel = tuple[str, int, str]
"""Source, epoch and subject without its key: the scope in which ``seq`` counts."""


def token(text: str | None) -> str:
    """Make one subject token of any text: unsafe characters become ``%xx``, nothing becomes -.

    Different texts give different tokens (so a text that is itself ``-`` becomes ``%2d``).

    Raises:
        LocalProtocolError: the text has no UTF-8 form, since half of a surrogate pair is in it.
    """
    # What a stranger sends may be long, and a table of many such names would have no bound.
    return (_token if not text or len(text) <= _MAX_KEPT else _token.__wrapped__)(text)


@lru_cache(maxsize=_MAX_STEMS)
def _token(text: str | None) -> str:
    if not text:
        return NOBODY
    if text == NOBODY:
        return "%2d"
    try:
        return _UNSAFE.sub(lambda m: "".join(f"%{b:02x}" for b in m[0].encode()), text)
    except UnicodeEncodeError as error:
        raise LocalProtocolError(
            f"name {text!r:.200}: has no UTF-8 form ({error.reason}), so it can be in no subject"
        ) from error


def stem(category: str, tenant: str, key: Key, kind: str) -> str:
    """The subject without its last token: the part that scopes sequence numbers."""
    instance = key.workflow if category == "intent" else key.engine
    length = len(category) + len(tenant) + len(instance or "") + len(kind)
    return (_stem if length <= _MAX_KEPT else _stem.__wrapped__)(category, tenant, instance, kind)


@lru_cache(maxsize=_MAX_STEMS)
def _stem(category: str, tenant: str, instance: str | None, kind: str) -> str:
    topic = token(topic_of(category, kind))
    return f"{token(category)}.{token(tenant)}.{token(instance)}.{topic}"


def stem_of(envelope: Envelope) -> str:
    """The stem of the subject that an envelope is published on."""
    return stem(envelope.category, envelope.tenant, envelope.key, envelope.kind)


def subject(envelope: Envelope) -> str:
    """The subject that an envelope is published on."""
    key = envelope.key
    last = key.request or key.context or key.operation
    return f"{stem_of(envelope)}.{token(last)}"


def channel(envelope: Envelope) -> Channel:
    """The scope in which the envelope's ``seq`` counts."""
    return envelope.source, envelope.epoch, stem_of(envelope)


class Pattern:
    """A parsed subject pattern."""

    __slots__ = ("_tail", "_tokens", "text")

    def __init__(self, text: str) -> None:
        """Parse a pattern.

        Raises:
            LocalProtocolError: it is not a pattern.
        """
        tokens = text.split(".")
        self.text = text
        self._tail = tokens[-1] == ">"
        self._tokens = tokens[:-1] if self._tail else tokens
        for part in self._tokens:
            if part != "*" and not _TOKEN.fullmatch(part):
                raise LocalProtocolError(
                    f"subject pattern {text!r}: token {part!r}, expected letters, digits, "
                    "'*', or '>' at the end"
                )
        if len(tokens) > _MAX_TOKENS:
            raise LocalProtocolError(
                f"subject pattern {text!r}: {len(tokens)} tokens, expected at most {_MAX_TOKENS}"
            )

    def matches(self, subject: str) -> bool:
        """Whether a subject falls under the pattern."""
        tokens = subject.split(".")
        wanted = self._tokens
        if len(tokens) <= len(wanted) if self._tail else len(tokens) != len(wanted):
            return False
        return all(want in ("*", got) for want, got in zip(wanted, tokens, strict=False))

    def covers(self, stem: str) -> bool:
        """Whether subjects of a stem fall under the pattern, with some key at least."""
        tokens = stem.split(".")
        wanted = self._tokens
        if len(tokens) < len(wanted) if self._tail else len(tokens) + 1 != len(wanted):
            return False
        return all(want in ("*", got) for want, got in zip(wanted, tokens, strict=False))

    @property
    def names_key(self) -> bool:
        """Whether it wants one key, so that the stem of a subject does not decide alone."""
        return not self._tail and len(self._tokens) == _MAX_TOKENS and self._tokens[-1] != "*"

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"


def narrowed(pattern: str, tenant: str) -> str | None:
    """What of a pattern concerns one tenant; None if it names another.

    Raises:
        LocalProtocolError: it is no pattern.
    """
    Pattern(pattern)
    own = token(tenant)
    category, *more = pattern.split(".")
    if category == ">":
        return f"*.{own}.>"
    if more in ([], [">"]):
        return f"{category}.{own}.>" if more else pattern
    return ".".join([category, own, *more[1:]]) if more[0] in ("*", own) else None


class Matcher:
    """Several patterns as one question. Answers for up to 16,384 stems are remembered."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(Pattern(text) for text in patterns)
        self._keyless = {p for p in self.patterns if p.text.endswith((".>", ".*")) or p.text == ">"}
        self._stems: dict[str, bool] = {}

    def matches(self, subject: str) -> bool:
        """Whether any of the patterns matches."""
        # Nearly all patterns end in '>', and then the key, which never repeats, plays no part.
        if len(self._keyless) < len(self.patterns):
            return any(p.matches(subject) for p in self.patterns)
        head = subject.rpartition(".")[0]
        known = self._stems.get(head)
        if known is None:
            known = any(p.matches(subject) for p in self.patterns)
            if len(head) <= _MAX_KEPT:
                if len(self._stems) >= _MAX_STEMS:  # each workflow brings its own
                    self._stems.clear()
                self._stems[head] = known
        return known


def impossible(pattern: str) -> str:
    """Why no message of this version can match a pattern, as where it is misspelt; else nothing."""
    tokens = pattern.split(".")
    known: dict[str, set[str]] = {}
    for name, kind in KINDS.items():
        known.setdefault(kind.category, set()).add(topic_of(kind.category, name))
    category = tokens[0]
    if category not in (*known, "*", ">"):
        return f"{category!r} is none of {', '.join(known)}"
    if len(tokens) <= _TOPIC_AT or tokens[_TOPIC_AT] in ("*", ">"):
        return ""
    topics = known.get(category) or set().union(*known.values())
    if tokens[_TOPIC_AT] in topics:
        return ""
    return f"{tokens[_TOPIC_AT]!r} is none of {', '.join(sorted(topics))}"
