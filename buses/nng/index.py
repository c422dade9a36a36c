"""Patterns and stems by their tokens, so that a question about one looks at few of the others.

A stem has four tokens, and a pattern covers it if each token is the same or ``*``, up to a ``>``:
so the patterns that cover one lie on at most 16 paths of a tree of tokens, however many there are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hear.buses.mailbox import STEM_TOKENS

_T = TypeVar("_T")


@dataclass(slots=True)
class _Node(Generic[_T]):
    below: dict[str, "_Node[_T]"] = field(default_factory=dict)
    values: dict[_T, int] = field(default_factory=dict)  # and how often each is there


class PatternIndex(Generic[_T]):
    """Values by pattern; which of them have a pattern that covers a stem."""

    def __init__(self) -> None:
        self._root: _Node[_T] = _Node()

    def add(self, pattern: str, value: _T) -> None:
        """Note a value under a pattern."""
        path = _path(pattern)
        if path is None:
            return
        node = self._root
        for token in path:
            node = node.below.setdefault(token, _Node())
        node.values[value] = node.values.get(value, 0) + 1

    def remove(self, pattern: str, value: _T) -> None:
        """Forget what ``add`` has noted."""
        path = _path(pattern)
        if path is None:
            return
        nodes = [self._root]
        for token in path:
            nodes.append(nodes[-1].below[token])
        left = nodes[-1].values.pop(value) - 1
        if left:
            nodes[-1].values[value] = left
        for parent, token, node in zip(nodes[-2::-1], path[::-1], nodes[:0:-1], strict=True):
            if node.values or node.below:
                break
            del parent.below[token]

    def find(self, stem: str) -> dict[_T, None]:
        """The values of all patterns that cover a stem, each once."""
        nodes = [self._root]
        found = dict.fromkeys(self._root.values)
        for token in stem.split("."):
            nodes = [
                below
                for node in nodes
                for wanted in (token, "*")
                if (below := node.below.get(wanted)) is not None
            ]
            for node in nodes:
                found.update(dict.fromkeys(node.values))
        return found


class StemIndex:
    """Stems; which of them a pattern covers."""

    def __init__(self) -> None:
        self._root: dict[str, Any] = {}  # of the same, four deep, and then the stem

    def add(self, stem: str) -> None:
        """Note a stem."""
        *path, last = stem.split(".")
        node = self._root
        for token in path:
            node = node.setdefault(token, {})
        node[last] = stem

    def remove(self, stem: str) -> None:
        """Forget a stem that is there."""
        *path, last = stem.split(".")
        nodes = [self._root]
        for token in path:
            nodes.append(nodes[-1][token])
        del nodes[-1][last]
        for parent, token in zip(nodes[-2::-1], path[::-1], strict=True):
            if parent[token]:
                break
            del parent[token]

    def covered(self, pattern: str) -> Iterator[str]:
        """The stems that a pattern covers."""
        path = _path(pattern)
        if path is not None:
            yield from self._below(self._root, path)

    def _below(self, node: dict[str, Any] | str, path: list[str]) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        elif not path or path[0] == "*":
            for below in node.values():
                yield from self._below(below, path[1:])
        elif path[0] in node:
            yield from self._below(node[path[0]], path[1:])


def _path(pattern: str) -> list[str] | None:
    """The tokens of a pattern that say which stems it covers; None if it covers none."""
    tokens = pattern.split(".")
    if tokens[-1] == ">":
        return tokens[:-1]
    return tokens[:STEM_TOKENS] if len(tokens) == STEM_TOKENS + 1 else None
