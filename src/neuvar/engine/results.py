"""Results are data: a file with one JSON line for each run, safe for several writers."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from neuvar.engine.locks import claim, holding, read

Line = dict[str, Any]
"""What is recorded of one run, as a JSON object."""

NEEDED = {"key": str, "status": str, "run": dict}
"""What every line has, and of which type; the rest is what was measured."""


class Results:
    """A file of results: one JSON line for each run, each run once.

    Any number of processes may add to it at the same time. What a process that was killed left
    half-written is skipped, and cut off before the next line is added. Between machines this takes
    a file system whose ``flock`` reaches all of them.

    Args:
        path: the file; it need not be there.

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
        """The folder beside the file with what runs need to go on after an interruption."""
        return self.path.parent / ".checkpoints"

    def add(self, line: Line) -> bool:
        """Append a line unless its run is there already; NaN and infinity are written as null.

        Returns:
            Whether it was added.

        Raises:
            ValueError: if it is no result of a run, or cannot be written as JSON.
            OSError: if it could not be written in full; the file is then as it was before.
        """
        if not _is_result(line):
            needed = ", ".join(f"{name} ({kind.__name__})" for name, kind in NEEDED.items())
            raise ValueError(f"a line of results must have {needed}, got {str(line)[:80]}")
        try:
            text = json.dumps(_finite(line), allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the result of run {line['key']} is no JSON: {error}") from None
        with holding(self.path) as file:
            data = _read(file)
            sound = _sound(data)
            if line["key"] in _parse(data[:sound])[0]:
                return False
            whole = sound == 0 or data[sound - 1 : sound] == b"\n"
            self._append(file, sound, f"{'' if whole else chr(10)}{text}\n".encode())
        return True

    def lines(self) -> dict[str, Line]:
        """All results by the key of their run, in the order in which they came in.

        A line that is torn, or is no result, is skipped with a warning. Of two lines with the same
        key the first one counts.
        """
        found, strange = _parse(read(self.path))
        for number in strange:
            warnings.warn(
                f"line {number} of {self.path} is no result of a run and is skipped", stacklevel=2
            )
        return found

    def recorded(self, key: str) -> Line | None:
        """The result of one run, if it is there."""
        return _parse(read(self.path))[0].get(key)

    def remove(self, keys: Iterable[str]) -> int:
        """Remove the results of some runs, and their checkpoints, so that they begin anew.

        The file is replaced in one move; all other lines stay as they are. The checkpoint of a run
        that a process is at work on stays.

        Returns:
            How many lines were removed.
        """
        gone = set(keys)
        for key in gone:
            self.forget(key)
        if not self.path.exists():
            return 0
        with holding(self.path) as file:
            old = [line for line in _read(file).split(b"\n") if line]
            new = [line for line in old if (_result(line) or {}).get("key") not in gone]
            if len(new) < len(old):
                _replace(self.path.resolve(), file, b"".join(line + b"\n" for line in new))
        return len(old) - len(new)

    def forget(self, key: str) -> None:
        """Remove the checkpoint of a run, unless a process is at work on it."""
        if any(self.checkpoints.glob(f"{key}.*")):
            mine = claim(self.checkpoints, key)
            if mine is not None:
                mine.finish()

    def check(self) -> None:
        """Make sure that results can be written, with a sentence if not."""
        try:
            with holding(self.path):
                self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            folder = self.path.parent
            why = f"{folder} is no folder" if isinstance(error, FileExistsError) else error.strerror
            raise OSError(error.errno, f"results cannot be written to {self.path}: {why}") from None

    def _append(self, file: int, length: int, text: bytes) -> None:
        """Write at the end of the first ``length`` bytes, all or nothing."""
        os.ftruncate(file, length)
        try:
            written = os.write(file, text)
            if written < len(text):
                # A disk that is nearly full takes a part; asking for the rest says what is wrong.
                os.write(file, text[written:])
                raise OSError("only a part of the line was taken")
            os.fsync(file)
        except OSError as error:
            os.ftruncate(file, length)
            raise OSError(
                error.errno or 0,
                f"no result could be added to {self.path}, which is as it was before: "
                f"{error.strerror or error}",
            ) from None
        except BaseException:
            os.ftruncate(file, length)
            raise


def _read(file: int) -> bytes:
    """All bytes of an open file."""
    with open(file, "rb", closefd=False) as whole:
        whole.seek(0)
        return whole.read()


def _replace(path: Path, file: int, data: bytes) -> None:
    """Put other bytes in the place of a file that is held, in one move."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as new:
            os.fchmod(new.fileno(), os.fstat(file).st_mode & 0o777)
            new.write(data)
            new.flush()
            os.fsync(new.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _sound(data: bytes) -> int:
    """How many bytes stay: all but a last line that was torn."""
    end = len(data.rstrip(b"\n"))
    start = data.rfind(b"\n", 0, end) + 1
    return len(data) if end == 0 or _json(data[start:end]) is not None else start


def _parse(data: bytes) -> tuple[dict[str, Line], list[int]]:
    """Results by key, and the numbers of the lines that are none."""
    found: dict[str, Line] = {}
    strange = []
    for number, text in enumerate(data.split(b"\n"), start=1):
        line = _result(text)
        if line is not None:
            found.setdefault(line["key"], line)
        elif text.strip():
            strange.append(number)
    return found, strange


def _result(text: bytes) -> Line | None:
    """The result that a line holds, if it does."""
    line = _json(text)
    return line if _is_result(line) else None


def _json(text: bytes) -> Any:
    """What a line says, or None if it is no JSON; constants that JSON does not have are null."""
    try:
        return json.loads(text.decode(), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def _is_result(line: Any) -> bool:
    return isinstance(line, dict) and all(
        isinstance(line.get(name), kind) for name, kind in NEEDED.items()
    )


def _finite(value: Any) -> Any:
    """The same, with None in the place of NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
