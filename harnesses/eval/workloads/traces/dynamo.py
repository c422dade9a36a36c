"""Dynamo's request traces, ``dynamo.request.trace.v1``: what its frontend records of each request.

Source: repository ai-dynamo/dynamo, its reference of request traces. A file may hold the records
themselves or, as its sinks write them, each as the ``event`` of an object. Requests of one
``session_id`` follow one another. A sub-agent's session begins after the request of its parent that
was sent last before it, and the parent's next request after its end waits for it: the records tell
parents, and not which request began or awaited whom.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct, structs

from hear.errors import ConfigError
from hear.harnesses.eval.workloads.lines import File, read_rows
from hear.harnesses.eval.workloads.traces.trace import (
    BlockId,
    Budget,
    Milliseconds,
    Name,
    PromptTokens,
    Tokens,
    Trace,
    TracedRequest,
)

NAME = "dynamo"
SCHEMA: Final = "dynamo.request.trace.v1"
TOOLS: Final = ("tool_end", "tool_error")
BLOCK_SIZE: Final = 512
"""Of a trace without hashes."""


class Context(Struct, frozen=True, kw_only=True):
    """Whose request it is; older records tell trajectories, of which a session may have several."""

    session_id: Name | None = None
    parent_session_id: Name | None = None
    trajectory_id: Name | None = None
    parent_trajectory_id: Name | None = None

    @property
    def name(self) -> str | None:
        """Of what follows one another."""
        return self.session_id if self.trajectory_id is None else self.trajectory_id

    @property
    def parent(self) -> str | None:
        """What began it."""
        return self.parent_session_id if self.trajectory_id is None else self.parent_trajectory_id


class Prompt(Struct, frozen=True, kw_only=True):
    """The blocks of a prompt."""

    trace_block_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    input_length: PromptTokens
    input_sequence_hashes: tuple[BlockId, ...]


class Request(Struct, frozen=True, kw_only=True):
    """One request, when it has ended."""

    request_received_ms: Milliseconds | None = None
    total_time_ms: Milliseconds | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    replay: Prompt | None = None


class Record(Struct, frozen=True, kw_only=True):
    """One record."""

    schema: str = ""
    event_type: str = ""
    event_time_unix_ms: Milliseconds | None = None
    agent_context: Context | None = None
    request: Request | None = None


class Line(Record, frozen=True, kw_only=True):
    """A record, or one that a sink has wrapped."""

    event: Record | None = None


class _Ended(NamedTuple):
    """A request with its times, in milliseconds."""

    start_ms: float
    end_ms: float
    where: str
    session: str | None
    parent: str | None
    request: Request


def read(files: Sequence[File], first: int | None = None) -> Trace:
    """Read a trace of one file or several, as its sinks rotate them.

    Raises:
        ConfigError: a file or a line cannot be used, or blocks are of several sizes.
    """
    ended: list[_Ended] = []
    tools: defaultdict[str, list[float]] = defaultdict(list)  # when tools of a session ended
    budget = Budget()
    for where, line in read_rows(files, Line, first):
        record = line if line.event is None else line.event
        name = None if record.agent_context is None else record.agent_context.name
        if record.event_type == "request_end" and record.request is not None:
            if record.schema != SCHEMA:
                raise ConfigError(
                    f"{where}: schema: got {record.schema!r:.80}, expected {SCHEMA!r}"
                )
            prompt = record.request.replay
            budget.take(where, () if prompt is None else prompt.input_sequence_hashes)
            ended.append(_timed(where, record, record.request))
        elif record.event_type in TOOLS and name is not None and record.event_time_unix_ms:
            tools[name].append(record.event_time_unix_ms)
    if not ended:
        raise ConfigError(f"{files[0]}: got no record of a request_end, expected one at least")
    ended.sort(key=lambda each: each.start_ms)
    sizes = {each.request.replay.trace_block_size for each in ended if each.request.replay}
    if len(sizes) > 1:
        raise ConfigError(
            f"{files[0]}: trace_block_size: got {', '.join(map(str, sorted(sizes)))}, "
            "expected one for all requests"
        )
    block_size = sizes.pop() if sizes else BLOCK_SIZE
    bare = sum(each.request.replay is None for each in ended)
    remarks = (f"{bare:,} requests tell no blocks, so they have none in common",) if bare else ()
    return Trace(
        format=NAME,
        block_size=block_size,
        requests=tuple(_tied(ended, _requests(ended, block_size), tools)),
        remarks=remarks,
    )


def _timed(where: str, record: Record, request: Request) -> _Ended:
    start, end, took = request.request_received_ms, record.event_time_unix_ms, request.total_time_ms
    if start is None and end is not None:
        start = end - (took or 0.0)
    if start is None:
        raise ConfigError(
            f"{where}: got no request_received_ms and no event_time_unix_ms, expected one of them"
        )
    if end is None:
        end = start + (took or 0.0)
    context = record.agent_context or Context()
    return _Ended(start, max(start, end), where, context.name, context.parent, request)


def _requests(ended: Sequence[_Ended], block_size: int) -> list[TracedRequest]:
    """The requests, each by itself."""
    begun_ms = ended[0].start_ms
    requests = []
    for number, each in enumerate(ended):
        prompt = each.request.replay
        tokens = each.request.input_tokens if prompt is None else prompt.input_length
        if not tokens:
            raise ConfigError(
                f"{each.where}: got no length of its prompt, expected replay or input_tokens"
            )
        if prompt is not None:
            blocks = -(-tokens // block_size)
            if len(prompt.input_sequence_hashes) not in (tokens // block_size, blocks):
                raise ConfigError(
                    f"{each.where}: input_sequence_hashes: got "
                    f"{len(prompt.input_sequence_hashes)}, expected {blocks}, one for each "
                    f"{block_size} of the {tokens} tokens"
                )
        requests.append(
            TracedRequest(
                where=each.where,
                prompt_tokens=tokens,
                output_tokens=max(1, each.request.output_tokens or 1),
                blocks=None if prompt is None else prompt.input_sequence_hashes,
                at_s=(each.start_ms - begun_ms) / 1000,
                session=each.session,
                id=str(number),
            )
        )
    return requests


def _tied(
    ended: Sequence[_Ended],
    requests: Sequence[TracedRequest],
    tools: dict[str, list[float]],
) -> list[TracedRequest]:
    """The requests with what they wait for, and how long after it."""
    places: defaultdict[str, list[int]] = defaultdict(list)  # the requests of each session
    parents: dict[str, str] = {}
    for place, each in enumerate(ended):
        if each.session is not None:
            places[each.session].append(place)
            if each.parent is not None:
                parents[each.session] = each.parent
    after: defaultdict[int, list[int]] = defaultdict(list)
    for child, parent in parents.items():
        its = places[child]
        launches = [place for place in places.get(parent, ()) if place < its[0]]
        if launches and parent != child:
            after[its[0]].append(launches[-1])
            end_ms = max(ended[place].end_ms for place in its)
            joins = (
                place
                for place in places[parent]
                if place > its[-1] and ended[place].start_ms >= end_ms
            )
            if (join := next(joins, None)) is not None:
                after[join].append(its[-1])
    tied = list(requests)
    for session, its in places.items():
        before: int | None = None
        for place in its:
            awaited = after[place] + ([] if before is None else [before])
            if awaited:
                free_ms = max(ended[each].end_ms for each in awaited)
                start_ms = ended[place].start_ms
                used_tools = any(free_ms <= at_ms <= start_ms for at_ms in tools.get(session, ()))
                tied[place] = structs.replace(
                    tied[place],
                    think_s=max(0.0, start_ms - free_ms) / 1000,
                    after=tuple(str(each) for each in after[place]),
                    role="subagent" if session in parents else None,
                    pause="tool" if used_tools else "person",
                )
            before = place
    return tied
