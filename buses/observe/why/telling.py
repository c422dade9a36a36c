"""The story of a request in sentences: the main reason first, then the rest.

Everything here is made from the facts alone; what they do not say is not told.
"""

from collections.abc import Iterator

from hear.buses.observe.why.facts import Story
from hear.buses.observe.why.words import (
    blocks_of,
    grounds_of,
    in_words,
    plural,
    some_of,
    span,
    when,
)


def sentences(story: Story) -> list[str]:
    """The story; the first sentence tells the main reason."""
    return [_headline(story), *_details(story)]


# -- the main reason -----------------------------------------------------------------------------


def _headline(story: Story) -> str:
    name = story.request
    if story.status in ("rejected", "failed"):
        verb = "was rejected by" if story.status == "rejected" else "failed on"
        waited = f" after {span(story.queue_s)} in the queue" if story.queue_s else ""
        return (
            f"{name} {verb} {story.engine}{waited}: {in_words(story.reason) or 'no reason told'}."
        )
    if not story.arrivals and not story.status:
        ready = story.ready[-1][1] if story.ready else True
        open_deps = [d for d, done in story.depends_on.items() if done is None]
        if open_deps:
            return f"{name} has not come to an engine: it waits for {some_of(open_deps)}."
        state = "its harness has not sent it" if ready else "it was not said to be ready"
        return f"{name} was described and has not come to an engine: {state}."
    if story.queue_s is None or story.prefill_s is None or story.decode_s is None:
        return _unfinished(story)
    total = story.queue_s + story.prefill_s + story.decode_s
    longest = max(story.queue_s, story.prefill_s, story.decode_s)
    if longest == story.queue_s:
        return (
            f"{name} waited {span(story.queue_s)} of {span(total)} in the queue of {story.engine}: "
            + (_why_it_waited(story))
        )
    if longest == story.prefill_s:
        return (
            f"{name} spent {span(story.prefill_s)} of {span(total)} before its first token: "
            + _why_it_computed(story)
        )
    each = story.decode_s / max(story.output_tokens - 1, 1)
    return (
        f"{name} spent {span(story.decode_s)} of {span(total)} writing its "
        f"{plural(story.output_tokens, 'token')}, {1000 * each:.1f} ms each."
    )


def _unfinished(story: Story) -> str:
    begun_s = story.arrivals[-1][0] if story.arrivals else story.origin_s
    so_far = story.last_heard_s - begun_s
    if story.started_s is None:
        return (
            f"{story.request} waits in the queue of {story.engine}, for {span(so_far)} so far: "
            + _why_it_waited(story)
        )
    waited = story.started_s - begun_s
    return (
        f"{story.request} is being served by {story.engine}, for "
        f"{span(story.last_heard_s - story.started_s)} so far; it waited {span(waited)} before: "
        + _why_it_waited(story)
    )


def _why_it_waited(story: Story) -> str:
    if story.passed:
        verb = "went before it"
        grounds = ", ".join(grounds_of(story.passed))
        return f"{plural(len(story.passed), 'request')} {verb}: {grounds}."
    if any(place.held for place in story.places):
        return f"it was held{_by_whom(story, 'hold')}."
    if story.crowd is not None and story.crowd.running:
        return f"none went before it, but as it came {_crowd(story)}."
    return "none went before it, as far as was heard."


def _by_whom(story: Story, control: str) -> str:
    for asked in story.asked:
        if asked.control == control:
            return f" by {asked.source}" + (f" ({asked.reason})" if asked.reason else "")
    return ""


def _crowd(story: Story) -> str:
    crowd = story.crowd
    assert crowd is not None
    text = f"{plural(crowd.running, 'request was', 'requests were')} in service"
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
        text += f", also since {blocks_of(gone)} of them had been there and were evicted"
    return text + "."


# -- the rest ------------------------------------------------------------------------------------


def _details(story: Story) -> Iterator[str]:
    if story.queue_s is not None and story.prefill_s is not None and story.decode_s is not None:
        total = story.queue_s + story.prefill_s + story.decode_s
        times = (
            f"{span(story.queue_s)} in the queue, {span(story.prefill_s)} from there to its first "
        )
        times += f"token, {span(story.decode_s)} to its last ({story.output_tokens:,} tokens)"
        yield f"Of {span(total)}: {times}."
    if story.crowd is not None:
        yield f"When it came, {plural(story.crowd.waiting, 'request')} waited and {_crowd(story)}."
    for asked in story.asked:
        if asked.control == "route" and any(a.status == "completed" for a in asked.answers):
            targets = ", ".join(map(str, asked.fields.get("targets", ())))  # type: ignore[arg-type]
            because = f" ({asked.reason})" if asked.reason else ""
            yield f"{asked.source} routed it to {targets}{because}."
    if any(asked.control == "prioritise" for asked in story.asked):
        moves = [a for a in story.asked if a.control == "prioritise"]
        last = moves[-1]
        yield (
            f"{last.source} asked for priority {last.fields.get('priority')} for it, at "
            + when(story, last.time_s)
            + (f" ({last.reason})" if last.reason else "")
            + (f", in the last of {len(moves)} such controls" if len(moves) > 1 else "")
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
        return f"{text}; it was protected from {when(story, bound.protected_s)} on."
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
    most_s = blocks.most_s if blocks.most_s is not None else story.origin_s
    size = f"Of {blocks_of(blocks.blocks)} of its prompt {blocks.most:,}"
    verb = "was" if blocks.most == 1 else "were"
    if there is None or there >= blocks.most:
        yield f"{size} {verb} there from {when(story, most_s)} on, and stayed."
        return
    lost = [gone for gone in blocks.evicted if gone.lost and gone.until_s >= most_s]
    text = f"{size} {verb} there until {when(story, most_s)}, and {there:,} as it started"
    if lost:
        first, last = when(story, max(lost[0].time_s, most_s)), when(story, lost[-1].until_s)
        span = f"at {first}" if first == last else f"from {first} to {last}"
        text += f": the others left the last tier that held them {span}"
        takers = list(dict.fromkeys(t for gone in lost for t in gone.takers))
        if takers:
            text += f", and the room went to {some_of(takers)}"
        else:
            text += "; to whom the room went cannot be told"
    yield text + "."
