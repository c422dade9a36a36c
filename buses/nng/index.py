"""Patterns and stems by their tokens, so that a question about one looks at few of the others.

A stem has four tokens, and a pattern covers it if each token is the same or ``*``, up to a ``>``:
so the patterns that cover one lie on at most 16 paths of a tree of tokens, however many there are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from hear.buses.mailbox import STEM_TOKENS

_T = TypeVar("_T")


@dataclass(slots=True)
class _Node(Generic[_T]):
    below: dict[str, "_Node[_T]"] = field(default_factory=dict)
    values: dict[_T, int] = field(default_factory=dict)  # and how often each is there


class PatternIndex(Generic[_T]):
    """Values by pattern; which of them have a pattern that covers a stem."""

    def __init__(self) -> None:
        self.root: _Node[_T] = _Node()

    def add(self, pattern: str, value: _T) -> None:
        """Note a value under a pattern."""
        path = _path(pattern)
        if path is None:
            return
        node = self.root
        for token in path:
            node = node.below.setdefault(token, _Node())
        node.values[value] = node.values.get(value, 0) + 1

    def remove(self, pattern: str, value: _T) -> None:
        """Forget what ``add`` has noted."""
        path = _path(pattern)
        if path is None:
            return
        nodes = [self.root]
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
        nodes = [self.root]
        found = dict.fromkeys(self.root.values)
        for token in stem.split("."):
            nodes = _next(nodes, token)
            for node in nodes:
                found.update(dict.fromkeys(node.values))
        return found


def index_of(patterns: Iterable[str]) -> PatternIndex[None]:
    """Some patterns, of which only matters whether one covers a stem."""
    index: PatternIndex[None] = PatternIndex()
    for pattern in patterns:
        index.add(pattern, None)
    return index


class StemIndex:
    """Stems; which of them some patterns cover."""

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

    def covered(self, patterns: Iterable[str]) -> Iterator[str]:
        """The stems that one of some patterns covers, each once, however many of them do."""
        return _below(self._root, [index_of(patterns).root])


def _below(stems: dict[str, Any] | str, nodes: list[_Node[None]]) -> Iterator[str]:
    """The stems below some tokens, of which the patterns at ``nodes`` go on."""
    if isinstance(stems, str):
        yield stems
        return
    if any(node.values for node in nodes):  # one ends here, and covers all that is below
        nodes = [_ALL]
    tokens = dict.fromkeys(stems)
    if len(stems) > 1 and not any("*" in node.below for node in nodes):
        tokens = dict.fromkeys(t for node in nodes for t in node.below if t in stems)
    for token in tokens:
        further = _next(nodes, token)
        if further:
            yield from _below(stems[token], further)


def _next(nodes: list[_Node[_T]], token: str) -> list[_Node[_T]]:
    """Where patterns stand after another token."""
    return [
        below
        for node in nodes
        for wanted in (token, "*")
        if (below := node.below.get(wanted)) is not None
    ]


_ALL: Final[_Node[None]] = _Node()
_ALL.below["*"] = _ALL


def _path(pattern: str) -> list[str] | None:
    """The tokens of a pattern that say which stems it covers; None if it covers none."""
    tokens = pattern.split(".")
    if tokens[-1] == ">":
        return tokens[:-1]
    return tokens[:STEM_TOKENS] if len(tokens) == STEM_TOKENS + 1 else None
