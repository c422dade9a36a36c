"""Which session each request of a trace belongs to, where the trace does not say.

A request continues a session if its prompt holds what only that session had: many requests share
the prompt of a system or the descriptions of tools, and such a beginning says nothing of who sent
them. What cannot be told apart is left unlinked: a turn too few changes what a replay shows less
than strangers who wait for each other.

This module knows lengths, times and block ids, and no format.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hear.harnesses.eval.workloads.traces.trace import TracedRequest

SessionRule = Literal["none", "told", "rebuilt"]
"""Where sessions are from: each request is one, the trace tells them, or ``rebuild``."""


class Rebuilt(NamedTuple):
    """``sessions`` numbers the session of each request, as they begin.

    ``links`` is how many requests continue another, and ``ambiguous`` how many could have, but for
    blocks that requests of other sessions hold as well.
    """

    sessions: list[int]
    links: int
    ambiguous: int


def rebuild(requests: Sequence[TracedRequest], block_size: int) -> Rebuilt:
    """Estimate the sessions of a trace, whose requests are in order of arrival and have blocks.

    Request B continues A if

    1. A came strictly earlier and has at least two full blocks,
    2. A's last full block is in B's prompt,
    3. B's prompt is longer than A's by half of A's answer or more: the answer is in it, perhaps
       trimmed or in fewer tokens,
    4. no other request continues A. Of all such A, the one with the deepest last full block is
       taken, then the latest;
    5. and A's last full block is in no prompt of another session that 1 to 4 give.

    Where 5 fails, B is ambiguous, and begins a session of its own.
    """
    before = _continued(requests, block_size)
    session_of: list[int] = []
    for index, link in enumerate(before):
        session_of.append(index if link is None else session_of[link[0]])
    shared = _shared_blocks(requests, session_of)
    sessions: list[int] = []
    begun = links = 0
    for link in before:
        if link is None or link[1] in shared:
            sessions.append(begun)
            begun += 1
        else:
            sessions.append(sessions[link[0]])
            links += 1
    candidates = sum(link is not None for link in before)
    return Rebuilt(sessions, links, candidates - links)


def _continued(requests: Sequence[TracedRequest], block_size: int) -> list[tuple[int, int] | None]:
    """Of each request the one that it continues by rules 1 to 4, and the block that says so."""
    # By its last full block, the requests that nothing has continued yet. Since an id stands for
    # its whole prefix, its place in B's prompt is its depth, and B's ids are gone through from
    # the deepest one upwards.
    open_ends: dict[int, list[int]] = defaultdict(list)
    before: list[tuple[int, int] | None] = []
    for index, request in enumerate(requests):
        before.append(_take(request, requests, open_ends))
        full = request.prompt_tokens // block_size
        if full >= 2:
            open_ends[(request.blocks or ())[full - 1]].append(index)
    return before


def _take(
    request: TracedRequest, requests: Sequence[TracedRequest], open_ends: dict[int, list[int]]
) -> tuple[int, int] | None:
    for block in reversed(request.blocks or ()):
        candidates = open_ends.get(block, [])
        for place in range(len(candidates) - 1, -1, -1):
            before = requests[candidates[place]]
            growth = request.prompt_tokens - before.prompt_tokens
            earlier = (before.at_s or 0.0) < (request.at_s or 0.0)
            if earlier and growth >= max(before.output_tokens / 2, 1):
                return candidates.pop(place), block
    return None


def _shared_blocks(requests: Sequence[TracedRequest], session_of: Sequence[int]) -> set[int]:
    """The blocks that requests of more than one session hold."""
    first: dict[int, int] = {}
    shared: set[int] = set()
    for request, session in zip(requests, session_of, strict=True):
        for block in request.blocks or ():
            if first.setdefault(block, session) != session:
                shared.add(block)
    return shared
