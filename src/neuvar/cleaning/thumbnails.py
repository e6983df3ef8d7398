"""Examples as they can be seen: small PNG pictures, or numbers and bars."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
from torch import Tensor

from neuvar.cleaning.inputs.arrays import has_channels_last
from neuvar.cleaning.issues import Array

LARGEST = 96
"""Pixels, both ways, that a picture has at most."""
SMALLEST = 12
"""Pixels below which pictures are not made smaller to save room."""
MOST_NUMBERS = 8
"""Features that are shown as numbers; more of them become bars."""
MOST_BARS = 64


def are_pictures(inputs: Tensor) -> bool:
    """Whether inputs have a height and a width."""
    return inputs.ndim in (3, 4)


def pictures(inputs: Tensor, chosen: Array, *, room: int) -> list[str]:
    """Chosen images as data URIs; all of them are made smaller until they fit into the room.

    Args:
        inputs: images as (n, h, w), (n, c, h, w) or (n, h, w, c); numbers that are no bytes are
            stretched from black to white, for all chosen ones alike.
        chosen: numbers of those that are wanted.
        room: characters for all of them together.
    """
    images = _drawable(inputs[np.asarray(chosen)].cpu().numpy())
    side = max(images.shape[1:3])
    step = -(-side // LARGEST)
    while True:
        found = [data_uri(shrunk(image, step)) for image in images]
        if sum(map(len, found)) <= room or side // (2 * step) < SMALLEST:
            return found
        step *= 2


def _drawable(images: Array) -> Array:
    """Images as uint8, (n, h, w) or (n, h, w, 3); other numbers of channels become grey."""
    if images.dtype != np.uint8 and images.size:
        low, high = float(images.min()), float(images.max())
        images = ((images - low) * (255 / (high - low or 1.0))).round().astype(np.uint8)
    if images.ndim == 3:
        return images
    last = images if has_channels_last(images.shape) else images.transpose(0, 2, 3, 1)
    if last.shape[3] == 3:
        return last
    grey: Array = last.mean(3).round().astype(np.uint8)
    return grey


def shrunk(image: Array, step: int) -> Array:
    """Each square of ``step`` by ``step`` pixels as their mean.

    >>> shrunk(np.array([[0, 10, 7], [20, 30, 9]], np.uint8), 2).tolist()
    [[15, 8]]
    """
    if step == 1:
        return image
    rows, columns = (np.arange(0, size, step) for size in image.shape[:2])
    sums = np.add.reduceat(np.add.reduceat(image.astype(np.float64), rows, 0), columns, 1)
    heights, widths = (
        np.diff([*starts, size])
        for starts, size in zip((rows, columns), image.shape[:2], strict=True)
    )
    counts = np.outer(heights, widths)
    mean: Array = sums / (counts[..., None] if image.ndim == 3 else counts)
    return mean.round().astype(np.uint8)


def data_uri(image: Array) -> str:
    """An image in an address of its own."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def png(image: Array) -> bytes:
    """A PNG file of a grey (h, w) or coloured (h, w, 3) image in uint8."""
    height, width = image.shape[:2]
    colour = image.ndim == 3
    rows = np.ascontiguousarray(image).reshape(height, -1)
    left = 3 if colour else 1
    changes = rows.copy()
    changes[:, left:] -= rows[:, :-left]
    # Each row says how it is kept: 0 as it is, 1 as the change from the pixel on the left.
    packed = min(
        (
            zlib.compress(np.insert(kept, 0, kind, axis=1).tobytes(), 9)
            for kind, kept in enumerate((rows, changes))
        ),
        key=len,
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2 if colour else 0, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", packed), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_part(kind, content) for kind, content in parts)


def _part(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def numbers(inputs: Tensor, chosen: Array) -> list[list[float]]:
    """The features of chosen examples, to four digits."""
    rows = inputs[np.asarray(chosen)].flatten(1).tolist()
    return [[float(f"{value:.4g}") for value in row] for row in rows]


def bars(inputs: Tensor, chosen: Array) -> list[list[int]]:
    """Chosen examples as at most 64 bars between -100 and 100.

    A feature is shown by how far it is from its mean over all examples, in standard deviations, of
    which three are a full bar; where there are too many features, neighbours share a bar.
    """
    features: Any = inputs.flatten(1).double().cpu().numpy()
    spread = features.std(0)
    wanted = features[chosen] - features.mean(0)
    score = np.divide(wanted, spread, out=np.zeros_like(wanted), where=spread > 0)
    edges = np.unique(np.linspace(0, score.shape[1], MOST_BARS + 1).astype(int)[:-1])
    counts = np.diff([*edges, score.shape[1]])
    mean = np.add.reduceat(score, edges, 1) / counts
    found: list[list[int]] = (100 * (mean / 3).clip(-1, 1)).round().astype(int).tolist()
    return found
