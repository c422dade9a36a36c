"""The benchmark runs, at a size at which its figures mean nothing, so that it can't rot."""

from pathlib import Path

import msgspec
import pytest

from benchmarks import vllm_queue
from tests.engines.vllm.real import NEEDS_VLLM

pytestmark = NEEDS_VLLM


def test_each_order_is_measured_beside_vllms_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    sizes = vllm_queue.Sizes(num_blocks=200, request_blocks=8, rounds=2)
    vllm_queue.main(["--json", str(path)], sizes)
    figures = msgspec.json.decode(path.read_bytes())["figures"]
    measured = {(figure["what"], figure["who"]) for figure in figures}
    for what in ("take and evict", "give back", "reuse"):
        assert len({who for each, who in measured if each == what}) == 5
    assert all(figure["median"] > 0 for figure in figures)
    assert "half the pool leased" in capsys.readouterr().out
