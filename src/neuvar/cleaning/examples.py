"""Read inputs and labels from arrays, tensors, data frames, datasets and image folders."""

from __future__ import annotations

import os
import warnings
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
from neuvar.cleaning.class_indices import NUMBERS, read_labels
from neuvar.cleaning.image_folder import is_pil_image, pixels_of, read_folder, squares
from neuvar.cleaning.posterior import Array
from neuvar.data import Dataset, Split

CHUNK = 4096
"""Examples that are processed at once."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and labels in memory.

    Attributes:
        inputs: uint8 images of shape (n, height, width) or (n, channels, height, width), int64
            rows of shape (n, m), or float32 features of shape (n, ...).
        labels: int64 class indices, shape (n,).
        names: name of each class.
        files: path of each image within its folder, with forward slashes; empty for other data.
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
            raise ValueError(f"labels must be int64 from 0 to {classes - 1}, the indices of names")
        image = self.inputs.dtype == torch.uint8 and self.inputs.ndim in (3, 4)
        tokens = self.inputs.dtype == torch.int64 and self.inputs.ndim == 2
        if not (image or tokens or self.inputs.dtype == torch.float32):
            raise ValueError(
                "inputs must be float32, int64 with 2 dimensions, or uint8 with 3 or 4, got "
                f"{self.inputs.dtype} of shape {tuple(self.inputs.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)


class Parts(NamedTuple):
    """Inputs and labels before their conversion, and class names and files, if any."""

    inputs: Any
    labels: Any
    names: Sequence[str] | None = None
    files: tuple[str, ...] = ()
    ready: bool = False  # whether inputs are already a tensor for Examples


class _Pixels(NamedTuple):
    """Pixels of a PIL image, which are scaled later, unlike arrays."""

    array: Array


def read_examples(
    data: Any, *, size: int | None = None, names: Sequence[str] | None = None
) -> Examples:
    """Load examples and their labels into memory.

    The classes are the given ``names``, or those of a dataset or folder that names its classes. By
    default they are the labels that occur, in sorted order: labels 0, 5 and 9 become three classes
    "0", "5" and "9". With ten ``names``, the same labels are three of ten classes.

    PIL images and images from a folder are rotated by their EXIF orientation and get a white
    background where transparent. They are scaled so that the longer side has ``size`` pixels, and
    centred in a black square. They are RGB unless all are gray. Gray images of more than 8 bits
    share one brightness range, with as many bits as the brightest pixel needs.

    Args:
        data: one of

            - a pair of inputs and labels: arrays, tensors, lists, pandas objects;
            - :class:`neuvar.data.Split`, or :class:`neuvar.data.Dataset` (its training split);
            - a map-style torch dataset whose items are pairs of an input and a label, or dicts
              with one input and a label under "labels", "label", "targets", "target" or "y";
              inputs may be PIL images;
            - the path of a folder with one subfolder of images per class;
            - :class:`Examples`, returned unchanged.
        size: height and width of PIL images and images of a folder. By default the longer side of
            the images if it is the same for all and at most 64, otherwise 64.
        names: name of each class, in the order of the model's outputs. Labels must then be these
            names or their indices.

    Returns:
        Images have channels first, and uint8 images stay uint8. Integers of shape (n, m) become
        int64, other numbers float32. Memory is shared with ``data`` where possible.

    >>> examples = read_examples(([[0.5, 1.0], [0.1, 2.0], [0.2, 0.0]], ["no", "yes", "no"]))
    >>> examples.inputs.shape, examples.labels.tolist(), examples.names
    (torch.Size([3, 2]), [0, 1, 0], ('no', 'yes'))
    """
    if size is not None:
        size = integer("size", size, low=1)
    parts = split_data(data, size=size, names=names)
    if isinstance(data, Examples):
        return data
    labels, names = read_labels(parts.labels, parts.names)
    return Examples(inputs_of(parts, size), labels, names, parts.files)


def split_data(data: Any, *, size: int | None = None, names: Sequence[str] | None = None) -> Parts:
    """Separate inputs from labels. Each item of a dataset is read once.

    For the arguments see :func:`read_examples`.
    """
    if isinstance(data, Examples):
        if size is not None or names is not None:
            raise ValueError("size and names must be left out for Examples, which have their own")
        return Parts(data.inputs, data.labels, data.names, data.files, ready=True)
    if isinstance(data, (str, os.PathLike)):
        inputs, labels, classes, files = read_folder(Path(data), size)
        return Parts(inputs, labels, classes if names is None else names, files, ready=True)
    if isinstance(data, Dataset):
        classes = data.class_names or tuple(map(str, range(data.classes)))
        names, data = classes if names is None else names, data.train
    if isinstance(data, Split):
        return Parts(data.images, data.labels, names)
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return Parts(data[0], data[1], names)
    plain = isinstance(data, (tuple, list, dict, np.ndarray, Tensor)) or hasattr(data, "to_numpy")
    has_items = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, (IterableDataset, DataLoader)) or plain or not has_items:
        raise ValueError(
            "data must be a pair (inputs, labels), a dataset with a length and items, or the path "
            f"of a folder, got {type(data).__name__}"
        )
    pairs = [_read_item(data[position], position, size) for position in range(len(data))]
    while isinstance(data, Subset):
        data = data.dataset
    own = getattr(data, "classes", None)
    if names is None and own and isinstance(own, (list, tuple)):
        names = own if all(isinstance(name, str) for name in own) else None
    return Parts([x for x, _ in pairs], [y for _, y in pairs], names)


def _read_item(item: Any, position: int, size: int | None) -> tuple[Any, Any]:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return _to_pixels(item[0], size), item[1]
    if not isinstance(item, Mapping):
        raise ValueError(
            "items of data must be pairs of an input and a label, or dicts with them, "
            f"got {type(item).__name__} at position {position}"
        )
    kinds = (Tensor, np.ndarray, Real, list, tuple)
    keys = [key for key in TARGET_KEYS if key in item]
    others = [value for key, value in item.items() if key not in keys]
    inputs = [value for value in others if isinstance(value, kinds) or is_pil_image(value)]
    if len(keys) != 1 or len(inputs) != 1:
        raise ValueError(
            f"items of data that are dicts must have a label under one of {', '.join(TARGET_KEYS)} "
            f"and one input, got the keys {', '.join(map(str, item))} at position {position}"
        )
    return _to_pixels(inputs[0], size), item[keys[0]]


def _to_pixels(value: Any, size: int | None) -> Any:
    return _Pixels(pixels_of(value, size)) if is_pil_image(value) else value


def inputs_of(parts: Parts, size: int | None = None) -> Tensor:
    """Inputs as a tensor; PIL images become squares of one size."""
    values = parts.inputs
    if parts.ready:
        ready: Tensor = values
        return ready
    if isinstance(values, (list, tuple)):
        values = [_to_pixels(value, size) for value in values]
        pixels = [value.array for value in values if isinstance(value, _Pixels)]
        if pixels and len(pixels) < len(values):
            raise ValueError(
                f"inputs must all be PIL images, or none, got {len(pixels)} of {len(values)}"
            )
        if pixels:
            return squares(pixels, size)
    if size is not None:
        raise ValueError(f"size is for PIL images and folders of images, got size={size}")
    return read_inputs(values)


def read_inputs(values: Any) -> Tensor:
    """Inputs as a tensor: uint8 for images, int64 for rows of integers, otherwise float32.

    Channels are moved to the front if they are last: 1, 3 or 4 of them, height and width above 4.
    RGBA images in uint8 get a white background. uint8 and bool rows become float32.

    >>> images = np.zeros((7, 32, 32, 4), dtype=np.uint8)
    >>> read_inputs(images).shape, read_inputs(images).unique()
    (torch.Size([7, 3, 32, 32]), tensor([255], dtype=torch.uint8))
    >>> read_inputs([[1, 2], [3, 4]]).dtype, read_inputs([[1, 2], [3, 4.5]]).dtype
    (torch.int64, torch.float32)
    """
    inputs = _to_tensor(values)
    shape = tuple(inputs.shape)
    if len(shape) < 2 or not inputs.numel():
        raise ValueError(f"inputs must have the shape (n, ...) and not be empty, got {shape}")
    if len(shape) == 2 and inputs.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        return inputs.to(torch.int64)
    if inputs.dtype != torch.uint8 or len(shape) not in (3, 4):
        inputs = inputs.to(torch.float32)
        finite = torch.cat([part.isfinite().flatten(1).all(1) for part in inputs.split(CHUNK)])
        if not finite.all():
            raise ValueError(
                f"inputs must be finite in float32, but {int((~finite).sum())} of {len(finite)} "
                f"examples are not, the first one at position {int(finite.int().argmin())}"
            )
    if has_channels_last(shape):
        inputs = inputs.movedim(3, 1)
        if shape[3] == 4 and inputs.dtype == torch.uint8:
            inputs = _on_white(inputs)
    return inputs.contiguous()


def has_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether images have the shape (n, height, width, channels)."""
    return len(shape) == 4 and shape[3] in (1, 3, 4) and min(shape[1:3]) > 4


