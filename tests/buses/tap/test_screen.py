"""What stands on the screen, driven by Textual's pilot and fed from a real cluster's pictures."""

import asyncio
import re
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache

import pytest
import structlog
import trio
from textual.pilot import Pilot
from trio.testing import MockClock

from hear.buses.observe.tap import screen
from hear.buses.observe.tap.board import Picture
from hear.buses.observe.tap.screen import MAX_ROWS, LastWarning, Messages, TapScreen
from hear.errors import BusError
from tests.buses.tap.onscreen import on_screen
from tests.buses.tap.test_board import picture_of_a_cluster
from tests.buses.tap.test_bridge import Stage

Play = Callable[[TapScreen, "Pilot[None]", "Source"], Awaitable[None]]
WIDE, NARROW = (160, 44), (80, 24)


@cache
def a_picture() -> Picture:
    """A cluster under load: some wait, some run, some have been served."""
    return trio.run(picture_of_a_cluster, 100, 4.0, clock=MockClock(autojump_threshold=0))


class Source:
    """Shows what it is given."""

    def __init__(self, picture: Picture | None) -> None:
        self.picture = picture
        self.ended = False
        self.asked = 0

    def latest(self) -> Picture | None:
        self.asked += 1
        return self.picture


def play(scene: Play, *, size: tuple[int, int] = WIDE, picture: Picture | None = None) -> TapScreen:
    source = Source(picture or a_picture())
    app = TapScreen(source)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await scene(app, pilot, source)

    asyncio.run(asyncio.wait_for(run(), 30))
    return app


def said(app: TapScreen) -> str:
    return "\n".join(on_screen(app))


async def drawn(app: TapScreen, pilot: "Pilot[None]") -> str:
    app.bring_up_to_date()
    await pilot.pause()
    return said(app)


async def shows(app: TapScreen, pilot: "Pilot[None]", text: str) -> str:
    """What is on the screen once a text is; whoever asked for it finds that it is not."""
    for _ in range(50):
        shown = await drawn(app, pilot)
        if text in shown:
            break
        await pilot.pause(0.02)
    return shown


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_engines_decisions_requests_rates_and_losses_are_on_the_screen(
    size: tuple[int, int],
) -> None:
    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        policy = a_picture().policies[0]  # a small screen has no room for another
        asked = f"{policy.name}  {policy.asked} asked"
        shown = await shows(app, pilot, asked)  # a small screen is laid out twice
        [engine] = a_picture().engines
        assert "engine0  Qwen3-8B" in shown
        assert f"queue {engine.num_waiting} waiting  {engine.num_running} running" in shown
        assert "gpu  █" in shown
        assert asked in shown
        assert "bound" in shown
        assert "requests 100 of 100" in shown
        assert "░ queue  ▒ running  ▓ prefill  █ decode  │ now" in shown
        newest = a_picture().requests[0]
        row = next(
            r for r in shown.splitlines() if re.search(f" {newest.id} +{newest.context} ", r)
        )
        assert "░" in row
        assert "│" in row
        assert "intent" in shown
        assert "lost: nothing" in shown
        assert "q quit" in shown

    play(scene, size=size)


UUIDS = [f"{digit * 8}-1111-4222-8333-{other * 12}" for digit in "3af" for other in "9c"]


@pytest.mark.parametrize("size", [NARROW, (120, 30), WIDE])
def test_long_ids_leave_room_for_all_columns_and_stay_distinct(size: tuple[int, int]) -> None:
    known = a_picture().requests[: len(UUIDS)]
    requests = [
        replace(request, id=id, context=f"c{id[1:]}", engine=f"engine-{id}")
        for request, id in zip(known, UUIDS, strict=True)
    ]
    picture = replace(a_picture(), requests=tuple(requests))

    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        shown = await shows(app, pilot, "│")
        head = next(line for line in shown.splitlines() if "request" in line and "prio" in line)
        assert all(name in head for name in ("context", "engine", "state", "timeline"))
        for id in UUIDS:
            row = next(r for r in shown.splitlines() if re.search(rf" {id[:3]}\S*{id[-3:]} ", r))
            assert "│" in row.rstrip()[:-1]  # now, within the border
        await pilot.press("enter")
        await shows(app, pilot, UUIDS[0])
        assert UUIDS[0] in said(app)

    play(scene, picture=picture, size=size)


def test_a_new_picture_is_drawn_and_an_old_one_is_not_drawn_again() -> None:
    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        source.picture = replace(a_picture(), gaps=3, missed=17)
        assert "lost: 3 gaps  17 missed" in await drawn(app, pilot)
        drawings = []
        app._draw = lambda picture: drawings.append(picture)  # type: ignore[method-assign]
        for _ in range(5):
            app.bring_up_to_date()
        assert drawings == []

    play(scene)


def test_pausing_keeps_what_is_shown_until_it_goes_on() -> None:
    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        await pilot.press("p")
        source.picture = replace(a_picture(), gaps=3)
        shown = await drawn(app, pilot)
        assert "PAUSED" in shown
        assert "lost: nothing" in shown
        await pilot.press("p")
        shown = await drawn(app, pilot)
        assert "PAUSED" not in shown
        assert "3 gaps" in shown

    play(scene)


def test_typing_filters_the_requests_and_escape_shows_all() -> None:
    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        await pilot.press("slash", *"c3")
        await pilot.pause()
        assert "requests 25 of 100" in said(app)
        assert {app._table.get_row_at(n)[1].plain for n in range(25)} == {"c3"}
        await pilot.press("escape")
        await pilot.pause()
        assert "requests 100 of 100" in said(app)

    play(scene)


