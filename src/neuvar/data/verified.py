"""Read archives and pickles whose SHA-256 is known, and refuse all others unread.

Formats such as pickle, tar and PNG give a hostile file many ways to run code or to fill the memory.
No decoder sees a file before its SHA-256 is that of the official file.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from neuvar.data.errors import DataError
from neuvar.data.idx import open_regular

LARGEST_FILE = 1 << 28
"""Bytes above which a file is refused without computing its SHA-256; official ones have 171 MB."""

GLOBALS = {("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}
"""What a pickle of arrays may import."""


def read_verified(path: Path, sha256: str) -> bytes:
    """Content of a file with this SHA-256."""
    with open_regular(path) as file:
        content = file.read(_checked_size(file, path))
    check_sha256(content, sha256, path)
    return content


def open_verified(path: Path, sha256: str) -> BufferedReader:
    """Open a file with this SHA-256 for reading."""
    file = open_regular(path)
    try:
        _checked_size(file, path)
        _compare(hashlib.file_digest(file, "sha256").hexdigest(), sha256, path)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def tar_members(path: Path, sha256: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file in a .tar.gz archive with this SHA-256."""
    with open_verified(path, sha256) as file, tarfile.open(fileobj=file, mode="r:gz") as archive:
        for member in archive:
            if (content := archive.extractfile(member)) is not None:
                yield member.name, content.read()


def check_sha256(content: bytes, expected: str, name: object) -> None:
    """Raise a DataError unless the content has the expected SHA-256."""
    _compare(hashlib.sha256(content).hexdigest(), expected, name)


def unpickle(verified: bytes) -> Any:
    """Load a pickle of arrays, which can import only what numpy's arrays need.

    Call it only on content whose SHA-256 was checked: a pickle can also exhaust the memory.
    """
    return _ArrayUnpickler(io.BytesIO(verified), encoding="latin1").load()


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in GLOBALS:
            raise DataError(f"a pickle of arrays must not import {module}.{name}")
        return super().find_class(module, name)


def _checked_size(file: BufferedReader, path: Path) -> int:
    size = os.fstat(file.fileno()).st_size
    if size > LARGEST_FILE:
        raise DataError(f"{path} has {size} bytes, more than any official file")
    return size


def _compare(digest: str, expected: str, name: object) -> None:
    if digest != expected:
        raise DataError(
            f"{name} is not the official file: its SHA-256 is {digest}, expected {expected}"
        )
