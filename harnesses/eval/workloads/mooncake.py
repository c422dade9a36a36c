"""The published Mooncake trace, as the paper replays it: its first 900 seconds.

Source: Qin et al., "Mooncake", FAST 2025, repository kvcache-ai/Mooncake; paper, appendix A.2.
"""

from pathlib import Path
from typing import Any

from hear.harnesses.eval.workloads import traced
from hear.harnesses.eval.workloads.lines import shipped
from hear.harnesses.eval.workloads.traces import mooncake
from hear.harnesses.eval.workloads.workload import Workload

SHIPPED = "mooncake_conversation.jsonl.gz"
SHIPPED_WINDOW = (0.0, 900.0)
MAX_TOKENS = 40_960
"""The paper leaves out what is longer."""


def load(
    path: Path | None = None,
    *,
    window: tuple[float, float] | None = None,
    max_tokens: int = MAX_TOKENS,
    **options: Any,
) -> Workload:
    """Load a trace in Mooncake's form; without a path, the conversation trace that is shipped.

    Its window is then the first 900 s if none is given. The other options are those of
    ``traced.make``.

    Raises:
        ConfigError: the file, one of its lines or an option cannot be used.
    """
    source = shipped(SHIPPED) if path is None else path
    if window is None and path is None:
        window = SHIPPED_WINDOW
    trace = mooncake.read([source])
    return traced.make(trace, str(source), window=window, max_tokens=max_tokens, **options)
