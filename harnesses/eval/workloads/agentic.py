"""Recorded sessions of a coding agent as a workload: long contexts, tools, and sub-agents.

Knows what of a recording is fixed (lengths, prefixes, gaps, which sub-agents a turn waited for)
and what is drawn, namely when sessions start: the recording says nothing of that.

Where the replay departs from the recording:

* Block ids are unique within one session only, so sessions share no block here, although in
  truth they share the tools' and the system prompt. Sub-agents of one session do share theirs.
* Turns of more than ``max_tokens`` are left out, and with them sessions of which nothing is left.
* No gap is longer than ``max_think_s``; the recording has gaps of hours.
* Requests of one list follow one another, also the few that overlapped.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import structs

from hear.blocks import HASH_SCHEME, chain
from hear.codec import UNREADABLE
from hear.errors import ConfigError
from hear.harnesses.eval.workloads.agentic_trace import PromptBlocks, Recording, Request, SubAgent
from hear.harnesses.eval.workloads.arrivals import fitting_rate, poisson_arrivals
from hear.harnesses.eval.workloads.lines import (
    File,
    files_of,
    raw_lines,
    read_document,
    read_lines,
    shipped,
)
from hear.harnesses.eval.workloads.workload import LeftOut, Session, Turn, Workload

SHIPPED = "agentic_sample.jsonl.gz"
MAIN = "main"

RATE = 0.007
"""Sessions of the shipped sample that start in a second."""

_E = TypeVar("_E", bound=Request | SubAgent)


def load(
    path: Path | None = None,
    *,
    rate: float | None = None,
    seed: int = 0,
    block_size: int = 512,
    max_tokens: int = 131_072,
    max_think_s: float = 60.0,
) -> Workload:
    """Load agentic sessions, of a file or a folder of files; without a path, the shipped sample.

    Sessions start by a Poisson process of ``rate`` a second, drawn from ``seed``, in the order of
    the file; without a rate, as often as makes the work of a second that of the shipped sample at
    ``RATE``, since sessions of other files may be many times as long. The sources' blocks (of 64
    tokens) are grouped to ``block_size``, a multiple of theirs; larger ones make the replay faster.
    ``max_tokens`` bounds prompt and output together and ``max_think_s`` each gap before a turn or a
    sub-agent; the defaults suit an engine that holds some 350,000 tokens, which that rate keeps
    loaded without drowning it.

    A turn waits for the sub-agents that had ended before it in the recording and that no earlier
    turn waited for; its think time is then what was left of the gap.

    Raises:
        ConfigError: the file, one of its lines or a parameter cannot be used.
    """
    source = shipped(SHIPPED) if path is None else path
    if not max_think_s >= 0:
        raise ConfigError(f"max_think_s: got {max_think_s:g}, expected at least 0")
    families: list[list[Session]] = []
    found = _Found()
    seen: dict[str, str] = {}
    for place, recording in _recordings(source):
        where = f"{place}: {recording.id}"
        if recording.id in seen:
            raise ConfigError(f"{where}: got a session that {seen[recording.id]} has already")
        seen[recording.id] = place
        if block_size < 1 or block_size % recording.block_size:
            raise ConfigError(
                f"{where}: block_size: got {block_size}, expected a multiple of the session's "
                f"{recording.block_size}"
            )
        family = _Family(where, recording, block_size, max_tokens, max_think_s).sessions()
        found.note(recording, family)
        if family:
            families.append(family)
    if not families:
        raise ConfigError(
            f"{source}: none of the {len(seen)} sessions has a turn of at most {max_tokens} tokens"
            if seen
            else f"{source}: got no session at all, expected one JSON object a line"
        )
    sessions: list[Session] = []
    if rate is None:
        rate = RATE if path is None else fitting_rate(families, block_size)
    arrivals = poisson_arrivals(len(families), rate, seed)
    for start_s, (main, *subs) in zip(arrivals, families, strict=True):
        sessions += [structs.replace(main, start_s=start_s), *subs]
    return Workload(
        name="agentic",
        block_size=block_size,
        hash_scheme=HASH_SCHEME,
        sessions=tuple(sessions),
        left_out=found.left_out(sessions, max_tokens),
        remarks=(f"{rate:.4g} sessions start in a second",),
    )


def _recordings(source: File) -> Iterator[tuple[str, Recording]]:
    """The recordings of a file with one a line, or of a folder of files that are one each."""
    for path in files_of(source):
        _, line = next(raw_lines(path), (0, b""))
        if _ends(line):
            for number, recording in read_lines(path, Recording):
                yield f"{path}:{number}", recording
        else:
            yield str(path), read_document(path, Recording)


def _ends(line: bytes) -> bool:
    """Whether a first line is a whole object, or nothing."""
    try:
        msgspec.json.decode(line or b"{}", type=msgspec.Raw)
    except UNREADABLE:
        return False
    return True


class _Found:
    """What the recordings had, before anything was left out."""

    def __init__(self) -> None:
        self._turns = self._sessions = self._prompt_tokens = 0

    def note(self, recording: Recording, family: Sequence[Session]) -> None:
        """Count one recording, of which ``family`` is left."""
        lists: list[Sequence[Request]] = [
            [entry for entry in recording.requests if not isinstance(entry, SubAgent)]
        ]
        lists += [entry.requests for entry in recording.requests if isinstance(entry, SubAgent)]
        self._sessions += sum(map(bool, lists)) - len(family)
        for requests in lists:
            self._turns += len(requests)
            self._prompt_tokens += sum(request.tokens_in for request in requests)

    def left_out(self, sessions: Sequence[Session], max_tokens: int) -> tuple[LeftOut, ...]:
        """What of it is in none of these sessions."""
        turns = [turn for session in sessions for turn in session.turns]
        if len(turns) == self._turns:
            return ()
        kept = sum(turn.prompt_tokens for turn in turns)
        return (
            LeftOut(
                why=f"of more than {max_tokens:,} tokens each, or of sub-agents of such sessions",
                turns=self._turns - len(turns),
                sessions=self._sessions,
                prompt_tokens=self._prompt_tokens - kept,
                of_prompt_tokens=self._prompt_tokens,
            ),
        )


class _Family:
    """One recording, on its way to a session and those of its sub-agents."""

    def __init__(
        self,
        where: str,
        recording: Recording,
        block_size: int,
        max_tokens: int,
        max_think_s: float,
    ) -> None:
        self._where = where
        self._recording = recording
        self._group = block_size // recording.block_size
        self._max_tokens = max_tokens
        self._max_think_s = max_think_s
        self._root = chain(None, recording.id.encode())

    def sessions(self) -> list[Session]:
        """The main session, then its sub-agents; nothing if the main one has no turn left."""
        blocks = self._blocks()
        turns: list[Turn] = []
        subs: list[Session] = []
        awaited: list[tuple[str, float]] = []  # sub-agents no turn has waited for, and their ends
        agents: set[str] = set()
        before: Request | None = None
        for where, entry in _in_order(self._where, self._recording.requests):
            if isinstance(entry, SubAgent):
                if entry.agent_id in agents:
                    raise ConfigError(
                        f"{where}: agent_id: got {entry.agent_id!r} again, "
                        "expected one for each sub-agent"
                    )
                agents.add(entry.agent_id)
                gap_s = entry.t_s - (before.end_s if before is not None else 0.0)
                sub = self._sub_agent(where, entry, len(turns), gap_s)
                if sub is not None:
                    subs.append(sub)
                    awaited.append((sub.id, entry.end_s))
                continue
            hashes = blocks.next(where, entry)
            if self._fits(entry):
                ended = [(name, end_s) for name, end_s in awaited if end_s <= entry.t_s]
                awaited = [(name, end_s) for name, end_s in awaited if end_s > entry.t_s]
                turns.append(self._turn(entry, before, hashes, ended))
            before = entry
        if not turns:
            return []
        return [Session(id=self._recording.id, turns=tuple(turns), role=MAIN), *subs]

    def _sub_agent(
        self, where: str, entry: SubAgent, after_turns: int, gap_s: float
    ) -> Session | None:
        blocks = self._blocks()
        turns: list[Turn] = []
        before: Request | None = None
        for its, request in _in_order(where, entry.requests):
            hashes = blocks.next(its, request)
            if self._fits(request):
                turns.append(self._turn(request, before, hashes))
            before = request
        if not turns:
            return None
        return Session(
            id=f"{self._recording.id}/{entry.agent_id}",
            turns=tuple(turns),
            start_s=self._gap(gap_s),
            role=entry.subagent_type,
            parent=self._recording.id,
            after_turns=after_turns,
        )

    def _blocks(self) -> PromptBlocks:
        return PromptBlocks(self._root, self._recording.block_size, self._group)

    def _fits(self, request: Request) -> bool:
        return request.tokens_in + max(1, request.tokens_out) <= self._max_tokens

    def _gap(self, gap_s: float) -> float:
        return min(max(0.0, gap_s), self._max_think_s)

    def _turn(
        self,
        request: Request,
        before: Request | None,
        hashes: tuple[int, ...],
        ended: Sequence[tuple[str, float]] = (),
    ) -> Turn:
        """One turn; ``before`` is the request before it in the recording, left out or not."""
        think_s = 0.0
        if before is not None:
            think_s = request.t_s - before.end_s
            if request.think_time_s is not None:
                # After streamed requests, whose length the trace does not tell, the recorded
                # think time reaches back over them: the gap to the last one bounds it.
                think_s = min(request.think_time_s, request.t_s - before.t_s)
        if ended:
            free_s = max(end_s for _, end_s in ended)
            think_s = request.t_s - max(free_s, before.end_s if before is not None else 0.0)
        return Turn(
            prompt_tokens=request.tokens_in,
            output_tokens=max(1, request.tokens_out),
            prompt_hashes=hashes,
            think_s=self._gap(think_s),
            waits_for=tuple(name for name, _ in ended),
            pause="tool" if before is not None and before.stop == "tool_use" else "person",
        )


def _in_order(where: str, entries: Sequence[_E]) -> Iterator[tuple[str, _E]]:
    """Each entry with its place for error messages, in time that never runs backwards."""
    last_s = 0.0
    for index, entry in enumerate(entries):
        its = f"{where}: requests[{index}]"
        if entry.t_s < last_s:
            raise ConfigError(
                f"{its}: t: got {entry.t_s:g} after {last_s:g}, "
                "expected times that never run backwards"
            )
        last_s = entry.t_s
        yield its, entry
