"""Lines of a recording: read whole or refused with the place, what came and what was expected."""

import gzip
from pathlib import Path

import pytest
from msgspec import Struct

from hear.errors import ConfigError
from hear.harnesses.eval.workloads.lines import read_lines


class Line(Struct):
    count: int
    parts: list[dict[str, int]] = []
    name: str = ""


def read(path: Path) -> list[tuple[int, Line]]:
    return list(read_lines(path, Line))


def test_lines_are_read_plain_or_gzipped_whatever_the_name_and_blank_ones_skipped(
    tmp_path: Path,
) -> None:
    text = b'{"count": 1}\n\n{"count": 2, "more": true}\n'
    (tmp_path / "plain.gz").write_bytes(text)
    (tmp_path / "packed").write_bytes(gzip.compress(text))
    assert read(tmp_path / "plain.gz") == [(1, Line(1)), (3, Line(2))]
    assert read(tmp_path / "packed") == read(tmp_path / "plain.gz")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{}", "got no `count`, expected this field"),
        (b'{"count": "x"}', "count: got 'x', expected `int`"),
        (b'{"count": 1, "parts": [{}, {"a": 0.5}]}', r".*got .*0\.5.*, expected `int`"),
        (b"[1]", r"got \[1\], expected `object`"),
        (b'{"count": 1', r"got {\"count\": 1, expected one JSON object \(.*truncated\)"),
        (b'{"count": 1} 2', r"got .*, expected one JSON object \(.*trailing.*\)"),
        (b'{"count": 1, "name": "\xff"}', "got .*, expected one JSON object .*"),
        (b'{"count": "x", "more": "\xff"}', "count: Expected `int`, got `str`"),
        (b"x" * 500, r"got x{57}\.\.\., expected one JSON object .*"),
    ],
)
def test_a_bad_line_is_told_in_one_line_with_file_and_number(
    tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"count": 1}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=rf"^.*bad\.jsonl:2: {message}$") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_is_a_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read: No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        read(tmp_path)


def test_gzip_data_that_is_cut_short_or_damaged_is_told(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"count": 1}\n' * 50_000)
    broken = {
        "cut": packed[:-20],
        "checksum": packed[:-8] + bytes(8),
        "garbage": packed[:10] + b"\xff" * 90,
    }
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name}:\d+: got gzip data that is cut short or"):
            read(tmp_path / name)
