"""Traces of arrivals and lengths alone, as CSV: Azure's and BurstGPT's.

Sources: repository Azure/AzurePublicDataset (Patel et al., "Splitwise", ISCA 2024); repository
HPMLL/BurstGPT (Wang et al., "BurstGPT", 2024). Neither tells what a prompt holds, so nothing of it
is reused, whatever the policy: they show queues, not caches.
"""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import islice

from hear.errors import ConfigError
from hear.escaping import cell
from hear.harnesses.eval.workloads.lines import File, raw_lines
from hear.harnesses.eval.workloads.traces.trace import MAX_TOKENS, Budget, Trace, TracedRequest

AZURE = "azure"
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = "burstgpt"
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
SESSION_COLUMN = "Session ID"
BLOCK_SIZE = 512
MAX_LINE = 1 << 16

_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?", re.ASCII)
"""Azure writes seven digits below the second, of which Python's own reader takes six."""

_Row = dict[str, str]


def read_azure(files: Sequence[File], first: int | None = None) -> Trace:
    """Read Azure's form. Times of day count from the first request.

    Raises:
        ConfigError: a file or a line cannot be used.
    """
    return _read(files, first, AZURE, AZURE_COLUMNS, _time_of_day)


def read_burstgpt(files: Sequence[File], first: int | None = None) -> Trace:
    """Read BurstGPT's form. Requests that failed, with an answer of 0 tokens, are left out.

    Raises:
        ConfigError: a file or a line cannot be used.
    """
    return _read(files, first, BURSTGPT, BURSTGPT_COLUMNS, _seconds)


def _read(
    files: Sequence[File],
    first: int | None,
    name: str,
    columns: tuple[str, str, str],
    seconds: Callable[[str], float],
) -> Trace:
    time_column, prompt_column, output_column = columns
    requests: list[TracedRequest] = []
    failed = 0
    first_s: float | None = None
    last_s = 0.0
    rows = (row for path in files for row in _rows(path, columns))
    budget = Budget()
    for where, row in islice(rows, first):
        budget.take(where)
        try:
            at_s = seconds(row[time_column])
        except ValueError:
            raise _wrong(where, time_column, row, "a time") from None
        prompt_tokens = _count(where, prompt_column, row)
        output_tokens = _count(where, output_column, row)
        first_s = at_s if first_s is None else first_s
        if at_s - first_s < last_s:
            raise _wrong(where, time_column, row, "times that never run backwards")
        last_s = at_s - first_s
        if prompt_tokens == 0 or (name == BURSTGPT and output_tokens == 0):
            failed += 1
            continue
        requests.append(
            TracedRequest(
                where=where,
                prompt_tokens=prompt_tokens,
                output_tokens=max(1, output_tokens),
                at_s=last_s,
                session=row.get(SESSION_COLUMN) or None,
            )
        )
    if not requests:
        raise ConfigError(f"{files[0]}: got no request at all, expected one a line")
    remarks = ["the trace tells lengths and no blocks, so no prompt has anything in common"]
    if failed:
        remarks.append(f"{failed:,} requests of it have no prompt or no answer, and are left out")
    return Trace(
        format=name, block_size=BLOCK_SIZE, requests=tuple(requests), remarks=tuple(remarks)
    )


def _rows(path: File, columns: Sequence[str]) -> Iterator[tuple[str, _Row]]:
    """The lines after the header, by the names of their columns."""
    header: list[str] = []
    for number, line in raw_lines(path, MAX_LINE):
        where = f"{path}:{number}"
        try:
            [cells] = csv.reader([line.decode()], strict=True)
        except (csv.Error, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{where}: got no line of CSV ({error}), expected one") from error
        if not header:
            header = [cell.strip() for cell in cells]
            for column in columns:
                if header.count(column) != 1:
                    raise ConfigError(
                        f"{where}: got {header.count(column)} columns {column!r}, expected one"
                    )
            continue
        if len(cells) != len(header):
            raise ConfigError(f"{where}: got {len(cells)} columns, expected {len(header)}")
        yield where, dict(zip(header, cells, strict=True))


def _count(where: str, column: str, row: _Row) -> int:
    text = row[column].strip().removesuffix(".0")
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and int(text) <= MAX_TOKENS):
        raise _wrong(where, column, row, f"a number of tokens up to {MAX_TOKENS:,}")
    return int(text)


def _wrong(where: str, column: str, row: _Row, expected: str) -> ConfigError:
    return ConfigError(f"{where}: {column}: got {cell(repr(row[column]), 60)}, expected {expected}")


def _time_of_day(text: str) -> float:
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    whole, below, zone = found.groups()
    at = datetime.fromisoformat(f"{whole}{zone if zone and zone != 'Z' else '+00:00'}")
    return at.timestamp() + float(below or 0)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < 1e12:
        raise ValueError(text)
    return seconds
