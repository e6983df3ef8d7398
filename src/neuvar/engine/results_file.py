"""Results files: one JSON line per run, safe for several writers, and locks of runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from neuvar._atomic import replacing

Line = dict[str, Any]
"""What is recorded of one run, as a JSON object."""

REQUIRED = {"key": str, "status": str, "run": dict}
"""Fields that every line has, with their types."""


class Results:
    """A results file: one JSON line per run, each run once.

    Several processes may add to it at the same time. A line that a killed process left half
    written is skipped, and removed before the next line is added. Processes on different machines
    need a file system whose ``flock`` works across machines.

    Args:
        path: the file; it need not exist.

    Attributes:
        checkpoints: the folder beside the file with the checkpoints of interrupted runs.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> results = Results(Path(folder.name) / "smoke.jsonl")
    >>> line = {"key": "0123456789abcdef", "status": "finished", "run": {}, "last": {"loss": 0.5}}
    >>> results.add(line), results.add(line), list(results.lines())
    (True, False, ['0123456789abcdef'])
    >>> results.remove(["0123456789abcdef"]), results.lines()
    (1, {})
    >>> folder.cleanup()
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path.parent / ".checkpoints"

    def __repr__(self) -> str:
        return f"Results({str(self.path)!r})"

    def add(self, line: Line) -> bool:
        """Append a line unless its run is recorded already; returns whether it was added.

        NaN and infinity become null. If writing fails, the file is unchanged.
        """
        try:
            finite = json.loads(json.dumps(line), parse_constant=lambda _: None)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the result of run {line.get('key')} is not JSON: {error}") from None
        text = json.dumps(finite, separators=(",", ":")).encode() + b"\n"
        if not _parse(text)[0]:
            required = ", ".join(f"{name} ({kind.__name__})" for name, kind in REQUIRED.items())
            raise ValueError(f"a line of results must have {required}, got {str(line)[:80]}")
        with lock(self.path) as file:
            file.seek(0)
            data = file.read()
            recorded, _, intact = _parse(data)
            if line["key"] in recorded:
                return False
            file.truncate(intact)
            unwritten = text if data[:intact].endswith(b"\n") or not intact else b"\n" + text
            try:
                while unwritten:  # a nearly full disk takes a part; the next write raises the error
                    unwritten = unwritten[os.write(file.fileno(), unwritten) :]
                os.fsync(file.fileno())
            except BaseException as error:
                file.truncate(intact)
                if not isinstance(error, OSError):
                    raise
                why = f"could not add a result to {self.path}, which is unchanged: {error.strerror}"
                raise OSError(error.errno, why) from None
        return True

    def lines(self, *, warn: bool = True) -> dict[str, Line]:
        """All results by key, in the order in which they were added.

        If several lines have the same key, the first one counts.

        Args:
            warn: whether to warn of torn lines and lines that are not results, which are skipped.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return {}
        with file:
            fcntl.flock(file, fcntl.LOCK_SH)
            lines, skipped, _ = _parse(file.read())
        for number in skipped if warn else ():
            warnings.warn(
                f"line {number} of {self.path} is not a result and is skipped", stacklevel=2
            )
        return lines

    def recorded(self, key: str) -> Line | None:
        """The result of one run, if it is recorded."""
        return self.lines(warn=False).get(key)

    def remove(self, keys: Iterable[str]) -> int:
        """Remove the results and checkpoints of some runs; returns how many lines were removed.

        The other lines are unchanged. The checkpoint of a run that is being run stays.
        """
        removed = set(keys)
        self.remove_checkpoints(removed)
        if not self.path.exists():
            return 0
        with lock(self.path) as file:
            file.seek(0)
            old = [text for text in file.read().split(b"\n") if text]
            new = [text for text in old if not _parse(text)[0].keys() & removed]
            if len(new) < len(old):
                with replacing(self.path.resolve()) as replacement:
                    replacement.write(b"".join(text + b"\n" for text in new))
        return len(old) - len(new)

    def remove_checkpoints(self, keys: Iterable[str]) -> None:
        """Remove the checkpoints of runs that no process is running."""
        folder = self.checkpoints
        for key in keys:
            if any(folder.glob(f"{key}.*")) and (run_lock := lock_run(folder, key)):
                run_lock.release(finished=True)

    def check(self) -> None:
        """Raise an OSError if results cannot be written."""
        try:
            lock(self.path).close()
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            is_file = isinstance(error, FileExistsError | NotADirectoryError)
            why = f"{error.filename} is not a folder" if is_file else error.strerror
            raise OSError(error.errno, f"cannot write results to {self.path}: {why}") from None


@dataclass(frozen=True)
class RunLock:
    """The lock of a run: while a process holds it, no other process runs this run.

    Attributes:
        checkpoint: the file that the run is saved to.
        lock: the locked file.
    """

    checkpoint: Path
    lock: FileIO

    def release(self, *, finished: bool = False) -> None:
        """Release the lock; if the run is finished, remove its checkpoint."""
        if finished:
            for path in self.checkpoint.parent.glob(f"{self.checkpoint.name}*"):
                path.unlink(missing_ok=True)
        # Before unlocking: afterwards the file may be that of another process.
        self.checkpoint.with_suffix(".lock").unlink(missing_ok=True)
        self.lock.close()


def lock_run(folder: Path, key: str) -> RunLock | None:
    """Lock a run by a file in the folder of checkpoints; None if another process has the lock."""
    try:
        return RunLock(folder / f"{key}.pt", lock(folder / f"{key}.lock", wait=False))
    except BlockingIOError:
        return None


def lock(path: Path, *, wait: bool = True) -> FileIO:
    """Open a file, creating it if needed, and lock it until it is closed.

    The kernel releases the lock of a process that dies. Raises BlockingIOError if ``wait`` is false
    and another process has the lock.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # FileNotFoundError: another process has just removed the folder or the file.
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("a+b", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have been replaced or removed while this process waited.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                stack.pop_all()
                return file


def _parse(data: bytes) -> tuple[dict[str, Line], list[int], int]:
    """Results by key, numbers of lines that are not results, length without a torn last line."""
    lines: dict[str, Line] = {}
    skipped, intact, start = [], len(data), 0
    for number, text in enumerate(data.split(b"\n"), start=1):
        try:
            line = json.loads(text.decode(), parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and all(
            isinstance(line.get(name), kind) for name, kind in REQUIRED.items()
        ):
            lines.setdefault(line["key"], line)
        elif text.strip():
            skipped.append(number)
        if text.strip():
            intact = start if line is None else len(data)
        start += len(text) + 1
    return lines, skipped, intact
