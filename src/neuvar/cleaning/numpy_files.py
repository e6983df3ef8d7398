"""Arrays in .npz and .npy files, which are read and never executed."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from neuvar.cleaning.issues import Array

DAMAGES = (OSError, ValueError, EOFError, KeyError, SyntaxError, zipfile.BadZipFile, zlib.error)
"""What a file that is no such file, or only a part of one, makes numpy raise."""


def names_in(path: Path) -> list[str]:
    """What the arrays of an .npz file are called."""
    with _readable(path, "an .npz"), zipfile.ZipFile(path) as file:
        return [name.removesuffix(".npy") for name in file.namelist()]


def read_named(path: Path, name: str) -> Array:
    """One array of an .npz file."""
    with _readable(path, "an .npz"), np.load(path, allow_pickle=False) as file:
        found: Array = file[name]
        return found


def read_npy(path: Path) -> Array:
    """The array of an .npy file."""
    with _readable(path, "an .npy"), path.open("rb") as file:
        found: Array = np.lib.format.read_array(file, allow_pickle=False)
        return found


@contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except DAMAGES as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is not {kind} file that can be read: {first}") from error


def name_among(wanted: Sequence[str], path: Path, what: str, *, otherwise: str = "") -> str:
    """The first of these names that an .npz file has an array of."""
    there = names_in(path)
    found = [name for name in wanted if name in there]
    if not found:
        raise ValueError(
            f"{path} has no {what}: looked for an array called {', '.join(wanted)}, "
            f"there are {', '.join(there) or 'none'}{otherwise}"
        )
    return found[0]
