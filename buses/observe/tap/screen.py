"""The full screen of ``hear tap --screen``: panes, keys and drawing, with Textual.

It shows pictures that somebody else makes, at most a few times a second, and knows no bus. Import
it only where it is wanted: Textual is an extra.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import ClassVar, Protocol

import structlog
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Input, Static

from hear import escaping
from hear.app import console
from hear.buses.observe.tap import drawing
from hear.buses.observe.tap.board import Picture
from hear.buses.observe.tap.bridge import INTERVAL_S, Bridge
from hear.buses.observe.tap.timelines import RequestPicture
from hear.interfaces import Bus

MAX_ROWS = 100
"""Most requests in the table; the filter looks at all that are kept."""
_KEYS = "q quit   tab next pane   / filter   p pause   enter messages of a request   esc back"
_JOIN_WITHIN_S = 30.0
_MIN_TIMELINE = 16
_COLUMNS = ("request", "context", "engine", "state", "prio", "timeline")
_NUM_NAMES = 3
"""So many of the columns are names, which may be long."""
_MIN_NAME = 7


class Source(Protocol):
    """Where pictures come from."""

    def latest(self) -> Picture | None:
        """The newest picture; None before the first."""
        ...

    @property
    def ended(self) -> bool:
        """Whether there will be no more pictures."""
        ...


class Messages(ModalScreen[None]):
    """What was said about one request so far."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter", "dismiss", "back"),
        Binding("q,ctrl+c", "app.quit", "quit"),  # a modal screen hides the app's own keys
    ]

    def __init__(self, request: str) -> None:
        super().__init__()
        self.request = request

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="messages"):
            yield Static(id="said")

    def show(self, found: RequestPicture | None) -> None:
        """Bring it up to date; one that is no longer kept stays as it was."""
        if found is None:
            return
        head = Text(escaping.cell(found.id), "bold")
        head.append(f"  {found.status}", drawing.status_style(found.status))
        head.append(
            f"  context {escaping.cell(found.context)}  role {escaping.cell(found.role) or '-'}",
            "dim",
        )
        head.append(f"  {found.prompt_tokens:,} prompt tokens\n", "dim")
        self.query_one("#said", Static).update(Text("\n").join([head, *map(Text, found.messages)]))


