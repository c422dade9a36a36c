"""vLLM's options, read without vLLM. That vLLM reads them alike, the last tests show."""

from pathlib import Path
from typing import Any

import pytest

from hear.engines.vllm.launch.options import Options
from hear.errors import ConfigError
from tests.engines.vllm.real import NEEDS_VLLM


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--port", "9"],
        ["m", "--port=9"],
        ["m", "--port", "1", "--port", "9"],
        ["m", "--served-model-name", "a", "b", "--port", "9"],
    ],
)
def test_the_last_value_of_an_option_counts_however_it_is_written(arguments: list[str]) -> None:
    assert Options(arguments).last("--port") == "9"


def test_an_underscore_is_a_dash_but_not_in_a_value() -> None:
    options = Options(["m", "--scheduler_cls=a_b.C_d"])
    assert options.last("--scheduler-cls") == "a_b.C_d"


def test_a_negative_number_is_a_value_and_another_option_is_none() -> None:
    assert Options(["m", "--seed", "-1"]).last("--seed") == "-1"
    assert Options(["m", "--enforce-eager", "--port", "9"]).last("--enforce-eager") is None
    assert Options(["m", "--enforce-eager"]).has("--enforce-eager")


@pytest.mark.parametrize(
    ("arguments", "on"),
    [
        ([], None),
        (["--enable-x"], True),
        (["--no-enable-x"], False),
        (["--no-enable-x", "--enable_x"], True),
    ],
)
def test_of_a_switch_the_last_word_counts(arguments: list[str], on: bool | None) -> None:
    assert Options(["m", *arguments]).switch("--enable-x") is on


def test_json_and_dotted_keys_make_one_object() -> None:
    options = Options(["m", "--c", '{"a": 1, "b": {"x": 1}}', "--c.b.y", "2", "--c.z=word"])
    assert options.json("--c") == {"a": 1, "b": {"x": 1, "y": 2}, "z": "word"}
    assert options.json("--d") is None
    assert options.without("--c") == ["m"]


@pytest.mark.parametrize("text", ["[1]", "{", "word"])
def test_json_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--c: got .*, expected a JSON object"):
        Options(["m", "--c", text]).json("--c")


def test_the_model_comes_first_or_by_its_name() -> None:
    assert Options(["m", "--port", "9"]).model == "m"
    assert Options(["--port", "9", "--model", "m"]).model == "m"
    assert Options(["--port", "9"]).model is None


def test_the_rest_is_untouched() -> None:
    arguments = ["m", "-tp", "2", "--c.x", "1", "--d", "--e=1", "--c", "{}"]
    assert Options(arguments).without("--c") == ["m", "-tp", "2", "--d", "--e=1"]


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="vllm is not installed, with which PyYAML comes")
    with pytest.raises(ConfigError, match=r"nix.yaml: cannot be read: No such file"):
        Options(["m", "--config", str(tmp_path / "nix.yaml")])
    for text in ("a: [", "- 1"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"bad.yaml: (is not YAML|expected options)"):
            Options(["m", "--config", str(tmp_path / "bad.yaml")])


def test_the_command_line_comes_after_a_file(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="vllm is not installed, with which PyYAML comes")
    path = tmp_path / "c.yaml"
    path.write_text("model: m\nport: 8001\nenable_prefix_caching: false\nc:\n  a: 1\n  b: 1\n")
    options = Options(["--config", str(path), "--host", "h", "--c.b", "2"])
    assert options.model == "m"
    assert options.last("--port") == "8001"
    assert options.switch("--enable-prefix-caching") is False
    assert options.json("--c") == {"a": 1, "b": 2}
    assert Options([*options.arguments, "--port", "9"]).last("--port") == "9"


class TestBesideVllm:
    pytestmark = NEEDS_VLLM

    def test_vllm_has_none_of_the_options_of_hear(self) -> None:
        from hear.engines.vllm.launch.serve_command import own_options

        ours = {text for action in own_options()._actions for text in action.option_strings}
        theirs = set(_parser()._option_string_actions)
        assert ours
        assert not ours & theirs

    def test_vllm_takes_all_that_a_plan_adds(self, tmp_path: Path) -> None:
        from hear.engines.vllm.launch.model import ModelShape, make_model
        from hear.engines.vllm.launch.server_command import LaunchSettings, plan
        from hear.engines.vllm.versions import Installed

        make_model(tmp_path / "m", ModelShape(layers=1, hidden=32, intermediate=32))
        made = plan(
            [str(tmp_path / "m"), "--kv-events-config.topic", "t", "--max-model-len", "1k"],
            LaunchSettings(bus="ipc://b", name="e", cpu_tier_gib=0.5),
            Installed("0.32.0", cpu=True, named_vllm=False),
            {},
        )
        [start] = [n for n, word in enumerate(made.command) if word == "--model"]
        parsed = _parser().parse_args(list(made.command[start:]))
        assert parsed.max_model_len == 1000
        assert parsed.enable_prefix_caching is True
        assert parsed.scheduling_policy == "fcfs", "it is left as it is"
        assert parsed.additional_config["hear"]["name"] == "e"
        assert parsed.kv_events_config.topic == "t"
        assert parsed.kv_events_config.enable_kv_cache_events is True
        extra = parsed.kv_transfer_config.kv_connector_extra_config
        assert extra["cpu_bytes_to_use"] == 1 << 29


def _parser() -> Any:
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # as of 0.33
        from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())
