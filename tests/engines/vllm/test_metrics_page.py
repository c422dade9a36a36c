"""A real server's page of metrics, and pages of others."""

from dataclasses import replace
from pathlib import Path

import pytest

from hear.engines.vllm.metrics_page import MetricsPage, read_page
from hear.errors import EngineError

SAMPLE = (Path(__file__).parent / "data" / "metrics_0.32.0.txt").read_text()


def test_a_real_servers_page_is_read() -> None:
    page = read_page(SAMPLE, "here")
    assert (page.num_running, page.num_waiting, page.usage, page.preemptions) == (0, 0, 0, 0)
    assert (page.prompt_tokens, page.output_tokens, page.cached_tokens) == (1925, 48, 64)
    assert page.prefill_s == pytest.approx(1.918, abs=1e-3)
    assert page.decode_s / page.decoded == pytest.approx(0.00889, abs=1e-5)
    assert page.begun_s == 1796053453.49
    assert page.config is not None
    assert (page.config["block_size"], page.config["num_gpu_blocks"]) == ("32", "33")


def test_slower_tiers_are_summed() -> None:
    name = "vllm:prompt_tokens_cached_by_source_total"
    lines = [f'{name}{{engine="0",source="{s}"}} 5.0' for s in ("device", "host", "disk")]
    assert read_page("\n".join(lines), "here").restored_tokens == 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "here: nothing of vLLM"),
        ("<html>a page</html>", "here: nothing of vLLM"),
        ('sglang:num_running_reqs{engine="0"} 1.0', "here: nothing of vLLM"),
        ("process_start_time_seconds 12.0", "here: nothing of vLLM"),
        ('vllm:num_requests_running{engine="0"} many', "here: no page of metrics"),
        ('vllm:num_requests_running{engine="0" 1.0', "here: no page of metrics"),
        (
            'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_running{engine="1"} 1.0',
            "here: 2 engines, expected one",
        ),
    ],
)
def test_what_is_no_page_of_one_vllm_is_said(text: str, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        read_page(text, "here")


def test_a_counter_that_falls_or_another_beginning_is_another_run() -> None:
    page = MetricsPage(prompt_tokens=10, begun_s=1.0, num_running=4)
    assert page.is_before(page)
    assert page.is_before(replace(page, prompt_tokens=11, num_running=0))
    assert not page.is_before(replace(page, prompt_tokens=9))
    assert not page.is_before(replace(page, begun_s=2.0))
