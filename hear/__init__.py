"""HEAR: a harness-engine pairing protocol and runtime for agentic LLM serving.

This is the ground floor, the protocol without I/O. What is named here is the public interface for
those who write a policy, a bus, an engine backend or a harness; all messages are in
``hear.messages``. The wings ``hear.buses``, ``hear.engines``, ``hear.harnesses`` and
``hear.policies`` stand on it.
"""

from importlib.metadata import version

from hear.engine_view import EngineView, EngineViews
from hear.errors import HearError
from hear.harness_view import HarnessView
from hear.interfaces import (
    Ask,
    Bus,
    EngineBackend,
    InferenceClient,
    InferenceRequest,
    InferenceResult,
    Policy,
    Subscription,
)
from hear.messages import Envelope, Key

__version__ = version("hear-protocol")

__all__ = [
    "Ask",
    "Bus",
    "EngineBackend",
    "EngineView",
    "EngineViews",
    "Envelope",
    "HarnessView",
    "HearError",
    "InferenceClient",
    "InferenceRequest",
    "InferenceResult",
    "Key",
    "Policy",
    "Subscription",
    "__version__",
]
