"""Download datasets from their usual addresses.

A download resumes if the connection breaks. If a server is too slow, the next mirror is tried.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from neuvar.data import idx
from neuvar.data.catalogue import Arrays, DataError, Entry, os_errors
from neuvar.data.verified import read_cifar

TIMEOUT = 15.0
"""Seconds to wait for a connection, and for the next bytes."""

GRACE, SPEED = 30.0, 1024.0
"""After this many seconds, an attempt needs a mean speed of at least this many bytes per second."""

ATTEMPTS = 5
CHECK_SECONDS = 0.25
BUSY, PAUSE = (429, 500, 502, 503, 504), 2.0
"""Status codes of servers that may be back soon, and the seconds until the next attempt."""

NO_SUCH_RANGE = 416  # status code if a request starts at the end of the file, or later
CHUNK = 1 << 16


def fetch(entry: Entry, folder: Path, *, progress: bool = False) -> Arrays:
    """Download a dataset and check it. Each file comes from the first mirror that has it."""
    files = [f"{array.file}.gz" for array in entry.arrays.values()]
    if entry.pickled is not None:
        files = [entry.pickled.archive]
    # No official file is larger, packed or not.
    limit = sum(math.prod(a.shape) for a in entry.arrays.values()) + (1 << 20)
    arrays: Arrays = {}
    errors: list[str] = []
    for mirror in entry.mirrors:
        try:
            while files:
                path = folder / files[0]
                download(f"{mirror}{files[0]}", path, limit, progress=progress)
                if entry.pickled is not None:
                    new = read_cifar(entry, path)
                else:
                    keys = [k for k, a in entry.arrays.items() if path.name == f"{a.file}.gz"]
                    new = {key: idx.read(path, entry.arrays[key].shape) for key in keys}
                entry.check(new, path)
                arrays |= new
                del files[0]
            return arrays
        except DataError as error:
            errors.append(f"{mirror}{files[0]}: {error}")
    raise DataError("; ".join(errors) or f"{entry.title} has no address")


def download(url: str, path: Path, limit: int, *, progress: bool = False) -> None:
    """Download a file of at most ``limit`` bytes, in several attempts if necessary."""
    # A new file, because the thread of a cancelled download may still write to the old one.
    path.unlink(missing_ok=True)
    transfer = _Transfer(url, path.open("xb"), limit)
    # In a thread, so that the speed is checked also while a read waits for bytes.
    thread = threading.Thread(target=transfer.run, daemon=True)
    thread.start()
    try:
        with _progress_bar(path.name, progress) as show:
            while thread.is_alive():
                thread.join(CHECK_SECONDS)
                transfer.check_speed()
                show(transfer.length, transfer.total)
    except BaseException:
        transfer.cancelled = True
        raise
    if transfer.error is not None:
        raise transfer.error


class _Transfer:
    """The download of one file: ``run`` in one thread, ``check_speed`` in another."""

    def __init__(self, url: str, file: BinaryIO, limit: int) -> None:
        self.length = 0
        self.total: int | None = None
        self.cancelled = False
        self.error: Exception | None = None
        self._url, self._file, self._limit = url, file, limit
        self._begin_attempt()

    def run(self) -> None:
        """Download the file, or set ``error``."""
        try:
            with self._file:
                self._download()
        except Exception as error:  # noqa: BLE001
            self.error = error  # download() raises it

    def check_speed(self) -> None:
        """Raise a DataError if the server is too slow."""
        # Read before _started: a new attempt sets _started first, so there is no false alarm.
        received = self._received
        seconds = time.monotonic() - self._started
        if seconds > GRACE and received < SPEED * seconds:
            raise DataError(f"the server is slower than {SPEED:.0f} bytes per second")

    def _begin_attempt(self) -> None:
        self._started = time.monotonic()
        self._received = 0
        self._answered = False

    def _download(self) -> None:
        for attempt in range(ATTEMPTS):
            self._begin_attempt()
            if self.cancelled:
                return
            try:
                self._request()
                return
            except DataError:
                raise
            except HTTPError as error:
                error.close()
                if error.headers.get("Content-Range") == f"bytes */{self.length}":
                    return  # the file ends here
                # If the first request is refused, the next mirror is tried.
                retry = attempt > 0 and error.code in (*BUSY, NO_SUCH_RANGE)
                reason = f"the server answered {error.code}"
                if error.code < 400:
                    reason = "too many redirects"
                elif error.code == NO_SUCH_RANGE:
                    self._restart()
                elif retry:
                    time.sleep(PAUSE)
            except (HTTPException, OSError, ValueError) as error:
                retry = self._answered
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            if not retry or attempt == ATTEMPTS - 1:
                raise DataError(f"the download failed: {reason}")

    def _request(self) -> None:
        """Request what is missing and append it to the file."""
        headers = {"Range": f"bytes={self.length}-"} if self.length else {}
        # The addresses are those of the catalogue.
        with urlopen(Request(self._url, headers=headers), timeout=TIMEOUT) as response:  # noqa: S310
            self._answered = True
            if response.status != 206:
                self._restart()
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {self.length}-"):
                raise DataError("the server sent another part of the file than requested")
            rest = response.headers.get("Content-Length", "")
            self.total = self.length + int(rest) if rest.isdecimal() else None
            while self.length != self.total and (chunk := response.read1(CHUNK)):
                if self.cancelled:
                    raise DataError("the download was cancelled")
                self.length += len(chunk)
                self._received += len(chunk)
                if self.length > self._limit:
                    raise DataError(f"the server sends more than {self._limit} bytes")
                with os_errors("write", Path(self._file.name)):
                    self._file.write(chunk)
        if self.total is not None and self.length < self.total:
            raise ConnectionError("the connection was closed early")

    def _restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self.length = 0


@contextmanager
def _progress_bar(name: str, shown: bool) -> Iterator[Callable[[int, int | None], None]]:
    """Update a progress bar on standard error, if ``shown`` and if rich is installed."""
    if not shown or find_spec("rich") is None:
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(name, total=None)
        yield lambda length, total: progress.update(task, completed=length, total=total)
