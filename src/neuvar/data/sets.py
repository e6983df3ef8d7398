"""What a data set is once it is in memory."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Split:
    """Images with their labels: one part of a data set.

    Attributes:
        images: uint8 in [0, 255], shape (n, height, width) or (n, channels, height, width).
        labels: int64 class numbers from 0, shape (n,).
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(
                f"images and labels must have the same length, "
                f"got {len(self.images)} and {len(self.labels)}"
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in its official division and order.

    Attributes:
        name: How the data set is called in results.
        classes: How many classes there are.
        train: What may be learned from.
        test: What is only measured on.
        class_names: The name of each class, by its number.
        superclass: The superclass of each class as int64, shape (classes,), for a data set with
            two levels of classes (CIFAR-100 with fine labels); None for the others.
        superclass_names: The name of each superclass, by its number; empty without them.
    """

    name: str
    classes: int
    train: Split
    test: Split
    class_names: tuple[str, ...] = ()
    superclass: Tensor | None = None
    superclass_names: tuple[str, ...] = ()


def mnist_excerpt() -> Dataset:
    """Load the part of MNIST that ships with the package; needs no network.

    6,000 images of the official training split and 1,000 of the official test split, as many of
    each digit, chosen by a fixed seed, in official order. They are under CC BY-SA 3.0.

    References:
        LeCun, Cortes, Burges: The MNIST database of handwritten digits.

    Returns:
        The excerpt with fresh tensors, which the caller may change.

    Examples:
        >>> data = mnist_excerpt()
        >>> data.train.images.shape, data.train.images.dtype
        (torch.Size([6000, 28, 28]), torch.uint8)
        >>> data.test.labels.bincount()
        tensor([100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    """
    packed = files("neuvar").joinpath("_mnist", "excerpt.npz")
    with as_file(packed) as path, np.load(path, allow_pickle=False) as arrays:
        train, test = (
            Split(
                torch.from_numpy(arrays[f"{split}_images"]),
                torch.from_numpy(arrays[f"{split}_labels"].astype(np.int64)),
            )
            for split in ("train", "test")
        )
    return Dataset("mnist-excerpt", 10, train, test, tuple("0123456789"))
