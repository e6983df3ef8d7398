"""Data sets as people keep them: folders of images, .npz, .csv and .parquet files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from neuvar.cleaning.columns import (
    names_of_columns,
    place_of,
    read_csv,
    read_parquet,
    row_numbers,
)
from neuvar.cleaning.given import (
    LABEL,
    LABELS,
    label_file,
    labels_by_place,
    plain_array,
    spelled,
    values_of,
)
from neuvar.cleaning.inputs import Examples, read_examples
from neuvar.cleaning.inputs.folders import files_in, is_image, read_images
from neuvar.cleaning.inputs.labels import read_labels
from neuvar.cleaning.issues import Array
from neuvar.cleaning.numpy_files import name_among, names_in, read_named, read_npy

INPUTS = ("images", "inputs", "x", "X", "data")
"""Names under which the inputs of an .npz file are looked for, in this order."""

NAMED = "; name them with --inputs NAME and --labels NAME"
PROBABILITIES = ("probabilities", "pred_probs", "probs", "p")
KINDS = "a folder of images, a .npz, a .csv or a .parquet file"


@dataclass(frozen=True, eq=False)
class Source:
    """A data set and how it was kept.

    Attributes:
        name: what to call it.
        kind: "folder", "npz", "csv" or "parquet".
        examples: inputs, labels and names of classes.
        values: the label of each class as an array has it, numbers or text.
        columns: what the features are called; empty if they have no names.
        left_out: what is there and was not read although nobody said so, and why.
    """

    name: str
    kind: str
    examples: Examples
    values: Array
    columns: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def place_name(self) -> str:
        """What the examples are told apart by: "file" or "index"."""
        return "file" if self.examples.files else "index"

    @property
    def places(self) -> Sequence[str]:
        """What each example is told by, its file or its number."""
        return self.examples.files or [str(i) for i in range(len(self.examples.labels))]

    @property
    def sha256(self) -> str:
        """Of inputs, labels, names and files: other data, other digest."""
        e = self.examples
        inputs = e.inputs.cpu().contiguous().numpy()
        words = repr((inputs.shape, inputs.dtype.str, e.names, e.files))
        digest = hashlib.sha256(words.encode(errors="surrogatepass"))
        digest.update(inputs.data)
        digest.update(np.ascontiguousarray(e.labels, np.int64).data)
        return digest.hexdigest()


def read_source(
    path: Path,
    *,
    labels: str | None = None,
    inputs: str | None = None,
    drop: Sequence[str] = (),
    size: int | None = None,
) -> Source:
    """Read a data set with its labels.

    Args:
        path: a folder with a folder of images for each class, or a file: .npz with arrays of
            inputs and labels; .csv with a header, or .parquet, whose columns are features but for
            the one of labels, a second one called label, and row numbers.
        labels: where the labels are if not where they usually are: the name of an array or of a
            column, or a .npy, .npz or .csv file that has them; for a folder, a .csv file with the
            columns file and label.
        inputs: the array of an .npz file that has the inputs, if it has no usual name.
        drop: columns of a table that are not read.
        size: pixels to which the images of a folder are brought, both ways.
    """
    if not path.exists():
        raise ValueError(f"DATA must be {KINDS}, there is no {path}")
    kind = "folder" if path.is_dir() else path.suffix.lower().removeprefix(".")
    if kind not in ("folder", "npz", "csv", "parquet"):
        raise ValueError(f"DATA must be {KINDS}, got {path}")
    if size is not None and kind != "folder":
        raise ValueError(f"--size is for folders of images, got {path}")
    if inputs is not None and kind != "npz":
        raise ValueError(f"--inputs is for .npz files, got {path}")
    if drop and kind not in ("csv", "parquet"):
        raise ValueError(f"--drop is for tables, got {path}")
    if kind == "folder":
        return _folder(path, labels, size)
    return _npz(path, inputs, labels) if kind == "npz" else _table(path, kind, labels, drop)


def _folder(path: Path, labels: str | None, size: int | None) -> Source:
    name = path.name or path.resolve().name or str(path)
    there = [file for files in files_in(path).values() for file in files]
    if labels is None:
        examples = read_examples(path, size=size)
    else:
        examples = _labelled(path, Path(labels), sorted(filter(is_image, there)), size)
    own, given = set(examples.files), labels and Path(labels)
    left_out = _counted([file for file in there if file not in own and path / file != given])
    return Source(name, "folder", examples, np.array(examples.names), left_out=left_out)


def _labelled(folder: Path, labels: Path, files: list[str], size: int | None) -> Examples:
    """Images of a folder with the labels of a table, which are text as names of folders are."""
    if labels.suffix.lower() != ".csv" or not labels.is_file():
        raise ValueError(
            f"--labels of a folder must be a .csv file with the columns file and label, "
            f"got {str(labels)!r}"
        )
    if not files:
        raise ValueError(f"{folder} has no image")
    given, names = read_labels(labels_by_place(labels, "file", files))
    return Examples(read_images(folder, files, size), given, names, tuple(files))


def _counted(files: list[str], most: int = 5) -> tuple[str, ...]:
    """How many files there are, and how their names end."""
    if not files:
        return ()
    endings = sorted({Path(file).suffix.lower() or "no ending" for file in files})
    shown = ", ".join(endings[:most]) + ", …" * (len(endings) > most)
    return (f"{len(files):,} other file{'s' * (len(files) != 1)} ({shown})",)


def _npz(path: Path, inputs: str | None, labels: str | None) -> Source:
    there = names_in(path)
    known = f"an array of {path}, which has {', '.join(there)}"
    if inputs is not None and inputs not in there:
        raise ValueError(f"--inputs must be {known}, got {inputs!r}")
    name = inputs or name_among(INPUTS, path, "inputs", otherwise=NAMED)
    if labels is None or labels in there:
        labels = labels or name_among(LABELS, path, "labels", otherwise=NAMED)
        if labels == name:
            raise ValueError(f"inputs and labels must be two arrays of {path}, got {name!r}")
        given = plain_array(read_named(path, labels))
    else:
        given = label_file(labels, known)
    found = read_named(path, name)
    # Whole numbers that stand in rows are features here, as those of a table are.
    is_features = found.ndim == 2 and found.dtype.kind in "iu"
    examples = read_examples((found.astype(np.float32) if is_features else found, given))
    return Source(path.name, "npz", examples, values_of(given, examples.names))


def _table(path: Path, kind: str, labels: str | None, drop: Sequence[str]) -> Source:
    column, there = labels or LABEL, names_of_columns(path)
    is_apart = labels is not None and column not in there and Path(labels).is_file()
    own = None if is_apart else there[place_of(column, there, path)]
    for name in drop:
        place_of(name, there, path)
        if name == own:
            raise ValueError(f"--drop must not have the column of labels, got {name!r}")
    left_out = dict.fromkeys(row_numbers(path), "row numbers")
    if LABEL in there:
        left_out[LABEL] = "other labels"
    left_out = {name: what for name, what in left_out.items() if name not in (own, *drop)}
    read = read_csv if kind == "csv" else read_parquet
    table = read(path, own, without={*drop, *left_out})
    if is_apart:
        given = label_file(column, f"a column of {path}")
    else:
        given = (spelled if kind == "csv" else plain_array)(table.labels or [])
    examples = read_examples((table.numbers, given))
    return Source(
        path.name,
        kind,
        examples,
        values_of(given, examples.names),
        table.columns,
        tuple(f"column {name!r} ({what})" for name, what in left_out.items()),
    )


def with_classes(source: Source, classes: int) -> Source:
    """The same data for probabilities of so many classes.

    Labels that are numbers may leave classes out; text cannot tell which ones it leaves out.
    """
    e, values = source.examples, source.values
    if len(e.names) == classes:
        return source
    if values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= classes:
        raise ValueError(
            f"--probabilities must have a column for each of the {len(e.names)} classes of "
            f"{source.name}, got {classes} columns"
        )
    every = np.arange(classes, dtype=values.dtype)
    labels = values[e.labels].astype(np.int64)
    return replace(
        source, examples=replace(e, labels=labels, names=tuple(map(str, every))), values=every
    )


def read_probabilities(path: Path, names: Sequence[str]) -> Array:
    """Probabilities of classes for each example, from a .npy, .npz or .csv file.

    Columns are in the order of the classes; those of a CSV file may be called after the classes
    and are then taken by their names.
    """
    kind = path.suffix.lower()
    if not path.is_file() or kind not in (".npy", ".npz", ".csv"):
        raise ValueError(f"--probabilities must be a .npy, .npz or .csv file, got {str(path)!r}")
    if kind == ".npy":
        found = read_npy(path)
    elif kind == ".npz":
        there = names_in(path)
        only = there if len(there) == 1 else PROBABILITIES
        found = read_named(path, name_among(only, path, "probabilities"))
    else:
        table = read_csv(path, None, without=row_numbers(path))
        order = list(range(len(table.columns)))
        if set(table.columns) == set(names):
            order = [table.columns.index(name) for name in names]
        found = table.numbers[:, order]
    if found.ndim != 2 or found.dtype.kind not in "fiub":
        raise ValueError(
            f"{path} must hold numbers of shape (examples, classes), got shape {found.shape} "
            f"and type {found.dtype}"
        )
    return found
