"""Read CIFAR's official files: pickles in a folder or in an archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from neuvar.data.catalogue import Arrays, Entry
from neuvar.data.errors import DataError
from neuvar.data.verified import read_verified, tar_members, unpickle


def read(entry: Entry, path: Path) -> Arrays:
    """Read a folder such as ``cifar-10-batches-py``, or the archive of it."""
    layout = entry.pickled
    assert layout is not None
    files = layout.batches["train"] | layout.batches["test"]
    if path.is_dir():
        batches = {file: _read_batch(path / file, files[file]) for file in files}
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


def _read_batch(path: Path, sha256: str) -> Any:
    try:
        return unpickle(read_verified(path, sha256))
    except FileNotFoundError:
        raise DataError(f"{path.parent} lacks {path.name}") from None
