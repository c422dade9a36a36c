"""docs/protocol.md says what the code does: its tables are compared with the types and the code.

A table is found by its header. Types and defaults are compared cell by cell; what a field means is
for people to keep right.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from hear import engine_operations, sender_operations
from hear.codec import KINDS
from hear.delivery import SNAPSHOT_KINDS
from hear.messages import AXES, SCHEMA_VERSION, Control, Envelope, Key, Message
from hear.messages.envelope import MAX_NUMBER, MAX_S
from hear.operation import TRANSITIONS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
EVERY_CONTROL = "every control"


def tables(*header: str) -> Iterator[list[str]]:
    """The rows of every table that has these columns first."""
    inside = False
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif tuple(cells[: len(header)]) == header:
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            yield [cell.replace("`", "") for cell in cells]


def name_of(type_: type) -> str:
    tag = getattr(type_, "__struct_config__").tag  # noqa: B009 - not every type has one
    return str(tag or type_.__name__)


def described(type_: inspect.Type) -> str:
    """The type column for a field."""
    match type_:
        case inspect.Metadata(type=inner):
            return described(inner)
        case inspect.BoolType():
            return "bool"
        case inspect.IntType(ge=low):
            return "uint" if low == 0 else "int"
        case inspect.FloatType(ge=low, gt=above, le=high):
            lower = ">= 0" if low == 0 else "> 0" if above == 0 else ""
            upper = "" if high in (MAX_S, MAX_NUMBER) else f"<= {high:g}"
            bounds = ", ".join(filter(None, [lower, upper]))
            return f"float {bounds}".strip()
        case inspect.StrType():
            return "str"
        case inspect.BytesType():
            return "bin"
        case inspect.LiteralType(values=values):
            return " or ".join(f'"{value}"' for value in values)
        case inspect.UnionType(types=types):
            return " or ".join(
                [described(t) for t in types if not isinstance(t, inspect.NoneType)]
                + ["nil" for t in types if isinstance(t, inspect.NoneType)]
            )
        case inspect.VarTupleType(item_type=item):
            return f"[{described(item)}]"
        case inspect.DictType(key_type=key, value_type=value):
            return f"{{{described(key)}: {described(value)}}}"
        case inspect.StructType(cls=cls):
            return name_of(cls)
        case inspect.RawType():
            return "any"
    raise NotImplementedError(f"no words for {type_}")


def default_of(field: inspect.Field) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return "{}"
    spelt = {None: "nil", True: "true", False: "false", (): "[]", "": '""', b"": "empty"}
    value: Any = field.default
    if isinstance(value, str) and value:
        return f'"{value}"'
    return spelt[value] if type(value) not in (int, float) else repr(value)


def structs_in(type_: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """The Structs that a field is made of."""
    match type_:
        case inspect.StructType(cls=cls):
            yield cls
        case inspect.VarTupleType(item_type=item):
            yield from structs_in(item)
        case inspect.UnionType(types=types):
            for each in types:
                yield from structs_in(each)


def fields_of(type_: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    found = inspect.type_info(type_)
    assert isinstance(found, inspect.StructType)
    return found.fields


def expected_rows() -> dict[tuple[str, str], tuple[str, str]]:
    """Type and default of each field of each message, and of each Struct within one."""
    rows: dict[tuple[str, str], tuple[str, str]] = {}
    of_every_control = {field.name for field in fields_of(Control)}
    todo: list[type[msgspec.Struct]] = [kind.type for kind in KINDS.values()]
    seen: set[type[msgspec.Struct]] = set()
    while todo:
        type_ = todo.pop()
        if type_ in seen:
            continue
        seen.add(type_)
        for field in fields_of(type_):
            if issubclass(type_, Control) and field.name in of_every_control:
                name = EVERY_CONTROL
            else:
                name = name_of(type_)
            rows[name, field.name] = described(field.type), default_of(field)
            todo += structs_in(field.type)
    return rows


def test_every_field_of_every_message_is_in_the_document_as_it_is() -> None:
    documented = {(row[0], row[1]): (row[2], row[3]) for row in tables("kind", "field")}
    assert documented == expected_rows()
    assert all(row[4] for row in tables("kind", "field")), "each has a meaning"


@pytest.mark.parametrize(("header", "type_"), [("envelope", Envelope), ("key", Key)])
def test_the_envelope_and_its_key_are_in_the_document(
    header: str, type_: type[msgspec.Struct]
) -> None:
    documented = {row[0]: (row[1], row[2]) for row in tables(header, "type")}
    assert documented == {f.name: (described(f.type), default_of(f)) for f in fields_of(type_)}


@pytest.mark.parametrize("category", ["intent", "control", "state", "outcome"])
def test_every_kind_is_in_the_table_of_its_category(category: str) -> None:
    documented = {row[0] for row in tables(f"{category} kind")}
    assert documented == {kind.name for kind in KINDS.values() if kind.category == category}


def test_the_axis_of_each_control_is_in_the_document() -> None:
    documented = {row[0]: row[1] for row in tables("control kind", "axis")}
    assert documented == {name_of(type_): axis for type_, axis in AXES.items()}


def test_the_topic_of_each_kind_of_state_is_in_the_document() -> None:
    documented = {row[0]: (row[1], row[2]) for row in tables("state kind", "topic")}
    assert documented == {
        kind.name: (kind.topic, "yes" if kind.name in SNAPSHOT_KINDS else "no")
        for kind in KINDS.values()
        if kind.category == "state"
    }


def test_the_life_of_an_operation_is_in_the_document() -> None:
    documented = {
        row[0]: set(re.findall(r"[a-z]+", row[1])) - {"terminal"} for row in tables("phase")
    }
    assert documented == {phase: set(after) for phase, after in TRANSITIONS.items()}


_STATUSES = {status for row in TRANSITIONS.values() for status in row} | {"submitted"}
_CODE = re.compile(r"[a-z]+(_[a-z]+)*")


def reason_codes() -> set[str]:
    """The reason codes that ``hear.engine_operations`` gives, and those in docstrings."""
    assert engine_operations.__file__ is not None
    assert sender_operations.__file__ is not None
    text = Path(engine_operations.__file__).read_text(encoding="utf-8")
    codes: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        given: list[ast.expr] = []
        match node:
            case ast.Call(func=ast.Attribute(attr="_end" | "_refuse"), args=args):
                given = args[3:4]
            case ast.Call(func=ast.Attribute(attr="_stop"), args=args):
                given = args[2:3]
            case ast.Return(value=ast.Tuple(elts=[first, _])):
                given = [first]
            case ast.Assign(targets=[ast.Name(id="reason")], value=value):
                given = [value]
        codes |= {
            constant.value
            for expression in given
            for constant in _alternatives(expression)
            if isinstance(constant.value, str)
        }
    for documented in (sender_operations.SenderOperations, *(kind.type for kind in KINDS.values())):
        said = " ".join((documented.__doc__ or "").split())
        codes |= set(re.findall(r"fail(?:s|ed)? (?:here )?(?:as )?``([a-z_]+)``", said))
    return codes


def _alternatives(expression: ast.expr) -> Iterator[ast.Constant]:
    match expression:
        case ast.Constant():
            yield expression
        case ast.IfExp(body=body, orelse=orelse):
            yield from _alternatives(body)
            yield from _alternatives(orelse)


def test_every_reason_code_is_in_the_document_and_is_a_code() -> None:
    documented = {row[0] for row in tables("reason", "with")}
    codes = reason_codes()
    assert {"malformed", "outranked", "already_terminal", "released", "no_answer"} <= codes
    assert codes <= documented
    assert all(_CODE.fullmatch(code) for code in documented)
    for _, statuses, *_ in tables("reason", "with"):
        assert set(statuses.split(" or ")) <= _STATUSES


def test_the_codes_that_any_backend_may_use_are_in_the_document() -> None:
    section = TEXT.partition("### Reason codes of backends")[2].partition("\n#")[0]
    for code in (
        "unknown_context",
        "not_resident",
        "no_room",
        "yielded",
        "already_running",
        "unknown_mode",
        "not_this_engine",
        "unknown_tier",
        "lease_too_long",
        "engine_stopped",
        "engine_restarted",
    ):
        assert f"| `{code}` |" in section


def test_the_codes_that_a_pool_gives_are_in_the_document_with_the_statuses_that_it_gives() -> None:
    text = (ROOT / "harnesses" / "pool" / "dispatcher.py").read_text(encoding="utf-8")
    given = set(re.findall(r'ApplyResult\("(\w+)", "(\w+)"', text))
    given |= set(re.findall(r'status="(\w+)", control="route", reason="(\w+)"', text))
    assert given == {
        ("rejected", "already_routed"),
        ("rejected", "unknown_engine"),
        ("failed", "unknown_engine"),
    }
    documented = {row[0]: set(row[1].split(" or ")) for row in tables("reason", "with")}
    assert all(status in documented[code] for status, code in given)


def test_the_document_is_of_the_version_that_the_code_speaks() -> None:
    assert re.search(rf"^Version {SCHEMA_VERSION} of the wire format", TEXT, re.MULTILINE)


def test_numbers_in_the_document_are_those_of_the_code() -> None:
    assert f"{engine_operations.DEFAULT_DEADLINE_S:g} s" in TEXT
    assert f"{engine_operations.MAX_DEADLINE_S:g} s" in TEXT


def test_no_message_is_left_out_of_the_table_of_kinds() -> None:
    """Each tagged type is a kind, or a part of one that the document has a table for."""
    parts = {name for name, _ in expected_rows()} - set(KINDS)
    tagged = {
        name_of(type_)
        for type_ in Message.__subclasses__() + Control.__subclasses__()
        if type_ is not Control
    }
    assert tagged <= set(KINDS) | parts
