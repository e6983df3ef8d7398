"""Text in columns, which needs nothing but a screen."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Rows whose cells stand below each other; those of the columns ``right`` end together.

    >>> print(*aligned([("name", "n"), ("mnist", "10"), ("x", "5")], right=[1]), sep="|")
    name    n|mnist  10|x       5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def paragraph(text: str, *, indent: int = 0) -> str:
    """Text in lines that fit on the screen, at most 100 characters long."""
    width = min(100, max(40, shutil.get_terminal_size((100, 24)).columns))
    margin = " " * indent
    return textwrap.fill(
        " ".join(text.split()), width, initial_indent=margin, subsequent_indent=margin
    )
