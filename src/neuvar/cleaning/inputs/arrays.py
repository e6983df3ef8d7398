"""Inputs of any kind as a tensor: bytes for images, int64 for rows of whole numbers, or float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar.cleaning.inputs.labels import NUMBERS
from neuvar.cleaning.issues import Array

WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)
AT_ONCE = 4096
"""Images whose transparency is resolved at once."""


def read_inputs(values: Any) -> Tensor:
    """Inputs as a tensor of shape (n, ...): uint8 images stay so, other numbers become float32.

    Images are of shape (n, height, width) or (n, channels, height, width). Images of shape
    (n, height, width, channels) with 1, 3 or 4 channels, and more than four pixels in height and
    width, are brought into this order; transparent ones of bytes are put on white.

    Rows of whole numbers, shape (n, m), become int64: they may be words of a language. Bytes and
    truth values in rows become float32.

    >>> images = np.zeros((7, 32, 32, 4), dtype=np.uint8)
    >>> read_inputs(images).shape, read_inputs(images).unique()
    (torch.Size([7, 3, 32, 32]), tensor([255], dtype=torch.uint8))
    >>> read_inputs([[1, 2], [3, 4]]).dtype, read_inputs([[1, 2], [3, 4.5]]).dtype
    (torch.int64, torch.float32)
    """
    found = _tensor(values)
    shape = tuple(found.shape)
    if len(shape) < 2 or not found.numel():
        raise ValueError(f"inputs must have the shape (n, ...) and not be empty, got {shape}")
    if len(shape) == 2 and found.dtype in WHOLE:
        return found.to(torch.int64)
    if found.dtype != torch.uint8 or len(shape) not in (3, 4):
        found = _finite(found.to(torch.float32))
    if has_channels_last(shape):
        found = _channels_first(found)
    return found.contiguous()


def has_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether these are images of shape (n, height, width, channels)."""
    return len(shape) == 4 and shape[3] in (1, 3, 4) and min(shape[1:3]) > 4


def _tensor(values: Any) -> Tensor:
    if isinstance(values, (list, tuple)) and values and isinstance(values[0], Tensor):
        values = _stacked(values)
    if not isinstance(values, Tensor):
        return _from_array(_array(values))
    if values.layout != torch.strided or values.is_complex():
        raise ValueError(
            f"inputs must be a dense tensor of real numbers, got {values.layout} of {values.dtype}"
        )
    return values.detach().cpu()


def _stacked(values: Sequence[Any]) -> Tensor:
    for position, value in enumerate(values):
        shape = tuple(getattr(value, "shape", ()))
        if not isinstance(value, Tensor) or shape != values[0].shape:
            raise ValueError(
                f"inputs must all have one shape, got {tuple(values[0].shape)} at position 0 and "
                f"{shape} at position {position}"
            )
    return torch.stack(list(values))


def _array(values: Any) -> Array:
    """Numbers as a numpy array."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.getmaskarray(values).any():
        raise ValueError("inputs must have no masked elements")
    kinds = [getattr(kind, "kind", "O") for kind in np.ravel(getattr(values, "dtypes", []))]
    try:
        if kinds and all(kind in NUMBERS for kind in kinds):
            # Columns of several kinds would make an array of objects; what is missing becomes nan.
            return np.asarray(values.to_numpy(dtype=np.float64, na_value=np.nan))
        found = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
    except ValueError:
        raise ValueError("inputs must all have one shape, those of some differ") from None
    if found.dtype.kind not in NUMBERS:
        raise ValueError(f"inputs must be numbers, got values of type {found.dtype}")
    return found


def _from_array(found: Array) -> Tensor:
    if found.ndim == 2 and found.dtype.kind in "iu" and np.can_cast(found.dtype, np.int64):
        found = found if found.dtype == np.uint8 else found.astype(np.int64, copy=False)
    elif found.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what is too large becomes inf, which is refused
            found = found.astype(np.float32, copy=False)
    # torch shares memory with the array, and wants to be allowed to write to it.
    return torch.from_numpy(np.require(found, requirements=["C", "W"]))


def _finite(inputs: Tensor) -> Tensor:
    good = inputs.isfinite().flatten(1).all(1)
    if not good.all():
        raise ValueError(
            f"inputs must be finite in float32, those of {int((~good).sum())} of {len(good)} "
            f"examples are not, the first one at position {int(good.int().argmin())}"
        )
    return inputs


def _channels_first(images: Tensor) -> Tensor:
    """Move channels, and put transparent images on white."""
    images = images.movedim(3, 1)
    if images.shape[1] != 4 or images.dtype != torch.uint8:
        return images
    out = images.new_empty((len(images), 3, *images.shape[2:]))
    for target, part in zip(out.split(AT_ONCE), images.split(AT_ONCE), strict=True):
        colours, alpha = part[:, :3].int(), part[:, 3:].int()
        target.copy_((colours * alpha + 255 * (255 - alpha) + 127) // 255)
    return out
