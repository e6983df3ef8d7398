"""Read datasets with labels: image folders, .npz, .csv and .parquet files."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar.cleaning.class_indices import NUMBERS, read_labels
from neuvar.cleaning.encoding import read_features
from neuvar.cleaning.examples import Examples, read_examples, read_inputs
from neuvar.cleaning.image_folder import files_in, is_image, read_folder, read_images
from neuvar.cleaning.observer import LabelObserver
from neuvar.cleaning.posterior import Array
from neuvar.cleaning.tables import check_column, read_header, read_numbers, read_texts
from neuvar.labels.label_files import array_names, first_line, read_array

INPUTS = ("images", "inputs", "x", "X", "data")
LABELS = ("labels", "y", "targets")
EMBEDDINGS = ("embeddings", "vectors", "features", *INPUTS)
PROBABILITIES = ("probabilities", "pred_probs", "probs", "p")
"""Default names of the arrays of an .npz file, in the order of preference."""
LABEL = "label"
LABEL_COLUMNS = (LABEL, "labels", "class", "target", "category", "y")
"""Default names of the column of labels, in the order of preference; case is ignored."""
OBSERVED = "observed"
"""Kind of a source without inputs: only the file of a LabelObserver."""
DATA_KINDS = "a folder of images, a .npz, a .csv or a .parquet file"

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-][0-9]+)?")
_INT64_DIGITS = 18
"""int64 holds every integer with at most this many digits."""


@dataclass(frozen=True, eq=False)
class Source:
    """A dataset from a file or folder."""

    name: str
    kind: str  # "folder", "npz", "csv", "parquet" or "observed"
    examples: Examples
    values: Array  # label of each class in its original form, numbers or text
    columns: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # columns or files that were not read, with the reason
    cells: tuple[tuple[str, ...], ...] = ()  # as in encoding.Features
    notes: tuple[str, ...] = ()  # what was guessed or encoded, for the user
    label_column: tuple[Path, str] | None = None  # the CSV file with the data, and its label column
    from_text: tuple[bool, ...] = ()  # as in encoding.Features

    @property
    def id_column(self) -> str:
        """Name of the column of ids: "file" or "index"."""
        return "file" if self.examples.files and self.kind != OBSERVED else "index"

    @property
    def ids(self) -> Sequence[str]:
        """File or index of each example."""
        return self.examples.files or [str(i) for i in range(len(self.examples))]

    @property
    def sha256(self) -> str:
        """Hash of inputs, labels, class names and files."""
        e = self.examples
        # Unlike the cells, encoded columns have rounding errors.
        inputs = np.zeros(0) if self.cells else e.inputs.cpu().contiguous().numpy()
        text = repr((inputs.shape, inputs.dtype.str, e.names, e.files, *self.cells))
        digest = hashlib.sha256(text.encode(errors="surrogatepass"))
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
    skip_unreadable: bool = False,
) -> Source:
    """Read a dataset with its labels; the arguments are those of ``neuvar clean``."""
    if not path.exists():
        raise ValueError(f"there is no {path}; DATA must be {DATA_KINDS}")
    kind = "folder" if path.is_dir() else path.suffix.lower().removeprefix(".")
    if kind not in ("folder", "npz", "csv", "parquet"):
        raise ValueError(f"DATA must be {DATA_KINDS}, got {path}")
    if size is not None and kind != "folder":
        raise ValueError(f"--size is for folders of images, got {path}")
    if inputs is not None and kind != "npz":
        raise ValueError(f"--inputs is for .npz files, got {path}")
    if drop and kind not in ("csv", "parquet"):
        raise ValueError(f"--drop is for tables, got {path}")
    if skip_unreadable and kind != "folder":
        raise ValueError(f"--skip-unreadable is for folders of images, got {path}")
    if kind == "folder":
        return _read_folder(path, labels, size, [] if skip_unreadable else None)
    return _read_npz(path, inputs, labels) if kind == "npz" else _read_table(path, labels, drop)


def _read_folder(
    path: Path, labels: str | None, size: int | None, skipped: list[str] | None
) -> Source:
    every = [file for group in files_in(path).values() for file in group]
    if labels is None:
        images, texts, classes, files = read_folder(path, size, skipped)
        examples = Examples(images, *read_labels(texts, classes), files)
    else:
        if not labels.lower().endswith(".csv") or not Path(labels).is_file():
            raise ValueError(
                "--labels of a folder must be a .csv file with the columns file and label, "
                f"got {labels!r}"
            )
        image_files = sorted(filter(is_image, every))
        if not image_files:
            raise ValueError(f"{path} has no image")
        # Labels stay text, like folder names.
        texts = _labels_by_id(Path(labels), "file", image_files)
        label_of = dict(zip(image_files, texts, strict=True))
        images, files = read_images(path, image_files, size, skipped)
        examples = Examples(images, *read_labels([label_of[file] for file in files]), files)
    used, label_file = {*examples.files, *(skipped or ())}, labels and Path(labels)
    others = [file for file in every if file not in used and path / file != label_file]
    suffixes = sorted({Path(file).suffix.lower() or "no ending" for file in others})
    left_out = (
        *_count_files(len(skipped or ()), "unreadable image", skipped or ()),
        *_count_files(len(others), "other file", suffixes),
    )
    name = path.name or path.resolve().name or str(path)
    return Source(name, "folder", examples, np.array(examples.names), left_out=left_out)


def _count_files(count: int, what: str, names: Sequence[str]) -> list[str]:
    """A number of files with up to five names, or nothing for 0."""
    shown = ", ".join(names[:5]) + ", …" * (len(names) > 5)
    return [f"{count:,} {what}{'s' * (count != 1)} ({shown})"] if count else []


def _read_npz(path: Path, inputs: str | None, labels: str | None) -> Source:
    names = _read_numpy(array_names, path)
    allowed = f"an array of {path}, which has {', '.join(names)}"
    hint = "; name them with --inputs NAME and --labels NAME"
    if inputs is not None and inputs not in names:
        raise ValueError(f"--inputs must be {allowed}, got {inputs!r}")
    inputs = inputs or _first_known(INPUTS, names, f"{path} has no inputs", hint)
    if labels is None or labels in names:
        labels = labels or _first_known(LABELS, names, f"{path} has no labels", hint)
        if labels == inputs:
            raise ValueError(f"inputs and labels must be two arrays of {path}, got {inputs!r}")
        y = _plain_labels(_read_numpy(read_array, path, labels))
    else:
        y = _read_label_file(labels, allowed)
    array = _read_numpy(read_array, path, inputs)
    if array.ndim == 2 and array.dtype.kind in "iu":  # features, like the integers of a table
        array = array.astype(np.float32)
    examples = read_examples((array, y))
    return Source(path.name, "npz", examples, _class_values(y, examples.names))


def _read_numpy(read: Callable[..., Any], path: Path, *name: str) -> Any:
    try:
        return read(path, *name)
    except Exception as error:  # numpy may raise anything if a file is damaged
        kind = path.suffix.lower()
        raise ValueError(f"{path} is not a readable {kind} file: {first_line(error)}") from error


def _first_known(known: Sequence[str], names: Sequence[str], problem: str, hint: str = "") -> str:
    """The first known name that an .npz file has."""
    for name in known:
        if name in names:
            return name
    raise ValueError(
        f"{problem}: looked for an array called {', '.join(known)}; "
        f"it has {', '.join(names) or 'none'}{hint}"
    )


def history_of(path: Path) -> bool | None:
    """Whether probabilities of ``neuvar clean`` are a mean over a training; None for others."""
    if path.suffix.lower() != ".npz" or "history" not in _read_numpy(array_names, path):
        return None
    return bool(_read_numpy(read_array, path, "history"))


def _read_one_array(path: Path, known: Sequence[str], what: str) -> Array:
    """The array of an .npy file; the only array of an .npz file, or the first with a known name."""
    name: list[str] = []
    if path.suffix.lower() == ".npz":
        names = _read_numpy(array_names, path)
        name = names if len(names) == 1 else [_first_known(known, names, f"{path} has no {what}")]
    array: Array = _read_numpy(read_array, path, *name)
    return array


def _read_table(path: Path, labels: str | None, drop: Sequence[str]) -> Source:
    names, row_numbers = read_header(path)
    kind = path.suffix.lower().removeprefix(".")
    column = labels or _guess_labels(names, row_numbers, path)
    notes = [f"labels: column {column!r}, guessed; name another with --labels"]
    if labels is not None or column == LABEL:
        notes = []
    in_file = labels is not None and column not in names and Path(labels).is_file()
    own = None if in_file else column
    if own is not None:
        check_column(own, names, path)
    for name in drop:
        check_column(name, names, path)
        if name == own:
            raise ValueError(f"--drop must not have the column of labels, got {name!r}")
    left_out = dict.fromkeys(row_numbers, "row numbers")
    if LABEL in names:
        left_out[LABEL] = "other labels"
    left_out = {name: reason for name, reason in left_out.items() if name not in (own, *drop)}
    columns = [name for name in names if name != own and name not in (*drop, *left_out)]
    features, cells = read_features(path, columns, own)
    if in_file:
        y = _read_label_file(column, f"a column of {path}")
    else:
        y = (_parse_labels if kind == "csv" else _plain_labels)(cells)
    examples = read_examples((features.numbers, y))
    reasons = tuple(f"column {name!r} ({reason})" for name, reason in left_out.items())
    return Source(
        path.name,
        kind,
        examples,
        _class_values(y, examples.names),
        features.columns,
        (*reasons, *features.left_out),
        features.cells,
        tuple(notes) + ((features.summary,) if features.summary else ()),
        (path, column) if kind == "csv" and not in_file else None,
        features.from_text,
    )


def _guess_labels(names: Sequence[str], row_numbers: Sequence[str], path: Path) -> str:
    """The column with a default name of labels, or the last column."""
    lower = {name.strip().lower(): name for name in reversed(names)}
    for word in LABEL_COLUMNS:
        if word in lower:
            return lower[word]
    others = [name for name in names if name not in row_numbers]
    if len(others) < 2:
        check_column(LABEL, names, path)
    return others[-1]


def _read_label_file(name: str, otherwise: str) -> Array:
    """Labels from a separate file, in the order of the examples."""
    path = Path(name)
    if not path.is_file() or path.suffix.lower() not in (".npy", ".npz", ".csv"):
        raise ValueError(f"--labels must be a .npy, .npz or .csv file or {otherwise}, got {name!r}")
    if path.suffix.lower() != ".csv":
        return _plain_labels(_read_one_array(path, LABELS, "labels"))
    if "index" in read_header(path)[0]:
        return _parse_labels(_labels_by_id(path, "index"))
    column = _label_column(path)
    return _parse_labels([row[column] for row in read_texts(path, [column])])


def _label_column(path: Path) -> str:
    """The column "label" of a CSV file, or its only column other than ids."""
    names, row_numbers = read_header(path)
    others = [name for name in names if name not in ("file", "index", *row_numbers)]
    if LABEL not in names and len(others) == 1:
        return others[0]
    check_column(LABEL, names, path)
    return LABEL


def _labels_by_id(path: Path, id_column: str, ids: Sequence[str] | None = None) -> list[str]:
    """Labels of a CSV file, in the order of the ids of the examples (by default 0, 1, 2, ...)."""
    column = _label_column(path)
    rows = read_texts(path, [id_column, column])
    if ids is None:
        ids = [str(i) for i in range(len(rows))]
    labels, known = {row[id_column]: row[column] for row in rows}, set(ids)
    for key, count in Counter(row[id_column] for row in rows).items():
        if count > 1:
            raise ValueError(f"{path} must have each {id_column} once, but {key!r} occurs twice")
        if key not in known:
            raise ValueError(
                f"{path} has a label for {id_column} {key!r}, which is not in the data"
            )
    for key in ids:
        if key not in labels:
            raise ValueError(f"{path} has no label for {id_column} {key!r}")
    return [labels[key] for key in ids]


def _plain_labels(labels: Any) -> Array:
    """Labels with shape (n,) and their own type; booleans become 0 and 1."""
    y = np.asarray(labels)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    return y.astype(np.int64) if y.dtype.kind == "b" else y


def _parse_labels(texts: Sequence[str]) -> Array:
    """Labels of a CSV file, as numbers if all of them look like numbers.

    >>> _parse_labels(["9", "10"]), _parse_labels(["9.0", "10.0"]), _parse_labels(["9", "010"])
    (array([ 9, 10]), array([ 9., 10.]), array(['9', '010'], dtype='<U3'))
    """
    y = np.array(texts)
    if not all(map(_NUMBER.fullmatch, texts)):
        return y
    if any("." in text or "e" in text for text in texts):
        return y.astype(np.float64)
    return y if any(len(text) > _INT64_DIGITS for text in texts) else y.astype(np.int64)


def _class_values(labels: Array, names: Sequence[str]) -> Array:
    return np.array([int(name) for name in names] if labels.dtype.kind in NUMBERS else names)


def read_observed(path: Path) -> Source:
    """The labels that an observer has seen, without inputs; ``files`` has their indices."""
    if not path.is_file():
        raise ValueError(f"there is no {path}; --observed must be a file of LabelObserver.save()")
    observer = LabelObserver.load(path)
    issues, seen = observer.seen_issues()
    files = tuple(map(str, seen))
    examples = Examples(torch.zeros(len(seen), 0), issues.labels, issues.names, files)
    values = issues.values if observer.names is None else np.array(issues.names)
    return Source(path.name, OBSERVED, examples, values)


def with_classes(source: Source, classes: int, option: str = "--probabilities") -> Source:
    """The same data with this number of classes, that of the predicted probabilities.

    Numeric labels need not contain all classes. For text, the names of missing classes are unknown.
    """
    e, values = source.examples, source.values
    if len(e.names) == classes:
        return source
    if values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= classes:
        raise ValueError(
            f"{option} must have a column for each of the {len(e.names)} classes of "
            f"{source.name}, got {classes} columns"
        )
    every = np.arange(classes, dtype=values.dtype)
    labels = values[e.labels].astype(np.int64)
    examples = replace(e, labels=labels, names=tuple(map(str, every)))
    return replace(source, examples=examples, values=every)


def read_embeddings(path: Path, count: int) -> Tensor:
    """Vectors of the examples as float32, from a .npy or .npz file."""
    if not path.is_file():
        raise ValueError(f"there is no {path}; --embeddings must be a .npy or .npz file")
    if path.suffix.lower() not in (".npy", ".npz"):
        raise ValueError(f"--embeddings must be a .npy or .npz file, got {str(path)!r}")
    vectors = _read_one_array(path, EMBEDDINGS, "embeddings")
    if vectors.ndim != 2 or vectors.dtype.kind not in "fiub" or len(vectors) != count:
        raise ValueError(
            f"--embeddings must hold numbers of shape ({count}, size), one row for each example, "
            f"got shape {vectors.shape} and type {vectors.dtype}"
        )
    return read_inputs(vectors.astype(np.float32))


def read_probabilities(path: Path, names: Sequence[str]) -> Array:
    """Predicted probabilities from a .npy, .npz or .csv file.

    The columns are in the order of the classes, or in any order in a CSV file whose columns are the
    names of the classes.
    """
    if not path.is_file() or path.suffix.lower() not in (".npy", ".npz", ".csv"):
        raise ValueError(f"--probabilities must be a .npy, .npz or .csv file, got {str(path)!r}")
    if path.suffix.lower() == ".csv":
        header, row_numbers = read_header(path)
        columns = [name for name in header if name not in row_numbers]
        return read_numbers(path, names if set(columns) == set(names) else columns)
    p = _read_one_array(path, PROBABILITIES, "probabilities")
    if p.ndim != 2 or p.dtype.kind not in "fiub":
        raise ValueError(
            f"{path} must hold numbers of shape (examples, classes), got shape {p.shape} "
            f"and type {p.dtype}"
        )
    return p
