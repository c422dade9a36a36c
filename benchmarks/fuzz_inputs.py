"""Inputs for the fuzzer: hostile bytes, each from a random generator that it is given.

Owns what hostile means: random bytes, damaged copies of good messages, and envelopes of the
grammar with anything in their fields. It must not know what reads them. The same state of the
generator gives the same bytes, so that an input can be made again from its seed and number.
"""

import struct
from collections.abc import Callable
from random import Random
from typing import Any, Final

import msgspec
from msgspec import Raw, inspect

from hear.blocks import pack
from hear.codec import KINDS
from hear.messages import Key

Make = Callable[[Random], Any]

_encode: Final = msgspec.msgpack.Encoder().encode
_JUNK_FIELD = 0.03
_MISSING_FIELD = 0.02
_NAMES: Final = (
    "a",
    "b",
    "e0",
    "e1",
    "-",
    "",
    "a.b",
    "*",
    ">",
    "%2d",
    "\u00e9\U0001f600",
    "x" * 300,
)
_FLOATS: Final = (0.0, 0.5, 1.0, 60.0, 1e9, 1e308, 5e-324, float("inf"), float("nan"), -1.0)
_INTS: Final = (0, 1, 2, 3, 7, 65_536, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**64 - 1)
_CHAINS: Final = ((), (1,), (1, 2), (1, 2, 3, 4), (3, 2, 1), (2, 2), (5, 6), range(1, 40))
_RUNS: Final = (*map(pack, _CHAINS), b"\0", b"\1" * 12)


def lie(kind: int, length: int) -> bytes:
    """A length of 32 bits (of a str, bin, array, map or ext) without what it promises."""
    return bytes((0xDB, 0xC6, 0xDD, 0xDF, 0xC9)[kind : kind + 1]) + struct.pack(">I", length)


_JUNK: Final[tuple[Any, ...]] = (
    None,
    True,
    -1,
    2**64 - 1,
    -(2**63),
    float("nan"),
    float("-inf"),
    "",
    "x" * 5_000,
    b"",
    b"\xff" * 9,
    [],
    [None],
    {},
    {"kind": "stored"},
    {1: 2},
    [[[[[]]]]],
    Raw(b"\x91" * 5_000 + b"\xc0"),  # one array inside the other
    Raw(b"\x81\xa1k" * 5_000 + b"\xc0"),
    Raw(b"\xa2\xff\xfe"),  # no UTF-8
    Raw(b"\xa3\xed\xa0\x80"),  # half of a surrogate pair
    Raw(b"\xc1"),  # never used
    Raw(b"\xd6\xff\0\0\0\0"),  # a timestamp
    Raw(b"\xc7\x03\x05abc"),
    *(Raw(lie(kind, length)) for kind in range(5) for length in (1, 70_000, 2**32 - 1)),
)


def _choice(values: Any) -> Make:
    count = len(values)
    return lambda rng: values[int(rng.random() * count)]


junk: Final = _choice(_JUNK)
_runs: Final = _choice(_RUNS)


def _number(rng: Random) -> int:
    return int(rng.random() * 6) if rng.random() < 0.8 else _INTS[int(rng.random() * len(_INTS))]


def maker_of(described: inspect.Type) -> Make:
    """What makes values for a field of this type: mostly good ones."""
    match described:
        case inspect.Metadata(type=inner):
            return maker_of(inner)
        case inspect.NoneType():
            return lambda rng: None
        case inspect.BoolType():
            return lambda rng: rng.random() < 0.5
        case inspect.IntType(ge=low):
            if low is not None:
                return _number
            return lambda rng: _number(rng) if rng.random() < 0.8 else -int(rng.random() * 2**63)
        case inspect.FloatType(le=high):
            if high is not None:
                return lambda rng: rng.random()
            floats = _choice(_FLOATS)
            return lambda rng: rng.random() * 100 if rng.random() < 0.7 else floats(rng)
        case inspect.StrType():
            return _choice(_NAMES)
        case inspect.BytesType():
            return _runs
        case inspect.LiteralType(values=values):
            return _choice(tuple(values))
        case inspect.UnionType(types=types):
            makers = [maker_of(each) for each in types]
            return lambda rng: makers[int(rng.random() * len(makers))](rng)
        case inspect.VarTupleType(item_type=item):
            make = maker_of(item)
            return lambda rng: [make(rng) for _ in range(int(rng.random() ** 2 * 5))]
        case inspect.DictType(key_type=key, value_type=value):
            name, number = maker_of(key), maker_of(value)
            return lambda rng: {name(rng): number(rng) for _ in range(int(rng.random() * 3))}
        case inspect.StructType():
            return _maker_of_struct(described)
    raise NotImplementedError(f"no values for {described}")


