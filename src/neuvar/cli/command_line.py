"""Shared by the commands: parsers, types of options, and text in columns."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


FORMAT: dict[str, Any] = {
    "allow_abbrev": False,
    "formatter_class": argparse.RawDescriptionHelpFormatter,
}
"""How each parser reads options and shows its help."""


def add_command(commands: Any, name: str, about: str, epilog: str = "") -> argparse.ArgumentParser:
    """Add a command to the result of ``add_subparsers``; its help ends with ``epilog``."""
    description = f"{about[0].upper()}{about[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=description, epilog=epilog, **FORMAT
    )
    return parser


def add_results(parser: argparse._ActionsContainer) -> None:
    """Add ``--results``, which several commands share."""
    parser.add_argument(
        "--results", type=Path, default=Path("results"), metavar="DIR",
        help="folder of the results, one file per scale (default: results)",
    )  # fmt: skip


def non_negative(text: str, low: int = 0) -> int:
    """Parse an integer >= ``low``."""
    if not text.isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"must be an integer >= {low}, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Parse an integer >= 1."""
    return non_negative(text, low=1)


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Rows of cells as lines of aligned columns; the columns ``right`` are aligned to the right.

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
