"""The list of packages is kept by hand, and what is missing from it is missing from the wheel."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WINGS = ("buses", "engines", "harnesses", "policies")


def listed() -> set[str]:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return set(setuptools["packages"])


def on_disk() -> set[str]:
    found = set()
    for top in ("hear", *WINGS):
        for path in (ROOT / top).rglob("__init__.py"):
            parts = path.parent.relative_to(ROOT).parts
            if top == "hear" and len(parts) > 1 and parts[1] in WINGS:
                continue  # by way of the links
            found.add(".".join(parts if top == "hear" else ("hear", *parts)))
    return found


def test_every_package_is_listed() -> None:
    assert listed() == on_disk()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [wheel] = out.glob("*.whl")
    return wheel


def test_the_wheel_holds_one_name_and_all_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hear"}
    for wing in WINGS:
        for path in (ROOT / wing).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                assert f"hear/{path.relative_to(ROOT)}" in names
    assert "hear/py.typed" in names


def test_every_package_can_be_imported_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, sys\n"
        f"sys.path.insert(0, {str(wheel)!r})\n"
        f"for name in {sorted(listed())!r}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(wheel)!r}), module.__file__\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
