"""The options of vLLM's command line, read as vLLM reads them, without importing it.

Only what a launcher has to look at: vLLM itself judges all the rest. An underscore counts as a
dash, ``--a.b 1`` is a key of the JSON option ``--a``, a configuration file (``--config``) comes
before the command line, and of two values the later counts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hear.errors import ConfigError


class _Given(NamedTuple):
    """An option as it was given: ``keys`` after the dots, and the arguments that it takes up."""

    name: str
    keys: tuple[str, ...]
    value: str | None
    begin: int
    end: int


class Options:
    """The arguments after ``vllm serve``, unchanged, and questions about them."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Read them, and the configuration file if one is named.

        Raises:
            ConfigError: the configuration file cannot be read.
        """
        self.arguments = tuple(arguments)
        self._given = list(_read(self.arguments))
        self._file: Mapping[str, Any] = {}
        path = self.last("--config")
        if path is not None:
            self._file = _read_file(Path(path))

    @property
    def model(self) -> str | None:
        """The model, where vLLM would find it; None if it is not where one can tell."""
        if self.arguments and not self.arguments[0].startswith("-"):
            return self.arguments[0]
        return self.last("--model")

    def has(self, name: str) -> bool:
        """Whether an option was given, in whatever form."""
        return self._in_file(name) is not None or any(given.name == name for given in self._given)

    def last(self, *names: str) -> str | None:
        """The value of an option, by any of its names; None without one."""
        for given in reversed(self._given):
            if given.name in names and not given.keys and given.value is not None:
                return given.value
        for name in names:
            value = self._in_file(name)
            if value is not None:
                return str(value)
        return None

    def switch(self, name: str) -> bool | None:
        """Whether ``--name`` or ``--no-name`` was given, and which; None if neither was."""
        opposite = f"--no-{name.removeprefix('--')}"
        for given in reversed(self._given):
            if given.name in (name, opposite):
                return given.name == name
        value = self._in_file(name)
        return bool(value) if value is not None else None

    def json(self, name: str) -> dict[str, Any] | None:
        """The value of an option that takes a JSON object, its dotted keys included.

        Raises:
            ConfigError: it is something else.
        """
        in_file = self._in_file(name)
        found: dict[str, Any] | None = None
        if in_file is not None:
            found = dict(in_file) if isinstance(in_file, dict) else _parse(name, str(in_file))
        for given in self._given:
            if given.name == name and given.value is not None:
                found = {} if found is None else found
                if given.keys:
                    _put(found, given.keys, given.value)
                else:
                    found.update(_parse(name, given.value))
        return found

    def without(self, *names: str) -> list[str]:
        """The arguments less those of some options; what stands in a file cannot be taken out."""
        kept = list(self.arguments)
        for given in reversed(self._given):
            if given.name in names:
                del kept[given.begin : given.end]
        return kept

    def _in_file(self, name: str) -> Any:
        return self._file.get(name.removeprefix("--"))


def _read(arguments: Sequence[str]) -> Iterator[_Given]:
    place = 0
    while place < len(arguments):
        word = arguments[place]
        begin, place = place, place + 1
        if not word.startswith("-"):
            continue
        name, equals, value = word.partition("=")
        if not equals and place < len(arguments) and _is_value(arguments[place]):
            value, equals = arguments[place], "="
            place += 1
        name, *keys = name.split(".") if name.startswith("--") else [name]
        if name.startswith("--"):
            name = name.replace("_", "-")
        yield _Given(name, tuple(keys), value if equals else None, begin, place)


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word[1:2].isdigit()


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: got {text!r}, expected a JSON object")
    return value


def _put(into: dict[str, Any], keys: Sequence[str], text: str) -> None:
    value: Any
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    for key in keys[:-1]:
        below = into.get(key)
        into[key] = below = dict(below) if isinstance(below, dict) else {}
        into = below
    into[keys[-1]] = value


def _read_file(path: Path) -> dict[str, Any]:
    try:
        import yaml  # comes with vLLM, and no other part of HEAR reads it
    except ImportError as error:
        raise ConfigError(
            f"--config {path}: PyYAML is not installed; it comes with vLLM"
        ) from error
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: is not YAML: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"--config {path}: expected options and their values")
    return {str(key).replace("_", "-"): value for key, value in read.items()}
