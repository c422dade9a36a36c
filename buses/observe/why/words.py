"""The phrases that a story is told in: reason codes, grounds, spans of time.

It knows what the codes of docs/protocol.md mean, and nothing of how a story is put together.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final

from hear.buses.observe.why.facts import Passed, Story

WORDS: Final = {
    "malformed": "it could not be read",
    "unsupported_control": "this engine does not offer it",
    "wrong_engine": "it named another engine",
    "deadline_passed": "it came after its deadline",
    "overloaded": "the engine had as many open operations as it can keep",
    "stale_version": "the engine has seen a newer version of the context",
    "outranked": "another policy's control prevailed",
    "renewed": "a later control of the same policy took over",
    "released": "it was released",
    "no_blocks": "the context has no full block to keep",
    "replaced": "a later control of the same policy took over before it took hold",
    "request_gone": "the request had ended",
    "deadline": "its deadline passed before the effect was there",
    "cancelled": "it was cancelled",
    "withdrawn": "the policy left",
    "no_answer": "the engine never answered",
    "unknown_context": "the engine has never served this context",
    "not_resident": "no tier holds the blocks",
    "no_room": "the tier cannot hold so many blocks",
    "yielded": "service needed the room",
    "already_running": "the request had left the queue",
    "unknown_mode": "the engine has none of the modes",
    "not_this_engine": "the engine is none of the targets",
    "unknown_tier": "the engine has no such tier",
    "lease_too_long": "longer than the engine grants",
    "engine_stopped": "the engine was stopped",
    "engine_restarted": "the engine restarted",
    "engine_error": "the engine failed at it",
    "cannot_promise": "the engine could do it only as a preference",
    "in_use": "a running request uses the blocks",
    "exclusive_tier": "the tier holds no copies of what a faster one holds",
    "expired": "it ran out",
    "protected": "the request left the queue after its bound had run out",
    "too_long": "it is longer than the engine can hold",
    "client_gone": "its client went away",
}
"""The reason codes of docs/protocol.md, section 11, in words."""

_GROUNDS: Final = {
    "earlier": "came earlier",
    "held": "went while it was held",
    "untold": "went first for a reason that was not told",
}
_NAMED: Final = 5
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")


def in_words(code: str) -> str:
    """A reason code in words; one that is not known stands for itself."""
    head, _, rest = code.partition(":")
    words = WORDS.get(head)
    if words is None:
        return code
    return f"{words} ({rest.strip()})" if rest.strip() else words


def span(seconds: float) -> str:
    """A span of time, with as many places as one can use."""
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def when(story: Story, time_s: float) -> str:
    """A time, counted from the origin of the story."""
    return f"{time_s - story.origin_s:+.2f} s"


def plural(count: int, what: str, many: str = "") -> str:
    """A count and what is counted."""
    return f"{count:,} {what if count == 1 else many or what + 's'}"


def blocks_of(count: int) -> str:
    """A count of blocks."""
    return plural(count, "block")


def some_of(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    some = ", ".join(names[:_NAMED])
    return some + (f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else "")


def time_of_day(story: Story) -> str:
    """When the story begins, on the clock of the bus."""
    if story.clock != "unix":
        return f"{story.origin_s:.3f} s of virtual time"
    try:
        moment = datetime.fromtimestamp(story.origin_s).astimezone()
    except (OverflowError, ValueError, OSError):  # no time that a calendar knows
        return f"{story.origin_s:.3f} s"
    return moment.isoformat(" ", "milliseconds")


def grounds_of(passed: Iterable[Passed]) -> Iterator[str]:
    """On what grounds they went first: for each how many, and the words for it."""
    counts: Counter[tuple[str, str]] = Counter()
    whys: dict[tuple[str, str], dict[str, None]] = {}
    for other in passed:
        counts[other.ground, other.by] += 1
        if other.why:
            whys.setdefault((other.ground, other.by), {})[other.why] = None
    for (ground, by), count in counts.most_common():
        who = by or "a policy that was not heard"
        words = {
            "priority": f"{'was' if count == 1 else 'were'} put ahead by {who}",
            "put_back": f"went ahead as {who} had put it back",
            "protected": f"{'was' if count == 1 else 'were'} protected by {who}",
        } | _GROUNDS
        if ground == "held" and by:
            words["held"] = f"went while {by} held it"
        reasons = _in_one(whys.get((ground, by), ()))
        yield f"{count:,} {words[ground]}" + (f" ({reasons})" if reasons else "")


def _in_one(reasons: Iterable[str]) -> str:
    """Reasons that differ in a number only are told as one, with the range of that number."""
    alike: dict[str, list[list[str]]] = {}
    for reason in reasons:
        alike.setdefault(_NUMBER.sub("\0", reason), []).append(_NUMBER.findall(reason))
    told = []
    for shape, numbers in alike.items():
        text = shape
        for column in zip(*numbers, strict=True):
            low, high = min(column, key=float), max(column, key=float)
            text = text.replace("\0", low if low == high else f"{low} to {high}", 1)
        told.append(text)
    return "; ".join(told[:2]) + ("; ..." if len(told) > 2 else "")
