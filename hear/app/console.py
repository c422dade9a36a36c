"""Tables and bars in a terminal, drawn by Rich: the only module that makes its consoles.

Cells and lines are made printable by whoever has them, so that their width is known before they are
laid out. This is the net below: nothing that is received is ever read as markup or as an emoji, and
a character that would reach the terminal all the same is replaced by one of its width. What Rich
itself writes, colours and cursor, stays.
"""

from collections.abc import Iterable
from typing import IO, Final

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from hear.app import output
from hear.escaping import printable

PIPED_WIDTH: Final = 160
"""Where no terminal sets a width, one policy stays on one line, for grep and diff."""
_STAND_IN: Final = "\N{REPLACEMENT CHARACTER}"


class Console(RichConsole):
    """A console of Rich that nobody can steer through what is printed on it."""

    def __init__(
        self, *, width: int | None = None, stderr: bool = False, file: IO[str] | None = None
    ) -> None:
        super().__init__(
            width=width, stderr=stderr, file=file, markup=False, emoji=False, highlight=False
        )

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As Rich does; all that is drawn comes through here, the cells of a table one by one."""
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or (text.isascii() and text.isprintable()) or text == "\n":
                yield segment
            else:
                yield segment._replace(text=_safe(text, self.encoding))

    def drawn(self, parts: Iterable[RenderableType]) -> output.Drawn:
        """These parts, one below the other, as they would be printed, without blanks at ends."""
        with self.capture() as captured:
            for part in parts:
                self.print(part)
        return output.Drawn("\n".join(line.rstrip() for line in captured.get().splitlines()))


def of_results(width: int = PIPED_WIDTH) -> Console:
    """A console on standard output, as wide as the terminal or, elsewhere, as ``width``."""
    return Console(width=None if output.is_terminal() else width)


def of_errors() -> Console:
    """A console on standard error."""
    return Console(stderr=True)


def _safe(text: str, encoding: str) -> str:
    shown = "".join(c if printable(c, lines=True) == c else _STAND_IN for c in text)
    return (
        shown if encoding.startswith("utf") else shown.encode(encoding, "replace").decode(encoding)
    )
