"""Read archives and pickles whose SHA-256 is known, and refuse all others before decoding them.

Decoding a hostile pickle, tar or PNG file could run its code or fill the memory.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from neuvar.data.catalogue import Arrays, DataError, Entry
from neuvar.data.idx import open_regular

LARGEST_FILE = 1 << 28
"""Largest number of bytes that are read; the largest official file has 171 MB."""

GLOBALS = {("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}
"""What a pickle of arrays may import."""


def read_verified(path: Path, sha256: str) -> bytes:
    """Content of a file, if it has this SHA-256."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_FILE:
            raise DataError(f"{path} has {size} bytes, more than any official file")
        content = file.read(size)
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise DataError(f"{path} is not the official file: SHA-256 {digest}, expected {sha256}")
    return content


def tar_members(path: Path, sha256: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file in a .tar.gz archive, if the archive has this SHA-256."""
    # In memory, so that it cannot change after its SHA-256 was checked.
    content = io.BytesIO(read_verified(path, sha256))
    with tarfile.open(fileobj=content, mode="r:gz") as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                yield member.name, file.read()


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in GLOBALS:
            raise DataError(f"a pickle of arrays must not import {module}.{name}")
        return super().find_class(module, name)


def unpickle(content: bytes) -> Any:
    """Load a verified pickle of arrays, which can import only what numpy's arrays need."""
    return _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()


def read_cifar(entry: Entry, path: Path) -> Arrays:
    """Read CIFAR's pickles from a folder such as ``cifar-10-batches-py``, or the archive of it."""
    layout = entry.pickled
    assert layout is not None
    files = layout.batches["train"] | layout.batches["test"]
    if path.is_dir():
        try:
            batches = {f: unpickle(read_verified(path / f, files[f])) for f in files}
        except FileNotFoundError as error:
            raise DataError(f"{path} lacks {Path(error.filename).name}") from None
    else:
        names = {f"{layout.folder}/{file}": file for file in files}
        members = tar_members(path, layout.sha256)
        batches = {names[name]: unpickle(content) for name, content in members if name in names}
    arrays = {}
    for split, files in layout.batches.items():
        for key, kind in layout.keys.items():
            rows = [np.asarray(batches[file][key], np.uint8) for file in files]
            shape = entry.arrays[f"{split}_{kind}"].shape
            arrays[f"{split}_{kind}"] = np.concatenate(rows).reshape(shape)
    return arrays
