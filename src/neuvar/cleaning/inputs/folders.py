"""Folders that hold a folder of images for each class."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from torch import Tensor

from neuvar.cleaning.inputs.pictures import SIZE, pixels_of, refuse_too_large, squares
from neuvar.cleaning.issues import Array
from neuvar.data.idx import open_regular

NEEDS_PILLOW = 'reading images needs Pillow: pip install "neuvar[clean]"'

KINDS = frozenset(
    (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
"""How the names of images end, in small or capital letters."""

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""What such a file may hold; Pillow knows others, for some of which it starts programs."""

CLUTTER = frozenset(("__macosx", "thumbs.db", "desktop.ini"))
"""What systems leave in folders, in small letters."""

DIVISIONS = frozenset(("train", "training", "test", "testing", "val", "valid", "validation"))
"""Names of folders that are parts of a data set rather than classes."""


def read_folder(
    folder: Path, size: int | None
) -> tuple[Tensor, list[str], tuple[str, ...], tuple[str, ...]]:
    """Images, the class of each, the names of all classes, and the file of each image.

    Classes are the folders in sorted order, also those without an image. Images may lie in folders
    within them. Files whose names do not end as those of images do are left aside.
    """
    there = files_in(folder)
    names = tuple(name for name in there if name)
    files = [file for name in names for file in there[name] if is_image(file)]
    if len(names) > 1 and DIVISIONS.issuperset(map(str.lower, names)):
        raise ValueError(
            f"{folder} must have a folder for each class, but {', '.join(names)} are parts of a "
            "data set: give one of them"
        )
    if not files:
        raise ValueError(
            f"{folder} must have a folder of images for each class, it has "
            f"{len(names)} folders and no image in them"
        )
    classes = [file.split("/")[0] for file in files]
    return read_images(folder, files, size), classes, names, tuple(files)


def files_in(folder: Path) -> dict[str, list[str]]:
    """Files of each class from the folder on, in sorted order; under "" those beside the classes.

    What is hidden is left aside. A class may be a link to a folder elsewhere; links within a class
    are not followed.
    """
    try:
        here = folder.resolve(strict=True)
        with os.scandir(folder) as entries:
            seen = {entry.name: entry.is_dir() for entry in entries if not _is_hidden(entry.name)}
        # A link to where it lies, or above, would hold all classes once more.
        around = {here, *here.parents}
        classes = [name for name in seen if seen[name] and (folder / name).resolve() not in around]
        beside = sorted(name for name in seen if not seen[name])
        return {"": beside} | {name: _files(folder, name) for name in sorted(classes)}
    except OSError as error:
        where = error.filename if error.filename is not None else folder
        raise ValueError(f"{where} cannot be read: {error.strerror or error}") from None


def _files(folder: Path, name: str) -> list[str]:
    def refuse(error: OSError) -> None:
        raise error

    found = []
    for here, folders, files in os.walk(folder / name, onerror=refuse):
        folders[:] = [inner for inner in folders if not _is_hidden(inner)]
        below = Path(here).relative_to(folder)
        found += [(below / file).as_posix() for file in files if not _is_hidden(file)]
    return sorted(found)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in CLUTTER


def is_image(file: str) -> bool:
    """Whether a file is called as images are."""
    return Path(file).suffix.lower() in KINDS


def read_images(folder: Path, files: list[str], size: int | None) -> Tensor:
    """Images below a folder, all brought to one size: grey if all of them are, else in colour."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError(NEEDS_PILLOW) from error
    pictures: list[Array] = []
    bad: list[tuple[str, str]] = []
    with warnings.catch_warnings():
        # Pillow warns of oddities in a file without naming it, and of sizes that are checked here.
        warnings.simplefilter("ignore")
        for file in files:
            try:
                pictures.append(_read_one(folder / file, size))
            except Exception as error:  # noqa: BLE001 - a damaged file can make a decoder raise any
                bad.append((file, _reason(error)))
    if bad:
        file, reason = bad[0]
        raise ValueError(
            f"{len(bad)} of {len(files)} images in {folder} cannot be read, the first is {file}: "
            f"{reason}"
        )
    images = squares(pictures, size)
    lowest, highest = images.amin((0, -2, -1)), images.amax((0, -2, -1))
    if lowest.equal(highest):
        raise ValueError(
            f"the images in {folder} must differ, all pixels of all {len(files)} come out as "
            f"{lowest.tolist()}"
        )
    return images


def _read_one(path: Path, size: int | None) -> Array:
    from PIL import Image

    with open_regular(path) as file, Image.open(file, formats=FORMATS) as picture:
        refuse_too_large(picture)
        enough = 2 * (size or SIZE)
        picture.draft(None, (enough, enough))  # JPEG files can be unpacked at less than full size
        return pixels_of(picture, size)


def _reason(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "it is no image of a known kind"
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(said.split())
