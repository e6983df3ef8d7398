"""Choose the MNIST excerpt that ships in the package from the four canonical idx files.

    python tools/make_mnist_excerpt.py FOLDER [--out src/neuvar/_mnist/excerpt.npz]

FOLDER holds the four files under their usual names, with or without `.gz`. Each is checked by the
SHA-256 of its uncompressed bytes. The same files give the same arrays with every numpy release.
"""

import argparse
import gzip
import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
SPLITS = {"train": ("train", 600), "test": ("t10k", 100)}  # name: (prefix of files, images a class)
SEED = 2021
OUT = Path(__file__).parents[1] / "src" / "neuvar" / "_mnist" / "excerpt.npz"


def read_verified(folder: Path, name: str) -> bytes:
    """Return the uncompressed bytes of one idx file, or exit with a sentence."""
    plain, zipped = folder / name, folder / f"{name}.gz"
    if plain.exists():
        content = plain.read_bytes()
    elif zipped.exists():
        content = gzip.decompress(zipped.read_bytes())
    else:
        raise SystemExit(f"{folder} has neither {name} nor {name}.gz")
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise SystemExit(f"{name} is not the canonical file: its SHA-256 is {found}")
    return content


def choose(labels: NDArray[np.uint8], per_class: int) -> NDArray[np.int32]:
    """Draw `per_class` indices of every class, in the order of the official split."""
    # RandomState, because numpy promises never to change its streams; Generator's may change.
    rng = np.random.RandomState(SEED)
    drawn = [rng.permutation(np.flatnonzero(labels == c))[:per_class] for c in range(10)]
    return np.sort(np.concatenate(drawn)).astype(np.int32)


def excerpt(folder: Path) -> dict[str, NDArray[np.generic]]:
    """Return the arrays of the excerpt by the names they have in the file."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for split, (prefix, per_class) in SPLITS.items():
        images = read_verified(folder, f"{prefix}-images-idx3-ubyte")[16:]
        labels = np.frombuffer(read_verified(folder, f"{prefix}-labels-idx1-ubyte")[8:], np.uint8)
        index = choose(labels, per_class)
        arrays[f"{split}_images"] = np.frombuffer(images, np.uint8).reshape(-1, 28, 28)[index]
        arrays[f"{split}_labels"] = labels[index]
        arrays[f"{split}_index"] = index
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the four idx files are")
    parser.add_argument("--out", type=Path, default=OUT, help="the npz file to write")
    arguments = parser.parse_args()
    arrays = excerpt(arguments.folder)
    np.savez_compressed(arguments.out, allow_pickle=False, **arrays)
    for name, array in arrays.items():
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        print(f"{name:13} {array.dtype!s:6} {array.shape!s:14} {digest}")
    print(f"{arguments.out.stat().st_size:,} bytes in {arguments.out.name}")


if __name__ == "__main__":
    main()
