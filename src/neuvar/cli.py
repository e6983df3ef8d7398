"""The command ``neuvar``. A subcommand is one function that adds itself, listed in COMMANDS."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from neuvar.data import cache, folders, loading
from neuvar.data.catalogue import ENTRIES, Entry
from neuvar.data.classes import COARSE_NAMES
from neuvar.data.errors import DataError

Commands = Any
"""What argparse's ``add_subparsers`` returns; its type has no public name."""


class _Parser(argparse.ArgumentParser):
    """A parser that says in one sentence what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


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
    except (ValueError, OSError) as error:
        print(f"neuvar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("neuvar: interrupted", file=sys.stderr)
        return 130


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"neuvar: {message}", file=sys.stderr)


def _carry_out(arguments: Sequence[str] | None) -> int:
    parser = _Parser(
        prog="neuvar",
        description="Train networks that keep working when their weights move.",
        epilog="example: neuvar data get mnist",
    )
    parser.add_argument("--version", action="version", version=f"neuvar {_version()}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for add in COMMANDS:
        add(commands)
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _version() -> str:
    try:
        return metadata.version("neuvar")
    except metadata.PackageNotFoundError:
        return "from a folder of sources, not installed"


def add_data(commands: Commands) -> None:
    """Add ``neuvar data get|list|verify``."""
    parser = commands.add_parser(
        "data",
        help="get, list and verify data sets",
        description="Get, list and verify data sets.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""\
A data set is looked for in --data or NEUVAR_DATA, then in the cache, NEUVAR_CACHE or a folder of
the user's, then on the network. Every byte is checked by SHA-256.

data sets: {", ".join(ENTRIES)}

examples:
  neuvar data get mnist cifar10          download what is missing, keep it in the cache
  neuvar data get cifar100 --data ~/sets copy from official files into the cache
  neuvar data list                       what there is, and where
  neuvar data verify                     read everything again and compare its checksums
""",
    )
    actions = parser.add_subparsers(metavar="get|list|verify", required=True)
    for name, run, least, words in (
        ("get", _get, "+", "put data sets into the cache"),
        ("list", _list, None, "show which data sets are on this machine"),
        ("verify", _verify, "*", "compare the checksums of data sets on this machine"),
    ):
        action = actions.add_parser(name, help=words, description=f"{words.capitalize()}.")
        if least:
            action.add_argument("names", nargs=least, metavar="NAME", help=", ".join(ENTRIES))
        action.add_argument("--data", type=Path, metavar="FOLDER", help="look here first")
        action.set_defaults(run=run)


INCLUDED = {"cifar100-coarse": "cifar100", "mnist-excerpt": "neuvar itself"}
"""Data sets that need not be had on their own, and what they come with."""


def _entries(names: Sequence[str]) -> list[Entry]:
    for name in names:
        if name in INCLUDED:
            raise ValueError(f"{name} comes with {INCLUDED[name]}, it has no files of its own")
        if name not in ENTRIES:
            raise ValueError(f"NAME must be one of {', '.join(ENTRIES)}, got {name!r}")
    return [ENTRIES[name] for name in dict.fromkeys(names)]


def _get(options: argparse.Namespace) -> int:
    for entry in _entries(options.names):
        began = time.perf_counter()
        obtained = loading.obtain(entry, folder=options.data)
        if not obtained.is_cached:
            cache.store(entry, obtained.arrays)
        taken = time.perf_counter() - began
        size = sum(array.nbytes for array in obtained.arrays.values()) / 1e6
        print(
            f"{entry.name}: {size:.0f} MB from {obtained.source}, every byte checked, "
            f"in {cache.folder() / entry.name} ({taken:.1f} s)",
            flush=True,
        )
    return 0


def _list(options: argparse.Namespace) -> int:
    rows = [("name", "train", "test", "image", "classes", "where")]
    for entry in ENTRIES.values():
        (train, *image), (test, *_) = (entry.arrays[f"{s}_images"].shape for s in ("train", "test"))
        classes = str(len(entry.class_names))
        if "train_coarse" in entry.arrays:
            classes += f", {len(COARSE_NAMES)} coarse"
        where = [str(path) for path in _places(entry, options.data)] or ["not on this machine"]
        shape = "×".join(map(str, image))
        rows.append((entry.name, str(train), str(test), shape, classes, ", ".join(where)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0


def _places(entry: Entry, folder: Path | None) -> list[Path]:
    """Every place of this machine where a data set lies, each once."""
    local = loading.find_locally(entry, folder)
    system = [Path(p) for p in entry.system if Path(p).is_dir()]
    found = [local, *(folders.find(entry, place) for place in system)]
    try:
        if cache.has(entry):
            found.append(cache.folder() / entry.name)
    except DataError as error:
        warnings.warn(str(error), stacklevel=2)
    places: dict[Path, Path] = {}
    for path in found:
        if path is not None:
            places.setdefault(path.resolve(), path)
    return list(places.values())


def _verify(options: argparse.Namespace) -> int:
    """Read each copy; tell all that are damaged before failing."""
    damaged = found = 0
    for entry in _entries(options.names) or ENTRIES.values():
        places = _places(entry, options.data)
        if options.names and not places:
            raise DataError(f"{entry.name} is not on this machine; neuvar data get {entry.name}")
        for path in places:
            found += 1
            try:
                if path == cache.folder() / entry.name:
                    cache.read(entry)
                else:
                    folders.read(entry, path)
            except DataError as error:
                damaged += 1
                print(f"{entry.name}: {path} is damaged: {error}", file=sys.stderr)
            else:
                print(f"{entry.name}: {path} is complete, every byte checked")
    if not found:
        print("no data set is on this machine")
    return 2 if damaged else 0


COMMANDS = (add_data,)
