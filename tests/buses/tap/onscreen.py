"""What stands on a Textual screen, as text."""

import html
import re
from collections import defaultdict

from textual.app import App

_TEXT = re.compile(r'<text [^>]*?x="(?P<x>[\d.]+)" y="(?P<y>[\d.]+)"[^>]*>(?P<text>[^<]*)</text>')


_CHARACTER = 12.2
"""How wide a character is in the picture that Textual draws."""


def on_screen(app: App[None]) -> list[str]:
    """The rows of the screen, as Textual would draw them now."""
    rows: dict[float, str] = defaultdict(str)
    for found in _TEXT.finditer(app.export_screenshot(simplify=True)):
        text = html.unescape(found["text"]).replace("\xa0", " ")
        y = float(found["y"])
        rows[y] = rows[y].ljust(round(float(found["x"]) / _CHARACTER)) + text
    return [row for _, row in sorted(rows.items()) if row.strip()]
