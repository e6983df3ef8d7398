"""Read image folders, and convert PIL images of any size and mode to uint8 squares."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from neuvar.cleaning.posterior import Array
from neuvar.data.idx import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = 64
"""Default side of the squares, unless all images have the same smaller side."""
MAX_PIXELS = 100_000_000
"""Larger images are refused: a small file may decompress to a huge image."""
TRANSPARENT = ("LA", "La", "PA", "RGBA", "RGBa")
SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Allowed file formats. For some of the others, Pillow runs external programs."""
CLUTTER = frozenset(("__macosx", "thumbs.db", "desktop.ini"))
SPLITS = frozenset(("train", "training", "test", "testing", "val", "valid", "validation"))


def read_folder(
    folder: Path, size: int | None, skipped: list[str] | None = None
) -> tuple[Tensor, list[str], tuple[str, ...], tuple[str, ...]]:
    """Images, class of each image, names of all classes, and file of each image.

    The classes are the subfolders in sorted order, including empty ones. Files that cannot be read
    raise an error; with a list ``skipped``, they are appended to it instead.
    """
    by_class = files_in(folder)
    names = tuple(name for name in by_class if name)
    files = [file for name in names for file in by_class[name] if is_image(file)]
    if names and SPLITS.issuperset(map(str.lower, names)):
        raise ValueError(
            f"{folder} must have a folder for each class, but has the splits {', '.join(names)} of "
            f"a dataset: give one of them, such as {folder / names[0]}"
        )
    if not files:
        raise ValueError(
            f"{folder} must have a folder of images for each class, it has "
            + (f"{len(names)} folders and no image in them" if names else "no folders")
        )
    images, read = read_images(folder, files, size, skipped)
    return images, [file.split("/")[0] for file in read], names, read


def files_in(folder: Path) -> dict[str, list[str]]:
    """Sorted files of each class, as paths within the folder; key "" holds files without a class.

    Hidden files are skipped. A class may be a symbolic link to a folder; links within a class are
    not followed.
    """
    try:
        here = folder.resolve(strict=True)
        with os.scandir(folder) as entries:
            is_dir = {entry.name: entry.is_dir() for entry in entries if not _is_hidden(entry.name)}
        by_class = {"": sorted(name for name in is_dir if not is_dir[name])}
        for name in sorted(name for name in is_dir if is_dir[name]):
            # A link to the folder itself, or to one above it, would contain all classes again.
            if (folder / name).resolve() not in (here, *here.parents):
                by_class[name] = sorted(_walk(folder, name))
        return by_class
    except OSError as error:
        where = error.filename if error.filename is not None else folder
        raise ValueError(f"{where} cannot be read: {error.strerror or error}") from None


def _walk(folder: Path, name: str) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise error

    for here, folders, files in os.walk(folder / name, onerror=refuse):
        folders[:] = [inner for inner in folders if not _is_hidden(inner)]
        below = Path(here).relative_to(folder)
        yield from ((below / file).as_posix() for file in files if not _is_hidden(file))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in CLUTTER


def is_image(file: str) -> bool:
    """Whether a file has the suffix of an image."""
    return Path(file).suffix.lower() in SUFFIXES


