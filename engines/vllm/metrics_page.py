"""What a vLLM server says of itself at ``/metrics``, as numbers. No I/O.

Owns vLLM's names of metrics, and nothing else does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from hear.errors import EngineError

_GAUGES: Final = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:kv_cache_usage_perc": "usage",
}
_COUNTERS: Final = {
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "output_tokens",
    "vllm:prompt_tokens_cached_total": "cached_tokens",
    "vllm:request_prefill_time_seconds_sum": "prefill_s",
    "vllm:inter_token_latency_seconds_sum": "decode_s",
    "vllm:inter_token_latency_seconds_count": "decoded",
}
_BY_SOURCE: Final = "vllm:prompt_tokens_cached_by_source_total"
_CONFIG: Final = "vllm:cache_config_info"
_BEGUN: Final = "process_start_time_seconds"
_WANTED: Final = (*_GAUGES, *_COUNTERS, _BY_SOURCE, _CONFIG, _BEGUN)
_SLOWER: Final = ("host", "p2p", "disk", "external_unspecified")


@dataclass(slots=True)
class MetricsPage:
    """One look at one engine. Counters count since the server began.

    ``usage`` is the share of blocks that running requests use; ``restored_tokens`` were brought
    back from slower tiers; ``decoded`` are output tokens after the first, ``decode_s`` the seconds
    that they took. ``config`` is vLLM's cache configuration, word for word. ``begun_s`` is when
    the process began, 0 if it does not say.
    """

    num_running: float = 0.0
    num_waiting: float = 0.0
    usage: float = 0.0
    preemptions: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    cached_tokens: float = 0.0
    restored_tokens: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decoded: float = 0.0
    begun_s: float = 0.0
    config: dict[str, str] | None = None

    def is_before(self, later: "MetricsPage") -> bool:
        """Whether a later look can be one at the same run of the server: no counter has fallen."""
        same = self.begun_s == later.begun_s
        return same and all(
            getattr(self, name) <= getattr(later, name) for name in _COUNTERS.values()
        )


def _lines(text: str) -> Iterator[str]:
    # A page has hundreds of lines, and reading them all each second would cost a CPU 2%.
    for line in text.splitlines():
        if line.startswith(_WANTED):
            yield line


def read_page(text: str, where: str) -> MetricsPage:
    """Read a page; ``where`` names it in errors.

    Raises:
        EngineError: it is no page of vLLM, or one of several engines, of which each is attached by
            itself.
    """
    page = MetricsPage()
    engines = set()
    lines = "\n".join(_lines(text)) + "\n"
    try:
        for family in text_string_to_metric_families(lines):
            for sample in family.samples:
                name, value = sample.name, sample.value
                if not isfinite(value):
                    raise ValueError(f"{name} is {value}, expected a finite number")
                if "engine" in sample.labels:
                    engines.add(sample.labels["engine"])
                if name in _GAUGES or name in _COUNTERS:
                    setattr(page, _GAUGES.get(name) or _COUNTERS[name], value)
                elif name == _BY_SOURCE and sample.labels.get("source") in _SLOWER:
                    page.restored_tokens += value
                elif name == _CONFIG:
                    page.config = dict(sample.labels)
                elif name == _BEGUN:
                    page.begun_s = value
    except (ValueError, KeyError, IndexError) as error:
        raise EngineError(f"{where}: no page of metrics: {error}") from error
    if not engines:
        raise EngineError(f"{where}: nothing of vLLM is there, expected its metrics (vllm:...)")
    if len(engines) > 1:
        raise EngineError(
            f"{where}: {len(engines)} engines, expected one: attach to each data parallel rank by "
            "an address of its own (--data-parallel-external-lb)"
        )
    return page
