"""Reading configuration: one frozen Struct a component, from TOML, with errors that help.

An unknown key is an error that names the nearest known one, and each error names file and line.
"""

import re
import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

from hear.errors import ConfigError
from hear.plugins import nearest

_T = TypeVar("_T", bound=msgspec.Struct)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<at>.*)`)?")
_AT = re.compile(r" - at `\$\.?(?P<at>[^`]*)`")


def load_toml(path: Path, type_: type[_T]) -> _T:
    """Read a TOML file into a Struct that forbids unknown fields.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or says something that does not fit.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    try:
        return msgspec.convert(data, type_)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(path, text, type_, str(error))) from error


def _explain(path: Path, text: str, type_: type[msgspec.Struct], message: str) -> str:
    unknown = _UNKNOWN.match(message)
    if unknown:
        key, table = unknown["key"], unknown["at"] or ""
        known = list(_fields_at(type_, table))
        return f"{path}:{_line(text, table, key)}: unknown key {key!r}: {nearest(key, known)}"
    at = _AT.search(message)
    if at:
        table, _, key = at["at"].rpartition(".")
        return f"{path}:{_line(text, table, key)}: {at['at']}: {_AT.sub('', message)}"
    return f"{path}: {message}"


def _fields_at(type_: type[msgspec.Struct], table: str) -> tuple[str, ...]:
    for name in filter(None, table.split(".")):
        fields = {f.encode_name: f.type for f in msgspec.structs.fields(type_)}
        inner = fields.get(name.partition("[")[0])
        if not (isinstance(inner, type) and issubclass(inner, msgspec.Struct)):
            return ()
        type_ = inner
    return type_.__struct_encode_fields__


def _line(text: str, table: str, key: str) -> int:
    """The line of a key in a table of a TOML text; the table's own line if it is not found."""
    here, table_line = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            here = stripped.strip("[] ").replace('"', "")
            if here == table:
                table_line = number
            if here == f"{table}.{key}".lstrip("."):
                return number
        elif here == table and re.match(rf'"?{re.escape(key)}"?\s*=', stripped):
            return number
    return table_line
