"""What was served while ``hear record`` listened, as a workload to serve again.

Contexts become sessions. In the closed loop the first turn of each is sent at its recorded time,
and each further one as long after the end of the turn before it as it was (its think time); in the
open loop all are sent at their recorded times. What a request was is ``requests_heard``'s to know.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from hear.blocks import HASH_BYTES, unpack
from hear.codec import open_body
from hear.errors import ConfigError, RemoteProtocolError
from hear.harnesses.eval.report.metrics import percentile
from hear.harnesses.eval.workloads.requests_heard import HeardRequest, RequestsHeard
from hear.harnesses.eval.workloads.workload import Session, Turn, Workload
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    CapabilitiesReported,
    CostsReported,
    ResidencyChanged,
)
from hear.recording import Heard, opened

SUFFIX: Final = ".hear"
_SHOWN: Final = 8  # tenants that an error lists
_APART_S: Final = 1e-6
_SETTLED_S: Final = 1.0  # an engine may report what it stored a moment after the request has ended


class Recorded(Struct, frozen=True, kw_only=True):
    """A workload from a recording, and what else the recording told.

    ``engines`` and ``costs`` are what engines said of themselves; ``remarks`` say in words what
    could not be used and what differs; ``as_served`` sums up how it went as it was recorded.
    """

    workload: Workload
    engines: dict[str, CapabilitiesReported]
    costs: dict[str, CostsReported]
    remarks: tuple[str, ...]
    as_served: str


def load(
    path: Path,
    *,
    loop: Literal["closed", "open"] = "closed",
    max_tokens: int | None = None,
    tenant: str | None = None,
) -> Recorded:
    """Make a workload of the requests of one tenant in a recording.

    Requests of more than ``max_tokens`` are left out. A tenant need be named only where there are
    several.

    Raises:
        ConfigError: this is no recording, it holds no request that can be served again, or requests
            of several tenants.
    """
    of_tenants: dict[str, RequestsHeard] = {}
    with opened(path) as recording:
        for record in recording:
            if isinstance(record, Heard):
                whose = of_tenants.setdefault(record.envelope.tenant, RequestsHeard())
                whose.hear(record.envelope)
        tail = recording.tail()
    tenant = _tenant(path, {name for name, h in of_tenants.items() if h.requests}, tenant)
    heard = of_tenants.get(tenant, RequestsHeard())
    block_size = _block_size(heard.requests.values())
    usable, remarks = _choose(heard.requests.values(), block_size, max_tokens)
    if not usable:
        why = f" ({'; '.join(remarks)})" if remarks else ""
        raise ConfigError(f"{path}: holds no request that can be served again{why}")
    contexts: dict[str, list[HeardRequest]] = {}
    for request in _in_order(usable):
        contexts.setdefault(request.context or f"request {request.id}", []).append(request)
    overlapping = sum(
        after.sent_s < before.ended_s
        for turns in contexts.values()
        for before, after in pairwise(turns)
    )
    if overlapping and loop == "closed":
        remarks.append(
            f"{overlapping} came before the turn before them had ended, and now follow it"
        )
    if len(heard.engines) > 1:
        remarks.append(f"it is of {len(heard.engines)} engines")
    others = sum(len(h.requests) for name, h in of_tenants.items() if name != tenant)
    if others:
        remarks.append(f"it is without {others} requests of other tenants")
    if tail:
        remarks.append(tail)
    return Recorded(
        workload=_workload(path, tenant, contexts, block_size, loop),
        engines=heard.engines,
        costs=heard.costs,
        remarks=tuple(remarks),
        as_served=_as_served(usable),
    )


def _tenant(path: Path, tenants: set[str], chosen: str | None) -> str:
    """Whose requests are to be served again: their names and hashes mean nothing to others."""
    if chosen is not None:
        return chosen
    if len(tenants) > 1:
        told = ", ".join(f"{name!r:.80}" for name in sorted(tenants)[:_SHOWN])
        raise ConfigError(
            f"{path}: holds requests of {len(tenants)} tenants: {told}; choose one with --tenant"
        )
    return next(iter(tenants), DEFAULT_TENANT)


# -- which requests ------------------------------------------------------------------------------


def _block_size(requests: Iterable[HeardRequest]) -> int:
    sizes = Counter(r.described.block_size for r in requests if r.described is not None)
    sizes.pop(0, None)
    return sizes.most_common(1)[0][0] if sizes else 0


def _choose(
    requests: Iterable[HeardRequest], block_size: int, max_tokens: int | None
) -> tuple[list[HeardRequest], list[str]]:
    """The requests that can be served again, and in words why the others cannot."""
    left: Counter[str] = Counter()
    usable = []
    for request in requests:
        why = _unusable(request, block_size, max_tokens)
        if why:
            left[why] += 1
        else:
            usable.append(request)
    if not left:
        return usable, []
    reasons = ", ".join(f"{count} {why}" for why, count in left.most_common())
    total = left.total() + len(usable)
    return usable, [f"{left.total()} of {total} requests are left out: {reasons}"]


def _in_order(requests: list[HeardRequest]) -> list[HeardRequest]:
    """The requests as they came to their engines.

    What came at the same moment comes again in the order in which it was heard: it gets a time of
    its own, but for what was sent in the very moment in which the turn before it had ended.
    """
    for request in requests:
        arrived_s = request.arrived_s
        request.sent_s = request.described_s if arrived_s is None else arrived_s
    requests.sort(key=lambda request: request.sent_s)
    last_s = -inf
    ended_s: dict[str | None, float] = {}
    for request in requests:
        if request.context is None or ended_s.get(request.context) != request.sent_s:
            request.sent_s = last_s = max(request.sent_s, last_s + _APART_S)
        ended_s[request.context] = request.ended_s
    return requests


def _unusable(request: HeardRequest, block_size: int, max_tokens: int | None) -> str:
    described, outcome = request.described, request.outcome
    if outcome is None:
        return "without an outcome"
    if outcome.status != "completed":
        return "rejected" if outcome.status == "rejected" else "failed"
    if described is None:
        return "not described"
    if not request.prompt_tokens or not outcome.output_tokens:
        return "of unknown length"
    num_bytes = len(described.prefix_hashes)
    if not block_size or (not num_bytes and request.prompt_tokens >= block_size):
        return "without block hashes"
    if described.block_size != block_size:
        return f"with blocks of other than {block_size} tokens"
    if num_bytes % HASH_BYTES or num_bytes // HASH_BYTES > request.prompt_tokens // block_size:
        return "with block hashes that do not fit their prompt"
    if max_tokens is not None and request.prompt_tokens + outcome.output_tokens > max_tokens:
        return f"of more than {max_tokens} tokens"
    return ""


def _as_served(requests: Sequence[HeardRequest]) -> str:
    ttfts = sorted(r.outcome.queue_s + r.outcome.prefill_s for r in requests if r.outcome)
    reused = sum(sum(r.outcome.reused_tokens.values()) for r in requests if r.outcome)
    prompt = sum(r.prompt_tokens for r in requests)
    return (
        f"as recorded, {len(requests):,} requests: TTFT P50 {percentile(ttfts, 50):.1f} s, "
        f"P95 {percentile(ttfts, 95):.1f} s, max {ttfts[-1]:.1f} s; "
        f"{100 * reused / prompt:.1f}% of all prompt tokens reused"
    )


# -- the workload --------------------------------------------------------------------------------


def _workload(
    path: Path,
    tenant: str,
    contexts: dict[str, list[HeardRequest]],
    block_size: int,
    loop: Literal["closed", "open"],
) -> Workload:
    written = _written(path, tenant, contexts.values())
    begun_s = min(turns[0].sent_s for turns in contexts.values())
    sessions = []
    for context, requests in contexts.items():
        turns: list[Turn] = []
        for before, request, after in zip(
            [None, *requests[:-1]], requests, [*requests[1:], None], strict=True
        ):
            assert request.described is not None
            assert request.outcome is not None
            timed = before is None or loop == "open"
            turns.append(
                Turn(
                    prompt_tokens=request.prompt_tokens,
                    output_tokens=request.outcome.output_tokens,
                    prompt_hashes=tuple(unpack(request.described.prefix_hashes)),
                    output_hashes=_stored_by(request, after, written),
                    at_s=request.sent_s - begun_s if timed else None,
                    think_s=max(request.sent_s - before.ended_s, 0.0) if before else 0.0,
                    pause=before.pause if before else "person",
                )
            )
        sessions.append(
            Session(id=context, turns=tuple(turns), start_s=requests[0].sent_s - begun_s)
        )
    return Workload(name=path.stem, block_size=block_size, sessions=tuple(sessions))


def _continued(request: HeardRequest, after: HeardRequest | None) -> Iterator[int]:
    """The blocks that the turn after it names where its prompt and its output would be."""
    if after is None or not (request.described and request.outcome and after.described):
        return
    mine, theirs = unpack(request.described.prefix_hashes), unpack(after.described.prefix_hashes)
    if list(theirs[: len(mine)]) == list(mine):
        tokens = request.prompt_tokens + request.outcome.output_tokens
        yield from theirs[len(mine) : tokens // request.described.block_size]


def _stored_by(
    request: HeardRequest, after: HeardRequest | None, written: dict[int, float]
) -> tuple[int, ...]:
    """Those of them that were stored by the time it had ended, so that it has filled them."""
    blocks = []
    for block in _continued(request, after):
        if written.get(block, inf) > request.ended_s + _SETTLED_S:
            break
        blocks.append(block)
    return tuple(blocks)


def _written(
    path: Path, tenant: str, contexts: Iterable[Sequence[HeardRequest]]
) -> dict[int, float]:
    """When an engine first stored each of the blocks that an output may have filled."""
    wanted = {
        block
        for turns in contexts
        for request, after in pairwise(turns)
        for block in _continued(request, after)
    }
    first_s: dict[int, float] = {}
    if not wanted:
        return first_s
    with opened(path) as recording:
        for record in recording:
            if not isinstance(record, Heard) or record.envelope.kind != "residency_changed":
                continue
            if record.envelope.tenant != tenant:
                continue
            try:
                message = open_body(record.envelope)
                changes = message.changes if isinstance(message, ResidencyChanged) else ()
                for change in changes:
                    if isinstance(change, BlocksStored):
                        for block in wanted.intersection(unpack(change.prefix_hashes)):
                            first_s.setdefault(block, record.envelope.time_s)
            except RemoteProtocolError:
                continue
    return first_s
