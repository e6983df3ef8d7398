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
HIDDEN = ".neuvar-"
"""Prefix of temporary folders; a killed process may leave one."""


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
    """Write a folder with these files only. After any failure, it is as it was before.

    An existing folder stays the same, with its owner and mode; its files are replaced.
    """
    path = path.resolve()
    if path.is_dir():
        _replace_files(path, contents)
        return
    with _unfinished_folder(path) as unfinished:
        _write_new(unfinished, contents)
        unfinished.rename(path)


def _write_new(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        with (folder / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _replace_files(path: Path, contents: Mapping[str, bytes]) -> None:
    """Replace all files of a folder once the new ones are on disk."""
    before = [file for file in path.iterdir() if file.is_file()]
    unfinished = path / f"{HIDDEN}{secrets.token_hex(8)}{UNFINISHED}"
    new, old = unfinished / "new", unfinished / "old"
    try:
        for folder in (unfinished, new, old):
            folder.mkdir()
        _write_new(new, contents)
        try:
            for file in before:
                if file.name not in contents:
                    file.rename(old / file.name)
            for name in contents:
                if (path / name).exists():
                    (path / name).rename(old / name)
                (new / name).rename(path / name)
        except BaseException:
            for name in contents:
                if not (new / name).exists():
                    (path / name).unlink(missing_ok=True)
            for file in old.iterdir():
                file.rename(path / file.name)
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


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
