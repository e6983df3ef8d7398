"""Data sets in a local folder, in their official layouts."""

from __future__ import annotations

from pathlib import Path

from neuvar.data import cifar, idx
from neuvar.data.catalogue import ENTRIES, Array, Arrays, Entry
from neuvar.data.errors import DataError


def find(entry: Entry, folder: Path) -> Path | None:
    """The folder or archive that holds a data set, at one of its usual paths in a folder."""
    try:
        if not folder.is_dir():
            raise DataError(f"the data folder {folder} is not a folder")
        return _find(entry, folder)
    except OSError as error:
        raise DataError(f"could not read {folder}: {error.strerror or error}") from None


def _find(entry: Entry, folder: Path) -> Path | None:
    candidates = [folder, *(folder / name for name in entry.folders)]
    if entry.pickled is None:
        return next((path for path in candidates if _has_idx(entry, path, path == folder)), None)
    layout = entry.pickled
    if folder.name == layout.folder and (folder / min(layout.batches["train"])).is_file():
        return folder
    for path in candidates:
        if (path / layout.folder).is_dir():
            return path / layout.folder
        if (path / layout.archive).is_file():
            return path / layout.archive
    return None


def _has_idx(entry: Entry, folder: Path, shared: bool) -> bool:
    """Whether a folder has any of a data set's idx files.

    MNIST and Fashion-MNIST have the same file names. In a folder that they may share, the shortest
    file decides which of them it is.
    """
    arrays = [array for array in entry.arrays.values() if _idx_path(folder, array) is not None]
    if not arrays or not shared:
        return bool(arrays)
    shortest = min(arrays, key=lambda array: idx.size(array.shape))
    others = {a.sha256 for e in ENTRIES.values() if e is not entry for a in e.arrays.values()}
    try:
        return idx.sha256(_read_idx(folder, shortest)) not in others
    except (DataError, OSError):
        return True  # damaged: read() reports it


def read(entry: Entry, path: Path) -> Arrays:
    """Read a data set from a path that :func:`find` returned, and check it."""
    try:
        if entry.pickled is not None:
            arrays = cifar.read(entry, path)
        else:
            arrays = {key: _read_idx(path, array) for key, array in entry.arrays.items()}
    except OSError as error:
        raise DataError(f"could not read {path}: {error.strerror or error}") from None
    entry.check(arrays, path)
    return arrays


def _read_idx(folder: Path, array: Array) -> idx.Bytes:
    path = _idx_path(folder, array)
    if path is None:
        raise DataError(f"{folder} lacks {array.file}, with or without .gz")
    return idx.read(path, array.shape)


def _idx_path(folder: Path, array: Array) -> Path | None:
    """An idx file, or the same packed with gzip."""
    paths = (folder / array.file, folder / f"{array.file}.gz")
    return next((path for path in paths if path.exists()), None)
