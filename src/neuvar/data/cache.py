"""Verified datasets as idx files in the user's cache folder.

Files are written atomically, so several processes may fill the cache at once. Every file is
verified each time it is read.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neuvar._atomic import UNFINISHED, replacing
from neuvar.data import idx
from neuvar.data.catalogue import Arrays, DataError, Entry, os_errors

DOWNLOAD = ".download-"
DAY = 24 * 60 * 60


def folder() -> Path:
    """``NEUVAR_CACHE``, or ``neuvar`` in the user's cache folder."""
    if chosen := os.environ.get("NEUVAR_CACHE"):
        return expand_home(chosen)
    return expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "neuvar"


def expand_home(path: str | Path) -> Path:
    """Replace ``~`` by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"the home folder in {str(path)!r} is not known") from None


def has(entry: Entry) -> bool:
    """Whether all files of a dataset exist; :func:`read` checks their content."""
    path = folder() / entry.name
    with os_errors("read", path):
        return all((path / array.file).is_file() for array in entry.arrays.values())


def read(entry: Entry) -> Arrays:
    """Read a dataset from the cache and verify every byte."""
    path = folder() / entry.name
    with os_errors("read", path):
        arrays = {k: idx.read(path / array.file, array.shape) for k, array in entry.arrays.items()}
    entry.check(arrays, path)
    return arrays


def store(entry: Entry, arrays: Arrays) -> Path:
    """Write a verified dataset to the cache."""
    path = folder() / entry.name
    with os_errors("write", path):
        path.mkdir(parents=True, exist_ok=True)
        _remove_old(path.glob(f"*{UNFINISHED}"))
        for key, array in entry.arrays.items():
            with replacing(path / array.file) as file:
                file.write(idx.header(array.shape))
                file.write(arrays[key].reshape(-1).data)
    return path


@contextmanager
def download_folder() -> Iterator[Path]:
    """A temporary folder, in the cache if possible."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        _remove_old(folder().glob(f"{DOWNLOAD}*"))
        path = Path(tempfile.mkdtemp(prefix=DOWNLOAD, dir=folder()))
    except (OSError, DataError):
        path = Path(tempfile.mkdtemp(prefix="neuvar-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_old(paths: Iterator[Path]) -> None:
    """Remove files and folders that killed processes left a day ago or earlier."""
    for path in paths:
        try:
            changed = max(part.stat().st_mtime for part in (path, *path.rglob("*")))
        except OSError:
            continue  # another process removed it
        if time.time() - changed <= DAY:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
