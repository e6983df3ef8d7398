"""Convert labels of any type to class indices."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from torch import Tensor

from neuvar.cleaning.posterior import Array

NUMBERS = "biuf"
"""numpy's kinds of booleans, integers and floats."""
LARGEST_INTEGER = 2.0**53
"""Larger floats are all integers."""


def read_labels(
    labels: Any, names: Sequence[str] | None = None, *, classes: int | None = None
) -> tuple[Array, tuple[str, ...]]:
    """Class indices, int64, and the name of each class.

    Args:
        labels: numbers, text, or any values that can be sorted.
        names: name of each class. Labels must then be these names or their indices. By default the
            classes are the labels that occur, in sorted order.
        classes: number of classes. Labels that are numbers are then indices of these.

    >>> indices, names = read_labels(["dog", "cat", "dog"])
    >>> indices.tolist(), names
    ([1, 0, 1], ('cat', 'dog'))
    >>> read_labels([0, 9, 5, 9])
    (array([0, 2, 1, 2]), ('0', '5', '9'))
    >>> read_labels([0, 2, 2], classes=3)
    (array([0, 2, 2]), ('0', '1', '2'))
    """
    values = label_array(labels)
    if not len(values):
        raise ValueError("labels is empty; at least two classes need examples")
    _refuse_missing(values, () if names is None else tuple(names))
    if values.dtype.kind == "f":
        odd = (values != np.round(values)) | ~(np.abs(values) <= LARGEST_INTEGER)
        if odd.any():
            raise ValueError(
                f"labels must be classes, got {values[odd.argmax()]:g} at position "
                f"{odd.argmax()}, which looks like a continuous quantity"
            )
        values = values.astype(np.int64)
    if names is None and classes is not None and values.dtype.kind in NUMBERS:
        names = tuple(map(str, range(classes)))
    indices, names = _by_order(values) if names is None else _by_name(values, names)
    occurring = np.unique(indices)
    if len(occurring) < 2:
        raise ValueError(
            f"labels must have at least two classes, got only one class, {names[occurring[0]]!r}"
        )
    if len(names) > len(indices):
        raise ValueError(
            "data must have at least as many examples as there are classes, "
            f"got {len(indices)} examples and {len(names)} classes"
        )
    return indices, names


def label_array(labels: Any) -> Array:
    """Labels as an array of numbers if all are numbers, otherwise of objects."""
    if isinstance(labels, Tensor):
        labels = labels.detach().cpu()
        values = np.asarray(labels.double() if labels.is_floating_point() else labels)
    elif isinstance(labels, np.ma.MaskedArray):
        values = labels.data.astype(object)
        values[np.ma.getmaskarray(labels)] = None
    elif isinstance(labels, (list, tuple)):
        values = np.fromiter(labels, object)  # np.array would turn 1 and "a" into strings
    else:
        values = np.asarray(labels.to_numpy() if hasattr(labels, "to_numpy") else labels)
    if values.ndim != 1:
        raise ValueError(f"labels must have the shape (n,), got {values.shape}")
    if values.dtype.kind in NUMBERS:
        return values
    if values.dtype.kind in "mM":  # converted to objects, times would lose their unit
        unknown, values = np.isnat(values), values.astype(str).astype(object)
        values[unknown] = None
    items = [_unwrap(value, i) for i, value in enumerate(values.astype(object).tolist())]
    if items and all(isinstance(item, (Real, np.bool_)) for item in items):
        numbers = np.array(items)
        # numpy rounds integers to floats if no integer type holds them all.
        rounded = numbers.dtype.kind == "f" and all(isinstance(item, Integral) for item in items)
        if numbers.dtype.kind in NUMBERS and not rounded:
            return numbers
    return np.fromiter(items, object)


def _unwrap(value: Any, position: int) -> Any:
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        return value.item()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Tensor) or type(value).__hash__ is None:
        raise ValueError(
            "labels must be one number or name for each example, "
            f"got {type(value).__name__} at position {position}"
        )
    return value


def _refuse_missing(values: Array, names: tuple[str, ...]) -> None:
    missing = np.zeros(len(values), bool)
    if values.dtype.kind == "f":
        missing = np.isnan(values)
    elif values.dtype.kind == "O":
        missing = np.array([_is_missing(value, names) for value in values])
    if missing.any():
        raise ValueError(
            f"labels must not be missing, {missing.sum()} of {len(values)} are missing, "
            f"the first one at position {missing.argmax()}"
        )


def _is_missing(value: Any, names: tuple[str, ...]) -> bool:
    if isinstance(value, str):
        return not value.strip() or (value in ("nan", "NaN") and value not in names)
    try:
        return value is None or bool(value != value)  # true for nan and NaT
    except (TypeError, ValueError):
        return True  # pandas.NA


def _by_order(values: Array) -> tuple[Array, tuple[str, ...]]:
    try:
        distinct, indices = np.unique(values, return_inverse=True)
    except TypeError:
        types = ", ".join(sorted({type(value).__name__ for value in values}))
        raise ValueError(
            f"labels must be of one type that can be sorted, got values of type {types}"
        ) from None
    return indices.astype(np.int64), tuple(str(value) for value in distinct)


def _by_name(values: Array, names: Sequence[str]) -> tuple[Array, tuple[str, ...]]:
    names = tuple(map(str, names))
    if len(set(names)) < len(names):
        raise ValueError(f"names must all be different, got {names!r:.200}")
    indices = values
    if values.dtype.kind == "O":
        index_of = {name: index for index, name in enumerate(names)}
        indices = np.array([index_of.get(str(value), -1) for value in values])
    outside = (indices < 0) | (indices >= len(names))
    if outside.any():
        first = int(outside.argmax())
        raise ValueError(
            f"labels must be names or indices of the {len(names)} classes, "
            f"got {values.tolist()[first]!r} at position {first}"
        )
    return indices.astype(np.int64), names
