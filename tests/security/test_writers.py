"""Nothing that is shipped writes to a terminal or sets up a log but the modules that may."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
SHIPPED: Final = ("hear", "buses", "engines", "harnesses", "policies")
BENCHMARKS: Final = ("benchmarks", "examples")

MAY: Final = {
    "hear/app/output.py": {"print", "sys.stdout", "sys.stderr", "sys.excepthook"},
    "hear/app/console.py": {"rich.console.Console"},
    "hear/app/log.py": {"sys.stderr", "structlog.configure", "structlog.PrintLoggerFactory"},
    # A thread of its own writes lines that Lines and Records have made.
    "buses/observe/tap/output.py": {"os.write"},
    # Appends to its file.
    "engines/worker/operation_log.py": {"os.write"},
    # While the screen is there, the log goes to one line of it.
    "buses/observe/tap/screen.py": {"structlog.configure"},
    # Is given any console; makes none.
    "harnesses/eval/report/table.py": {"rich.console.Console"},
}
"""Who may write in which way, and why."""


def banned() -> set[str]:
    """What pyproject.toml bans, and what no linter can tell from the harmless."""
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]
    names = set(ruff["lint"]["flake8-tidy-imports"]["banned-api"])
    assert "T20" in ruff["lint"]["select"]
    return {name for name in names if name not in SHIPPED} | {"print", "pprint.pprint", "os.write"}


def found(source: str) -> set[str]:
    """The banned names that a module uses, under whatever name it has imported them."""
    tree = ast.parse(source)
    known = dict(_imported(tree))
    names = (_name_of(node, known) for node in ast.walk(tree))
    used = {name for name in names if name} | set(known.values())
    return {ban for ban in banned() for name in used if name == ban or name.startswith(f"{ban}.")}


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _name_of(node: ast.AST, known: dict[str, str]) -> str:
    """The full name of what an expression names; empty if it names nothing of a module."""
    if isinstance(node, ast.Name):
        imported = known.get(node.id, "")
        # ``import a.b`` binds ``a``.
        return (
            node.id
            if node.id == "print"
            else imported.partition(".")[0]
            if (imported.startswith(f"{node.id}."))
            else imported
        )
    if isinstance(node, ast.Attribute):
        of = _name_of(node.value, known)
        return f"{of}.{node.attr}" if of else ""
    return ""


def modules(folders: tuple[str, ...]) -> dict[str, set[str]]:
    """What is found in each module, without the links that stand in ``hear``."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    own = {p.relative_to(ROOT).as_posix(): p for p in paths if p.resolve() == p}
    assert len(own) > len(folders)
    each = ((name, found(path.read_text(encoding="utf-8"))) for name, path in sorted(own.items()))
    return {name: uses for name, uses in each if uses}


def test_nothing_else_writes() -> None:
    assert modules(SHIPPED) == MAY


def test_benchmarks_print_their_own_figures_and_nothing_else() -> None:
    assert {use for uses in modules(BENCHMARKS).values() for use in uses} <= {"print", "os.write"}


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("print('x')", {"print"}),
        ("say = print\nsay('x')", {"print"}),
        ("import sys\nsys.stdout.write('x')", {"sys.stdout"}),
        ("import sys as s\ns.stderr.write('x')", {"sys.stderr"}),
        ("from sys import stderr as e\ne.write('x')", {"sys.stderr"}),
        ("import sys\nfile = sys.__stdout__", {"sys.__stdout__"}),
        ("import rich\nrich.print('x')", {"rich.print"}),
        ("from rich.console import Console", {"rich.console.Console"}),
        ("import rich.console\nrich.console.Console()", {"rich.console.Console"}),
        ("from rich import console\nconsole.Console()", {"rich.console.Console"}),
        ("from rich.text import Text\nText.from_markup('x')", {"rich.text.Text.from_markup"}),
        ("from rich.markup import escape", {"rich.markup"}),
        ("import logging\nlogging.basicConfig()", {"logging.basicConfig"}),
        ("import structlog\nstructlog.configure()", {"structlog.configure"}),
        ("import traceback\ntraceback.print_exc()", {"traceback.print_exc"}),
        ("import os\nos.write(1, b'x')", {"os.write"}),
        ("from os import write", {"os.write"}),
        ("import sys\nsys.argv; 'print(x)'; self.print('x')", set()),
        ("from rich.table import Table\nfrom hear.app.console import Console\nConsole()", set()),
    ],
)
def test_a_way_to_write_is_found_under_any_name(source: str, what: set[str]) -> None:
    assert found(source) == what
