"""Image data sets in memory, verified by SHA-256, and batches of them."""

from typing import TYPE_CHECKING

from neuvar.lazy import attach as _attach

if TYPE_CHECKING:
    from neuvar.data.batches import Augmentation, Batches, Normalization, normalization
    from neuvar.data.dataset import Dataset, Split, mnist_excerpt
    from neuvar.data.errors import DataError
    from neuvar.data.loading import LOADERS, NAMES, cifar10, cifar100, fashion_mnist, load, mnist
else:
    __getattr__, __dir__ = _attach(
        __name__,
        {
            "LOADERS": "loading",
            "NAMES": "loading",
            "Augmentation": "batches",
            "Batches": "batches",
            "DataError": "errors",
            "Dataset": "dataset",
            "Normalization": "batches",
            "Split": "dataset",
            "cifar10": "loading",
            "cifar100": "loading",
            "fashion_mnist": "loading",
            "load": "loading",
            "mnist": "loading",
            "mnist_excerpt": "dataset",
            "normalization": "batches",
        },
    )

__all__ = [
    "LOADERS",
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
