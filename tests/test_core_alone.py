"""What has to work where nothing but HEAR's own requirements is installed, no extra and no vLLM."""

import subprocess
import sys

import pytest

WITHIN_S = 60.0
EXTRAS = (
    "h11",
    "httpx",
    "opentelemetry",
    "prometheus_client",
    "textual",
    "torch",
    "transformers",
    "vllm",
    "yaml",
    "zmq",
)
HIDING = (
    "import sys\n"
    "for name in {extras!r}:\n"
    "    sys.modules[name] = None\n"  # this is what Python takes for a module that is not there
    "from hear.app.cli import main\n"
    "sys.exit(main({arguments!r}))\n"
)
"""A command in an interpreter to which the extras are not installed."""


def hear(*arguments: str) -> "subprocess.CompletedProcess[str]":
    code = HIDING.format(extras=EXTRAS, arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WITHIN_S
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["bench", "--help"],
        ["metrics", "--help"],
        ["tap", "--help"],
        ["vllm", "--help"],
        ["vllm", "attach", "--help"],
        ["vllm", "make-model", "--help"],
        ["vllm", "serve", "--help"],
    ],
    ids=" ".join,
)
def test_help_needs_no_extra(arguments: list[str]) -> None:
    done = hear(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: hear")


def test_what_would_be_started_is_told_without_vllm() -> None:
    done = hear("vllm", "serve", "some/model", "--dry-run")
    assert done.returncode == 0
    assert "vllm.entrypoints.cli.main serve some/model --scheduler-cls" in done.stdout
    assert done.stderr.startswith("hear: vLLM is not installed;")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["vllm", "attach", "http://127.0.0.1:1"],
            "hear vllm attach needs zmq, which is not installed: "
            "pip install 'hear-protocol[attach]'",
        ),
        (
            ["vllm", "serve", "some/model"],
            "vLLM is not installed: on a machine with a GPU, pip install 'hear-protocol[vllm]'; "
            "on one without, hear vllm install-cpu",
        ),
        (
            ["metrics"],
            "hear metrics needs prometheus_client, which is not installed: "
            "pip install 'hear-protocol[metrics]'",
        ),
        (
            ["tap", "--screen"],
            "hear tap --screen needs textual, which is not installed: "
            "pip install 'hear-protocol[screen]'",
        ),
    ],
)
def test_what_needs_an_extra_says_in_one_line_which(arguments: list[str], says: str) -> None:
    done = hear(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"hear: {says}\n"
