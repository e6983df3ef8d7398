"""Data sets in a local folder, in their official layouts."""

from __future__ import annotations

from pathlib import Path

from neuvar.data import archives, cifar, idx
from neuvar.data.catalogue import ENTRIES, Array, Arrays, Entry
from neuvar.data.errors import DataError
from neuvar.data.idx import Bytes


def find(entry: Entry, folder: Path) -> Path | None:
    """The folder or the archive that holds a data set, in one of the places it usually has."""
    try:
        return _find(entry, folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror or error}") from None


def _find(entry: Entry, folder: Path) -> Path | None:
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} is not a folder")
    places = [folder, *(folder / name for name in entry.folders)]
    if entry.pickled is None:
        return next((p for p in places if _has_idx(entry, p, flat=p == folder)), None)
    layout = entry.pickled
    if folder.name == layout.folder and (folder / layout.batches[0].file).is_file():
        return folder
    for place in places:
        if (place / layout.folder).is_dir():
            return place / layout.folder
        if (place / layout.archive).is_file():
            return place / layout.archive
    return None


def read(entry: Entry, path: Path) -> Arrays:
    """Read a data set from where it was found and check it."""
    try:
        arrays = _read(entry, path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    for key, array in arrays.items():
        entry.check(key, array, path)
    return arrays


def _read(entry: Entry, path: Path) -> Arrays:
    if entry.pickled is None:
        return {key: read_idx(path, array) for key, array in entry.arrays.items()}
    if path.is_dir():
        return cifar.from_folder(entry, path)
    with idx.open_regular(path) as file:
        return cifar.from_archive(entry, file, str(path))


def read_idx(folder: Path, array: Array) -> Bytes:
    """Read an idx file, or the same with gzip."""
    plain = folder / array.file
    if plain.exists():
        return idx.read(plain, array.shape)
    packed = folder / f"{array.file}.gz"
    if not packed.exists():
        raise DataError(f"{folder} lacks {array.file}, with or without .gz")
    return read_packed_idx(packed, array)


def read_packed_idx(path: Path, array: Array) -> Bytes:
    """Read an idx file that is packed with gzip; its length must be the right one."""
    with idx.open_regular(path) as file:
        content = archives.gunzip(file, str(path), idx.size(array.shape))
    return idx.decode(content, array.shape, str(path))


def _has_idx(entry: Entry, folder: Path, *, flat: bool) -> bool:
    """Whether a folder has any of a data set's files, and not those of another one."""
    there = [a for a in entry.arrays.values() if _either(folder, a)]
    if not there or not flat:
        return bool(there)
    # MNIST and Fashion-MNIST have the same file names. The shortest file tells which it is.
    shortest = min(there, key=lambda array: idx.size(array.shape))
    others = {a.sha256 for e in ENTRIES.values() if e is not entry for a in e.arrays.values()}
    try:
        return idx.sha256(read_idx(folder, shortest)) not in others
    except (DataError, OSError):
        return True  # it is damaged, which read() will say


def _either(folder: Path, array: Array) -> bool:
    return (folder / array.file).exists() or (folder / f"{array.file}.gz").exists()
