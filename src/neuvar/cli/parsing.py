"""Parsers of the command line: errors in one sentence, help with examples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

Commands = Any
"""What argparse's ``add_subparsers`` returns; its type has no public name."""


class Parser(argparse.ArgumentParser):
    """A parser with errors in one sentence and without abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_command(commands: Commands, name: str, words: str, epilog: str) -> Parser:
    """Add a subcommand whose help ends with ``epilog``."""
    parser: Parser = commands.add_parser(
        name,
        help=words,
        description=f"{words[0].upper()}{words[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=epilog,
    )
    return parser


def non_negative(text: str) -> int:
    """Parse an integer >= 0."""
    return _integer(text, 0)


def positive(text: str) -> int:
    """Parse an integer >= 1."""
    return _integer(text, 1)


def _integer(text: str, low: int) -> int:
    if not text.isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"must be an integer >= {low}, got {text!r}")
    return int(text)


def add_results(parser: argparse._ActionsContainer) -> None:
    """Add ``--results``, which several commands share."""
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="folder of the results, one file per scale (default: results)",
    )
