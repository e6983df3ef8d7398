"""The command ``neuvar``: each subcommand is a function in COMMANDS that adds its parser."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from neuvar.cli.bench import add_bench
from neuvar.cli.clean import add_clean
from neuvar.cli.data import add_data
from neuvar.cli.demo import add_demo
from neuvar.cli.list_experiments import add_list
from neuvar.cli.parsing import Parser
from neuvar.cli.report import add_report
from neuvar.cli.run import add_run

COMMANDS = (add_demo, add_list, add_run, add_report, add_data, add_clean, add_bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code, 2 after an error message."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal cannot show
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _show_warning
            try:
                options = _parse(arguments)
                code: int = options.run(options)
                return code
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe; what Python flushes at exit goes to /dev/null.
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


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="neuvar",
        description="Train networks that keep working when their weights move.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""\
examples:
  neuvar demo                       what it is about, in a minute or two
  neuvar list                       the experiments, and how many of their runs are finished
  neuvar run forgetting             run one; Ctrl-C stops it, the same command resumes
  neuvar run my_experiment.py       run an experiment of your own
  neuvar report                     figures, tables and verdicts
  neuvar data get mnist             download a data set into the cache
  neuvar clean photos               find wrong labels in a folder of images
  neuvar run --help                 more about a command
""",
    )
    parser.add_argument("--version", action="version", version=f"neuvar {_version()}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for add in COMMANDS:
        add(commands)
    words = sys.argv[1:] if arguments is None else list(arguments)
    return parser.parse_args(words, argparse.Namespace(words=words))


def _version() -> str:
    try:
        return metadata.version("neuvar")
    except metadata.PackageNotFoundError:
        return "from a folder of sources, not installed"
