"""Read gzip, tar and zip files that may be hostile: nothing is unpacked to disk, nothing grows.

A member is asked for by its exact name and comes back as bytes, at most as many as the caller
allows. The readers of the standard library trust lengths in places that a hostile file can use
(a tar file's extended header is read whole, however long it says it is), so tar has its own walk.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from neuvar.data.errors import DataError

PIECE = 1 << 16
BLOCK = 512
"""Tar files consist of blocks of this many bytes."""

FILE, FOLDER, NAME = (b"0", b"\0"), (b"5",), (b"x", b"g", b"L")
"""Kinds of members: a file, as it is written now and as it once was; a folder; a longer name."""

MOST_MEMBERS = 1000
LONGEST_NAME_RECORD = 1 << 16
LARGEST_DIRECTORY = 1 << 20
"""Most bytes of a zip file's list of members; a wheel's takes about a hundred a member."""

OTHERS = (ValueError, OSError, RuntimeError)
"""What the standard library raises for a damaged zip file besides its own errors."""


class Gunzip:
    """The decoded bytes of a gzip file of one member, of which at most ``limit`` may come."""

    def __init__(self, file: BinaryIO, name: str, limit: int) -> None:
        self._file = file
        self._name = name
        self._left = limit
        self._inflate = zlib.decompressobj(wbits=31)
        self._pending = b""

    def read(self, length: int) -> bytes:
        """The next bytes: ``length`` of them, or fewer at the end of the file."""
        found = bytearray()
        while len(found) < length and not self._inflate.eof:
            self._pending = self._pending or self._file.read(PIECE)
            if not self._pending:
                raise DataError(f"{self._name} ends in the middle of its gzip stream")
            try:
                found += self._inflate.decompress(self._pending, length - len(found))
            except zlib.error as error:
                raise DataError(f"{self._name} is not a valid gzip file: {error}") from None
            self._pending = self._inflate.unconsumed_tail
        self._left -= len(found)
        if self._left < 0:
            raise DataError(f"{self._name} unpacks to more than was expected of it")
        return bytes(found)

    def finish(self) -> None:
        """Make sure that the file ends here, and as it says it should: checksum and length."""
        if self.read(1):
            raise DataError(f"{self._name} unpacks to more than was expected of it")
        if self._inflate.unused_data or self._file.read(1):
            raise DataError(f"{self._name} goes on after the end of its gzip stream")


def gunzip(file: BinaryIO, name: str, length: int) -> bytes:
    """Decode a gzip file that must unpack to ``length`` bytes."""
    stream = Gunzip(file, name, length + 1)
    content = stream.read(length)
    if len(content) < length:
        raise DataError(f"{name} unpacks to {len(content)} bytes, {length} were expected")
    stream.finish()
    return content


def tar_members(
    file: BinaryIO, name: str, wanted: Mapping[str, int], limit: int
) -> Iterator[tuple[str, bytes]]:
    """Walk through a .tar.gz and yield the wanted members.

    Args:
        file: the archive.
        name: what to call it in an error.
        wanted: for each member's name, the most bytes that it may have.
        limit: the most bytes that the whole archive may unpack to.
    """
    stream = Gunzip(file, name, limit)
    seen: set[str] = set()
    for _ in range(MOST_MEMBERS):
        block = stream.read(BLOCK)
        if not block.strip(b"\0"):
            break  # the end of an archive: a block of zeros, or nothing at all
        member, length, kind = _tar_header(block, name)
        if kind in NAME and length > LONGEST_NAME_RECORD:
            raise DataError(f"{name} has a record of {length} bytes where a name was expected")
        if kind in FILE and member in wanted:
            if length > wanted[member] or member in seen:
                raise DataError(
                    f"{name}: {member} must come once and have at most {wanted[member]} bytes"
                )
            seen.add(member)
            content = stream.read(length)
            if len(content) < length:
                raise DataError(f"{name} ends in the middle of {member}")
            yield member, content
            length = -length % BLOCK
        else:
            length += -length % BLOCK
        _skip(stream, length, name)
    else:
        raise DataError(f"{name} has more than {MOST_MEMBERS} members")
    _finish(stream, name)
    if missing := sorted(set(wanted) - seen):
        raise DataError(f"{name} lacks {missing[0]}")


def _tar_header(block: bytes, name: str) -> tuple[str, int, bytes]:
    """Name, length and kind of a member; refuse what could lead outside or is not data."""
    try:
        checksum = int(block[148:156].split(b"\0")[0], 8)
        length = int(block[124:136].split(b"\0")[0] or b"0", 8)
    except ValueError:
        checksum, length = -1, 0
    if len(block) < BLOCK or checksum != sum(block[:148]) + sum(block[156:]) + 8 * ord(" "):
        raise DataError(f"{name} is not a valid tar archive: a member's header is damaged")
    member = block[:100].split(b"\0")[0].decode("latin-1")
    if block[257:263] == b"ustar\0" and block[345]:
        member = f"{block[345:500].split(bytes(1))[0].decode('latin-1')}/{member}"
    kind = block[156:157]
    _check_path(member, name)
    if kind not in (*FILE, *FOLDER, *NAME) or length < 0:
        raise DataError(f"{name}: {member[:100]!r} is neither a file nor a folder")
    # A folder has no content, whatever its length says.
    return member, 0 if kind in FOLDER else length, kind


def _check_path(member: str, name: str) -> None:
    path = PurePosixPath(member.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in member:
        raise DataError(f"{name}: {member[:100]!r} leads out of the archive")


def _skip(stream: Gunzip, length: int, name: str) -> None:
    while length > 0:
        piece = stream.read(min(length, PIECE))
        if not piece:
            raise DataError(f"{name} ends in the middle of a member")
        length -= len(piece)


def _finish(stream: Gunzip, name: str) -> None:
    """Make sure that only zeros fill the last record, and that the gzip stream ends well."""
    while piece := stream.read(PIECE):
        if piece.strip(b"\0"):
            raise DataError(f"{name} goes on after the end of its tar archive")
    stream.finish()


def zip_member(path: Path, member: str, limit: int) -> bytes:
    """One member of a zip file, of at most ``limit`` bytes."""
    _check_directory(path)
    try:
        with zipfile.ZipFile(path) as archive:
            for other in archive.namelist():
                _check_path(other, path.name)
            info = archive.getinfo(member)
            # The other methods may ask for gigabytes of working memory.
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DataError(f"{path.name}: {member} is packed in an unexpected way")
            with archive.open(info) as file:
                content = file.read(limit + 1)
                if len(content) > limit:
                    raise DataError(f"{path.name}: {member} must have at most {limit} bytes")
                return content
    except DataError:
        raise
    except KeyError:
        raise DataError(f"{path.name} lacks {member}") from None
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, *OTHERS) as error:
        raise DataError(f"{path.name} is not a valid zip file: {error}") from None


def _check_directory(path: Path) -> None:
    """Refuse a list of members so long that reading it would fill the memory.

    The last 22 bytes of a zip file without a comment say how long the list is; a file with 64-bit
    lengths has one more record in the 20 bytes before.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 42))
        tail = file.read()
    end = tail[-22:]
    length = int.from_bytes(end[12:16], "little")
    plain = end[:4] == b"PK\5\6" and end[20:] == b"\0\0" and tail[:4] != b"PK\6\7"
    if not plain or length > LARGEST_DIRECTORY:
        raise DataError(f"{path.name} is not a complete zip file of the usual kind")
