"""docs/bus.md says what the code does: frames and items field by field, times and bounds."""

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from hear.buses.nng import (
    access,
    client,
    frames,
    handling,
    history,
    hub,
    joining,
    link,
    member,
    settlement,
    snapshots,
)
from hear.buses.nng.backlog import Bounds

TEXT = (Path(__file__).parents[2] / "docs" / "bus.md").read_text(encoding="utf-8")


def rows(*header: str) -> list[list[str]]:
    """The rows of the table that has these columns first."""
    found, inside = [], False
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif tuple(cells[: len(header)]) == header:
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            found.append(cells)
    return found


def described(type_: inspect.Type) -> str:
    match type_:
        case inspect.IntType():
            return "int"
        case inspect.StrType():
            return "str"
        case inspect.BoolType():
            return "bool"
        case inspect.BytesType():
            return "bin"
        case inspect.ListType(item_type=item):
            return f"[{described(item)}]"
        case inspect.TupleType(item_types=items):
            return f"[{', '.join(map(described, items))}]"
        case inspect.StructType(cls=cls):
            return cls.__name__
        case inspect.UnionType():
            return "Item"
    raise NotImplementedError(type_)


def default(value: Any) -> str:
    known = {"True": "true", "False": "false", "''": '""', "b''": '""'}
    return known.get(repr(value), repr(value))


def fields(type_: type[msgspec.Struct]) -> str:
    found = inspect.type_info(type_)
    assert isinstance(found, inspect.StructType)
    said = []
    for field in found.fields:
        text = f"{field.name}: {described(field.type)}"
        if not field.required:
            value = field.default
            text += f" = {'[]' if value is msgspec.NODEFAULT else default(value)}"
        said.append(text)
    return ", ".join(said)


@pytest.mark.parametrize(("header", "union"), [("frame", frames.Wire), ("item", frames.Item)])
def test_frames_and_items_are_in_the_document_as_they_are(header: str, union: Any) -> None:
    documented = {row[0]: (row[1], row[3]) for row in rows(header, "tag", "from")}
    assert documented == {
        type_.__name__: (str(type_.__struct_config__.tag), fields(type_))
        for type_ in get_args(union)
    }


def test_who_says_what_is_what_the_hub_takes() -> None:
    files = (Path(str(module.__file__)) for module in (hub, handling, link))
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    taken = set(re.findall(r"isinstance\((?:item|wire|frame\.items\[0\]), (\w+)\)", source))
    for header in ("frame", "item"):
        for name, _, said_by, *_ in rows(header, "tag", "from"):
            assert (said_by in ("client", "both")) == (name in taken), name


def test_times_are_those_of_the_code() -> None:
    modules = (client, hub, joining, link, member, settlement)
    for name, value, _ in rows("name", "value"):
        (known,) = {
            vars(module)[name.strip("`")] for module in modules if name.strip("`") in vars(module)
        }
        assert value == f"{known:g} s", name


def test_bounds_are_those_of_the_code() -> None:
    said = {what: most for what, most, _ in rows("what", "at most")}
    bounds = Bounds()
    mebi = 1 << 20
    assert said["one message"] == f"{frames.MAX_MESSAGE_BYTES // mebi} MiB"
    assert said["one frame"] == f"{frames.MAX_FRAME_BYTES >> 10} KiB"
    assert said["state waiting for one peer, or for the hub"] == (
        f"{bounds.state_messages:,} messages, {bounds.state_bytes // mebi} MiB"
    )
    for what in ("one peer", "the hub"):
        assert said[f"reliable messages waiting for {what}"] == (
            f"{bounds.reliable_messages:,}, {bounds.reliable_bytes // mebi} MiB"
        )
    assert said["snapshots and answers waiting for one peer"] == (
        f"{bounds.owed_items:,} items, {bounds.owed_bytes // mebi} MiB"
    )
    assert said["snapshots fetched for one peer at once"] == (
        f"{snapshots.MAX_TICKETS} of those with one key, and none while "
        f"{snapshots.FETCH_BELOW_BYTES // mebi} MiB wait for it"
    )
    assert said["one snapshot"] == f"{snapshots.MAX_SNAPSHOT_BYTES // mebi} MiB"
    assert said["streams that all with one key provide"] == (
        f"{snapshots.MAX_KEY_STREAM_BYTES // mebi} MiB of their names"
    )
    assert said["messages kept while a hub settles"] == f"{bounds.reliable_bytes // mebi} MiB"
    assert said["history"] == f"{history.HISTORY_BYTES // mebi} MiB"
    assert said["peers with one key"] == f"{access.DEFAULT_PEERS} (`peers` in the keyring)"
    assert said["all that is kept for the peers of one key"] == (
        f"{access.DEFAULT_MEMORY_MIB} MiB (`memory_mib` in the keyring)"
    )
    assert said["connections that have not joined"] == f"{joining.MAX_STRANGERS}"
    assert said["frames over a connection that has not joined"] == (
        f"{joining.MAX_UNKNOWN_FRAMES}, of {joining.MAX_UNKNOWN_BYTES:,} bytes if they are hellos"
    )
    assert said["frames of one peer, and of one key, that wait for their turn"] == (
        f"{hub.MAX_INBOX_FRAMES} frames; {hub.MAX_INBOX_BYTES // mebi} MiB"
    )
    assert said["large messages on their way from the peers of one key"] == (
        f"{hub.MAX_ASSEMBLY_BYTES // mebi} MiB"
    )
    assert said["patterns of one subscription or question; of all with one key"] == (
        f"{frames.MAX_PATTERNS}, {frames.MAX_PATTERN_BYTES >> 10} KiB; "
        f"{handling.MAX_KEY_PATTERNS:,}"
    )
    assert said["a will"] == f"{frames.MAX_WILL_RUNS:,} messages, {frames.MAX_WILL_BYTES >> 20} MiB"
    assert said["a name; a stem"] == f"{frames.MAX_NAME} letters; {frames.MAX_STEM:,} letters"
    assert f"{link.MEMBER_WINDOW} frames of a client and {link.HUB_WINDOW} of the hub" in TEXT


def test_the_document_is_of_the_version_that_the_code_speaks() -> None:
    assert f"## The link, version {frames.LINK_VERSION}\n" in TEXT
