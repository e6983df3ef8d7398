"""Pictures of any size and kind as squares of bytes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from neuvar.cleaning.issues import Array

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = 64
"""Height and width of pictures that do not all have the same smaller one."""

MOST_PIXELS = 100_000_000
"""Pictures with more are refused: a file of a few bytes may unpack to any number of pixels."""

TRANSPARENT = ("LA", "La", "PA", "RGBA", "RGBa")


def is_picture(value: Any) -> bool:
    """Whether a value is an image of Pillow's; no value is one if Pillow was never imported."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def refuse_too_large(picture: Image) -> None:
    """Refuse a picture before it is unpacked."""
    if picture.width * picture.height > MOST_PIXELS:
        raise ValueError(
            f"it has {picture.width} x {picture.height} pixels, more than {MOST_PIXELS:,}"
        )


def pixels_of(picture: Image, size: int | None) -> Array:
    """Pixels of a picture, grey or RGB, whose longer side is ``size``: bytes, unless it has more.

    It is turned as its camera says, put on white where it is transparent, and made smaller with
    antialiasing. Without a size, only those that are larger than ``SIZE`` are changed.
    """
    from PIL import ImageOps

    refuse_too_large(picture)
    plain = _plain(ImageOps.exif_transpose(picture))
    if size is not None or max(plain.size) > SIZE:
        plain = _scaled(plain, size or SIZE)
    pixels = np.asarray(plain)
    if plain.mode != "F":
        return pixels
    pixels = pixels.round()
    # All are kept until the last is read, in half of the room if they can be.
    fits = pixels.min() >= 0 and pixels.max() < 2**16
    return pixels.astype(np.uint16) if fits else pixels


def squares(pictures: list[Array], size: int | None) -> Tensor:
    """Pictures as uint8 images of one size, each whole and in the middle, with black around it.

    They are grey, shape (n, size, size), if all of them are; otherwise RGB. Without a size it is
    that of their longer sides if these are all equal, otherwise ``SIZE``. The list is emptied.

    Those with more than a byte a pixel are brought to bytes by one range for all of them.
    """
    from PIL import Image

    black, white = _range(pictures)
    longer = {max(picture.shape[:2]) for picture in pictures}
    side = size or (longer.pop() if len(longer) == 1 else SIZE)
    grey = all(picture.ndim == 2 for picture in pictures)
    out = np.zeros((len(pictures), *(() if grey else (3,)), side, side), dtype=np.uint8)
    for number in reversed(range(len(pictures))):
        picture = pictures.pop()  # so that all are never held twice
        if picture.dtype != np.uint8:
            share = (picture.astype(np.float64) - black) / (white - black)
            picture = (255 * share).round().astype(np.uint8)
        if max(picture.shape[:2]) != side:
            picture = np.asarray(_scaled(Image.fromarray(picture), side))
        height, width = picture.shape[:2]
        top, left = (side - height) // 2, (side - width) // 2
        # A grey picture among coloured ones is broadcast to all three channels.
        target = out[number, ..., top : top + height, left : left + width]
        target[...] = picture if picture.ndim == 2 else np.moveaxis(picture, 2, 0)
    return torch.from_numpy(out)


def _range(pictures: list[Array]) -> tuple[float, float]:
    """What is black and white in pictures with more than a byte a pixel.

    A file of 16 bits may hold 10 or 12, and does not say so: the range has the number of bits, 8,
    10, 12 and so on, that the brightest pixel of all needs. Black is 0, or the least below it.
    """
    ends = [(float(one.min()), float(one.max())) for one in pictures if one.dtype != np.uint8]
    black = min([0.0, *(low for low, _ in ends)])
    most = int(max([0.0, *(high for _, high in ends)]) - black)
    bits = max(8, -(-most.bit_length() // 2) * 2)
    return black, black + 2**bits - 1


def _scaled(picture: Image, side: int) -> Image:
    """A picture whose longer side has this many pixels."""
    from PIL.Image import Resampling

    factor = side / max(picture.size)
    size = max(1, round(picture.width * factor)), max(1, round(picture.height * factor))
    return picture.resize(size, Resampling.BILINEAR)


def _plain(picture: Image) -> Image:
    """A picture with one byte a pixel if it is grey, or a number, and three if it is not."""
    from PIL import Image

    if picture.mode == "F":
        raise ValueError("its pixels are floating point numbers")
    if picture.mode.startswith("I"):  # 16 bits or more
        return Image.fromarray(np.asarray(picture).astype(np.float32))
    grey = picture.mode in ("1", "L", "LA", "La")
    if picture.mode in TRANSPARENT or "transparency" in picture.info:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    return picture.convert("L" if grey else "RGB")
