"""Image data sets as bytes in memory, checked to the bit, and batches of them."""

from typing import TYPE_CHECKING

from neuvar.lazy import attach as _attach

if TYPE_CHECKING:
    from neuvar.data.batches import Augmentation, Batches, Normalization, normalization
    from neuvar.data.errors import DataError
    from neuvar.data.loading import NAMES, cifar10, cifar100, fashion_mnist, load, mnist
    from neuvar.data.sets import Dataset, Split, mnist_excerpt
else:
    __getattr__, __dir__ = _attach(
        __name__,
        {
            "NAMES": "loading",
            "Augmentation": "batches",
            "Batches": "batches",
            "DataError": "errors",
            "Dataset": "sets",
            "Normalization": "batches",
            "Split": "sets",
            "cifar10": "loading",
            "cifar100": "loading",
            "fashion_mnist": "loading",
            "load": "loading",
            "mnist": "loading",
            "mnist_excerpt": "sets",
            "normalization": "batches",
        },
    )

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
