"""A line for each message: time, category, source, words, in columns.

On a terminal a long line is folded between words, so that no id is ever broken, and what follows
is indented; elsewhere a message is one line. All that is received goes through ``hear.escaping``.
"""

from datetime import datetime

from hear.buses.observe.tap.reading import Reading
from hear.escaping import cell, one_line
from hear.messages import DEFAULT_TENANT

_CATEGORY_WIDTH = 8
_SOURCE_WIDTH = 12
_MAX_SOURCE_WIDTH = 24
_MIN_ROOM = 20
_RESET = "\x1b[0m"
_DIM = "\x1b[2m"
_BOLD = "\x1b[1m"
_RED = "\x1b[31m"
_YELLOW = "\x1b[33m"
_COLOURS = {"intent": "\x1b[34m", "control": "\x1b[35m", "state": "\x1b[36m", "outcome": "\x1b[32m"}
_BAD = ("rejected ", "failed ", "does not support ")


def of_tenant(name: str, tenant: str) -> str:
    """A name as people are shown it: with its tenant, where that is not the default one."""
    return name if tenant == DEFAULT_TENANT else f"{name} ({tenant})"


class Lines:
    """Lays out lines. The column of sources grows with the names that come, up to a limit."""

    def __init__(self, *, colour: bool = False, width: int | None = None) -> None:
        """``width`` is where lines are folded, in characters; None: they are not."""
        self.width = width
        self._colour = colour
        self._source_width = _SOURCE_WIDTH

    def message(self, reading: Reading) -> str:
        """The line of a message."""
        envelope = reading.envelope
        remark = f" ({reading.remark})" if reading.remark else ""
        words = reading.words + remark
        wrong = reading.message is None or words.startswith(_BAD)
        tone = _RED if wrong else _DIM if remark else ""
        source = of_tenant(envelope.source, envelope.tenant)
        return self._line(envelope.time_s, envelope.category, source, words, tone)

    def gap(self, time_s: float, source: str, stem: str, missed: int) -> str:
        """The line of a loss."""
        noun = "message" if missed == 1 else "messages"
        return self._line(time_s, "", source, f"gap: {missed} {noun} missed on {stem}", _YELLOW)

    def notice(self, time_s: float, text: str) -> str:
        """The line of something that the tap says of itself."""
        return self._line(time_s, "", "tap", text, _YELLOW)

    def _line(self, time_s: float, category: str, source: str, words: str, tone: str) -> str:
        source, words = cell(source), one_line(words)
        if self._source_width < len(source):
            self._source_width = min(len(source), _MAX_SOURCE_WIDTH)
        clock = clock_time(time_s)
        category = cell(category, _SOURCE_WIDTH).ljust(_CATEGORY_WIDTH)
        padded = source.ljust(self._source_width)
        indent = len(clock) + len(category) + len(padded) + 3
        words = self._fold(words, indent)
        if self._colour:
            clock = f"{_DIM}{clock}{_RESET}"
            category = f"{_COLOURS.get(category.strip(), '')}{category}{_RESET}"
            padded = f"{_BOLD}{padded}{_RESET}"
            words = f"{tone}{words}{_RESET}" if tone else words
        return f"{clock} {category} {padded} {words}"

    def _fold(self, words: str, indent: int) -> str:
        if self.width is None or indent + len(words) <= self.width:
            return words
        if self.width - indent < _MIN_ROOM:
            indent = min(4, self.width // 2)
        room = max(self.width - indent, 1)
        rows = [""]
        for word in words.split(" "):
            if rows[-1] and len(rows[-1]) + 1 + len(word) > room:
                rows.append(word)
            else:
                rows[-1] = f"{rows[-1]} {word}" if rows[-1] else word
        return f"\n{' ' * indent}".join(rows)


def clock_time(time_s: float) -> str:
    """The local time of day of a Unix time, with milliseconds."""
    try:
        return datetime.fromtimestamp(time_s).strftime("%H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError, OSError):  # a peer may say anything
        return "--:--:--.---"
