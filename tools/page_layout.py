"""Lay out the pages of the site: mkdocs.yml names this file as a hook.

"0.05 ± 0.01", "95 %", "b = 0.05", "(-0.2 to +0.1)" and "CIFAR-10" stay on one line. So does short
code, which would break at the hyphens of an option. Long expressions break after dots and brackets.
Columns of long cells get a least width. tables.css reads these classes. Pages with fewer than two
sections have no table of contents: it would only take width.
"""

import re
from typing import Any

PIECE = re.compile(r"<(pre|code|math|script|style)\b.*?</\1>|<[^>]+>|[^<]+", re.S)
SYMBOL = r"(?:lr|ess|clip|h₀|σ²|[bnpλδργ])"
UNBROKEN = re.compile(
    rf"""(?<=\d)\s(?=[%±×]) | (?<=±)\s(?=\w)
    | (?<=\d)\s(?=of\s\d) | (?<=\d\sof)\s(?=\d)
    | (?<!\w){SYMBOL}(?:\s=)?\s(?=\d) | (?<!\w){SYMBOL}\s=\s(?=auto\b)
    | (?<=\bθ)\s(?=\+\sε) | (?<=\bθ\s\+)\s(?=ε)
    | (?<=\btr)\s(?=H\b) | (?<=\bat)\s(?=\d)
    | [(\[][-+−]?[\d.]+(?:\s(?:to|and)|,)\s[-+−]?[\d.]+[)\]]""",
    re.VERBOSE,
)
SPACE = re.compile(r"\s")
BEFORE_INTERVAL = re.compile("\u00a0(?=[(\\[])")
NAME = re.compile(r"\b(?:CIFAR|NVRM|ResNet|VGG|Fashion)-\w+|\b\d+(?:-\d+){2,}\b|\b\d+–\d+\b")
"""Names with a hyphen, layers of a network, and ranges."""
WORD = re.compile(r"[^\s<>]+")
PLACE_TO_BREAK = re.compile(r"(?<=[a-z][./(])(?=[a-z])")
CELL = re.compile(r"<td>(?=(.*?)</td>)", re.S)
TAG = re.compile(r"<[^>]+>")
LONG_CELL, SHORT_CODE = 12, 28
"""In letters."""


def on_page_content(html: str, page: Any = None, **_: Any) -> str:
    """Called by mkdocs with the content of each page."""
    if page is not None and sum(len(title.children) for title in page.toc) < 2:
        page.meta.setdefault("hide", []).append("toc")
    return CELL.sub(_cell, PIECE.sub(_piece, html))


def _piece(match: re.Match[str]) -> str:
    """Text with no-break spaces, and marked code."""
    piece = match[0]
    if piece.startswith("<code>"):
        if len(TAG.sub("", piece)) <= SHORT_CODE:
            return piece.replace("<code>", '<code class="short">', 1)
        if piece.count("<") > 2:
            return piece
        return f"<code>{WORD.sub(_word, piece[6:-7])}</code>"
    if piece.startswith("<"):
        return piece
    text = UNBROKEN.sub(lambda m: SPACE.sub("\u00a0", m[0]), BEFORE_INTERVAL.sub(" ", piece))
    return NAME.sub(_whole, text)


def _word(match: re.Match[str]) -> str:
    """A word of long code: an option stays whole, a long expression breaks."""
    if match[0].startswith("--"):
        return _whole(match)
    return PLACE_TO_BREAK.sub("<wbr>", match[0]) if len(match[0]) > SHORT_CODE else match[0]


def _whole(match: re.Match[str]) -> str:
    return f'<span class="name">{match[0]}</span>'


def _cell(match: re.Match[str]) -> str:
    return '<td class="long">' if len(TAG.sub("", match[1])) > LONG_CELL else match[0]
