"""Bars and timelines, character by character."""

import pytest

from hear.buses.observe.tap import drawing
from hear.buses.observe.tap.board import EnginePicture, Loss, Picture, TierPicture
from hear.buses.observe.tap.decisions import DecisionPicture, PolicyPicture
from hear.buses.observe.tap.timelines import RequestPicture, Stretch


def request(*stretches: Stretch, status: str = "running") -> RequestPicture:
    return RequestPicture(
        id="r",
        context="c",
        engine="e",
        role="",
        status=status,
        priority=0,
        prompt_tokens=0,
        stretches=stretches,
        messages=(),
    )


def line(*stretches: Stretch, now: float = 10.0, span: float = 10.0, width: int = 11) -> str:
    return drawing.timeline(request(*stretches), now, span, width).plain


def test_a_timeline_ends_now_and_shows_each_phase_in_its_place() -> None:
    served = (Stretch("queue", 1.0, 4.0), Stretch("prefill", 4.0, 6.0), Stretch("decode", 6.0, 9.0))
    assert line(*served) == " ░░░▓▓███ │"


def test_what_lasts_reaches_to_now() -> None:
    assert line(Stretch("queue", 5.0, 8.0), Stretch("running", 8.0, None)) == "     ░░░▒▒│"


def test_what_began_before_the_span_is_cut_and_what_is_over_is_gone() -> None:
    assert line(Stretch("queue", -99.0, None)) == "░░░░░░░░░░│"
    assert line(Stretch("decode", -99.0, -50.0)) == "          │"


def test_a_short_phase_is_one_character_and_not_nothing() -> None:
    assert line(Stretch("queue", 2.0, 2.001), Stretch("prefill", 3.0, 3.001)) == "  ░▓      │"


@pytest.mark.parametrize("width", [0, 1, 2])
def test_hardly_any_room_is_no_error(width: int) -> None:
    assert line(Stretch("queue", 0.0, None), width=width)[-1] == "│"


def test_a_clock_that_is_ahead_draws_nothing_beyond_now() -> None:
    assert line(Stretch("queue", 50.0, None)) == "          │"


def test_the_span_holds_all_that_is_active() -> None:
    running, old = request(Stretch("queue", 60.0, None)), request(Stretch("queue", 5.0, 6.0))
    done = request(Stretch("decode", 1.0, 2.0), status="completed")
    assert drawing.span_s([running, done], 100.0) == 60.0
    assert drawing.span_s([running, old], 100.0) == 120.0
    assert drawing.span_s([], 100.0) == drawing.SPANS_S[0]
    assert drawing.span_s([old], 1e9) == drawing.SPANS_S[-1]


def engine(**changes: object) -> EnginePicture:
    fields: dict[str, object] = {
        "name": "engine0",
        "epoch": 3,
        "model": "m",
        "num_waiting": 14,
        "num_running": 8,
        "tiers": (TierPicture("gpu", 100, 50, 25, 70),),
        "residency_known": True,
        "residency_partial": False,
        "num_blocks": 1234,
        "preemptions": 0,
        "backlog_s": 0.0,
        "age_s": 0.25,
        "gaps": 0,
    }
    return EnginePicture(**{**fields, **changes})  # type: ignore[arg-type]


def test_an_engine_shows_queue_tiers_residency_and_the_age_of_its_last_word() -> None:
    assert drawing.engines(Picture(0.0, engines=(engine(),))).plain.splitlines() == [
        "engine0  m  epoch 3  0.2 s ago",
        "queue 14 waiting  8 running",
        "gpu  ██████████▒▒▒▒▒░░░░░  75% 50 used 25 cached of 100, holds 70",
        "residency 1,234 blocks",
    ]


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    shown = drawing.engines(
        Picture(0.0, engines=(engine(num_waiting=None, residency_known=False, gaps=2),))
    ).plain
    assert "queue unknown" in shown
    assert "residency unknown" in shown
    assert "2 gaps" in shown


@pytest.mark.parametrize(
    ("age_s", "said", "style"),
    [
        (None, "never heard", "bold red"),
        (7.0, "7.0 s ago", "yellow"),
        (300, "5 min ago", "bold red"),
    ],
)
def test_an_old_last_word_is_conspicuous(age_s: float | None, said: str, style: str) -> None:
    text = drawing.engines(Picture(0.0, engines=(engine(age_s=age_s),)))
    assert said in text.plain
    assert style in [str(span.style) for span in text.spans]


def test_a_policy_shows_its_counts_and_last_decisions() -> None:
    decision = DecisionPicture(0.0, "e0", "prioritise r1 at -3", "3 blocks", "rejected", "by x")
    policy = PolicyPicture("cache-aware", 1200, (("completed", 1100),), (decision,) * 9)
    rows = drawing.policies(Picture(0.0, policies=(policy,)), shown=2).plain.splitlines()
    assert rows[0] == "cache-aware  1,200 asked  1,100 completed"
    assert len(rows) == 3
    assert rows[1][9:] == "e0: prioritise r1 at -3 (3 blocks) rejected: by x"


def test_losses_are_told_and_so_is_their_absence() -> None:
    assert drawing.losses(Picture(0.0)).plain == "lost: nothing"
    lost = Picture(
        0.0, gaps=1, missed=17, dropped=3, losses=(Loss(0.0, "e0", "state.default.e0.queue", 17),)
    )
    assert drawing.losses(lost).plain == (
        "lost: 1 gaps  17 missed  3 dropped  (last: 17 on state.default.e0.queue from e0)"
    )


def test_the_last_warning_of_the_bus_is_told() -> None:
    assert drawing.losses(Picture(0.0), "hub.silent").plain == "lost: nothing  hub.silent"


def test_an_empty_bus_says_so() -> None:
    assert "no engine" in drawing.engines(Picture(0.0)).plain
    assert "no policy" in drawing.policies(Picture(0.0)).plain
    assert drawing.traffic(Picture(0.0), paused=True).plain.startswith("PAUSED")
