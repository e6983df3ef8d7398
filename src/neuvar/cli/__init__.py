"""The command ``neuvar``: each of its commands has a module with a function ``add_options``."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module, metadata

from neuvar.cli.command_line import FORMAT, Parser, add_command

COMMANDS = {
    "demo": (
        "demo",
        "compare forgetting and wrong labels with and without NVRM, in about a minute and a half",
    ),
    "list": (
        "list_experiments",
        "show the experiments, their runs and how many of these are finished",
    ),
    "run": ("run", "run experiments, resuming where an earlier call stopped"),
    "report": ("report", "turn results into verdicts, figures and an HTML page"),
    "data": ("data", "get, list and verify datasets"),
    "clean": ("clean", "find wrong labels in a dataset, show the worst, write corrected ones"),
}
"""Module and summary of each command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code, 2 after an error message."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal cannot show
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = lambda message, *_, **__: print(
                f"neuvar: {message}", file=sys.stderr
            )
            try:
                options = _parse(sys.argv[1:] if arguments is None else [*arguments])
                code: int = options.run(options)
                return code
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe; Python flushes the rest to /dev/null at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, ImportError) as error:
        print(f"neuvar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("neuvar: interrupted", file=sys.stderr)
        return 130


def _parse(words: list[str]) -> argparse.Namespace:
    """Parse a command line; only the module of its command is imported."""
    parser = Parser(
        prog="neuvar",
        description="Train networks with weight noise, run experiments, and find wrong labels.",
        epilog="""\
examples:
  neuvar demo                       train with and without NVRM, in about a minute and a half
  neuvar list                       the experiments, and how many of their runs are finished
  neuvar run forgetting             run one; Ctrl-C stops it, the same command resumes
  neuvar run my_experiment.py       run an experiment of your own
  neuvar report                     figures, tables and verdicts
  neuvar data get mnist             download a dataset into the cache
  neuvar clean photos               find wrong labels in a folder of images
  neuvar run --help                 more about a command
""",
        **FORMAT,
    )
    try:
        version = metadata.version("neuvar")
    except metadata.PackageNotFoundError:
        version = "from a source folder, not installed"
    parser.add_argument("--version", action="version", version=f"neuvar {version}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = add_command(commands, name, summary)
        if name in words:
            import_module(f"neuvar.cli.{module}").add_options(command)
    options, unknown = parser.parse_known_args(words, argparse.Namespace(words=words))
    if unknown:
        command = next((commands.choices[word] for word in words if word in COMMANDS), parser)
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options
