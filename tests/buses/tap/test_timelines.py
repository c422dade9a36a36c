"""What becomes of requests, in any order in which it may be heard."""

from typing import Any

from hear.buses.observe.tap.reading import read
from hear.buses.observe.tap.timelines import MAX_MESSAGES, RequestPicture, Stretch, Timelines
from hear.messages import (
    Message,
    OperationOutcome,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    RunningRequest,
    WaitingRequest,
)
from tests.buses.tap.builders import Voice


class Scene:
    def __init__(self, **options: int) -> None:
        self.timelines = Timelines(**options)
        self._engine, self._harness, self._policy = Voice("e0"), Voice("h"), Voice("p")

    def engine(self, message: Message, time_s: float, **key: Any) -> None:
        self.timelines.apply(read(self._engine.say(message, time_s, engine="e0", **key)))

    def harness(self, message: Message, time_s: float, **key: Any) -> None:
        self.timelines.apply(read(self._harness.say(message, time_s, **key)))

    def policy(self, message: Message, time_s: float, **key: Any) -> None:
        self.timelines.apply(read(self._policy.say(message, time_s, engine="e0", **key)))

    def wait(self, *requests: str, at_s: float, priority: int = 0) -> None:
        waiting = tuple(
            WaitingRequest(request=r, context="c", since_s=at_s, priority=priority)
            for r in requests
        )
        self.engine(QueueChanged(waiting=waiting), at_s)

    def start(self, *requests: str, at_s: float) -> None:
        self.engine(QueueChanged(started=requests), at_s)

    def end(self, request: str, at_s: float) -> None:
        self.engine(QueueChanged(ended=(request,)), at_s)
        self.complete(request, at_s)

    def complete(self, request: str, at_s: float) -> None:
        outcome = RequestOutcome(status="completed", queue_s=2.0, prefill_s=1.0, decode_s=3.0)
        self.engine(outcome, at_s, request=request, context="c")

    def picture(self, request: str = "r1") -> RequestPicture:
        return next(p for p in self.timelines.pictures() if p.id == request)


def test_a_request_waits_then_runs_then_shows_where_its_first_token_was() -> None:
    scene = Scene()
    scene.harness(RequestDescribed(role="coder", prompt_tokens=9), 9.5, request="r1", context="c")
    assert (scene.picture().status, scene.picture().stretches) == ("described", ())
    scene.wait("r1", at_s=10.0, priority=-4)
    picture = scene.picture()
    assert (picture.status, picture.priority, picture.active) == ("waiting", -4, True)
    assert picture.stretches == (Stretch("queue", 10.0, None),)
    scene.start("r1", at_s=12.0)
    assert scene.picture().status == "running"
    assert scene.picture().stretches == (
        Stretch("queue", 10.0, 12.0),
        Stretch("running", 12.0, None),
    )
    scene.end("r1", at_s=16.0)
    picture = scene.picture()
    assert (picture.status, picture.role, picture.prompt_tokens) == ("completed", "coder", 9)
    assert not picture.active
    assert picture.stretches == (
        Stretch("queue", 10.0, 12.0),
        Stretch("prefill", 12.0, 13.0),
        Stretch("decode", 13.0, 16.0),
    )


def test_an_outcome_that_comes_first_is_not_undone_by_what_is_older() -> None:
    scene = Scene()
    scene.complete("r1", at_s=16.0)
    before = scene.picture().stretches
    scene.wait("r1", at_s=10.0)
    scene.start("r1", at_s=12.0)
    scene.engine(QueueChanged(ended=("r1",)), 16.0)
    scene.engine(RequestOutcome(status="accepted"), 10.0, request="r1")
    assert scene.picture().status == "completed"
    assert scene.picture().stretches == before


def test_a_preempted_request_waits_again() -> None:
    scene = Scene()
    scene.wait("r1", at_s=10.0)
    scene.start("r1", at_s=11.0)
    scene.wait("r1", at_s=13.0)
    assert scene.picture().status == "waiting"
    assert scene.picture().stretches == (Stretch("queue", 10.0, None),)


def test_a_request_that_leaves_without_an_outcome_has_left() -> None:
    scene = Scene()
    scene.wait("r1", at_s=10.0)
    scene.engine(QueueChanged(ended=("r1",)), 12.0)
    assert scene.picture().status == "left"
    assert scene.picture().stretches == (Stretch("queue", 10.0, 12.0),)


def test_a_refused_request_has_no_stretch_that_goes_on() -> None:
    scene = Scene()
    outcome = RequestOutcome(status="rejected", reason="too_long")
    scene.engine(outcome, 10.0, request="r1")
    assert (scene.picture().status, scene.picture().stretches) == ("rejected", ())


def test_a_snapshot_tells_who_waits_and_runs_but_is_no_news_of_each() -> None:
    scene = Scene()
    snapshot = QueueSnapshot(
        waiting=(WaitingRequest(request="r1", since_s=3.0),),
        running=(RunningRequest(request="r2"),),
    )
    scene.engine(snapshot, 10.0)
    assert scene.picture("r1").stretches == (Stretch("queue", 3.0, None),)
    assert scene.picture("r2").status == "running"
    assert scene.picture("r1").messages == ()


def test_all_that_was_said_about_a_request_is_kept_in_order() -> None:
    scene = Scene()
    scene.wait("r0", "r1", at_s=10.0)
    scene.policy(Prioritise(priority=-3), 11.0, request="r1", operation="p-1-1")
    scene.engine(OperationOutcome(status="completed"), 11.5, request="r1", operation="p-1-1")
    scene.wait("r1", at_s=11.5, priority=-3)
    assert [line.split(maxsplit=3)[1:] for line in scene.picture().messages] == [
        ["state", "e0", "queue: waits r1"],
        ["control", "p", "asks e0: prioritise r1 at -3 op p-1-1"],
        ["outcome", "e0", "completed control r1 op p-1-1"],
        ["state", "e0", "queue: waits r1 at -3"],
    ]


def test_messages_and_requests_are_bounded_and_who_has_ended_goes_first() -> None:
    scene = Scene(max_requests=3)
    for n in range(MAX_MESSAGES + 9):
        scene.policy(Prioritise(priority=n), 1.0, request="r1", operation=f"p-1-{n}")
    assert len(scene.picture().messages) == MAX_MESSAGES
    scene.wait("r2", at_s=1.0)
    scene.end("r2", at_s=2.0)
    scene.wait("r3", "r4", at_s=3.0)
    assert [p.id for p in scene.timelines.pictures()] == ["r4", "r3", "r1"]
    scene.wait("r5", at_s=3.0)
    assert [p.id for p in scene.timelines.pictures()] == ["r5", "r4", "r3"]


def test_a_picture_is_made_anew_only_if_something_has_changed() -> None:
    scene = Scene()
    scene.wait("r1", "r2", at_s=1.0)
    before = scene.picture("r1"), scene.picture("r2")
    scene.start("r2", at_s=2.0)
    assert scene.picture("r1") is before[0]
    assert scene.picture("r2") != before[1]


def test_nothing_that_a_terminal_would_obey_is_in_a_picture() -> None:
    scene = Scene()
    described = RequestDescribed(role="a\x1b[2J")
    scene.harness(described, 1.0, request="r\x1b[2J", context="c\n")
    [picture] = scene.timelines.pictures()
    texts = [picture.id, picture.context, picture.role, *picture.messages]
    assert all(text.isprintable() for text in texts)
