"""The generated model. That vLLM serves it, every other test of real vLLM shows."""

import json
from pathlib import Path

import pytest

from hear.engines.vllm.launch.model import ModelShape, make_model
from hear.errors import ConfigError
from tests.engines.vllm.real import NEEDS_VLLM

SMALL = ModelShape(layers=2, hidden=64, intermediate=128)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_shape_gives_the_same_files(tmp_path: Path) -> None:
    make_model(tmp_path / "a", SMALL)
    make_model(tmp_path / "b", SMALL)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_model_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    make_model(tmp_path, SMALL)
    before = [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())]
    make_model(tmp_path, SMALL)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())] == before


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not empty, expected a new folder"):
        make_model(tmp_path, SMALL)
    assert contents(tmp_path) == {"config.json": b"{}"}


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/model: cannot be written"):
        make_model(tmp_path / "file" / "model", SMALL)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (ModelShape(heads=4, kv_heads=3), "kv-heads: got 3, expected a divisor of 4 heads"),
        (ModelShape(head_dim=33), "head-dim: got 33, expected an even number"),
    ],
)
def test_an_impossible_shape_is_refused(tmp_path: Path, shape: ModelShape, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_model(tmp_path / "model", shape)
    assert not (tmp_path / "model").exists()


def test_the_tokenizer_has_512_tokens_and_each_merge_makes_one(tmp_path: Path) -> None:
    make_model(tmp_path, SMALL)
    model = json.loads((tmp_path / "tokenizer.json").read_bytes())["model"]
    assert sorted(model["vocab"].values()) == list(range(512))
    assert all(left + right in model["vocab"] for left, right in model["merges"])


def test_the_weights_are_as_long_as_their_header_says(tmp_path: Path) -> None:
    make_model(tmp_path, SMALL)
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert max(t["data_offsets"][1] for t in header.values()) == len(data) - 8 - length
    for tensor in header.values():
        begin, end = tensor["data_offsets"]
        size = 1
        for extent in tensor["shape"]:
            size *= extent
        assert end - begin == 2 * size


class TestWithItsLibraries:
    pytestmark = NEEDS_VLLM

    def test_the_tokenizer_gives_back_any_text(self, tmp_path: Path) -> None:
        from tokenizers import Tokenizer

        make_model(tmp_path, SMALL)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        for text in ("the agent reads a file", "  Zürich, 東京\n\t{}", "x" * 100):
            assert tokenizer.decode(tokenizer.encode(text).ids) == text
        assert len(tokenizer.encode("the agent reads the file").ids) < 10

    def test_the_weights_are_numbers_of_the_size_they_should_have(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        make_model(tmp_path, SMALL)
        tensors = load_file(tmp_path / "model.safetensors")
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                expected = tensor.shape[1] ** -0.5
                assert expected / 1.5 < tensor.float().std().item() < expected * 1.5, name
