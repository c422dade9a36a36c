"""The examples do what examples/README.md shows, line by line.

``python -m tests.test_examples`` writes what they print now into that page.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hear.app import plugins
from hear.policies.testing import check_policy

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "examples" / "README.md"
# A command and the first lines of what it prints, in a fenced block.
_SHOWN = re.compile(r"(?<=```console\n)\$ (?P<command>[^\n]*)\n(?P<output>.*?)(?=```\n)", re.S)
SHOWN = [(shown["command"], shown["output"]) for shown in _SHOWN.finditer(PAGE.read_text("utf-8"))]


def printed(command: str, num_lines: int) -> str:
    """The first lines that a command prints, as the page holds them."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(
        command.split(),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()[:num_lines]
    return "".join(f"{line.rstrip()}\n" for line in lines)


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(command: str, output: str) -> None:
    assert printed(command, output.count("\n")) == output


def test_the_page_shows_every_example() -> None:
    commands = " ".join(command for command, _ in SHOWN)
    for path in PAGE.parent.glob("*.py"):
        assert path.stem in commands


def test_the_policy_that_the_readme_shows_is_the_example() -> None:
    example = (PAGE.parent / "shortest_first.py").read_text("utf-8")
    code = example[example.index("from collections.abc") :]
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text("utf-8")


async def test_the_example_of_a_policy_keeps_what_every_policy_promises() -> None:
    await check_policy(plugins.load_typed("policies", "examples.shortest_first:ShortestFirst"))


if __name__ == "__main__":

    def now(shown: re.Match[str]) -> str:
        command, output = shown["command"], shown["output"]
        return f"$ {command}\n{printed(command, output.count(chr(10)))}"

    PAGE.write_text(_SHOWN.sub(now, PAGE.read_text("utf-8")), "utf-8")
