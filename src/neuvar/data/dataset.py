"""Datasets in memory: images and labels of a training and a test split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Split:
    """Images and labels of one split of a dataset.

    Attributes:
        images: uint8, shape (n, height, width) or (n, channels, height, width).
        labels: int64, shape (n,).
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, Tensor):
                hint = "; use its .noisy" if hasattr(value, "noisy") else ""
                raise ValueError(f"{name} must be a tensor, got {type(value).__name__}{hint}")
        if len(self.images) != len(self.labels):
            lengths = f"{len(self.images)} and {len(self.labels)}"
            raise ValueError(f"images and labels must have the same length, got {lengths}")

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset with its official splits, in official order.

    Attributes:
        name: such as "mnist".
        classes: number of classes.
        train: training split.
        test: test split.
        class_names: name of each class.
        superclass: superclass of each class as int64, shape (classes,), for CIFAR-100 with fine
            labels; None for other datasets.
        superclass_names: name of each superclass; empty if there are none.
    """

    name: str
    classes: int
    train: Split
    test: Split
    class_names: tuple[str, ...] = ()
    superclass: Tensor | None = None
    superclass_names: tuple[str, ...] = ()


def splits(arrays: Mapping[str, NDArray[Any]], labels: str = "labels") -> tuple[Split, Split]:
    """Training and test split from arrays named train_images, train_labels, ..."""
    images = [torch.from_numpy(arrays[f"{split}_images"]) for split in ("train", "test")]
    classes = [torch.from_numpy(arrays[f"{s}_{labels}"]).long() for s in ("train", "test")]
    return Split(images[0], classes[0]), Split(images[1], classes[1])


def mnist_excerpt() -> Dataset:
    """Load the part of MNIST that ships with the package; needs no network.

    6,000 images of the official training split and 1,000 of the official test split, the same
    number of each digit, chosen by a fixed seed, in official order. They are under CC BY-SA 3.0.
    The tensors are new at each call, so the caller may change them.

    References:
        LeCun, Cortes, Burges: The MNIST database of handwritten digits.

    Examples:
        >>> data = mnist_excerpt()
        >>> data.train.images.shape, data.train.images.dtype
        (torch.Size([6000, 28, 28]), torch.uint8)
        >>> data.test.labels.bincount()
        tensor([100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    """
    packed = files("neuvar").joinpath("_mnist", "excerpt.npz")
    with as_file(packed) as path, np.load(path, allow_pickle=False) as arrays:
        return Dataset("mnist-excerpt", 10, *splits(arrays), tuple("0123456789"))
