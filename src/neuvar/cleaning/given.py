"""Labels as people keep them: numbers or text, beside the data or in a file of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from neuvar.cleaning.columns import names_of_columns, place_of, read_texts, row_numbers
from neuvar.cleaning.inputs.labels import NUMBERS
from neuvar.cleaning.issues import Array
from neuvar.cleaning.numpy_files import name_among, names_in, read_named, read_npy

LABELS = ("labels", "y", "targets")
"""Names under which the labels of an .npz file are looked for, in this order."""

LABEL = "label"
"""The column of labels unless another one is named."""

PLACES = ("file", "index")
"""Columns of a file of labels that say what a label belongs to."""

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-][0-9]+)?")
_LONGEST = 18
"""Signs of a whole number that int64 holds whatever they are."""


def label_file(name: str, otherwise: str) -> Array:
    """Labels from a file of their own, in the order of the examples."""
    path = Path(name)
    kind = path.suffix.lower()
    if not path.is_file() or kind not in (".npy", ".npz", ".csv"):
        raise ValueError(f"--labels must be a .npy, .npz or .csv file or {otherwise}, got {name!r}")
    if kind == ".npy":
        return plain_array(read_npy(path))
    if kind == ".npz":
        there = names_in(path)
        only = there if len(there) == 1 else LABELS
        return plain_array(read_named(path, name_among(only, path, "labels")))
    column = _column(path)
    if "index" in names_of_columns(path):
        rows = read_texts(path, ["index"])
        return spelled(labels_by_place(path, "index", [str(i) for i in range(len(rows))]))
    return spelled([row[column] for row in read_texts(path, [column])])


def _column(path: Path) -> str:
    """The column of labels of a CSV file: the one called so, or the only one."""
    header = names_of_columns(path)
    others = [name for name in header if name not in (*PLACES, *row_numbers(path))]
    if LABEL not in header and len(others) == 1:
        return others[0]
    return header[place_of(LABEL, header, path)]


def labels_by_place(path: Path, what: str, places: Sequence[str]) -> list[str]:
    """The labels of a CSV file that says for each one what it belongs to."""
    found: dict[str, str] = {}
    place_of(what, names_of_columns(path), path)
    column = _column(path)
    for row in read_texts(path, [what, column]):
        if row[what] in found:
            raise ValueError(f"{path} must have each {what} once, {row[what]!r} is there twice")
        found[row[what]] = row[column]
    known = set(places)
    unknown = next((place for place in found if place not in known), None)
    if unknown is not None:
        raise ValueError(f"{path} has a label for {what} {unknown!r}, which the data do not have")
    missing = next((place for place in places if place not in found), None)
    if missing is not None:
        raise ValueError(f"{path} has no label for {what} {missing!r}")
    return [found[place] for place in places]


def plain_array(labels: Any) -> Array:
    """Labels of what knows whether they are numbers or text; truth values become 0 and 1."""
    y = np.asarray(labels)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    return y.astype(np.int64) if y.dtype.kind == "b" else y


def spelled(texts: Sequence[str]) -> Array:
    """Labels of a CSV file, which has no types: numbers if all of them spell one, else text.

    Whole numbers may be spelled as pandas does if one of them was missing once.

    >>> spelled(["9", "10"]), spelled(["9.0", "10.0"]), spelled(["9", "010"])
    (array([ 9, 10]), array([ 9., 10.]), array(['9', '010'], dtype='<U3'))
    """
    y = np.array(texts)
    if not all(map(_NUMBER.fullmatch, texts)):
        return y
    if any("." in text or "e" in text for text in texts):
        return y.astype(np.float64)
    return y if any(len(text) > _LONGEST for text in texts) else y.astype(np.int64)


def values_of(given: Array, names: Sequence[str]) -> Array:
    """The label of each class as it is kept in an array: a number if those given are numbers.

    >>> values_of(np.array([7.0, 0.0]), ["0", "7"]), values_of(np.array(["7", "0"]), ["0", "7"])
    (array([0, 7]), array(['0', '7'], dtype='<U1'))
    """
    return np.array([int(name) for name in names] if given.dtype.kind in NUMBERS else names)
