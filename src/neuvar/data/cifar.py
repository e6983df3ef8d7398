"""CIFAR's official files: a folder, or an archive, of pickles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from neuvar.data import archives, pickles
from neuvar.data.catalogue import Arrays, Batch, Entry, Pickled
from neuvar.data.errors import DataError
from neuvar.data.idx import Bytes, open_regular

SPARE = 2
"""How many times longer than its pixels a file may be: it also holds labels and names of pictures,
and Python 3 writes the older pickle protocols with half as many bytes again."""

INSTRUCTIONS = 16
"""Pickle instructions allowed for each row; the official files take two to four."""


def from_folder(entry: Entry, folder: Path) -> Arrays:
    """Read the pickles of a folder such as ``cifar-10-batches-py``."""
    return _assemble(entry, _files_of_folder(entry, folder))


def from_archive(entry: Entry, file: BinaryIO, name: str) -> Arrays:
    """Read the pickles inside an archive such as ``cifar-10-python.tar.gz``."""
    layout = _layout(entry)
    wanted = {f"{layout.folder}/{b.file}": _longest(entry, b) for b in layout.batches}
    limit = sum(wanted.values()) + (1 << 20)
    members = archives.tar_members(file, name, wanted, limit)
    return _assemble(entry, ((member.rpartition("/")[2], content) for member, content in members))


def longest_archive(entry: Entry) -> int:
    """The most bytes that a data set's archive may have."""
    return sum(_longest(entry, batch) for batch in _layout(entry).batches)


def _layout(entry: Entry) -> Pickled:
    assert entry.pickled is not None
    return entry.pickled


def _longest(entry: Entry, batch: Batch) -> int:
    pixels = math.prod(entry.arrays[f"{batch.split}_images"].shape[1:])
    return SPARE * batch.rows * pixels + (1 << 16)


def _files_of_folder(entry: Entry, folder: Path) -> Iterator[tuple[str, bytes]]:
    for batch in _layout(entry).batches:
        path, longest = folder / batch.file, _longest(entry, batch)
        try:
            with open_regular(path) as file:
                content = file.read(longest + 1)
        except FileNotFoundError:
            raise DataError(f"{folder} lacks {batch.file}") from None
        if len(content) > longest:
            raise DataError(f"{path} has more than {longest} bytes, the most that it may have")
        yield batch.file, content


def _assemble(entry: Entry, files: Iterable[tuple[str, bytes]]) -> Arrays:
    """Put the rows of all files where they belong."""
    layout = _layout(entry)
    arrays = {key: np.empty(shape, np.uint8) for key, shape in entry.shapes.items()}
    batches = {batch.file: batch for batch in layout.batches}
    for name, content in files:
        batch = batches[name]
        held = pickles.load(content, name, INSTRUCTIONS * batch.rows + 1000)
        for key, part in layout.keys.items():
            whole = arrays[f"{batch.split}_{part}"]
            rows = whole[batch.start : batch.start + batch.rows]
            rows[:] = _rows(held, key, rows.shape, name)
    return arrays


def _rows(held: Any, key: str, shape: tuple[int, ...], name: str) -> Bytes:
    """Pixels or labels of a pickle as bytes of this shape."""
    if not isinstance(held, dict) or key not in held:
        raise DataError(f"{name} must hold a dict with {key!r}")
    value = held[key]
    if isinstance(value, list):
        if len(shape) != 1 or not all(type(v) is int and 0 <= v < 256 for v in value):
            raise DataError(f"{name}: {key} must be numbers from 0 to 255")
        rows = np.array(value, np.uint8)
    else:
        rows = pickles.array(value, name, key)
        if rows.dtype.kind == "i" and rows.size and not 0 <= rows.min() <= rows.max() < 256:
            raise DataError(f"{name}: {key} must be numbers from 0 to 255")
    if rows.dtype.kind not in "ui" or rows.size != math.prod(shape) or len(rows) != shape[0]:
        raise DataError(f"{name}: {key} must have {shape[0]} rows, {math.prod(shape)} bytes in all")
    return rows.reshape(shape).astype(np.uint8, copy=False)
