"""The command ``neuvar``. A subcommand is one function that adds itself, listed in COMMANDS."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from neuvar.cli.bench import add_bench
from neuvar.cli.clean import add_clean
from neuvar.cli.data import add_data
from neuvar.cli.demo import add_demo
from neuvar.cli.listing import add_list
from neuvar.cli.parsing import Parser
from neuvar.cli.report import add_report
from neuvar.cli.run import add_run

COMMANDS = (add_demo, add_list, add_run, add_report, add_data, add_clean, add_bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line; 0 if all went well, 2 after a sentence on standard error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A sign that the screen does not know becomes a question mark rather than an error.
        sys.stdout.reconfigure(errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _show_warning
            try:
                return _carry_out(arguments)
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read this has seen enough; what Python still flushes at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, ImportError) as error:
        print(f"neuvar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("neuvar: interrupted", file=sys.stderr)
        return 130


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"neuvar: {message}", file=sys.stderr)


def _carry_out(arguments: Sequence[str] | None) -> int:
    parser = Parser(
        prog="neuvar",
        description="Train networks that keep working when their weights move.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""\
examples:
  neuvar demo                       what it is about, in a minute or two
  neuvar list                       the experiments, and how far they are
  neuvar run forgetting             carry one out; Ctrl-C stops it, the same command goes on
  neuvar report                     its figures, tables and verdict
  neuvar data get mnist             put a data set into the cache
  neuvar clean photos               find wrong labels in a folder of images
  neuvar run --help                 more about a command
""",
    )
    parser.add_argument("--version", action="version", version=f"neuvar {_version()}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for add in COMMANDS:
        add(commands)
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words, argparse.Namespace(words=words))
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _version() -> str:
    try:
        return metadata.version("neuvar")
    except metadata.PackageNotFoundError:
        return "from a folder of sources, not installed"
