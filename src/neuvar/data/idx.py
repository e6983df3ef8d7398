"""The idx format, for arrays of bytes whose shape is known in advance.

An idx file is a header (two zero bytes, a type, the number of dimensions, each dimension as a
big-endian 32-bit number) and the bytes. It is MNIST's own format. Here it also defines the checksum
of every array: the SHA-256 of its idx file, whatever the source of the array.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import zlib
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from neuvar.data.catalogue import DataError

Bytes = NDArray[np.uint8]
Shape = tuple[int, ...]


def header(shape: Shape) -> bytes:
    """The header of the idx file of an array.

    >>> header((60000,)).hex()
    '000008010000ea60'
    """
    # Type 8 is unsigned bytes.
    return bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)


def size(shape: Shape) -> int:
    """Length of an idx file in bytes."""
    return len(header(shape)) + math.prod(shape)


def sha256(array: Bytes) -> str:
    """SHA-256 of the idx file of an array.

    >>> sha256(np.zeros(3, np.uint8))[:16]
    'c51ace58717b2767'
    """
    digest = hashlib.sha256(header(array.shape))
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def read(path: Path, shape: Shape) -> Bytes:
    """Read an array of this shape from an idx file, packed with gzip if its name ends in .gz."""
    with open_regular(path) as file:
        if path.suffix == ".gz":
            # Even for random bytes, gzip adds less than a tenth.
            packed = file.read(1024 + size(shape) * 11 // 10)
            return decode(gunzip(packed, size(shape), str(path)), shape, str(path))
        start = file.read(len(header(shape)))
        _check(start, os.fstat(file.fileno()).st_size, shape, str(path))
        array = np.empty(shape, np.uint8)
        if file.readinto(array.reshape(-1).data) != array.nbytes:
            raise DataError(f"{path} became shorter while it was read")
    return array


def decode(content: bytes, shape: Shape, name: str) -> Bytes:
    """The array of an idx file in memory; ``name`` is for error messages."""
    start = len(header(shape))
    _check(content[:start], len(content), shape, name)
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def gunzip(packed: bytes, length: int, name: str) -> bytes:
    """Unpack gzip data to ``length`` bytes, without using more memory than that."""
    decoder = zlib.decompressobj(wbits=31)
    try:
        content = decoder.decompress(packed, length + 1)
    except zlib.error as error:
        raise DataError(f"{name} is not a valid gzip file: {error}") from None
    if len(content) > length:
        raise DataError(f"{name} unpacks to more than {length} bytes")
    if not decoder.eof:
        raise DataError(f"{name} ends in the middle of its gzip data")
    if len(content) < length:
        raise DataError(f"{name} unpacks to {len(content)} bytes, expected {length}")
    if decoder.unused_data:
        raise DataError(f"{name} has bytes after the end of its gzip data")
    return content


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; refuse a pipe or a device, which could block or never end."""
    # Without O_NONBLOCK, opening a pipe that nobody writes to would wait forever.
    descriptor = os.open(
        path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise DataError(f"{path} must be a regular file")
    return file


def _check(start: bytes, length: int, shape: Shape, name: str) -> None:
    """Check the first bytes and the length of an idx file of this shape."""
    expected = f"an idx file of {'×'.join(map(str, shape))} bytes"
    if length != size(shape):
        raise DataError(f"{name} has {length} bytes, but {expected} has {size(shape)}")
    if start != header(shape):
        raise DataError(
            f"{name} begins with the bytes {start.hex()}, but {expected} begins with "
            f"{header(shape).hex()}"
        )
