"""Execution Description and Intent, from harness to engine (paper, Table 1).

Nothing here asks anyone to act: an engine that hears only intent does nothing (section 3.3).
"""

from typing import Literal

from hear.messages.envelope import Count, Message, Probability, Seconds

PauseCause = Literal["tool", "person", "other"]
Basis = Literal["known", "predicted"]


class RequestDescribed(Message, frozen=True, kw_only=True, tag="request_described"):
    """A request exists or soon will; keyed by request, context, context version and engine.

    ``prefix_hashes`` holds the packed hashes of the prompt's full blocks (``hear.blocks``), each
    of ``block_size`` tokens, made as ``hash_scheme`` says; ``model`` is the model that the request
    is for. What is left empty is taken to be the engine's. ``turn`` counts the requests of a
    context from 1. A request waits for those in ``depends_on``; ``ready`` says whether the harness
    has sent it or could.
    """

    role: str | None = None
    stage: str | None = None
    depends_on: tuple[str, ...] = ()
    ready: bool = True
    turn: Count = 0
    prompt_tokens: Count = 0
    block_size: Count = 0
    prefix_hashes: bytes = b""
    max_output_tokens: Count | None = None
    expected_output_tokens: Count | None = None
    hash_scheme: str = ""
    model: str = ""


class RequestReadinessChanged(Message, frozen=True, kw_only=True, tag="request_readiness_changed"):
    """A described request became ready, or no longer is."""

    ready: bool


class ContextOpened(Message, frozen=True, kw_only=True, tag="context_opened"):
    """A conversation or agent began."""

    role: str | None = None


class ContextVersioned(Message, frozen=True, kw_only=True, tag="context_versioned"):
    """A context grew or was edited; the key's version supersedes all earlier ones."""

    tokens: Count = 0
    prefix_hashes: bytes = b""
    block_size: Count = 0


class ContextForked(Message, frozen=True, kw_only=True, tag="context_forked"):
    """The keyed context begins as a copy of ``parent`` at ``parent_version``."""

    parent: str
    parent_version: int | None = None


class ContextPaused(Message, frozen=True, kw_only=True, tag="context_paused"):
    """A context waits for a tool or a person, for ``expected_pause_s`` if anyone can tell."""

    cause: PauseCause = "other"
    tool: str | None = None
    expected_pause_s: Seconds | None = None


class ContextResumed(Message, frozen=True, kw_only=True, tag="context_resumed"):
    """A paused context goes on."""


class ContextClosed(Message, frozen=True, kw_only=True, tag="context_closed"):
    """A context will not be used again, as far as the harness knows."""


class ReuseExpected(Message, frozen=True, kw_only=True, tag="reuse_expected"):
    """The keyed context will be, or is predicted to be, used again within ``horizon_s``."""

    basis: Basis
    probability: Probability = 1.0
    horizon_s: Seconds | None = None
    predictor: str = ""


class Actions(Message, frozen=True, kw_only=True, tag="step"):
    """A node of a workflow: who runs, after which other steps."""

    name: str
    role: str | None = None
    after: tuple[str, ...] = ()
    join: Literal["all", "any"] = "all"


class WorkflowDescribed(Message, frozen=True, kw_only=True, tag="workflow_described"):
    """The roles of a workflow and what is known of its step graph."""

    roles: tuple[str, ...] = ()
    steps: tuple[Actions, ...] = ()


Intent = (
    RequestDescribed
    | RequestReadinessChanged
    | ContextOpened
    | ContextVersioned
    | ContextForked
    | ContextPaused
    | ContextResumed
    | ContextClosed
    | ReuseExpected
    | WorkflowDescribed
)
