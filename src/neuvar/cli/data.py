"""``neuvar data``: get, list and verify datasets."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from neuvar._validate import one_of
from neuvar.cli.command_line import add_command, aligned
from neuvar.data.catalogue import COARSE_NAMES, ENTRIES, DataError, Entry


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``neuvar data get|list|verify``."""
    parser.epilog = f"""\
neuvar looks for a dataset in --data or NEUVAR_DATA, then in the cache (NEUVAR_CACHE, or the user's
cache folder), then in packages of the system, then on the network. All data are checked by SHA-256.

datasets: {", ".join(ENTRIES)}

examples:
  neuvar data get mnist cifar10          download what is missing into the cache
  neuvar data get cifar100 --data ~/sets copy from official files into the cache
  neuvar data list                       which datasets are on this machine, and where
  neuvar data verify                     read all files and compare their checksums
"""
    actions = parser.add_subparsers(metavar="get|list|verify", required=True)
    for name, run, least, words in (
        ("get", _get, "+", "put datasets into the cache"),
        ("list", _list, None, "show which datasets are on this machine"),
        ("verify", _verify, "*", "compare the checksums of datasets on this machine"),
    ):
        example = f"example: neuvar data {name} {'mnist' if least else ''}".rstrip()
        action = add_command(actions, name, words, example)
        if least:
            action.add_argument("names", nargs=least, metavar="NAME", help=", ".join(ENTRIES))
        action.add_argument("--data", type=Path, metavar="FOLDER", help="look here first")
        action.set_defaults(run=run)


INCLUDED = {"cifar100-coarse": "cifar100", "mnist-excerpt": "neuvar itself"}
"""Datasets without files of their own, and what contains them."""


def _entries(names: Sequence[str]) -> list[Entry]:
    for name in names:
        if name in INCLUDED:
            raise ValueError(f"{name} comes with {INCLUDED[name]}, it has no files of its own")
        one_of("NAME", name, ENTRIES)
    return [ENTRIES[name] for name in dict.fromkeys(names)]


def _get(options: argparse.Namespace) -> int:
    from neuvar.data import cache, loading  # imports torch

    missing = 0
    for entry in _entries(options.names):
        began = time.perf_counter()
        try:
            obtained = loading.obtain(entry, folder=options.data)
        except DataError as error:  # the others may still be available
            missing += 1
            print(f"neuvar: {error}", file=sys.stderr)
            continue
        if not obtained.is_cached:
            cache.store(entry, obtained.arrays)
        taken = time.perf_counter() - began
        size = sum(array.nbytes for array in obtained.arrays.values()) / 1e6
        print(
            f"{entry.name}: {size:.0f} MB from {obtained.source}, every byte checked, "
            f"in {cache.folder() / entry.name} ({taken:.1f} s)",
            flush=True,
        )
    return 2 if missing else 0


def _list(options: argparse.Namespace) -> int:
    rows = [("name", "train", "test", "image", "classes", "where")]
    for entry in ENTRIES.values():
        (train, *image), (test, *_) = (entry.arrays[f"{s}_images"].shape for s in ("train", "test"))
        classes = str(len(entry.class_names))
        if "train_coarse" in entry.arrays:
            classes += f", {len(COARSE_NAMES)} coarse"
        where = [str(path) for path in places_of(entry, options.data)] or ["not on this machine"]
        shape = "×".join(map(str, image))
        rows.append((entry.name, str(train), str(test), shape, classes, ", ".join(where)))
    print(*aligned(rows), sep="\n")
    return 0


def places_of(entry: Entry, folder: Path | None) -> list[Path]:
    """The folders of this machine that hold a dataset, each once."""
    from neuvar.data import cache, loading  # imports torch

    folders = [loading.data_folder(folder), *(Path(p) for p in entry.system if Path(p).is_dir())]
    paths = [loading.find_in_folder(entry, one) for one in folders if one is not None]
    try:
        if cache.has(entry):
            paths.append(cache.folder() / entry.name)
    except DataError as error:
        warnings.warn(str(error), stacklevel=2)
    unique: dict[Path, Path] = {}
    for path in filter(None, paths):
        unique.setdefault(path.resolve(), path)
    return list(unique.values())


def _verify(options: argparse.Namespace) -> int:
    """Read each copy and report all that are damaged."""
    from neuvar.data import cache, loading  # imports torch

    damaged = copies = 0
    for entry in _entries(options.names) or ENTRIES.values():
        places = places_of(entry, options.data)
        if options.names and not places:
            raise DataError(
                f"{entry.name} is not on this machine; try neuvar data get {entry.name}"
            )
        for path in places:
            copies += 1
            try:
                if path == cache.folder() / entry.name:
                    cache.read(entry)
                else:
                    loading.read_folder(entry, path)
            except DataError as error:
                damaged += 1
                print(f"{entry.name}: {path} is damaged: {error}", file=sys.stderr)
            else:
                print(f"{entry.name}: {path} is complete, every byte checked")
    if not copies:
        print("no dataset is on this machine")
    return 2 if damaged else 0
