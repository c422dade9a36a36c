"""The story of a request as a table: what happened, in order."""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from hear.buses.observe.why.facts import Asked, Evicted, Passed, Story
from hear.buses.observe.why.words import blocks_of, grounds_of, in_words, some_of, when


class Line(NamedTuple):
    """A row of the table: when (in seconds from the first that is known), who, what."""

    at_s: float
    who: str
    what: str


def timeline(story: Story, *, each: bool = False) -> list[Line]:
    """What happened, in order; with ``each`` requests that went before it one by one.

    Of what was before it, only what followed the last use of its context is told, unless ``each``.
    """
    lines: list[tuple[float, Line, Passed | None]]
    lines = [(line.at_s, line, None) for line in _lines(story)]
    lines += [(p.started_s, _of_passed(story, [p]), p) for p in story.passed]
    lines.sort(key=lambda entry: entry[0])
    told: list[Line] = []
    run: list[Passed] = []
    for _, line, passed in lines:
        if passed is not None and not each:
            run.append(passed)
            continue
        if run:
            told.append(_of_passed(story, run))
            run = []
        told.append(line)
    if run:
        told.append(_of_passed(story, run))
    begin_s = -inf if each else _last_use_s(story)
    return [
        Line(line.at_s - story.origin_s, line.who, line.what)
        for line in told
        if line.at_s >= begin_s
    ]


def _last_use_s(story: Story) -> float:
    """When what bears on it began: the last lease before it, or the losses after that."""
    begun = [story.origin_s]
    begun += [max((a.time_s for a in story.asked if a.time_s < story.origin_s), default=inf)]
    blocks = story.blocks
    if blocks is not None and blocks.most_s is not None:
        begun += [e.time_s for e in blocks.evicted if e.lost and e.until_s >= blocks.most_s]
    return min(begun)


def _of_passed(story: Story, passed: list[Passed]) -> Line:
    who = story.engine or "engine"
    names = some_of([other.request for other in passed])
    if len(passed) == 1:
        [ground] = grounds_of(passed)
        return Line(passed[0].started_s, who, f"started {names}: it {ground[2:]}")
    until = passed[-1].started_s
    span = f", until {when(story, until)}" if until > passed[0].started_s else ""
    grounds = ", ".join(grounds_of(passed))
    return Line(
        passed[0].started_s, who, f"started {len(passed)} requests{span}: {grounds}: {names}"
    )


def _lines(story: Story) -> Iterator[Line]:
    harness = story.workflow or "harness"
    for time_s, ready in story.ready:
        said = "described" if time_s in story.described_s else "said to be"
        yield Line(time_s, harness, f"{said}{', ready' if ready else ', not ready'}")
    for request, done_s in story.depends_on.items():
        if done_s is not None:
            yield Line(done_s, request, "completed, on which it depends")
    for time_s, engine in story.arrivals:
        yield Line(time_s, engine, f"accepted the request, {story.prompt_tokens:,} tokens")
    for asked in story.asked:
        yield from _of_control(story, asked)
    engine = story.engine or "engine"
    before: tuple[int, bool, bool] | None = None
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
        if answer.detail and answer.detail != in_words(answer.reason):
            words += f" ({answer.detail})"
        words += f", as {answer.fallback}" if answer.fallback else ""
        yield Line(
            answer.time_s, answer.by, f"{answer.status} {asked.source}'s {asked.control}{words}"
        )


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _of_eviction(engine: str, gone: Evicted) -> Line:
    stay = gone.blocks - gone.lost
    kept = f", of which {stay:,} stay in another tier" if stay and gone.lost else ""
    kept = ", which stay in another tier" if not gone.lost else kept
    room = f"; the room went to {some_of(gone.takers)}" if gone.takers else ""
    what = f"gave up {blocks_of(gone.blocks)} of its prompt in {gone.tier}{kept}{room}"
    return Line(gone.time_s, engine, what)
