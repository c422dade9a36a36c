"""The envelope that every message travels in, and the key that says what it is about.

The envelope can be read without its body: a tap, a filter or an older peer needs no more.
Neither it nor its key can be part of a cycle, so the garbage collector need not look at them.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Raw, Struct

SCHEMA_VERSION = 1
"""Version of the wire format (docs/protocol.md). It is not the version of the package."""

Category = Literal["intent", "control", "state", "outcome"]
"""The four semantic categories of the paper's Table 1."""

DEFAULT_TENANT = "default"

MAX_S: Final = 1e12
"""Farthest time, and longest span. A bound keeps NaN and the infinities out, with which no reader
can reckon or wait; with this one microseconds still fit into 64 bits."""

MAX_NUMBER: Final = 1e18
"""Largest number that is neither a time nor a share."""

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_S)]
Time = Annotated[float, Meta(ge=-MAX_S, le=MAX_S)]
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """Base of every message body. The tag ``kind`` names the message on the wire."""


class Key(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What an exchange is about. Each exchange names at least one of these (paper, section 3.1)."""

    request: str | None = None
    context: str | None = None
    context_version: int | None = None
    engine: str | None = None
    operation: str | None = None
    workflow: str | None = None


class Envelope(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One message with its address.

    ``epoch`` is the incarnation of the source: it grows when the source restarts. ``seq`` counts
    the messages of one source on one channel (``hear.subjects.channel``) from 1 without holes, so
    that a reader sees what it missed; 0 stands for a channel without numbers. A snapshot carries
    the ``seq`` of the last change that it includes. ``time_s`` is the source's clock in seconds.
    """

    version: int = SCHEMA_VERSION
    id: str
    source: str
    epoch: int
    seq: int
    time_s: Time
    tenant: str = DEFAULT_TENANT
    category: str
    kind: str
    key: Key
    body: Raw
