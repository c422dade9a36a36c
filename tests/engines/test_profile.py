"""Profiles: what a bad file is told, in one line that names file and line."""

from pathlib import Path

import pytest

from hear.engines.simulated.backend import create
from hear.engines.simulated.profile import load_profile, shipped_profiles
from hear.errors import ConfigError

GOOD = """\
name = "mine"

[model]
name = "tiny"
num_parameters = 1e6
num_layers = 2
num_heads = 2
head_dim = 8
kv_bytes_per_token = 1024

[gpu]
name = "slow"
flops_per_s = 1e10
flops_efficiency = 0.5
bytes_per_s = 1e9
bytes_efficiency = 0.5

[tiers]
gpu_kv_gib = 1
cpu_kv_gib = 0.5

[scheduler]
max_num_seqs = 8
"""


def written(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_good_file_is_read_with_defaults_for_what_it_leaves_out(tmp_path: Path) -> None:
    made = load_profile(written(tmp_path, GOOD), 16)
    assert made.name == "mine"
    assert made.scheduler.max_num_seqs == 8
    assert made.scheduler.max_num_batched_tokens == 8192
    assert made.tiers.cpu == "inclusive"
    assert made.num_blocks("gpu", 16) == 65_536
    assert made.num_blocks("cpu", 16) == 32_768


@pytest.mark.parametrize("name", shipped_profiles())
def test_the_shipped_profiles_can_be_used(name: str) -> None:
    assert load_profile(name).name == name


@pytest.mark.parametrize(
    ("before", "after", "line", "said"),
    [
        ("head_dim = 8", "head_dims = 8", 8, "unknown key 'head_dims': did you mean 'head_dim'?"),
        ("max_num_seqs", "max_num_seq", 23, "did you mean 'max_num_seqs'?"),
        ("[scheduler]", "[schedular]", 22, "did you mean 'scheduler'?"),
        ("num_layers = 2", "num_layers = 2.5", 6, "model.num_layers: Expected `int`"),
        ("num_layers = 2", "num_layers = 0", 6, "model.num_layers: Expected `int` >= 1"),
        ('name = "tiny"', "name = 7", 4, "model.name: Expected `str`"),
        ("flops_efficiency = 0.5", "flops_efficiency = 1.5", 14, "Expected `float` <= 1.0"),
        ("gpu_kv_gib = 1", "gpu_kv_gib = -1", 19, "tiers.gpu_kv_gib: Expected `float` > 0.0"),
        ("gpu_kv_gib = 1", "gpu_kv_gib = inf", 19, "tiers.gpu_kv_gib: Expected `float`"),
        ("gpu_kv_gib = 1", "gpu_kv_gib = nan", 19, "tiers.gpu_kv_gib: Expected `float`"),
        ("gpu_kv_gib = 1", 'gpu_kv_gib = 1\ncpu = "both"', 20, "tiers.cpu: Invalid enum value"),
        ("gpu_kv_gib = 1", "gpu_kv_gib = 1e-6", 19, "has no room for a block of 16 tokens"),
    ],
)
def test_a_bad_file_is_told_in_one_line_with_its_place(
    before: str, after: str, line: int, said: str, tmp_path: Path
) -> None:
    assert before in GOOD
    path = written(tmp_path, GOOD.replace(before, after, 1))
    with pytest.raises(ConfigError) as caught:
        create(path, block_size=16, name="e0")
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: "), message
    assert said in message
    assert "\n" not in message


def test_a_missing_table_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.partition("[gpu]")[0])
    with pytest.raises(ConfigError, match="missing required field `gpu`"):
        load_profile(path)


def test_a_file_that_is_no_toml_or_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        load_profile(written(tmp_path, "name = "))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(str(tmp_path / "none.toml"))


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'h100-qwen3-8b'\?"):
        load_profile("h100-qwen3-8")


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="block size of 0 tokens"):
        load_profile("h100-qwen3-8b", 0)


def test_blocks_larger_than_the_gpu_are_refused_for_a_shipped_profile_too() -> None:
    with pytest.raises(ConfigError, match=r"h100-qwen3-8b.toml:\d+: tiers.gpu_kv_gib"):
        load_profile("h100-qwen3-8b", 10**9)
