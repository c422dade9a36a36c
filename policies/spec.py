"""Naming policies in words: ``cache-aware+guard:40`` is two policies, the second with an argument.

Several names joined by ``+`` run side by side, each an independent subscriber; the earlier ranks
higher in arbitration. ``fcfs`` is no policy at all.
"""

from typing import Any, NamedTuple

from hear import plugins
from hear.errors import ConfigError, PluginError
from hear.seams import Policy

NONE = "fcfs"


class PolicySpec(NamedTuple):
    """The policies that a text names, made anew for each run by ``make``."""

    text: str
    parts: tuple[tuple[Any, tuple[float, ...]], ...]

    def make(self) -> list[Policy]:
        """New instances of the policies, highest rank first."""
        return [factory(*arguments) for factory, arguments in self.parts]


def parse(text: str) -> PolicySpec:
    """Read the names of policies.

    Raises:
        ConfigError: a name is empty or an argument makes no sense.
        PluginError: there is no policy of that name.
    """
    if text == NONE:
        return PolicySpec(text, ())
    parts = []
    for word in text.split("+"):
        name, arguments = _split(word, text)
        if name == NONE:
            raise ConfigError(f"policy {text!r}: {NONE} is no policy, so it stands alone")
        factory = plugins.load("policies", name)
        _make(factory, arguments, word)
        parts.append((factory, arguments))
    names = [made.name for made in PolicySpec(text, tuple(parts)).make()]
    if len(set(names)) < len(names):
        raise ConfigError(f"policy {text!r}: names the same policy twice")
    return PolicySpec(text, tuple(parts))


def _split(word: str, text: str) -> tuple[str, tuple[float, ...]]:
    pieces = word.split(":")
    # A user's own policy is package.module:Class, so its argument comes after a second colon.
    at = 2 if "." in pieces[0] else 1
    name, rest = ":".join(pieces[:at]), pieces[at:]
    if not name:
        raise ConfigError(f"policy {text!r}: an empty name, expected names joined by '+'")
    try:
        return name, tuple(float(piece) for piece in rest)
    except ValueError:
        raise ConfigError(f"policy {word!r}: {rest[0]!r}, expected a number") from None


def _make(factory: Any, arguments: tuple[float, ...], word: str) -> None:
    try:
        made = factory(*arguments)
    except ConfigError as error:
        raise ConfigError(f"policy {word!r}: {error}") from error
    except Exception as error:
        raise PluginError(f"policy {word!r} cannot be made: {error}") from error
    for attribute in ("name", "observes", "decide"):
        if not hasattr(made, attribute):
            raise PluginError(f"policy {word!r}: {factory!r} has no {attribute!r}")
