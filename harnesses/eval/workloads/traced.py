"""A trace as a workload: its window, its sessions, what is too long, and the hashes of its blocks.

Knows no format of a file (``hear.harnesses.eval.workloads.traces``); what is done with a turn that
arrives before its predecessor has ended is the runner's to say.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Final

from msgspec import structs

from hear.blocks import HASH_SCHEME, chain, chain_all, hash_tokens
from hear.errors import ConfigError
from hear.harnesses.eval.workloads.arrivals import fitting_rate, poisson_arrivals
from hear.harnesses.eval.workloads.sessions import SessionRule, rebuild
from hear.harnesses.eval.workloads.traces.trace import Trace, TracedRequest
from hear.harnesses.eval.workloads.workload import LeftOut, Session, Turn, Workload

THINK_MEAN_S: Final = 5.0
THINK_SD_S: Final = 1.0
"""Of pauses that a trace does not tell; those of the paper, appendix A.2."""

Name = int | str
"""Of a session: its number, or as the trace tells it."""


def make(
    trace: Trace,
    source: str,
    *,
    max_tokens: int,
    window: tuple[float, float] | None = None,
    layer: int = 0,
    sessions: SessionRule | None = None,
    whole_sessions: bool = False,
    rate: float | None = None,
    seed: int = 0,
    block_size: int | None = None,
) -> Workload:
    """Make a workload of a trace; ``source`` names it in errors.

    ``window`` keeps the turns that arrive from its first second up to, not including, its second
    one; ``Turn.at_s`` counts from its start. With ``whole_sessions`` it keeps the sessions that
    begin in it, with all their turns, and no others. Turns of more than ``max_tokens``, prompt and
    output together, are left out, the other turns of their sessions stay and are counted anew from
    1. A session keeps the number that it has in the whole trace, or the name.

    A ``layer`` above 0 is what that many windows later there is to lay over the first: the turns
    that arrive in that window, of the sessions that begin in it. So no two layers share a session.

    ``sessions`` says where they are from: the trace's own fields (``told``), ``sessions.rebuild``
    over all its requests, before window and length choose (``rebuilt``), or each request is one
    (``none``). Without it, what the trace tells is taken, and rebuilt where it tells nothing.

    Where a trace tells no times, sessions start by a Poisson process of ``rate`` a second drawn
    from ``seed``, or as often as keeps an engine busy (``arrivals.fitting_rate``), and a turn
    follows the one before it after a pause that is drawn as well.

    ``block_size``, a multiple of the trace's, makes one block of several of its own; a part of it
    makes several of one.

    Raises:
        ConfigError: a parameter cannot be used, nothing is left, the trace ends before the layer
            begins, or it does not tell what is to be told.
    """
    start, end = window if window is not None else (0.0, float("inf"))
    if not 0 <= start < end:
        raise ConfigError(f"window: got {start:g} to {end:g} s, expected 0 <= start < end")
    timed = any(request.at_s is not None for request in trace.requests)
    option, given, tells = ("rate", rate, "times") if timed else ("window", window, "no times")
    if given is not None:
        raise ConfigError(f"{source}: {option}: expected none, since the trace tells {tells}")
    numbers, remark = _sessions_of(source, trace, sessions)
    times = _times(trace.requests, numbers)
    if layer:
        start, end = start + layer * (end - start), end + layer * (end - start)
        if not start <= max(times):  # nor without a window, which leaves nothing to lay over it
            raise ConfigError(
                f"load: {source} ends after {max(times):g} s, expected at most {100 * layer}% of "
                f"its window{'' if window else ', the whole of it'}"
            )
    arrived = _arrived(numbers, times, (start, end), of_begun=bool(layer), whole=whole_sessions)
    if not arrived:
        raise ConfigError(
            f"{source}: window: got {start:g} to {end:g} s, in which no request arrives, "
            f"expected one within {min(times):g} to {max(times):g} s"
        )
    kept: dict[Name, list[int]] = {}
    for place in arrived:
        request = trace.requests[place]
        if request.prompt_tokens + request.output_tokens <= max_tokens:
            kept.setdefault(numbers[place], []).append(place)
    if not kept:
        raise ConfigError(
            f"{source}: max_tokens: got {max_tokens}, expected as many as the shortest of the "
            f"{len(arrived)} requests in the window has"
        )
    hashes = _Hashes(trace, source, block_size)
    at_s = [each - start for each in times] if timed else None
    made = list(_made(trace, kept, at_s, hashes, seed))
    remarks = [remark, *trace.remarks]
    if not timed:
        if rate is None:
            rate = fitting_rate([[session] for session in made], hashes.block_size)
        arrivals = poisson_arrivals(len(made), rate, seed)
        made = [structs.replace(one, start_s=s) for one, s in zip(made, arrivals, strict=True)]
        remarks.append(f"the trace tells no times: {rate:.4g} sessions start in a second")
    return Workload(
        name=trace.format,
        block_size=hashes.block_size,
        hash_scheme=HASH_SCHEME,
        sessions=tuple(made),
        left_out=_too_long(trace, numbers, arrived, kept, max_tokens),
        remarks=tuple(remarks),
    )


def _sessions_of(source: str, trace: Trace, rule: SessionRule | None) -> tuple[list[Name], str]:
    """Of each request its session, and how they are known."""
    requests = trace.requests
    told = any(request.session is not None for request in requests)
    if rule == "none":
        return list(range(len(requests))), "each request is a session"
    if rule != "rebuilt" and told:
        taken = {request.session for request in requests}
        fresh = (number for number in count() if number not in taken)
        names = [next(fresh) if each.session is None else each.session for each in requests]
        return names, "sessions as the trace tells them"
    if rule == "told":
        raise ConfigError(f"{source}: --sessions told: got no session fields, expected some")
    if any(request.blocks is None or request.at_s is None for request in requests):
        if rule == "rebuilt":
            raise ConfigError(
                f"{source}: --sessions rebuilt: got requests without times or blocks, expected both"
            )
        return list(range(len(requests))), "each request is a session, since the trace tells none"
    rebuilt = rebuild(requests, trace.block_size)
    return list(rebuilt.sessions), (
        f"sessions rebuilt: of {len(requests):,} requests in the trace {rebuilt.links:,} continue "
        f"another by blocks that no other session has, {rebuilt.ambiguous:,} that might were left "
        "by themselves"
    )


def _times(requests: Sequence[TracedRequest], numbers: Sequence[Name]) -> list[float]:
    """When each request arrives; without a time, as if those before it had taken none."""
    times: list[float] = []
    newest: dict[Name, float] = {}
    of_id: dict[str, float] = {}
    for request, session in zip(requests, numbers, strict=True):
        at_s = request.at_s
        if at_s is None:
            awaited = [of_id[name] for name in request.after]
            at_s = max([newest.get(session, 0.0), *awaited]) + (request.think_s or 0.0)
        times.append(at_s)
        newest[session] = at_s
        if request.id is not None:
            of_id[request.id] = at_s
    return times


def _arrived(
    numbers: Sequence[Name],
    times: Sequence[float],
    window: tuple[float, float],
    *,
    of_begun: bool,
    whole: bool,
) -> list[int]:
    """The places of the requests of a window: all, or those of the sessions that begin in it."""
    start, end = window
    begins: dict[Name, float] = {}
    places = []
    for place, (session, at_s) in enumerate(zip(numbers, times, strict=True)):
        begun_s = begins.setdefault(session, at_s)
        if (of_begun or whole) and not start <= begun_s < end:
            continue
        if whole or start <= at_s < end:
            places.append(place)
    return places


def _made(
    trace: Trace,
    kept: Mapping[Name, Sequence[int]],
    times: Sequence[float] | None,
    hashes: "_Hashes",
    seed: int,
) -> Iterator[Session]:
    """The sessions of the places that are kept."""
    ids = {name: name if isinstance(name, str) else f"{trace.format}-{name:05d}" for name in kept}
    turn_of: dict[str, tuple[str, int]] = {}
    for name, places in kept.items():
        for number, place in enumerate(places, 1):
            if (request_id := trace.requests[place].id) is not None:
                turn_of[request_id] = ids[name], number
    for name, places in kept.items():
        draw = random.Random(f"think {seed} {ids[name]}")
        turns: list[Turn] = []
        for place in places:
            request = trace.requests[place]
            after = tuple(turn_of[awaited] for awaited in request.after if awaited in turn_of)
            at_s, think_s = None, request.think_s
            if times is None and think_s is None and turns:
                think_s = max(0.0, draw.gauss(THINK_MEAN_S, THINK_SD_S))
            follows = bool(after) or (bool(turns) and (think_s is not None or request.at_s is None))
            if times is not None and not follows:
                at_s, think_s = times[place], None
            prompt_hashes, output_hashes = hashes.of(place, request)
            turns.append(
                Turn(
                    prompt_tokens=request.prompt_tokens,
                    output_tokens=request.output_tokens,
                    prompt_hashes=prompt_hashes,
                    output_hashes=output_hashes,
                    prompt_token_ids=request.token_ids,
                    at_s=at_s,
                    think_s=think_s or 0.0,
                    after=after,
                    pause=request.pause,
                )
            )
        yield Session(
            id=ids[name],
            turns=tuple(turns),
            start_s=turns[0].at_s or 0.0,
            role=trace.requests[places[0]].role,
        )


class _Hashes:
    """The hashes of prompts, in blocks of ``block_size`` tokens."""

    def __init__(self, trace: Trace, source: str, block_size: int | None) -> None:
        own = trace.block_size
        self.block_size = own if block_size is None else block_size
        fits = self.block_size > 0 and not (self.block_size % own and own % self.block_size)
        if not fits and any(request.blocks is not None for request in trace.requests):
            raise ConfigError(
                f"{source}: block size: got {self.block_size}, expected a multiple of the trace's "
                f"{own}, or what divides it"
            )
        self._format = trace.format
        self._group = max(1, self.block_size // own)
        self._parts = max(1, own // self.block_size)
        self._known: dict[tuple[int | None, tuple[int, ...]], int] = {}

    def of(self, place: int, request: TracedRequest) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a request's prompt, and of what its answer fills beyond it."""
        full = request.prompt_tokens // self.block_size
        if request.token_ids:
            return tuple(hash_tokens(request.token_ids, self.block_size)), ()
        if request.blocks is None:
            contents = (f"{self._format} {place} {block}".encode() for block in range(full))
            return tuple(chain_all(contents)), ()
        # Where what an answer fills is known, the blocks of its prompt are full ones alone.
        hashes = self._chained(self._divided((*request.blocks, *request.output_blocks)))
        return hashes[:full], hashes[full:] if request.output_blocks else ()

    def _divided(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids of the parts of blocks; a part is known by its block's id and its own place."""
        if self._parts == 1:
            return ids
        return [
            part for each in ids for part in range(each * self._parts, (each + 1) * self._parts)
        ]

    def _chained(self, ids: Sequence[int]) -> tuple[int, ...]:
        # An id may name its whole prefix already. To chain the ids all the same costs nothing, and
        # keeps the hashes sound where a trace uses one id under two prefixes.
        hashes: list[int] = []
        parent: int | None = None
        for end in range(self._group, len(ids) + 1, self._group):
            key = parent, tuple(ids[end - self._group : end])
            hashed = self._known.get(key)
            if hashed is None:
                hashed = self._known[key] = chain(parent, _content(key[1]))
            hashes.append(hashed)
            parent = hashed
        return tuple(hashes)


def _content(ids: Sequence[int]) -> bytes:
    # Ids of a trace have 64 bits; those of parts may have more, and made ones are below 0.
    sizes = (8 if 0 <= each < 1 << 64 else 16 for each in ids)
    pairs = zip(ids, sizes, strict=True)
    return b"".join(each.to_bytes(size, "little", signed=each < 0) for each, size in pairs)


def _too_long(
    trace: Trace,
    numbers: Sequence[Name],
    arrived: Sequence[int],
    kept: Mapping[Name, Sequence[int]],
    max_tokens: int,
) -> tuple[LeftOut, ...]:
    """What had more than ``max_tokens``."""
    places = [place for its in kept.values() for place in its]
    if len(places) == len(arrived):
        return ()
    tokens = sum(trace.requests[place].prompt_tokens for place in arrived)
    return (
        LeftOut(
            why=f"of more than {max_tokens:,} tokens each",
            turns=len(arrived) - len(places),
            sessions=len({numbers[place] for place in arrived} - kept.keys()),
            prompt_tokens=tokens - sum(trace.requests[place].prompt_tokens for place in places),
            of_prompt_tokens=tokens,
        ),
    )
