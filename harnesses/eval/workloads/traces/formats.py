"""The formats of traces that are read, and which of them a file is in, told by its content."""

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from hear.codec import UNREADABLE
from hear.errors import ConfigError
from hear.escaping import cell
from hear.harnesses.eval.workloads.lines import File, beginning, files_of
from hear.harnesses.eval.workloads.traces import bailian, chats, dynamo, lengths, mooncake, tokens
from hear.harnesses.eval.workloads.traces.trace import Trace

Head = dict[str, Any] | list[str]
"""What a file begins with: its first object, or the columns of its first line."""

HEAD: Final = 1 << 20
_KEY = re.compile(rb'"([A-Za-z_]{1,40})"\s*:')

Reader = Callable[[Sequence[File], int | None], Trace]
ChatReader = Callable[[Sequence[File], int | None, tokens.Encode], Trace]


class Format(Struct, frozen=True):
    """A format: its name, what it is, and what begins a file in it.

    Exactly one of ``read`` and ``read_text``, which needs a tokenizer, is there; recordings of
    agents, which are not lists of requests, have neither
    (``hear.harnesses.eval.workloads.agentic``).
    """

    name: str
    what: str
    keys: frozenset[str]
    read: Reader | None = None
    read_text: ChatReader | None = None


AGENTIC: Final = Format("agentic", "Weka's agentic sessions", frozenset({"requests", "block_size"}))

FORMATS: Final = (
    Format("dynamo", "Dynamo's request traces", frozenset({"event_type"}), dynamo.read),
    AGENTIC,
    Format("bailian", "Bailian", frozenset({"chat_id", "input_length"}), bailian.read),
    Format("mooncake", "Mooncake", frozenset({"input_length", "output_length"}), mooncake.read),
    Format("azure", "Azure's CSV", frozenset(lengths.AZURE_COLUMNS), lengths.read_azure),
    Format(
        "burstgpt", "BurstGPT's CSV", frozenset(lengths.BURSTGPT_COLUMNS), lengths.read_burstgpt
    ),
    Format("sharegpt", "ShareGPT", frozenset({"conversations"}), read_text=chats.read_sharegpt),
    Format(
        "openai", "OpenAI's batches", frozenset({"custom_id", "body"}), read_text=chats.read_openai
    ),
    Format("openai", "chats", frozenset({"messages"}), read_text=chats.read_openai),
)
"""The first whose keys a file begins with is its format."""


def detect(path: File) -> Format:
    """In which format a file is, or the first of a folder.

    Raises:
        ConfigError: it cannot be read, or is in none.
    """
    file = files_of(path)[0]
    head = _head(file)
    if isinstance(head, dict) and isinstance(event := head.get("event"), dict):
        head = event  # as Dynamo's sinks write it
    for known in FORMATS:
        if known.keys <= set(head):
            return known
    what = ", ".join(dict.fromkeys(known.what for known in FORMATS))
    begins = f"a file that begins with {cell(', '.join(map(str, head)), 80)}"
    raise ConfigError(
        f"{file}: got {begins if head else 'no request at all'}, "
        f"expected a trace of a format that is read: {what} (docs/traces.md)"
    )


def read(path: File, *, first: int | None = None, tokenizer: Path | None = None) -> Trace:
    """Read a trace, of a file or a folder of them, in any format but that of recordings of agents.

    ``first`` is how many lines, or conversations, are read at most. ``tokenizer`` is the file or
    folder by which text is measured.

    Raises:
        ConfigError: a file, or a line of it, cannot be used, or text has no tokenizer.
    """
    known = detect(path)
    files = files_of(path)
    if known.read is not None:
        return known.read(files, first)
    if known.read_text is None:
        raise ConfigError(f"{path}: got {known.what}, expected a list of requests")
    if tokenizer is None:
        raise ConfigError(
            f"{path}: got {known.what}, which are text, without --tokenizer; expected the "
            f"{tokens.FILE} of the model that is to serve them"
        )
    return known.read_text(files, first, tokens.load(tokenizer))


def _head(file: File) -> Head:
    text = beginning(file, HEAD)
    line, _, _ = text.lstrip().partition(b"\n")
    if line.startswith((b"{", b"[")):
        try:
            begun = msgspec.json.decode(line)
        except UNREADABLE:
            begun = None
        if isinstance(begun, dict):
            return begun
        # A document of many lines, an array or a long line: the keys near its beginning say enough.
        return dict.fromkeys(key.decode() for key in _KEY.findall(text))
    try:
        [columns] = csv.reader([line.decode()]) if line else [[]]
    except (csv.Error, UnicodeDecodeError, ValueError):
        columns = []
    return [column.strip() for column in columns]
