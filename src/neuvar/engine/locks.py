"""Files that one process at a time may hold; the kernel lets go of them when it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def hold(path: Path, *, wait: bool = True) -> int | None:
    """Hold a file, which is made if need be; the folder too.

    Args:
        path: the file.
        wait: whether to wait while another process holds it.

    Returns:
        A file descriptor, whose closing lets go; None if another process holds the file.
    """
    how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except FileNotFoundError:
            continue  # another process, which was done, has just removed the folder
        try:
            fcntl.flock(file, how)
            # A file that was replaced or removed in the meantime protects nothing any more.
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(file)
            return None
        except BaseException:
            os.close(file)
            raise
        os.close(file)


@contextmanager
def holding(path: Path) -> Iterator[int]:
    """Wait for a file and hold it; yields its descriptor."""
    file = hold(path)
    assert file is not None
    try:
        yield file
    finally:
        os.close(file)


def read(path: Path) -> bytes:
    """All bytes of a file, taken while nobody writes; none if there is no file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return b""
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return file.read()


class Claim:
    """The right to carry out one run: while it is held, no other process has it.

    Attributes:
        checkpoint: where the run is saved, so that it can go on after an interruption.
    """

    def __init__(self, folder: Path, key: str, file: int) -> None:
        self.checkpoint = folder / f"{key}.pt"
        self._lock, self._file = folder / f"{key}.lock", file

    def finish(self) -> None:
        """Give the claim up because the run is done; its checkpoint goes."""
        for left in self.checkpoint.parent.glob(f"{self.checkpoint.name}*"):
            left.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Give the claim up; the checkpoint stays."""
        self._lock.unlink(missing_ok=True)  # while it is held, so that nobody else's is removed
        os.close(self._file)


def claim(folder: Path, key: str) -> Claim | None:
    """Claim a run in the folder of checkpoints; None if another process has it."""
    file = hold(folder / f"{key}.lock", wait=False)
    return None if file is None else Claim(folder, key, file)