def read_images(
    folder: Path, files: list[str], size: int | None, skipped: list[str] | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Images of a folder as uint8 squares, gray if all are gray, otherwise RGB; and their files.

    For ``skipped`` see :func:`read_folder`.
    """
    require_pillow()
    from PIL import Image, UnidentifiedImageError

    decoded: list[Array] = []
    bad: dict[str, Exception] = {}
    enough = 2 * (size or SIZE)
    with warnings.catch_warnings():
        # Pillow's warnings do not name the file. Sizes are checked below.
        warnings.simplefilter("ignore")
        for file in files:
            try:
                with open_regular(folder / file) as content:
                    image = Image.open(content, formats=FORMATS)
                    _refuse_too_large(image)
                    image.draft(None, (enough, enough))  # decodes JPEG files at a smaller size
                    decoded.append(pixels_of(image, size))
            except Exception as error:  # noqa: BLE001 - decoders of damaged files may raise any
                bad[file] = error
    if skipped is not None and len(bad) < len(files):
        skipped += bad
    elif bad:
        file, cause = next(iter(bad.items()))
        reason = "not an image of a supported format"
        if not isinstance(cause, UnidentifiedImageError):
            text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
            reason = " ".join(text.split())
        raise ValueError(
            f"{len(bad)} of {len(files)} images in {folder} cannot be read, the first is {file}: "
            f"{reason}; correct or remove them, or use neuvar clean --skip-unreadable"
        )
    images = squares(decoded, size)
    lowest, highest = images.amin((0, -2, -1)), images.amax((0, -2, -1))
    if lowest.equal(highest):
        raise ValueError(
            f"the images in {folder} must differ, but all pixels of all {len(files)} images are "
            f"{lowest.tolist()}"
        )
    return images, tuple(file for file in files if file not in bad)


def require_pillow() -> None:
    """Raise an error with the install command if Pillow is missing."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError('images need Pillow: pip install "neuvar[clean]"') from error


def is_pil_image(value: Any) -> bool:
    """Whether a value is a PIL image, without importing Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _refuse_too_large(image: Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")


def pixels_of(image: Image, size: int | None) -> Array:
    """Gray or RGB pixels of a PIL image, scaled to a longer side of ``size``.

    By default only images larger than ``SIZE`` are scaled.
    """
    from PIL import ImageOps

    _refuse_too_large(image)
    plain = _gray_or_rgb(ImageOps.exif_transpose(image))
    if size is not None or max(plain.size) > SIZE:
        plain = _scale(plain, size or SIZE)
    pixels = np.asarray(plain)
    if plain.mode != "F":
        return pixels
    pixels = pixels.round()
    # uint16 takes half the memory until all images are read.
    fits = pixels.min() >= 0 and pixels.max() < 2**16
    return pixels.astype(np.uint16) if fits else pixels


def _gray_or_rgb(image: Image) -> Image:
    """The image in mode L or RGB, or F if it has more than 8 bits."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floating point numbers")
    if image.mode.startswith("I"):  # 16 bits or more
        return Image.fromarray(np.asarray(image).astype(np.float32))
    gray = image.mode in ("1", "L", "LA", "La")
    if image.mode in TRANSPARENT or "transparency" in image.info:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("L" if gray else "RGB")


def _scale(image: Image, side: int) -> Image:
    from PIL.Image import Resampling

    factor = side / max(image.size)
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    return image.resize(size, Resampling.BILINEAR)


def squares(images: list[Array], size: int | None) -> Tensor:
    """Images centred in black uint8 squares: (n, side, side) if all are gray, otherwise RGB.

    By default the side is the longer side of the images if it is the same for all, otherwise
    ``SIZE``. The list is emptied to free memory.

    Images of more than 8 bits share one brightness range, since a 16-bit file may hold only 10 or
    12 bits. White is the largest value of the smallest even number of bits, at least 8, that holds
    the brightest pixel. Black is 0, or the lowest negative value.
    """
    from PIL import Image

    deep = [image for image in images if image.dtype != np.uint8]
    black = min([0.0, *(float(image.min()) for image in deep)])
    highest = int(max([0.0, *(float(image.max()) for image in deep)]) - black)
    white = black + 2 ** max(8, -(-highest.bit_length() // 2) * 2) - 1
    longer = {max(image.shape[:2]) for image in images}
    side = size or (longer.pop() if len(longer) == 1 else SIZE)
    gray = all(image.ndim == 2 for image in images)
    out = np.zeros((len(images), *(() if gray else (3,)), side, side), dtype=np.uint8)
    for index in reversed(range(len(images))):
        image = images.pop()  # frees memory as the result fills
        if image.dtype != np.uint8:
            share = (image.astype(np.float64) - black) / (white - black)
            image = (255 * share).round().astype(np.uint8)
        if max(image.shape[:2]) != side:
            image = np.asarray(_scale(Image.fromarray(image), side))
        height, width = image.shape[:2]
        top, left = (side - height) // 2, (side - width) // 2
        # A gray image among RGB images is broadcast to three channels.
        target = out[index, ..., top : top + height, left : left + width]
        target[...] = image if image.ndim == 2 else np.moveaxis(image, 2, 0)
    return torch.from_numpy(out)
