"""Naming policies in words: ``cache-aware+guard:40`` is two policies, the second with an argument.

Several names joined by ``+`` run side by side, each an independent subscriber; the earlier ranks
higher in arbitration. ``fcfs`` is no policy at all. A policy of one's own is ``module:Class``.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from hear.app import plugins
from hear.errors import ConfigError, PluginError, ProtocolError
from hear.interfaces import Policy
from hear.subjects import Pattern

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
        PluginError: there is no policy of that name, or what has it is no policy.
    """
    if text == NONE:
        return PolicySpec(text, ())
    parts = []
    names = set()
    for word in text.split("+"):
        name, arguments = _split(word, text)
        if name == NONE:
            raise ConfigError(f"policy {text!r}: {NONE} is no policy, so it stands alone")
        if ":" in name:
            plugins.look_here()
        factory = plugins.load_typed("policies", name)
        made = _make(factory, arguments, word)
        if made in names:
            raise ConfigError(f"policy {text!r}: names the same policy twice")
        names.add(made)
        parts.append((factory, arguments))
    return PolicySpec(text, tuple(parts))


def _split(word: str, text: str) -> tuple[str, tuple[float, ...]]:
    name, *rest = word.split(":")
    if not name:
        raise ConfigError(f"policy {text!r}: an empty name, expected names joined by '+'")
    # A user's own policy is module:Class, so its arguments come after a second colon.
    if rest and name != NONE and name not in plugins.names("policies") and _is_path(rest[0]):
        name, rest = f"{name}:{rest[0]}", rest[1:]
    arguments = []
    for piece in rest:
        try:
            arguments.append(float(piece))
        except ValueError:
            raise ConfigError(f"policy {word!r}: {piece!r}, expected a number") from None
    return name, tuple(arguments)


def _is_path(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _make(factory: Any, arguments: tuple[float, ...], word: str) -> str:
    """Make a policy once, to see that it can be; returns its name."""
    try:
        made = factory(*arguments)
    except ConfigError as error:
        raise ConfigError(f"policy {word!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"policy {word!r} cannot be made: {error}") from error
    problem = shape_problem(made)
    if problem:
        raise PluginError(f"policy {word!r}: {problem}")
    return str(made.name)


def shape_problem(policy: object) -> str:
    """What keeps an object from being a ``hear.interfaces.Policy``; nothing if it is one."""
    name = getattr(policy, "name", None)
    if not isinstance(name, str) or not name:
        return f"name is {name!r}, expected a text"
    observes = getattr(policy, "observes", None)
    if isinstance(observes, str) or not isinstance(observes, Iterable):
        return f"observes is {observes!r}, expected subject patterns"
    for pattern in observes:
        if not isinstance(pattern, str):
            return f"observes holds {pattern!r}, expected subject patterns"
        try:
            Pattern(pattern)
        except ProtocolError as error:
            return f"observes: {error}"
    if not callable(getattr(policy, "decide", None)):
        return "it has no method decide"
    return ""
