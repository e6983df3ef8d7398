"""Get a data set from its usual addresses.

pooch does the download. Around it: several mirrors, a download that breaks off goes on where it
stopped, and one that grows too long or too slow is given up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from neuvar.data import cifar, folders, idx
from neuvar.data.catalogue import Array, Arrays, Entry
from neuvar.data.errors import DataError

NEEDS_POOCH = 'downloading needs pooch: pip install "neuvar[data]"'
CONNECT, READ = 10.0, 30.0
"""Seconds to wait for a connection, and for the next bytes."""

GRACE, PACE = 30.0, 1024.0
"""After so many seconds a download must have had so many bytes in each second."""

ATTEMPTS = 5
CHUNK = 1 << 14
"""Bytes that are written at a time; a download that breaks off loses at most as many."""


def fetch(entry: Entry, scratch: Path, *, progress: bool = False) -> Arrays:
    """Download a data set and check it, from the first mirror that has each file."""
    found: Arrays = {}
    reasons: list[str] = []
    for mirror in entry.mirrors:
        try:
            if entry.pickled is None:
                for key, array in entry.arrays.items():
                    if key not in found:
                        found[key] = _fetch_idx(entry, key, array, mirror, scratch, progress)
            else:
                found = _fetch_archive(entry, entry.pickled.archive, mirror, scratch, progress)
            return found
        except DataError as error:
            reasons.append(str(error))
    raise DataError("; ".join(reasons) or f"{entry.title} has no address")


def _fetch_idx(
    entry: Entry, key: str, array: Array, mirror: str, scratch: Path, progress: bool
) -> idx.Bytes:
    path = scratch / f"{array.file}.gz"
    # Packing adds at most a few bytes in a thousand.
    download(f"{mirror}{path.name}", path, 1024 + idx.size(array.shape) * 11 // 10, progress)
    found = folders.read_packed_idx(path, array)
    entry.check(key, found, f"{mirror}{path.name}")
    return found


def _fetch_archive(
    entry: Entry, archive: str, mirror: str, scratch: Path, progress: bool
) -> Arrays:
    path = scratch / archive
    download(f"{mirror}{archive}", path, cifar.longest_archive(entry), progress)
    with path.open("rb") as file:
        arrays = cifar.from_archive(entry, file, f"{mirror}{archive}")
    for key, array in arrays.items():
        entry.check(key, array, f"{mirror}{archive}")
    return arrays


def download(url: str, path: Path, limit: int, progress: bool = False) -> None:
    """Write what an address serves to a file, in several attempts if need be."""
    with path.open("wb") as file:
        sink = _Sink(file, url, limit)
        for attempt in range(ATTEMPTS):
            sink.answered = False
            try:
                _attempt(url, sink, progress)
                return
            except DataError:
                raise
            except (OSError, ValueError) as error:  # all of requests' errors are one of these
                last = attempt == ATTEMPTS - 1
                # What broke off may go on; a server that did not answer, or said no, will not.
                if last or not sink.answered or _status(error) is not None:
                    raise DataError(f"{url} could not be downloaded: {_reason(error)}") from None


def _attempt(url: str, sink: _Sink, progress: bool) -> None:
    try:
        import pooch  # type: ignore[import-untyped]
    except ImportError:
        raise DataError(NEEDS_POOCH) from None
    start = sink.length
    # Some servers unpack .gz files on the way unless they are told not to.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    bar = _Bar(url.rpartition("/")[2], start) if progress else None
    fetch = pooch.HTTPDownloader(
        progressbar=bar or False,
        chunk_size=CHUNK,
        timeout=(CONNECT, READ),
        headers=headers,
        hooks={"response": sink.begin},
    )
    try:
        fetch(url, sink, None)
    finally:
        if bar is not None:
            bar.close()


def _status(error: Exception) -> int | None:
    """The server's answer, if it was one that says no."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if status is not None and status >= 400 else None


def _reason(error: Exception) -> str:
    if (status := _status(error)) is not None:
        return f"the server answered {status}"
    # The text of these errors is long and about the inside of the client; their name says enough.
    return "".join(f" {c.lower()}" if c.isupper() else c for c in type(error).__name__).strip()


class _Sink:
    """A file that takes a download and watches over its length and its pace."""

    def __init__(self, file: BinaryIO, url: str, limit: int) -> None:
        self._file = file
        self._url = url
        self._limit = limit
        self.length = 0
        self.answered = False
        self._begun, self._fresh = time.monotonic(), 0

    def begin(self, response: Any, *_: Any, **__: Any) -> None:
        """Called when an answer's head has come: does it go on from where we are?"""
        self._begun, self._fresh = time.monotonic(), 0
        self.answered = not response.is_redirect
        if response.status_code == 206:
            said = response.headers.get("Content-Range", "")
            if said.startswith(f"bytes {self.length}-"):
                return
        # A redirection's own body is not written; anything else starts from the beginning.
        if not response.is_redirect:
            self._file.seek(0)
            self._file.truncate()
            self.length = 0
        if response.status_code == 206:
            raise DataError(f"{self._url} answered with another part than was asked for")

    def write(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self.length += len(chunk)
        self._fresh += len(chunk)
        if self.length > self._limit:
            raise DataError(f"{self._url} serves more than {self._limit} bytes, more than expected")
        taken = time.monotonic() - self._begun
        if taken > GRACE and self._fresh < PACE * taken:
            raise DataError(f"{self._url} serves only {self._fresh / taken:.0f} bytes a second")
        try:
            self._file.write(chunk)
        except OSError as error:
            raise DataError(f"a download cannot be written: {error.strerror}") from None

    def flush(self) -> None:
        """Nothing to do: the file is flushed when it is closed."""


class _Bar:
    """A progress bar of rich in the form that pooch asks for."""

    def __init__(self, name: str, done: int) -> None:
        self._done = done
        self._name = name
        self._bar: Any = None
        self._task: Any = None
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes that are still to come."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        self._total = total
        show = _rich_bar()
        if show is not None:
            self._bar = show()
            self._bar.start()
            known = self._done + total if total else None
            self._task = self._bar.add_task(self._name, total=known, completed=self._done)

    def update(self, count: int) -> None:
        """Count bytes that have come."""
        if self._bar is not None:
            self._bar.update(self._task, advance=count)

    def reset(self) -> None:
        """Go back to where this attempt began."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        if self._bar is not None:
            self._bar.stop()


def _rich_bar() -> Callable[[], Any] | None:
    """How to make a progress bar on standard error, if rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
    except ImportError:
        return None
    return lambda: Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    )
