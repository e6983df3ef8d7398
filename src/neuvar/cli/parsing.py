"""Parsers of the command line: errors in one sentence, help with examples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

Commands = Any
"""What argparse's ``add_subparsers`` returns; its type has no public name."""


class Parser(argparse.ArgumentParser):
    """A parser that says in one sentence what is wrong, and takes options by their full name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_command(commands: Commands, name: str, words: str, epilog: str) -> Parser:
    """Add a subcommand whose help shows ``epilog``, with its examples, as it is written."""
    parser: Parser = commands.add_parser(
        name,
        help=words,
        description=f"{words[0].upper()}{words[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=epilog,
    )
    return parser


def whole(text: str) -> int:
    """An argument that counts something: an integer from 0.

    >>> whole("12")
    12
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


def counted(text: str) -> int:
    """An argument that counts something of which there must be at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def add_results(parser: argparse._ActionsContainer) -> None:
    """Add ``--results``, which several commands share."""
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="folder of the results, one file a scale (default: results)",
    )
