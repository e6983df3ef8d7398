"""Read labels that are noisy already, such as human annotations, from arrays and files."""

from __future__ import annotations

import csv
import math
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from neuvar.labels.noisy_labels import (
    Integers,
    NoisyLabels,
    checked_classes,
    checked_labels,
    make_result,
)


def from_array(
    noisy: Integers, *, classes: int, clean: Integers | None = None, source: str = "array"
) -> NoisyLabels:
    """Use labels that are already noisy.

    Args:
        noisy: the labels, integers from 0.
        classes: number of classes.
        clean: the labels without noise, if known.
        source: a name for the provenance.

    >>> result = from_array([0, 1, 1, 2], classes=3, clean=[0, 1, 2, 2])
    >>> result.rate, result.mask
    (0.25, tensor([False, False,  True, False]))
    """
    k = checked_classes(classes)
    labels = checked_labels("noisy", noisy, k)
    truth = None if clean is None else checked_labels("clean", clean, k).to(labels.device)
    if truth is not None and len(truth) != len(labels):
        raise ValueError(
            f"noisy and clean must have the same length, got {len(labels)} and {len(truth)}"
        )
    return make_result(labels, truth, k, kind="given", source=str(source))


def from_file(
    path: str | Path,
    *,
    classes: int,
    count: int | None = None,
    key: str | None = None,
    clean: Integers | None = None,
) -> NoisyLabels:
    r"""Read labels that are already noisy. Nothing in the file is executed.

    For CIFAR-10N, CIFAR-100N, CIFAR-10H and cleanlab's label errors see :func:`cifar10n`,
    :func:`cifar100n`, :func:`cifar10h` and :func:`label_errors`.

    Args:
        path: ``.npy``; ``.npz``; ``.csv`` with or without a header; ``.txt`` with integers
            separated by white space; or ``.pt`` with tensors or arrays.
        classes: number of classes.
        count: expected number of labels; by default that of ``clean``.
        key: name of the array or column, if there are several.
        clean: the labels without noise, if known.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "labels.csv")
    ...     size = path.write_text("image,label,worker\n7,0,31\n8,2,31\n")
    ...     from_file(path, key="label", classes=3, count=2).noisy
    tensor([0, 2])
    """
    path = Path(path)
    expected = count if count is not None or clean is None else len(clean)
    if expected is None:
        raise ValueError("count or clean must be given, to check the number of labels")
    noisy = checked_labels(path.name, _read_labels(path, key), checked_classes(classes))
    if len(noisy) != expected:
        raise ValueError(f"{path.name} must have {expected} labels, got {len(noisy)}")
    source = path.name if key is None else f"{path.name}:{key}"
    return from_array(noisy, classes=classes, clean=clean, source=source)


def read_content(path: Path) -> Any:
    """Content of a file: an array, a list, or a mapping of arrays or columns by name."""
    if path.suffix not in READERS:
        raise ValueError(f"path must end in {', '.join(READERS)}, got {path.name!r}")
    if not path.is_file():
        raise ValueError(f"path must be a file, got {str(path)!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # labels may be wrong after a warning
            warnings.filterwarnings("ignore", "Reading `.npy`")  # files of Python 2
            return READERS[path.suffix](path)
    except (pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path.name} has objects other than arrays, or is damaged") from error
    except Exception as error:  # damaged files raise any kind of error
        message = f"{path.name} is not a valid {path.suffix} file: {first_line(error)}"
        raise ValueError(message) from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if there is no message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _read_labels(path: Path, key: str | None) -> Any:
    """The labels in a file; ``key`` names the array or column."""
    content = read_content(path)
    if not isinstance(content, Mapping):
        if key is not None:
            raise ValueError(f"key must be None, because {path.name} has no names, got {key!r}")
        return content
    is_table = path.suffix == ".csv"
    if key is None:
        names = [n for n, c in content.items() if not is_table or _are_integers(c.values())]
        key = names[0] if len(names) == 1 else next(iter(content)) if len(content) == 1 else None
    if key not in content:
        raise ValueError(f"key must be one of {', '.join(map(str, content))}, got {key!r}")
    if not is_table:
        return content[key]
    for row, cell in content[key].items():
        if not _are_integers([cell]):
            raise ValueError(
                f"{path.name} must have integers in column {key!r}, got {cell!r} in row {row}"
            )
    return [int(cell) for cell in content[key].values()]


def array_names(path: Path) -> list[str]:
    """Names of the arrays in a .npz file."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    return [name.removesuffix(".npy") for name in names if name.endswith(".npy")]


def read_array(path: Path, name: str | None = None) -> np.ndarray[Any, Any]:
    """The array of a .npy file, or one of a .npz file. Nothing is unpickled."""
    if name is None:
        with path.open("rb") as file:
            return _read_npy(file, path.stat().st_size)
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo(f"{name}.npy").file_size
        with archive.open(f"{name}.npy") as file:
            return _read_npy(file, size)


def _read_npy(file: IO[bytes], size: int) -> np.ndarray[Any, Any]:
    """Read an array. Refuses a header with a larger size than the file before allocating memory."""
    older = np.lib.format.read_magic(file) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if older else np.lib.format.read_array_header_2_0
    shape, _, kind = read(file)
    expected, actual = math.prod(shape) * kind.itemsize, size - file.tell()
    if not kind.hasobject and expected > actual:
        raise ValueError(f"its header says {expected} bytes, but there are {actual}")
    file.seek(0)
    array: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _read_csv(path: Path) -> dict[str, dict[int, str]]:
    """The cells of each column by row number; columns by name, or by number without a header."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if row]
    if len({len(row) for row in rows}) != 1:
        raise ValueError("its lines differ in length, or there are none")
    header = not _are_integers(rows[0])
    names = [n.strip() for n in rows[0]] if header else list(map(str, range(len(rows[0]))))
    if header and len(rows) == 1:
        raise ValueError("its only line is a header or has cells that are not integers")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"it has two columns with the name {twice!r}")
    columns = zip(*rows[header:], strict=True)
    return {n: dict(enumerate(cells, 1 + header)) for n, cells in zip(names, columns, strict=True)}


def _are_integers(cells: Iterable[str]) -> bool:
    return all(cell.strip().removeprefix("-").isdecimal() for cell in cells)


def _read_pt(path: Path) -> Any:
    make: Any = np.empty(0).__reduce__()[0]
    # NumPy 1 pickles the function under its old module.
    arrays: list[Any] = [make, (make, "numpy.core.multiarray._reconstruct"), np.ndarray, np.dtype]
    kinds = list({type(np.dtype(code)) for code in "bhilqBHILQ"})
    with torch.serialization.safe_globals(arrays + kinds):
        return torch.load(path, map_location="cpu", weights_only=True)


READERS: dict[str, Callable[[Path], Any]] = {
    ".npy": read_array,
    ".npz": lambda path: {name: read_array(path, name) for name in array_names(path)},
    ".csv": _read_csv,
    ".txt": lambda path: [int(word) for word in path.read_text(encoding="utf-8").split()],
    ".pt": _read_pt,
}