def _on_white(images: Tensor) -> Tensor:
    out = images.new_empty((len(images), 3, *images.shape[2:]))
    for target, part in zip(out.split(CHUNK), images.split(CHUNK), strict=True):
        colours, alpha = part[:, :3].int(), part[:, 3:].int()
        target.copy_((colours * alpha + 255 * (255 - alpha) + 127) // 255)
    return out


def _to_tensor(values: Any) -> Tensor:
    if isinstance(values, (list, tuple)) and values and isinstance(values[0], Tensor):
        for position, value in enumerate(values):
            shape = tuple(getattr(value, "shape", ()))
            if not isinstance(value, Tensor) or shape != values[0].shape:
                raise ValueError(
                    f"inputs must all have one shape, got {tuple(values[0].shape)} at position 0 "
                    f"and {shape} at position {position}"
                )
        values = torch.stack(list(values))
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.is_complex():
            raise ValueError(
                "inputs must be a dense tensor of real numbers, got "
                f"{values.layout} of {values.dtype}"
            )
        return values.detach().cpu()
    array = _to_array(values)
    if array.dtype != np.uint8:
        rows = array.ndim == 2 and array.dtype.kind in "iu" and np.can_cast(array.dtype, np.int64)
        with np.errstate(over="ignore"):  # inf is refused later
            array = array.astype(np.int64 if rows else np.float32, copy=False)
    if isinstance(values, np.memmap) and array.flags.c_contiguous and not array.flags.writeable:
        with warnings.catch_warnings():
            # The file stays on disk. Nothing here writes to inputs.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(array)
    # torch shares memory with the array, and warns if the array is read-only.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _to_array(values: Any) -> Array:
    if isinstance(values, np.ma.MaskedArray) and np.ma.getmaskarray(values).any():
        raise ValueError("inputs must have no masked elements")
    kinds = [getattr(dtype, "kind", "O") for dtype in np.ravel(getattr(values, "dtypes", []))]
    try:
        if kinds and all(kind in NUMBERS for kind in kinds):
            # A data frame with columns of several types would become an array of objects.
            return np.asarray(values.to_numpy(dtype=np.float64, na_value=np.nan))
        array = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
    except ValueError:
        raise ValueError("inputs must all have one shape, but some differ") from None
    if array.dtype.kind not in NUMBERS:
        raise ValueError(f"inputs must be numbers, got values of type {array.dtype}")
    return array
