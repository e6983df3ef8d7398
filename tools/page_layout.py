"""Lay out the pages of the site: mkdocs.yml names this file as a hook.

"0.05 ± 0.01", "95 %" and "b = 0.05" stay on one line. So does short code, which would break at the
hyphens of an option, and columns of long cells get a least width: tables.css reads these classes.
"""

import re
from typing import Any

PIECE = re.compile(r"<(pre|code|math|script|style)\b.*?</\1>|<[^>]+>|[^<]+", re.S)
BREAK = re.compile(
    r"""(?<=\d)\s(?=[%±×]) | (?<=±)\s(?=\d)
    | (?<=\d)\s(?=of\s\d) | (?<=\d\sof)\s(?=\d)
    | (?<=\b[bnpλδρ])\s(?=(=\s)?\d) | (?<=\b[bnpλδρ]\s=)\s(?=\d)
    | (?<=\bθ)\s(?=\+\sε) | (?<=\bθ\s\+)\s(?=ε)""",
    re.VERBOSE,
)
CELL = re.compile(r"<td>(?=(.*?)</td>)", re.S)
TAG = re.compile(r"<[^>]+>")
LONG_CELL, SHORT_CODE = 12, 28
"""In letters."""


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with the content of each page."""
    return CELL.sub(_cell, PIECE.sub(_piece, html))


def _piece(match: re.Match[str]) -> str:
    """Text with no-break spaces, and marked code."""
    piece = match[0]
    if piece.startswith("<code>") and len(TAG.sub("", piece)) <= SHORT_CODE:
        return piece.replace("<code>", '<code class="short">', 1)
    return piece if piece.startswith("<") else BREAK.sub("\u00a0", piece)


def _cell(match: re.Match[str]) -> str:
    return '<td class="long">' if len(TAG.sub("", match[1])) > LONG_CELL else match[0]
