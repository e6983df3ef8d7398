"""Image data sets as bytes in memory, checked to the bit, and batches of them."""

from neuvar.data.batches import Augmentation, Batches, Normalization, normalization
from neuvar.data.errors import DataError
from neuvar.data.loading import NAMES, cifar10, cifar100, fashion_mnist, load, mnist
from neuvar.data.sets import Dataset, Split, mnist_excerpt

__all__ = [
    "NAMES",
    "Augmentation",
    "Batches",
    "DataError",
    "Dataset",
    "Normalization",
    "Split",
    "cifar10",
    "cifar100",
    "fashion_mnist",
    "load",
    "mnist",
    "mnist_excerpt",
    "normalization",
]
