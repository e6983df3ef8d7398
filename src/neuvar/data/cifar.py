"""Read CIFAR's official files: pickles in a folder or in an archive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from neuvar.data.catalogue import Arrays, Entry, Pickled
from neuvar.data.errors import DataError
from neuvar.data.verified import check_sha256, read_verified, tar_members, unpickle


def read(entry: Entry, path: Path) -> Arrays:
    """Read a folder such as ``cifar-10-batches-py``, or the archive of it."""
    layout = entry.pickled
    assert layout is not None
    contents = _read_folder(layout, path) if path.is_dir() else _read_archive(layout, path)
    batches = {file: unpickle(content) for file, content in contents}
    arrays = {}
    for split in ("train", "test"):
        files = [batch.file for batch in layout.batches if batch.split == split]
        for key, kind in layout.keys.items():
            rows = [np.asarray(batches[file][key], np.uint8) for file in files]
            shape = entry.arrays[f"{split}_{kind}"].shape
            arrays[f"{split}_{kind}"] = np.concatenate(rows).reshape(shape)
    return arrays


def _read_folder(layout: Pickled, folder: Path) -> Iterator[tuple[str, bytes]]:
    for batch in layout.batches:
        try:
            yield batch.file, read_verified(folder / batch.file, batch.sha256)
        except FileNotFoundError:
            raise DataError(f"{folder} lacks {batch.file}") from None


def _read_archive(layout: Pickled, path: Path) -> Iterator[tuple[str, bytes]]:
    batches = {f"{layout.folder}/{batch.file}": batch for batch in layout.batches}
    for name, content in tar_members(path, layout.sha256):
        if name in batches:
            # Checked again in memory: the file on disk may have changed in the meantime.
            check_sha256(content, batches[name].sha256, f"{path}: {name}")
            yield batches[name].file, content
