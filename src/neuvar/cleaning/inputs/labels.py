"""Labels of any kind as class numbers."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from torch import Tensor

from neuvar.cleaning.issues import Array

LARGEST_WHOLE = 2.0**53
"""Floating point numbers above it are whole for lack of digits."""

NUMBERS = "biuf"
"""numpy's letters for truth values, whole numbers and floating point numbers."""

NOT_A_NUMBER = ("nan", "NaN")
"""What numpy and others make of a missing label among text."""


def read_labels(values: Any, names: Sequence[str] | None = None) -> tuple[Array, tuple[str, ...]]:
    """Class numbers from 0, as int64, and the name of each class.

    Args:
        values: numbers or names of classes, or any values that can be sorted.
        names: the name of each class, by its number; labels are then numbers or names of these. By
            default the classes are the labels that occur, in sorted order.

    >>> numbers, names = read_labels(["dog", "cat", "dog"])
    >>> numbers.tolist(), names
    ([1, 0, 1], ('cat', 'dog'))
    >>> read_labels([0, 9, 5, 9])
    (array([0, 2, 1, 2]), ('0', '5', '9'))
    """
    found = plain_labels(values)
    if not len(found):
        raise ValueError("labels is empty; at least two classes need an example each")
    _refuse_missing(found, () if names is None else tuple(names))
    if found.dtype.kind == "f":
        found = _whole(found)
    numbers, known = _by_order(found) if names is None else _by_name(found, names)
    occurring = np.unique(numbers)
    if len(occurring) < 2:
        raise ValueError(
            "labels must have at least two classes, all examples have the one class "
            f"{known[occurring[0]]!r}"
        )
    if len(known) > len(numbers):
        raise ValueError(
            "data must have at least as many examples as there are classes, "
            f"got {len(numbers)} examples and {len(known)} classes"
        )
    return numbers, known


def plain_labels(values: Any) -> Array:
    """Labels as an array of numbers, or else of objects."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
        found = np.asarray(values)
    elif isinstance(values, np.ma.MaskedArray):
        found = values.data.astype(object)
        found[np.ma.getmaskarray(values)] = None
    elif isinstance(values, (list, tuple)):
        found = np.empty(len(values), dtype=object)
        for i, value in enumerate(values):  # at once, numpy would turn 1 and "a" into strings
            found[i] = value
    else:
        found = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
    if found.ndim != 1:
        raise ValueError(f"labels must have the shape (n,), got {found.shape}")
    return found if found.dtype.kind in NUMBERS else _numbers_if_all_are(found)


def _numbers_if_all_are(found: Array) -> Array:
    if found.dtype.kind in "mM":  # times, which as objects would be numbers without a unit
        unknown = np.isnat(found)
        found = found.astype(str).astype(object)
        found[unknown] = None
    values = [_value(value, i) for i, value in enumerate(found.astype(object).tolist())]
    if values and all(isinstance(value, (Real, np.bool_)) for value in values):
        numbers = np.array(values)
        # Whole numbers that no type of numpy's holds together would become rounded ones.
        rounded = numbers.dtype.kind == "f" and all(isinstance(value, Integral) for value in values)
        if numbers.dtype.kind in NUMBERS and not rounded:
            return numbers
    objects = np.empty(len(values), dtype=object)
    objects[:] = values
    return objects


def _value(value: Any, position: int) -> Any:
    """One label without what it is wrapped in."""
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


def _refuse_missing(found: Array, names: tuple[str, ...]) -> None:
    """Refuse labels that are not there, such as "nan" unless a class is called so."""
    if found.dtype.kind == "f":
        missing = np.isnan(found)
    elif found.dtype.kind == "O":
        missing = np.array([_is_missing(value, names) for value in found])
    else:
        return
    if missing.any():
        raise ValueError(
            f"labels must be there for all examples, {missing.sum()} of {len(found)} are missing, "
            f"the first one at position {missing.argmax()}"
        )


def _is_missing(value: Any, names: tuple[str, ...]) -> bool:
    if isinstance(value, str):
        return not value.strip() or (value in NOT_A_NUMBER and value not in names)
    if value is None:
        return True
    try:
        return bool(value != value)  # nan and NaT differ from themselves
    except (TypeError, ValueError):
        return True  # NA of pandas gives no answer


def _whole(found: Array) -> Array:
    """Whole numbers that were stored as floating point ones."""
    odd = (found != np.round(found)) | ~(np.abs(found) <= LARGEST_WHOLE)
    if odd.any():
        raise ValueError(
            f"labels must be classes, got {found[odd.argmax()]:g} at position {odd.argmax()}, "
            "which looks like a measured quantity"
        )
    return found.astype(np.int64)


def _by_order(found: Array) -> tuple[Array, tuple[str, ...]]:
    """Number the values that occur in sorted order."""
    try:
        distinct, numbers = np.unique(found, return_inverse=True)
    except TypeError:
        kinds = ", ".join(sorted({type(value).__name__ for value in found}))
        raise ValueError(
            f"labels must be of one kind that can be sorted, got values of type {kinds}"
        ) from None
    return numbers.astype(np.int64), tuple(str(value) for value in distinct)


def _by_name(found: Array, names: Sequence[str]) -> tuple[Array, tuple[str, ...]]:
    """Look names up, or check numbers."""
    known = tuple(map(str, names))
    if len(set(known)) < len(known):
        raise ValueError(f"names must all be different, got {known!r:.200}")
    if found.dtype.kind == "O":
        where = {name: number for number, name in enumerate(known)}
        found, given = np.array([where.get(str(value), -1) for value in found]), found
    else:
        given = found
    outside = (found < 0) | (found >= len(known))
    if outside.any():
        first = int(outside.argmax())
        raise ValueError(
            f"labels must be names or numbers of the {len(known)} classes, "
            f"got {given.tolist()[first]!r} at position {first}"
        )
    return found.astype(np.int64), known
