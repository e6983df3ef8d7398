"""Atomic writes: old contents survive any failure, and nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from neuvar._atomic import replacing, write_files


def test_a_file_is_replaced_with_its_mode_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_files({path: b"old"})
    path.chmod(0o640)
    write_files({path: b"new"})
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_a_failure_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")

    def write_half() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_no_file_is_replaced_before_all_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    write_files(dict.fromkeys(paths, b"old"))
    syncs: list[int] = []
    sync = os.fsync

    def full_disk(fd: int) -> None:
        syncs.append(fd)
        if len(syncs) == 2:
            raise OSError(28, "No space left on device")
        sync(fd)

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_files(dict.fromkeys(paths, b"new"))
    assert [path.read_bytes() for path in paths] == [b"old", b"old"]
    assert sorted(tmp_path.iterdir()) == paths


def test_the_name_of_an_unfinished_file_begins_with_that_of_the_file(tmp_path: Path) -> None:
    """So that what a killed process leaves is removed with the file."""
    with replacing(tmp_path / "a.pt"):
        assert len(list(tmp_path.glob("a.pt*"))) == 1
