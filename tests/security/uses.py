"""What a tree of modules refers to, and in which function: found in its source, without importing.

A name is followed to where it was imported from, so another name for it hides nothing.
"""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Use(NamedTuple):
    """A reference to ``what``, by its full dotted name, in a function of a file."""

    what: str
    path: str
    function: str


class Found(NamedTuple):
    """A use, and the call that it is the function of, if it is of one."""

    use: Use
    call: ast.Call | None


def uses(root: Path, *folders: str) -> Iterator[Found]:
    """Everything that the modules of some folders refer to."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            # hear/buses and so on are links to the folders of these names
            if relative.parts[0] == "hear" and relative.parts[1] in folders:
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            visitor = _Visitor(relative.as_posix(), _imported(tree))
            visitor.visit(tree)
            yield from visitor.found


def _imported(tree: ast.Module) -> dict[str, str]:
    """The names that a module imports, anywhere in it, and what each is."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


class _Visitor(ast.NodeVisitor):
    def __init__(self, path: str, imported: dict[str, str]) -> None:
        self.found: list[Found] = []
        self._path = path
        self._imported = imported
        self._functions: list[str] = []
        self._call: ast.Call | None = None

    def _enter(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        node.decorator_list = []
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _enter  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            if keyword.arg == "shell":
                self._note("shell=", node)
        self._call = node
        self.visit(node.func)
        self._call = None
        for part in (*node.args, *node.keywords):
            self.visit(part)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        call, self._call = self._call, None
        dotted = self._dotted(node)
        if dotted is None:
            self.generic_visit(node)
        else:
            self._note(dotted, call)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if any(alias.name == "*" for alias in node.names):
            self._note(f"{node.module}.*", None)

    def visit_Name(self, node: ast.Name) -> None:
        call, self._call = self._call, None
        if node.id in self._imported or hasattr(builtins, node.id):
            self._note(self._imported.get(node.id, node.id), call)

    def _dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._imported.get(node.id)
        if isinstance(node, ast.Attribute):
            below = self._dotted(node.value)
            return below and f"{below}.{node.attr}"
        return None

    def _note(self, what: str, call: ast.Call | None) -> None:
        function = ".".join(self._functions)
        self.found.append(Found(Use(what, self._path, function), call))
