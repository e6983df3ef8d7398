"""Atomic writes: a file is replaced when its new contents are on disk, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

UNFINISHED = ".part"
"""Suffix of files that are being written."""


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes the place of ``path`` when the block ends without error.

    Until then, and after any failure, the old file stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            unfinished.chmod(path.stat().st_mode)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Replace several files. None is replaced before all of them are on disk."""
    with ExitStack() as stack:
        for path, content in contents.items():
            file = stack.enter_context(replacing(path))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def _unfinished_folder(path: Path) -> Iterator[Path]:
    """A folder beside ``path``. After a failure it is removed, with the parents made for it."""
    missing = [parent for parent in path.parents if not parent.exists()]
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        for parent in missing:  # innermost first
            with suppress(OSError):
                parent.rmdir()
        raise


def write_folder(path: Path, contents: Mapping[str, bytes]) -> None:
    """Replace a folder by a new one with these files. After any failure, the old one remains."""
    path = path.resolve()
    with _unfinished_folder(path) as unfinished:
        for name, content in contents.items():
            with (unfinished / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        old = unfinished.with_suffix(".old")
        try:
            if path.exists():
                path.rename(old)
            unfinished.rename(path)
        finally:
            if old.exists() and not path.exists():
                old.rename(path)
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def creating_folder(path: Path) -> Iterator[Path]:
    """A new folder that gets the name ``path`` when the block ends without error.

    ``path`` must not exist or must be an empty folder. A failure leaves it as it was.
    """
    path = path.resolve()
    with _unfinished_folder(path) as unfinished:
        yield unfinished
        with suppress(FileNotFoundError):
            path.rmdir()  # fails unless it is empty
        unfinished.rename(path)
