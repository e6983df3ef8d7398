"""Labels with noise that somebody else made, such as human annotations."""

from __future__ import annotations

import csv
import math
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from neuvar.labels.result import Integers, NoisyLabels, account, checked_classes, checked_labels


def from_array(
    noisy: Integers, *, classes: int, clean: Integers | None = None, source: str = "array"
) -> NoisyLabels:
    """Take labels that carry noise already.

    Args:
        noisy: the labels, integers from 0.
        classes: how many classes there are.
        clean: the labels without noise, where they are known.
        source: a name for the provenance.

    Returns:
        The labels and, if the clean ones are known, what the noise in them is.

    >>> found = from_array([0, 1, 1, 2], classes=3, clean=[0, 1, 2, 2])
    >>> found.rate, found.mask
    (0.25, tensor([False, False,  True, False]))
    """
    k = checked_classes(classes)
    labels = checked_labels("noisy", noisy, k)
    truth = None if clean is None else checked_labels("clean", clean, k).to(labels.device)
    if truth is not None and len(truth) != len(labels):
        raise ValueError(f"noisy and clean must have one length, got {len(labels)}, {len(truth)}")
    return account(labels, truth, classes=k, provenance={"kind": "given", "source": str(source)})


def from_file(
    path: str | Path,
    *,
    classes: int,
    count: int | None = None,
    key: str | None = None,
    clean: Integers | None = None,
) -> NoisyLabels:
    r"""Read labels that carry noise already; nothing in the file is executed.

    With CIFAR-10N, human annotations of CIFAR-10 (Wei et al., "Learning with Noisy Labels
    Revisited", ICLR 2022): ``from_file("CIFAR-10_human.pt", key="worse_label", classes=10,
    clean=train.labels)``.

    Args:
        path: ``.npy``; ``.npz``; ``.csv`` with or without a line of names; ``.txt`` with numbers
            between white space; or ``.pt``, of which only tensors and arrays are read.
        classes: how many classes there are.
        count: how many labels there must be; not needed with ``clean``.
        key: which array or column, if there are several.
        clean: the labels without noise, where they are known.

    Returns:
        The labels and, if the clean ones are known, what the noise in them is.

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
        raise ValueError("give count or clean: how many labels there must be is not known")
    noisy = checked_labels(path.name, read(path, key), checked_classes(classes))
    if len(noisy) != expected:
        raise ValueError(f"{path.name} must have {expected} labels, got {len(noisy)}")
    source = path.name if key is None else f"{path.name}:{key}"
    return from_array(noisy, classes=classes, clean=clean, source=source)


def read(path: Path, key: str | None) -> Any:
    """The row of labels that a file holds under a key."""
    if path.suffix not in READERS:
        raise ValueError(f"path must end in {', '.join(READERS)}, got {path.name!r}")
    if not path.is_file():
        raise ValueError(f"path must be a file, got {str(path)!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # readers warn of what they may read wrongly
            warnings.filterwarnings("ignore", "Reading `.npy`")  # only made by an old Python
            found = READERS[path.suffix](path)
    except (pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path.name} holds more than arrays, or is damaged") from error
    except Exception as error:  # damaged bytes make readers fail in any way
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{path.name} is no readable {path.suffix} file: {reason}") from error
    if not isinstance(found, Mapping):
        if key is not None:
            raise ValueError(f"key must be None, because {path.name} has no names, got {key!r}")
        return found
    if key is None:
        fit = [n for n, c in found.items() if not isinstance(c, _Column) or _integers(c.cells)]
        key = fit[0] if len(fit) == 1 else next(iter(found)) if len(found) == 1 else None
    if key not in found:
        raise ValueError(f"key must be one of {', '.join(map(str, found))}, got {key!r}")
    chosen = found[key]
    return chosen.integers(path.name) if isinstance(chosen, _Column) else chosen


def _read_npy(path: Path) -> Any:
    with path.open("rb") as file:
        _check_size(file, path.stat().st_size)
    return np.load(path, allow_pickle=False)


def _read_npz(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        for part in (p for p in archive.infolist() if p.filename.endswith(".npy")):
            with archive.open(part) as file:
                _check_size(file, part.file_size)
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _check_size(file: IO[bytes], size: int) -> None:
    """Refuse an array whose header says more than there is, before memory is taken for it."""
    version = np.lib.format.read_magic(file)
    older = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if older else np.lib.format.read_array_header_2_0
    shape, _, kind = read(file)
    says, has = math.prod(shape) * kind.itemsize, size - file.tell()
    if not kind.hasobject and says > has:
        raise ValueError(f"its header says {says} bytes, but there are {has}")


def _read_txt(path: Path) -> Any:
    return [int(word) for word in path.read_text(encoding="utf-8").split()]


@dataclass(frozen=True)
class _Column:
    """Cells of a table, which need not be labels unless they are asked for."""

    name: str
    cells: list[str]
    first_line: int

    def integers(self, file: str) -> list[int]:
        for line, cell in enumerate(self.cells, self.first_line):
            if not _integers([cell]):
                raise ValueError(
                    f"{file} must have integers in column {self.name!r}, got {cell!r} in row {line}"
                )
        return [int(cell) for cell in self.cells]


def _read_csv(path: Path) -> Any:
    """Columns by name or, if the first line has no names, by number."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if row]
    if len({len(row) for row in rows}) != 1:
        raise ValueError("its lines differ in length, or there are none")
    named = not _integers(rows[0])
    names = [n.strip() for n in rows[0]] if named else list(map(str, range(len(rows[0]))))
    if named and len(rows) == 1:
        raise ValueError("it has one line of names, or of what is no integer, and no labels")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"it has two columns of the name {twice!r}")
    columns = zip(names, zip(*rows[named:], strict=True), strict=True)
    return {name: _Column(name, list(cells), 1 + named) for name, cells in columns}


def _integers(cells: Iterable[str]) -> bool:
    return all(cell.strip().removeprefix("-").isdecimal() for cell in cells)


def _read_pt(path: Path) -> Any:
    make: Any = np.empty(0).__reduce__()[0]
    # Arrays saved by older versions of NumPy name the function by its former place.
    arrays: list[Any] = [make, (make, "numpy.core.multiarray._reconstruct"), np.ndarray, np.dtype]
    kinds = list({type(np.dtype(code)) for code in "bhilqBHILQ"})
    with torch.serialization.safe_globals(arrays + kinds):
        return torch.load(path, map_location="cpu", weights_only=True)


READERS = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".csv": _read_csv,
    ".txt": _read_txt,
    ".pt": _read_pt,
}
