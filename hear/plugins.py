"""Finding policies, engines, buses and commands, by entry point or as ``package.module:Name``.

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

_SINGULAR = {"buses": "bus", "policies": "policy"}


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


def load(group: str, name: str) -> Any:
    """Load a plug-in of a group (policies, engines, buses, commands) by its name or path.

    Raises:
        PluginError: there is no such plug-in, or importing it failed.
    """
    if ":" in name:
        entry = EntryPoint(name=name, value=name, group=f"hear.{group}")
    else:
        found = [e for e in entry_points(group=f"hear.{group}") if e.name == name]
        if not found:
            raise PluginError(
                f"no {_SINGULAR.get(group, group.removesuffix('s'))} named {name!r}: "
                f"{nearest(name, names(group))} (or give package.module:Name)"
            )
        entry = found[0]
    module_name, _, attribute = entry.value.partition(":")
    origin = f" (from {entry.dist.name} {entry.dist.version})" if entry.dist else ""
    try:
        loaded: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            loaded = getattr(loaded, part)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{name}{origin} cannot be loaded: {error!r}") from error
    return loaded
