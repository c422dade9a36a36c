"""How large each table of an object is, so that one that only grows is found, whoever adds it."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any

_OURS = ("hear.", "tests.")
_LEAVES = (str, bytes, memoryview, int, float, type(None))


def sizes(thing: object) -> dict[str, int]:
    """The lengths of all containers below an object of HEAR's, by where they stand.

    Values of one table are added up: ``_views[].waiting`` is of all views.
    """
    found: dict[str, int] = {}
    for path, length in _walk(thing, "", set()):
        found[path] = found.get(path, 0) + length
    return found


def _walk(thing: object, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    if isinstance(thing, _LEAVES) or id(thing) in seen:
        return
    seen.add(id(thing))
    if type(thing).__module__.startswith(_OURS):
        for name, value in _attributes(thing):
            yield from _walk(value, f"{path}.{name}" if path else name, seen)
        if type(thing).__name__ == "Kept":  # its entries stand in a table of its own
            return
    if isinstance(thing, Mapping):
        if not type(thing).__module__.startswith(_OURS):
            yield path, len(thing)
        for value in list(thing.values()):
            yield from _walk(value, f"{path}[]", seen)
    elif isinstance(thing, Sized) and not type(thing).__module__.startswith(_OURS):
        if not isinstance(thing, tuple):
            yield path, len(thing)
        if isinstance(thing, list | set | frozenset | tuple):
            for value in thing:
                yield from _walk(value, f"{path}[]", seen)


def _attributes(thing: object) -> Iterator[tuple[str, Any]]:
    names = [*vars(thing)] if hasattr(thing, "__dict__") else []
    for kind in type(thing).__mro__:
        slots = getattr(kind, "__slots__", ())
        names += [slots] if isinstance(slots, str) else [*slots]
    names += getattr(type(thing), "__struct_fields__", ())
    for name in dict.fromkeys(names):
        if hasattr(thing, name):
            yield name, getattr(thing, name)
