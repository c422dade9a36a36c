"""What of a text may reach a terminal, a log or a file that people read: it all goes through here.

Ids, names and reasons are chosen by whoever sends them, and a terminal obeys some characters: they
move the cursor, colour what follows, set its title, reverse the order of what is read, or begin a
line that looks like one of ours. Each such character is shown as Python would write it (``\\x1b``,
``\\u202e``), and so are those that cannot be seen, since with them two names look alike.

A backslash stays what it is, so that a text may pass twice and is then no different. The price: an
id that really holds the four characters ``\\x1b`` looks like one that holds an escape. Where that
matters, JSON tells them apart.

Nothing here does I/O; ``hear.app.output``, ``hear.app.console`` and ``hear.app.log`` do.
"""

import json
import re
from typing import Any, Final, TypeVar, cast

import msgspec

_T = TypeVar("_T")

MAX_WORD: Final = 256
"""Longest run of characters without a blank in a line; ids that anyone makes are shorter."""
MAX_LINE: Final = 8_000
MAX_LOGGED: Final = 2_000
"""Longest value in an entry of a log, where anyone may write who can reach the hub."""
MAX_CELL: Final = 120
"""Longest text in a cell of a table."""
MAX_PART: Final = 400
"""Longest name or reason in what is told in sentences."""
_ELLIPSIS: Final = "..."

# Python's isprintable() is false for the categories Cc, Cf, Cs, Co, Cn, Zl, Zp and Zs, but for the
# blank. These have a glyph by their category, and none on a screen.
_BLANK: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
_LONG_WORD: Final = re.compile(rf"(\S{{{MAX_WORD}}})\S+")


def printable(text: str, *, lines: bool = False) -> str:
    """The text with every character that is not safe to show replaced by its name.

    With ``lines`` newlines stay: for a text of lines that are our own and whose parts have been
    here before.
    """
    if lines:
        return "\n".join(map(printable, text.split("\n")))
    return text if _is_safe(text) else "".join(c if _is_safe(c) else _name(c) for c in text)


def shortened(text: str, limit: int = MAX_CELL) -> str:
    """The text, or as much of its beginning as fits into ``limit`` characters with three dots."""
    return text if len(text) <= limit else text[: limit - len(_ELLIPSIS)] + _ELLIPSIS


def ends(text: str, limit: int) -> str:
    """A printable text, or its beginning and its end where ids differ, in ``limit`` characters."""
    if len(text) <= limit:
        return text
    end = max(limit - 1, 0) // 2
    return f"{text[: limit - 1 - end]}…{text[len(text) - end :]}"


def cell(text: str, limit: int = MAX_CELL) -> str:
    """A name in a table or on a screen: printable, and no longer than its place."""
    # Cut first, so that a long text costs no more than a short one, and again since names are long.
    return shortened(printable(shortened(text, limit)), limit)


def one_line(text: str, limit: int = MAX_LINE) -> str:
    """A sentence in a log, a line or an error: printable; it and its words are cut if too long."""
    # Cut before and after: a long text costs no more than a short one, and names are long.
    text = printable(shortened(_cut_words(text), limit))
    return shortened(_cut_words(text), limit)


def _cut_words(text: str) -> str:
    return text if len(text) <= MAX_WORD else _LONG_WORD.sub(rf"\1{_ELLIPSIS}", text)


def legible(value: _T) -> _T:
    """A structure of facts with every text in it printable, and cut if no sentence can hold it."""
    return cast(_T, _legible(value))


def _legible(value: Any) -> Any:
    match value:
        case str():
            return cell(value, MAX_PART)
        case msgspec.Struct():
            fields = msgspec.structs.asdict(value)
            return type(value)(**{name: _legible(field) for name, field in fields.items()})
        case tuple() | list():
            return type(value)(map(_legible, value))
        case dict():
            return {_legible(key): _legible(item) for key, item in value.items()}
    return value


def to_json(value: Any, *, pretty: bool = False) -> str:
    """A value as JSON that a terminal is safe from: the same content, in more escapes."""
    try:
        data = msgspec.json.encode(value)
        text = (msgspec.json.format(data) if pretty else data).decode()
    except UnicodeEncodeError:  # a lone surrogate, as in an argument that is not UTF-8
        plain = msgspec.to_builtins(value)
        text = json.dumps(plain, indent=2) if pretty else json.dumps(plain, separators=(",", ":"))
    # Newlines stand between strings alone, and everything else that is not safe stands in one.
    return "\n".join(map(_safe_json, text.split("\n")))


def _safe_json(line: str) -> str:
    return line if _is_safe(line) else "".join(c if _is_safe(c) else _json_name(c) for c in line)


def _is_safe(text: str) -> bool:
    return text.isprintable() and (text.isascii() or not _BLANK.search(text))


def _name(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _json_name(character: str) -> str:
    return json.dumps(character)[1:-1]