def _maker_of_struct(described: inspect.StructType) -> Make:
    fields = [(f.encode_name, maker_of(f.type), f.required) for f in described.fields]
    fixed = {} if described.tag is None else {str(described.tag_field): described.tag}

    def make(rng: Random) -> dict[str, Any]:
        made: dict[str, Any] = dict(fixed)
        for name, maker, required in fields:
            dice = rng.random()
            if dice < _JUNK_FIELD:
                made[name] = junk(rng)
            elif dice > 1 - _MISSING_FIELD if required else dice > 0.6:
                continue
            else:
                made[name] = maker(rng)
        return made

    return make


KIND_NAMES: Final = tuple(KINDS)
_BODIES: Final[tuple[tuple[str, str, Make], ...]] = tuple(
    (kind.category, name, maker_of(inspect.type_info(kind.type))) for name, kind in KINDS.items()
)
_key: Final = maker_of(inspect.type_info(Key))
_source: Final = _choice(("e0", "e0", "e0", "policy", "policy", "b", "", "h.*"))
_categories: Final = _choice(("intent", "control", "state", "outcome", "later", ""))


def envelope(rng: Random) -> bytes:
    """An envelope of the grammar: a few of its fields hold what they must not."""
    category, kind, make = _BODIES[int(rng.random() * len(_BODIES))]
    body = make(rng)
    key = _key(rng)
    if rng.random() < 0.7:
        key["engine"] = "e0"
    frame: dict[str, Any] = {
        "id": f"x-{int(rng.random() * 10_000)}",
        "source": _source(rng),
        "epoch": 1 if rng.random() < 0.9 else _number(rng),
        "seq": _number(rng),
        "time_s": rng.random() * 300,
        "category": category,
        "kind": kind,
        "key": key,
        "body": body,
    }
    dice = rng.random()
    if dice < 0.15:
        fields = ("version", "id", "source", "epoch", "seq", "time_s", "tenant", "key", "body")
        frame[fields[int(rng.random() * len(fields))]] = junk(rng)
    elif dice < 0.2:
        frame["kind"] = _BODIES[int(rng.random() * len(_BODIES))][1]
    elif dice < 0.23:
        frame["category"] = _categories(rng)
    elif dice < 0.26:
        frame["body"] = Raw(_twice(_encode(body), junk(rng)))
    elif dice < 0.28:
        frame[str(junk(rng))] = junk(rng)
    return _encode(frame)


def _twice(packed: bytes, value: Any) -> bytes:
    """A small map, in which one field stands twice."""
    if not 0x81 <= packed[0] < 0x8F:
        return packed
    return bytes((packed[0] + 1,)) + packed[1:] + _encode("kind") + _encode(value)


_GOOD: Final = tuple(envelope(Random(number)) for number in range(600))
"""Envelopes to damage, of all kinds."""


def damaged(rng: Random, good: tuple[bytes, ...] = _GOOD) -> bytes:
    """One or a few wounds on a good frame."""
    frame = bytearray(good[int(rng.random() * len(good))])
    for _ in range(1 + int(rng.random() ** 3 * 6)):
        if not frame:
            break
        place = int(rng.random() * len(frame))
        dice = rng.random()
        if dice < 0.35:
            frame[place] ^= 1 << int(rng.random() * 8)
        elif dice < 0.5:
            frame[place] = int(rng.random() * 256)
        elif dice < 0.6:
            del frame[place:]
        elif dice < 0.7:
            del frame[place : place + 1 + int(rng.random() * 8)]
        elif dice < 0.8:
            other = good[int(rng.random() * len(good))]
            start = int(rng.random() * len(other))
            frame[place:place] = other[start : start + int(rng.random() * 60)]
        elif dice < 0.9:
            frame[place : place + 5] = lie(
                int(rng.random() * 5), _INTS[int(rng.random() * len(_INTS))] & 0xFFFFFFFF
            )
        else:
            frame[place:place] = frame[place : place + 1 + int(rng.random() * 40)]
    return bytes(frame)