def test_letters_in_the_filter_are_no_keys_of_the_screen() -> None:
    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        await pilot.press("slash", *"qp")
        await pilot.pause()
        assert app.is_running
        assert "requests 0 of 100" in said(app)
        assert "PAUSED" not in said(app)

    play(scene)


def test_the_filter_looks_at_all_requests_and_the_table_shows_the_newest() -> None:
    [first, *_] = a_picture().requests
    many = tuple(replace(first, id=f"q{n}") for n in range(400, 0, -1))

    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        assert app._table.row_count == MAX_ROWS
        assert "requests 100 of 400" in said(app)
        await pilot.press("slash", *"q7", "enter")
        await pilot.pause()
        assert [app._table.get_row_at(n)[0].plain for n in range(app._table.row_count)] == [
            *(f"q{n}" for n in range(79, 69, -1)),
            "q7",
        ]

    play(scene, picture=replace(a_picture(), requests=many))


def test_enter_shows_the_messages_of_a_request_and_keeps_them_up_to_date() -> None:
    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        [first, *rest] = a_picture().requests
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, Messages)
        shown = said(app)
        assert f"harness describes {first.id} of context {first.context}" in shown
        assert f"guard:40 asks engine0: bound the wait of {first.id} to 40 s" in shown
        more = replace(first, messages=(*first.messages, "12:00:00.000 outcome  e completed it"))
        source.picture = replace(a_picture(), requests=(more, *rest))
        assert "completed it" in await drawn(app, pilot)
        await pilot.press("escape")
        await pilot.pause()
        assert not isinstance(app.screen, Messages)

    play(scene)


def test_the_cursor_stays_on_its_request_when_others_come() -> None:
    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        await pilot.press("down", "down")
        [first, _, third, *_] = a_picture().requests
        source.picture = replace(
            a_picture(), requests=(replace(first, id="new"), *a_picture().requests)
        )
        await drawn(app, pilot)
        assert app._row_at_cursor() == third.id

    play(scene)


def test_a_cursor_that_was_not_moved_stays_at_the_newest() -> None:
    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        [first, *_] = a_picture().requests
        source.picture = replace(
            a_picture(), requests=(replace(first, id="new"), *a_picture().requests)
        )
        assert " new " in await drawn(app, pilot)
        assert app._row_at_cursor() == "new"

    play(scene)


def test_tab_moves_from_pane_to_pane() -> None:
    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        visited = []
        for _ in range(4):
            visited.append(app.focused.id if app.focused else None)
            await pilot.press("tab")
        assert visited == ["requests", "engines", "policies", "requests"]

    play(scene)


@pytest.mark.parametrize("keys", [["q"], ["ctrl+c"], ["enter", "q"], ["slash", "ctrl+c"]])
def test_it_quits_from_wherever_one_is(keys: list[str]) -> None:
    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        await pilot.press(*keys)
        await pilot.pause()
        assert not app.is_running

    assert play(scene).return_code == 0


def test_a_signal_ends_it_with_its_code() -> None:
    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        signal.raise_signal(signal.SIGTERM)
        while app.is_running:
            await pilot.pause()

    assert play(scene).return_code == 128 + signal.SIGTERM


def test_it_ends_when_its_source_has_ended() -> None:
    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        source.ended = True
        app.bring_up_to_date()
        await pilot.pause()
        assert not app.is_running

    play(scene)


def test_a_hostile_name_is_text_and_no_markup() -> None:
    [first, *rest] = a_picture().requests
    [engine] = a_picture().engines
    picture = replace(
        a_picture(),
        requests=(replace(first, id="[red]x[/", context="[@click=app.quit]c"), *rest),
        engines=(replace(engine, name="[bold]e[/bold]"),),
    )

    async def scene(app: TapScreen, pilot: "Pilot[None]", source: Source) -> None:
        shown = said(app)
        assert "[red]x[/" in shown
        assert "[@click=app.quit]c" in shown
        assert "[bold]e[/bold]" in shown

    play(scene, picture=picture)


# -- with the bridge --------------------------------------------------------------------------


def shown(stage: Stage, monkeypatch: pytest.MonkeyPatch, then: Callable[[TapScreen], None]) -> int:
    """The whole of ``show``, without a terminal; ``then`` is called when it is drawn."""

    class Headless(TapScreen):
        def run(self, **options: object) -> None:
            async def pilot(pilot: "Pilot[object]") -> None:
                await pilot.pause()
                then(self)

            asyncio.run(self.run_async(headless=True, size=WIDE, auto_pilot=pilot))

    monkeypatch.setattr(screen, "TapScreen", Headless)
    code: list[int | BaseException] = []

    def run() -> None:
        try:
            code.append(screen.show(stage.join, name="tap"))
        except BusError as error:
            code.append(error)

    # In a thread, so that a screen that does not end fails the test and does not hold it.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    [result] = code
    if isinstance(result, BaseException):
        raise result
    return result


def test_quitting_leaves_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    assert shown(stage, monkeypatch, lambda app: app.exit()) == 0
    assert stage.left
    assert stage.bus.statistics().subscriptions == ()


def test_a_bus_that_is_lost_ends_the_screen_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    with pytest.raises(BusError, match="the bus is closed"):
        shown(stage, monkeypatch, lambda app: stage.close())
    assert stage.left


def test_what_the_bus_warns_of_is_on_the_screen_and_not_in_its_way() -> None:
    warning = LastWarning()
    warning.take_over()
    structlog.get_logger("hear.bus").warning("hub.silent", client="tap\x1b[2J")
    structlog.get_logger("hear.bus").info("nothing.new")
    app = TapScreen(Source(a_picture()), warning)

    async def run() -> None:
        async with app.run_test(size=WIDE) as pilot:
            await pilot.pause()
            assert "event=hub.silent client=tap\\x1b[2J" in said(app)

    asyncio.run(asyncio.wait_for(run(), 30))
