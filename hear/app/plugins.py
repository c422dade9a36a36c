"""Finding policies, engines, buses and commands. There are three doors, by where a name is from.

``load_typed`` is for what the user has typed, who may run anything: a name, or a path as
``package.module:Name``. ``load_received`` is for what came in a message or a recording: it may
choose among the entry points that are installed, and never what is imported. ``load_installed`` is
for the names that HEAR's own code writes out or takes from ``names``. Nothing else in HEAR imports
by name (``tests/security/test_names.py``).

A plug-in is checked when it is loaded, and an error names the distribution that it came from. What
needs an extra that is not installed says which.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hear.errors import ConfigError, PluginError

_SINGULAR = {"buses": "bus", "hash_schemes": "hash scheme", "policies": "policy"}


def names(group: str) -> list[str]:
    """The names under which installed distributions offer plug-ins of a group."""
    return sorted({entry.name for entry in entry_points(group=f"hear.{group}")})


def look_here() -> None:
    """Let plug-ins of one's own, as package.module:Name, be found in the folder where one stands.

    It is looked at last, so that nothing there hides what is installed, and only once such a path
    was given: what merely lies there is not run.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def nearest(word: str, known: list[str]) -> str:
    """A clause that names the known word most like ``word``, and else all of them."""
    if not known:
        return "none is known here"
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}"


@contextmanager
def extra(name: str, what: str, *modules: str) -> Iterator[None]:
    """Around imports for which ``what`` needs an extra of this name, which brings ``modules``.

    Raises:
        ConfigError: one of these modules is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in modules:
            raise
        raise ConfigError(
            f"{what} needs {missing}, which is not installed: pip install 'hear-protocol[{name}]'"
        ) from error


def load_typed(group: str, text: str) -> Any:
    """Load a plug-in that the user has named, by its name or as ``package.module:Name``.

    Raises:
        PluginError: there is no such plug-in, or importing it failed.
    """
    if ":" in text:
        return _load(EntryPoint(name=text, value=text, group=f"hear.{group}"))
    entry = _installed(group, text)
    if entry is None:
        raise PluginError(f"{_unknown(group, text)} (or give package.module:Name)")
    return _load(entry)


def load_received(group: str, name: str, origin: str) -> Any:
    """Load an installed plug-in that a message or a recording has named.

    ``origin`` says in an error who has: a name that comes from elsewhere is not the user's fault,
    and may be of any length and hold any character.

    Raises:
        PluginError: no plug-in of this name is installed, or importing it failed.
    """
    entry = _installed(group, name)
    if entry is None:
        expected = ", ".join(names(group)) or "none, since none is installed"
        raise PluginError(
            f"{origin}: no {_singular(group)} named {name!r:.80} is installed, expected one of "
            f"{expected}"
        )
    return _load(entry)


def load_installed(group: str, name: str) -> Any:
    """Load a plug-in by a name that the calling code holds itself, or has from ``names``.

    Raises:
        PluginError: it is not installed, or importing it failed.
    """
    entry = _installed(group, name)
    if entry is None:
        raise PluginError(_unknown(group, name))
    return _load(entry)


def _installed(group: str, name: str) -> EntryPoint | None:
    """The entry point of this name. A path is none, even if something is installed under it."""
    if ":" in name:
        return None
    return next((e for e in entry_points(group=f"hear.{group}") if e.name == name), None)


def _load(entry: EntryPoint) -> Any:
    """What an entry point declares. What it was found by plays no part any more."""
    origin = f" (from {entry.dist.name} {entry.dist.version})" if entry.dist else ""
    module_name, _, attribute = entry.value.partition(":")
    try:
        loaded: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            loaded = getattr(loaded, part)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{entry.name}{origin} cannot be loaded: {error!r}") from error
    return loaded


def _unknown(group: str, name: str) -> str:
    return f"no {_singular(group)} named {name!r:.200}: {nearest(name, names(group))}"


def _singular(group: str) -> str:
    return _SINGULAR.get(group, group.removesuffix("s"))
