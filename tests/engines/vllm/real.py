"""Real vLLM for tests: whether it is here, and one in this process for as long as a test needs it.

Tests import vLLM, and what imports it, inside of fixtures and tests, so that the modules can be
collected where it is not installed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hear.engines.vllm.launch.model import make_model

INSTALLED = find_spec("vllm") is not None

NEEDS_VLLM = [
    pytest.mark.skipif(not INSTALLED, reason="vllm is not installed (docs/vllm.md says how)"),
    pytest.mark.filterwarnings("ignore"),  # those of vLLM, torch and what they use are not ours
]
"""``pytestmark = NEEDS_VLLM`` in a module that needs vLLM."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextmanager
def engine_in_process(folder: Path, **options: Any) -> Iterator[Any]:
    """A ``vllm.LLM`` of a generated model, made in ``folder``, with its engine in this process.

    Its scheduler is ``scheduler_of(llm)``. It computes in float32, since in bfloat16 the way in
    which a prompt is cut into steps may already decide between two tokens that are nearly as good.
    """
    os.environ.update(ENVIRONMENT)
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    make_model(folder)
    llm = LLM(
        model=str(folder),
        **{
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": 32,
            "disable_log_stats": True,
            **options,
        },
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler
