"""The story of a request in words: the main reason first, then the rest, then a table.

Everything here is made from the facts alone; what they do not say is not told.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final, NamedTuple

from hear.buses.why.facts import Asked, Evicted, Passed, Story

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


class Line(NamedTuple):
    """A row of the table: when (in seconds from the first that is known), who, what."""

    at_s: float
    who: str
    what: str


def in_words(code: str) -> str:
    """A reason code in words; one that is not known stands for itself."""
    head, _, rest = code.partition(":")
    words = WORDS.get(head)
    if words is None:
        return code
    return f"{words} ({rest.strip()})" if rest.strip() else words


def sentences(story: Story) -> list[str]:
    """The story; the first sentence tells the main reason."""
    return [_headline(story), *_details(story)]


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def _when(story: Story, time_s: float) -> str:
    return f"{time_s - story.origin_s:+.2f} s"


def _plural(count: int, what: str, many: str = "") -> str:
    return f"{count:,} {what if count == 1 else many or what + 's'}"


def _of_blocks(count: int) -> str:
    return _plural(count, "block")


# -- the main reason -----------------------------------------------------------------------------


def _headline(story: Story) -> str:
    name = story.request
    if story.status in ("rejected", "failed"):
        verb = "was rejected by" if story.status == "rejected" else "failed on"
        waited = f" after {_s(story.queue_s)} in the queue" if story.queue_s else ""
        return f"{name} {verb} {story.engine}{waited}: {in_words(story.reason) or 'no reason told'}."
    if not story.arrivals and not story.status:
        ready = story.ready[-1][1] if story.ready else True
        open_deps = [d for d, done in story.depends_on.items() if done is None]
        if open_deps:
            return f"{name} has not come to an engine: it waits for {_names(open_deps)}."
        state = "its harness has not sent it" if ready else "it was not said to be ready"
        return f"{name} was described and has not come to an engine: {state}."
    if story.queue_s is None or story.prefill_s is None or story.decode_s is None:
        return _unfinished(story)
    total = story.queue_s + story.prefill_s + story.decode_s
    longest = max(story.queue_s, story.prefill_s, story.decode_s)
    if longest == story.queue_s:
        return f"{name} waited {_s(story.queue_s)} of {_s(total)} in the queue of {story.engine}: " + (
            _why_it_waited(story)
        )
    if longest == story.prefill_s:
        return (
            f"{name} spent {_s(story.prefill_s)} of {_s(total)} before its first token: "
            + _why_it_computed(story)
        )
    each = story.decode_s / max(story.output_tokens - 1, 1)
    return (
        f"{name} spent {_s(story.decode_s)} of {_s(total)} writing its "
        f"{_plural(story.output_tokens, 'token')}, {1000 * each:.1f} ms each."
    )


def _unfinished(story: Story) -> str:
    begun_s = story.arrivals[-1][0] if story.arrivals else story.origin_s
    so_far = story.last_heard_s - begun_s
    if story.started_s is None:
        return (
            f"{story.request} waits in the queue of {story.engine}, for {_s(so_far)} so far: "
            + _why_it_waited(story)
        )
    waited = story.started_s - begun_s
    return (
        f"{story.request} is being served by {story.engine}, for "
        f"{_s(story.last_heard_s - story.started_s)} so far; it waited {_s(waited)} before: "
        + _why_it_waited(story)
    )


def _why_it_waited(story: Story) -> str:
    if story.passed:
        verb = "went before it"
        grounds = ", ".join(_grounds(story.passed))
        return f"{_plural(len(story.passed), 'request')} {verb}: {grounds}."
    if any(place.held for place in story.places):
        return f"it was held{_by_whom(story, 'hold')}."
    if story.crowd is not None and story.crowd.running:
        return f"none went before it, but {_crowd(story)}."
    return "none went before it, as far as was heard."


def _by_whom(story: Story, control: str) -> str:
    for asked in story.asked:
        if asked.control == control:
            return f" by {asked.source}" + (f" ({asked.reason})" if asked.reason else "")
    return ""


def _grounds(passed: Iterable[Passed]) -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    whys: dict[tuple[str, str], dict[str, None]] = {}
    for other in passed:
        ground = (other.ground, other.by)
        counts[ground] += 1
        if other.why:
            whys.setdefault(ground, {})[other.why] = None
    for (ground, by), count in counts.most_common():
        who = by or "a policy that was not heard"
        words = {
            "priority": f"{'was' if count == 1 else 'were'} put ahead by {who}",
            "put_back": f"went ahead as {who} had put it back",
            "protected": f"{'was' if count == 1 else 'were'} protected by {who}",
        } | _GROUNDS
        if ground == "held" and by:
            words["held"] = f"went while {by} held it"
        reasons = list(whys.get((ground, by), ()))
        some = "; ".join(reasons[:2]) + ("; ..." if len(reasons) > 2 else "")
        yield f"{count:,} {words[ground]}" + (f" ({some})" if some else "")


def _crowd(story: Story) -> str:
    crowd = story.crowd
    assert crowd is not None
    text = f"{_plural(crowd.running, 'request was', 'requests were')} in service as it came"
    if crowd.gpu_used is not None:
        text += f", using {100 * crowd.gpu_used:.0f}% of the GPU's blocks"
    return text


def _why_it_computed(story: Story) -> str:
    reused = sum(story.reused_tokens.values())
    computed = story.prompt_tokens - reused
    text = f"{computed:,} of its {story.prompt_tokens:,} prompt tokens had to be computed"
    blocks = story.blocks
    if blocks is not None and blocks.at_start is not None and blocks.most > blocks.at_start:
        gone = blocks.most - blocks.at_start
        text += f", also since {_of_blocks(gone)} of them had been there and were evicted"
    return text + "."


# -- the rest ------------------------------------------------------------------------------------


def _details(story: Story) -> Iterator[str]:
    if story.queue_s is not None and story.prefill_s is not None and story.decode_s is not None:
        total = story.queue_s + story.prefill_s + story.decode_s
        times = f"{_s(story.queue_s)} in the queue, {_s(story.prefill_s)} from there to its first "
        times += f"token, {_s(story.decode_s)} to its last ({story.output_tokens:,} tokens)"
        yield f"Of {_s(total)}: {times}."
    if story.crowd is not None:
        waiting = _plural(story.crowd.waiting, "request") + " waited before"
        yield f"When it came, {waiting.replace(' before', '')} and {_crowd(story)}."
    if any(asked.control == "prioritise" for asked in story.asked):
        asked = [a for a in story.asked if a.control == "prioritise"]
        last = asked[-1]
        yield (
            f"{last.source} gave it priority {last.fields.get('priority')}"
            + (f" ({last.reason})" if last.reason else "")
            + (f", in the last of {len(asked)} such controls" if len(asked) > 1 else "")
            + "."
        )
    yield _bound(story)
    yield from _cache(story)
    if story.preemptions:
        times = "once" if story.preemptions == 1 else f"{story.preemptions:,} times"
        yield f"It was put back to the queue {times} after it had started, for want of room."
    if story.mode and story.mode != "dense":
        yield f"It ran in the mode {story.mode}."
    if len(story.arrivals) > 1:
        yield f"It came {len(story.arrivals)} times; this is about the last."
    for what in story.unknown:
        yield f"Not known: {what}."


def _bound(story: Story) -> str:
    bound = story.bound
    if bound is None:
        return "No policy bounded its wait."
    text = f"Its wait was bounded to {bound.max_wait_s:g} s by {bound.source}"
    if bound.protected_s is not None:
        return f"{text}; it was protected from {_when(story, bound.protected_s)} on."
    if story.started_s is not None and bound.due_s is not None and story.started_s < bound.due_s:
        return f"{text}; it left the queue before that ran out."
    return f"{text}."


def _cache(story: Story) -> Iterator[str]:
    reused = {tier: n for tier, n in story.reused_tokens.items() if n}
    if story.status == "completed" and story.mode:
        parts = ", ".join(f"{n:,} from {tier}" for tier, n in reused.items())
        yield f"Of {story.prompt_tokens:,} prompt tokens it reused {parts or 'none'}."
    blocks = story.blocks
    if blocks is None or not blocks.most:
        return
    there = blocks.at_start if blocks.at_start is not None else blocks.at_arrival
    size = f"{_of_blocks(blocks.most)} of its prompt's {blocks.blocks:,}"
    if there is None or there >= blocks.most:
        yield f"{size} were there from {_when(story, blocks.most_s or 0.0)} on, and stayed."
        return
    lost = [gone for gone in blocks.evicted if gone.lost]
    text = f"{size} were there until {_when(story, blocks.most_s or 0.0)}, {there:,} as it started"
    if lost:
        number = sum(gone.lost for gone in lost)
        first, last = _when(story, lost[0].time_s), _when(story, lost[-1].until_s)
        span = f"at {first}" if first == last else f"from {first} to {last}"
        text += f": {_of_blocks(number)} left the last tier that held them {span}"
        takers = list(dict.fromkeys(t for gone in lost for t in gone.takers))
        if takers:
            text += f", and the room went to {_names(takers)}"
        else:
            text += "; to whom the room went cannot be told"
    yield text + "."


def _names(names: list[str]) -> str:
    some = ", ".join(names[:_NAMED])
    return some + (f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else "")


# -- the table -----------------------------------------------------------------------------------


def timeline(story: Story) -> list[Line]:
    """What happened, in order."""
    lines = sorted(_lines(story), key=lambda line: line.at_s)
    return [Line(line.at_s - story.origin_s, line.who, line.what) for line in lines]


def _lines(story: Story) -> Iterator[Line]:
    harness = story.workflow or "harness"
    for time_s, ready in story.ready:
        said = "described" if time_s in story.described_s else "said to be"
        yield Line(time_s, harness, f"{said}{', ready' if ready else ', not ready'}")
    for request, time_s in story.depends_on.items():
        if time_s is not None:
            yield Line(time_s, request, "completed, on which it depends")
    for time_s, engine in story.arrivals:
        yield Line(time_s, engine, f"accepted the request, {story.prompt_tokens:,} tokens")
    for asked in story.asked:
        yield from _of_control(story, asked)
    engine = story.engine or "engine"
    before = None
    for place in story.places:
        state = (place.priority, place.protected, place.held)
        if state != before:
            words = [f"waits at priority {place.priority}"]
            words += ["protected"] if place.protected else []
            words += ["held"] if place.held else []
            yield Line(place.time_s, engine, ", ".join(words))
        before = state
    for gone in story.blocks.evicted if story.blocks is not None else ():
        yield _of_eviction(engine, gone)
    for other in story.passed:
        [ground] = _grounds([other])
        yield Line(other.started_s, engine, f"started {other.request}: it {ground[2:]}")
    if story.started_s is not None:
        yield Line(story.started_s, engine, "started the request")
        if story.prefill_s is not None and story.status == "completed":
            yield Line(story.started_s + story.prefill_s, engine, "gave its first token")
    if story.ended_s is not None:
        because = f": {in_words(story.reason)}" if story.reason else ""
        yield Line(story.ended_s, engine, f"{story.status} the request{because}")


def _of_control(story: Story, asked: Asked) -> Iterator[Line]:
    values = ", ".join(f"{name} {_value(value)}" for name, value in asked.fields.items())
    what = f"{asked.force} {asked.control}" + (f" ({values})" if values else "")
    of = "" if asked.about == "request" else " for its context"
    because = f": {asked.reason}" if asked.reason else ""
    yield Line(asked.time_s, asked.source, f"asked for {what}{of}{because}")
    for answer in asked.answers:
        if story.ended_s is not None and answer.time_s > story.ended_s:
            continue
        words = f": {in_words(answer.reason)}" if answer.reason else ""
        words += f" ({answer.detail})" if answer.detail else ""
        words += f", as {answer.fallback}" if answer.fallback else ""
        who = story.engine or "engine"
        yield Line(answer.time_s, who, f"{answer.status} {asked.source}'s {asked.control}{words}")


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _of_eviction(engine: str, gone: Evicted) -> Line:
    stay = gone.blocks - gone.lost
    kept = f", of which {stay:,} stay in another tier" if stay and gone.lost else ""
    kept = ", which stay in another tier" if not gone.lost else kept
    room = f"; the room went to {_names(list(gone.takers))}" if gone.takers else ""
    what = f"gave up {_of_blocks(gone.blocks)} of its prompt in {gone.tier}{kept}{room}"
    return Line(gone.time_s, engine, what)


def time_of_day(story: Story) -> str:
    """When the story begins, on the clock of the bus."""
    if story.clock != "unix":
        return f"{story.origin_s:.3f} s of virtual time"
    return datetime.fromtimestamp(story.origin_s).astimezone().isoformat(" ", "milliseconds")
