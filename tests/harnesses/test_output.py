"""Files are written whole or not at all, and into what is there, not over it."""

import os
import threading
from pathlib import Path

import pytest

from hear.errors import ConfigError
from hear.harnesses.eval.report.output import check_outputs, write_whole


def test_two_outputs_may_not_be_one_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is written already, expected a file of its own"):
        check_outputs([tmp_path / "a", tmp_path / "." / "a"], [])


def test_an_output_may_not_be_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("{}")
    with pytest.raises(ConfigError, match="is read already"):
        check_outputs([tmp_path / "trace"], [tmp_path / "trace"])


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"rows")
    reader.join(timeout=10)
    assert got == [b"rows"]
    assert pipe.is_fifo()
