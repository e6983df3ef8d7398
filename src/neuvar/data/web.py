"""Get a data set from its usual addresses.

pooch does the download. Around it: several mirrors, a download that breaks off goes on where it
stopped, and one that grows too long or too slow is given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from neuvar.data import cifar, folders, idx
from neuvar.data.catalogue import Array, Arrays, Entry
from neuvar.data.errors import DataError
from neuvar.data.progress import Bar

NEEDS_POOCH = 'downloading needs pooch: pip install "neuvar[data]"'
CONNECT, READ = 10.0, 30.0
"""Seconds to wait for a connection, and for the next bytes."""

GRACE, PACE = 30.0, 1024.0
"""After so many seconds a download must have had so many bytes in each second."""

TICK = 0.25
"""Seconds between two looks at the pace."""

ATTEMPTS = 5
BUSY, PAUSE = (429, 500, 502, 503, 504), 2.0
"""Answers of a server that may serve again soon, and the seconds to leave it alone."""

NO_SUCH_PART = 416
"""The answer to a request that begins where the file ends, or later."""

AGAIN = (*BUSY, NO_SUCH_PART)
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
                status = _status(error)
                if status == NO_SUCH_PART and sink.is_whole(error):
                    return
                # What broke off may go on; a server that did not answer, or said no, will not.
                again = sink.answered if status is None else bool(attempt) and status in AGAIN
                if not again or attempt == ATTEMPTS - 1:
                    raise DataError(f"{url} could not be downloaded: {_reason(error)}") from None
                if status == NO_SUCH_PART:
                    sink.restart()
                elif status is not None:
                    time.sleep(PAUSE)


def _attempt(url: str, sink: _Sink, progress: bool) -> None:
    try:
        import pooch  # type: ignore[import-untyped]
    except ImportError:
        raise DataError(NEEDS_POOCH) from None
    start = sink.length
    # Some servers unpack .gz files on the way unless they are told not to.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    bar = Bar(url.rpartition("/")[2], start) if progress else None
    fetch = pooch.HTTPDownloader(
        progressbar=bar or False,
        chunk_size=CHUNK,
        timeout=(CONNECT, READ),
        headers=headers,
        hooks={"response": sink.begin},
    )
    try:
        _watch(lambda: fetch(url, sink, None), sink)
    finally:
        if bar is not None:
            bar.close()


def _watch(fetch: Callable[[], None], sink: _Sink) -> None:
    """Download in a thread of its own: a read that waits for more cannot see how slow it is."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            fetch()
        except Exception as error:  # noqa: BLE001
            errors.append(error)  # whatever it is, it is raised where somebody waits for it
        finally:
            sink.hang_up()

    sink.start_clock()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join(TICK)
        while thread.is_alive():
            sink.check_pace()
            thread.join(TICK)
    except BaseException:
        sink.abandon()
        raise
    if errors:
        raise errors.pop()


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
        self._abandoned = False
        self._response: Any = None
        self.start_clock()

    def start_clock(self) -> None:
        """The pace counts from here."""
        self._begun, self._fresh = time.monotonic(), 0

    def check_pace(self) -> None:
        """Refuse a server that is too slow, even if the bytes that are on their way are counted."""
        taken = time.monotonic() - self._begun
        if taken > GRACE and self._fresh + CHUNK < PACE * taken:
            raise DataError(f"{self._url} serves fewer than {PACE:.0f} bytes a second")

    def abandon(self) -> None:
        """Take nothing more; whoever still waits for bytes ends with the next that come."""
        self._abandoned = True

    def hang_up(self) -> None:
        """Close the connection, which an error would leave open."""
        if self._response is not None:
            self._response.close()
            self._response = None

    def restart(self) -> None:
        """Forget what has come so far."""
        self._file.seek(0)
        self._file.truncate()
        self.length = 0

    def is_whole(self, error: Exception) -> bool:
        """Whether a refusal to send more says that the file ends where we are."""
        headers = getattr(getattr(error, "response", None), "headers", {})
        return self.length > 0 and headers.get("Content-Range") == f"bytes */{self.length}"

    def begin(self, response: Any, *_: Any, **__: Any) -> None:
        """Called when an answer's head has come: does it go on from where we are?"""
        self._response = response
        if self._abandoned:
            raise DataError(f"{self._url} answered too late")
        self.answered = not response.is_redirect
        if response.status_code == 206:
            said = response.headers.get("Content-Range", "")
            if said.startswith(f"bytes {self.length}-"):
                return
        # The body of a redirection or of a refusal is not written.
        if response.ok and not response.is_redirect:
            self.restart()
        if response.status_code == 206:
            raise DataError(f"{self._url} answered with another part than was asked for")

    def write(self, chunk: bytes) -> None:
        """Take the next bytes."""
        if self._abandoned:
            raise DataError(f"{self._url} is no longer waited for")
        self.length += len(chunk)
        self._fresh += len(chunk)
        if self.length > self._limit:
            raise DataError(f"{self._url} serves more than {self._limit} bytes, more than expected")
        try:
            self._file.write(chunk)
        except OSError as error:
            raise DataError(f"a download cannot be written: {error.strerror}") from None

    def flush(self) -> None:
        """Nothing to do: the file is flushed when it is closed."""
