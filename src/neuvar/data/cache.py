"""Verified data sets as idx files in the user's cache folder.

Every file is written under a name of its own and renamed when it is complete and on disk, so that
several processes may fill the cache at once and none sees half a file. Every file is verified each
time that it is read.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neuvar.data import idx
from neuvar.data.catalogue import Arrays, Entry
from neuvar.data.errors import DataError
from neuvar.data.idx import Bytes

UNFINISHED, DOWNLOAD = ".part", ".download-"
DAY = 24 * 60 * 60


def folder() -> Path:
    """``NEUVAR_CACHE``, or ``neuvar`` in the user's cache folder."""
    if chosen := os.environ.get("NEUVAR_CACHE"):
        return at_home(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return at_home(base) / "neuvar"


def at_home(path: str | Path) -> Path:
    """A path in which ``~`` stands for a home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"the home folder in {str(path)!r} is not known") from None


def has(entry: Entry) -> bool:
    """Whether all files of a data set are there; whether they are sound shows when reading."""
    place = folder() / entry.name
    try:
        return all((place / array.file).is_file() for array in entry.arrays.values())
    except OSError as error:
        raise DataError(f"{place} cannot be read: {error.strerror or error}") from None


def read(entry: Entry) -> Arrays:
    """Read a data set from the cache and verify every byte of it."""
    place, arrays = folder() / entry.name, {}
    for key, array in entry.arrays.items():
        path = place / array.file
        try:
            arrays[key] = idx.read(path, array.shape)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
        entry.check(key, arrays[key], place)
    return arrays


def store(entry: Entry, arrays: Arrays) -> Path:
    """Put a verified data set into the cache; on failure nothing half-written is left."""
    place = folder() / entry.name
    try:
        place.mkdir(parents=True, exist_ok=True)
        _forget_unfinished(place)
        for key, array in entry.arrays.items():
            _write(place / array.file, arrays[key])
    except OSError as error:
        raise DataError(f"{place} cannot be written: {error.strerror or error}") from None
    return place


def _write(path: Path, array: Bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with unfinished.open("xb") as file:
            file.write(idx.header(array.shape))
            file.write(array.reshape(-1).data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _forget_unfinished(place: Path) -> None:
    """Remove what killed processes left a day ago or earlier."""
    for path in place.glob(f".*{UNFINISHED}"):
        try:
            if time.time() - path.stat().st_mtime > DAY:
                path.unlink()
        except FileNotFoundError:
            continue  # another process was faster


def _forget_downloads() -> None:
    """Remove the folders of downloads that were killed a day ago or earlier."""
    for place in folder().glob(f"{DOWNLOAD}*"):
        try:
            last = max(path.stat().st_mtime for path in (place, *place.rglob("*")))
        except OSError:
            continue  # another process was faster
        if time.time() - last > DAY:
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for downloads, which is gone afterwards."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        _forget_downloads()
        place = Path(tempfile.mkdtemp(prefix=DOWNLOAD, dir=folder()))
    except (OSError, DataError):
        # Without a cache a data set can still be had, for this process alone.
        place = Path(tempfile.mkdtemp(prefix="neuvar-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
