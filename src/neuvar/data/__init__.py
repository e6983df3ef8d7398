"""Image datasets in memory, verified by SHA-256, and batches of them."""

from typing import TYPE_CHECKING

from neuvar.lazy import attach as _attach

if TYPE_CHECKING:
    from neuvar.data.batches import Augmentation, Batches, Normalization, normalization
    from neuvar.data.catalogue import DataError
    from neuvar.data.dataset import Dataset, Split, mnist_excerpt
    from neuvar.data.loading import LOADERS, NAMES, load
else:
    __getattr__, __dir__ = _attach(
        __name__,
        batches="Augmentation Batches Normalization normalization",
        catalogue="DataError",
        dataset="Dataset Split mnist_excerpt",
        loading="LOADERS NAMES load",
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
    "load",
    "mnist_excerpt",
    "normalization",
]