def noise(rng: Random) -> bytes:
    """Random bytes, few or, seldom, many."""
    return rng.randbytes(int(rng.random() ** 6 * 4_096))


def monster(rng: Random) -> bytes:
    """A frame that is large or deep in some way."""
    size = 1 << (8 + int(rng.random() * 12))  # up to half a MiB
    dice = int(rng.random() * 5)
    if dice == 0:
        return b"\x91" * size
    if dice == 1:
        return b"\x81\xa4body" * (size // 6)
    if dice == 2:
        return lie(int(rng.random() * 5), 2**32 - 1) + bytes(size)
    _, kind, make = _BODIES[int(rng.random() * len(_BODIES))]
    body = make(rng)
    names = list(body)
    body[names[int(rng.random() * len(names))]] = (
        "n" * size if dice == 3 else [junk(rng)] * (size // 64)
    )
    frame = {"id": "m", "source": "e0", "epoch": 1, "seq": 1, "time_s": 0.0, "category": "state"}
    return _encode({**frame, "kind": kind, "key": {"engine": "n" * (size // 2)}, "body": body})


def storm(rng: Random) -> bytes:
    """A long chain of blocks whose beginning comes and goes, over and over, in one message."""
    chain = pack(range(1, 1 + (1 << (6 + int(rng.random() * 10)))))
    first = {"kind": "stored", "tier": "gpu", "prefix_hashes": pack((1,))}
    gone = {"kind": "removed", "tier": "gpu", "prefix_hashes": pack((1,))}
    changes = [{"kind": "cleared"}, {**first, "prefix_hashes": chain}]
    changes += [gone, first] * int(rng.random() * 3_000)
    frame = {
        "id": f"s-{int(rng.random() * 10_000)}",
        "source": "storm",
        "epoch": 1 + int(rng.random() * 1_000_000),
        "seq": 1,
        "time_s": rng.random() * 300,
        "category": "state",
        "kind": "residency_changed",
        "key": {"engine": "storm"},
        "body": {"kind": "residency_changed", "changes": changes},
    }
    return _encode(frame)


def message(rng: Random) -> bytes:
    """An input for what reads envelopes."""
    dice = rng.random()
    if dice < 0.55:
        return envelope(rng)
    if dice < 0.92:
        return damaged(rng)
    if dice < 0.998:
        return noise(rng)
    return monster(rng) if dice < 0.99997 else storm(rng)


def body(rng: Random) -> bytes:
    """The number of a kind in one byte, and the body of a message of it, damaged or not."""
    number = int(rng.random() * len(_BODIES))
    packed = _encode(_BODIES[number][2](rng))
    if rng.random() < 0.5:
        packed = damaged(rng, (packed, _good_body(rng)))
    return bytes((number,)) + packed


def _good_body(rng: Random) -> bytes:
    good = _GOOD[int(rng.random() * len(_GOOD))]
    return good[good.find(b"\xa4body") + 5 :]


_PIECES: Final = (
    *("*", ">", ".", "-", "%", "%2d", "%zz", "a", "e0", "state", "control", "intent", "default"),
    *("state.default.e0.queue.-", "\ud800", "\0", "\n", "\u00e9", "\u0660", " ", "x" * 400),
)


def subject(rng: Random) -> bytes:
    """An input for what parses subjects: text as UTF-8, with halves of surrogate pairs in it."""
    if rng.random() < 0.1:
        return noise(rng)[:64]
    pieces = [
        _PIECES[int(rng.random() * len(_PIECES))] + ("." if rng.random() < 0.6 else "")
        for _ in range(int(rng.random() * 9))
    ]
    return "".join(pieces).encode("utf-8", "surrogatepass")
