"""Results files: one JSON line per run, safe for several writers, and claims on runs."""

from __future__ import annotations

import fcntl
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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

    def __repr__(self) -> str:
        return f"Results({str(self.path)!r})"

    @property
    def checkpoints(self) -> Path:
        """The folder beside the file with the checkpoints of interrupted runs."""
        return self.path.parent / ".checkpoints"

    def add(self, line: Line) -> bool:
        """Append a line unless its run is recorded already; returns whether it was added.

        NaN and infinity become null. If writing fails, the file is unchanged.
        """
        if not _is_result(line):
            required = ", ".join(f"{name} ({kind.__name__})" for name, kind in REQUIRED.items())
            raise ValueError(f"a line of results must have {required}, got {str(line)[:80]}")
        try:
            text = json.dumps(_finite(line), allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the result of run {line['key']} is not JSON: {error}") from None
        with _locked(self.path) as file:
            data = _read(file)
            length = _intact(data)
            if line["key"] in _parse(data[:length])[0]:
                return False
            newline = "" if length == 0 or data[length - 1 : length] == b"\n" else "\n"
            self._append(file, length, f"{newline}{text}\n".encode())
        return True

    def lines(self) -> dict[str, Line]:
        """All results by key, in the order in which they were added.

        A torn line, or one that is not a result, is skipped with a warning. Of two lines with the
        same key the first one counts.
        """
        lines, skipped = _parse(self._read_shared())
        for number in skipped:
            warnings.warn(
                f"line {number} of {self.path} is not a result and is skipped", stacklevel=2
            )
        return lines

    def recorded(self, key: str) -> Line | None:
        """The result of one run, if it is recorded."""
        return _parse(self._read_shared())[0].get(key)

    def remove(self, keys: Iterable[str]) -> int:
        """Remove the results and checkpoints of some runs; returns how many lines were removed.

        The other lines are unchanged. The checkpoint of a run that is being run stays.
        """
        removed = set(keys)
        self.remove_checkpoints(removed)
        if not self.path.exists():
            return 0
        with _locked(self.path) as file:
            old = [text for text in _read(file).split(b"\n") if text]
            new = [text for text in old if not _parse(text)[0].keys() & removed]
            if len(new) < len(old):
                with replacing(self.path.resolve()) as replacement:
                    replacement.write(b"".join(text + b"\n" for text in new))
        return len(old) - len(new)

    def remove_checkpoints(self, keys: Iterable[str]) -> None:
        """Remove the checkpoints of runs that no process is running."""
        for key in keys:
            if any(self.checkpoints.glob(f"{key}.*")):
                claimed = claim(self.checkpoints, key)
                if claimed is not None:
                    claimed.finish()

    def check(self) -> None:
        """Raise an OSError if results cannot be written."""
        try:
            with _locked(self.path):
                self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            is_file = isinstance(error, FileExistsError | NotADirectoryError)
            why = f"{error.filename} is not a folder" if is_file else error.strerror
            raise OSError(error.errno, f"cannot write results to {self.path}: {why}") from None

    def _read_shared(self) -> bytes:
        """The file's bytes, read while no process writes; empty without a file."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return b""
        with file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return file.read()

    def _append(self, file: int, length: int, text: bytes) -> None:
        """Cut the file to ``length`` bytes and append ``text``, all of it or nothing."""
        os.ftruncate(file, length)
        try:
            written = os.write(file, text)
            if written < len(text):
                # A nearly full disk takes a part; writing the rest raises the actual error.
                os.write(file, text[written:])
                raise OSError("only a part of the line was written")
            os.fsync(file)
        except BaseException as error:
            os.ftruncate(file, length)
            if not isinstance(error, OSError):
                raise
            why = error.strerror or error
            raise OSError(
                error.errno or 0,
                f"could not add a result to {self.path}, which is unchanged: {why}",
            ) from None


def lock(path: Path, *, wait: bool = True) -> int | None:
    """Lock a file, which is made if needed, until the returned descriptor is closed.

    The kernel releases the lock of a process that dies. Returns None if ``wait`` is false and
    another process has the lock.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except FileNotFoundError:
            continue  # another process has just removed the folder
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have been replaced or removed while this process waited.
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
def _locked(path: Path) -> Iterator[int]:
    """Wait for the lock on a file; yields its descriptor."""
    file = lock(path)
    assert file is not None
    try:
        yield file
    finally:
        os.close(file)


class Claim:
    """The right to run one run: while it is held, no other process runs it.

    Attributes:
        checkpoint: the file that the run is saved to.
    """

    def __init__(self, folder: Path, key: str, file: int) -> None:
        self.checkpoint = folder / f"{key}.pt"
        self._lock, self._file = folder / f"{key}.lock", file

    def finish(self) -> None:
        """Remove the checkpoint and release the claim."""
        for path in self.checkpoint.parent.glob(f"{self.checkpoint.name}*"):
            path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Release the claim; the checkpoint stays."""
        self._lock.unlink(missing_ok=True)  # while it is locked, so that it is not another's
        os.close(self._file)


def claim(folder: Path, key: str) -> Claim | None:
    """Claim a run in a folder of checkpoints; None if another process has it."""
    file = lock(folder / f"{key}.lock", wait=False)
    return None if file is None else Claim(folder, key, file)


def _read(file: int) -> bytes:
    with open(file, "rb", closefd=False) as whole:
        whole.seek(0)
        return whole.read()


def _intact(data: bytes) -> int:
    """Length without a torn last line."""
    end = len(data.rstrip(b"\n"))
    start = data.rfind(b"\n", 0, end) + 1
    return len(data) if end == 0 or _json(data[start:end]) is not None else start


def _parse(data: bytes) -> tuple[dict[str, Line], list[int]]:
    """Results by key, and the numbers of the lines that are not results."""
    lines: dict[str, Line] = {}
    skipped = []
    for number, text in enumerate(data.split(b"\n"), start=1):
        line = _json(text)
        if _is_result(line):
            lines.setdefault(line["key"], line)
        elif text.strip():
            skipped.append(number)
    return lines, skipped


def _json(text: bytes) -> Any:
    """A parsed line, or None if it is not JSON; NaN and infinity become None."""
    try:
        return json.loads(text.decode(), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def _is_result(line: Any) -> bool:
    return isinstance(line, dict) and all(
        isinstance(line.get(name), kind) for name, kind in REQUIRED.items()
    )


def _finite(value: Any) -> Any:
    """The value with None instead of NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
