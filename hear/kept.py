"""Tables under ids that come in messages: bounded in entries, in bytes and by silence.

Whoever reads a bus keeps something under each id that it hears of, and does not hear the end of
all of them: a harness dies, an engine tells no outcomes, an outcome is lost. So no end may be
waited for. What was heard of longest ago goes first. A table reads no clock: its owner tells it the
time, and is told what had to go.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Generic, NamedTuple, TypeVar, overload

_V = TypeVar("_V")
_D = TypeVar("_D")


class _Entry(NamedTuple, Generic[_V]):
    value: _V
    heard_s: float
    size_bytes: int


class Kept(Mapping[str, _V]):
    """Values by id, the one that was heard of longest ago first."""

    def __init__(self, *, max_entries: int, max_bytes: float = inf) -> None:
        self._entries: OrderedDict[str, _Entry[_V]] = OrderedDict()
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self.size_bytes = 0
        """Bytes of all values, as ``keep`` was told, and of their ids."""

    def __getitem__(self, id: str) -> _V:
        return self._entries[id].value

    def __contains__(self, id: object) -> bool:
        return id in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def get(self, id: str, /) -> _V | None: ...
    @overload
    def get(self, id: str, /, default: _V | _D) -> _V | _D: ...
    def get(self, id: str, /, default: _D | None = None) -> _V | _D | None:
        """The value under an id, or ``default``."""
        entry = self._entries.get(
            id
        )  # ``Mapping`` would raise and catch for each that is not there
        return default if entry is None else entry.value

    def keep(self, id: str, value: _V, now: float, *, size_bytes: int = 0) -> list[_V]:
        """Keep a value, heard of ``now``; returns those that had to go for it.

        ``size_bytes`` is what it takes in memory beside its id, about. One that is larger than the
        whole table may be goes itself.
        """
        self.drop(id)
        size_bytes += len(id)
        self._entries[id] = _Entry(value, now, size_bytes)
        self.size_bytes += size_bytes
        gone: list[_V] = []
        while len(self._entries) > self._max_entries or self.size_bytes > self._max_bytes:
            _, entry = self._entries.popitem(last=False)
            self.size_bytes -= entry.size_bytes
            gone.append(entry.value)
        return gone

    def hear_of(self, id: str, now: float) -> None:
        """Note that something was heard of an id ``now``. Nothing happens if it is not kept."""
        entry = self._entries.get(id)
        if entry is not None:
            self._entries[id] = entry._replace(heard_s=now)
            self._entries.move_to_end(id)

    def drop(self, id: str) -> _V | None:
        """Give up what is kept under an id, if anything is; returns it."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return None
        self.size_bytes -= entry.size_bytes
        return entry.value

    def forget_silent(self, now: float, patience_s: Callable[[_V], float]) -> list[_V]:
        """Give up what was silent for longer than ``patience_s`` says of it; returns that."""
        silent = [
            id
            for id, entry in self._entries.items()
            if now - entry.heard_s > patience_s(entry.value)
        ]
        gone = [self._entries[id].value for id in silent]
        for id in silent:
            self.drop(id)
        return gone
