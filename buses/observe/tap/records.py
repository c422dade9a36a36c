"""Messages as JSON, one object a line, for jq and for programs.

Field names are stable: fields are added, and none is renamed. Defaults are written out. Block
hashes are 16 hexadecimal digits each, since numbers above 2^53 do not survive most readers of JSON.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from hear.blocks import HASH_BYTES
from hear.buses.observe.tap.reading import Reading
from hear.codec import UNREADABLE
from hear.escaping import to_json
from hear.subjects import subject

FEW = 3
"""How many hashes of a run are written if not all are asked for."""
_MAX_DEPTH = 32


def message_record(reading: Reading, *, all_hashes: bool = False) -> dict[str, Any]:
    """A message, its envelope and its body; ``body`` is None if it is not readable."""
    e = reading.envelope
    if reading.message is not None:
        body = _plain(reading.message, all_hashes)
    elif reading.problem:
        body = None
    else:
        body = _raw_fields(e.body)
    return {
        "type": "message",
        "time_s": e.time_s,
        "subject": subject(e),
        "id": e.id,
        "source": e.source,
        "epoch": e.epoch,
        "seq": e.seq,
        "tenant": e.tenant,
        "category": e.category,
        "kind": e.kind,
        "key": msgspec.structs.asdict(e.key),
        "arrival": None if reading.arrival is None else reading.arrival.value,
        "size_bytes": len(e.body),
        "known": reading.message is not None or bool(reading.problem),
        "problem": reading.problem or None,
        "words": reading.words,
        "body": body,
    }


class Records:
    """The same three as ``Lines`` has, as lines of JSON."""

    def __init__(self, *, all_hashes: bool = False) -> None:
        self._all_hashes = all_hashes

    def message(self, reading: Reading) -> str:
        """The line of a message."""
        return to_line(message_record(reading, all_hashes=self._all_hashes))

    def gap(self, time_s: float, source: str, stem: str, missed: int) -> str:
        """The line of a loss."""
        return to_line(
            {"type": "gap", "time_s": time_s, "source": source, "stem": stem, "missed": missed}
        )

    def notice(self, time_s: float, text: str) -> str:
        """The line of something that the tap says of itself."""
        return to_line({"type": "notice", "time_s": time_s, "text": text})


def to_line(record: Mapping[str, Any]) -> str:
    """One line of JSON. A number that is none (nan, inf) is null."""
    return to_json(record)


def hashes(packed: bytes, *, all_hashes: bool = False) -> dict[str, Any]:
    """A run of block hashes: how many, and the first few or all of them."""
    count = len(packed) // HASH_BYTES
    shown = count if all_hashes else min(count, FEW)
    numbers = (packed[HASH_BYTES * n : HASH_BYTES * (n + 1)] for n in range(shown))
    return {"count": count, "hex": [f"{int.from_bytes(n, 'little'):016x}" for n in numbers]}


def _plain(value: Any, all_hashes: bool) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = {
            name: f"{field:016x}"
            if name == "parent" and isinstance(field, int)
            else _plain(field, all_hashes)
            for name, field in msgspec.structs.asdict(value).items()
        }
        tag = value.__struct_config__.tag
        return fields if tag is None else {"kind": tag, **fields}
    if isinstance(value, bytes):
        return hashes(value, all_hashes=all_hashes)
    if isinstance(value, list | tuple):
        return [_plain(item, all_hashes) for item in value]
    return value


def _raw_fields(raw: msgspec.Raw) -> Any:
    try:
        return _foreign(msgspec.msgpack.decode(raw), 0)
    except (*UNREADABLE, ValueError):
        return None


def _foreign(value: Any, depth: int) -> Any:
    """What a kind that is not known here holds, in words of JSON."""
    if depth >= _MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {str(key): _foreign(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_foreign(item, depth + 1) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
