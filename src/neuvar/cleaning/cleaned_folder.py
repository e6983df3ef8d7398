"""Copy the images of a folder into subfolders named after their cleaned labels."""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from neuvar._atomic import creating_folder
from neuvar.cleaning.examples import Examples
from neuvar.cleaning.posterior import Array


@dataclass(frozen=True)
class CleanedFolder:
    """The result of :func:`write_cleaned_folder`.

    Attributes:
        path: the folder.
        moved: number of images whose class has changed.
        renamed: old and new path of each image that was renamed, because its new class already had
            an image of the same name.
        linked: number of images that are hard links.
        copied: number of images that are copies.
    """

    path: Path
    moved: int
    renamed: dict[str, str]
    linked: int
    copied: int

    def __str__(self) -> str:
        parts = [
            f"{n:,} {what}" for n, what in ((self.linked, "links"), (self.copied, "copies")) if n
        ]
        text = f"{self.path}, {' and '.join(parts)}, {self.moved:,} in another class"
        if not self.renamed:
            return text
        shown = [f"{old} is now {new}" for old, new in list(self.renamed.items())[:5]]
        more = ", …" * (len(self.renamed) > 5)
        why = "renamed because the name was taken"
        return f"{text}; {len(self.renamed):,} {why}: {', '.join(shown)}{more}"


def check_cleaned_folder(target: Path, data: Path, out: Path) -> None:
    """Refuse a folder that is not empty, or that overlaps with the data or the results."""
    option, where = "--cleaned-folder", target.resolve()
    if not data.is_dir():
        raise ValueError(f"{option} is for folders of images, got {data}")
    # A class may be a link to a folder elsewhere.
    sources = [data.resolve(), *(path.resolve() for path in data.iterdir() if path.is_dir())]
    for other, name in [*((path, data) for path in sources), (out.resolve(), f"--out {out}")]:
        if where == other or other in where.parents or where in other.parents:
            raise ValueError(f"{option} must not overlap with {name}, got {target}")
    if where.exists() and not where.is_dir():
        raise ValueError(f"{option} must be a folder, {target} is a file")
    if where.exists() and any(where.iterdir()):
        raise ValueError(f"{option} must be a new or an empty folder, {target} is not empty")
    if where == Path.cwd() or where.is_mount():
        raise ValueError(f"{option} must be a folder that can be replaced, got {target}")


def write_cleaned_folder(
    target: Path, data: Path, examples: Examples, labels: Array, *, link: bool = False
) -> CleanedFolder:
    """Copy or hard-link the images of a folder into subfolders named after their labels.

    The folder is written completely or not at all. The data are not changed. Images are copied
    where hard links are impossible, such as on another disk.
    """
    names = examples.names
    for name in names:
        if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
            raise ValueError(
                f"--cleaned-folder needs classes that can be folder names, got {name!r}"
            )
    origins, paths = _split(examples.files, names)
    wanted = [names[label] for label in labels]
    new_paths = assign_paths(paths, wanted, origins)
    linked = 0
    with creating_folder(target) as folder:
        for name in names:
            try:
                (folder / name).mkdir()
            except FileExistsError:
                raise ValueError(
                    f"--cleaned-folder cannot have a folder for {name!r}: on this disk it is the "
                    "same as that of another class"
                ) from None
        for file, path in zip(examples.files, new_paths, strict=True):
            new = folder / path
            new.parent.mkdir(parents=True, exist_ok=True)
            old = (data / file).resolve()  # a link to a file becomes a file
            if link:
                with suppress(OSError):  # another disk, or one without hard links
                    os.link(old, new)
                    linked += 1
                    continue
            shutil.copy2(old, new)
    return CleanedFolder(
        path=target,
        moved=sum(a not in (None, b) for a, b in zip(origins, wanted, strict=True)),
        renamed={
            file: new_path
            for file, new_path, name, path in zip(
                examples.files, new_paths, wanted, paths, strict=True
            )
            if new_path != f"{name}/{path}"
        },
        linked=linked,
        copied=len(new_paths) - linked,
    )


def _split(files: Sequence[str], names: Sequence[str]) -> tuple[list[str | None], list[str]]:
    """Class folder of each file, and its path below that folder.

    If any file is not in a class folder, as with labels from a CSV file, no file has one.
    """
    parts, known = [file.partition("/") for file in files], set(names)
    if all(below and first in known for first, _, below in parts):
        return [first for first, _, _ in parts], [below for _, _, below in parts]
    return [None] * len(files), list(files)


def assign_paths(
    paths: Sequence[str], classes: Sequence[str], origins: Sequence[str | None]
) -> list[str]:
    """New path of each image, in the folder of its class. Images of unchanged class keep theirs.

    Names that differ only in case count as equal, because some file systems ignore case.

    >>> assign_paths(["1.png", "1.png"], ["dog", "dog"], ["cat", "dog"])
    ['dog/1-from-cat.png', 'dog/1.png']
    """
    taken: set[str] = set()
    new_paths = [""] * len(paths)
    stays = [a == b for a, b in zip(origins, classes, strict=True)]
    for i in sorted(range(len(paths)), key=lambda i: not stays[i]):
        path, count = PurePosixPath(classes[i], paths[i]), 1
        new, origin = path, f"-from-{origins[i]}" if origins[i] and not stays[i] else ""
        while _same_on_any_disk(str(new)) in taken:
            number = f"-{count}" if count > 1 or not origin else ""
            new, count = path.with_name(f"{path.stem}{origin}{number}{path.suffix}"), count + 1
        taken.add(_same_on_any_disk(str(new)))
        new_paths[i] = str(new)
    return new_paths


def _same_on_any_disk(name: str) -> str:
    """A name with the case and Unicode form that some file systems ignore."""
    return unicodedata.normalize("NFC", name.casefold())