class LastWarning:
    """Where the bus's own warnings go while a screen is drawn: the last one is shown on it."""

    def __init__(self) -> None:
        self.text = ""

    def warning(self, text: str) -> None:
        """Take one."""
        self.text = escaping.one_line(text)

    error = critical = warning

    def take_over(self) -> None:
        """Take all that is logged from now on."""
        structlog.configure(  # noqa: TID251, for as long as the screen is there
            processors=[
                structlog.processors.TimeStamper("%H:%M:%S", utc=False, key="at"),
                structlog.processors.LogfmtRenderer(key_order=["at", "event"]),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=lambda *_: self,
        )


class TapScreen(App[None]):
    """The screen. It ends by itself when its source has ended."""

    TITLE = "hear tap"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012, as Textual wants it
    CSS = """
    #traffic, #losses, #keys { height: 1; padding: 0 1; }
    #keys { background: $panel; }
    #panes { height: 1fr; }
    #left { width: 44%; }
    .-narrow #panes { layout: vertical; }
    .-narrow #left { width: 100%; height: 45%; layout: horizontal; }
    .-narrow #left > * { width: 1fr; height: 100%; }
    .-narrow #right { height: 1fr; }
    #engines, #policies { height: 1fr; border: round $primary; padding: 0 1; }
    #right { border: round $primary; width: 1fr; }
    #engines:focus, #policies:focus, #right:focus-within { border: round $accent; }
    #requests { height: 1fr; }
    #filter { display: none; }
    #filter.shown { display: block; }
    Messages { align: center middle; }
    #messages { width: 90%; height: 80%; border: thick $accent; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("slash", "filter", "filter"),
        Binding("p", "pause", "pause"),
        Binding("escape", "clear_filter", "no filter", show=False),
    ]

    def __init__(self, source: Source, warning: LastWarning | None = None) -> None:
        super().__init__()
        self.error_console = console.of_errors()  # for what ends the screen before its time
        self._source = source
        self._warning = warning or LastWarning()
        self._picture: Picture | None = None
        self._paused = False
        self._filter = ""
        self._rows: list[str] = []

    def compose(self) -> ComposeResult:
        yield Static(id="traffic")
        with Horizontal(id="panes"):
            with Vertical(id="left"):
                with VerticalScroll(id="engines") as engines:
                    engines.border_title = "engines"
                    yield Static(id="engines-text")
                with VerticalScroll(id="policies") as policies:
                    policies.border_title = "decisions"
                    yield Static(id="policies-text")
            with Vertical(id="right") as right:
                right.border_title = "requests"
                yield Input(placeholder="part of a request, context, engine or state", id="filter")
                yield DataTable(id="requests", cursor_type="row", zebra_stripes=False)
        yield Static(id="losses")
        yield Static(_KEYS, id="keys")

    def on_mount(self) -> None:
        table = self._table
        for column in _COLUMNS:
            table.add_column(column, key=column)
        table.focus()
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, partial(self.exit, None, 128 + number))
        self.set_interval(INTERVAL_S, self.bring_up_to_date)
        self.bring_up_to_date()

    # -- keys ---------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Keep what is shown, or go on with what is newest."""
        self._paused = not self._paused
        self._draw_again()

    def action_filter(self) -> None:
        """Show the field of the filter and go there."""
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def action_clear_filter(self) -> None:
        """Show all requests again."""
        field = self.query_one("#filter", Input)
        field.value = ""
        field.remove_class("shown")
        self._table.focus()

    def on_resize(self) -> None:
        """The timelines take the room that there is, which is known after the layout."""
        self.call_after_refresh(self._draw_again)

    def _draw_again(self) -> None:
        if self._picture is not None:
            self._draw(self._picture)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter = event.value.strip().lower()
        self._draw_again()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._table.focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self.push_screen(Messages(event.row_key.value))
            self.call_after_refresh(self._draw_messages)

    # -- drawing ------------------------------------------------------------------------------

    @property
    def _table(self) -> DataTable[Text]:
        return self.screen_stack[0].query_one("#requests", DataTable)

    def bring_up_to_date(self) -> None:
        """Draw the newest picture, or end if there will be none."""
        if self._source.ended:
            self.exit()
            return
        picture = self._source.latest()
        if picture is None or picture is self._picture or self._paused:
            return
        self._picture = picture
        self._draw(picture)

    def _draw(self, picture: Picture) -> None:
        base = self.screen_stack[0]
        for name, text in (
            ("#traffic", drawing.traffic(picture, paused=self._paused)),
            ("#engines-text", drawing.engines(picture)),
            ("#policies-text", drawing.policies(picture)),
            ("#losses", drawing.losses(picture, self._warning.text)),
        ):
            base.query_one(name, Static).update(text)
        self._draw_requests(picture)
        self._draw_messages()

    def _draw_messages(self) -> None:
        if isinstance(self.screen, Messages) and self._picture is not None:
            shown = self.screen.request
            found = next((r for r in self._picture.requests if r.id == shown), None)
            self.screen.show(found)

    def _draw_requests(self, picture: Picture) -> None:
        chosen = [r for r in picture.requests if self._wants(r)]
        requests = chosen[:MAX_ROWS]
        span = drawing.span_s(requests, picture.now)
        limits, width = self._widths(requests)
        right = self.screen_stack[0].query_one("#right", Vertical)
        right.border_title = f"requests {len(requests)} of {len(picture.requests)}"
        right.border_subtitle = drawing.legend(span).markup
        rows = {r.id: _row(r, picture.now, span, limits, width) for r in requests}
        if list(rows) != self._rows:
            self._replace_rows(rows)
            return
        table = self._table
        for id, row in rows.items():
            for column, cell in zip(_COLUMNS, row, strict=True):
                if table.get_cell(id, column) != cell:
                    table.update_cell(id, column, cell, update_width=True)

    def _replace_rows(self, rows: dict[str, tuple[Text, ...]]) -> None:
        table = self._table
        index, at, top = table.cursor_row, self._row_at_cursor(), table.scroll_y
        table.clear()
        for id, row in rows.items():
            table.add_row(*row, key=id)
        self._rows = list(rows)
        if at in rows and index > 0:  # who has not moved wants to see the newest
            table.move_cursor(row=table.get_row_index(at), scroll=False, animate=False)
            table.scroll_to(y=top, animate=False)

    def _row_at_cursor(self) -> str:
        index = self._table.cursor_row
        return self._rows[index] if 0 <= index < len(self._rows) else ""

    def _wants(self, request: RequestPicture) -> bool:
        wanted = self._filter
        texts = (request.id, request.context, request.engine, request.role, request.status)
        return not wanted or any(wanted in text.lower() for text in texts)

    def _widths(self, requests: Sequence[RequestPicture]) -> tuple[list[int], int]:
        """How wide each column before the timeline is, and how wide that one.

        The longest names give way until all columns fit: ``enter`` shows a request's whole id.
        """
        widths = [len(column) for column in _COLUMNS[:-1]]
        for request in requests:
            widths = [max(a, len(b)) for a, b in zip(widths, _texts(request), strict=True)]
        room = self._table.size.width - 2 * len(_COLUMNS) - 2
        while sum(widths) > room - _MIN_TIMELINE and self._table.size.width:  # once it is laid out
            longest = widths.index(max(widths[:_NUM_NAMES]))
            if widths[longest] <= _MIN_NAME:
                break
            widths[longest] -= 1
        return widths, max(room - sum(widths), _MIN_TIMELINE)


def _texts(request: RequestPicture) -> tuple[str, str, str, str, str]:
    priority = str(request.priority) if request.priority else ""
    names = (request.id, request.context, request.engine, request.status)
    id, context, engine, status = (escaping.cell(name) for name in names)
    return id, context, engine, status, priority


def _row(
    request: RequestPicture, now: float, span: float, limits: Sequence[int], width: int
) -> tuple[Text, ...]:
    texts = zip(_texts(request), limits, strict=True)
    id, context, engine, status, priority = (escaping.ends(text, limit) for text, limit in texts)
    return (
        Text(id, "bold" if request.active else ""),
        Text(context),
        Text(engine),
        Text(status, drawing.status_style(status)),
        Text(priority, justify="right"),
        drawing.timeline(request, now, span, width),
    )


def show(join: Callable[[], AbstractAsyncContextManager[Bus]], *, name: str) -> int:
    """Show the bus that ``join`` joins until somebody quits; returns the exit code.

    Raises:
        BusError: the bus cannot be joined, or was lost.
    """
    warning = LastWarning()
    warning.take_over()
    bridge = Bridge(join, name=name)
    bridge.start()
    try:
        bridge.wait_joined(_JOIN_WITHIN_S)
        if bridge.error is not None:
            raise bridge.error
        app = TapScreen(bridge, warning)
        app.run()
    finally:
        bridge.stop()
    if bridge.error is not None:
        raise bridge.error
    return app.return_code or 0
