"""Reading configuration: one frozen Struct a component, from TOML, with errors that help.

An unknown key is an error that names the nearest known one, and each error names file and line.
"""

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from hear.app.plugins import nearest
from hear.errors import ConfigError

Line = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
"""A text without control characters: no path and no argument of a process can hold all of them."""

_T = TypeVar("_T", bound=msgspec.Struct)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<at>.*)`)?")
_AT = re.compile(r" - at `\$\.?(?P<at>[^`]*)`")
_INDEX = re.compile(r"\[[^\]]*\]")
_STEP = re.compile(r"\.(?![^\[]*\])")  # a dot that is not within brackets


def load_toml(path: Path, type_: type[_T]) -> _T:
    """Read a TOML file into a Struct that forbids unknown fields.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or says something that does not fit.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: cannot be read: it is not a file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse_toml(path, text, type_)


def parse_toml(path: Path, text: str, type_: type[_T]) -> _T:
    """The same of the text of a file that was read already.

    Raises:
        ConfigError: it is not TOML, or says something that does not fit.
    """
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers and nesting without end
        raise ConfigError(f"{path}: not TOML: {error}") from error
    try:
        return msgspec.convert(data, type_)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(path, text, type_, str(error))) from error


def where(path: Path, setting: str) -> str:
    """``file:line`` of a setting such as ``tiers.gpu_kv_gib``, for an error found after reading."""
    table, _, key = setting.rpartition(".")
    return f"{path}:{_line(path.read_text(encoding='utf-8'), table, key)}"


def _explain(path: Path, text: str, type_: type[msgspec.Struct], message: str) -> str:
    unknown = _UNKNOWN.match(message)
    if unknown:
        key, table = unknown["key"], unknown["at"] or ""
        known = list(_fields_at(type_, table))
        return f"{path}:{_line(text, table, key)}: unknown key {key!r}: {nearest(key, known)}"
    at = _AT.search(message)
    if at:
        *tables, key = _STEP.split(at["at"])
        line = _line(text, ".".join(tables), _INDEX.sub("", key))
        return f"{path}:{line}: {at['at']}: {_AT.sub('', message)}"
    return f"{path}: {message}"


def _fields_at(type_: type[msgspec.Struct], table: str) -> tuple[str, ...]:
    for name in filter(None, _INDEX.sub("", table).split(".")):
        fields = {f.encode_name: f.type for f in msgspec.structs.fields(type_)}
        inner = _struct_in(fields.get(name))
        if inner is None:
            return ()
        type_ = inner
    return type_.__struct_encode_fields__


def _struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    """The Struct of a field that holds one, perhaps in a list or a dict, or perhaps None."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    return next(filter(None, map(_struct_in, get_args(annotation))), None)


def _line(text: str, table: str, key: str) -> int:
    """The line of a key in a table of a TOML text; the table's own line if it is not found."""
    # msgspec says table[2] for the third [[table]], and table[...] for any [table.name].
    wanted = re.compile(re.escape(table).replace(r"\[\.\.\.\]", r"\.[^.]+"))
    arrays: Counter[str] = Counter()
    here, table_line = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.partition("#")[0].strip()
        if stripped.startswith("["):
            here = stripped.strip("[] ").replace('"', "")
            if stripped.startswith("[["):
                arrays[here] += 1
                here = f"{here}[{arrays[here] - 1}]"
            if wanted.fullmatch(here):
                table_line = number
            if here == f"{table}.{key}".lstrip("."):
                return number
        elif wanted.fullmatch(here) and re.match(rf'"?{re.escape(key)}"?\s*=', stripped):
            return number
    return table_line
