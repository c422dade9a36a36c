"""Endpoints: the addresses at which engines take requests, as they travel in messages.

An engine's endpoint sends whoever believes it anywhere; that is what it is for. But it names a
place and nothing else. So before anyone connects, its text is checked here: what is no name of a
machine would raise errors of all kinds deep in the network stack, and a line break or a password
would end up in what is sent. Does no I/O.
"""

import re
from ipaddress import IPv6Address
from typing import Final

MAX_CHARS: Final = 1024
"""Longest endpoint that is looked at; paths of sockets and names of hosts end far below."""

_LABEL: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_\-]{0,61}[A-Za-z0-9_])?")
_MAX_HOST: Final = 253
_VISIBLE: Final = re.compile(r"[!-~]+")


def scheme_of(endpoint: str) -> str | None:
    """The part before ``://``; None if this is no endpoint, or holds what cannot be shown."""
    scheme, separator, rest = endpoint.partition("://")
    usable = len(endpoint) <= MAX_CHARS and endpoint.isprintable()
    return scheme if usable and separator and rest else None


def is_plain(url: str) -> bool:
    """Whether a URL holds visible ASCII alone, so that all who read it read the same.

    Python's own reader leaves out tabs and line ends, and what then reads the URL may not.
    """
    return len(url) <= MAX_CHARS and _VISIBLE.fullmatch(url) is not None


def is_host(text: str) -> bool:
    """Whether a text can be the name or the address of a machine."""
    if ":" in text:
        try:
            IPv6Address(text)
        except ValueError:
            return False
        return is_plain(text)
    labels = text.removesuffix(".").split(".")
    return len(text) <= _MAX_HOST and all(map(_LABEL.fullmatch, labels))


def is_port(text: str) -> bool:
    """Whether a text is the number of a port, or 0 for any that is free."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 1 << 16
