"""Examples with labels from whatever holds them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from neuvar._batches import TARGET_KEYS
from neuvar._validate import integer
from neuvar.cleaning.inputs.arrays import read_inputs
from neuvar.cleaning.inputs.folders import read_folder
from neuvar.cleaning.inputs.labels import NUMBERS, plain_labels, read_labels
from neuvar.cleaning.inputs.pictures import is_picture, pixels_of, squares
from neuvar.cleaning.issues import Array
from neuvar.data import Dataset, Split


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples with a label each, in memory.

    Attributes:
        inputs: uint8 images of shape (n, height, width) or (n, channels, height, width), int64
            rows of shape (n, m), or float32 features of shape (n, ...).
        labels: int64 class numbers from 0, shape (n,).
        names: the name of each class, by its number.
        files: for images from a folder, the path of each below it, with forward slashes.
    """

    inputs: Tensor
    labels: Array
    names: tuple[str, ...]
    files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n, classes = len(self.inputs), len(self.names)
        if self.labels.shape != (n,) or (self.files and len(self.files) != n):
            raise ValueError(
                f"inputs and labels must have the same length, got {n} and {len(self.labels)}"
                + (f", and {len(self.files)} files" if self.files else "")
            )
        inside = (self.labels >= 0) & (self.labels < classes)
        if self.labels.dtype != np.int64 or not inside.all():
            raise ValueError(
                f"labels must be int64 numbers from 0 to {classes - 1}, one for each name"
            )
        image = self.inputs.dtype == torch.uint8 and self.inputs.ndim in (3, 4)
        whole = self.inputs.dtype == torch.int64 and self.inputs.ndim == 2
        if not (image or whole or self.inputs.dtype == torch.float32):
            raise ValueError(
                "inputs must be float32, int64 of 2 dimensions or uint8 images of 3 or 4, got "
                f"{self.inputs.dtype} of shape {tuple(self.inputs.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)


def read_examples(
    data: Any, *, size: int | None = None, names: Sequence[str] | None = None
) -> Examples:
    """Bring examples and their labels into memory, whatever they come as.

    The classes are the labels that occur, in sorted order, unless they are known: from ``names``,
    from a data set that knows the names of its classes, or from the folders of a folder. So labels
    0, 5 and 9 are three classes with the names "0", "5" and "9"; with ten ``names`` they are three
    of ten. Labels may be of any kind that can be sorted.

    Images from a folder are grey if all are stored so, otherwise RGB; they are turned as their
    camera says, and put on white where they are transparent. Grey ones of 16 bits and more share
    one range, of as many bits as the brightest needs. Each is scaled with antialiasing until its
    longer side has ``size`` pixels, and lies in the middle of a black square: nothing is cut off.

    Args:
        data: one of

            - a pair of inputs and labels: arrays, tensors, lists, or what pandas has for them;
            - :class:`neuvar.data.Split`, or :class:`neuvar.data.Dataset`, of which the training
              part is read;
            - a torch data set with a length whose items are pairs of an input and a label, or
              dicts with one input and a label under "labels", "label", "targets", "target" or "y";
              inputs may be pictures of Pillow's;
            - the path of a folder with a folder of images for each class, for which see above;
            - :class:`Examples`, which are returned as they are.
        size: height and width of the images of a folder, or of pictures. By default the longer side
            of all of them if it is the same and at most 64; otherwise 64.
        names: the name of each class, by its number, in the order of a network's outputs; labels
            are then numbers or names of these.

    Returns:
        The examples. Images have channels before height and width, and stay bytes if they are;
        whole numbers of shape (n, m) are int64, other numbers become float32. Memory is shared with
        ``data`` where that is possible.

    >>> found = read_examples(([[0.5, 1.0], [0.1, 2.0], [0.2, 0.0]], ["no", "yes", "no"]))
    >>> found.inputs.shape, found.labels.tolist(), found.names
    (torch.Size([3, 2]), [0, 1, 0], ('no', 'yes'))
    """
    if size is not None:
        size = integer("size", size, low=1)
    if isinstance(data, Examples):
        if size is not None or names is not None:
            raise ValueError("size and names must be left out for Examples, which have their own")
        return data
    if isinstance(data, (str, os.PathLike)):
        images, folders, known, files = read_folder(Path(data), size)
        labels, every = read_labels(folders, known if names is None else names)
        return Examples(images, labels, every, files)
    inputs, given, own = parts_of_data(data, size)
    labels, every = read_labels(given, own if names is None else names)
    found = _inputs(inputs, size)
    if len(found) != len(labels):
        raise ValueError(
            f"inputs and labels must have the same length, got {len(found)} and {len(labels)}"
        )
    return Examples(found, labels, every)


def read_given(
    data: Any, classes: int, names: Sequence[str] | None = None
) -> tuple[Array, tuple[str, ...]]:
    """Labels, and names of classes, of data or of labels alone, for a known number of classes.

    Numbers may then leave classes out: they are the numbers of the classes.

    >>> labels, names = read_given([0, 2, 2], 3)
    >>> labels.tolist(), names
    ([0, 2, 2], ('0', '1', '2'))
    """
    if isinstance(data, (Examples, str, os.PathLike)):
        found = read_examples(data, names=names)
        return found.labels, found.names
    given, own = (data, None) if is_labels(data) else parts_of_data(data, None)[1:]
    known = own if names is None else names
    if known is None and plain_labels(given).dtype.kind in NUMBERS:
        known = tuple(map(str, range(classes)))
    return read_labels(given, known)


def is_labels(data: Any) -> bool:
    """Whether data is labels alone, and no pair of two examples."""
    if isinstance(data, (list, tuple)):
        return all(isinstance(value, (str, Real)) or np.ndim(value) == 0 for value in data)
    return getattr(data, "ndim", None) == 1


def parts_of_data(data: Any, size: int | None) -> tuple[Any, Any, Sequence[str] | None]:
    """Inputs, labels, and the names of the classes if the data know them."""
    if isinstance(data, Split):
        return data.images, data.labels, None
    if isinstance(data, Dataset):
        names = data.class_names or tuple(map(str, range(data.classes)))
        return data.train.images, data.train.labels, names
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return data[0], data[1], None
    plain = isinstance(data, (tuple, list, dict, np.ndarray, Tensor)) or hasattr(data, "to_numpy")
    if isinstance(data, (IterableDataset, DataLoader)) or plain or not _has_items(data):
        raise ValueError(
            "data must be a pair (inputs, labels), a data set with a length and items, or the path "
            f"of a folder, got {type(data).__name__}"
        )
    return _gathered(data, size)


def _has_items(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _gathered(data: Any, size: int | None) -> tuple[Any, Any, Sequence[str] | None]:
    """All items of a torch data set; pictures are made small at once."""
    inputs, labels = [], []
    for position in range(len(data)):
        given, label = _pair(data[position], position)
        inputs.append(_small(given, size))
        labels.append(label)
    while isinstance(data, Subset):
        data = data.dataset
    names = getattr(data, "classes", None)
    known = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    return inputs, labels, names if known and names else None


def _pair(item: Any, position: int) -> tuple[Any, Any]:
    """The input and the label of one item."""
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    if not isinstance(item, Mapping):
        raise ValueError(
            "items of data must be pairs of an input and a label, or dicts with them, "
            f"got {type(item).__name__} at position {position}"
        )
    keys = [key for key in TARGET_KEYS if key in item]
    inputs = [value for key, value in item.items() if key not in keys and _is_input(value)]
    if len(keys) != 1 or len(inputs) != 1:
        raise ValueError(
            f"items of data that are dicts must have a label under one of {', '.join(TARGET_KEYS)} "
            f"and one input, got the keys {', '.join(map(str, item))} at position {position}"
        )
    return inputs[0], item[keys[0]]


def _is_input(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray, Real, list, tuple)) or is_picture(value)


class _Pixels(NamedTuple):
    """What is kept of a picture."""

    array: Array


def _small(value: Any, size: int | None) -> Any:
    return _Pixels(pixels_of(value, size)) if is_picture(value) else value


def _inputs(values: Any, size: int | None) -> Tensor:
    """Inputs as a tensor, pictures as squares."""
    if isinstance(values, (list, tuple)):
        values = [_small(value, size) for value in values]
        pictures = [value.array for value in values if isinstance(value, _Pixels)]
        if pictures and len(pictures) < len(values):
            raise ValueError(
                f"inputs must all be pictures, or none, got {len(pictures)} of {len(values)}"
            )
        if pictures:
            return squares(pictures, size)
    if size is not None:
        raise ValueError(
            f"size is for pictures and folders of images; other inputs have their size, got {size}"
        )
    return read_inputs(values)
