"""Columns, colours, folding, and what a terminal must not be told."""

import re
from datetime import datetime

import pytest

from hear.buses.observe.tap.lines import Lines, clock_time
from hear.buses.observe.tap.reading import read
from hear.delivery import Arrival
from hear.messages import ContextOpened, OperationOutcome, Prioritise, QueueChanged
from tests.buses.tap.builders import Voice, foreign

AT_S = 1_764_504_590.1234


def test_the_columns_are_local_time_category_source_and_words() -> None:
    line = Lines().message(read(Voice("engine0").say(QueueChanged(), AT_S, engine="engine0")))
    clock = datetime.fromtimestamp(AT_S).strftime("%H:%M:%S") + ".123"
    assert line == f"{clock} state    engine0      queue 0 waiting 0 running"


def test_the_column_of_sources_grows_and_stays() -> None:
    lines = Lines()
    long = lines.message(read(Voice("a-source-of-20-chars").say(ContextOpened(), context="c")))
    short = lines.message(read(Voice("x").say(ContextOpened(), context="c")))
    assert long.index("opens") == short.index("opens")
    endless = lines.message(read(Voice("y" * 60).say(ContextOpened(), context="c")))
    assert "y" * 60 + " opens context c" in endless
    after = lines.message(read(Voice("x").say(ContextOpened(), context="c")))
    assert after.index("opens") == short.index("opens") + 4


def test_a_repeated_message_and_a_stale_one_are_marked() -> None:
    control = Voice("p").say(Prioritise(priority=1), request="r", engine="e", operation="o")
    assert Lines().message(read(control, Arrival.STALE)).endswith("op o (again)")
    state = Voice("e").say(QueueChanged(), engine="e")
    assert Lines().message(read(state, Arrival.STALE)).endswith("running (stale)")


def test_a_gap_tells_how_many_and_where() -> None:
    line = Lines().gap(AT_S, "engine0", "state.default.engine0.queue", 17)
    assert line.endswith("engine0      gap: 17 messages missed on state.default.engine0.queue")


def test_colour_changes_nothing_but_colour() -> None:
    outcome = OperationOutcome(status="rejected", control="prioritise")
    reading = read(Voice("e").say(outcome, request="r", engine="e", operation="o"))
    coloured = Lines(colour=True).message(reading)
    assert "\x1b[31mrejected" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == Lines().message(reading)


@pytest.mark.parametrize("width", [10, 30, 50, 80, 100])
def test_a_folded_line_breaks_no_word(width: int) -> None:
    operation = "a-policy-with-a-long-name-1764504590123-4711"
    control = Prioritise(priority=-3, reason="three blocks of the prompt are there already")
    reading = read(Voice("p").say(control, request="r" * 25, engine="e", operation=operation))
    folded = Lines(width=width).message(reading)
    assert folded.split() == Lines().message(reading).split()
    for row in folded.split("\n")[1:]:
        assert len(row) <= width or len(row.split()) == 1
    assert ("\n" in folded) == (len(Lines().message(reading)) > width)


def test_nothing_that_a_terminal_would_obey_comes_through() -> None:
    said = Voice("evil\x1b]0;x\x07").say(ContextOpened(role="a\nb\x1b[2J\u202e"), context="c\r")
    unknown = foreign("k\x1b[1m", {"kind": "k", "x": "\x1b[2J"}, category="c\x9b")
    for envelope in (said, unknown):
        assert Lines().message(read(envelope)).isprintable()


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), 1e300, -1e300])
def test_a_time_that_is_none_does_not_stop_the_tap(time_s: float) -> None:
    assert clock_time(time_s) == "--:--:--.---"


def test_the_tenant_is_told_where_it_is_not_the_default_one() -> None:
    line = Lines().message(read(Voice("e0", tenant="acme").say(QueueChanged(), engine="e0")))
    assert " e0 (acme) " in line
