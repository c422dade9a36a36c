"""A trace in one form, whatever file it is from: requests with lengths, times, blocks and sessions.

A reader of a format makes these; ``hear.harnesses.eval.workloads.traced`` makes a workload of them.
This module knows neither.
"""

from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct

from hear.errors import ConfigError
from hear.messages.intent import PauseCause

MAX_TOKENS: Final = 10_000_000
"""Most of a prompt or an answer. No model takes as many; it keeps typos from memory."""

MAX_REQUESTS: Final = 2_000_000
MAX_IDS: Final = 50_000_000
"""Most ids, of blocks or of tokens, in all prompts of a trace: some 400 MB."""

Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
PromptTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e15)]
BlockId = Annotated[int, Meta(ge=0)]  # msgspec has no bound of 64 bits; Budget looks at it


class TracedRequest(Struct, frozen=True, kw_only=True):
    """One request of a trace.

    ``where`` is its place in the file, for error messages. ``blocks`` are the ids of its prompt's
    blocks, of which the last may be partial; equal ids at the same place, after equal ones, mean
    equal tokens. They are None where the trace tells lengths alone. ``output_blocks`` are the
    further blocks that prompt and answer fill together, if known, and ``token_ids`` the prompt.

    ``at_s`` is its recorded arrival, in seconds from the start of the trace. With ``think_s`` it is
    sent that long after the request before it in its session, and all of ``after``, have ended;
    ``after`` names requests by their ``id``. ``session`` is None where the trace does not tell it.
    ``pause`` says what its context waited for before it.
    """

    where: str
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] | None = None
    output_blocks: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    at_s: float | None = None
    think_s: float | None = None
    session: str | int | None = None
    id: str | None = None
    after: tuple[str, ...] = ()
    role: str | None = None
    pause: PauseCause = "person"


class Trace(Struct, frozen=True, kw_only=True):
    """All requests of a trace, in the order of the file.

    ``format`` names the workload in results. Requests without a session stand in the order of their
    arrival, and an awaited request stands before the one that waits for it, so no wait is endless.
    """

    format: str
    block_size: int
    requests: tuple[TracedRequest, ...]
    remarks: tuple[str, ...] = ()


class Budget:
    """What a trace may take of memory, where each prompt of a session holds those before it."""

    def __init__(self) -> None:
        self._requests = self._ids = 0

    def take(self, where: str, ids: Sequence[int] = ()) -> None:
        """Count a request with its ids.

        Raises:
            ConfigError: the trace has more than it may, or an id has more than 64 bits.
        """
        self._requests += 1
        self._ids += len(ids)
        if ids and (largest := max(ids)) >> 64:
            raise ConfigError(f"{where}: got the id {largest:.6g}, expected at most 64 bits")
        for got, most, what in (
            (self._requests, MAX_REQUESTS, "requests"),
            (self._ids, MAX_IDS, "ids in their prompts"),
        ):
            if got > most:
                raise ConfigError(
                    f"{where}: got more than {most:,} {what} up to here, expected fewer in all; "
                    "--first reads fewer"
                )
